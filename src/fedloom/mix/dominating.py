"""The dominating-set mix (S4): a node combines the best of those it knows that cover all others.

Every node scores the nodes of its own graph, takes a dominating set of them greedily, weighs its
members by several criteria (AHP and WASPAS) and moves towards their weighted mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.mix.base import Gathering, Mix, Mixed, Traffic
from fedloom.mix.knowledge import NOTHING, Entries, Knowledge, LocalGraph

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
            f"The pairwise matrix {matrix.round(3).tolist()} is not one: all values must be above "
            "0, ones on the diagonal, and each value 1 divided by the one across the diagonal."
        )
    judged = AHP(matrix=np.ones((3, 3)))
    judged.matrix = matrix  # given above, it would have to be in whole numbers from 1 to 9
    ratio = float(judged.get_cr())
    if ratio >= CONSISTENT:
        raise FedloomError(
            f"The pairwise matrix contradicts itself: its consistency ratio is {ratio:.2f} and "
            f"must be below {CONSISTENT}. If A outweighs B twice and B outweighs C twice, A should "
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


def greedy_dominating_set(linked: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Nodes in descending score, the first of equals first: one that is not covered yet is taken
    and covers its neighbours (S4 algorithm 1).

    >>> path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=bool)
    >>> greedy_dominating_set(path, np.array([0.1, 0.9, 0.5])).tolist()
    [1]
    """
    rest = np.argsort(-score, kind="stable")
    taken = []
    while len(rest):
        taken.append(rest[0])
        covered = linked[rest[0]]
        rest = rest[1:]
        rest = rest[~covered[rest]]
    return np.array(taken, dtype=np.int64)


@dataclass(frozen=True)
class DominatingSet(Mix):
    """w_i ← δ Σ_{j∈DS} Q̄_j w_j + (1 − δ) w_i over a dominating set of the node's own graph, for
    nodes that something reached in the round; with `mix_alone`, for all."""

    part: str = "all"
    theta: float = 0.2  # θ, of the accuracy
    balance: float = 0.4  # λ, of cosine and Pearson distance
    delta: float = 0.7  # δ
    pairwise: tuple[tuple[float, ...], ...] = PAIRWISE
    layers: str = "all"
    neighbours: int | None = None
    most: int | None = None
    forget: int | None = None
    links: int | None = None
    mix_alone: bool = False
    validates: str | None = "test"

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
        """d = λ d_cos + (1 − λ) d_pearson for every link, eq. 5, each with 1 for the largest."""
        cosine, pearson = (d / max(d.max(initial=0), 1e-300) for d in graph.distances())
        return self.balance * cosine + (1 - self.balance) * pearson

    def scores(self, graph: LocalGraph) -> np.ndarray:
        """Eq. 6: a node's weight, less where its neighbours are better linked, or far in model."""
        w, degree = self.weights(graph), graph.degree
        drift = np.bincount(graph.first, self.distances(graph) * w[graph.second], len(graph.ids))
        linked = degree > 0
        starts = np.concatenate([[0], np.cumsum(degree)[:-1]])[linked]
        best = np.ones(len(w))
        if linked.any():
            best[linked] = np.maximum.reduceat(degree[graph.second], starts)
        importance = np.minimum(1, degree / best)
        return np.where(linked, w * importance / (1 + drift / np.maximum(degree, 1)), w)

    def choose(self, graph: LocalGraph) -> tuple[np.ndarray, np.ndarray]:
        """The members of the dominating set, by position in the graph, and their shares Q̄."""
        score = self.scores(graph)
        members = greedy_dominating_set(graph.linked, score)
        criteria = np.stack([graph.accuracy, graph.size, score], axis=1)[members]
        return members, waspas(criteria, self._criteria)

    def places(self, knowledge: Knowledge, node: int, others: np.ndarray) -> np.ndarray:
        """The entries whose models a node combines for these others: those that it was told."""
        return knowledge.known[node, others]

    def combine(self, g: Gathering) -> Mixed:
        from scipy.sparse import csr_array

        compared, length = self._compared(g.layout)
        before = g.memory["knowledge"].get(0)
        old = (
            Knowledge.of(before)
            if before is not None
            else Knowledge.none(g.layout.size, g.rows.dtype)
        )
        knowledge, traffic = self._exchange(g, old, compared)
        heard = (knowledge.met[g.clients] == g.round).any(axis=1)
        moves = np.flatnonzero(heard | self.mix_alone)
        at = [np.empty(0, dtype=np.int64)]
        share = [np.empty(0)]
        for node in g.clients[moves]:
            graph = knowledge.graph(int(node), length)
            members, shares = self.choose(graph)
            at.append(self.places(knowledge, int(node), graph.ids[members]))
            share.append(shares)
        sizes = [len(a) for a in at[1:]]
        ages = g.round - knowledge.entries.round[np.concatenate(at)]
        used, source = np.unique(np.concatenate(at), return_inverse=True)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        matrix = csr_array((np.concatenate(share), source, starts), shape=(len(sizes), len(used)))
        own = g.rows.to(torch.float64, copy=True).numpy()
        mean = matrix @ knowledge.entries.rows[torch.from_numpy(used)].double().numpy()
        # The same as eq. 16; so written, a node that knows only itself keeps its model to the bit.
        own[moves] += self.delta * (mean - own[moves])
        metrics: dict[str, float] = {
            "known": float((knowledge.known[g.clients] >= 0).sum() / max(len(g.clients), 1)),
            "entries": len(knowledge.entries),
        }
        if sizes:
            metrics |= {"dominating": float(np.mean(sizes)), "age": float(ages.mean())}
        return Mixed(
            clients=g.clients,
            rows=torch.from_numpy(own).to(g.rows.dtype),
            memory={"knowledge": {0: knowledge.fields()}},
            traffic=traffic,
            metrics=metrics,
        )

    def _exchange(
        self, g: Gathering, old: Knowledge, compared: torch.Tensor | None
    ) -> tuple[Knowledge, Traffic]:
        """Everybody tells of itself, and those that meet tell each other all they know."""
        sender, receiver, late = g.contacts.messages()
        nodes = int(max(len(old.known), g.clients.max(initial=-1) + 1))
        since = 0 if self.links is None else max(g.round - self.links + 1, 0)
        old = old.widened(nodes).forgotten(g.contacts.forgotten).unlinked(since)
        arrives = (old.due <= g.round) & np.isin(old.receiver, g.clients)
        met = old.met.copy()
        met[receiver[late == 0], sender[late == 0]] = g.round
        met[old.receiver[arrives], old.sender[arrives]] = g.round
        new = self._told(g, met, since)
        mine = old.known.copy()
        mine[g.clients, g.clients] = len(old.entries) + np.arange(len(new))  # they come behind
        known, traffic = self._merge(
            old.entries,
            new,
            mine,
            (sender, receiver, late),
            (old.receiver[arrives], old.told[arrives]),
        )
        told_in = np.concatenate([old.entries.round, new.round, [-1]])
        known = self._pruned(known, told_in, g)
        going, later = ~arrives, late > 0
        told = np.concatenate([old.told[going], mine[sender[later]]])
        # Entries that nobody has, and nobody is being sent, are dropped before models are compared.
        used = np.unique(np.concatenate([known[known >= 0], told[told >= 0]]))
        kept = used[used < len(old.entries)]
        place = np.full(len(old.entries) + len(new) + 1, NOTHING)  # the last stands for nothing
        place[kept] = np.arange(len(kept))
        place[len(old.entries) : -1] = len(kept) + np.arange(len(new))
        knowledge = Knowledge(
            entries=old.entries.replaced(kept, new, g.shared, compared),
            known=place[known],
            met=met,
            receiver=np.concatenate([old.receiver[going], receiver[later]]),
            sender=np.concatenate([old.sender[going], sender[later]]),
            due=np.concatenate([old.due[going], g.round + late[later]]),
            told=place[told],
        )
        return knowledge, Traffic(traffic.up[g.clients], traffic.down[g.clients])

    def _told(self, g: Gathering, met: np.ndarray, since: int) -> Entries:
        """What the nodes tell of themselves in this round. Whoever has nothing to validate on has
        shown no accuracy."""
        met = met[g.clients].astype(np.int32)
        return replace(
            Entries.none(g.layout.size, g.rows.dtype),
            rows=g.heard,
            owner=g.clients,
            round=np.full(len(g.clients), g.round),
            size=g.weights,
            accuracy=np.nan_to_num(g.accuracy),
            met=np.where(_latest(met, self.neighbours, since, g.stream("neighbours")), met, -1),
        )

    def _merge(
        self,
        old: Entries,
        new: Entries,
        mine: np.ndarray,
        messages: tuple[np.ndarray, np.ndarray, np.ndarray],
        arrived: tuple[np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, Traffic]:
        """What everybody knows after this round's messages; values sent and received by node.

        Two that meet first tell which entries they have, two numbers each, and then send those
        that the other has older or not at all. Nobody answers a late message, so it carries all.
        A link is a number, and another where it matters when the two met.
        """
        nodes, width = len(mine), new.rows.shape[1]
        sender, receiver, late = messages
        told_in = np.concatenate([old.round, new.round, [-1]]).astype(np.int32)
        linked = np.concatenate([(each.met >= 0).sum(axis=1) for each in (old, new)])
        link = 1 if self.links is None else 2
        costs = np.append(width + 2.0 + link * linked, 0)  # the last of each stands for no entry
        rounds, price, greeting = told_in[mine], costs[mine], 2.0 * (mine >= 0).sum(axis=1)
        known, up, down = mine.copy(), np.zeros(nodes), np.zeros(nodes)
        ends = np.searchsorted(receiver, np.arange(nodes + 1))
        for node in np.unique(receiver):
            here = slice(ends[node], ends[node + 1])
            who, delay = sender[here], late[here]
            newer = rounds[who] > rounds[node]
            newer[delay > 0] = mine[who[delay > 0]] >= 0
            sent = np.einsum("mn,mn->m", newer, price[who]) + greeting[who]
            up[who] += sent
            down[node] += sent[delay == 0].sum()
            newest = np.where((delay == 0)[:, None], rounds[who], -1)
            best = newest.argmax(axis=0)
            better = np.flatnonzero(newest[best, np.arange(nodes)] > rounds[node])
            known[node, better] = mine[who[best[better]], better]
        for node, told in zip(*arrived, strict=True):
            newer = told_in[told] > told_in[known[node]]
            known[node, newer] = told[newer]
            down[node] += costs[told].sum() + 2.0 * (told >= 0).sum()
        return known, Traffic(up.astype(np.int64), down.astype(np.int64))

    def _pruned(self, known: np.ndarray, told_in: np.ndarray, g: Gathering) -> np.ndarray:
        """What nodes go on with: their own entry, and those that are not too old, the newest."""
        oldest = 0 if self.forget is None else g.round - self.forget
        rounds = told_in[known]
        np.fill_diagonal(rounds, g.round + 1)  # its own is the first of the `most`
        return np.where(_latest(rounds, self.most, oldest, g.stream("most")), known, NOTHING)

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
