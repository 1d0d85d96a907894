"""S1's comparison: personalisation layers and meta-learning on two classes a client (S1 chapter 5).

`source` has the constants of the source's appendix A; `tuned` those that a search of our own found,
the same for every method (`search` runs it). Where the source has no rate that converged (FedAvg
and FedPer on CIFAR-10), `source` takes the one it used on MNIST.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.errors import FedloomError
from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Cell, Picture, Results, Study, Table

LABELS = {
    "fedavg": "FedAvg",
    "fedavg-meta": "FedAvgMeta",
    "fedper": "FedPer",
    "fedper-meta": "FedPerMeta",
    "lg-fedavg": "LG-FedAvg",
    "fedmeta-maml": "FedMeta(MAML)",
    "fedmeta-metasgd": "FedMeta(Meta-SGD)",
    "fedmeta-per-maml": "FedMeta-Per(MAML)",
    "fedmeta-per-metasgd": "FedMeta-Per(Meta-SGD)",
}
META = tuple(name for name in LABELS if name.startswith("fedmeta"))
PRIVATE = ("fedper", "fedper-meta", "lg-fedavg", "fedmeta-per-maml", "fedmeta-per-metasgd")
ROUNDS = {"mnist": 300, "cifar10": 600, "digits": 60}
MODEL = {"mnist": "mlp", "cifar10": "lenet", "digits": "mlp"}
CLIENTS = {"mnist": 50, "cifar10": 50, "digits": 20}  # digits has data for fewer
SCORED = "query part"  # of everybody's test data: some cells adapt to the support part
QUICK = 20  # rounds
#: method → learning rate (β of the meta methods) and, for those, α; S1 table A.2
SOURCE_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": {
        "fedmeta-maml": (0.001, 0.001),
        "fedmeta-metasgd": (5e-4, 0.001),
        "fedmeta-per-maml": (0.001, 0.001),
        "fedmeta-per-metasgd": (5e-4, 0.001),
    },
    "cifar10": {
        "fedmeta-maml": (0.001, 0.01),
        "fedmeta-metasgd": (0.001, 0.001),
        "fedmeta-per-maml": (0.005, 0.001),
        "fedmeta-per-metasgd": (0.01, 0.01),
    },
}
SOURCE_RATE = 1e-5  # of FedAvg and FedPer, with and without fine-tuning
SEARCH_ROUNDS = 60
#: searched for every method: learning rates and, for the meta methods, α
RATES = {"mnist": (0.003, 0.01, 0.03, 0.1), "cifar10": (0.01, 0.03, 0.1)}
INNER_RATES = {"mnist": (0.01, 0.1), "cifar10": (0.01,)}
#: the best of the search by the sum of local and new clients' acc_micro (seed 0); what was not
#: searched has `TUNED`
TUNED_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": {
        "fedavg": (0.1,),
        "fedavg-meta": (0.1,),
        "fedper": (0.1,),
        "fedper-meta": (0.01,),
        "lg-fedavg": (0.1,),
        "fedmeta-maml": (0.03, 0.01),
        "fedmeta-metasgd": (0.03, 0.01),
        "fedmeta-per-maml": (0.03, 0.01),
        "fedmeta-per-metasgd": (0.03, 0.01),
    },
    "cifar10": {
        "fedavg": (0.1,),
        "fedavg-meta": (0.03,),
        "fedper": (0.03,),
        "fedper-meta": (0.1,),
        "lg-fedavg": (0.1,),
        "fedmeta-maml": (0.03, 0.01),
        "fedmeta-metasgd": (0.03, 0.01),
        "fedmeta-per-maml": (0.03, 0.01),
        "fedmeta-per-metasgd": (0.03, 0.01),
    },
}
TUNED = (0.03, 0.01)
#: acc_micro, acc_macro ± std, P, R, F1 of the source's tables 5.2 to 5.5
SOURCE = {
    ("mnist", "local"): {
        "fedavg": "85.03 | 82.14±14.76 | 82.03±13.88 | 81.54±14.33 | 79.43±16.83",
        "fedavg-meta": "84.84 | 81.56±16.68 | 80.71±17.02 | 81.18±16.16 | 78.31±19.80",
        "fedmeta-maml": "92.99 | 91.14±5.99 | 90.56±6.24 | 90.98±5.90 | 90.16±6.28",
        "fedmeta-metasgd": "98.02 | 96.35±4.62 | 96.49±4.10 | 95.64±5.94 | 95.80±5.51",
        "fedmeta-per-maml": "99.37 | 99.12±1.29 | 99.11±1.30 | 98.82±1.99 | 98.94±1.60",
        "fedmeta-per-metasgd": "98.92 | 98.15±3.32 | 98.42±1.95 | 98.42±1.96 | 98.20±2.94",
    },
    ("mnist", "new"): {
        "fedavg": "83.92 | 81.69±19.71 | 79.57±20.18 | 80.46±17.84 | 77.66±22.54",
        "fedavg-meta": "84.34 | 82.37±17.42 | 81.38±16.25 | 80.91±15.62 | 78.78±19.31",
        "fedmeta-maml": "92.96 | 91.88±5.88 | 90.14±7.97 | 90.74±5.95 | 90.02±7.34",
        "fedmeta-metasgd": "96.39 | 93.53±8.39 | 93.73±10.26 | 88.65±14.06 | 89.31±14.56",
        "fedmeta-per-maml": "93.60 | 93.57±5.58 | 93.64±5.56 | 90.98±6.98 | 91.83±6.43",
        "fedmeta-per-metasgd": "96.62 | 95.88±3.58 | 95.73±4.11 | 94.34±5.05 | 94.85±4.61",
    },
    ("cifar10", "local"): {
        "fedavg": "19.02 | 19.29±25.11 | 15.57±23.70 | 20.65±25.55 | 16.85±23.92",
        "fedavg-meta": "40.30 | 38.47±31.52 | 32.84±32.06 | 39.33±30.35 | 33.81±30.61",
        "fedmeta-maml": "69.02 | 68.76±14.86 | 67.42±21.16 | 66.56±13.48 | 61.14±20.00",
        "fedmeta-metasgd": "78.63 | 78.73±11.59 | 74.65±21.12 | 75.25±14.09 | 72.87±18.31",
        "fedmeta-per-maml": "86.60 | 86.52±6.31 | 86.43±5.88 | 85.47±6.87 | 85.33±6.77",
        "fedmeta-per-metasgd": "85.61 | 85.68±7.22 | 86.26±6.35 | 85.36±6.83 | 85.08±7.32",
    },
    ("cifar10", "new"): {
        "fedavg": "24.63 | 24.83±22.57 | 18.36±20.15 | 24.44±21.95 | 20.52±20.45",
        "fedavg-meta": "43.39 | 43.54±18.00 | 33.45±21.44 | 42.87±16.98 | 35.14±17.22",
        "fedmeta-maml": "61.69 | 61.64±12.49 | 52.66±26.06 | 59.94±12.35 | 50.76±19.20",
        "fedmeta-metasgd": "68.36 | 67.89±15.11 | 70.30±22.37 | 66.86±15.02 | 60.24±21.52",
        "fedmeta-per-maml": "64.22 | 63.70±12.29 | 57.06±24.99 | 61.63±12.66 | 53.68±19.06",
        "fedmeta-per-metasgd": "69.97 | 69.13±14.63 | 66.53±24.91 | 67.82±15.34 | 62.42±20.94",
    },
}
#: table 5.1: centralised, FedAvg on IID data, FedAvg on two classes a client
SOURCE_REFERENCE = {"mnist": ("97.07", "90.36", "85.03"), "cifar10": ("61.91", "53.83", "19.02")}


class S1(Study):
    """Nine methods on clients with two classes each, scored on local and on new clients."""

    name = "s1"
    title = "Personalisation layers and meta-learning (S1, tables 5.1-5.5, figures 5.1-5.3)"
    data = ("mnist", "cifar10", "digits")
    presets = ("source", "tuned", "search")

    def cells(self, ask: Ask) -> list[Cell]:
        if ask.preset == "search":
            return [
                Cell(f"{method}-lr{'-'.join(f'{r:g}' for r in rates)}", method,
                     self._settings(ask, method, rates))
                for method in LABELS
                for rates in _grid(ask.data, method)
            ]  # fmt: skip
        cells = [
            Cell(method, method, self._settings(ask, method, self._rates(ask, method)))
            for method in LABELS
        ]
        plain = self._settings(ask, "fedavg", self._rates(ask, "fedavg"))
        iid = {**plain, "partition": "iid", "newcomers": 0, "eval_every": plain["rounds"]}
        together = {k: v for k, v in iid.items() if k != "participation"}
        together |= {"rounds": max(plain["rounds"] // 10, 2), "eval_every": 2, "lr": 0.01}
        return [
            *cells,
            Cell("fedavg-iid", "fedavg", iid),
            Cell("centralised", "centralised", together),
        ]

    def _settings(self, ask: Ask, method: str, rates: Sequence[float]) -> dict[str, Any]:
        rounds = ROUNDS[ask.data]
        if ask.scale == "quick":
            rounds = QUICK
        elif ask.preset == "search":
            rounds = min(rounds, SEARCH_ROUNDS)
        # Curves of 15 points; a search, and who is in no figure, needs the last one only.
        last = ask.preset == "search" or method == "lg-fedavg"
        every = rounds if last else max(rounds // 15, 5)
        settings: dict[str, Any] = {
            "data": ask.data,
            "pool": True,
            "model": MODEL[ask.data],
            "clients": CLIENTS[ask.data],
            "partition": "classes:2,uneven=1",
            "test_share": 0.25,
            "support_share": 0.2,
            "newcomers": CLIENTS[ask.data] // (2 if ask.data == "digits" else 1),
            "participation": 5,
            "epochs": 1,
            "batch": 32,
            "rounds": rounds,
            "eval_every": every,
            "eval_common": 0,  # personal models are for their own clients
            "lr": rates[0],
        }
        if ask.preset == "source" and method in PRIVATE:
            settings["first"] = "mean"  # its server averages whole models
        if method in META:
            settings |= {"alpha": rates[1], "inner_steps": 1}
        return settings

    def check(self, ask: Ask) -> None:
        super().check(ask)
        if ask.preset == "source" and ask.data not in SOURCE_RATES:
            raise FedloomError(
                f"The source has no constants for {ask.data}. Use --preset tuned, or one of its "
                f"data sets: {', '.join(SOURCE_RATES)}."
            )

    def _rates(self, ask: Ask, method: str) -> Sequence[float]:
        known = TUNED_RATES if ask.preset == "tuned" else SOURCE_RATES
        if ask.preset == "tuned":
            return known.get(ask.data, {}).get(method, TUNED)
        return known[ask.data].get(method, (SOURCE_RATE,))

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        if ask.preset == "search":
            return [_search_table(results)]
        return [
            _reference_table(ask, results),
            _scores_table(ask, results, "FedAvg and FedMeta (tables 5.2 and 5.3)",
                          ("fedavg", "fedavg-meta", "fedmeta-maml", "fedmeta-metasgd")),
            _scores_table(ask, results, "FedMeta and FedMeta-Per (tables 5.4 and 5.5)", META),
            _scores_table(ask, results, "Personal layers (not in the source's tables)",
                          ("fedper", "fedper-meta", "lg-fedavg")),
        ]  # fmt: skip

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        if ask.preset == "search":
            return []
        panels = {"micro": "local clients", "new_micro": "new clients"}
        groups = {
            "5.1": ("fedavg", "fedavg-meta", "fedmeta-maml", "fedmeta-metasgd"),
            "5.2": ("fedavg", "fedper", "fedper-meta", "fedmeta-per-maml", "fedmeta-per-metasgd"),
            "5.3": META,
        }
        out = []
        for number, methods in groups.items():
            ran = [m for m in methods if m in results]
            curves = {LABELS[m]: [r.evaluations for r in results[m]] for m in ran}
            title = f"Figure {number}: convergence on {ask.data}"
            out.append(Picture(f"figure-{number}", title, panels, curves))
        return out


def _grid(data: str, method: str) -> list[tuple[float, ...]]:
    rates, inner = RATES.get(data, RATES["mnist"]), INNER_RATES.get(data, INNER_RATES["mnist"])
    if method in META:
        return [(rate, alpha) for rate in rates for alpha in inner]
    return [(rate,) for rate in rates]


def _mean(runs: Sequence[Result], *names: str) -> str:
    """A score, or a score ± its spread over clients, in %: means over seeds."""
    if not runs:
        return "–"
    values = [100 * float(np.mean([r.summary[name] for r in runs])) for name in names]
    return "±".join(f"{value:.2f}" for value in values)


def _scores_table(ask: Ask, results: Results, title: str, methods: Sequence[str]) -> Table:
    scores = (("micro",), ("macro", "std"), ("precision", "precision_std"),
              ("recall", "recall_std"), ("f1", "f1_std"))  # fmt: skip
    heads = ["clients", "method", "acc_micro", "acc_macro", "P_macro", "R_macro", "F1_macro",
             "source: acc_micro, acc_macro, P, R, F1"]  # fmt: skip
    rows = []
    for population, prefix in (("local", ""), ("new", "new_")):
        for method in methods:
            ours = [
                _mean(results.get(method, ()), *(prefix + n for n in names)) for names in scores
            ]
            theirs = SOURCE.get((ask.data, population), {}).get(method, "–").replace(" | ", ", ")
            rows.append([population, LABELS[method], *ours, theirs])
    return Table(f"{title}, {ask.data}, {SCORED}, %", heads, rows)


def _reference_table(ask: Ask, results: Results) -> Table:
    theirs = SOURCE_REFERENCE.get(ask.data, ("–",) * 3)
    cases = (("centralised", "centralised"), ("FedAvg, IID", "fedavg-iid"),
             ("FedAvg, two classes a client", "fedavg"))  # fmt: skip
    rows = [
        [label, _mean(results.get(cell, ()), "micro"), number]
        for (label, cell), number in zip(cases, theirs, strict=True)
    ]
    title = f"Reference lines (table 5.1), {ask.data}, {SCORED}, %"
    return Table(title, ["", "acc_micro", "source"], rows)


def _search_table(results: Results) -> Table:
    rows = [
        [name, _mean(runs, "micro"), _mean(runs, "new_micro")] for name, runs in results.items()
    ]
    return Table(f"Learning rates (lr, then α), {SCORED}", ["cell", "local", "new"], rows)
