"""A sweep from Python, and what it left on disk: tables, pictures, the best of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedloom.engine.choose import cores
from fedloom.errors import FedloomError, unknown
from fedloom.experiment.api import numbered
from fedloom.experiment.config import as_words
from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Say, Table, reopen, run_study, write_report
from fedloom.experiment.sweep import Axis, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sweep(
    methods: Sequence[str],
    values: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    workers: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> Swept:
    """Run methods with all combinations of values, `{"lr": [0.01, 0.1], "batch": [8, 32]}`.

    Each combination has `seeds` runs, in processes of their own, `workers` at a time (0: as many as
    there are cores). What is finished in `out` is not run again. `progress` shows how it goes:
    unless given, in notebooks.
    """
    if isinstance(methods, str) or not all(isinstance(method, str) for method in methods):
        raise FedloomError(
            "A sweep runs in processes of its own, so methods are given as a list of names, or as "
            "FILE.py."
        )
    for key, value in settings.items():
        if not isinstance(value, str | int | float | bool | list | dict | Path | None):
            raise FedloomError(
                f"A sweep runs in processes of its own, so {key} can't be an object: give a name "
                "or a file."
            )
    given = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items() if v is not None}
    axes = [Axis(key, tuple(_text(key, v) for v in found)) for key, found in values.items()]
    if not axes or not all(axis.values for axis in axes):
        raise FedloomError('Give values to sweep over: {"lr": [0.01, 0.1]}.')
    return run_sweep(Sweep(methods, axes, given), seeds, out, workers, _shown(progress))


def _text(key: str, value: Any) -> str:
    """A value as the command line would have it."""
    if isinstance(value, Mapping):
        raise FedloomError(f"{key} is swept option by option: {key}.NAME.")
    return as_words({key: value})[0].partition("=")[2]


def _shown(progress: bool | None) -> Say:
    from fedloom.report import notebook
    from fedloom.report.terminal import StudyProgress

    if notebook.here() if progress is None else progress:
        return notebook.NotebookStudy() if notebook.here() else StudyProgress()
    return lambda *_: None


def run_sweep(
    asked: Sweep, seeds: int, out: str | Path | None, workers: int, say: Say, resume: bool = False
) -> Swept:
    """Run what is not finished of a sweep, and write its report."""
    taken, free = numbered(Path("runs") / "sweep")
    folder = Path(out) if out is not None else taken[-1] if resume and taken else free
    ask = Ask("", "", seeds=seeds)
    results = run_study(asked, ask, folder, workers or cores(), say)
    found = Swept(folder, asked, seeds, results)
    found.report()
    return found


class Swept:
    """The runs of a sweep. `results`: name of a point → one result per seed."""

    def __init__(
        self, path: Path, asked: Sweep, seeds: int, results: Mapping[str, Sequence[Result]]
    ) -> None:
        self.path, self._sweep, self.results = path, asked, results
        self._ask = Ask("", "", seeds=seeds)

    def __repr__(self) -> str:
        swept = ", ".join(axis.key for axis in self._sweep.axes)
        return f"Swept({str(self.path)!r}, {swept}, {len(self.results)} points)"

    @staticmethod
    def load(path: str | Path) -> Swept:
        """A sweep that is on disk already."""
        asked, ask, results = reopen(Path(path))
        if not isinstance(asked, Sweep):
            raise FedloomError(f"'{path}' is a study, not a sweep.")
        return Swept(Path(path), asked, ask.seeds, results)

    @cached_property
    def tables(self) -> list[Table]:
        """The best of each method, and all points, as text."""
        return self._sweep.tables(self._ask, self.results)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per point and seed: method, swept values, last scores and total cost."""
        rows = []
        for point in self._sweep.points:
            for run in self.results.get(point.name, ()):
                rows.append({**run.summary, "method": point.entry.label, **point.at})
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per point: mean over seeds of every score and cost, and its `_std` over seeds (of
        the population: divided by n)."""
        keys = ["method", *(axis.key for axis in self._sweep.axes)]
        numbers = self.runs.drop(columns=[*keys, "seed"], errors="ignore").select_dtypes("number")
        numbers = numbers[
            [name for name in numbers if not str(name).endswith("_std")]
        ]  # over clients
        grouped = numbers.groupby([self.runs[key] for key in keys], sort=False, dropna=False)
        means, stds = grouped.mean(), grouped.std(ddof=0).add_suffix("_std")
        order = [column for name in means for column in (name, f"{name}_std")]
        return means.join(stds)[order].reset_index()

    def to_csv(self, file: str | Path) -> None:
        """The table as numbers, with all digits."""
        self.table.to_csv(file, index=False)

    def latex(self, best: bool = False) -> str:
        """All points for a paper (with the package booktabs), or the best of each method; the
        best mean of each column is bold."""
        from fedloom.experiment.sweep import measure_of
        from fedloom.report.latex import tabular

        table = self.tables[0 if best else -1]
        left, lower = 1 + len(self._sweep.axes), measure_of(self.results).lower
        return tabular(table.heads, table.rows, left, lower)

    def plot(
        self, key: str | None = None, file: str | Path | None = None, width: float | None = None
    ) -> Figure:
        """Scores against a swept setting (unless given, the first); saved if `file` is given, in a
        `width` of so many inches."""
        from fedloom.report.plots import finish

        drawn = dict(
            zip((a.key for a in self._sweep.axes if len(a.values) > 1),
                self._sweep.pictures(self._ask, self.results), strict=True)
        )  # fmt: skip
        if not drawn:
            raise FedloomError("There is nothing to plot: no setting has two values with results.")
        key = next(iter(drawn)) if key is None else key
        if key not in drawn:
            raise unknown("swept setting", key, drawn)
        return finish(drawn[key].figure(), file, width)

    def report(self) -> Path:
        """Write report.html, tables.md and the pictures into the sweep's folder."""
        write_report(self._sweep, self._ask, self.results, self.path)
        return self.path / "report.html"

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from fedloom.report.html import Grid
        from fedloom.report.html import table as html_table

        return "".join(
            f"<p>{table.title}</p>{html_table(Grid(table.heads, [list(r) for r in table.rows]))}"
            for table in self.tables
        )
