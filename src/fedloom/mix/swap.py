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
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Values
from fedloom.mix.base import Gathering, Mix, Mixed
from fedloom.similarity import Measure, Signatures, similarity_matrix, weight_matrix

Pairs = list[tuple[int, int]]
Stream = Callable[..., np.random.Generator]

MOST_REPORTED = 200  # clients whose similarities are written to a round's record


class Likeness(ABC):
    """How similar the gathered models are."""

    needs: frozenset[str] = frozenset()

    @abstractmethod
    def matrix(self, g: Gathering) -> np.ndarray:
        """All pairs of them."""

    @abstractmethod
    def signatures(self, g: Gathering) -> Signatures:
        """What some of them can be compared by."""


@dataclass(frozen=True)
class OnWeights(Likeness):
    """By their trained weights."""

    measure: Measure

    def matrix(self, g: Gathering) -> np.ndarray:
        return weight_matrix(g.rows[:, : g.layout.trainable], self.measure).numpy()

    def signatures(self, g: Gathering) -> Signatures:
        return Signatures.of_rows(g.rows[:, : g.layout.trainable], self.measure)


@dataclass(frozen=True)
class OnProbes(Likeness):
    """By their activations on `probes` of the public images, redrawn each round."""

    measure: Measure
    layers: tuple[str, ...] | None = None
    probes: int = 256
    needs = frozenset({"public"})

    def matrix(self, g: Gathering) -> np.ndarray:
        models = g.networks.of(g.rows, g.public.x)
        return similarity_matrix(models, self._drawn(g), self.measure, self.layers).numpy()

    def signatures(self, g: Gathering) -> Signatures:
        models = g.networks.of(g.rows, g.public.x)
        return Signatures.of(models, self._drawn(g), self.measure, self.layers)

    def _drawn(self, g: Gathering) -> Tensor:
        x = g.public.x
        if len(x) > self.probes:
            drawn = g.stream("probes").choice(len(x), self.probes, replace=False)
            x = x[torch.from_numpy(np.sort(drawn)).to(x.device)]
        return x


@dataclass(frozen=True)
class Exchange:
    """Pairs that exchange models, one after the other, and what they were chosen by.

    `similarity` holds the pairs that were compared (NaN: this one was not), and is missing where
    none was, or where there are too many to report.

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

    def among(self, there: np.ndarray) -> Exchange:
        """The same without the exchanges of clients whose model did not come in, though it would
        have moved; `there` says of each whether it did.

        >>> Exchange([(0, 2), (1, 3)]).among(np.array([True, True, False, True])).pairs
        [(1, 3)]
        """
        exchange = self
        while absent := {int(i) for i in exchange.moved(len(there)) if not there[i]}:
            pairs = [pair for pair in exchange.pairs if not absent & set(pair)]
            exchange = replace(exchange, pairs=pairs)
        return exchange


class Partners:
    """Who exchanges models with whom, as positions among the n of a round."""

    needs: frozenset[str] = frozenset()

    def before(self, turn: int, n: int, stream: Stream) -> Exchange | None:
        """The exchange of the `turn`-th swap (from 1 on), where no model has to be seen to choose
        it: then nobody else sends one."""
        return None

    def choose(self, g: Gathering) -> Exchange:
        """The exchange, by the models that were sent; `g.round` counts swaps."""
        exchange = self.before(g.round, len(g.contacts.participants), g.stream)
        assert exchange is not None, f"{type(self).__name__} has neither `before` nor `choose`"
        return exchange


@dataclass(frozen=True)
class RandomPairs(Partners):
    """Disjoint pairs, everyone with equal chance; an odd client out keeps its model."""

    share: float = 1.0

    def before(self, turn: int, n: int, stream: Stream) -> Exchange:
        drawn = stream("swap").permutation(n)[: 2 * swaps(n, self.share)]
        return Exchange([(int(a), int(b)) for a, b in drawn.reshape(-1, 2)])


@dataclass(frozen=True)
class InTurn(Partners):
    """Algorithm 4-1 to the letter: each client in turn exchanges with one drawn among all."""

    def before(self, turn: int, n: int, stream: Stream) -> Exchange:
        return Exchange([(k, int(r)) for k, r in enumerate(stream("swap").integers(n, size=n))])


@dataclass(frozen=True)
class Rotating(Partners):
    """§4-2's rotating partners, as an odd-even ring: (0,1)(2,3)… in one swap, (1,2)(3,4)… and, for
    an even number, (n−1,0) in the next. Every model moves on by one client in each swap, half of
    them in either direction, so it has been with everybody after n − 1 swaps; an odd number is a
    path with two ends, at which a model rests once and turns, and needs 2(n − 1)."""

    def before(self, turn: int, n: int, stream: Stream) -> Exchange:
        first = (turn - 1) % 2
        last = n if n % 2 == 0 else n - 1  # on a ring, the last one's neighbour is the first
        return Exchange([(a, (a + 1) % n) for a in range(first, last, 2)])


@dataclass(frozen=True)
class _ByLikeness(Partners):
    likeness: Likeness
    share: float = 1.0

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.likeness.needs

    def choose(self, g: Gathering) -> Exchange:
        count = swaps(len(g.rows), self.share)
        if not count:
            return Exchange([])
        pairs, compared, known = self._pairs(g, count)
        # Of those whose models came in, as places among all that are there.
        n, at = len(g.contacts.participants), np.searchsorted(g.contacts.participants, g.clients)
        pairs = [(int(at[a]), int(at[b])) for a, b in pairs]
        if known is None or n > MOST_REPORTED:
            return Exchange(pairs, None, compared)
        similarity = np.full((n, n), np.nan)
        similarity[np.ix_(at, at)] = known
        return Exchange(pairs, similarity, compared)

    def _pairs(self, g: Gathering, count: int) -> tuple[Pairs, int, np.ndarray | None]:
        """`count` pairs, the number of comparisons, and what they gave (NaN: not compared)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Greedy(_ByLikeness):
    """Algorithm 4-2: a random client takes the least similar of those that are left. Only the
    similarities that it looks at are computed, ⌊n²/4⌋ where all swap."""

    def _pairs(self, g: Gathering, count: int) -> tuple[Pairs, int, np.ndarray | None]:
        signatures, n, compared = self.likeness.signatures(g), len(g.rows), 0
        known = np.full((n, n), np.nan) if n <= MOST_REPORTED else None

        def compare(base: int, others: Sequence[int]) -> np.ndarray:
            nonlocal compared
            compared += len(others)
            values = signatures.row(base, others).numpy()
            if known is not None:
                known[base, others] = known[others, base] = values
            return values

        return greedy_pairs(n, count, g.stream("swap"), compare), compared, known


@dataclass(frozen=True)
class LeastSimilar(_ByLikeness):
    """§4-9-2: the least similar pair of all, then the least similar of the rest, and so on."""

    def _pairs(self, g: Gathering, count: int) -> tuple[Pairs, int, np.ndarray | None]:
        matrix = self.likeness.matrix(g)
        return least_pairs(matrix, count), len(matrix) * (len(matrix) - 1) // 2, matrix


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
    """The clients of a round exchange models through the server, which keeps none; other clients
    keep the model they hold."""

    partners: Partners
    part: str = "all"
    home = "node"
    fewest = 2

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.partners.needs

    def senders(self, round: int, clients: np.ndarray, stream: Stream) -> np.ndarray:
        exchange = self.partners.before(round, len(clients), stream)
        return clients if exchange is None else clients[exchange.moved(len(clients))]

    def combine(self, g: Gathering) -> Mixed:
        everybody = g.contacts.participants
        exchange = self.partners.choose(g).among(np.isin(everybody, g.clients))
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
    made, whether they took part or not. Each of the two counts its own turns as rounds."""

    usual: Mix
    then: Mix
    every: int
    home = "node"

    def __post_init__(self) -> None:
        if (self.usual.home, self.then.home) != ("node", "server"):
            raise FedloomError(
                f"{type(self.usual).__name__} and {type(self.then).__name__} can't alternate: "
                "the first must keep models on the nodes, the second make one shared model of "
                "them."
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
    def fewest(self) -> int:  # type: ignore[override]
        return max(mix.fewest for mix in self._used)

    @property
    def takes(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(mix.takes for mix in self._used))

    @property
    def keeps(self) -> Values:  # type: ignore[override]
        return {name: kind for mix in self._used for name, kind in mix.keeps.items()}

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.usual.memory + self.then.memory

    def _turn(self, round: int) -> tuple[Mix, int]:
        """Whose turn it is, and the number of that turn among its own."""
        done, rest = divmod(round, self.every)
        return (self.usual, round - done) if rest else (self.then, done)

    def senders(self, round: int, clients: np.ndarray, stream: Stream) -> np.ndarray:
        mix, turn = self._turn(round)
        return mix.senders(turn, clients, stream)

    def combine(self, g: Gathering) -> Mixed:
        mix, turn = self._turn(g.round)
        mixed = mix.combine(replace(g, round=turn))
        if g.round % self.every:
            return mixed
        return replace(mixed, reset=True, notes={"event": "average", **mixed.notes})


def _notes(clients: np.ndarray, exchange: Exchange) -> dict[str, Any]:
    """Who exchanged with whom; similarities as the rows of the triangle above the diagonal, with
    None for pairs that nobody compared."""
    named = clients.tolist()
    notes: dict[str, Any] = {
        "event": "swap",
        "pairs": [[named[a], named[b]] for a, b in exchange.pairs],
    }
    if exchange.comparisons:
        notes["comparisons"] = exchange.comparisons
    if exchange.similarity is not None:
        above = exchange.similarity[np.triu_indices(len(named), 1)].tolist()
        notes["similarity"] = [None if v != v else float(f"{v:.9g}") for v in above]
    return notes
