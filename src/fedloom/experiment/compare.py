"""Several methods side by side: one table over seeds, paired, with the curves beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedloom.experiment.pairing import differences, in_common, notes
from fedloom.experiment.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: name in the summary → (heading, unit, factor)
COLUMNS = {
    "test_accuracy": ("test accuracy", "%", 100),
    "macro": ("client accuracy", "%", 100),
    "worst10": ("worst 10 %", "%", 100),
    "new_macro": ("newcomers", "%", 100),
    "bytes": ("traffic", "MB", 1e-6),
    "macs": ("work", "GMAC", 1e-9),
    "seconds": ("time", "s", 1),
}


class Comparison:
    """The runs of a comparison: method → one result per seed, in the same order of seeds.

    `same` names what is the same in all runs of a seed; `differences` says by method in what it
    differs from the baseline, or from the settings that were `asked` for; `notes` what else a
    reader should know of it.
    """

    FILES = ("table.csv", "comparison.png", "report.html")

    def __init__(
        self,
        results: dict[str, list[Result]],
        path: Path,
        diverged: Mapping[str, str] | None = None,
        asked: Mapping[str, Any] | None = None,
        unused: Mapping[str, Sequence[str]] | None = None,
        dropped: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.results = results
        self.path = path
        self.diverged = dict(diverged or {})  # methods left out, and why
        self._asked, self._unused, self._dropped = asked or {}, unused or {}, dropped or {}

    @property
    def baseline(self) -> str:
        """The method that the others are paired with: FedAvg if it is there, else the first."""
        return "fedavg" if "fedavg" in self.results else next(iter(self.results))

    @cached_property
    def same(self) -> list[str]:
        return in_common(self.results)

    @cached_property
    def differences(self) -> dict[str, list[str]]:
        return differences(self.results, self.baseline, self._asked, self._unused, self._dropped)

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        return notes(self.results, self._unused)

    def remarks_by_method(self) -> dict[str, dict[str, list[str]]]:
        """`differences` and `notes` under their headings, as far as there are any."""
        found = {"Not the same": self.differences, "Note": self.notes}
        return {heading: words for heading, words in found.items() if words}

    def remarks(self) -> list[str]:
        """What a reader of the table must know, as sentences."""
        seeds = len(next(iter(self.results.values())))
        over = f"Mean ± std over {seeds} seeds" if seeds > 1 else "One seed"
        out = [f"{over}; methods are paired by seed."]
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
        """Mean and standard deviation over seeds; `gain` is paired by seed with the baseline."""
        base = self.runs[self.runs["method"] == self.baseline].set_index("seed")
        rows = []
        for method in self.results:
            mine = self.runs[self.runs["method"] == method].set_index("seed")
            row: dict[str, object] = {"method": method}
            for name in COLUMNS:
                if name in mine:
                    row[name] = mine[name].mean(skipna=False)
                    row[f"{name}_std"] = mine[name].std(ddof=0)
            for name in ("test_accuracy", "macro"):
                if name in mine and name in base:
                    gain = mine[name] - base[name]
                    row[f"{name}_gain"] = gain.mean(skipna=False)
                    row[f"{name}_gain_std"] = gain.std(ddof=0)
                    row[f"{name}_wins"] = int((gain > 0).sum())
            rows.append(row)
        return pd.DataFrame(rows).set_index("method")

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: headings and rows, for a terminal, Markdown or HTML."""
        table = self.table
        used = [n for n in COLUMNS if n in table and table[n].notna().any()]
        paired = ("macro", "test_accuracy") if len(table) > 1 else ()
        gain = next((n for n in paired if f"{n}_gain" in table), None)
        heads = ["method"] + [f"{COLUMNS[n][0]} ({COLUMNS[n][1]})" for n in used]
        if gain:
            heads.append(f"{COLUMNS[gain][0]} vs {self.baseline}")
        seeds = len(next(iter(self.results.values())))
        out = []
        for method, row in table.iterrows():
            cells = [str(method)]
            for name in used:
                factor = COLUMNS[name][2]
                cells.append(_plus_minus(row[name] * factor, row[f"{name}_std"] * factor, seeds))
            if gain and (method == self.baseline or not np.isfinite(row[f"{gain}_gain"])):
                cells.append("–")
            elif gain:
                change = f"{100 * row[f'{gain}_gain']:+.2f}"
                spread = f" ± {100 * row[f'{gain}_gain_std']:.2f}" if seeds > 1 else ""
                cells.append(f"{change}{spread} ({int(row[f'{gain}_wins'])}/{seeds} better)")
            out.append(cells)
        return heads, out

    def markdown(self) -> str:
        heads, rows = self.cells()
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])

    def plot(self, file: str | Path | None = None) -> Figure:
        """Accuracy over rounds, mean and spread over seeds; saved if `file` is given."""
        from fedloom.report.plots import plot_comparison, save

        curves = {m: [r.evaluations for r in results] for m, results in self.results.items()}
        figure = plot_comparison(curves)
        if file is not None:
            save(figure, Path(file))
        return figure

    def report(self) -> Path:
        """Write table.csv, comparison.png and report.html into the comparison's folder."""
        from fedloom.report.html import comparison_page

        self.path.mkdir(parents=True, exist_ok=True)
        table, picture, report = (self.path / name for name in self.FILES)
        self.table.to_csv(table)
        self.plot(picture)
        heads, rows = self.cells()
        first = next(iter(self.results.values()))[0]
        page = comparison_page(
            heads, rows, first.config, picture, " ".join(self.remarks()), self.remarks_by_method()
        )
        report.write_text(page, encoding="utf-8")
        return report


def _plus_minus(mean: float, std: float, seeds: int) -> str:
    if not np.isfinite(mean):  # a seed has no number: that is no mean over the seeds
        return "–"
    digits = 2 if abs(mean) < 1000 else 0
    text = f"{mean:.{digits}f}"
    return f"{text} ± {std:.{digits}f}" if seeds > 1 and std >= 10**-digits / 2 else text
