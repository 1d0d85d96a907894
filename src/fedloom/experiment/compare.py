"""Several methods side by side: one table over seeds, paired, with the curves beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.config import read_config
from fedloom.experiment.fitting import same_task
from fedloom.experiment.folder import COMPARISON, resuming
from fedloom.experiment.pairing import differences, in_common, notes
from fedloom.experiment.result import Result
from fedloom.experiment.settings import RESUMABLE
from fedloom.experiment.store import RunStore
from fedloom.files import atomic_file, slug
from fedloom.report.latex import bold, escaped, framed
from fedloom.report.marks import Cell, bests
from fedloom.tasks import Classification, Measure, kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, its unit, whether less is better, and whether methods
    are ranked by it (time depends on what else the machine did)."""

    heading: str
    unit: str
    factor: float
    lower: bool = False
    ranked: bool = True

    @property
    def head(self) -> str:
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

    @staticmethod
    def of(measure: Measure, heading: str) -> Column:
        return Column(heading, measure.unit, measure.factor, measure.lower)

    def text(self, mean: float, std: float, seeds: int) -> str:
        mean, std = mean * self.factor, std * self.factor
        if not np.isfinite(mean):  # a seed without a value: no mean over all seeds
            return "–"
        if self.unit:
            digits = 2 if abs(mean) < 1000 else 0
        else:  # of any magnitude: four significant digits
            digits = max(3 - math.floor(math.log10(abs(mean))), 0) if mean else 2
        text = f"{mean:.{digits}f}"
        return f"{text} ± {std:.{digits}f}" if seeds > 1 and std >= 10**-digits / 2 else text

    def bests(self, texts: Sequence[str]) -> list[bool]:
        """Which of its cells are bold."""
        return bests(texts, self.lower) if self.ranked else [False] * len(texts)


_COSTS = {
    "bytes": Column("traffic", "MB", 1e-6, lower=True),
    "macs": Column("work", "GMAC", 1e-9, lower=True),
    "seconds": Column("time", "s", 1, lower=True, ranked=False),
}


def columns_of(task: str) -> dict[str, Column]:
    """Name in the summary → the column of a comparison of this task."""
    first, *others = kind(task).measures
    tested = others if task != Classification.name else []
    tested = [m for m in tested if m not in Classification.measures[1:] or task == "multi-label"]
    return {
        f"test_{first.name}": Column.of(first, f"test {first.called}"),
        **{f"test_{m.name}": Column.of(m, f"test {m.called}") for m in tested},
        "macro": Column.of(first, f"client {first.called}"),
        "worst10": Column.of(first, "worst 10 %"),
        "new_macro": Column.of(first, "newcomers"),
        **_COSTS,
    }


@dataclass
class Record:
    """What a comparison was asked for, as its folder keeps it: settings of all methods and, by
    label, of each; what a method makes no use of, what was taken from it and why, and who
    diverged."""

    seeds: int = 1
    seed: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, dict[str, str]] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)

    FILE = COMPARISON

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)
        with atomic_file(folder / self.FILE) as part:
            part.write_text(text, encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Record:
        if not Comparison.is_in(folder):
            raise FedloomError(f"'{folder}' holds no comparison: it has no {Record.FILE}.")
        content = read_config(folder / Record.FILE)
        try:
            return Record(**content)
        except TypeError as e:
            raise FedloomError(
                f"'{folder / Record.FILE}' is not what fedloom wrote: {e}."
            ) from None

    def with_more(self, other: Record) -> Record:
        """This one with another's methods."""
        both = {
            name: {**getattr(self, name), **getattr(other, name)}
            for name in ("own", "unused", "dropped", "diverged")
        }
        return Record(self.seeds, self.seed, self.asked, **both)


def run_name(label: str, seed: int) -> str:
    """The directory of a run in a comparison's folder."""
    return slug(f"{label}-s{seed}")


SURE = 0.05  # p-value from which methods do not differ significantly


class Comparison:
    """The runs of a comparison: method → one result per seed, in the same order of seeds.

    `same` names what is the same in all runs of a seed; `differences` says by method in what it
    differs from the baseline, or from the settings that were asked for; `notes` what else a
    reader should know of it.
    """

    FILES = (Record.FILE, "table.csv", "clients.csv", "report.html",
             "comparison.png", "comparison.svg", "comparison.pdf")  # fmt: skip

    def __init__(
        self, results: dict[str, list[Result]], path: Path, record: Record | None = None
    ) -> None:
        self.results = results
        self.path = path
        self.record = record or Record()

    def __repr__(self) -> str:
        return f"Comparison({str(self.path)!r}, {', '.join(self.results)})"

    @staticmethod
    def is_in(path: str | Path) -> bool:
        return (Path(path) / Record.FILE).is_file()

    @staticmethod
    def load(path: str | Path) -> Comparison:
        """A comparison that is on disk already."""
        folder = Path(path)
        record = Record.read(folder)
        results: dict[str, list[Result]] = {}
        for label in (name for name in record.own if name not in record.diverged):
            seeds = range(record.seed, record.seed + record.seeds)
            results[label] = [_finished(folder, label, seed) for seed in seeds]
        return Comparison(results, folder, record)

    @staticmethod
    def of(runs: Sequence[str | Path | Result], path: str | Path = "runs/compare") -> Comparison:
        """A comparison of finished runs, wherever they are; `path` is where a report goes. Runs
        that differ in their seed alone are one method; others of the same name are told apart by
        what they differ in."""
        found = [run if isinstance(run, Result) else Result(run) for run in runs]
        if not found:
            raise FedloomError("Which runs should be compared? Name them.")
        results: dict[str, list[Result]] = {}
        for label, run in zip(_labels(found), found, strict=True):
            results.setdefault(label, []).append(run)
        seeds = {}
        for label, mine in results.items():
            mine.sort(key=lambda run: run.config["seed"])
            seeds[label] = [run.config["seed"] for run in mine]
        first, *others = seeds
        for label in others:
            if seeds[label] != seeds[first]:
                raise FedloomError(
                    "Methods are paired by seed, so each needs a run of every seed: "
                    f"{first} has {_listed(seeds[first])}, {label} has {_listed(seeds[label])}."
                )
        if len(set(seeds[first])) < len(seeds[first]):
            raise FedloomError(
                f"Two of the runs of {first} have the same settings and seed. Name one of them."
            )
        return Comparison(results, Path(path), Record(len(seeds[first]), seeds[first][0]))

    @property
    def diverged(self) -> dict[str, str]:
        """Methods left out, and why."""
        return self.record.diverged

    @cached_property
    def task(self) -> str:
        """What all of them learn."""
        return same_task(run.task for runs in self.results.values() for run in runs)

    @cached_property
    def all_columns(self) -> dict[str, Column]:
        return columns_of(self.task)

    @property
    def scores(self) -> tuple[str, str]:
        """The columns that methods are compared by: of the clients, and of the common test set."""
        return "macro", f"test_{kind(self.task).measures[0].name}"

    def agreed(self) -> dict[str, Any]:
        """Settings that all runs share so as to be compared on the same samples."""
        config = next(iter(self.results.values()))[0].config
        return {key: config[key] for key in ("score_on", "validation_share") if key in config}

    @property
    def baseline(self) -> str:
        """The method that the others are paired with: FedAvg if it is there, else the first."""
        return "fedavg" if "fedavg" in self.results else next(iter(self.results))

    @cached_property
    def same(self) -> list[str]:
        return in_common(self.results)

    @cached_property
    def differences(self) -> dict[str, list[str]]:
        record = self.record
        return differences(
            self.results, self.baseline, record.asked, record.own, record.unused, record.dropped
        )

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        return notes(self.results, self.record.unused)

    def remarks_by_method(self) -> dict[str, dict[str, list[str]]]:
        """`differences` and `notes` under their headings, as far as there are any."""
        found = {"Not the same": self.differences, "Note": self.notes}
        return {heading: words for heading, words in found.items() if words}

    def remarks(self) -> list[str]:
        """What a reader of the table must know, as sentences."""
        seeds = len(next(iter(self.results.values())))
        over = f"Mean ± standard deviation over {seeds} seeds (population: divided by n)"
        out = [f"{over if seeds > 1 else 'One seed'}; methods are paired by seed."]
        if len(self.results) > 1:
            out.append(f"The same in all runs of a seed: {', '.join(self.same) or 'nothing'}.")
        parts = {r.scored_on for results in self.results.values() for r in results}
        if len(parts) == 1 and None not in parts:
            out.append(f"Clients are scored on {parts.pop()}.")
        return out

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per method and seed, with its last scores and total cost."""
        rows = []
        for method, results in self.results.items():
            rows += [{**r.summary, "method": method} for r in results]
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Mean and standard deviation over seeds (population: divided by n); `gain` is paired by
        seed with the baseline, `p` the two-sided p-value of a paired t-test on it (NaN with one
        seed)."""
        base = self.runs[self.runs["method"] == self.baseline].set_index("seed")
        rows = []
        for method in self.results:
            mine = self.runs[self.runs["method"] == method].set_index("seed")
            row: dict[str, object] = {"method": method}
            for name in self.all_columns:
                if name in mine:
                    row[name] = mine[name].mean(skipna=False)
                    row[f"{name}_std"] = mine[name].std(ddof=0)
            for name in reversed(self.scores):
                if name in mine and name in base:
                    gain = mine[name] - base[name]
                    row[f"{name}_gain"] = gain.mean(skipna=False)
                    row[f"{name}_gain_std"] = gain.std(ddof=0)
                    better = -gain if self.all_columns[name].lower else gain
                    row[f"{name}_wins"] = int((better > 0).sum())
                    row[f"{name}_p"] = _chance(gain.to_numpy())
            rows.append(row)
        return pd.DataFrame(rows).set_index("method")

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: headings and rows, for a terminal, Markdown or HTML."""
        table = self.table
        used = self.columns
        paired = self.scores if len(table) > 1 else ()
        gain = next((n for n in paired if f"{n}_gain" in table), None)
        columns = self.all_columns
        heads = ["method"] + [columns[n].head for n in used]
        if gain:
            heads.append(f"{columns[gain].heading} vs {self.baseline}")
        seeds = len(next(iter(self.results.values())))
        out = []
        for method, row in table.iterrows():
            cells = [str(method)]
            for name in used:
                cells.append(columns[name].text(row[name], row[f"{name}_std"], seeds))
            if gain and (method == self.baseline or not np.isfinite(row[f"{gain}_gain"])):
                cells.append("–")
            elif gain:
                change, spread = self._change(gain, row, seeds)
                wins, p = int(row[f"{gain}_wins"]), row[f"{gain}_p"]
                sure = f", p = {p:.2g}" if np.isfinite(p) else ""
                cells.append(f"{change}{spread} ({wins}/{seeds} better{sure})")
            out.append(cells)
        return heads, out

    def marked(self) -> tuple[list[str], list[list[Cell]]]:
        """`cells` with marks: of each column, what is best as printed, and what does not differ
        significantly from that."""
        heads, rows = self.cells()
        out = [[Cell(text) for text in row] for row in rows]
        for i, name in enumerate(self.columns, 1):
            marks = self.all_columns[name].bests([row[i] for row in rows])
            ties = self.best(name)[1] if any(marks) else []
            for method, row, best in zip(self.table.index, out, marks, strict=True):
                row[i] = Cell(row[i].text, best, method in ties and not best)
        return heads, out

    def marks(self) -> list[str]:
        """What the marks of the table say, as far as it has any."""
        cells = [cell for row in self.marked()[1] for cell in row]
        if not any(cell.best for cell in cells):
            return []
        if not any(cell.tie for cell in cells):
            return ["The best of a column is bold."]
        return ["The best of a column is bold; ≈: not significantly different from the best "
                f"(paired t-test over seeds, p ≥ {SURE:g})."]  # fmt: skip

    def _change(self, name: str, row: pd.Series, seeds: int) -> tuple[str, str]:
        """A gain and its spread, as text."""
        column = self.all_columns[name]
        by, std = (column.factor * row[f"{name}_{word}"] for word in ("gain", "gain_std"))
        if column.unit:
            return f"{by:+.2f}", f" ± {std:.2f}" if seeds > 1 else ""
        return f"{by:+.3g}", f" ± {std:.2g}" if seeds > 1 else ""

    def markdown(self) -> str:
        heads, rows = self.cells()
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])

    def to_csv(self, file: str | Path) -> None:
        """The table as numbers, with all digits."""
        self.table.to_csv(file)

    def latex(self, columns: Sequence[str] | None = None) -> str:
        """The table for a paper (with the package booktabs), the best of each column bold; unless
        `columns` are given, the scores and the traffic."""
        table, known = self.table, self.all_columns
        if columns is None:
            columns = (self.scores[1], "macro", "worst10", "bytes")
        if wrong := next((n for n in columns if n not in known), None):
            raise unknown("column", wrong, known)
        used = [n for n in columns if n in table and table[n].notna().any()]
        seeds = len(next(iter(self.results.values())))
        heads = [known[n].head for n in used]
        rows = [[escaped(str(method))] for method in table.index]
        for name in used:
            found = zip(table[name], table[f"{name}_std"], strict=True)
            texts = [known[name].text(mean, std, seeds) for mean, std in found]
            for cells, text, best in zip(rows, texts, known[name].bests(texts), strict=True):
                cells.append(bold(text, best))
        return framed(["method", *heads], rows)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from fedloom.report.html import Grid
        from fedloom.report.html import table as html_table

        return html_table(Grid(*self.cells())) + f"<p>{' '.join(self.remarks())}</p>"

    def plot(self, file: str | Path | None = None, width: float | None = None) -> Figure:
        """Scores over rounds, mean and spread over seeds; saved if `file` is given, in a `width` of
        so many inches."""
        from fedloom.report.plots import finish, plot_comparison

        curves = {m: [r.evaluations for r in results] for m, results in self.results.items()}
        return finish(plot_comparison(curves, kind(self.task).measures[0]), file, width)

    def report(self, file: str | Path | None = None, figures: str | Path | None = None) -> Path:
        """Write report.html into the comparison's folder (or `file`), and beside it the table and
        the clients' scores as CSV and the curves as PNG, SVG and PDF; with `figures`, all figures
        as SVG and PDF and their data as CSV into that folder."""
        from fedloom.experiment.reporting import comparison_page, write_page
        from fedloom.report.plots import save

        report = write_page(comparison_page(self), file or self.path / "report.html", figures)
        if file is None:
            self.table.to_csv(self.path / "table.csv")
            self.clients.to_csv(self.path / "clients.csv", index=False)
            figure = self.plot()
            for ending in ("png", "svg", "pdf"):
                save(figure, self.path / f"comparison.{ending}")
        return report

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per method, seed, scored client and evaluation."""
        return pd.concat(
            [
                run.clients.assign(method=method, seed=run.config["seed"])
                for method, runs in self.results.items()
                for run in runs
            ],
            ignore_index=True,
        )

    @property
    def columns(self) -> list[str]:
        """Scores and costs that there are, in the table's order."""
        return [n for n in self.all_columns if n in self.table and self.table[n].notna().any()]

    def best(self, column: str) -> tuple[str, list[str]]:
        """The best method of a column, and those that do not differ significantly from it
        (none with one seed, or of costs)."""
        values = self.table[column]
        lower = self.all_columns[column].lower
        first = str(values.idxmin() if lower else values.idxmax())
        if column in _COSTS:
            return first, []
        others = [str(m) for m in self.table.index if m != first]
        return first, [m for m in others if self.chance(first, m, column) >= SURE]

    def chance(self, one: str, other: str, column: str) -> float:
        """The p-value of a paired t-test between two methods (NaN with one seed)."""
        a, b = (
            self.runs[self.runs["method"] == method].set_index("seed")[column]
            for method in (one, other)
        )
        return _chance((a - b).to_numpy())


def _finished(folder: Path, label: str, seed: int) -> Result:
    path = folder / run_name(label, seed)
    if RunStore(path).exists:
        run = Result(path)
        if run.summary["rounds"] == run.summary["rounds_asked"]:
            return run
    raise FedloomError(
        f"The comparison in '{folder}' is not finished: {label} with seed {seed} is missing. "
        f"Continue with: {resuming(path)}"
    )


def _labels(runs: Sequence[Result]) -> list[str]:
    """The runs' methods, with what tells those of the same name apart."""
    names = Counter(run.config["method"] for run in runs)
    out = []
    for run in runs:
        method = run.config["method"]
        mine = _told_apart(run)
        same = [_told_apart(other) for other in runs if other.config["method"] == method]
        differ = [k for k in mine if any(other.get(k) != mine[k] for other in same)]
        words = "".join(f"@{k}={mine[k]}" for k in differ) if names[method] > 1 else ""
        out.append(f"{Path(method).stem if method.endswith('.py') else method}{words}")
    return out


def _told_apart(run: Result) -> dict[str, Any]:
    """Everything that identifies a run, apart from its seed."""
    rest = {
        k: v for k, v in run.config.items() if k not in (*RESUMABLE, "seed", "params", "method")
    }
    return {**rest, "rounds": run.config["rounds"], **(run.config.get("params") or {})}


def _listed(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _chance(gains: np.ndarray) -> float:
    """The p-value of a paired t-test: how likely gains as large are where there is none."""
    from scipy.stats import t

    if len(gains) < 2 or not np.isfinite(gains).all():
        return float("nan")
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    if error == 0:
        return 1.0 if gains[0] == 0 else 0.0
    return float(2 * t.sf(abs(gains.mean()) / error, len(gains) - 1))
