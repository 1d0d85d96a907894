"""A report as one self-contained HTML page: it opens without a network, on a screen or a phone, in
light or dark, and prints.

`Page` is what is shown; its callers know runs, this module knows only HTML. Curves are drawn by
uPlot, which is shipped in `assets/`, everything else is plain HTML and SVG. Each figure and its
data can be saved from the page; `figures.py` draws the same ones for print.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from fedloom.report.cost_plot import Spot, drawable
from fedloom.report.cost_plot import svg as cost_svg
from fedloom.report.looks import asset, finite, look
from fedloom.report.marks import Cell
from fedloom.tasks import Measure

_NARROW = 3  # columns that fit on a phone side by side
_MOST_CLASSES = 60  # that are drawn
_MOST_FOLDERS = 60  # that are linked
MOST_NAMED = 20  # clients whose names fit on an axis
_LONGEST = 12  # letters of a name there
_LETTER = 6.4  # pixels
_NUMBER = re.compile(r"[+\-−<>≥≈]?\s*\d|[–—]?$|inf|nan")  # how a cell of numbers begins
_TIE = "not significantly different from the best"
_BORDER = {"-": "solid", "--": "dashed", "-.": "dashed", ":": "dotted"}
_DASH = {"-": "solid", "--": "dashed", "-.": "dashdot", ":": "dotted"}


@dataclass(frozen=True)
class Grid:
    """A table; cells are plain text or a `Cell`. `marked`: its rows are methods, in the colours of
    the curves."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    marked: bool = False


@dataclass(frozen=True)
class Line:
    """A method's curve: places by the name of the x axis, and the mean and range over seeds."""

    x: Mapping[str, Sequence[float]]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    lines: Mapping[str, Line]


@dataclass(frozen=True)
class Dot:
    """A client: its score, before it adapted too where it does, what hovering says, its name."""

    value: float
    before: float | None
    says: str
    name: str = ""


@dataclass(frozen=True)
class Held:
    """How many samples of each class the first clients hold, of so many clients."""

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]
    names: Sequence[str]
    clients: int


@dataclass(frozen=True)
class Picture:
    """A drawing, as the bytes of an SVG or PNG file, and the table that it was made from."""

    image: bytes
    kind: str
    figure: Any = None  # matplotlib's, for print
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()


@dataclass
class Page:
    """All that a report shows; what is empty is left out."""

    title: str
    headline: str
    about: str
    methods: Sequence[str] = ()
    table: Grid | None = None
    remarks: Sequence[str] = ()
    by_method: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    panels: Sequence[Panel] = ()
    band: str = ""
    dots: Mapping[str, Sequence[Dot]] = field(default_factory=dict)
    dots_note: str = ""
    measure: Measure = field(default_factory=lambda: Measure("accuracy"))  # of dots and costs
    costs: Mapping[str, Spot] = field(default_factory=dict)
    cost_unit: str = ""
    cost_score: str = ""
    tables: Mapping[str, Grid] = field(default_factory=dict)
    held: Held | None = None
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    commands: Sequence[str] = ()
    made: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def render(page: Page, where: Path | None = None) -> str:
    """The whole file; `where` is the folder that it will be in, for links to the runs."""
    parts = [
        f"<h1>{escape(page.title)}</h1><p class='small'>{escape(page.about)}</p>",
        f"<p class='headline'>{escape(page.headline)}</p>",
        _main_table(page),
        _curves(page),
        _clients(page),
        _costs(page),
        _partition(page),
        *(f"<h2>{escape(name)}</h2>{_picture(name, p)}" for name, p in page.pictures.items()),
        *(f"<h2>{escape(name)}</h2>{table(grid)}" for name, grid in page.tables.items()),
        _again(page, where),
    ]
    data = {
        "axes": dict(page.axes),
        "panels": [
            {
                "title": p.title,
                "unit": p.unit,
                "lines": [_line(page, name, line) for name, line in p.lines.items()],
            }
            for p in page.panels
        ],
        "tables": {
            **{name: _csv(heads, rows) for name, (heads, rows) in figure_tables(page).items()},
            **{name: _csv(p.heads, p.rows) for name, p in page.pictures.items()},
        },
    }
    embedded = json.dumps(finite(data)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{asset("uPlot.min.css")}{asset("report.css")}</style></head>
<body>{"".join(parts)}
<script type="application/json" id="data">{embedded}</script>
<script>{asset("uPlot.iife.min.js")}</script>
<script>{asset("curves.js")}</script>
<script>{asset("report.js")}</script></body></html>
"""


def figure_tables(page: Page) -> dict[str, tuple[Sequence[str], list[Sequence[object]]]]:
    """Headings and rows of what is drawn, by the figure's name (curves are in `page.panels`)."""
    out: dict[str, tuple[Sequence[str], list[Sequence[object]]]] = {}
    if page.dots:
        rows: list[Sequence[object]] = [
            [m, d.value, d.before, d.says] for m, dots in page.dots.items() for d in dots
        ]
        out["clients"] = ("method", page.measure.name, "before", "client"), rows
    if drawable(page.costs):
        out["cost"] = (
            ("method", "MB", page.measure.name),
            [[name, spot.cost, spot.value] for name, spot in page.costs.items()],
        )
    if page.held is not None:
        held = page.held
        out["partition"] = (
            ("client", *held.classes),
            [[_name(held, i), *row] for i, row in enumerate(held.counts)],
        )
    return out


def _csv(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([heads, *rows] if heads else rows)
    return text.getvalue()


def _figure(inside: str, name: str, *, data: str = "", panel: int | None = None) -> str:
    """A drawing with buttons that save it and its numbers."""
    which = f" data-panel='{panel}'" if panel is not None else ""
    called = f"{which} data-name='{escape(name, quote=True)}'"
    values = f"<button data-csv='{escape(data, quote=True)}'{called}>CSV</button>"
    values = values if data or panel is not None else ""
    return (
        f"<figure>{inside}<figcaption class='save'><button data-svg{called}>SVG</button>{values}"
        "</figcaption></figure>"
    )


def table(grid: Grid) -> str:
    words = [_is_text(grid, i) for i in range(len(grid.heads))]
    head = "".join(
        f"<th{' class=text' * text}>{escape(h)}</th>"
        for h, text in zip(grid.heads, words, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, k, grid, i, words) for i, cell in enumerate(row))}</tr>"
        for k, row in enumerate(grid.rows)
    )
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    kind = " class='cards'" if len(grid.heads) > _NARROW else ""
    return f"<div class='wide'><table{kind}>{inside}</table></div>"


def _is_text(grid: Grid, column: int) -> bool:
    """Whether most of a column is words, which are read from the left."""
    cells = (row[column] for row in grid.rows if column < len(row))
    found = [cell if isinstance(cell, str) else cell.text for cell in cells]
    words = sum(not _NUMBER.match(text.strip()) for text in found)
    return words > sum(text.strip() not in ("", "–") for text in found) / 2


def _cell(cell: str | Cell, row: int, grid: Grid, column: int, words: Sequence[bool]) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    mark = _swatch(row) if grid.marked and column == 0 else ""
    kind = " class='best'" if cell.best else " class='text'" if any(words[column:][:1]) else ""
    tie = f" <span class='tie' title='{_TIE}'>≈</span>" if cell.tie else ""
    head = escape(grid.heads[column], quote=True) if column < len(grid.heads) else ""
    inside = f"{mark}{escape(cell.text)}{tie}"
    return f"<td{kind} data-head='{head}'>{f'<span>{inside}</span>' if inside else ''}</td>"


def _swatch(i: int) -> str:
    border = _BORDER[look(i)["linestyle"]]
    return (
        f"<span class='swatch' style='border-top-style:{border};border-top-color:{_ink(i)}'></span>"
    )


def _ink(i: int) -> str:
    """The i-th colour; black is the page's own ink, which is light on a dark page."""
    colour = str(look(i)["color"])
    return "var(--ink)" if colour == "#000000" else colour


def _main_table(page: Page) -> str:
    if page.table is None:
        return ""
    notes = "".join(
        f"<p class='small'>{escape(heading)}:</p><ul class='small'>"
        + "".join(
            f"<li><b>{escape(method)}</b>: {escape('; '.join(words))}</li>"
            for method, words in found.items()
        )
        + "</ul>"
        for heading, found in page.by_method.items()
    )
    return f"{table(page.table)}<p class='small'>{escape(' '.join(page.remarks))}</p>{notes}"


def _line(page: Page, name: str, line: Line) -> dict[str, object]:
    style = look(list(page.methods).index(name))
    return {
        "name": name,
        "colour": style["color"],
        "dash": _DASH[style["linestyle"]],
        "style": _BORDER[style["linestyle"]],
        "x": {key: list(values) for key, values in line.x.items()},
        "mean": list(line.mean),
        "low": list(line.low),
        "high": list(line.high),
    }


def _curves(page: Page) -> str:
    if not page.panels:
        return ""
    boxes = "".join(
        f"<label><input type='checkbox' checked data-method='{escape(name, quote=True)}'>"
        f"{_swatch(i)}{escape(name)}</label>"
        for i, name in enumerate(page.methods)
    )
    options = "".join(
        f"<option value='{escape(k, quote=True)}'>{escape(v)}</option>"
        for k, v in page.axes.items()
    )
    panels = "".join(
        f"<div class='chart'><h3>{escape(panel.title)}</h3>"
        + _figure(f"<div id='panel-{i}'></div>", panel.title, panel=i)
        + "</div>"
        for i, panel in enumerate(page.panels)
    )
    return (
        f"<h2>Over time</h2><div class='bar'>{boxes}<label>against&nbsp;"
        f"<select id='x-axis'>{options}</select></label><button id='csv'>all as CSV</button></div>"
        f"<div class='charts'>{panels}</div><p class='small'>{escape(page.band)} Drag to zoom, "
        "double-click to go back.</p>"
    )


def _clients(page: Page) -> str:
    if not page.dots:
        return ""
    methods = list(page.methods)
    drawn = {
        name: _figure(
            _dot_plot(dots, _ink(methods.index(name)), page.measure),
            f"clients of {name}",
            data="clients",
        )
        for name, dots in page.dots.items()
    }
    parts = [f"<div><h3>{escape(name)}</h3>{plot}</div>" for name, plot in drawn.items()]
    return (
        f"<h2>Every client</h2><p class='small'>{escape(page.dots_note)}</p>"
        f"<div class='dots'>{''.join(parts)}</div>"
    )


def _dot_plot(dots: Sequence[Dot], colour: str, measure: Measure) -> str:
    """Clients side by side, worst first; hollow dots are before adapting."""
    width, height, left, foot = 320, 190, 30, 18
    ordered = sorted(dots, key=lambda d: measure.sign * d.value)
    step = (width - left - 10) / max(len(ordered), 1)

    values = [v for dot in dots for v in (dot.value, dot.before) if v is not None]
    ticks = (0, 0.25, 0.5, 0.75, 1) if measure.share else _ticks(min(values), max(values))
    span = max(ticks[-1] - ticks[0], 1e-12)

    def y(value: float) -> float:
        return 8 + (ticks[-1] - value) / span * (height - foot - 12)

    out = []
    for tick in ticks:
        out.append(
            f"<line class='grid' x1='{left}' x2='{width}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>"
            f"<text x='{left - 4}' y='{y(tick) + 4:.1f}' text-anchor='end'>"
            f"{_tick(measure, tick)}</text>"
        )
    size = max(1.5, min(4.0, step / 2.2))
    for i, dot in enumerate(ordered):
        x = left + 5 + (i + 0.5) * step
        if dot.before is not None:
            out.append(
                f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y(dot.before):.1f}' y2='{y(dot.value):.1f}' "
                f"stroke='{colour}' stroke-opacity='.35'/><circle cx='{x:.1f}' "
                f"cy='{y(dot.before):.1f}' r='{size:.1f}' fill='none' stroke='{colour}'/>"
            )
        out.append(
            f"<circle cx='{x:.1f}' cy='{y(dot.value):.1f}' r='{size:.1f}' fill='{colour}'>"
            f"<title>{escape(dot.says)}</title></circle>"
        )
    names = [dot.name for dot in ordered]
    below, room = _names_below(names, left + 5, step, height - foot)
    out.append(
        f"{below}<text x='{(left + width) / 2:.0f}' y='{height + room - 2:.0f}' "
        f"text-anchor='middle'>{len(ordered)} clients, worst first</text>"
    )
    return f"<svg viewBox='0 0 {width} {height + room:.0f}' role='img'>{''.join(out)}</svg>"


def _names_below(names: Sequence[str], left: float, step: float, top: float) -> tuple[str, float]:
    """The names of a few clients under their columns, upright where they are too wide for that, and
    the height that they take; nothing of many clients."""
    shown = [n if len(n) <= _LONGEST else f"{n[: _LONGEST - 1]}…" for n in names]
    if len(shown) > MOST_NAMED or not any(shown):
        return "", 0.0
    widest = _LETTER * max(map(len, shown))
    upright = widest + 2 > step
    out = []
    for i, name in enumerate(shown):
        x = left + (i + 0.5) * step
        place = (
            f"transform='translate({x + 4:.1f},{top + 4:.1f}) rotate(-90)' text-anchor='end'"
            if upright
            else f"x='{x:.1f}' y='{top + 12:.1f}' text-anchor='middle'"
        )
        out.append(f"<text class='name' {place}>{escape(name)}</text>")
    return "".join(out), widest + 6 if upright else 14.0


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ticks(low: float, high: float) -> Sequence[float]:
    """Five places of an axis, from 0 where that is near."""
    low = 0.0 if 0 <= low <= high / 2 else low
    return [low + k * (high - low) / 4 for k in range(5)]


def _tick(measure: Measure, value: float) -> str:
    """Short enough for the margin."""
    if measure.share:
        return f"{100 * value:.0f}"
    if 1000 <= abs(value) < 10_000:
        return f"{value:.0f}"
    return f"{value / 1000:.3g}k" if 10_000 <= abs(value) < 1e6 else f"{value:.3g}"


def _costs(page: Page) -> str:
    """What methods reached against what they cost."""
    spots = drawable(page.costs)
    if not spots:
        return ""
    colours = {name: _ink(list(page.methods).index(name)) for name in spots}
    drawing = cost_svg(spots, page.measure, colours, (page.cost_unit, page.cost_score))
    title = f"{_capital(page.measure.called)} against cost"
    left = ", ".join(name for name, spot in page.costs.items() if not spot.cost)
    note = f"<p class='small'>Not drawn, as nothing is sent: {escape(left)}.</p>" if left else ""
    return f"<h2>{escape(title)}</h2>{_figure(drawing, 'cost', data='cost')}{note}"


def _name(held: Held, client: int) -> str:
    return held.names[client] if client < len(held.names) else str(client)


def _partition(page: Page) -> str:
    """Clients side by side, a row for each class, darker where more samples are."""
    held = page.held
    if held is None or not held.counts or len(held.classes) > _MOST_CLASSES:
        return ""
    left = 14 + 6.2 * min(max(len(str(c)) for c in held.classes), 14)
    width, side = 720, 15
    few = len(held.counts) <= MOST_NAMED
    step = (360 if few else width - left - 2) / len(held.counts)  # few fit on a phone as they are
    step = min(step, 26.0)
    names = [_name(held, i) for i in range(len(held.counts))]
    below, room = _names_below(names, left, step, side * len(held.classes))
    height = side * len(held.classes) + 26 + room
    most = max(max(row, default=0) for row in held.counts) or 1
    out = []
    for k, label in enumerate(held.classes):
        shown = label if len(label) <= 14 else f"{label[:13]}…"
        out.append(f"<text x='{left - 6:.0f}' y='{side * k + 11.5}' text-anchor='end'>"
                   f"{escape(shown)}</text>")  # fmt: skip
        for i, row in enumerate(held.counts):
            share = row[k] / most
            says = f"client {_name(held, i)}: {row[k]:,} of class {label}"
            out.append(
                f"<rect x='{left + i * step:.1f}' y='{side * k}' width='{max(step - 1, 0.6):.1f}' "
                f"height='{side - 1}' class='cell' fill='#0072B2' "
                f"fill-opacity='{0.12 + 0.88 * share if row[k] else 0:.2f}'>"
                f"<title>{escape(says)}</title></rect>"
            )
    end = left + step * len(held.counts)
    some = (
        f"{held.clients} clients"
        if len(held.counts) == held.clients
        else f"the first {len(held.counts)} of {held.clients:,} clients"
    )
    box = max(end + 2, 360)  # wide enough for the caption, however few clients there are
    centre = max((left + end) / 2, 180)
    out.append(f"{below}<text x='{centre:.0f}' y='{height - 6:.0f}' text-anchor='middle'>{some}, "
               f"a row for each class; darkest: {most:,} samples</text>")  # fmt: skip
    drawing = (
        f"<svg style='max-width:{1.2 * box:.0f}px' role='img' viewBox='0 0 {box:.0f} {height:.0f}'>"
        f"{''.join(out)}</svg>"
    )
    return f"<h2>Who holds what</h2>{_figure(drawing, 'partition', data='partition')}"


def _picture(name: str, picture: Picture) -> str:
    image = base64.b64encode(picture.image).decode()
    kind = {"svg": "svg+xml"}.get(picture.kind, picture.kind)
    shown = f"<img alt='{escape(name, quote=True)}' src='data:image/{kind};base64,{image}'>"
    if picture.kind == "svg":
        return _figure(shown, name, data=name if picture.rows else "")
    return shown


def _again(page: Page, where: Path | None) -> str:
    made = "".join(
        f"<tr><td>{escape(k)}</td><td class='text'>{escape(v)}</td></tr>"
        for k, v in page.made.items()
    )
    if page.folders:
        shown = list(page.folders.items())[:_MOST_FOLDERS]
        links = ", ".join(_link(name, path, where) for name, path in shown)
        more = len(page.folders) - len(shown)
        links += f" and {more} more" if more else ""
        made += f"<tr><td>run folders</td><td class='text'>{links}</td></tr>"
    commands = "".join(f"<pre>{escape(line)}</pre>" for line in page.commands)
    settings = table(Grid(("setting", "value"), [(k, v) for k, v in page.settings.items()]))
    return (
        f"<h2>How to run it again</h2>{commands}<div class='wide'><table><tbody>{made}</tbody>"
        f"</table></div><details><summary>All settings</summary>{settings}</details>"
    )


def _link(name: str, path: Path, where: Path | None) -> str:
    """A link to a run's folder: from the page's own folder, so that both can move together."""
    target = path.resolve()
    try:
        href = target.as_uri() if where is None else os.path.relpath(target, where.resolve())
    except ValueError:  # on another drive
        href = target.as_uri()
    return f"<a href='{escape(href, quote=True)}'>{escape(name)}</a>"
