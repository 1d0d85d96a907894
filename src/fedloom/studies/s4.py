"""S4's comparisons: learning without a server among moving nodes (S4 table 3, figures 2-7).

The source gives neither its network nor its mobility. Here it is LeNet (two 5×5 convolutions of 6
and 16 channels, 120-84-10; an MLP on digits), and the preset is the side of the square that nodes
walk in, with range 100, speeds 3 to 7, pauses of 10 and 10 steps a round, at each of which those in
range meet. At 1000, 50 nodes meet some three others a round; at 2000 they hardly ever meet.
`mlp-1000` is `area-1000` with an MLP of 100 hidden units in place of LeNet, in half of the time.

Relaying gives feddom more models than one-hop exchange gives P2P FedAvg and WAFL, so these are also
run with the same relay: what is then left of a lead is the dominating set's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Cell, Picture, Results, Study, Table, spread

#: label, method and settings by name: those that meet, and the lower and upper lines
MEETING: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "p2p-fedavg": ("P2P FedAvg", "p2p-fedavg", {}),
    "wafl": ("WAFL", "wafl", {}),
    "feddom": ("feddom", "feddom", {}),
    "p2p-relay": ("P2P FedAvg, relay", "p2p-fedavg", {"relay": True}),
    "wafl-relay": ("WAFL, relay", "wafl", {"relay": True}),
}
ROWS = {
    "local": ("local", "local", {}),
    **MEETING,
    "fedavg": ("FedAvg, a server", "fedavg", {}),
}
PUBLISHED = ("p2p-fedavg", "wafl", "feddom")  # with numbers in the source
NODES = {"digits": (20, 40)}  # the others: the source's
MODEL = {"digits": "mlp"}
RATE = {"digits": 0.01}  # the source's 0.001 is for its larger data sets
THETA = {"cifar10": 0.2, "digits": 0.2}
ALPHAS = (0.1, 0.5, 1.0, 100.0)
ROUNDS, QUICK = 100, 10
AREAS = (250, 500, 1000, 2000)
RECENT = 3
#: accuracy of P2P FedAvg, WAFL and the proposed method, for 50 and 100 nodes (table 3)
SOURCE = {
    ("cifar10", 50): (0.361, 0.303, 0.424),
    ("cifar10", 100): (0.327, 0.293, 0.399),
    ("fashion-mnist", 50): (0.741, 0.729, 0.771),
    ("fashion-mnist", 100): (0.659, 0.654, 0.682),
    ("mnist", 50): (0.950, 0.936, 0.964),
    ("mnist", 100): (0.930, 0.911, 0.952),
}
#: members of the dominating set where it settles (figure 5)
SOURCE_SIZE = {50: 9, 100: 12}
#: round in which all models are alike (figure 7)
SOURCE_ALIKE = {50: 53, 100: 24}


class _S4(Study):
    """What the studies share: a run of a method with so many nodes and this skew."""

    data: ClassVar[tuple[str, ...]] = ("mnist", "fashion-mnist", "cifar10", "digits")
    presets: ClassVar[tuple[str, ...]] = (
        "area-1000",
        "area-500",
        "area-2000",
        "mlp-1000",
        "mlp-500",
        "mlp-2000",
    )

    def _cell(
        self, ask: Ask, row: tuple[str, str, Mapping[str, Any]], name: str, nodes: int,
        alpha: float = 0.5, side: float | None = None,
    ) -> Cell:  # fmt: skip
        """A run of a method with its own settings, under this name."""
        _, method, more = row
        rounds = QUICK if ask.scale == "quick" else ROUNDS
        kind, _, area = ask.preset.partition("-")
        settings: dict[str, Any] = {
            "data": ask.data,
            "model": "mlp" if kind == "mlp" else MODEL.get(ask.data, "lenet"),
            "clients": nodes,
            "partition": f"dirichlet:{alpha:g}",
            "participation": 1.0,
            "rounds": rounds,
            # All nodes' models are scored on the whole common test set: with 100 of them, an
            # evaluation takes as long as two rounds.
            "eval_every": max(rounds // 10, 1),
            "checkpoint_every": max(rounds // 10, 1),
            "epochs": 1,
            "batch": 32,
            "lr": RATE.get(ask.data, 0.001),
            "momentum": 0.9,
        }
        if method not in ("local", "fedavg"):
            settings["topology"] = f"waypoint,area={side or area}"
        if method == "feddom":
            settings |= {"theta": THETA.get(ask.data, 0.3), "balance": 0.4, "delta": 0.7}
        return Cell(_name(name, nodes, alpha), method, settings | dict(more))


def _name(method: str, nodes: int, alpha: float = 0.5) -> str:
    return f"{method}-n{nodes}-a{alpha:g}"


def _nodes(ask: Ask) -> tuple[int, int]:
    return NODES.get(ask.data, (50, 100))


def _mean(runs: Sequence[Result], column: str, digits: int = 3) -> str:
    """The last score, mean and (of several) spread over seeds."""
    if any(column not in r.evaluations for r in runs):
        return "–"
    return spread([float(r.evaluations[column].iloc[-1]) for r in runs], digits)


def _over(runs: Sequence[Result], column: str, digits: int) -> str:
    """The mean over all rounds and seeds."""
    values = [float(r.rounds[column].mean()) for r in runs if column in r.rounds]
    return f"{np.mean(values):.{digits}f}" if values else "–"


def _curves(results: Results, cells: Mapping[str, str]) -> dict[str, list[Any]]:
    """Label → the scored rounds of each seed, for the cells that ran."""
    return {
        label: [r.evaluations for r in results[cell]]
        for cell, label in cells.items()
        if cell in results
    }


class S4Table(_S4):
    """The methods with 50 and 100 nodes, with and without relay, between local training and FedAvg
    with a server."""

    name = "s4-table"
    title = "Learning without a server: the comparison (S4 table 3, figures 2, 3 and 5-7)"

    def cells(self, ask: Ask) -> list[Cell]:
        return [
            self._cell(ask, row, name, nodes) for nodes in _nodes(ask) for name, row in ROWS.items()
        ]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        heads = ["nodes", "method", "accuracy", "source", "own data", "loss", "similarity",
                 "models known", "members", "MB sent", "nodes met", "isolated"]  # fmt: skip
        rows = []
        for nodes in _nodes(ask):
            theirs = dict(zip(PUBLISHED, SOURCE.get((ask.data, nodes), ()), strict=False))
            for name, (label, *_) in ROWS.items():
                runs = results.get(_name(name, nodes), ())
                sent = [r.summary["bytes_up"] / 1e6 for r in runs]
                rows.append([
                    str(nodes), label, _mean(runs, "test_accuracy"),
                    f"{theirs[name]:.3f}" if name in theirs else "–", _mean(runs, "macro"),
                    _mean(runs, "test_loss"), _mean(runs, "similarity"), _over(runs, "known", 1),
                    _over(runs, "dominating", 1), f"{np.mean(sent):.0f}" if sent else "–",
                    _over(runs, "degree", 2), _over(runs, "isolated", 3),
                ])  # fmt: skip
        return [
            Table(f"Mean accuracy of the nodes on the common test set, {ask.data}", heads, rows)
        ]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        panels = {"test_accuracy": "common test set", "macro": "nodes' own test data",
                  "test_loss": "loss on the common test set",
                  "similarity": "similarity of the nodes' models"}  # fmt: skip
        return [
            Picture(f"rounds-{nodes}", f"{ask.data}, {nodes} nodes", panels,
                    _curves(results, {_name(n, nodes): row[0] for n, row in ROWS.items()}))
            for nodes in _nodes(ask)
        ]  # fmt: skip


class S4Mobility(_S4):
    """How often nodes meet."""

    name = "s4-mobility"
    title = "Learning without a server: mobility, from the crowd to hardly anybody"
    presets = ("mlp", "lenet")

    def cells(self, ask: Ask) -> list[Cell]:
        nodes = _nodes(ask)[0]
        return [
            self._cell(ask, row, f"{name}-area{area}", nodes, side=area)
            for area in AREAS
            for name, row in MEETING.items()
        ]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        nodes, rows = _nodes(ask)[0], []
        for area in AREAS:
            cells = {name: _name(f"{name}-area{area}", nodes) for name in MEETING}
            runs = [results.get(cell, ()) for cell in cells.values()]
            relay = results.get(cells["p2p-relay"], ())
            met = next((some for some in runs if some), ())
            rows.append([
                str(area), _over(met, "degree", 1), _over(met, "isolated", 3),
                _over(relay, "known", 1), *(_mean(some, "test_accuracy") for some in runs),
            ])  # fmt: skip
        heads = ["area", "nodes met", "isolated", "known with relay",
                 *(label for label, *_ in MEETING.values())]  # fmt: skip
        return [Table(f"Accuracy on the common test set, {ask.data}, {nodes} nodes", heads, rows)]


class S4Alpha(_S4):
    """How skewed data changes the comparison."""

    name = "s4-alpha"
    title = "Learning without a server: skew of the data (S4 figure 4)"

    def cells(self, ask: Ask) -> list[Cell]:
        nodes = _nodes(ask)[0]
        return [
            self._cell(ask, row, name, nodes, alpha)
            for alpha in ALPHAS
            for name, row in MEETING.items()
        ]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        nodes = _nodes(ask)[0]
        rows = [
            [f"{alpha:g}", *(_mean(results.get(_name(name, nodes, alpha), ()), "test_accuracy")
                             for name in MEETING)]
            for alpha in ALPHAS
        ]  # fmt: skip
        title = f"Accuracy by Dirichlet's α, {ask.data}, {nodes} nodes"
        return [Table(title, ["α", *(label for label, *_ in MEETING.values())], rows)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        nodes = _nodes(ask)[0]
        return [
            Picture(f"alpha-{name}", f"{label} on {ask.data}",
                    {"test_accuracy": f"{label}: common test set"},
                    _curves(results, {_name(name, nodes, a): f"α = {a:g}" for a in ALPHAS}))
            for name, (label, *_) in MEETING.items()
        ]  # fmt: skip


class S4DomSet(_S4):
    """How many nodes a dominating set has, and of how many known."""

    name = "s4-domset"
    title = "Learning without a server: size of the dominating set (S4 figure 5)"

    def cells(self, ask: Ask) -> list[Cell]:
        return [self._cell(ask, MEETING["feddom"], "feddom", nodes) for nodes in _nodes(ask)]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        rows = []
        for nodes in _nodes(ask):
            runs = results.get(_name("feddom", nodes), ())
            rows.append([
                str(nodes), _mean(runs, "dominating", 1), str(SOURCE_SIZE.get(nodes, "–")),
                _mean(runs, "known", 1), _mean(runs, "age", 1), _over(runs, "degree", 2),
            ])  # fmt: skip
        heads = ["nodes", "members at the end", "source", "known nodes", "age of their models",
                 "nodes met"]  # fmt: skip
        return [Table(f"Dominating sets, {ask.data}", heads, rows)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        panels = {
            "dominating": "members of the dominating set",
            "known": "nodes that a node knows",
            "age": "age of the members' models",
        }
        curves = {_name("feddom", n): f"{n} nodes" for n in _nodes(ask)}
        return [
            Picture("sizes", f"Dominating sets on {ask.data}", panels, _curves(results, curves))
        ]


class S4Similarity(_S4):
    """How alike the nodes' models become."""

    name = "s4-similarity"
    title = "Learning without a server: likeness of the models (S4 figure 7)"
    alike = 0.99

    def cells(self, ask: Ask) -> list[Cell]:
        return [
            self._cell(ask, row, name, nodes)
            for nodes in _nodes(ask)
            for name, row in MEETING.items()
        ]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        rows = []
        for nodes in _nodes(ask):
            for method, (label, *_) in MEETING.items():
                runs = results.get(_name(method, nodes), ())
                theirs = SOURCE_ALIKE.get(nodes, "–") if method == "feddom" else "–"
                rows.append([str(nodes), label, _mean(runs, "similarity"), self._first(runs),
                             str(theirs)])  # fmt: skip
        heads = ["nodes", "method", "similarity at the end", f"round of {self.alike}", "source"]
        title = f"Mean cosine of how all pairs of models moved from the start, {ask.data}"
        return [Table(title, heads, rows)]

    def _first(self, runs: Sequence[Result]) -> str:
        """The first scored round in which models are alike, a mean over seeds."""
        found = []
        for run in runs:
            scored = run.evaluations
            found += scored.loc[scored["similarity"] >= self.alike, "round"].head(1).tolist()
        return f"{np.mean(found):.0f}" if found and len(found) == len(runs) else "never"

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        return [
            Picture(f"similarity-{nodes}", f"{ask.data}, {nodes} nodes",
                    {"similarity": f"{nodes} nodes: mean cosine of all pairs"},
                    _curves(results, {_name(m, nodes): row[0] for m, row in MEETING.items()}))
            for nodes in _nodes(ask)
        ]  # fmt: skip


class S4Why(_S4):
    """What each part of feddom brings, taken away one at a time."""

    name = "s4-why"
    title = "Learning without a server: what each part of feddom brings"
    variants: ClassVar[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
        **{name: row for name, row in MEETING.items() if name.endswith("-relay")},
        "feddom": MEETING["feddom"],
        "all": ("feddom, all that was heard", "feddom", {"members": "all"}),
        "equal": ("feddom, equal shares", "feddom", {"weigh": "equal"}),
        "size": ("feddom, shares by size", "feddom", {"weigh": "size"}),
        "cosine": ("feddom, λ=1 (cosine)", "feddom", {"balance": 1.0}),
        "pearson": ("feddom, λ=0 (Pearson)", "feddom", {"balance": 0.0}),
        "theta-0": ("feddom, θ=0", "feddom", {"theta": 0.0}),
        "theta-1": ("feddom, θ=1", "feddom", {"theta": 1.0}),
        "delta-1": ("feddom, δ=1", "feddom", {"delta": 1.0}),
        "models": (f"feddom, models of {RECENT} earlier rounds", "feddom", {"forget": RECENT}),
        "links": (f"feddom, links of {RECENT} earlier rounds", "feddom", {"links": RECENT}),
        "memory": (
            f"feddom, both of {RECENT} earlier rounds", "feddom",
            {"forget": RECENT, "links": RECENT},
        ),
    }  # fmt: skip

    def cells(self, ask: Ask) -> list[Cell]:
        nodes = _nodes(ask)[0]
        return [self._cell(ask, row, name, nodes) for name, row in self.variants.items()]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        nodes, rows = _nodes(ask)[0], []
        whole = results.get(_name("feddom", nodes), ())
        for name, (label, *_) in self.variants.items():
            runs = results.get(_name(name, nodes), ())
            gains = [
                float(one.evaluations["test_accuracy"].iloc[-1])
                - float(other.evaluations["test_accuracy"].iloc[-1])
                for one, other in zip(runs, whole, strict=False)
            ]
            rows.append([
                label, _mean(runs, "test_accuracy"), spread(gains, 3, "+"), _over(runs, "known", 1),
                _over(runs, "dominating", 1), _over(runs, "age", 1), _mean(runs, "similarity"),
                _over(runs, "degree", 2),
            ])  # fmt: skip
        heads = ["method", "accuracy", "against feddom", "known nodes", "members",
                 "age of their models", "similarity", "nodes met"]  # fmt: skip
        title = f"Accuracy on the common test set and what nodes combine, {ask.data}, {nodes} nodes"
        return [Table(title, heads, rows)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        nodes = _nodes(ask)[0]
        labels = {_name(name, nodes): label for name, (label, *_) in self.variants.items()}
        panels = {"test_accuracy": "common test set", "similarity": "similarity of the models"}
        return [Picture("why", f"{ask.data}, {nodes} nodes", panels, _curves(results, labels))]
