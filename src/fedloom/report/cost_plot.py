"""What methods reached against what they cost: one figure, as SVG for a page and for print.

Costs are on a logarithmic axis that spans the data. Methods at the same place are drawn as rings
around each other, with their names below one another; names do not cover each other or a dot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from fedloom.report.plots import new_figure
from fedloom.tasks import Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP, _RIGHT = 460, 310, 52, 44, 10, 14
_LETTER, _LINE = 7.3, 14  # room for a letter and a line of text, as large as on a phone
_LONGEST = 22  # letters of a name
_NEAR = 0.02  # of an axis: dots that cover each other

Range = tuple[float, float]
Labels = tuple[str, str]  # of the x and the y axis


@dataclass(frozen=True)
class Spot:
    """A method by what it cost and what it reached."""

    cost: float
    value: float
    says: str


def drawable(spots: Mapping[str, Spot]) -> dict[str, Spot]:
    """Methods that have a place on the axes; none if there is nothing to compare."""
    found = {n: s for n, s in spots.items() if s.cost > 0 and math.isfinite(s.value)}
    return found if len(found) > 1 else {}


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within a range.

    >>> ticks(28, 36), ticks(0.14, 0.205)
    ([28, 30, 32, 34, 36], [0.14, 0.16, 0.18, 0.2])
    """
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_round(k * step) for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range of a logarithmic axis.

    >>> log_ticks(0.7, 1.2), log_ticks(0.8, 60)
    ([0.7, 0.8, 0.9, 1, 1.1, 1.2], [1, 2, 5, 10, 20, 50])
    """
    if high / low < 10:
        return ticks(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [_round(k * 10.0**e) for e in decades for k in (1, 2, 5) if low <= k * 10.0**e <= high]
    return found if len(found) < 8 else [t for t in found if math.log10(t) % 1 == 0]


def _round(value: float) -> float:
    value = float(f"{value:.12g}")
    return int(value) if value == int(value) else value


def ranges(spots: Mapping[str, Spot], measure: Measure) -> tuple[Range, Range]:
    """Of the costs and of the values as written, with some room around them."""
    costs = [math.log10(s.cost) for s in spots.values()]
    room = max(0.1 * (max(costs) - min(costs)), math.log10(1.15))
    values = [measure.factor * s.value for s in spots.values()]
    low, high = min(values), max(values)
    least = 1.0 if measure.share else 0.05 * max(abs(low), abs(high), 1e-9)
    above = max(0.15 * (high - low), least)
    low, high = low - above, high + above
    if measure.share:
        low, high = max(low, 0.0), min(high, 100.0)
    return (10 ** (min(costs) - room), 10 ** (max(costs) + room)), (low, high)


def together(spots: Mapping[str, Spot], measure: Measure) -> list[list[str]]:
    """The names of the methods, those at the same place in one list; the highest first."""
    (left, right), (low, high) = ranges(spots, measure)

    def near(one: Spot, other: Spot) -> bool:
        aside = abs(math.log(one.cost / other.cost)) / math.log(right / left)
        return max(aside, measure.factor * abs(one.value - other.value) / (high - low)) < _NEAR

    out: list[list[str]] = []
    for name in sorted(spots, key=lambda n: -measure.factor * spots[n].value):
        found = next((names for names in out if near(spots[names[0]], spots[name])), None)
        if found is None:
            out.append([name])
        else:
            found.append(name)
    return out


def svg(
    spots: Mapping[str, Spot], measure: Measure, colours: Mapping[str, str], labels: Labels
) -> str:
    """The figure for a page."""
    (left, right), (low, high) = ranges(spots, measure)
    end, bottom = _WIDTH - _RIGHT, _HEIGHT - _FOOT

    def x(cost: float) -> float:
        return _LEFT + math.log(cost / left) / math.log(right / left) * (end - _LEFT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (bottom - _TOP)

    out = []
    for tick in log_ticks(left, right):
        out.append(
            f"<line class='grid' x1='{x(tick):.1f}' x2='{x(tick):.1f}' y1='{_TOP}' y2='{bottom}'/>"
            f"<text x='{x(tick):.1f}' y='{bottom + 15}' text-anchor='middle'>{tick:g}</text>"
        )
    for tick in ticks(low, high):
        out.append(
            f"<line class='grid' x1='{_LEFT}' x2='{end}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>"
            f"<text x='{_LEFT - 5}' y='{y(tick) + 4:.1f}' text-anchor='end'>{tick:g}</text>"
        )
    places = {n: (x(s.cost), y(measure.factor * s.value)) for n, s in spots.items()}
    groups = together(spots, measure)
    taken = [(at - 7, at + 7, line + 4) for at, line in (places[names[0]] for names in groups)]
    for names in groups:
        at, line = places[names[0]]
        says = escape("\n".join(spots[name].says for name in names))
        for i, name in reversed(list(enumerate(names))):
            fill = f"fill='{colours[name]}'" if i == 0 else "fill='var(--paper)'"
            out.append(
                f"<circle cx='{at:.1f}' cy='{line:.1f}' r='{5 + 3 * i}' {fill} stroke-width='2' "
                f"stroke='{colours[name]}'><title>{says}</title></circle>"
            )
        shown = [n if len(n) <= _LONGEST else f"{n[: _LONGEST - 1]}…" for n in names]
        beside = 8 + 3 * (len(names) - 1)
        width = _LETTER * (max(map(len, shown)) + 2)
        first, anchor, below = _free(at, line + 4, beside, width, len(shown), taken)
        for i, (name, text) in enumerate(zip(names, shown, strict=True)):
            words = escape(text)
            if len(names) > 1 or below != line + 4:  # not right beside its own dot
                dot = f"<tspan fill='{colours[name]}'>●</tspan>"
                words = f"{dot} {words}" if anchor == "start" else f"{words} {dot}"
            out.append(
                f"<text x='{first:.1f}' y='{below + _LINE * i:.1f}' text-anchor='{anchor}'>"
                f"{words}</text>"
            )
    middle = (_TOP + bottom) / 2
    out.append(
        f"<text x='{(_LEFT + end) / 2:.0f}' y='{_HEIGHT - 8}' text-anchor='middle'>"
        f"{escape(labels[0])}</text><text transform='translate(13,{middle:.0f}) rotate(-90)' "
        f"text-anchor='middle'>{escape(labels[1])}</text>"
    )
    return f"<svg class='cost' role='img' viewBox='0 0 {_WIDTH} {_HEIGHT}'>{''.join(out)}</svg>"


def _free(
    at: float,
    line: float,
    beside: float,
    width: float,
    lines: int,
    taken: list[tuple[float, float, float]],
) -> tuple[float, str, float]:
    """Where so many lines of text beside a dot cover nothing that is `taken`, as near to it as may
    be: x, anchor and y of the first; they are taken then."""
    sides = [(at + beside, "start"), (at - beside, "end")]
    sides = [
        (x, anchor) for x, anchor in sides
        if (x + width <= _WIDTH if anchor == "start" else x - width >= _LEFT)
    ] or sides[at > _WIDTH / 2 :][:1]  # fmt: skip
    last = _HEIGHT - _FOOT - _LINE * (lines - 1) - 4
    steps = sorted(range(-40, 41), key=lambda k: (abs(k), -k))
    tries = [min(max(line + k * _LINE / 2, _TOP + 10), last) for k in steps]
    spots = [(x, anchor, y) for y in tries for x, anchor in sides]
    chosen = next((s for s in spots if not _covers(_boxes(*s, width, lines), taken)), spots[0])
    taken += _boxes(*chosen, width, lines)
    return chosen


def _boxes(
    x: float, anchor: str, y: float, width: float, lines: int
) -> list[tuple[float, float, float]]:
    """Left, right and height of each line of text."""
    left = x if anchor == "start" else x - width
    return [(left, left + width, y + _LINE * i) for i in range(lines)]


def _covers(
    some: Sequence[tuple[float, float, float]], others: Sequence[tuple[float, float, float]]
) -> bool:
    return any(
        a < right and left < b and abs(y - line) < _LINE - 1
        for a, b, y in some
        for left, right, line in others
    )


def plot_costs(
    spots: Mapping[str, Spot], measure: Measure, colours: Mapping[str, str], labels: Labels
) -> Figure:
    """The figure for print."""
    figure = new_figure(6, 4)
    axis = figure.subplots()
    across, up = ranges(spots, measure)
    axis.set_xscale("log")
    axis.set(xlim=across, ylim=up, xlabel=labels[0], ylabel=labels[1])
    axis.set_xticks(log_ticks(*across), [f"{t:g}" for t in log_ticks(*across)])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    middle = math.sqrt(across[0] * across[1])
    for names in together(spots, measure):
        cost, value = spots[names[0]].cost, measure.factor * spots[names[0]].value
        for i, name in enumerate(names):
            axis.plot(cost, value, "o", ms=6 + 5 * i, color=colours[name],
                      mfc="none" if i else colours[name])  # fmt: skip
        side = 1 if cost <= middle else -1
        axis.annotate("\n".join(names), (cost, value), (side * (6 + 3 * len(names)), 0),
                      textcoords="offset points", fontsize=8, va="center",
                      ha="left" if side > 0 else "right")  # fmt: skip
    return figure
