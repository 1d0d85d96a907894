"""A sweep: methods over a grid of settings, run like a study, with the score against each setting.

The best of a sweep is chosen by the scores that are then shown, so it is optimistic; for a fair
comparison choose settings on validation data (`fedloom tune`).
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.api import planned
from fedloom.experiment.comparing import check_tasks
from fedloom.experiment.concern import idle
from fedloom.experiment.config import as_words, merge, parse_settings
from fedloom.experiment.entry import Entry, named
from fedloom.experiment.fitting import same_task
from fedloom.experiment.settings import Config
from fedloom.experiment.study import Ask, Cell, Drawn, Figures, Results, Study, Table, spread
from fedloom.files import slug
from fedloom.tasks import Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CELLS = 10_000
_DECADES = 30  # largest over smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Axis:
    """A setting and the values that it takes, as they were written."""

    key: str
    values: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Axis:
        """`lr=0.01,0.1`; values that hold commas are parted by semicolons.

        >>> Axis.parse("lr=0.01,0.1")
        Axis(key='lr', values=('0.01', '0.1'))
        >>> Axis.parse("capacities=1;1:0.5,0.5:0.5").values
        ('1', '1:0.5,0.5:0.5')
        """
        key, sign, words = text.partition("=")
        parts = [w.strip() for w in words.split(";" if ";" in words else ",")]
        values = tuple(w for w in parts if w)
        if not sign or not key.strip() or not values:
            raise FedloomError(
                f"--sweep {text} is not valid: write SETTING=VALUE,VALUE,... (values that hold "
                "commas parted by ';')."
            )
        if twice := next((v for v in values if values.count(v) > 1), None):
            raise FedloomError(f"--sweep {text} has {twice} twice.")
        return Axis(key.strip(), values)


@dataclass(frozen=True)
class Point:
    """A method at one place of the grid; `at` has the swept settings that it knows."""

    entry: Entry
    at: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return slug(self.entry.label + "".join(f"@{k}={v}" for k, v in self.at.items()))


class Sweep(Study):
    """Methods over all combinations of the values."""

    name, title, data, presets = "sweep", "A sweep", (), ()

    def __init__(
        self, methods: Sequence[str], axes: Sequence[Axis], settings: Mapping[str, Any]
    ) -> None:
        self.entries = [Entry.of(method) for method in methods]
        self._methods, self.axes, self._settings = methods, axes, settings
        keys = [axis.key for axis in axes]
        for key in keys:
            if keys.count(key) > 1:
                raise FedloomError(f"--sweep {key}=... is given twice: put its values in one.")
            given = [e.label for e in self.entries if key in e.own]
            if given or key in settings:
                where = given[0] if given else f"--{key.replace('_', '-')}"
                raise FedloomError(
                    f"{key} is swept, so {where} would do nothing: give its values in --sweep only."
                )
            if key in ("seed", "method"):
                raise FedloomError(f"{key} can't be swept: give --seeds, or name several methods.")
        if np.prod([len(axis.values) for axis in axes]) * len(methods) > _MOST_CELLS:
            raise FedloomError(f"That is more than {_MOST_CELLS:,} runs a seed.")
        self.points = self._points(settings)

    def about(self, ask: Ask) -> str:
        return ", ".join(f"{axis.key} = {', '.join(axis.values)}" for axis in self.axes)

    def command(self, ask: Ask) -> str:
        words = ["fedloom compare", *(shlex.quote(entry.label) for entry in self.entries)]
        swept = (f"{axis.key}={';'.join(axis.values)}" for axis in self.axes)
        words += [f"--sweep {shlex.quote(text)}" for text in swept] + [f"--seeds {ask.seeds}"]
        return " ".join([*words, *(f"--set {shlex.quote(w)}" for w in as_words(self._settings))])

    def asked(self, ask: Ask) -> dict[str, Any]:
        grid = {"methods": list(self._methods),
                "axes": {axis.key: list(axis.values) for axis in self.axes},
                "settings": dict(self._settings)}  # fmt: skip
        return {"sweep": grid, "seeds": ask.seeds}

    def check(self, ask: Ask) -> None:
        if ask.seeds < 1:
            raise FedloomError(f"seeds={ask.seeds}: at least one seed is needed.")
        plans = [planned(p.entry.method, p.settings, lenient=True) for p in self.points]
        check_tasks([(p.config, p.options.build(), p.objects.get("data")) for p in plans])

    def _points(self, shared: Mapping[str, Any]) -> list[Point]:
        out: dict[str, Point] = {}
        roots = {axis.key.partition(".")[0] for axis in self.axes}
        known = {e.label: {*Config.model_fields, *named(e.method)[0].model_fields}
                 for e in self.entries}  # fmt: skip
        for key in (*roots, *shared):
            if not any(key in names for names in known.values()):
                raise unknown("setting", key, set().union(*known.values()))
        for entry in self.entries:
            for values in itertools.product(*(axis.values for axis in self.axes)):
                at = {axis.key: value for axis, value in zip(self.axes, values, strict=True)
                      if axis.key.partition(".")[0] in known[entry.label]}  # fmt: skip
                mine = {k: v for k, v in shared.items() if k in known[entry.label]}
                words = parse_settings(f"{key}={value}" for key, value in at.items())
                settings = merge(mine, entry.own, words, named(entry.method)[1])
                plan = planned(entry.method, settings, lenient=True)
                for key in idle(plan.config, plan.options.build()):
                    settings.pop(key, None)
                    at.pop(key, None)
                same = planned(entry.method, settings, lenient=True).config.model_dump_json()
                out.setdefault(f"{entry.label} {same}", Point(entry, at, settings))
        return list(out.values())

    def cells(self, ask: Ask) -> list[Cell]:
        return [Cell(p.name, str(p.settings["method"]), p.settings) for p in self.points]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        measure = measure_of(results)
        tested = f"test_{measure.name}"
        named = {
            tested: measure.heading("test"),
            "macro": measure.heading("client"),
            "worst10": f"worst 10 %{' (%)' if measure.share else ''}",
        }
        shown = [s for s in named if any(_scores(runs, s) for runs in results.values())]
        heads = ["method", *(axis.key for axis in self.axes), *(named[s] for s in shown)]
        rows = {p.name: self._row(p, results, shown) for p in self.points}
        tables = [Table(f"All runs, {ask.over}", heads, list(rows.values()))]
        chooses = next((s for s in ("macro", tested) if s in shown), None)
        if chooses is not None:
            best = []
            for entry in self.entries:
                mine = [p for p in self.points if p.entry is entry and p.name in results]
                if mine:
                    sign = measure.sign
                    top = max(mine, key=lambda p: _mean(results[p.name], chooses, sign))
                    best.append(rows[top.name])
            by = named[chooses].removesuffix(" (%)")
            title = f"The best of each method by {by}, which flatters it"
            tables.insert(0, Table(f"{title} ({ask.over})", heads, best))
        return tables

    def _row(self, point: Point, results: Results, shown: Sequence[str]) -> list[str]:
        runs = results.get(point.name, ())
        return [
            point.entry.label,
            *(point.at.get(axis.key, "–") for axis in self.axes),
            *(_spread(measure_of(results), _scores(runs, score)) for score in shown),
        ]

    def pictures(self, ask: Ask, results: Results) -> Figures:
        return [
            Drawn(slug(f"sweep-{axis.key}"), f"Scores against {axis.key}",
                  lambda axis=axis: self._against(axis, results))  # type: ignore[misc]
            for axis in self.axes if len(axis.values) > 1 and results
        ]  # fmt: skip

    def _against(self, axis: Axis, results: Results) -> Figure:
        """Score against one setting, a panel for each combination of the others."""
        from fedloom.report.plots import plot_sweep

        others = [other for other in self.axes if other is not axis]
        measure = measure_of(results)
        panels: dict[str, dict[str, dict[str, list[float]]]] = {}
        for values in itertools.product(*(other.values for other in others)):
            rest = dict(zip((o.key for o in others), values, strict=True))
            lines: dict[str, dict[str, list[float]]] = {}
            for p in self.points:
                at = {**rest, **{k: v for k, v in p.at.items() if k == axis.key}}
                if p.name in results and all(at.get(k) == v for k, v in p.at.items()):
                    runs = results[p.name]
                    found = _scores(runs, "macro") or _scores(runs, f"test_{measure.name}")
                    # A method without the setting scores the same everywhere.
                    for value in [p.at[axis.key]] if axis.key in p.at else axis.values:
                        lines.setdefault(p.entry.label, {})[value] = found
            panels[", ".join(f"{k}={v}" for k, v in rest.items())] = lines
        spans = _spans(axis.values)
        return plot_sweep(axis.key, axis.values, panels, logarithmic=spans, measure=measure)


def _scores(runs: Sequence[Any], name: str) -> list[float]:
    return [float(run.summary[name]) for run in runs if name in run.summary]


def _mean(runs: Sequence[Any], name: str, sign: int) -> float:
    found = _scores(runs, name)
    return sign * float(np.mean(found)) if found else -np.inf


def measure_of(results: Results) -> Measure:
    """What the runs are scored by."""
    runs = [run for found in results.values() for run in found]
    if not runs:
        return Measure("accuracy")
    same_task(run.task for run in runs)
    return runs[0].measures[0]


def _spread(measure: Measure, values: Sequence[float]) -> str:
    """The mean over seeds, and how far they are apart."""
    if measure.share or not values:
        return spread([100 * v for v in values])
    mean, std = float(np.mean(values)), float(np.std(values))
    return measure.text(mean) + (f" ± {std:.2g}" if len(values) > 1 else "")


def _spans(values: Sequence[str]) -> bool | None:
    """Whether numbers are decades apart; None where values are words."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _DECADES
