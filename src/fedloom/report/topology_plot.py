"""Pictures of a network without a server: its nodes and links in some rounds, and statistics.

A film strip shows a few rounds side by side over the curves of all; an animation (.gif) shows
every round. Another strip shows the steps of one round: who has whose model after each, where nodes
pass on what they hear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import FedloomError
from fedloom.report.plots import COLOURS, check_picture, new_figure, save
from fedloom.streams import streams_of
from fedloom.topology.relay import spreading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    from fedloom.topology import Contacts, Network
    from fedloom.topology.report import ContactReport

FRAMES = 6  # of a film strip
_NUMBERED = 16  # nodes of a strip that have their numbers beside them
PACE = 4  # rounds a second of an animation


def check_film(file: Path) -> None:
    """Refuse a file that neither a picture nor an animation can be written to."""
    if file.suffix == ".gif" and not file.is_dir():
        return
    try:
        check_picture(file)
    except FedloomError as e:
        raise FedloomError(f"{e} An animation ends in .gif.") from None


def save_film(report: ContactReport, network: Network, seed: int, title: str, file: Path) -> None:
    """Write the film strip, or for a .gif the animation."""
    if file.suffix != ".gif":
        save(film_strip(report, network, seed, title), file)
        return
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(5, 5.2)
    FigureCanvasAgg(figure)
    axis = figure.subplots()

    def draw(frame: int) -> Sequence[Axes]:
        axis.clear()
        _frame(axis, report, network, seed, frame + 1)
        figure.suptitle(title, fontsize=10)
        return ()

    film = FuncAnimation(figure, draw, frames=len(report.rounds))
    file.parent.mkdir(parents=True, exist_ok=True)
    film.save(str(file), writer=PillowWriter(fps=PACE), dpi=80)


def film_strip(
    report: ContactReport,
    network: Network,
    seed: int,
    title: str,
    chosen: Mapping[int, Sequence[int]] | None = None,
) -> Figure:
    """Some rounds from the first to the last, and below them degree and isolated nodes of all.
    `chosen` are nodes with a ring around them, by round."""
    rounds = len(report.rounds)
    shown = np.unique(np.linspace(1, rounds, min(FRAMES, rounds)).astype(int))
    figure = new_figure(max(2.6 * len(shown), 6), 5.4)
    parts = figure.subfigures(2, 1, height_ratios=(3, 2), squeeze=False)[:, 0]
    axes = parts[0].subplots(1, len(shown), squeeze=False)[0]
    for axis, t in zip(axes, shown, strict=True):
        _frame(axis, report, network, seed, int(t), (chosen or {}).get(int(t), ()))
    left, right = parts[1].subplots(1, 2)
    table = report.table
    left.plot(table["round"], table["degree"], color=COLOURS[0], label="mean degree")
    left.set(xlabel="round", ylabel="nodes met in a round")
    share = left.twinx()
    share.plot(table["round"], 100 * table["isolated"], color=COLOURS[1], ls="--")
    share.set_ylabel("isolated nodes (%)", color=COLOURS[1])
    share.set_ylim(0, 100)
    left.set_ylim(bottom=0)
    left.yaxis.label.set_color(COLOURS[0])
    _gaps(right, report.gaps)
    figure.suptitle(title)
    return figure


def spread_strip(report: ContactReport, network: Network, seed: int, t: int, title: str) -> Figure:
    """How models spread within a round: after some steps, where nodes are, whom they just met and
    how many models they have; whose these are; and their number after every step."""
    contacts = report.rounds[t - 1]
    there = contacts.participants if contacts.present is None else contacts.present
    if not len(there):
        raise FedloomError(f"No node is up in round {t}. Give another --round, or other --faults.")
    steps, has = zip(*((step, table.copy()) for step, table in spreading(contacts)), strict=True)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(FRAMES, len(steps))).astype(int))
    figure = new_figure(max(2.4 * len(shown) + 0.6, 6), 7.6)
    parts = figure.subfigures(2, 1, height_ratios=(5, 2), squeeze=False)[:, 0]
    axes = parts[0].subplots(2, len(shown), squeeze=False)
    order = _by_neighbourhood(contacts, there)
    for (above, below), i in zip(axes.T, shown, strict=True):
        share = has[i].sum(axis=1) / max(len(there), 1)
        places = network.places_at(t, steps[i], report.nodes, streams_of(seed, t))
        met = contacts.meetings[contacts.meetings[:, 0] == steps[i], 1:]  # type: ignore[index]
        dots = _step(above, network, places, there, share, met)
        meetings = "1 meeting" if len(met) == 1 else f"{len(met)} meetings"
        above.set_title(f"step {steps[i]}: {meetings}" if steps[i] else "before", fontsize=9)
        below.imshow(has[i][np.ix_(order, order)], cmap="Blues", vmin=0, vmax=1.3, aspect="equal",
                     interpolation="nearest")  # fmt: skip
        below.set(xticks=[], yticks=[])
        if len(there) <= _NUMBERED:
            at, names = range(len(there)), there[order]
            below.set_xticks(at, names, fontsize=6)
            below.set_yticks(at, names, fontsize=6)
            for node in there:
                above.annotate(str(node), places[node], xytext=(3, 3), fontsize=7,
                               textcoords="offset points")  # fmt: skip
        below.set_xlabel(f"{100 * has[i].mean():.0f} % of all pairs", fontsize=8)
    axes[1, 0].set_ylabel("node (neighbours together)\nhas the model of", fontsize=8)
    parts[0].colorbar(dots, ax=axes[0].tolist(), label="share of all models", shrink=0.9, pad=0.01)
    _counts(parts[1].subplots(), steps, [table.sum(axis=1) for table in has])
    here = "" if len(there) == report.nodes else f" ({len(there)} of {report.nodes} nodes there)"
    figure.suptitle(f"{title}, round {t}{here}: who has whose model, where all is passed on")
    return figure


def _by_neighbourhood(contacts: Contacts, there: np.ndarray) -> np.ndarray:
    """An order of the nodes in which those that meet stand near each other."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    assert contacts.edges is not None
    a, b = np.searchsorted(there, contacts.edges).T
    ends = np.concatenate([a, b]), np.concatenate([b, a])
    links = coo_array((np.ones(2 * len(a)), ends), shape=(len(there), len(there)))
    return reverse_cuthill_mckee(links.tocsr(), symmetric_mode=True)


def _step(
    axis: Axes, network: Network, places: np.ndarray, there: np.ndarray, share: np.ndarray,
    met: np.ndarray,
) -> PathCollection:  # fmt: skip
    """Nodes at a step, by how many models they have, with those that meet linked."""
    from matplotlib.collections import LineCollection

    strength = float(np.clip(40 / max(len(met), 1), 0.15, 0.8))
    lines = LineCollection(list(places[met]), colors="#999999", linewidths=0.8, alpha=strength)
    axis.add_collection(lines)
    x, y = places[there].T
    size = float(np.clip(1200 / max(len(places), 1), 4, 36))
    dots = axis.scatter(x, y, s=size, c=share, cmap="viridis_r", vmin=0, vmax=1, zorder=2)
    _bounded(axis, network)
    return dots


def _counts(axis: Axes, steps: Sequence[int], counts: Sequence[np.ndarray]) -> None:
    """How many models nodes have after each step: the mean, the middle half, the extremes."""
    from matplotlib.ticker import MaxNLocator

    table = np.stack(counts)
    low, first, third, high = (np.quantile(table, q, axis=1) for q in (0, 0.25, 0.75, 1))
    axis.fill_between(steps, low, high, color=COLOURS[0], alpha=0.15, lw=0, label="all nodes")
    axis.fill_between(steps, first, third, color=COLOURS[0], alpha=0.3, lw=0, label="middle half")
    axis.plot(steps, table.mean(axis=1), color=COLOURS[0], marker="o", ms=3, label="mean")
    axis.axhline(table.shape[1], color="#999999", lw=0.8, ls=":")
    axis.set(xlabel="step", ylabel="models that a node has", ylim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(fontsize=8, loc="upper left")
    axis.grid(alpha=0.3)


def _bounded(axis: Axes, network: Network) -> None:
    low, high = network.frame
    edge = 0.03 * (high - low)
    axis.set(xlim=(low - edge, high + edge), ylim=(low - edge, high + edge), aspect="equal")
    axis.set(xticks=[], yticks=[])


def _frame(
    axis: Axes, report: ContactReport, network: Network, seed: int, t: int,
    chosen: Sequence[int] = (),
) -> None:  # fmt: skip
    """The nodes where they are at the end of a round, with the links that it had."""
    from matplotlib.collections import LineCollection

    contacts = report.rounds[t - 1]
    places = network.positions(t, report.nodes, streams_of(seed, t))
    edges = np.empty((0, 2), dtype=np.int64) if contacts.edges is None else contacts.edges
    strength = float(np.clip(40 / max(len(edges), 1), 0.08, 0.8))
    lines = LineCollection(list(places[edges]), colors=COLOURS[0], linewidths=0.8, alpha=strength)
    axis.add_collection(lines)
    met = np.zeros(report.nodes, dtype=bool)
    met[edges.ravel()] = True
    up = np.zeros(report.nodes, dtype=bool)
    up[contacts.participants if contacts.present is None else contacts.present] = True
    size = float(np.clip(900 / report.nodes, 2, 30))
    for which, colour, marker in ((met, COLOURS[0], "o"), (up & ~met, COLOURS[1], "o"),
                                  (~up, "#999999", "x")):  # fmt: skip
        x, y = places[which].T
        axis.scatter(x, y, s=size, color=colour, marker=marker, zorder=2)
    if len(chosen):
        x, y = places[list(chosen)].T
        axis.scatter(x, y, s=4 * size, facecolors="none", edgecolors=COLOURS[1], zorder=3)
    _bounded(axis, network)
    axis.set_title(f"round {t}: {len(edges)} contacts", fontsize=9)


def _gaps(axis: Axes, gaps: np.ndarray) -> None:
    """How many rounds pass until two that met meet again."""
    axis.set(xlabel="rounds until two meet again", ylabel="share of pairs longer apart")
    if not len(gaps):
        axis.text(0.5, 0.5, "no pair met, parted and met again", ha="center", va="center",
                  transform=axis.transAxes, fontsize=9)  # fmt: skip
        return
    ordered = np.sort(gaps)
    longer = 1 - np.arange(1, len(ordered) + 1) / len(ordered)
    axis.step(ordered, longer, where="post", color=COLOURS[0])
    axis.set(ylim=(0, 1))
    axis.grid(alpha=0.3)
