"""Which personal method when: all of them over label skew and the size of clients' data.

A client has all classes, five or two of them, and 1,400, 350 or 70 samples (on MNIST), of which a
quarter is for its score. Values are those that `fedloom tune` chose for the study `s1`, the same in
all nine squares, so the picture also shows what a setting that was tuned elsewhere is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Cell, Drawn, Results, Study, Table, spread
from fedloom.studies.s1 import LABELS, POPULATIONS, QUICK, SETUPS, chosen

SKEWS = {"iid": "all classes", "classes:5": "5 classes", "classes:2": "2 classes"}
SHARES = {1.0: "all data", 0.25: "a quarter", 0.05: "a twentieth"}
ROUNDS = 100
ALONE = "local"  # training alone, with FedAvg's values: what all others must beat
CLOSE = 1.0  # points: methods this near to the best are as good


class S1When(Study):
    """Personal and meta methods, by label skew and size of client data."""

    name = "s1-when"
    title = "Which personal method when: label skew and size of client data"
    data = ("mnist", "fashion-mnist", "digits")
    presets = ("tuned",)
    tuned = ("tuned",)

    def check(self, ask: Ask) -> None:
        super().check(ask)
        chosen(ask)

    def cells(self, ask: Ask) -> list[Cell]:
        known = chosen(ask)
        values = {**known, ALONE: known["fedavg"]} if "fedavg" in known else known
        return [
            Cell(cell_name(method, skew, share), method, self._settings(ask, mine, skew, share))
            for skew in SKEWS
            for share in self.shares(ask)
            for method, mine in values.items()
        ]

    @staticmethod
    def shares(ask: Ask) -> list[float]:
        return [s for s in SHARES if ask.data != "digits" or s == 1]  # digits is small as it is

    def _settings(
        self, ask: Ask, values: dict[str, Any], skew: str, share: float
    ) -> dict[str, Any]:
        rounds = QUICK if ask.scale == "quick" else ROUNDS
        return {
            **SETUPS[ask.data].settings,
            **values,
            "data": ask.data,
            "partition": skew,
            "newcomer_partition": skew,
            "data_share": share,
            "score_on": "query",
            "rounds": rounds,
            "eval_every": rounds,
        }

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        return [_table(ask, results, population) for population in POPULATIONS]

    def pictures(self, ask: Ask, results: Results) -> list[Drawn]:
        if not results:
            return []
        panels = {
            f"{population} clients": [
                [best(ask, results, population, skew, share) for share in self.shares(ask)]
                for skew in SKEWS
            ]
            for population in POPULATIONS
        }
        sizes = [SHARES[share] for share in self.shares(ask)]
        title = f"Which method to take on {ask.data}"
        drawn = partial(_draw, panels, list(SKEWS.values()), sizes)
        return [Drawn("when", title, drawn)]


def cell_name(method: str, skew: str, share: float) -> str:
    return f"{method}-{skew.replace(':', '')}-{share:g}"


def label(method: str) -> str:
    return "local training" if method == ALONE else LABELS[method]


def _micro(runs: Sequence[Result], population: str) -> list[float]:
    """acc_micro of each seed; local training has nothing to give to new clients."""
    name = f"{POPULATIONS[population]}micro"
    return [100 * float(r.summary[name]) for r in runs if name in r.summary]


def best(
    ask: Ask, results: Results, population: str, skew: str, share: float
) -> list[tuple[str, float]]:
    """The methods of a square that are within a point of the best, the best first."""
    means = {}
    for method in (ALONE, *LABELS):
        found = _micro(results.get(cell_name(method, skew, share), ()), population)
        if found and not (method == ALONE and population == "new"):
            means[method] = float(np.mean(found))
    ranked = sorted(means, key=lambda m: -means[m])
    return [(label(m), means[m]) for m in ranked if means[m] >= means[ranked[0]] - CLOSE]


def _table(ask: Ask, results: Results, population: str) -> Table:
    squares = [(skew, share) for skew in SKEWS for share in S1When.shares(ask)]
    heads = ["method", *(f"{SKEWS[skew]}, {SHARES[share]}" for skew, share in squares)]
    rows = []
    for method in (ALONE, *LABELS):
        if method == ALONE and population == "new":
            continue
        runs = [results.get(cell_name(method, skew, share), ()) for skew, share in squares]
        if any(runs):
            rows.append([label(method), *(spread(_micro(r, population), 1) for r in runs)])
    majority = ["majority class"]
    for skew, share in squares:
        some = next(
            (r for m in (ALONE, *LABELS) if (r := results.get(cell_name(m, skew, share)))), ()
        )
        name = f"{POPULATIONS[population]}majority"
        majority.append(spread([100 * r.summary[name] for r in some], 1))
    title = f"{population.capitalize()} clients, {ask.data}: acc_micro, %, {ask.over}"
    return Table(title, heads, [majority, *rows])


def _draw(panels: Any, skews: list[str], sizes: list[str]) -> Any:
    from fedloom.report.plots import plot_choices

    return plot_choices(panels, skews, sizes)
