"""S4's comparisons: learning without a server among moving nodes (S4 table 3, figures 2-7).

The source gives neither its network nor its mobility. Here it is LeNet (two 5×5 convolutions of 6
and 16 channels, 120-84-10; an MLP on digits), and the preset is the side of the square that nodes
walk in, with range 100, speeds 3 to 7, pauses of 10 and 10 steps a round: at 1000, 50 nodes meet
some two others a round; at 2000 hardly anybody meets. All meetings of a round are one exchange; in
the source they come one after another, which gives feddom more to combine. `mlp-1000` is
`area-1000` with an MLP of 100 hidden units in place of LeNet, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fedloom.experiment.result import Result
from fedloom.experiment.study import Ask, Cell, Picture, Results, Study, Table, spread

LABELS = {"p2p-fedavg": "P2P FedAvg", "wafl": "WAFL", "feddom": "feddom"}
NODES = {"digits": (20, 40)}  # the others: the source's
MODEL = {"digits": "mlp"}
RATE = {"digits": 0.01}  # the source's 0.001 is for its larger data sets
THETA = {"cifar10": 0.2, "digits": 0.2}
ALPHAS = (0.1, 0.5, 1.0, 100.0)
ROUNDS, QUICK = 100, 10
RECENT = 3
LATELY = {"links": RECENT, "forget": RECENT}  # where only the last rounds count
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
    presets = ("area-1000", "area-500", "area-2000", "mlp-1000", "mlp-500", "mlp-2000")

    def _cell(
        self, ask: Ask, method: str, nodes: int, alpha: float = 0.5, name: str = "", **more: Any
    ) -> Cell:
        """A run, under the name of its method or another, with more settings."""
        rounds = QUICK if ask.scale == "quick" else ROUNDS
        kind, _, side = ask.preset.partition("-")
        settings: dict[str, Any] = {
            "data": ask.data,
            "model": "mlp" if kind == "mlp" else MODEL.get(ask.data, "lenet"),
            "clients": nodes,
            "partition": f"dirichlet:{alpha:g}",
            "topology": f"waypoint,area={side}",
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
        if method == "feddom":
            settings |= {"theta": THETA.get(ask.data, 0.3), "balance": 0.4, "delta": 0.7}
        return Cell(_name(name or method, nodes, alpha), method, settings | more)


def _name(method: str, nodes: int, alpha: float = 0.5) -> str:
    return f"{method}-n{nodes}-a{alpha:g}"


def _nodes(ask: Ask) -> tuple[int, int]:
    return NODES.get(ask.data, (50, 100))


def _mean(runs: Sequence[Result], column: str, digits: int = 3) -> str:
    """The last score, mean and (of several) spread over seeds."""
    return spread([float(r.evaluations[column].iloc[-1]) for r in runs], digits)


def _over(runs: Sequence[Result], column: str, digits: int) -> str:
    """The mean over all rounds and seeds."""
    values = [float(r.rounds[column].mean()) for r in runs]
    return f"{np.mean(values):.{digits}f}" if values else "–"


def _curves(results: Results, cells: Mapping[str, str]) -> dict[str, list[Any]]:
    """Label → the scored rounds of each seed, for the cells that ran."""
    return {
        label: [r.evaluations for r in results[cell]]
        for cell, label in cells.items()
        if cell in results
    }


class S4Table(_S4):
    """Three methods with 50 and 100 nodes, and feddom with links that do not last."""

    name = "s4-table"
    title = "Learning without a server: the comparison (S4 table 3, figures 2, 3 and 6)"

    labels: ClassVar[Mapping[str, str]] = {
        **LABELS,
        "feddom-recent": f"feddom, last {RECENT} rounds",
    }

    def cells(self, ask: Ask) -> list[Cell]:
        out = []
        for nodes in _nodes(ask):
            out += [self._cell(ask, method, nodes) for method in LABELS]
            out.append(self._cell(ask, "feddom", nodes, name="feddom-recent", **LATELY))
        return out

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        heads = ["nodes", "method", "accuracy", "source", "own data", "loss", "similarity",
                 "MB sent", "nodes met", "isolated"]  # fmt: skip
        rows = []
        for nodes in _nodes(ask):
            theirs = dict(zip(LABELS, SOURCE.get((ask.data, nodes), ()), strict=False))
            for method, label in self.labels.items():
                runs = results.get(_name(method, nodes), ())
                sent = [r.summary["bytes_up"] / 1e6 for r in runs]
                rows.append([
                    str(nodes), label, _mean(runs, "test_accuracy"),
                    f"{theirs[method]:.3f}" if method in theirs else "–", _mean(runs, "macro"),
                    _mean(runs, "test_loss"), _mean(runs, "similarity"),
                    f"{np.mean(sent):.0f}" if sent else "–", _over(runs, "degree", 2),
                    _over(runs, "isolated", 3),
                ])  # fmt: skip
        return [
            Table(f"Mean accuracy of the nodes on the common test set, {ask.data}", heads, rows)
        ]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        panels = {"test_accuracy": "common test set", "macro": "nodes' own test data",
                  "test_loss": "loss on the common test set"}  # fmt: skip
        return [
            Picture(f"rounds-{nodes}", f"{ask.data}, {nodes} nodes", panels,
                    _curves(results, {_name(m, nodes): label for m, label in self.labels.items()}))
            for nodes in _nodes(ask)
        ]  # fmt: skip


class S4Alpha(_S4):
    """How skewed data changes the comparison."""

    name = "s4-alpha"
    title = "Learning without a server: skew of the data (S4 figure 4)"

    def cells(self, ask: Ask) -> list[Cell]:
        nodes = _nodes(ask)[0]
        return [self._cell(ask, method, nodes, alpha) for alpha in ALPHAS for method in LABELS]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        nodes = _nodes(ask)[0]
        rows = [
            [f"{alpha:g}", *(_mean(results.get(_name(m, nodes, alpha), ()), "test_accuracy")
                             for m in LABELS)]
            for alpha in ALPHAS
        ]  # fmt: skip
        title = f"Accuracy by Dirichlet's α, {ask.data}, {nodes} nodes"
        return [Table(title, ["α", *LABELS.values()], rows)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        nodes = _nodes(ask)[0]
        return [
            Picture(f"alpha-{method}", f"{label} on {ask.data}",
                    {"test_accuracy": f"{label}: common test set"},
                    _curves(results, {_name(method, nodes, a): f"α = {a:g}" for a in ALPHAS}))
            for method, label in LABELS.items()
        ]  # fmt: skip


class S4DomSet(_S4):
    """How many nodes a dominating set has, and of how many known."""

    name = "s4-domset"
    title = "Learning without a server: size of the dominating set (S4 figure 5)"

    def cells(self, ask: Ask) -> list[Cell]:
        return [self._cell(ask, "feddom", nodes) for nodes in _nodes(ask)]

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
        return [self._cell(ask, method, nodes) for nodes in _nodes(ask) for method in LABELS]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        rows = []
        for nodes in _nodes(ask):
            for method, label in LABELS.items():
                runs = results.get(_name(method, nodes), ())
                theirs = SOURCE_ALIKE.get(nodes, "–") if method == "feddom" else "–"
                rows.append([str(nodes), label, _mean(runs, "similarity"), self._first(runs),
                             str(theirs)])  # fmt: skip
        heads = ["nodes", "method", "similarity at the end", f"round of {self.alike}", "source"]
        return [Table(f"Mean cosine similarity of all pairs of models, {ask.data}", heads, rows)]

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
                    _curves(results, {_name(m, nodes): label for m, label in LABELS.items()}))
            for nodes in _nodes(ask)
        ]  # fmt: skip


class S4Why(_S4):
    """Where feddom stands behind the baselines: links, age, step, or who is known?"""

    name = "s4-why"
    title = "Learning without a server: what holds feddom back"
    data = ("digits", "mnist")
    #: label, method and settings by cell
    variants: ClassVar[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
        "p2p-fedavg": ("P2P FedAvg", "p2p-fedavg", {}),
        "wafl": ("WAFL", "wafl", {}),
        "feddom": ("feddom", "feddom", {}),
        "links-1": ("feddom, links=1", "feddom", {"links": 1}),
        "links": (f"feddom, links={RECENT}", "feddom", {"links": RECENT}),
        "forget": (f"feddom, links=forget={RECENT}", "feddom", LATELY),
        "delta": ("feddom, δ=0.3", "feddom", {"delta": 0.3}),
        **{
            f"{method}-complete": (f"{label}, complete graph", method, {"topology": "complete"})
            for method, label in LABELS.items()
        },
    }

    def cells(self, ask: Ask) -> list[Cell]:
        nodes = _nodes(ask)[0]
        return [
            self._cell(ask, method, nodes, name=name, **more)
            for name, (_, method, more) in self.variants.items()
        ]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        nodes, rows = _nodes(ask)[0], []
        for name, (label, method, _) in self.variants.items():
            runs = results.get(_name(name, nodes), ())
            knows = runs if method == "feddom" else ()
            rows.append([
                label, _mean(runs, "test_accuracy"), _over(knows, "known", 1),
                _over(knows, "dominating", 1), _over(knows, "age", 1), _mean(runs, "similarity"),
                _over(runs, "degree", 2),
            ])  # fmt: skip
        heads = ["method", "accuracy", "known nodes", "members", "age of their models",
                 "similarity", "nodes met"]  # fmt: skip
        title = f"Accuracy on the common test set and what nodes combine, {ask.data}, {nodes} nodes"
        return [Table(title, heads, rows)]

    def pictures(self, ask: Ask, results: Results) -> list[Picture]:
        nodes = _nodes(ask)[0]
        labels = {_name(name, nodes): label for name, (label, *_) in self.variants.items()}
        panels = {"test_accuracy": "common test set", "similarity": "mean cosine of all pairs"}
        return [Picture("why", f"{ask.data}, {nodes} nodes", panels, _curves(results, labels))]
