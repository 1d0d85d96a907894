"""The figures of a page for print: as SVG and PDF files, with their data as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.files import slug
from fedloom.report.cost_plot import drawable, plot_costs
from fedloom.report.html import MOST_NAMED, Page, figure_tables
from fedloom.report.looks import look
from fedloom.report.partition_plot import plot_counts
from fedloom.report.plots import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACROSS = 3  # panels side by side


def write_figures(page: Page, folder: Path) -> list[Path]:
    """Write every figure of the page into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for name, figure in _figures(page).items():
        for ending in (".svg", ".pdf"):
            save(figure, folder / f"{name}{ending}")
            out.append(folder / f"{name}{ending}")
    tables = {**figure_tables(page), **_curve_table(page)}
    tables |= {slug(name.lower()): (p.heads, list(p.rows)) for name, p in page.pictures.items()}
    for name, (heads, rows) in tables.items():
        if rows:
            with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as f:
                csv.writer(f).writerows([heads, *rows])
            out.append(folder / f"{name}.csv")
    return out


def _figures(page: Page) -> dict[str, Figure]:
    out: dict[str, Any] = {}
    if page.panels:
        out["curves"] = _curves(page)
    if page.dots:
        out["clients"] = _clients(page)
    if spots := drawable(page.costs):
        colours = {name: _style(page, name)["color"] for name in spots}
        labels = page.cost_unit, page.cost_score
        out["cost"] = plot_costs(spots, page.measure, colours, labels)
    if page.held is not None and page.held.counts:
        held = page.held
        out["partition"] = plot_counts(np.array(held.counts), held.classes, held.names)
    drawn = ((slug(n.lower()), p.figure) for n, p in page.pictures.items())
    return out | {name: figure for name, figure in drawn if figure is not None}


def _style(page: Page, name: str) -> dict[str, Any]:
    return look(list(page.methods).index(name))


def _grid(count: int, width: float, height: float) -> tuple[Figure, Sequence[Any]]:
    across = min(count, _ACROSS)
    down = math.ceil(count / across)
    figure = new_figure(width * across, height * down)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, list(axes[:count])


def _curves(page: Page) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _grid(len(page.panels), 4.0, 3.2)
    for axis, panel in zip(axes, page.panels, strict=True):
        for name, line in panel.lines.items():
            style, x = _style(page, name), line.x["round"]
            dot = "o" if len(x) == 1 else None
            axis.plot(x, line.mean, **style, marker=dot, label=name)
            axis.fill_between(x, line.low, line.high, color=style["color"], alpha=0.15, lw=0)
        axis.set_title(panel.title, fontsize=10)
        axis.set(xlabel="round", ylabel=panel.unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    lines, labels = axes[0].get_legend_handles_labels()
    columns = max(min(int(50 / max(map(len, labels))), len(labels)), 1)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns)
    return figure


def _clients(page: Page) -> Figure:
    measure, scale = page.measure, page.measure.factor
    figure, axes = _grid(len(page.dots), 3.4, 2.6)
    for axis, (name, dots) in zip(axes, page.dots.items(), strict=True):
        ordered = sorted(dots, key=lambda d: measure.sign * d.value)
        colour = _style(page, name)["color"]
        for i, dot in enumerate(ordered):
            if dot.before is not None:
                axis.plot([i, i], [scale * dot.before, scale * dot.value], color=colour, alpha=0.35)
                axis.plot(i, scale * dot.before, "o", ms=4, mfc="none", color=colour)
        axis.plot([scale * d.value for d in ordered], "o", ms=4, color=colour)
        axis.set_title(name, fontsize=10)
        axis.set(xlabel="clients, worst first", ylabel=measure.axis, xticks=[])
        if len(ordered) <= MOST_NAMED:
            names = [dot.name for dot in ordered]
            upright = 90 if max(map(len, names)) > 2 else 0
            axis.set_xticks(range(len(names)), names, fontsize=7, rotation=upright)
        if measure.share:
            axis.set(ylim=(-3, 103))
        axis.grid(alpha=0.3)
    return figure


def _curve_table(page: Page) -> dict[str, tuple[Sequence[str], list[Sequence[object]]]]:
    rows: list[Sequence[object]] = []
    for panel in page.panels:
        for name, line in panel.lines.items():
            for i, mean in enumerate(line.mean):
                at = [line.x[key][i] for key in page.axes]
                rows.append([panel.title, name, *at, mean, line.low[i], line.high[i]])
    return {"curves": (("score", "method", *page.axes, "mean", "low", "high"), rows)}
