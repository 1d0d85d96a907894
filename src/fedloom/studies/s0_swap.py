"""S0's claim, made there and not measured: on label-skewed data, swapping models beats
averaging them at equal rounds and equal traffic, and least similar partners beat random ones.

`classes` and `dirichlet` compare the methods on two kinds of skew, `h2` the rounds between
averages, `measures` what partners are chosen by, and `rates` methods at learning rates of their
own, without which no comparison is fair. Clients of every method do without the public share (but
where probes are noise), and all are scored in rounds that end in an average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiment.result import Result
from fedloom.experiment.study import (
    Ask,
    Cell,
    Drawn,
    Figures,
    Picture,
    Results,
    Study,
    Table,
    spread,
)

#: data → model, clients, rounds, local steps a round (h1), public images for a comparison
SIZES = {
    "mnist": ("mlp", 20, 100, 20, 256),
    "fashion-mnist": ("mlp", 20, 100, 20, 256),
    "cifar10": ("lenet", 10, 40, 25, 128),
    "digits": ("mlp", 10, 40, 5, 64),
}
QUICK = 20  # rounds
PARTITIONS = {"dirichlet": "dirichlet:0.1,min=10"}
TWO_CLASSES = "classes:2"
H2 = 5
SWEEP = (2, 5, 10, 20)
LR = 0.05
RATES = (LR, 0.1, 0.2)
Group = dict[str, tuple[str, str, dict[str, Any]]]  # cell → label, method, options

SKEWED: Group = {
    "fedavg": ("FedAvg", "fedavg", {}),
    "fedprox": ("FedProx", "fedprox", {"mu": 0.1}),
    "random": ("FedSwap random", "fedswap", {}),
    "greedy-cka": ("FedSwap greedy, CKA", "fedswap", {"partner": "greedy"}),
    "greedy-dcka": (
        "FedSwap greedy, dCKA",
        "fedswap",
        {"partner": "greedy", "similarity": "dcka"},
    ),
    "min-cka": ("FedSwap min, CKA", "fedswap", {"partner": "min"}),
    "min-dcka": ("FedSwap min, dCKA", "fedswap", {"partner": "min", "similarity": "dcka"}),
}
MEASURED: Group = {
    "fedavg": SKEWED["fedavg"],
    "random": SKEWED["random"],
    **{
        f"min-{name}": (f"min, {label}", "fedswap", {"partner": "min", **options})
        for name, label, options in (
            ("cka", "CKA", {}),
            ("cka-debiased", "CKA, debiased", {"debiased": True}),
            ("cka-rbf", "CKA, RBF kernel", {"kernel": "rbf"}),
            ("dcka", "dCKA", {"similarity": "dcka"}),
            ("cca", "CCA", {"similarity": "cca"}),
            ("hsic", "HSIC", {"similarity": "hsic"}),
            ("inner", "inner product", {"similarity": "inner"}),
            ("cosine", "cosine of weights", {"similarity": "cosine"}),
            ("pearson", "Pearson of weights", {"similarity": "pearson"}),
        )
    },
    "min-noise": ("min, CKA on noise", "fedswap", {"partner": "min", "public": "noise:256"}),
}
SWEPT: Group = {
    "fedavg": ("FedAvg (h2 = 1)", "fedavg", {}),
    **{
        f"{partner}-h{h2}": (
            f"{label}, h2 = {h2}",
            "fedswap",
            {"partner": partner, "average_every": h2},
        )
        for partner, label in (("random", "random"), ("min", "min, CKA"))
        for h2 in SWEEP
    },
    "random-half": (
        "random, h2 = 5, half of the pairs",
        "fedswap",
        {"partner": "random", "swap_share": 0.5},
    ),
}
AT_RATES: Group = {
    **{f"fedavg-lr{lr:g}": (f"FedAvg, lr {lr:g}", "fedavg", {"lr": lr}) for lr in RATES},
    **{
        f"{partner}-h{h2}-lr{lr:g}": (
            f"{label}, h2 = {h2}, lr {lr:g}",
            "fedswap",
            {"partner": partner, "average_every": h2, "lr": lr},
        )
        for partner, label in (("random", "random"), ("min", "min, CKA"))
        for h2 in (2, H2)
        for lr in RATES
    },
}
GROUPS: dict[str, Group] = {
    "classes": SKEWED,
    "dirichlet": SKEWED,
    "h2": SWEPT,
    "measures": MEASURED,
    "rates": AT_RATES,
}
TRAFFIC = "traffic (MB)"


class S0Swap(Study):
    """FedAvg, FedProx and FedSwap on label skew; a sweep of h2; a comparison of measures."""

    name = "s0-swap"
    title = "Swapping models by dissimilarity (S0 chapter 4)"
    data = tuple(SIZES)
    presets = tuple(GROUPS)

    def cells(self, ask: Ask) -> list[Cell]:
        return [
            Cell(name, method, self._settings(ask, method, options))
            for name, (_, method, options) in GROUPS[ask.preset].items()
        ]

    def _settings(self, ask: Ask, method: str, options: dict[str, Any]) -> dict[str, Any]:
        model, clients, _, steps, probes = SIZES[ask.data]
        every = max(SWEEP) if ask.preset == "h2" else 2 * H2
        settings: dict[str, Any] = {
            "data": ask.data,
            "model": model,
            "clients": clients,
            "participation": 1.0,
            "partition": PARTITIONS.get(ask.preset, TWO_CLASSES),
            # of digits, 1 % would be too few to compare models on
            "public": "share:0.1" if ask.data == "digits" else "share:0.01",
            "steps": steps,
            "batch": 32,
            "lr": LR,
            "rounds": self._rounds(ask),
            "eval_every": every,
        }
        if method == "fedswap":
            settings["average_every"] = H2
            if options.get("partner", "random") != "random" and not _on_weights(options):
                settings["probes"] = probes
        return {**settings, **options}

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        group = GROUPS[ask.preset]
        plain = "fedavg" if "fedavg" in group else f"fedavg-lr{LR:g}"
        reference = results.get(plain, ())
        budget = min((r.summary["bytes"] for runs in results.values() for r in runs), default=0)
        rows = []
        for name, (label, _, _) in group.items():
            runs = results.get(name, ())
            if not runs:
                rows.append([label, *["–"] * 5])
                continue
            last = [100 * r.summary["test_accuracy"] for r in runs]
            gains = [
                100 * (r.summary["test_accuracy"] - o.summary["test_accuracy"])
                for r, o in zip(runs, reference, strict=False)
            ]
            rows.append([
                label,
                spread(last),
                spread(gains, sign="+") if name != plain else "",
                spread([100 * _within(r, budget) for r in runs]),
                f"{np.mean([r.summary['bytes'] for r in runs]) / 1e6:.1f}",
                spread([1000 * _server_seconds(r) for r in runs], digits=0),
            ])  # fmt: skip
        over = "FedAvg" if plain == "fedavg" else group[plain][0]
        heads = ["method", "test accuracy (%)", f"gain over {over} (points)",
                 f"accuracy within {budget / 1e6:.1f} MB (%)", TRAFFIC,
                 "server time (ms a swap; FedAvg: a round)"]  # fmt: skip
        skew = PARTITIONS.get(ask.preset, TWO_CLASSES)
        title = f"{ask.data}, {skew}, {self._rounds(ask)} rounds; {ask.over}"
        return [Table(title, heads, rows)]

    def _rounds(self, ask: Ask) -> int:
        return QUICK if ask.scale == "quick" else SIZES[ask.data][2]

    def pictures(self, ask: Ask, results: Results) -> Figures:
        group = GROUPS[ask.preset]
        if ask.preset == "rates":
            results = _at_best_rates(results)
        curves = {group[name][0]: [_curve(r) for r in runs] for name, runs in results.items()}
        panels = {
            "test_accuracy": f"{ask.data}, common test set",
            "worst10": "worst 10 % of clients",
        }
        out: list[Picture | Drawn] = [
            Picture("rounds", "Accuracy over rounds", panels, curves),
            Picture("traffic", "Accuracy over traffic", panels, curves, x=TRAFFIC),
        ]
        for name in ("random", "greedy-cka", "min-cka", "min-dcka"):
            if name in results and ask.preset in ("classes", "dirichlet"):
                title = f"{group[name][0]}: how alike models were, and who swapped (seed 0)"
                out.append(Drawn(f"swaps-{name}", title, results[name][0].plot_swaps))
        return out


def _at_best_rates(results: Results) -> Results:
    """Of the cells that differ in their rate alone, the one that ends best."""
    best: dict[str, str] = {}
    for name in results:
        family = name.rsplit("-lr", 1)[0]
        if family not in best or _score(results[name]) > _score(results[best[family]]):
            best[family] = name
    return {name: results[name] for name in best.values()}


def _score(runs: Sequence[Result]) -> float:
    return float(np.mean([r.summary["test_accuracy"] for r in runs]))


def _on_weights(options: dict[str, Any]) -> bool:
    return options.get("similarity") in ("cosine", "pearson")


def _curve(run: Result) -> pd.DataFrame:
    """The scored rounds, with all that was sent until then."""
    sent = (run.rounds["bytes_up"] + run.rounds["bytes_down"]).cumsum() / 1e6
    return run.rounds.assign(**{TRAFFIC: sent})[run.rounds["eval_seconds"].notna()]


def _within(run: Result, budget: float) -> float:
    """The last score before more than `budget` bytes were sent."""
    curve = _curve(run)
    paid = curve[curve[TRAFFIC] <= budget / 1e6 + 1e-9]
    return float(paid["test_accuracy"].iloc[-1]) if len(paid) else float("nan")


def _server_seconds(run: Result) -> float:
    """What the server spent on a swap; without swaps, on an average."""
    swapped = {r["round"] for r in run.records if r.get("mix", {}).get("event") == "swap"}
    spent = run.profile["mix"]
    return float(spent[spent.index.isin(swapped)].mean() if swapped else spent.mean())
