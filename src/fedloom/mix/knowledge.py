"""What nodes know of one another: from meetings and from what those they met were told.

Everything that a node tells of itself in a round is one *entry*: its model, its data size and
accuracy, and whom it has met. An entry never changes; a newer one of the same node replaces it
where it arrives. So what a node knows is, for every other node, which entry it has (or none), and
an entry that many nodes know is stored once. Distances of models follow from the dot products of
the entries, which are worked out once, when an entry is new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.mix.base import Fields

NOTHING = -1  # in place of an entry


@dataclass(frozen=True)
class Entries:
    """What nodes told of themselves, one place each."""

    rows: Tensor  # the models: the columns that are combined
    owner: np.ndarray
    round: np.ndarray  # in which it was told
    size: np.ndarray
    accuracy: np.ndarray
    met: np.ndarray  # entries × nodes: the last round in which the owner heard from them, or -1
    dots: np.ndarray  # entries × entries: products of what models have moved from the start
    along: np.ndarray  # what the start adds: s·(w − s) + s·s/2
    sums: np.ndarray  # of each model's values

    @staticmethod
    def none(width: int, dtype: torch.dtype) -> Entries:
        zero, whole = np.empty(0), np.empty(0, dtype=np.int64)
        return Entries(
            rows=torch.empty((0, width), dtype=dtype),
            owner=whole,
            round=whole,
            size=zero,
            accuracy=zero,
            met=np.empty((0, 0), dtype=np.int32),
            dots=np.empty((0, 0), dtype=np.float32),
            along=zero,
            sums=zero,
        )

    def __len__(self) -> int:
        return len(self.owner)

    def replaced(
        self, kept: np.ndarray, new: Entries, start: Tensor, compared: Tensor | None
    ) -> Entries:
        """Those of `kept`, then the new ones, which are compared with all on the columns that
        `compared` names (None: all).

        All models began as `start`, so products are taken of what they have moved since: those of
        the models themselves, nearly alike, would leave little of their distances but rounding.
        """
        at = torch.from_numpy(kept)
        rows = torch.cat([self.rows[at], new.rows])
        old = len(kept)
        start = start if compared is None else start[compared]
        moved = (rows if compared is None else rows[:, compared]) - start
        fresh, begun = moved[old:], start.double()
        # One product of the new models with the old and one among themselves: the rest is known.
        dots = np.empty((len(rows), len(rows)), dtype=np.float32)
        dots[:old, :old] = self.dots[np.ix_(kept, kept)]
        dots[old:, :old] = (fresh @ moved[:old].T).numpy()
        dots[:old, old:] = dots[old:, :old].T
        own = fresh @ fresh.T
        # The same both ways to the bit: nodes that are equal in all must have equal scores.
        dots[old:, old:] = ((own + own.T) / 2).numpy()
        return Entries(
            rows=rows,
            owner=np.concatenate([self.owner[kept], new.owner]),
            round=np.concatenate([self.round[kept], new.round]),
            size=np.concatenate([self.size[kept], new.size]),
            accuracy=np.concatenate([self.accuracy[kept], new.accuracy]),
            met=np.concatenate([widened(self.met[kept], new.met.shape[1], -1), new.met]),
            dots=dots,
            along=np.concatenate(
                [self.along[kept], (torch.mv(fresh.double(), begun) + begun.dot(begun) / 2).numpy()]
            ),
            sums=np.concatenate([self.sums[kept], (fresh.double().sum(1) + begun.sum()).numpy()]),
        )


@dataclass(frozen=True)
class Knowledge:
    """Who knows which entries, who met whom and when, and what is under way."""

    entries: Entries
    known: np.ndarray  # nodes × nodes: the place of the entry that one has of the other
    met: np.ndarray  # nodes × nodes: the last round in which one heard from the other, or -1
    receiver: np.ndarray  # of messages under way
    sender: np.ndarray
    due: np.ndarray
    told: np.ndarray  # messages × nodes: the entries that a message carries

    @staticmethod
    def none(width: int, dtype: torch.dtype) -> Knowledge:
        table, whole = np.empty((0, 0), dtype=np.int64), np.empty(0, dtype=np.int64)
        return Knowledge(Entries.none(width, dtype), table, table, whole, whole, whole, table)

    @staticmethod
    def of(fields: Fields) -> Knowledge:
        def group(name: str) -> dict[str, np.ndarray]:
            start = f"{name}."
            return {k[len(start) :]: v.numpy() for k, v in fields.items() if k.startswith(start)}

        entries = Entries(rows=fields["rows"], **group("entry"))
        return Knowledge(entries, **group("node"))

    def fields(self) -> Fields:
        out = {"rows": self.entries.rows}
        for name, part in (("entry", self.entries), ("node", self)):
            for field, value in vars(part).items():
                if isinstance(value, np.ndarray):
                    out[f"{name}.{field}"] = torch.from_numpy(np.ascontiguousarray(value))
        return out

    def widened(self, nodes: int) -> Knowledge:
        """Room for nodes that were not heard of before."""
        known, met = (
            np.pad(table, [(0, max(nodes - n, 0)) for n in table.shape], constant_values=-1)
            for table in (self.known, self.met)
        )
        return replace(self, known=known, met=met, told=widened(self.told, nodes, NOTHING))

    def forgotten(self, nodes: np.ndarray) -> Knowledge:
        """These nodes know nothing any more."""
        nodes = nodes[nodes < len(self.known)]  # of others nothing was ever known
        known, met = self.known.copy(), self.met.copy()
        known[nodes], met[nodes] = NOTHING, -1
        return replace(self, known=known, met=met)

    def unlinked(self, since: int) -> Knowledge:
        """Of what nodes told, meetings of earlier rounds are links no more."""
        met = self.entries.met
        return replace(self, entries=replace(self.entries, met=np.where(met >= since, met, -1)))

    def graph(self, node: int, length: int) -> LocalGraph:
        """What this node can know, and nothing else; models were compared on `length` columns."""
        ids = np.flatnonzero(self.known[node] >= 0)
        place = self.known[node, ids]
        met = self.entries.met[np.ix_(place, ids)] >= 0
        linked = met | met.T
        np.fill_diagonal(linked, False)
        first, second = np.nonzero(linked)
        e = self.entries
        along, sums = e.along[place], e.sums[place]
        dots = e.dots[place[first], place[second]] + (along[first] + along[second])
        squares = np.diagonal(e.dots)[place] + 2 * along
        size, accuracy = e.size[place], e.accuracy[place]
        links = (linked, first, second, dots, squares, sums, length)
        return LocalGraph(node, ids, size, accuracy, *links)


@dataclass(frozen=True)
class LocalGraph:
    """A node's weighted graph of the nodes it knows.

    Nodes are known by their number (`ids`) and counted here by position. `first` and `second` are
    the ends of all links, in both directions and in order; `dots` the products of their models,
    `squares` and `sums` those of every model with itself and of its values, on `length` columns.
    """

    node: int
    ids: np.ndarray
    size: np.ndarray
    accuracy: np.ndarray
    linked: np.ndarray
    first: np.ndarray
    second: np.ndarray
    dots: np.ndarray
    squares: np.ndarray
    sums: np.ndarray
    length: int

    def position(self, node: int) -> int:
        """Where a node is here; asking for one that nobody told of is an error."""
        at = int(np.searchsorted(self.ids, node))
        if at == len(self.ids) or self.ids[at] != node:
            raise FedloomError(
                f"Node {self.node} asks for node {node}, of which it was never told. A node may "
                "use only what it has met or heard of."
            )
        return at

    @property
    def degree(self) -> np.ndarray:
        return np.bincount(self.first, minlength=len(self.ids))

    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """1 − cos and 1 − Pearson's r of the models at the ends of every link (S4 eq. 2-4)."""
        a, b = self.first, self.second
        cosine = self.dots / np.sqrt(np.maximum(self.squares[a] * self.squares[b], 1e-300))
        spread = np.maximum(self.squares - self.sums**2 / self.length, 1e-300)
        shared = self.dots - self.sums[a] * self.sums[b] / self.length
        pearson = shared / np.sqrt(spread[a] * spread[b])
        return np.clip(1 - cosine, 0, 2), np.clip(1 - pearson, 0, 2)


def widened(table: np.ndarray, columns: int, empty: float) -> np.ndarray:
    """More columns, filled with `empty`."""
    more = max(columns - table.shape[1], 0)
    return np.pad(table, [(0, 0), (0, more)], constant_values=empty) if more else table
