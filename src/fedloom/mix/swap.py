"""Exchanging models instead of averaging them (S0 chapter 4): who swaps with whom, and when not.

A swap is a permutation of rows: every model survives exactly once, on another client. `Swap` asks
its partners' rule for that permutation; `Alternate` lets another mix take a turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.errors import FedloomError
from fedloom.kinds import Values
from fedloom.mix.base import Gathering, Mix, Mixed
from fedloom.similarity import Measure, similarity_matrix, weight_matrix

Pairs = list[tuple[int, int]]
Stream = Callable[..., np.random.Generator]

MOST_REPORTED = 200  # clients whose similarities are written to a round's record


class Likeness(ABC):
    """How alike the gathered models are, all pairs of them."""

    needs: frozenset[str] = frozenset()

    @abstractmethod
    def matrix(self, g: Gathering) -> np.ndarray: ...


@dataclass(frozen=True)
class OnWeights(Likeness):
    """By their trained weights."""

    measure: Measure

    def matrix(self, g: Gathering) -> np.ndarray:
        return weight_matrix(g.rows[:, : g.layout.trainable], self.measure).numpy()


@dataclass(frozen=True)
class OnProbes(Likeness):
    """By their activations on `probes` of the public images, drawn anew each round."""

    measure: Measure
    layers: tuple[str, ...] | None = None
    probes: int = 256
    needs = frozenset({"public"})

    def matrix(self, g: Gathering) -> np.ndarray:
        x = g.public.x
        if len(x) > self.probes:
            drawn = g.stream("probes").choice(len(x), self.probes, replace=False)
            x = x[torch.from_numpy(np.sort(drawn)).to(x.device)]
        models = g.networks.of(g.rows, g.public.x)
        return similarity_matrix(models, x, self.measure, self.layers).numpy()


@dataclass(frozen=True)
class Exchange:
    """Pairs that exchange models, one after the other, and what they were chosen by.

    >>> Exchange([(0, 2)]).order(4).tolist()
    [2, 1, 0, 3]
    """

    pairs: Pairs
    similarity: np.ndarray | None = None
    comparisons: int = 0

    def order(self, n: int) -> np.ndarray:
        """Whose model each of n clients has afterwards."""
        order = np.arange(n)
        for a, b in self.pairs:
            order[[a, b]] = order[[b, a]]
        return order

    def moved(self, n: int) -> np.ndarray:
        """Which of n clients have another model afterwards."""
        return np.flatnonzero(self.order(n) != np.arange(n))


class Partners:
    """Who exchanges models with whom, as positions among the n of a round."""

    needs: frozenset[str] = frozenset()

    def before(self, n: int, stream: Stream) -> Exchange | None:
        """The exchange, where no model has to be seen to choose it: then nobody else sends one."""
        return None

    def choose(self, g: Gathering) -> Exchange:
        """The exchange, by the models that were sent."""
        exchange = self.before(len(g.contacts.participants), g.stream)
        assert exchange is not None, f"{type(self).__name__} has neither `before` nor `choose`"
        return exchange


@dataclass(frozen=True)
class RandomPairs(Partners):
    """Disjoint pairs, everyone with equal chance; an odd client out keeps its model."""

    share: float = 1.0

    def before(self, n: int, stream: Stream) -> Exchange:
        drawn = stream("swap").permutation(n)[: 2 * swaps(n, self.share)]
        return Exchange([(int(a), int(b)) for a, b in drawn.reshape(-1, 2)])


@dataclass(frozen=True)
class InTurn(Partners):
    """Algorithm 4-1 to the letter: each client in turn exchanges with one drawn among all."""

    def before(self, n: int, stream: Stream) -> Exchange:
        return Exchange([(k, int(r)) for k, r in enumerate(stream("swap").integers(n, size=n))])


@dataclass(frozen=True)
class _ByLikeness(Partners):
    likeness: Likeness
    share: float = 1.0

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.likeness.needs

    def choose(self, g: Gathering) -> Exchange:
        matrix = self.likeness.matrix(g)
        pairs, compared = self._pairs(matrix, swaps(len(matrix), self.share), g.stream("swap"))
        return Exchange(pairs, matrix, compared)

    def _pairs(self, matrix: np.ndarray, count: int, rng: np.random.Generator) -> tuple[Pairs, int]:
        raise NotImplementedError


@dataclass(frozen=True)
class Greedy(_ByLikeness):
    """Algorithm 4-2: a random client takes the least similar of those that are left."""

    def _pairs(self, matrix: np.ndarray, count: int, rng: np.random.Generator) -> tuple[Pairs, int]:
        compared = 0

        def compare(base: int, others: Sequence[int]) -> np.ndarray:
            nonlocal compared
            compared += len(others)
            return matrix[base, others]

        return greedy_pairs(len(matrix), count, rng, compare), compared


@dataclass(frozen=True)
class LeastSimilar(_ByLikeness):
    """§4-9-2: the least similar pair of all, then the least similar of the rest, and so on."""

    def _pairs(self, matrix: np.ndarray, count: int, rng: np.random.Generator) -> tuple[Pairs, int]:
        return least_pairs(matrix, count), len(matrix) * (len(matrix) - 1) // 2


def swaps(n: int, share: float) -> int:
    """NS = ⌊⌊n/2⌋ · SP⌋; a hair is added so that 0.29 of 100 is 29."""
    return int(n // 2 * share + 1e-9)


def greedy_pairs(
    n: int,
    count: int,
    rng: np.random.Generator,
    compare: Callable[[int, Sequence[int]], np.ndarray],
) -> Pairs:
    """`count` times: a random base of those left, and the one of the others least similar to it."""
    left, pairs = list(range(n)), []
    for _ in range(count):
        base = left.pop(int(rng.integers(len(left))))
        least = left.pop(int(np.argmin(_comparable(compare(base, left)))))
        pairs.append((base, least))
    return pairs


def _comparable(values: np.ndarray) -> np.ndarray:
    """A model that answers NaN ranks last."""
    return np.nan_to_num(values, nan=np.finfo(values.dtype).max)


def least_pairs(matrix: np.ndarray, count: int) -> Pairs:
    """The smallest entries above the diagonal, each client in one of them (eq. 4-23)."""
    above = np.where(np.triu(np.ones_like(matrix, dtype=bool), 1), _comparable(matrix), np.inf)
    pairs = []
    for _ in range(count):
        a, b = (int(i) for i in np.unravel_index(np.argmin(above), above.shape))
        pairs.append((a, b))
        above[[a, b], :] = above[:, [a, b]] = np.inf
    return pairs


@dataclass(frozen=True)
class Swap(Mix):
    """Clients exchange models through the server, which keeps none."""

    partners: Partners
    part: str = "all"
    home = "node"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.partners.needs

    def senders(self, round: int, clients: np.ndarray, stream: Stream) -> np.ndarray:
        exchange = self.partners.before(len(clients), stream)
        return clients if exchange is None else clients[exchange.moved(len(clients))]

    def combine(self, g: Gathering) -> Mixed:
        everybody = g.contacts.participants
        exchange = self.partners.choose(g)
        moved = exchange.moved(len(everybody))
        source = np.searchsorted(g.clients, everybody[exchange.order(len(everybody))[moved]])
        return Mixed(
            clients=everybody[moved],
            rows=g.rows[torch.from_numpy(source)],
            notes=_notes(everybody, exchange),
        )


@dataclass(frozen=True)
class Alternate(Mix):
    """`usual` in most rounds; every `every`-th is `then`'s, after which all go on from what it
    made."""

    usual: Mix
    then: Mix
    every: int
    home = "node"

    def __post_init__(self) -> None:
        if (self.usual.home, self.then.home) != ("node", "server"):
            raise FedloomError(
                f"{type(self.usual).__name__} and {type(self.then).__name__} can't take turns: the "
                "first must keep models on the nodes, the second make one shared model of them."
            )
        if self.usual.part != self.then.part:
            raise FedloomError(
                f"{type(self.usual).__name__} combines '{self.usual.part}' and "
                f"{type(self.then).__name__} '{self.then.part}': give both the same part."
            )

    @property
    def _used(self) -> tuple[Mix, ...]:
        return (self.usual, self.then) if self.every > 1 else (self.then,)

    @property
    def part(self) -> str:  # type: ignore[override]
        return self.then.part

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(mix.needs for mix in self._used))

    @property
    def takes(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(mix.takes for mix in self._used))

    @property
    def keeps(self) -> Values:  # type: ignore[override]
        return {name: kind for mix in self._used for name, kind in mix.keeps.items()}

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.usual.memory + self.then.memory

    def _turn(self, round: int) -> Mix:
        return self.usual if round % self.every else self.then

    def senders(self, round: int, clients: np.ndarray, stream: Stream) -> np.ndarray:
        return self._turn(round).senders(round, clients, stream)

    def combine(self, g: Gathering) -> Mixed:
        mixed = self._turn(g.round).combine(g)
        if g.round % self.every:
            return mixed
        return replace(mixed, reset=True, notes={"event": "average", **mixed.notes})


def _notes(clients: np.ndarray, exchange: Exchange) -> dict[str, Any]:
    """Who exchanged with whom; similarities as the rows of the triangle above the diagonal."""
    named = clients.tolist()
    notes: dict[str, Any] = {
        "event": "swap",
        "pairs": [[named[a], named[b]] for a, b in exchange.pairs],
    }
    if exchange.similarity is not None:
        notes["comparisons"] = exchange.comparisons
        if len(named) <= MOST_REPORTED:
            above = exchange.similarity[np.triu_indices(len(named), 1)]
            notes["similarity"] = [float(f"{value:.9g}") for value in above]
    return notes
