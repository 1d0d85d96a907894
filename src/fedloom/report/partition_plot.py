"""A picture of a partition: how many samples of which class every client holds.

A few dozen clients and classes are bars, one for each client. More are a heat map of label shares,
sorted so that similar clients are adjacent, beside a histogram of the clients' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedloom.report.plots import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedloom.data.partition import Partition

MOST_BARS = 60  # clients that can be told apart as bars
MOST_NAMES = 20  # classes that can be told apart by colour and named
MOST_ROWS = 400  # lines of a heat map; more clients are averaged in groups


def plot_partition(
    partition: Partition, y: np.ndarray, classes: Sequence[str], title: str
) -> Figure:
    """Clients and the classes they hold, as a figure to be saved or shown."""
    figure = plot_counts(partition.label_counts(y, len(classes)), classes, partition.names)
    figure.suptitle(title)
    return figure


def plot_counts(counts: np.ndarray, classes: Sequence[str], names: Sequence[str] = ()) -> Figure:
    """The same from counts, clients × classes."""
    if len(counts) <= MOST_BARS and len(classes) <= MOST_NAMES:
        figure = new_figure(8.5, min(3 + 0.14 * len(counts), 11))
        _bars(figure.subplots(), counts, classes, names)
    else:
        figure = new_figure(10.5, 5.5)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _heat_map(left, counts, classes)
        _histogram(right, counts.sum(axis=1))
    return figure


def _bars(
    axis: Axes, counts: np.ndarray, classes: Sequence[str], names: Sequence[str] = ()
) -> None:
    """One bar for every client, a coloured piece for every class."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colours = colormaps["tab10" if len(classes) <= 10 else "tab20"](np.arange(len(classes)))
    starts = np.cumsum(counts, axis=1) - counts
    clients = np.arange(len(counts))
    for label in range(len(classes)):
        axis.barh(clients, counts[:, label], 0.85, starts[:, label], color=colours[label])
    axis.set(xlabel="samples", ylabel="client", ylim=(len(counts) - 0.4, -0.6))
    if names:
        axis.set_yticks(clients, names, fontsize=8)
    else:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(
        axis.containers,
        classes,
        title="class",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )


def _heat_map(axis: Axes, counts: np.ndarray, classes: Sequence[str]) -> None:
    """The share of every class in every client's data, clients of the same classes together."""
    from matplotlib.colors import PowerNorm

    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ranking = np.argsort(-shares, axis=1, kind="stable")
    order = np.lexsort((-shares.max(axis=1), ranking[:, min(1, len(classes) - 1)], ranking[:, 0]))
    groups = np.array_split(order, min(len(order), MOST_ROWS))
    image = axis.imshow(
        np.stack([shares[group].mean(axis=0) for group in groups]),
        aspect="auto",
        interpolation="nearest",
        cmap="YlGnBu",
        norm=PowerNorm(0.5, 0, 1),  # small shares stay visible
        extent=(-0.5, len(classes) - 0.5, len(order), 0),
    )
    axis.set(xlabel="class", ylabel="clients, sorted by their main classes")
    if len(classes) <= MOST_NAMES:
        slanted = max(map(len, classes)) > 3
        axis.set_xticks(
            range(len(classes)),
            classes,
            rotation=40 if slanted else 0,
            ha="right" if slanted else "center",
        )
    axis.figure.colorbar(image, ax=axis, label="share of the client's samples")


def _histogram(axis: Axes, sizes: np.ndarray) -> None:
    """How many clients have how many samples, on a log scale where sizes differ greatly."""
    from matplotlib.ticker import MaxNLocator

    low, high = int(sizes.min()), int(sizes.max())
    bars = min(high - low + 1, 8 + int(np.sqrt(len(sizes))), 40)
    if high > 50 * max(low, 1):
        bins = np.geomspace(max(low, 1), high + 1, bars + 1)
        axis.set_xscale("log")
    else:
        bins = np.linspace(low - 0.5, high + 0.5, bars + 1)
    axis.hist(sizes, bins=bins.tolist(), color=COLOURS[0])
    axis.axvline(float(sizes.mean()), color=COLOURS[1])
    axis.set_title(f"{low} to {high}, mean {sizes.mean():.4g}", fontsize=10, color=COLOURS[1])
    axis.set(xlabel="samples of a client", ylabel="clients")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
