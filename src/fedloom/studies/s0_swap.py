"""S0's claims on swapping models, made there and not measured, one by one.

`classes` and `dirichlet` compare the methods on two kinds of skew, with all clients and with a
fifth of them in a round, beside local training; `classes` has centralised training and a control
on IID data. `h2` sets the rounds between averages against traffic, `measures` what partners are
chosen by. `rates` finds learning rates on validation data, without which no comparison is fair:
the others read them from `s0_rates.yaml`. Clients of every method do without the public share (but
where probes are noise), and all are scored in rounds that end in an average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedloom.errors import FedloomError
from fedloom.experiment.config import read_config
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


@dataclass(frozen=True)
class Size:
    """What a data set is run with; h1 are local steps a round."""

    model: str
    clients: int
    rounds: int
    h1: int
    probes: int  # public images for a comparison
    rates: tuple[float, ...]
    public: str = "share:0.01"


SIZES = {
    "mnist": Size("mlp", 20, 100, 20, 256, (0.05, 0.1, 0.2, 0.4)),
    "fashion-mnist": Size("mlp", 20, 100, 20, 256, (0.025, 0.05, 0.1, 0.2, 0.4)),
    "cifar10": Size("lenet", 20, 40, 20, 128, (0.025, 0.05, 0.1, 0.2)),
    # of digits, 1 % would be too few to compare models on
    "digits": Size("mlp", 10, 40, 5, 64, (0.05, 0.1), "share:0.1"),
}
QUICK = 20  # rounds
SKEWS = {"classes": "classes:2", "dirichlet": "dirichlet:0.1,min=10"}
PARTS = {"full": 1.0, "fifth": 0.2}  # participation
H2 = 5
SWEEP = (2, H2, 10, 20)
LR = 0.05  # where none was chosen
NEAR = 0.98  # of FedAvg's last accuracy: the target that rounds are counted to
TRAFFIC = "traffic (MB)"
RATES = "rates.yaml"


@dataclass(frozen=True)
class Way:
    """A method with its options; `rated` is the one whose learning rate it has."""

    label: str
    method: str
    rated: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _swap(label: str, rated: str, **options: Any) -> Way:
    return Way(f"FedSwap {label}", "fedswap", rated, options)


METHODS = {
    "fedavg": Way("FedAvg", "fedavg", "fedavg"),
    "fedprox": Way("FedProx", "fedprox", "fedprox", {"mu": 0.1}),
    "scaffold": Way("SCAFFOLD", "scaffold", "scaffold"),
    "none": _swap("without swaps", "random", swap_share=0.0),
    "random": _swap("random", "random"),
    "sequential": _swap("sequential", "random", partner="sequential"),
    "rotating": _swap("rotating", "random", partner="rotating"),
    "greedy-cka": _swap("greedy, CKA", "min-cka", partner="greedy"),
    "greedy-dcka": _swap("greedy, dCKA", "min-cka", partner="greedy", similarity="dcka"),
    "min-cka": _swap("min, CKA", "min-cka", partner="min"),
    "min-dcka": _swap("min, dCKA", "min-cka", partner="min", similarity="dcka"),
}
TUNED = tuple(name for name, way in METHODS.items() if way.rated == name)
SIMILAR = ("greedy-cka", "greedy-dcka", "min-cka", "min-dcka")  # which choose partners by it
CONTROL = ("fedavg", "random")  # on IID data
MEASURED = {
    "fedavg": METHODS["fedavg"],
    "random": METHODS["random"],
    **{
        f"min-{name}": _swap(f"min, {label}", "min-cka", partner="min", **options)
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
            ("noise", "CKA on noise", {"public": "noise:256"}),
        )
    },
}
SWEPT = {
    "fedavg": Way("FedAvg (h2 = 1)", "fedavg", "fedavg"),
    **{
        f"{name}-h{h2}": Way(
            f"{METHODS[name].label}, h2 = {h2}", "fedswap", METHODS[name].rated,
            {**METHODS[name].options, "average_every": h2},
        )
        for name in ("none", "random", "min-cka")
        for h2 in SWEEP
    },
}  # fmt: skip


def chosen_rates(ask: Ask) -> Any:
    """Skew → participation → method → rate: of the given file, or of those that come with it."""
    if ask.values is None:
        text = files("fedloom.studies").joinpath("s0_rates.yaml").read_text(encoding="utf-8")
        return (yaml.safe_load(text) or {}).get(ask.data, {})
    known = read_config(ask.values)
    if ask.data not in known:
        raise FedloomError(
            f"'{ask.values}' has no rates for {ask.data}. Choose some: fedloom study s0-swap "
            f"--data {ask.data} --preset rates --out DIRECTORY; they are in DIRECTORY/{RATES}."
        )
    return known[ask.data]


class S0Swap(Study):
    """FedAvg, FedProx, SCAFFOLD and FedSwap on label skew; h2 against traffic; measures."""

    name = "s0-swap"
    title = "Swapping models by dissimilarity (S0 chapter 4)"
    data = tuple(SIZES)
    presets = ("classes", "dirichlet", "h2", "measures", "rates")
    tuned = presets[:-1]

    def check(self, ask: Ask) -> None:
        super().check(ask)
        chosen_rates(ask)

    # -- runs

    def cells(self, ask: Ask) -> list[Cell]:
        if ask.preset == "rates":
            return [
                self._cell(ask, f"{skew}-{part}-{name}-lr{lr:g}", METHODS[name], skew, part, lr)
                for skew, part, name in _tuned_places()
                for lr in SIZES[ask.data].rates
            ]
        skew = _skew(ask)
        cells = [
            self._cell(ask, f"{part}-{name}", way, skew, part)
            for part in _parts(ask)
            for name, way in _ways(ask).items()
        ]
        return [*cells, *self._baselines(ask)]

    def _baselines(self, ask: Ask) -> Iterator[Cell]:
        if ask.preset not in SKEWS:
            return
        size = SIZES[ask.data]
        plain = self._cell(ask, "", METHODS["fedavg"], ask.preset, "full").settings
        # Every model is scored on the common test set, which takes its time.
        yield Cell("local", "local", {**plain, "eval_every": plain["rounds"]})
        if ask.preset != "classes":
            return
        iid = self._cell(ask, "", METHODS["fedavg"], "iid", "full").settings
        pooled = {key: value for key, value in plain.items() if key != "participation"}
        pooled |= {"steps": size.h1 * size.clients, "lr": iid["lr"]}
        yield Cell("centralised", "centralised", pooled)
        for part in PARTS:
            for name in CONTROL:
                yield self._cell(ask, f"iid-{part}-{name}", METHODS[name], "iid", part)

    def _cell(
        self, ask: Ask, cell: str, way: Way, skew: str, part: str, lr: float | None = None
    ) -> Cell:
        settings = self._settings(ask, way, skew, part)
        if lr is None:
            settings["lr"] = _rate(ask, skew, part, way.rated)
        else:
            rounds = _whole(settings["rounds"] // 2)
            settings |= {"lr": lr, "rounds": rounds, "eval_every": rounds,
                         "score_on": "validation", "validation_share": 0.1}  # fmt: skip
        return Cell(cell, way.method, settings)

    def _settings(self, ask: Ask, way: Way, skew: str, part: str) -> dict[str, Any]:
        size = SIZES[ask.data]
        settings: dict[str, Any] = {
            "data": ask.data,
            "model": size.model,
            "clients": size.clients,
            "participation": PARTS[part],
            "partition": SKEWS.get(skew, skew),
            "public": size.public,
            "steps": size.h1,
            "batch": 32,
            "rounds": self._rounds(ask),
            "eval_every": way.options.get("average_every", min(SWEEP))
            if ask.preset == "h2"
            else H2,
        }
        if way.method == "fedswap":
            settings["average_every"] = H2
            if way.options.get("partner") in ("greedy", "min") and not _on_weights(way):
                settings["probes"] = size.probes
        return {**settings, **way.options}

    def _rounds(self, ask: Ask) -> int:
        return QUICK if ask.scale == "quick" else SIZES[ask.data].rounds

    # -- what is made of them

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        if ask.preset == "rates":
            return [self._rates_table(ask, results)]
        out = [self._scores(ask, part, results) for part in _parts(ask)]
        if ask.preset in SKEWS:
            out += [self._claims(ask, part, results) for part in PARTS]
            out.append(self._beside(ask, results))
        return out

    def files(self, ask: Ask, results: Results) -> Mapping[str, str]:
        if ask.preset != "rates":
            return {}
        chosen: dict[str, Any] = {}
        for (skew, part, name), rate in _best_rates(ask, results).items():
            chosen.setdefault(skew, {}).setdefault(part, {})[name] = rate
        head = "# Rates that were best on validation data, for the other presets: --values FILE.\n"
        return {RATES: head + yaml.safe_dump({ask.data: chosen}, sort_keys=False)}

    def _rates_table(self, ask: Ask, results: Results) -> Table:
        rates, best = SIZES[ask.data].rates, _best_rates(ask, results)
        rows = []
        for place in _tuned_places():
            skew, part, name = place
            cells = []
            for lr in rates:
                runs = results.get(f"{skew}-{part}-{name}-lr{lr:g}", ())
                text = spread([100 * r.summary["micro"] for r in runs])
                cells.append(f"**{text}**" if best.get(place) == lr else text)
            rows.append([skew, part, METHODS[name].label, *cells])
        heads = ["skew", "participation", "method", *(f"rate {lr:g}" for lr in rates)]
        return Table(f"{ask.data}: accuracy on validation data (%); {ask.over}", heads, rows)

    def _scores(self, ask: Ask, part: str, results: Results) -> Table:
        reference = results.get(f"{part}-fedavg", ())
        target = _target(reference)
        rows = []
        for name, way in _ways(ask).items():
            runs = results.get(f"{part}-{name}", ())
            if not runs:
                rows.append([way.label, *["–"] * 9])
                continue
            gains = [100 * gain for gain in _paired(runs, reference, _accuracy)]
            rows.append([
                way.label,
                f"{runs[0].config['lr']:g}",
                spread([100 * _accuracy(r) for r in runs]),
                spread(gains, sign="+") if name != "fedavg" else "",
                spread([_last_divergence(r) for r in runs], digits=3),
                _counted([_until(r, target) for r in runs]),
                f"{np.mean([r.summary['bytes'] for r in runs]) / 1e6:.1f}",
                _counted([_until(r, target, TRAFFIC) for r in runs]),
                f"{np.mean([r.summary['macs'] for r in runs]) / 1e9:.3g}",
                spread([1000 * _server_seconds(r) for r in runs], digits=0),
            ])  # fmt: skip
        goal = "" if np.isnan(target) else f" ({100 * target:.1f} %)"
        heads = ["method", "rate", "test accuracy (%)", "gain over FedAvg (points)",
                 "divergence at the last average", f"rounds to the target{goal}", TRAFFIC,
                 "traffic to the target (MB)", "work (GMAC)",
                 "server time (ms a swap; FedAvg: a round)"]  # fmt: skip
        title = (
            f"{ask.data}, {SKEWS[_skew(ask)]}, {100 * PARTS[part]:g} % of the clients in a round, "
            f"{self._rounds(ask)} rounds; {ask.over}"
        )
        return Table(title, heads, rows)

    def _claims(self, ask: Ask, part: str, results: Results) -> Table:
        """S0's claims by pairs of cells: a margin is positive where it is as claimed."""
        target = _target(results.get(f"{part}-fedavg", ()))

        def row(claim: str, name: str, over: str, margin: Any, unit: str) -> list[str]:
            allowed = claim.startswith("no more")
            one, other = (results.get(f"{part}-{n}", ()) for n in (name, over))
            who = f"{METHODS[name].label} against {METHODS[over].label}"
            found = _paired(one, other, margin)
            if not found:
                return [claim, who, "–", "–", "not run"]
            each = ", ".join(_one(value) for value in found)
            margins = f"{spread(found, sign='+')} {unit}".strip()
            if not np.isfinite(found).all():
                margins = "–"
            return [claim, who, margins, each, verdict(found, allowed)]

        def less(value: Any) -> Any:
            return lambda run: -value(run)

        swaps = ("random", "sequential", "rotating", *SIMILAR)
        rows = []
        for name in swaps:
            rows.append(row("no more computation (on clients)", name, "fedavg",
                            less(lambda r: r.summary["macs"] / 1e9), "GMAC"))  # fmt: skip
        for name in swaps:
            rows.append(row("no more traffic", name, "fedavg",
                            less(lambda r: r.summary["bytes"] / 1e6), "MB"))  # fmt: skip
        for over in ("none", "fedavg"):
            for name in swaps:
                rows.append(row("less divergence", name, over, less(_last_divergence), ""))
        for name in swaps:
            rows.append(row("fewer rounds to the target", name, "fedavg",
                            less(lambda r: _rounds_until(r, target)), "rounds"))  # fmt: skip
        for name in swaps:
            rows.append(row("better at the end", name, "fedavg",
                            lambda r: 100 * _accuracy(r), "points"))  # fmt: skip
        for name in SIMILAR:
            rows.append(row("least similar partners beat random ones", name, "random",
                            lambda r: 100 * _accuracy(r), "points"))  # fmt: skip
        heads = ["claim", "of", "margin", "seed by seed", "verdict"]
        title = f"S0's claims, {100 * PARTS[part]:g} % of the clients in a round (+: as claimed)"
        return Table(f"{ask.data}, {SKEWS[ask.preset]}: {title}", heads, rows)

    def _beside(self, ask: Ask, results: Results) -> Table:
        """The baselines, and the control on IID data."""
        labels = {"local": "local training only", "centralised": "centralised"}
        for part in PARTS if ask.preset == "classes" else ():
            for name in CONTROL:
                share = f"{100 * PARTS[part]:g} %"
                labels[f"iid-{part}-{name}"] = f"{METHODS[name].label} on IID data, {share}"
        rows = [
            [label, spread([100 * _accuracy(r) for r in results.get(name, ())]),
             spread([_last_divergence(r) for r in results.get(name, ())], digits=3)]
            for name, label in labels.items()
            if name in results
        ]  # fmt: skip
        heads = ["run", "test accuracy (%)", "divergence"]
        return Table(f"{ask.data}: baselines and control; {ask.over}", heads, rows)

    def _rates_pictures(self, ask: Ask, results: Results) -> Figures:
        from fedloom.report.plots import plot_sweep

        values = [f"{lr:g}" for lr in SIZES[ask.data].rates]
        found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
        for skew, part, name in _tuned_places():
            cells = {lr: results.get(f"{skew}-{part}-{name}-lr{lr}", ()) for lr in values}
            scores = {lr: [r.summary["micro"] for r in runs] for lr, runs in cells.items() if runs}
            if scores:
                share = f"{100 * PARTS[part]:g} % of the clients in a round"
                found.setdefault(skew, {}).setdefault(share, {})[METHODS[name].label] = scores
        return [
            Drawn(
                f"rates-{skew}",
                f"{skew}: accuracy on validation data by learning rate, {ask.over}",
                partial(plot_sweep, "learning rate", values, panels, logarithmic=True),
            )
            for skew, panels in found.items()
        ]

    def pictures(self, ask: Ask, results: Results) -> Figures:
        if ask.preset == "rates":
            return self._rates_pictures(ask, results)
        out: list[Picture | Drawn] = []
        ways = _ways(ask)
        for part in _parts(ask):
            found = {n: results[f"{part}-{n}"] for n in ways if f"{part}-{n}" in results}
            curves = {ways[n].label: [_curve(r) for r in runs] for n, runs in found.items()}
            every = {ways[n].label: [r.rounds for r in runs] for n, runs in found.items()}
            panels = {"test_accuracy": f"{ask.data}, common test set",
                      "worst10": "worst 10 % of clients"}  # fmt: skip
            share = f"{100 * PARTS[part]:g} % of the clients in a round"
            apart = {"divergence": f"‖w_k − w̄‖, {share}"}
            out += [
                Picture(f"{part}-rounds", f"Accuracy over rounds, {share}", panels, curves),
                Picture(f"{part}-traffic", f"Accuracy over traffic, {share}", panels, curves,
                        x=TRAFFIC),
                Picture(f"{part}-divergence", f"Divergence over rounds, {share}", apart, every),
            ]  # fmt: skip
            for name in ("random", "greedy-cka", "min-cka") if ask.preset in SKEWS else ():
                if name in found:
                    title = f"{ways[name].label}: how alike models were, who swapped (seed 0)"
                    draw = found[name][0].plot_swaps
                    out.append(Drawn(f"{part}-swaps-{name}", title, draw))
        return out


def verdict(margins: Sequence[float], equal_holds: bool = False) -> str:
    """The verdict on a claim by its margins, which are positive where it holds; `equal_holds` for
    claims of no more than something.

    >>> verdict([0.1, 0.2]), verdict([0.1, -0.1]), verdict([0.0, 0.0]), verdict([-1.0])
    ('holds', 'depends on the seed', 'equal', 'does not hold')
    >>> verdict([0.0, 0.2], equal_holds=True), verdict([0.1, float("nan")])
    ('holds', 'reached by neither')
    """
    if np.isnan(margins).any():
        return "reached by neither"
    if all(margin > 0 or (equal_holds and margin == 0) for margin in margins):
        return "holds"
    if all(margin == 0 for margin in margins):
        return "equal"
    return "does not hold" if all(margin < 0 for margin in margins) else "depends on the seed"


def _rate(ask: Ask, skew: str, part: str, method: str) -> float:
    rate: Any = chosen_rates(ask)
    for name in (skew, part, method):
        rate = rate.get(name) if isinstance(rate, Mapping) else None
    if rate is None and ask.values is None:
        return LR
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 < rate < np.inf:
        raise FedloomError(
            f"'{ask.values}' has {'no rate' if rate is None else f'{rate!r} as the rate'} of "
            f"{METHODS[method].label} for {ask.data}, {skew}, {part}: it must be above 0."
        )
    return float(rate)


def _skew(ask: Ask) -> str:
    return ask.preset if ask.preset in SKEWS else "classes"


def _parts(ask: Ask) -> tuple[str, ...]:
    return ("full",) if ask.preset == "measures" else tuple(PARTS)


def _ways(ask: Ask) -> Mapping[str, Way]:
    return {"h2": SWEPT, "measures": MEASURED}.get(ask.preset, METHODS)


def _tuned_places() -> list[tuple[str, str, str]]:
    """Skew, participation and method of each rate that is chosen."""
    skewed = [(skew, part, name) for skew in SKEWS for part in PARTS for name in TUNED]
    return skewed + [("iid", part, name) for part in PARTS for name in CONTROL]


def _best_rates(ask: Ask, results: Results) -> dict[tuple[str, str, str], float]:
    """Where all rates were run (or diverged): the best on validation data, of equals the
    smallest."""
    out = {}
    for skew, part, name in _tuned_places():
        scores = {
            lr: float(np.mean([r.summary["micro"] for r in runs]))
            for lr in SIZES[ask.data].rates
            if (runs := results.get(f"{skew}-{part}-{name}-lr{lr:g}", ()))
        }
        if scores:
            out[skew, part, name] = max(scores, key=scores.__getitem__)
    return out


def _whole(rounds: int) -> int:
    """This many rounds or slightly fewer, so that the last one averages."""
    return max(rounds // H2, 1) * H2


def _on_weights(way: Way) -> bool:
    return way.options.get("similarity") in ("cosine", "pearson")


def _accuracy(run: Result) -> float:
    return float(run.summary["test_accuracy"])


def _target(reference: Sequence[Result]) -> float:
    """The accuracy that rounds are counted to."""
    return NEAR * float(np.mean([_accuracy(r) for r in reference])) if reference else np.nan


def _paired(one: Sequence[Result], other: Sequence[Result], value: Any) -> list[float]:
    """Differences, seed by seed."""
    return [float(value(a) - value(b)) for a, b in zip(one, other, strict=False)]


def _counted(values: Sequence[float]) -> str:
    """Mean ± std, where all seeds got there; else how many did."""
    reached = int((~np.isnan(values)).sum())
    return spread(values, digits=0) if reached == len(values) else f"{reached} of {len(values)}"


def _curve(run: Result) -> pd.DataFrame:
    """The scored rounds, with all that was sent until then."""
    sent = (run.rounds["bytes_up"] + run.rounds["bytes_down"]).cumsum() / 1e6
    return run.rounds.assign(**{TRAFFIC: sent})[run.rounds["eval_seconds"].notna()]


def _until(run: Result, target: float, column: str = "round") -> float:
    """The first scored round (or the traffic by then) with an accuracy of `target`; NaN: none."""
    curve = _curve(run)
    there = curve[curve["test_accuracy"] >= target]
    return float(there[column].iloc[0]) if len(there) else np.nan


def _rounds_until(run: Result, target: float) -> float:
    """The same, infinite where it was never reached, so that who reaches it is ahead."""
    found = _until(run, target)
    return np.inf if np.isnan(found) else found


def _one(margin: float) -> str:
    if np.isnan(margin):
        return "neither"
    return spread([margin], sign="+") if np.isfinite(margin) else f"{margin:+}"


def _last_divergence(run: Result) -> float:
    """Before the last average, of what it averages. All methods average in the last round."""
    rounds = run.rounds
    return float(rounds["divergence"].iloc[-1]) if "divergence" in rounds else np.nan


def _server_seconds(run: Result) -> float:
    """What the server spent on a swap; without swaps, on an average."""
    swapped = {r["round"] for r in run.records if r.get("mix", {}).get("pairs")}
    spent = run.profile["mix"]
    return float(spent[spent.index.isin(swapped)].mean() if swapped else spent.mean())
