"""Figures: how a run went, and how several compare. Built without pyplot's global state."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedloom.errors import FedloomError
from fedloom.report.looks import COLOURS, look
from fedloom.tasks import Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACCURACY = Measure("accuracy")
_PANEL = 2.2  # inches, below which a panel is too narrow
_MANY = 6  # curves, beyond which a single panel is drawn wider

#: what is not an accuracy, and so not in %
PLAIN = {
    "test_loss": "loss",
    "age": "rounds",
    "dominating": "nodes",
    "known": "nodes",
    "similarity": "cosine similarity",
    "divergence": "‖w_k − w̄‖",
}


@functools.cache
def _shown() -> type[Figure]:
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows as it is, without pyplot or a magic word."""

        def _repr_png_(self) -> bytes:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            picture = io.BytesIO()
            FigureCanvasAgg(self).print_png(picture)
            return picture.getvalue()

    return Shown


def new_figure(width: float, height: float) -> Figure:
    return _shown()(figsize=(width, height), layout="constrained")


def check_picture(file: Path) -> None:
    """Refuse a file that no picture can be written to, before the work for it begins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if file.suffix[1:] not in formats or file.is_dir():
        raise FedloomError(
            f"The picture can't be written to '{file}': give a file that ends in .png, .pdf or "
            f"another of {', '.join(formats)}."
        )


def save(figure: Figure, file: Path) -> None:
    """Write a figure; the ending says the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_picture(file)
    FigureCanvasAgg(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def finish(figure: Figure, file: str | Path | None, width: float | None = None) -> Figure:
    """A figure in the asked width (inches), saved if there is a file to save it to."""
    if width is not None:
        fit(figure, width)
    if file is not None:
        save(figure, Path(file))
    return figure


def fit(figure: Figure, width: float) -> None:
    """Make a figure as wide as a column: panels one below the other where they would be too narrow
    side by side, and text at the size of a caption."""
    if not 1 <= width <= 40:
        raise FedloomError(f"width={width:g}: give inches, from 1 to 40 (a column has about 3.3).")
    axes = figure.axes
    across = max(1, min(len(axes), int(width / _PANEL)))
    down = -(-len(axes) // across)
    grid = figure.add_gridspec(down, across)
    for i, axis in enumerate(axes):
        axis.set_subplotspec(grid[i // across, i % across])
        axis.title.set_fontsize(9)
        if axis.get_shared_y_axes().joined(axis, axes[0]):
            axis.yaxis.set_tick_params(labelleft=i % across == 0)
        for text in (axis.xaxis.label, axis.yaxis.label, *axis.get_xticklabels(),
                     *axis.get_yticklabels()):  # fmt: skip
            text.set_fontsize(8)
        axis.tick_params(labelsize=8)
    rows = 0
    for legend in figure.legends:
        widest = max(len(text.get_text()) for text in legend.get_texts())
        columns = max(1, min(len(legend.get_texts()), int(width / (0.5 + 0.07 * widest))))
        legend.set_ncols(columns)
        rows = -(-len(legend.get_texts()) // columns)
        for text in legend.get_texts():
            text.set_fontsize(8)
    if figure.get_suptitle():
        figure.suptitle(figure.get_suptitle(), fontsize=10)
    figure.set_size_inches(width, down * 0.7 * min(width / across, 4.2) + 0.2 * rows)


def plot_run(
    rounds: pd.DataFrame, clients: pd.DataFrame, title: str, measure: Measure = _ACCURACY
) -> Figure:
    """Scores over rounds on the left, the clients' at the end on the right."""
    scored = rounds[rounds["eval_seconds"].notna()] if "eval_seconds" in rounds else rounds.iloc[:0]
    if scored.empty:
        raise FedloomError("This run has not been scored yet, so there is nothing to plot.")
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    named = {
        f"test_{measure.name}": "common test set",
        "macro": "clients, mean",
        "new_macro": "newcomers, mean",
        "worst10": "clients, worst 10 %",
    }
    for (column, label), colour in zip(named.items(), COLOURS, strict=False):
        if column in scored:
            left.plot(scored["round"], measure.factor * scored[column], color=colour, label=label)
    _score_axis(left, measure)
    left.legend(fontsize=8)
    last = clients[clients["round"] == clients["round"].max()] if len(clients) else clients
    if len(last):
        local = last[(last["population"] == "local") & (last["samples"] > 0)]
        found = measure.factor * local[measure.name].dropna()
        right.hist(found, bins=np.linspace(0, 100, 21) if measure.share else 20, color=COLOURS[0])
    unit = " (%)" if measure.share else ""
    where = f"{measure.called} on the client's own test data{unit}"
    right.set(xlabel=where, ylabel="clients")
    right.set_title("after the last evaluation", fontsize=10)
    figure.suptitle(title)
    return figure


def plot_comparison(
    curves: Mapping[str, Sequence[pd.DataFrame]], measure: Measure = _ACCURACY
) -> Figure:
    """The scores that every comparison shows."""
    panels = {
        f"test_{measure.name}": "common test set",
        "macro": "clients' own test data",
        "worst10": "worst 10 % of clients",
    }
    return plot_curves(curves, panels, measure=measure)


def plot_curves(
    curves: Mapping[str, Sequence[pd.DataFrame]],
    panels: Mapping[str, str],
    x: str = "round",
    marks: Mapping[str, Mapping[str, float]] | None = None,
    measure: Measure = _ACCURACY,
) -> Figure:
    """One panel per score, one line per method: the mean over seeds, with its range shaded; `x` is
    the column on the horizontal axis. `marks` are crosses at the end of a line: where another
    program's ended."""
    present = [c for c in panels if any(c in f for fs in curves.values() for f in fs)]
    if not present:
        raise FedloomError("None of these runs has been scored, so there is nothing to plot.")
    width = max(4.2 * len(present), 6.5 if len(curves) > _MANY else 0)
    figure = new_figure(width, 3.8)
    axes = figure.subplots(1, len(present), squeeze=False)[0]
    for axis, column in zip(axes, present, strict=True):
        for i, (method, frames) in enumerate(curves.items()):
            scores = [f.set_index(x)[column] for f in frames if column in f]
            if not scores:
                continue
            together = pd.concat(scores, axis=1) * (1 if column in PLAIN else measure.factor)
            dot = "o" if len(together) == 1 else None  # a line needs two points
            mean = together.mean(axis=1)
            axis.plot(together.index, mean, **look(i), marker=dot, label=method)
            if together.shape[1] > 1:
                low, high = together.min(axis=1), together.max(axis=1)
                axis.fill_between(
                    together.index, low, high, color=look(i)["color"], alpha=0.15, lw=0
                )
            end = (marks or {}).get(method, {}).get(column)
            if end is not None:
                end *= 1 if column in PLAIN else measure.factor
                axis.plot(together.index[-1:], [end], "x", ms=8, color=look(i)["color"])
        axis.set_title(panels[column], fontsize=10)
        _score_axis(axis, measure, x)
        axis.set_ylabel(PLAIN.get(column, axis.get_ylabel()))
    lines, labels = axes[0].get_legend_handles_labels()
    columns = int(width / (0.7 + 0.08 * max(map(len, labels))))
    columns = min(max(columns, 1), len(labels), 6)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns)
    rows = -(-len(labels) // columns)
    figure.set_size_inches(width, 3.8 + 0.22 * max(rows - 3, 0))  # panels keep their height
    return figure


def plot_sweep(
    key: str,
    values: Sequence[str],
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    *,
    logarithmic: bool | None,
    measure: Measure = _ACCURACY,
) -> Figure:
    """Scores against a setting: panel → method → value → a score per seed. The line is their mean,
    the band their range; values are numbers, on a logarithmic axis or not, or (None) words."""
    figure = new_figure(max(4.2 * len(panels), 5), 3.8)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    methods = list(dict.fromkeys(method for lines in panels.values() for method in lines))
    drawn: dict[str, Any] = {}
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for method, scores in lines.items():
            i = methods.index(method)  # a method looks the same in all panels
            shown = [v for v in values if scores.get(v)]
            if logarithmic is not None:
                shown.sort(key=float)
            x = [values.index(v) if logarithmic is None else float(v) for v in shown]
            found = [measure.factor * np.asarray(scores[v]) for v in shown]
            mean = [f.mean() for f in found]
            drawn[method] = axis.plot(x, mean, **look(i), marker="o", label=method)[0]
            axis.fill_between(
                x, [f.min() for f in found], [f.max() for f in found],
                color=look(i)["color"], alpha=0.15, lw=0,
            )  # fmt: skip
        _score_axis(axis, measure, key)
        axis.set_title(title, fontsize=10)
        if logarithmic:
            axis.set_xscale("log")
            axis.set_xticks([float(v) for v in values], values)
            axis.minorticks_off()
        elif logarithmic is None:
            axis.set_xticks(range(len(values)), values)
    columns = min(len(drawn), 4) or 1
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns)
    return figure


def _score_axis(axis: Axes, measure: Measure, x: str = "round") -> None:
    axis.set(xlabel=x, ylabel=measure.axis)
    axis.grid(alpha=0.3)


def plot_choices(
    panels: Mapping[str, Sequence[Sequence[Sequence[tuple[str, float]]]]],
    rows: Sequence[str],
    columns: Sequence[str],
) -> Figure:
    """A grid of squares for each panel, each with the names in it, the first one's score (in %) and
    the first one's colour."""
    names = dict.fromkeys(n for grid in panels.values() for r in grid for c in r for n, _ in c[:1])
    colours = {name: look(i)["color"] for i, name in enumerate(names)}
    figure = new_figure(2.3 * len(columns) * len(panels) + 1, 1.5 * len(rows) + 0.8)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, grid) in zip(axes, panels.items(), strict=True):
        for y, line in enumerate(grid):
            for x, found in enumerate(line):
                colour = colours[found[0][0]] if found else "white"
                axis.add_patch(_square(x, y, colour))
                words = [f"{found[0][0]}\n{found[0][1]:.1f} %"] if found else ["–"]
                words += [f"or {name}" for name, _ in found[1:3]]
                words += [f"or {len(found) - 3} more"] if len(found) > 3 else []
                axis.text(x, y, "\n".join(words), ha="center", va="center", fontsize=7)
        axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [""] * len(rows))
        axis.set_title(title, fontsize=10)
    return figure


def _square(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, alpha=0.3, edgecolor="white")
