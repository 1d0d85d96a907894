"""Pictures of swapped models: how similar clients' models were over the rounds, and who swapped.

Clients stand in the order of their main class, so that label skew shows as blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedloom.errors import FedloomError
from fedloom.report.plots import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_MAPS = 4  # rounds shown as heat maps
MOST_NAMES = 40  # clients that can be named at an axis


def plot_swaps(
    swaps: pd.DataFrame,
    similarities: Mapping[int, pd.DataFrame],
    main_class: pd.Series,
    classes: Sequence[str],
    title: str,
    client_names: Sequence[str] = (),
) -> Figure:
    """Heat maps of similarity (where it was measured) above, then who swapped with whom, and how
    alike swapped, akin and all models were over the rounds.

    `swaps` has a row for each exchange (round, client, partner, similarity); `main_class` the
    number of a class for each client. A few clients with names stand under these.
    """
    if swaps.empty:
        raise FedloomError("No models were swapped in this run, so there is nothing to plot.")
    clients = np.union1d(swaps["client"], swaps["partner"])
    for matrix in similarities.values():
        clients = np.union1d(clients, matrix.index)
    main = main_class.reindex(clients).fillna(len(classes)).astype(int).sort_values(kind="stable")
    shown = _spread(sorted(similarities))
    figure = new_figure(max(3.2 * len(shown), 9.5), 7.6 if shown else 4.4)
    if shown:
        halves = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.2))[:, 0]
        _maps(halves[0].subplots(1, len(shown), squeeze=False)[0], shown, similarities, main)
        left, right = halves[1].subplots(1, 2)
    else:
        left, right = figure.subplots(1, 2)
    _who(left, swaps, main, classes)
    if client_names and len(main) <= MOST_NAMES:
        names = [client_names[client] for client in main.index]
        left.set_yticks(range(len(names)), names, fontsize=7)
        left.set_ylabel("clients")
    if shown:
        _over_rounds(right, swaps, similarities, main)
    else:
        _within_classes(right, swaps, main)
    figure.suptitle(title)
    return figure


def _spread(rounds: list[int]) -> list[int]:
    """A few of the rounds, the first and the last among them."""
    if not rounds:
        return []
    at = np.linspace(0, len(rounds) - 1, min(len(rounds), MOST_MAPS)).round().astype(int)
    return [rounds[i] for i in np.unique(at)]


def _maps(
    axes: Sequence[Axes],
    rounds: list[int],
    similarities: Mapping[int, pd.DataFrame],
    main: pd.Series,
) -> None:
    matrices = [similarities[t].reindex(index=main.index, columns=main.index) for t in rounds]
    known = np.concatenate([m.to_numpy()[m.notna().to_numpy()] for m in matrices])
    low, high = np.quantile(known, [0.01, 0.99]) if len(known) else (0.0, 1.0)
    for axis, t, matrix in zip(axes, rounds, matrices, strict=True):
        image = axis.imshow(matrix, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
        axis.set_title(f"round {t}", fontsize=10)
        _class_lines(axis, main, colour="white")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("clients by main class")
    axes[0].figure.colorbar(image, ax=list(axes), shrink=0.8, label="similarity")


def _who(axis: Axes, swaps: pd.DataFrame, main: pd.Series, classes: Sequence[str]) -> None:
    place = {client: i for i, client in enumerate(main.index)}
    counts = np.zeros((len(main), len(main)), dtype=int)
    for a, b in zip(swaps["client"].map(place), swaps["partner"].map(place), strict=True):
        if a != b:
            counts[a, b] += 1
            counts[b, a] += 1
    image = axis.imshow(counts, cmap="YlGnBu", interpolation="nearest")
    _class_lines(axis, main, colour="#999999")
    labels = main.to_numpy()
    present = np.unique(labels)
    middles = [np.flatnonzero(labels == label).mean() for label in present]
    names = [classes[label] if label < len(classes) else "?" for label in present]
    slanted = max(map(len, names)) > 3
    turn, side = (60, "right") if slanted else (0, "center")
    axis.set_xticks(middles, names, rotation=turn, ha=side, fontsize=8)
    axis.set_yticks(middles, names, fontsize=8)
    axis.set_title("who swapped with whom", fontsize=10)
    axis.set(xlabel="clients by main class")
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(integer=True)
    axis.figure.colorbar(image, ax=axis, shrink=0.8, label="times", ticks=ticks)


def _class_lines(axis: Axes, main: pd.Series, colour: str) -> None:
    """Lines between clients of different main classes."""
    for at in np.flatnonzero(np.diff(main.to_numpy())):
        axis.axhline(at + 0.5, color=colour, lw=0.6)
        axis.axvline(at + 0.5, color=colour, lw=0.6)


def _over_rounds(
    axis: Axes, swaps: pd.DataFrame, similarities: Mapping[int, pd.DataFrame], main: pd.Series
) -> None:
    rounds = sorted(similarities)
    every, akin = [], []
    for t in rounds:
        values = similarities[t].to_numpy()
        labels = main.loc[similarities[t].index].to_numpy()
        same = values[(labels[:, None] == labels[None, :]) & ~np.isnan(values)]
        every.append(np.nanmean(values))
        akin.append(same.mean() if len(same) else np.nan)
    swapped = swaps.groupby("round")["similarity"].mean().reindex(rounds)
    lines = {"all pairs": every, "same main class": akin, "swapped pairs": swapped.tolist()}
    for (label, line), colour in zip(lines.items(), COLOURS, strict=False):
        if np.isnan(line).all():  # no two have the same main class
            continue
        axis.plot(rounds, line, marker=".", color=colour, label=label)
    axis.set(ylabel="mean similarity")
    axis.legend(fontsize=8)
    _round_axis(axis)


def _within_classes(axis: Axes, swaps: pd.DataFrame, main: pd.Series) -> None:
    """Where nothing was compared: the share of swaps between clients of one main class."""
    same = main.loc[swaps["client"]].to_numpy() == main.loc[swaps["partner"]].to_numpy()
    share = pd.Series(same, index=swaps["round"].to_numpy()).groupby(level=0).mean()
    axis.plot(share.index, 100 * share, marker=".", color=COLOURS[0])
    axis.set(ylabel="swaps within a main class (%)", ylim=(-3, 103))
    _round_axis(axis)


def _round_axis(axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set(xlabel="round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
