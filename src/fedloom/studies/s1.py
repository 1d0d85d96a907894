"""S1's comparison: personalisation layers and meta-learning on two classes a client (S1 chapter 5).

`source` is what the source's program did, which is not all in its text: pairs of classes from a
ring, a fresh Adam in every round, one outer step a round, its scale of the images, and separate
rates for local and for new clients. `tuned` has values that `fedloom tune` chose for every method
with the same budget, on a part of the training data.

Methods that learn alike are trained once: FedAvg is FedAvgMeta before it adapts, FedPer is
FedPerMeta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Cell, Picture, Results, Study, Table, spread
from fedloom.experiment.tune import Range, read_chosen

LABELS = {
    "fedavg": "FedAvg",
    "fedavg-meta": "FedAvgMeta",
    "fedper": "FedPer",
    "fedper-meta": "FedPerMeta",
    "lg-fedavg": "LG-FedAvg",
    "ditto": "Ditto",
    "fedmeta-maml": "FedMeta(MAML)",
    "fedmeta-metasgd": "FedMeta(Meta-SGD)",
    "fedmeta-per-maml": "FedMeta-Per(MAML)",
    "fedmeta-per-metasgd": "FedMeta-Per(Meta-SGD)",
}
META = tuple(name for name in LABELS if name.startswith("fedmeta"))
PRIVATE = ("fedper", "fedper-meta", "lg-fedavg", "fedmeta-per-maml", "fedmeta-per-metasgd")
#: trained as another, and scored before that one adapts
BEFORE = {"fedavg": "fedavg-meta", "fedper": "fedper-meta"}
HEADLESS = ("fedper", "fedper-meta")  # the source's program leaves their heads out of its scores
POPULATIONS = {"local": "", "new": "new_"}
SCORES = ("micro", "macro", "precision", "recall", "f1")
SCORED = "query part"  # of everybody's test data
QUICK = 20  # rounds


#: who has which data, and what is scored: the same for all methods
SAME = ("pool", "normalise", "clients", "partition", "test_share", "test_cut", "support_share",
        "newcomers", "newcomer_partition", "participation")  # fmt: skip
VALUES = Path(__file__).with_name("values")
#: what `fedloom tune --study s1` searches; rates are Adam's, α and tune_lr those of plain steps
#: (not `outer`: an outer step for each batch is twenty times the work)
SPACE = {
    "lr": Range("log", 1e-5, 3e-2),
    "alpha": Range("log", 1e-4, 0.3),
    "tune_lr": Range("log", 1e-3, 0.3),
    "lam": Range("log", 0.01, 10),
}


@dataclass(frozen=True)
class Setup:
    """What the source did with a data set, and how ours are run like it."""

    rounds: int
    model: str
    shares: str
    normalise: str
    clients: int = 50

    @property
    def settings(self) -> dict[str, Any]:
        ring = f"ring:2,shares={self.shares},draws=1"
        return {
            "pool": True,
            "normalise": self.normalise,
            "model": self.model,
            "clients": self.clients,
            "partition": ring,
            "test_share": 0.25,
            "test_cut": "by-class",
            "support_share": 0.2,
            "newcomers": self.clients,
            "newcomer_partition": ring,
            "participation": 5,
            "epochs": 1,
            "batch": 32,
            "optimiser": "adam",
            "eval_common": 0,  # personal models are for their own clients
        }


SETUPS = {
    "mnist": Setup(300, "mlp", "cuts", "pixel"),
    "cifar10": Setup(600, "lenet", "lognormal", "half"),
    "fashion-mnist": Setup(300, "mlp", "cuts", "pixel"),
    "digits": Setup(60, "mlp", "cuts", "pixel", clients=20),  # it has data for fewer
}
#: method → population → learning rate (β of the meta methods) and, for those, α
SOURCE_RATES: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "mnist": {
        "fedavg-meta": {"local": (1e-5,), "new": (1e-5,)},
        "fedper-meta": {"local": (5e-6,), "new": (5e-6,)},
        "fedmeta-maml": {"local": (1e-3, 1e-3), "new": (1e-3, 1e-3)},
        "fedmeta-metasgd": {"local": (2e-4, 1e-3), "new": (2e-4, 1e-3)},
        "fedmeta-per-maml": {"local": (1e-3, 1e-3), "new": (3e-4, 1e-3)},
        "fedmeta-per-metasgd": {"local": (5e-4, 1e-3), "new": (2e-4, 1e-3)},
    },
    "cifar10": {
        "fedavg-meta": {"local": (1e-4,), "new": (1e-4,)},
        "fedper-meta": {"local": (1e-4,), "new": (1e-4,)},
        "fedmeta-maml": {"local": (1e-3, 0.01), "new": (1e-3, 0.01)},
        "fedmeta-metasgd": {"local": (1e-3, 1e-3), "new": (1e-3, 0.01)},
        "fedmeta-per-maml": {"local": (3e-3, 1e-3), "new": (7e-4, 0.01)},
        "fedmeta-per-metasgd": {"local": (0.01, 0.01), "new": (1e-3, 0.01)},
    },
}
#: acc_micro, acc_macro ± std, P, R, F1 of the source's tables 5.2 to 5.5; of FedPer, which its
#: program scored without the private heads, acc_micro from its result files
SOURCE = {
    ("mnist", "local"): {
        "fedavg": "85.03 | 82.14±14.76 | 82.03±13.88 | 81.54±14.33 | 79.43±16.83",
        "fedavg-meta": "84.84 | 81.56±16.68 | 80.71±17.02 | 81.18±16.16 | 78.31±19.80",
        "fedper": "77.29",
        "fedper-meta": "75.91",
        "fedmeta-maml": "92.99 | 91.14±5.99 | 90.56±6.24 | 90.98±5.90 | 90.16±6.28",
        "fedmeta-metasgd": "98.02 | 96.35±4.62 | 96.49±4.10 | 95.64±5.94 | 95.80±5.51",
        "fedmeta-per-maml": "99.37 | 99.12±1.29 | 99.11±1.30 | 98.82±1.99 | 98.94±1.60",
        "fedmeta-per-metasgd": "98.92 | 98.15±3.32 | 98.42±1.95 | 98.42±1.96 | 98.20±2.94",
    },
    ("mnist", "new"): {
        "fedavg": "83.92 | 81.69±19.71 | 79.57±20.18 | 80.46±17.84 | 77.66±22.54",
        "fedavg-meta": "84.34 | 82.37±17.42 | 81.38±16.25 | 80.91±15.62 | 78.78±19.31",
        "fedper": "78.30",
        "fedper-meta": "77.47",
        "fedmeta-maml": "92.96 | 91.88±5.88 | 90.14±7.97 | 90.74±5.95 | 90.02±7.34",
        "fedmeta-metasgd": "96.39 | 93.53±8.39 | 93.73±10.26 | 88.65±14.06 | 89.31±14.56",
        "fedmeta-per-maml": "93.60 | 93.57±5.58 | 93.64±5.56 | 90.98±6.98 | 91.83±6.43",
        "fedmeta-per-metasgd": "96.62 | 95.88±3.58 | 95.73±4.11 | 94.34±5.05 | 94.85±4.61",
    },
    ("cifar10", "local"): {
        "fedavg": "19.02 | 19.29±25.11 | 15.57±23.70 | 20.65±25.55 | 16.85±23.92",
        "fedavg-meta": "40.30 | 38.47±31.52 | 32.84±32.06 | 39.33±30.35 | 33.81±30.61",
        "fedper": "13.22",
        "fedper-meta": "18.57",
        "fedmeta-maml": "69.02 | 68.76±14.86 | 67.42±21.16 | 66.56±13.48 | 61.14±20.00",
        "fedmeta-metasgd": "78.63 | 78.73±11.59 | 74.65±21.12 | 75.25±14.09 | 72.87±18.31",
        "fedmeta-per-maml": "86.60 | 86.52±6.31 | 86.43±5.88 | 85.47±6.87 | 85.33±6.77",
        "fedmeta-per-metasgd": "85.61 | 85.68±7.22 | 86.26±6.35 | 85.36±6.83 | 85.08±7.32",
    },
    ("cifar10", "new"): {
        "fedavg": "24.63 | 24.83±22.57 | 18.36±20.15 | 24.44±21.95 | 20.52±20.45",
        "fedavg-meta": "43.39 | 43.54±18.00 | 33.45±21.44 | 42.87±16.98 | 35.14±17.22",
        "fedper": "14.40",
        "fedper-meta": "13.33",
        "fedmeta-maml": "61.69 | 61.64±12.49 | 52.66±26.06 | 59.94±12.35 | 50.76±19.20",
        "fedmeta-metasgd": "68.36 | 67.89±15.11 | 70.30±22.37 | 66.86±15.02 | 60.24±21.52",
        "fedmeta-per-maml": "64.22 | 63.70±12.29 | 57.06±24.99 | 61.63±12.66 | 53.68±19.06",
        "fedmeta-per-metasgd": "69.97 | 69.13±14.63 | 66.53±24.91 | 67.82±15.34 | 62.42±20.94",
    },
}
#: table 5.1: centralised, FedAvg on IID data, FedAvg on two classes a client
SOURCE_REFERENCE = {"mnist": ("97.07", "90.36", "85.03"), "cifar10": ("61.91", "53.83", "19.02")}


class S1(Study):
    """Personal and meta methods on clients with two classes each, local and new."""

    name = "s1"
    title = "Personalisation layers and meta-learning (S1, tables 5.1-5.5, figures 5.1-5.3)"
    data = ("mnist", "cifar10", "fashion-mnist", "digits")
    presets = ("source", "tuned")
    tuned = ("tuned",)
    methods = tuple(LABELS)
    space = SPACE

    def check(self, ask: Ask) -> None:
        super().check(ask)
        if ask.preset == "source" and ask.data not in SOURCE_RATES:
            raise FedloomError(
                f"The source has no constants for {ask.data}. Use --preset tuned, or one of its "
                f"data sets: {', '.join(SOURCE_RATES)}."
            )
        if ask.preset == "tuned":
            for method in chosen(ask):
                if method not in LABELS:
                    raise unknown("method of this study", method, LABELS)

    def cells(self, ask: Ask) -> list[Cell]:
        if ask.preset == "tuned":
            return [
                Cell(method, method, {**values, **self._length(ask)})
                for method, values in chosen(ask).items()
            ]
        cells: dict[str, Cell] = {}
        for method, by_population in SOURCE_RATES[ask.data].items():
            one = len(set(by_population.values())) == 1
            for population, rates in by_population.items():
                name = _cell(ask, method, population)
                settings = self._settings(ask, method, rates)
                if not one and population == "local":
                    # Its newcomers are those of another run; trying all heads is what takes time.
                    settings |= {"newcomers": 0, "newcomer_partition": None}
                cells.setdefault(name, Cell(name, method, settings))
        return [*cells.values(), *self._references(ask)]

    def to_search(self, ask: Ask) -> dict[str, Any]:
        """The settings of all runs of a search, for `fedloom tune --study`."""
        found = {"data": ask.data, **SETUPS[ask.data].settings, **self._length(ask)}
        del found["eval_every"], found["eval_common"]
        return found | {"first": "mean"}

    def _length(self, ask: Ask) -> dict[str, Any]:
        rounds = QUICK if ask.scale == "quick" else SETUPS[ask.data].rounds
        return {"rounds": rounds, "eval_every": 5 if rounds <= 20 else 20 if rounds <= 300 else 40}

    def _settings(self, ask: Ask, method: str, rates: Sequence[float]) -> dict[str, Any]:
        settings = {
            **SETUPS[ask.data].settings,
            **self._length(ask),
            "data": ask.data,
            "lr": rates[0],
        }
        if method in PRIVATE:
            settings["first"] = "mean"  # its server averages whole models
        if method in META:
            settings["alpha"] = rates[1]
        else:
            settings["order"] = "support-first"
        return settings

    def _references(self, ask: Ask) -> list[Cell]:
        """The lines of table 5.1: FedAvg on IID data, and one learner with all data, of which a
        fifth is for its score."""
        (rate,) = SOURCE_RATES[ask.data]["fedavg-meta"]["local"]
        iid = self._settings(ask, "fedavg", (rate,))
        iid |= {"partition": "iid", "newcomers": 0, "newcomer_partition": None}
        iid["eval_every"] = iid["rounds"]
        together = {k: v for k, v in iid.items() if k not in ("participation", "order")}
        epochs = max(iid["rounds"] // 30, 2)
        together |= {"test_share": 0.2, "score_on": "test", "lr": 1e-3}
        together |= {"rounds": epochs, "eval_every": epochs}
        return [Cell("fedavg-iid", "fedavg", iid), Cell("centralised", "centralised", together)]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        out = [
            _scores_table(ask, results, population, tables)
            for population, tables in (("local", "5.2 and 5.4"), ("new", "5.3 and 5.5"))
        ]
        if ask.preset == "source":
            return [_reference_table(ask, results), *out]
        if not _ours(ask):
            return out
        return [*out, *(_paired_table(ask, results, population) for population in POPULATIONS)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        panels = {"micro": "local clients", "new_micro": "new clients"}
        groups = {
            "5.1": ("fedavg", "fedavg-meta", "fedmeta-maml", "fedmeta-metasgd"),
            "5.2": ("fedavg", "fedper", "fedper-meta", "fedmeta-per-maml", "fedmeta-per-metasgd"),
            "5.3": META,
        }
        out = []
        for number, methods in groups.items():
            known = [m for m in methods if m in _rows(ask)]
            curves = {LABELS[m]: _curves(ask, results, m) for m in known}
            curves = {label: frames for label, frames in curves.items() if frames}
            marks = {
                LABELS[m]: {
                    f"{prefix}micro": float(found[0]) / 100
                    for population, prefix in POPULATIONS.items()
                    if (found := _source(ask, m, population))
                }
                for m in known
            }
            title = f"Figure {number}: convergence on {ask.data}; crosses: where the source ends"
            out.append(Picture(f"figure-{number}", title, panels, curves, marks=marks))
        return out


def chosen(ask: Ask) -> dict[str, dict[str, Any]]:
    """Method → the settings that `fedloom tune` chose for it, in the order of the tables."""
    file = ask.values or VALUES / f"s1-{ask.data}.yaml"
    if not file.is_file() and ask.values is None:
        raise FedloomError(
            f"No values come with the study for {ask.data}. Choose some: fedloom tune --study s1 "
            f"--data {ask.data} --runs 27 --halving 3 --out DIRECTORY; then give them: --values "
            "DIRECTORY/chosen.yaml."
        )
    found = read_chosen(file, ask.data)
    setup = SETUPS[ask.data].settings
    for method, values in found.items():
        for name in SAME:
            if values.get(name, setup[name]) != setup[name]:
                raise FedloomError(
                    f"'{file}': {method} was tuned with {name}={values[name]}, and the study has "
                    f"{name}={setup[name]}. Tune with fedloom tune --study s1 --data {ask.data}."
                )
    return {m: {**setup, **found[m]} for m in (*LABELS, *found) if m in found}


def _rows(ask: Ask) -> list[str]:
    """The methods of the tables."""
    if ask.preset == "tuned":
        return list(chosen(ask))
    return [m for m in LABELS if BEFORE.get(m, m) in SOURCE_RATES[ask.data]]


def _rates(ask: Ask, method: str, population: str) -> str:
    if ask.preset == "tuned":
        base = {**SETUPS[ask.data].settings, **S1().to_search(ask)}
        mine = {k: v for k, v in chosen(ask)[method].items() if k not in base or base[k] != v}
        return ", ".join(f"{k}={v}" for k, v in mine.items())
    rates = SOURCE_RATES[ask.data][BEFORE.get(method, method)][population]
    return ", ".join(f"{name}={rate:g}" for name, rate in zip(("lr", "alpha"), rates, strict=False))


def _cell(ask: Ask, method: str, population: str) -> str:
    """The name of the cell that a row of the tables is from."""
    if ask.preset == "tuned":
        return method
    trained = BEFORE.get(method, method)
    known = SOURCE_RATES[ask.data][trained]
    return trained if len(set(known.values())) == 1 else f"{trained}-{population}"


def _prefix(ask: Ask, method: str, population: str) -> str:
    """What stands before the names of a row's scores in a summary."""
    before = ask.preset == "source" and method in BEFORE
    return POPULATIONS[population] + ("before_" if before else "")


def _source(ask: Ask, method: str, population: str) -> list[str]:
    """The source's scores, if it has any."""
    found = SOURCE.get((ask.data, population), {}).get(method, "")
    return found.split(" | ") if found else []


def _mean(runs: Sequence[Result], *names: str) -> str:
    """A score, or a score ± its spread over clients, in %: means over seeds."""
    if not runs:
        return "–"
    values = [100 * float(np.mean([r.summary[name] for r in runs])) for name in names]
    return "±".join(f"{value:.2f}" for value in values)


def _scores_table(ask: Ask, results: Results, population: str, tables: str) -> Table:
    heads = ["method", "chosen", "acc_micro", "− source", "acc_macro", "P_macro", "R_macro",
             "F1_macro", "source: acc_micro, acc_macro, P, R, F1"]  # fmt: skip
    rows = [_majority(ask, results, population, len(heads))]
    for method in _rows(ask):
        runs = results.get(_cell(ask, method, population), ())
        prefix = _prefix(ask, method, population)
        micro = [100 * r.summary[f"{prefix}micro"] for r in runs]
        theirs = _source(ask, method, population)
        gap = f"{np.mean(micro) - float(theirs[0]):+.2f}" if micro and theirs else "–"
        others = [_mean(runs, f"{prefix}{n}", f"{prefix}{_std(n)}") for n in SCORES[1:]]
        rates = _rates(ask, method, population)
        said = ", ".join(theirs) or "–"
        if theirs and method in HEADLESS:
            said += " (scored without the private heads)"
        rows.append([LABELS[method], rates, spread(micro), gap, *others, said])
    title = f"{population.capitalize()} clients (tables {tables}), {ask.data}, {SCORED}, %"
    over = f"acc_micro: {ask.over}; ± of the others: over clients"
    return Table(f"{title}; {over}", heads, rows)


def _std(name: str) -> str:
    return "std" if name == "macro" else f"{name}_std"


def _majority(ask: Ask, results: Results, population: str, width: int) -> list[str]:
    """What always guessing a client's larger class scores."""
    runs = next(
        (found for m in _rows(ask) if (found := results.get(_cell(ask, m, population)))), ()
    )
    micro = [100 * r.summary[f"{POPULATIONS[population]}majority"] for r in runs]
    return ["majority class", "", spread(micro), *[""] * (width - 3)]


def _paired_table(ask: Ask, results: Results, population: str) -> Table:
    """How far FedMeta-Per is ahead of every other method, seed by seed: when all rounds are done,
    and when both have done the work of the one that does less."""
    ours = _ours(ask)
    name = f"{POPULATIONS[population]}micro"
    rows = []
    for method in _rows(ask):
        if method in ours:
            continue
        cells = [LABELS[method]]
        for mine in ours:
            pairs = list(zip(results.get(mine, ()), results.get(method, ()), strict=False))
            gaps = [a.summary[name] - b.summary[name] for a, b in pairs]
            cells += [_ahead(gaps), _ahead([at_equal_work(a, b, name) for a, b in pairs])]
        rows.append([*cells, _work(results.get(method, ()))])
    heads = ["minus", *(f"{LABELS[m]}{when}" for m in ours for when in ("", ", at equal work"))]
    spent = ", ".join(f"{LABELS[m]} {_work(results.get(m, ()))}" for m in ours)
    title = (
        f"Ahead of others: acc_micro of FedMeta-Per minus theirs, {population} clients, "
        f"{ask.data}, points, {ask.over} (seeds in which it is ahead); work in GMAC, of {spent}; "
        "equal work: that of the one that does less, between scored rounds in a straight line"
    )
    return Table(title, [*heads, "their work"], rows)


def _ours(ask: Ask) -> list[str]:
    return [m for m in META if "per" in m and m in _rows(ask)]


def _ahead(gaps: Sequence[float]) -> str:
    if not gaps or np.isnan(gaps).any():
        return "–"
    wins = f" ({sum(g > 0 for g in gaps)}/{len(gaps)})" if len(gaps) > 1 else ""
    return spread([100 * g for g in gaps], sign="+") + wins


def _work(runs: Sequence[Result]) -> str:
    spent = [r.summary["macs"] / 1e9 for r in runs]
    return spread(spent, 0 if spent and min(spent) >= 10 else 2)


def at_equal_work(one: Result, other: Result, name: str) -> float:
    """By how much `one` is ahead when each has done as much work as the one that does less in all,
    between scored rounds in a straight line. NaN: one of them was not scored by then."""
    spent = min(run.summary["macs"] for run in (one, other))
    found = []
    for run in (one, other):
        scored = run.rounds.assign(done=run.rounds["macs"].cumsum())
        scored = scored[scored["eval_seconds"].notna()]
        found.append(float(np.interp(spent, scored["done"], scored[name], left=np.nan)))
    return found[0] - found[1]


def _curves(ask: Ask, results: Results, method: str) -> list[pd.DataFrame]:
    """acc_micro over rounds of local and new clients, a table for each seed."""
    parts: list[list[pd.DataFrame]] = []
    for population, prefix in POPULATIONS.items():
        runs = results.get(_cell(ask, method, population), ())
        column = f"{_prefix(ask, method, population)}micro"
        parts.append([
            r.evaluations.set_index("round")[[column]].set_axis([f"{prefix}micro"], axis=1)
            for r in runs
        ])  # fmt: skip
    seeds = max(map(len, parts))
    return [
        pd.concat([frames[s] for frames in parts if s < len(frames)], axis=1).reset_index()
        for s in range(seeds)
    ]


def _reference_table(ask: Ask, results: Results) -> Table:
    theirs = SOURCE_REFERENCE.get(ask.data, ("–",) * 3)
    cases = (("centralised, 80/20", "centralised", "micro"), ("FedAvg, IID", "fedavg-iid", "micro"),
             ("FedAvg, two classes a client", "fedavg-meta", "before_micro"))  # fmt: skip
    rows = [
        [label, spread([100 * r.summary[name] for r in results.get(cell, ())]), number]
        for (label, cell, name), number in zip(cases, theirs, strict=True)
    ]
    title = f"Reference lines (table 5.1), {ask.data}, acc_micro, %, {ask.over}"
    return Table(title, ["", "ours", "source"], rows)
