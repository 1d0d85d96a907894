"""The dominating-set mix (S4): a node combines the best known nodes that together cover all others.

Every node scores the nodes of its own graph, takes a dominating set of them greedily, weighs its
members by several criteria (AHP and WASPAS) and moves towards their weighted mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.mix.base import Gathering, Mix, Mixed
from fedloom.mix.knowledge import Entries, Habits, Knowledge, LocalGraph, Met, meet, products

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_NOTED = 500  # nodes up to which a record says whom each of them chose
CONSISTENT = 0.1  # the largest consistency ratio of a pairwise matrix
PAIRWISE = ((1.0, 2.0, 3.0), (1 / 2, 1.0, 2.0), (1 / 3, 1 / 2, 1.0))


def criteria_weights(pairwise: Sequence[Sequence[float]]) -> np.ndarray:
    """AHP: the weights of the criteria from a matrix of how many times each outweighs the other.

    Columns are normalised and rows averaged (S4 eq. 10); a matrix that contradicts itself (a
    consistency ratio of 0.1 or more) is refused.

    >>> criteria_weights(PAIRWISE).round(4).tolist()
    [0.539, 0.2973, 0.1638]
    """
    from pymcdm.weights.subjective import AHP

    try:
        matrix = np.array(pairwise, dtype=np.float64)
    except ValueError:
        matrix = np.empty(0)
    if matrix.shape != (3, 3):
        raise FedloomError(
            "The pairwise matrix must be 3×3: accuracy, data size and score, such as "
            "[[1, 2, 3], [0.5, 1, 2], [0.3333, 0.5, 1]]."
        )
    if not ((matrix > 0).all() and np.allclose(matrix * matrix.T, 1, atol=0.02)):
        raise FedloomError(
            f"The pairwise matrix {matrix.round(3).tolist()} is not valid: all values must be "
            "positive, the diagonal 1, and each value the reciprocal of the one across the "
            "diagonal."
        )
    judged = AHP(matrix=np.ones((3, 3)))
    judged.matrix = matrix  # given above, it would have to be in whole numbers from 1 to 9
    ratio = float(judged.get_cr())
    if ratio >= CONSISTENT:
        raise FedloomError(
            f"The pairwise matrix is inconsistent: its consistency ratio is {ratio:.2f} and must "
            f"be below {CONSISTENT}. If A outweighs B twice and B outweighs C twice, A should "
            "outweigh C about four times."
        )
    return (matrix / matrix.sum(axis=0)).mean(axis=1)


def waspas(criteria: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """WASPAS: shares of the alternatives (rows) by the sum and the product of weighted criteria,
    half and half (S4 eq. 11-15). A criterion that nobody meets at all counts for nobody."""
    quality = _waspas()(criteria, weights, np.ones(len(weights)), validation=False)
    return quality / quality.sum()


def _by_largest(values: np.ndarray, cost: bool = False) -> np.ndarray:
    largest = values.max()
    return values / largest if largest > 0 else np.ones_like(values)


@cache
def _waspas() -> Any:
    from pymcdm.methods import WASPAS

    return WASPAS(normalization_function=_by_largest)


def greedy_dominating_set(starts: np.ndarray, ends: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Nodes in descending score, the first of equals first: one that is not covered yet is taken
    and covers its neighbours (S4 algorithm 1). Those of node v are `ends[starts[v]:starts[v + 1]]`.

    >>> path = np.array([0, 1, 3, 4]), np.array([1, 0, 2, 1])  # 0 - 1 - 2
    >>> greedy_dominating_set(*path, np.array([0.1, 0.9, 0.5])).tolist()
    [1]
    """
    covered = bytearray(len(score))  # looked at one by one, written by many
    marks = np.frombuffer(covered, dtype=np.uint8)
    taken = []
    for node in np.argsort(-score, kind="stable").tolist():
        if not covered[node]:
            taken.append(node)
            marks[ends[starts[node] : starts[node + 1]]] = 1
    return np.array(taken, dtype=np.int64)


@dataclass(frozen=True)
class DominatingSet(Mix):
    """w_i ← δ Σ_{j∈DS} Q̄_j w_j + (1 − δ) w_i over a dominating set of the node's own graph, for
    nodes that something reached in the round; with `mix_alone`, for all.

    The graph holds what reached the node in this round, through whomever, and what `forget` and
    `links` earlier rounds left. `members` and `weigh` are for ablations: all nodes of the graph in
    place of a dominating set, equal shares or shares by data size in place of AHP and WASPAS.
    """

    part: str = "all"
    theta: float = 0.2  # θ, of the accuracy
    balance: float = 0.4  # λ, of cosine and Pearson distance
    delta: float = 0.7  # δ
    pairwise: tuple[tuple[float, ...], ...] = PAIRWISE
    layers: str = "all"
    members: Literal["dominating", "all"] = "dominating"
    weigh: Literal["waspas", "equal", "size"] = "waspas"
    neighbours: int | None = None
    most: int | None = None
    forget: int | None = 0
    links: int | None = 0
    mix_alone: bool = False
    validates: str | None = "validation"

    home = "node"
    meets = True
    memory = ("knowledge",)
    needs = frozenset({"accuracy"})

    def __post_init__(self) -> None:
        _ = self._criteria  # a matrix that is wrong is refused where it enters

    @cached_property
    def _criteria(self) -> np.ndarray:
        return criteria_weights(self.pairwise)

    def weights(self, graph: LocalGraph) -> np.ndarray:
        """w_i = S_i / Σ S_j · 1 / (1 + e^−(A_i − θ)), eq. 1, with 1 for the largest."""
        share = graph.size / max(graph.size.sum(), 1e-300)
        w = share / (1 + np.exp(self.theta - graph.accuracy))
        return w / max(w.max(), 1e-300)

    def distances(self, graph: LocalGraph) -> np.ndarray:
        """d = λ d_cos + (1 − λ) d_pearson for every link, eq. 5, each divided by its maximum over
        the links of the graph. (The source does not say over what it normalises; over all pairs of
        known nodes in place of links, 2 to 16 % of the updates come out otherwise.)"""
        most = (max(d.max(initial=0), 1e-300) for d in (graph.cosine, graph.pearson))
        cosine, pearson = (
            share / d for share, d in zip((self.balance, 1 - self.balance), most, strict=True)
        )
        return cosine * graph.cosine + pearson * graph.pearson

    def scores(self, graph: LocalGraph) -> np.ndarray:
        """Eq. 6: a node's weight, less where its neighbours are better linked, or far in model."""
        w, degree = self.weights(graph), graph.degree
        linked = degree > 0
        starts = graph.starts[:-1][linked]
        best, drift = np.ones(len(w)), np.zeros(len(w))
        if linked.any():
            best[linked] = np.maximum.reduceat(degree[graph.second], starts)
            drift[linked] = np.add.reduceat(self.distances(graph) * w[graph.second], starts)
        importance = np.minimum(1, degree / best)
        return np.where(linked, w * importance / (1 + drift / np.maximum(degree, 1)), w)

    def choose(self, graph: LocalGraph) -> tuple[np.ndarray, np.ndarray]:
        """The members of the dominating set, or all, by position in the graph, and their shares
        Q̄, or those of `weigh`."""
        members = np.arange(len(graph.ids))
        if self.members == "all" and self.weigh != "waspas":
            return members, self._shares(graph, members, None)
        score = self.scores(graph)
        if self.members == "dominating":
            members = greedy_dominating_set(graph.starts, graph.second, score)
        return members, self._shares(graph, members, score)

    def _shares(
        self, graph: LocalGraph, members: np.ndarray, score: np.ndarray | None
    ) -> np.ndarray:
        size = graph.size[members]
        if self.weigh == "size" and size.sum() > 0:
            return size / size.sum()
        if score is None or self.weigh != "waspas":
            return np.full(len(members), 1 / len(members))
        criteria = np.stack([graph.accuracy, graph.size, score], axis=1)[members]
        return waspas(criteria, self._criteria)

    def places(self, knowledge: Knowledge, node: int, others: np.ndarray) -> np.ndarray:
        """The entries whose models a node combines for these others: those that it was told."""
        return knowledge.entries.places(others, knowledge.known[node, others])

    @property
    def habits(self) -> Habits:
        """An entry is told with a size and an accuracy, a greeting names it and its state."""
        return Habits(self.forget, self.links, self.neighbours, numbers=2, greeting=2)

    def combine(self, g: Gathering) -> Mixed:
        from scipy.sparse import csr_array

        met, length = self.meet(g), self._compared(g.layout)[1]
        knowledge = met.knowledge
        moves = np.flatnonzero(met.reached | self.mix_alone)
        nodes, at, share = [], [], []
        sets: list[list[list[int]]] = []  # [nodes that chose alike, whom they chose]
        for group, graph in knowledge.graphs(g.clients[moves], length):
            members, shares = self.choose(graph)
            place = self.places(knowledge, graph.node, graph.ids[members])
            if self.members == "dominating" and len(moves) <= _NOTED:
                sets.append([g.clients[moves[group]].tolist(), graph.ids[members].tolist()])
            for node in group:
                nodes.append(np.full(len(place), node))
                at.append(place)
                share.append(shares)
        who, source = (np.concatenate([np.empty(0, dtype=np.int64), *v]) for v in (nodes, at))
        shape = (len(moves), len(knowledge.entries))
        matrix = csr_array((np.concatenate([np.empty(0), *share]), (who, source)), shape=shape)
        metrics: dict[str, float] = {
            "known": float((knowledge.known[g.clients] >= 0).sum() / max(len(g.clients), 1)),
            "entries": len(knowledge.entries),
        }
        if len(moves):
            age = g.round - knowledge.entries.round[source]
            metrics |= {"dominating": len(source) / len(moves), "age": float(age.mean())}
        return Mixed(
            clients=g.clients,
            rows=self._moved(g, moves, matrix, knowledge.entries),
            memory={"knowledge": {0: knowledge.kept(g.round, self.habits).fields()}},
            traffic=met.traffic,
            metrics=metrics,
            notes={"dominating": sets} if sets else {},
        )

    def meet(self, g: Gathering) -> Met:
        """The meetings of a round, and what nodes know after them."""
        columns = self._compared(g.layout)[0]
        met = meet(g, self.habits, "knowledge", g.accuracy, (g.shared, columns))
        kept = self._kept(met.knowledge.known, g)
        return replace(met, knowledge=met.knowledge.pruned(kept))

    def _moved(
        self, g: Gathering, moves: np.ndarray, matrix: csr_array, entries: Entries
    ) -> torch.Tensor:
        """Eq. 16; so written, a node that knows only itself keeps its model to the bit. Of itself
        it has its model as it is, of others as it arrived."""
        rows, who = g.rows.clone(), torch.from_numpy(moves)
        mine = entries.places(g.clients[moves], np.full(len(moves), g.round))
        entry = matrix.tocoo()
        itself = entry.col == mine[entry.row]
        share = np.bincount(entry.row[itself], entry.data[itself], len(moves))
        own = torch.from_numpy(share)[:, None]
        told = None if g.heard is g.rows else entries.rows[torch.from_numpy(mine)]
        for some, mean in products(matrix, entries.rows):
            before = g.rows[who, some].double()
            if told is not None:
                mean += own * (before - told[:, some])
            rows[who, some] = (before + self.delta * (mean - before)).to(rows.dtype)
        return rows

    def _kept(self, known: np.ndarray, g: Gathering) -> np.ndarray:
        """What nodes go on with: their own entry, and those that are not too old, the newest."""
        rounds = known.copy()
        np.fill_diagonal(rounds, g.round + 1)  # its own is the first of the `most`
        return _latest(rounds, self.most, self.habits.oldest(g.round), g.stream("most"))

    def _compared(self, layout: Layout) -> tuple[torch.Tensor | None, int]:
        """The columns that distances are taken on (None: all), and their number."""
        if self.layers == "all":
            return None, layout.size
        inside = layout.columns(self.layers).index
        return inside, len(inside)


def _latest(
    rounds: np.ndarray, most: int | None, oldest: int, rng: np.random.Generator
) -> np.ndarray:
    """Where a table's rounds are not before `oldest`, and in each row at most the `most` latest;
    lots are drawn among those of one round, or nodes with low numbers would be known better."""
    there = rounds >= oldest
    if most is None or most >= rounds.shape[1]:
        return there
    lots = rng.random(rounds.shape, dtype=np.float32)
    order = np.argsort(-(rounds + lots), axis=1, kind="stable")[:, :most]
    chosen = np.zeros_like(there)
    np.put_along_axis(chosen, order, True, axis=1)
    return there & chosen
