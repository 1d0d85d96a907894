"""What nodes know of one another: from meetings and from what those they met were told.

Everything that a node tells of itself in a round is one *entry*: its model, its data size and
accuracy. Beside it the node tells its *links*, those that it has heard from, one by one as they
come. Entries and links never change; a newer entry of the same node replaces the older one where it
arrives. So what a node knows is two numbers for every other node: the round of the entry that it
has (or none), and how many of that node's links it was told. An entry that many nodes know is
stored once. Distances of models follow from the dot products of the entries, which are worked out
once, when an entry is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.mix.base import Fields, Gathering, Traffic
from fedloom.topology.base import Contacts
from fedloom.topology.relay import Letters, Walk, firsts

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NOTHING = -1  # in place of the round of an entry
NEVER = np.iinfo(np.int64).max
_DENSE = 0.05  # share of a mixing matrix that is not zero
_COLUMNS = 4096


@dataclass(frozen=True)
class Habits:
    """What nodes keep and tell: entries and links of so many earlier rounds (None: of all; 0: of
    this one only), at most so many `neighbours` each, the last heard from. `numbers` go with
    each model that is sent, `greeting` ones with each name of an entry in a greeting.

    Without `remembers` nodes begin every round knowing nothing, but take what arrives late.
    """

    forget: int | None = None
    links: int | None = 0
    neighbours: int | None = None
    tells_links: bool = True
    remembers: bool = True
    numbers: int = 0
    greeting: int = 1

    @property
    def link(self) -> int:
        """Numbers that tell a link: who, and when, where that matters."""
        return 2 if self.links else 1

    @property
    def takes_late(self) -> bool:
        """Whether what comes rounds late is of any use."""
        return self.forget is None or self.forget > 0

    def oldest(self, round: int) -> int:
        """The first round whose entries are still of use in this one."""
        return 0 if self.forget is None else max(round - self.forget, 0)

    def recent(self, links: Links, round: int) -> Links:
        """Those links that still count in this round."""
        return links if self.links is None else links.since(round - self.links)


@dataclass(frozen=True)
class Entries:
    """What nodes told of themselves, one place each."""

    rows: Tensor  # the models: the columns that are combined
    owner: np.ndarray
    round: np.ndarray  # in which it was told
    size: np.ndarray
    accuracy: np.ndarray
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
            dots=np.empty((0, 0), dtype=np.float32),
            along=zero,
            sums=zero,
        )

    @staticmethod
    def told(g: Gathering, accuracy: np.ndarray | None = None) -> Entries:
        """What the nodes of a round tell of themselves, not compared yet. One whose message holds
        no numbers, which nobody takes, knows itself as it is."""
        rows, nodes = g.heard, len(g.clients)
        if not torch.isfinite(rows.sum()):
            sound = torch.isfinite(rows).all(dim=1, keepdim=True)
            rows = torch.where(sound, rows, g.rows)
        return replace(
            Entries.none(g.layout.size, g.rows.dtype),
            rows=rows,
            owner=g.clients,
            round=np.full(nodes, g.round),
            size=g.weights,
            accuracy=np.zeros(nodes) if accuracy is None else np.nan_to_num(accuracy),
        )

    def __len__(self) -> int:
        return len(self.owner)

    def places(self, owner: np.ndarray, round: np.ndarray) -> np.ndarray:
        """Where the entries that these owners told in these rounds are."""
        keys = self.owner + (self.round << 32)
        order = np.argsort(keys, kind="stable")
        return order[np.searchsorted(keys[order], owner + (round.astype(np.int64) << 32))]

    def joined(self, kept: np.ndarray, new: Entries) -> Entries:
        """Those of `kept`, then the new ones; nothing is compared."""
        if not len(kept):
            return new
        at = torch.from_numpy(kept)
        rest = {
            name: np.concatenate([getattr(self, name)[kept], getattr(new, name)])
            for name in ("owner", "round", "size", "accuracy")
        }
        return replace(self, rows=torch.cat([self.rows[at], new.rows]), **rest)

    def compared(
        self, kept: np.ndarray, new: Entries, start: Tensor, columns: Tensor | None
    ) -> Entries:
        """Those of `kept`, then the new ones, which are compared with all on these columns (None:
        all).

        All models began as `start`, so products are taken of what they have moved since: those of
        the models themselves, nearly alike, would leave little of their distances but rounding.
        """
        joined, old = self.joined(kept, new), len(kept)
        rows = joined.rows
        start = start if columns is None else start[columns]
        moved = (rows if columns is None else rows[:, columns]) - start
        fresh, begun = moved[old:], start.double()
        # One product of the new models with the old and one among themselves: the rest is known.
        dots = np.empty((len(rows), len(rows)), dtype=np.float32)
        own = fresh @ fresh.T
        # The same both ways to the bit: nodes that are equal in all must have equal scores.
        dots[old:, old:] = ((own + own.T) / 2).numpy()
        if old:
            dots[:old, :old] = self.dots[np.ix_(kept, kept)]
            dots[old:, :old] = (fresh @ moved[:old].T).numpy()
            dots[:old, old:] = dots[old:, :old].T
        along = torch.cat([row.double() @ begun[:, None] for row in fresh.split(64)] or [fresh])
        sums = torch.cat([row.double().sum(1) for row in fresh.split(64)] or [fresh[:, :0].sum(1)])
        return replace(
            joined,
            dots=dots,
            along=np.append(self.along[kept], along.view(-1).numpy() + begun.dot(begun).item() / 2),
            sums=np.append(self.sums[kept], (sums + begun.sum()).numpy()),
        )

    def distances(self, a: np.ndarray, b: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """1 − cos and 1 − Pearson's r of pairs of models, compared on `length` columns."""
        dots = self.dots[a, b] + (self.along[a] + self.along[b])
        squares = np.diagonal(self.dots) + 2 * self.along
        cosine = dots / np.sqrt(np.maximum(squares[a] * squares[b], 1e-300))
        spread = squares - self.sums**2 / length
        shared = dots - self.sums[a] * self.sums[b] / length
        pearson = shared / np.sqrt(np.maximum(spread[a] * spread[b], 1e-300))
        return np.clip(1 - cosine, 0, 2), np.clip(1 - pearson, 0, 2)

    def only(self, at: np.ndarray) -> Entries:
        facts = ["owner", "round", "size", "accuracy"]
        if len(self.dots):
            facts += ["along", "sums"]
        some = {name: getattr(self, name)[at] for name in facts}
        dots = self.dots[np.ix_(at, at)] if len(self.dots) else self.dots
        return replace(self, rows=self.rows[torch.from_numpy(at)], dots=dots, **some)


@dataclass(frozen=True)
class Links:
    """Who has heard from whom, as each tells it: the links of a node are counted, and whoever was
    told the first k of them knows those whose `place` is up to k and whose `end` is not.

    `gone` is the round in which the receiver lost its state, and with it this link: later entries
    of it do not tell it. `last` orders the links of a node by when it last heard from them.
    """

    receiver: np.ndarray
    sender: np.ndarray
    round: np.ndarray
    place: np.ndarray
    end: np.ndarray
    gone: np.ndarray
    last: np.ndarray

    @staticmethod
    def none() -> Links:
        return Links(*(np.empty(0, dtype=np.int64) for _ in fields(Links)))

    def __len__(self) -> int:
        return len(self.receiver)

    def since(self, round: int) -> Links:
        return self.only(self.round >= round)

    def only(self, which: np.ndarray) -> Links:
        return Links(*(getattr(self, f.name)[which] for f in fields(self)))

    def forgotten(self, nodes: np.ndarray, round: int) -> Links:
        """These nodes know nothing any more, so they do not tell these links again."""
        lost = np.isin(self.receiver, nodes) & (self.gone == NEVER)
        return replace(self, gone=np.where(lost, round, self.gone))

    def heard(
        self, events: np.ndarray, round: int, count: np.ndarray, habits: Habits,
        rng: np.random.Generator,
    ) -> tuple[Links, np.ndarray]:  # fmt: skip
        """With what nodes hear in a round: events are rows (step, receiver, sender, the round in
        which it was sent); `count` has how many links each node ever had. Returns also the steps of
        the new links, which are the last."""
        lots = rng.random(len(events)) if habits.neighbours is not None else np.zeros(len(events))
        step, receiver, sender, sent = events[np.lexsort((lots, events[:, 0], events[:, 1]))].T
        if habits.neighbours is not None:
            return self._bounded(step, receiver, sender, sent, round, count, habits)
        pair, mine = (receiver << 32) + sender, (self.receiver << 32) + self.sender
        age, open_ = round - sent, self.gone == NEVER
        if habits.links is None:  # a link that never ends is told once, another once a round
            new = firsts(pair) & ~np.isin(pair, mine[open_])
        else:
            new = firsts(pair * (age.max(initial=0) + 1) + age)
        if habits.links is not None and age.any():  # where one is newer, it tells more
            newest = dict(zip(mine[open_].tolist(), self.round[open_].tolist(), strict=True))
            for i in np.flatnonzero(new & (age > 0)):
                new[i] = newest.get(int(pair[i]), NOTHING) < sent[i]
        step, receiver, sender, sent = step[new], receiver[new], sender[new], sent[new]
        rank = np.arange(len(receiver)) - np.searchsorted(receiver, receiver)
        here = np.full(len(receiver), round)
        never = np.full(len(receiver), NEVER)
        made = Links(receiver, sender, sent, count[receiver] + rank + 1, never, never, here)
        both = ((getattr(self, f.name), getattr(made, f.name)) for f in fields(self))
        return Links(*(np.concatenate(pair) for pair in both)), step

    def _bounded(
        self, step: np.ndarray, receiver: np.ndarray, sender: np.ndarray, sent: np.ndarray,
        round: int, count: np.ndarray, habits: Habits,
    ) -> tuple[Links, np.ndarray]:  # fmt: skip
        """Where nodes tell only of the last that they heard from, others end a link's time."""
        assert habits.neighbours is not None
        rows = [list(row) for row in zip(*(getattr(self, f.name).tolist() for f in fields(self)),
                                         strict=True)]  # fmt: skip
        told: dict[int, dict[int, list[int]]] = {}  # receiver → sender, last heard last → its links
        open_ = (self.gone == NEVER) & (self.end == NEVER)
        for at in np.flatnonzero(open_)[np.argsort(self.last[open_], kind="stable")]:
            mine = told.setdefault(rows[at][0], {})
            mine[rows[at][1]] = [*mine.pop(rows[at][1], []), int(at)]
        places, steps = count.copy(), []
        heard = zip(*(v.tolist() for v in (step, receiver, sender, sent)), strict=True)
        for i, (s, r, who, when) in enumerate(heard):
            mine = told.setdefault(r, {})
            links = mine.pop(who, [])
            if not links or (habits.links is not None and rows[links[-1]][2] < when):
                places[r] += 1
                links.append(len(rows))
                rows.append([r, who, when, int(places[r]), NEVER, NEVER, 0])
                steps.append(s)
            mine[who] = links
            for at in links:
                rows[at][6] = (round << 32) + i
            if len(mine) > habits.neighbours:
                for at in mine.pop(next(iter(mine))):
                    rows[at][4] = int(places[r])
        table = np.array(rows, dtype=np.int64).reshape(-1, len(fields(self)))
        return Links(*table.T), np.array(steps, dtype=np.int64)

    def known(self, round: np.ndarray, told: np.ndarray) -> np.ndarray:
        """Which of them a node knows that has entries of these rounds, and was `told` so many
        links, of every node."""
        count = told[self.receiver]
        out = self.place <= count
        if len(self.ending):
            at = self.ending
            out[at] &= (round[self.receiver[at]] < self.gone[at]) & (count[at] < self.end[at])
        return out

    @cached_property
    def ending(self) -> np.ndarray:
        """Those that some do not know any more."""
        return np.flatnonzero((self.gone < NEVER) | (self.end < NEVER))


@dataclass(frozen=True)
class UnderWay:
    """Messages under way, with what they cost; `tells` is where `told` and `links` hold what they
    carry (-1: nothing of use)."""

    receiver: np.ndarray
    sender: np.ndarray
    sent: np.ndarray
    due: np.ndarray
    models: np.ndarray
    numbers: np.ndarray
    tells: np.ndarray
    told: np.ndarray  # by message or several alike × nodes: the round of the entry, or NOTHING
    links: np.ndarray  # the same: how many links

    @staticmethod
    def none() -> UnderWay:
        whole, table = np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.int32)
        return UnderWay(whole, whole, whole, whole, whole, whole, whole, table, table)

    def only(self, which: np.ndarray) -> UnderWay:
        """These messages, and what they carry."""
        tells = self.tells[which]
        used, place = np.unique(tells[tells >= 0], return_inverse=True)
        tells[tells >= 0] = place
        some = {name: getattr(self, name)[which] for name in _BY_MESSAGE}
        return UnderWay(**some, tells=tells, told=self.told[used], links=self.links[used])

    def joined(self, other: UnderWay) -> UnderWay:
        nodes = max(self.told.shape[1], other.told.shape[1])
        tells = np.where(other.tells >= 0, other.tells + len(self.told), NOTHING)
        both = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in _BY_MESSAGE
        }
        told, links = (
            np.concatenate([widened(getattr(each, name), nodes, fill) for each in (self, other)])
            for name, fill in (("told", NOTHING), ("links", 0))
        )
        return UnderWay(**both, tells=np.concatenate([self.tells, tells]), told=told, links=links)


_BY_MESSAGE = ("receiver", "sender", "sent", "due", "models", "numbers")


@dataclass(frozen=True)
class Knowledge:
    """Who knows which entries and how many links of whom, and what is under way."""

    entries: Entries
    known: np.ndarray  # nodes × nodes: the round of the entry that one has of the other
    told: np.ndarray  # nodes × nodes: how many of the other's links it was told
    count: np.ndarray  # by node: how many links it ever had
    links: Links
    mail: UnderWay

    @staticmethod
    def none(width: int, dtype: torch.dtype) -> Knowledge:
        table = np.empty((0, 0), dtype=np.int32)
        count = np.empty(0, dtype=np.int64)
        return Knowledge(
            Entries.none(width, dtype), table, table, count, Links.none(), UnderWay.none()
        )

    @staticmethod
    def of(told: Fields) -> Knowledge:
        def group(name: str) -> dict[str, np.ndarray]:
            start = f"{name}."
            return {k[len(start) :]: v.numpy() for k, v in told.items() if k.startswith(start)}

        entries = Entries(rows=told["rows"], **group("entry"))
        mail = group("mail")
        mail.setdefault("sent", mail["due"])  # older checkpoints do not have it
        return Knowledge(entries, **group("node"), links=Links(**group("link")),
                         mail=UnderWay(**mail))  # fmt: skip

    def fields(self) -> Fields:
        out = {"rows": self.entries.rows}
        parts = (("entry", self.entries), ("node", self), ("link", self.links), ("mail", self.mail))
        for name, part in parts:
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, np.ndarray):
                    out[f"{name}.{field.name}"] = torch.from_numpy(np.ascontiguousarray(value))
        return out

    def begin(self, nodes: int, round: int, forgotten: np.ndarray, habits: Habits) -> Knowledge:
        """As a round begins: room for all nodes, without what is too old by now."""
        forgotten = forgotten[forgotten < nodes]  # of others nothing was ever known
        more = [(0, max(nodes - n, 0)) for n in self.known.shape]
        known = np.pad(self.known, more, constant_values=NOTHING)
        told = np.pad(self.told, more)
        known[forgotten], told[forgotten] = NOTHING, 0
        known[known < habits.oldest(round)] = NOTHING
        if not habits.remembers:
            known[:] = NOTHING
        told[known == NOTHING] = 0
        links = habits.recent(self.links.forgotten(forgotten, round), round)
        count = np.pad(self.count, (0, max(nodes - len(self.count), 0)))
        return replace(self, known=known, told=told, count=count, links=links)

    def exchanged(
        self,
        g: Gathering,
        new: Entries,
        habits: Habits,
        compare: tuple[Tensor, Tensor | None] | None,
    ) -> Met:
        """After the meetings of a round, in which nodes tell of themselves what is `new`; models
        are compared from a start, on some columns, if at all."""
        contacts, t = g.contacts, g.round
        nodes = int(max(len(self.count), g.clients.max(initial=-1) + 1))
        old = self.begin(nodes, t, contacts.forgotten, habits)
        arrives = (old.mail.due <= t) & np.isin(old.mail.receiver, g.clients)
        arrived = old.mail.only(arrives)
        letters = Letters.of(contacts, g.clients)
        there, links, count = g.clients, old.links, old.count
        makes = (np.empty(0, dtype=np.int64),) * 2
        if habits.tells_links:
            timely = letters.late == 0
            here = np.full(len(letters.step), t)
            at_once = (letters.step, there[letters.receiver], there[letters.sender], here)
            late = np.stack([np.zeros(len(arrived.due), dtype=np.int64), arrived.receiver,
                             arrived.sender, arrived.sent], axis=1)  # fmt: skip
            late = late if habits.links is None else late[arrived.sent >= t - habits.links]
            events = np.concatenate([late, np.stack([v[timely] for v in at_once], axis=1)])
            links, step = links.heard(events, t, count, habits, g.stream("neighbours"))
            made = links.receiver[len(links) - len(step) :]
            makes = step, np.searchsorted(there, made)
            count = count + np.bincount(made, minlength=nodes)
        states = _States.of(old, arrived, count, links, t, habits)
        walk = Walk(
            letters, there, states.packed(old.known[there], old.told[there]), states.bits,
            states.now, makes, _refuses(contacts, there, nodes), habits.neighbours,
        )  # fmt: skip
        states.start(walk, count - np.bincount(there[makes[1]], minlength=nodes))
        states.deliver(walk, arrived)
        walk.end()
        known, told = old.known.copy(), old.told.copy()
        known[there], told[there] = states.unpacked(walk.has)
        mail = old.mail.only(~arrives).joined(_sent_late(walk, states, habits, t))
        kept = _used(old.entries, t, known, mail)
        entries = old.entries.joined(kept, new)
        if compare is not None:
            entries = old.entries.compared(kept, new, *compare)
        heard = np.concatenate([letters.receiver[letters.late == 0],
                                np.searchsorted(there, arrived.receiver)])  # fmt: skip
        return Met(
            Knowledge(entries, known, told, count, links, mail),
            np.bincount(heard, minlength=len(there)) > 0,
            _traffic(walk, arrived, g, habits),
        )

    def pruned(self, kept: np.ndarray) -> Knowledge:
        """Without what nodes do not keep of their knowledge (nodes × nodes)."""
        if kept.all():
            return self
        known, told = np.where(kept, self.known, NOTHING), np.where(kept, self.told, 0)
        return replace(self, known=known, told=told)

    def kept(self, round: int, habits: Habits) -> Knowledge:
        """What is of use after this round."""
        known = np.where(self.known >= habits.oldest(round + 1), self.known, NOTHING)
        if not habits.remembers or (known == NOTHING).all():
            known = np.empty((0, 0), dtype=np.int32)
        told = self.told if len(known) else known
        entries = self.entries.only(_used(self.entries, round + 1, known, self.mail))
        links = habits.recent(self.links, round + 1)
        return replace(self, entries=entries, known=known, told=told, links=links)

    def graphs(self, clients: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, LocalGraph]]:
        """What each of these nodes can know, and nothing else; models were compared on `length`
        columns. Nodes that know the same share one graph."""
        nodes = max(len(self.known), 1)
        low, high = (f(self.links.receiver, self.links.sender) for f in (np.minimum, np.maximum))
        pair = low * nodes + high
        links = self.links.only(np.argsort(pair, kind="stable"))
        code, starts = np.unique(np.sort(pair), return_index=True)
        a, b = code // nodes, code % nodes
        ends = np.concatenate([a, b]), np.concatenate([b, a])
        order = np.lexsort(ends[::-1])
        first, second = ends[0][order], ends[1][order]
        link = np.concatenate([np.arange(len(a))] * 2)[order]
        alike: dict[bytes, tuple[list[int], np.ndarray]] = {}
        for i, node in enumerate(clients):
            known = self.known[node]
            linked = np.zeros(0, dtype=bool)
            if len(code):
                linked = np.logical_or.reduceat(links.known(known, self.told[node]), starts)
                there = known != NOTHING
                linked &= there[a] & there[b]
            bits = np.packbits(linked)
            key = blake2b(known.tobytes() + bits.tobytes()).digest()
            alike.setdefault(key, ([], bits))[0].append(i)
        e = self.entries
        newest = np.full(nodes, -1)  # if there are no others, distances are taken once for all
        newest[e.owner] = np.arange(len(e))
        alone = bool((e.round == e.round.max(initial=0)).all())
        apart = e.distances(newest[a], newest[b], length) if alone else None
        for members, bits in alike.values():
            linked = np.unpackbits(bits, count=len(code)).astype(bool)
            node = int(clients[members[0]])
            ids = np.flatnonzero(self.known[node] != NOTHING)
            mine = newest.copy()
            mine[ids] = e.places(ids, self.known[node, ids])
            far = e.distances(mine[a], mine[b], length) if apart is None else apart
            here = np.flatnonzero(linked[link])
            at = np.cumsum(self.known[node] != NOTHING) - 1
            degree = np.bincount(at[first[here]], minlength=len(ids))
            graph = LocalGraph(
                node, ids, e.size[mine[ids]], e.accuracy[mine[ids]],
                np.concatenate([[0], np.cumsum(degree)]), at[second[here]],
                far[0][link[here]], far[1][link[here]],
            )  # fmt: skip
            yield np.array(members), graph


@dataclass(frozen=True)
class Met:
    """What came of the meetings of a round: what is known after it, whom something reached of the
    nodes there, and what it cost."""

    knowledge: Knowledge
    reached: np.ndarray
    traffic: Traffic


def meet(
    g: Gathering, habits: Habits, memory: str, accuracy: np.ndarray | None = None,
    compare: tuple[Tensor, Tensor | None] | None = None,
) -> Met:  # fmt: skip
    """Let the nodes of a round meet, with what they remember under this name."""
    before = g.memory[memory].get(0)
    old = Knowledge.none(g.layout.size, g.rows.dtype) if before is None else Knowledge.of(before)
    return old.exchanged(g, Entries.told(g, accuracy), habits, compare)


def products(matrix: csr_array, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A mixing matrix times rows, in double precision and some columns at a time: where many nodes
    combine many others, as a dense matrix product."""
    filled = matrix.nnz / max(matrix.shape[0] * matrix.shape[1], 1)
    # A sum over all would bring in values that are no numbers, from rows that count for nothing.
    whole = filled > _DENSE and bool(torch.isfinite(rows.sum()))
    dense = torch.from_numpy(matrix.toarray()) if whole else None
    for first in range(0, rows.shape[1], _COLUMNS):
        some = slice(first, first + _COLUMNS)
        values = rows[:, some].double()
        yield some, torch.from_numpy(matrix @ values.numpy()) if dense is None else dense @ values


@dataclass(frozen=True)
class _States:
    """Rounds of entries and numbers of links, packed for a walk: one number for each state of a
    node, larger where it is newer. `base` are the links of a node that no longer count."""

    oldest: int
    now: int
    bits: int
    base: np.ndarray
    dtype: np.dtype[Any]

    @staticmethod
    def of(
        old: Knowledge,
        arrived: UnderWay,
        count: np.ndarray,
        links: Links,
        round: int,
        habits: Habits,
    ) -> _States:
        rounds = [
            t[t >= habits.oldest(round)].min(initial=round) for t in (old.known, arrived.told)
        ]
        oldest = int(min(rounds))
        now = round - oldest + 1
        base = count - np.bincount(links.receiver, minlength=len(count))
        bits = int((count - base).max(initial=0)).bit_length()
        return _States(oldest, now, bits, base, np.min_scalar_type(-((now + 1) << bits)))

    def packed(self, known: np.ndarray, told: np.ndarray) -> np.ndarray:
        version = np.where(known < self.oldest, 0, known - self.oldest + 1).astype(self.dtype)
        links = np.where(version > 0, np.maximum(told - self.base, 0), 0).astype(self.dtype)
        return (version << self.bits) + links

    def unpacked(self, has: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        version = (has >> self.bits).astype(np.int32)
        told = (has & ((1 << self.bits) - 1)) + self.base
        known = np.where(version > 0, version + self.oldest - 1, NOTHING)
        return known.astype(np.int32), np.where(version > 0, told, 0).astype(np.int32)

    def start(self, walk: Walk, count: np.ndarray) -> None:
        """Everybody there has what it tells of itself, with the links that it had before."""
        mine = walk.clients
        own = (self.now << self.bits) + (count - self.base)[mine]
        walk.has[np.arange(len(mine)), mine] = own

    def deliver(self, walk: Walk, arrived: UnderWay) -> None:
        """What comes from earlier rounds is there before the first step."""
        nodes = len(self.base)
        told = self.packed(widened(arrived.told, nodes, NOTHING), widened(arrived.links, nodes, 0))
        receiver = np.searchsorted(walk.clients, arrived.receiver)
        for node, tells in zip(receiver, arrived.tells, strict=True):
            if tells >= 0:
                np.maximum(walk.has[node], told[tells], out=walk.has[node])


def _refuses(contacts: Contacts, clients: np.ndarray, nodes: int) -> np.ndarray | None:
    if not len(contacts.refused):
        return None
    out = np.zeros((len(clients), nodes), dtype=bool)
    out[np.searchsorted(clients, contacts.refused[:, 0]), contacts.refused[:, 1]] = True
    return out


def _numbers(carried: np.ndarray, habits: Habits) -> np.ndarray:
    """The numbers that go with models."""
    return np.array([habits.numbers, habits.link, habits.greeting]) @ carried


def _traffic(walk: Walk, arrived: UnderWay, g: Gathering, habits: Habits) -> Traffic:
    """Values of models, and the numbers that go with them, sent and received by each node."""
    place, nodes = np.searchsorted(g.clients, arrived.receiver), len(g.clients)
    models = walk.down[0] + np.bincount(place, arrived.models, nodes)
    beside = _numbers(walk.down, habits) + np.bincount(place, arrived.numbers, nodes)
    return Traffic(
        up=walk.up[0] * g.layout.size,
        down=models * g.layout.size,
        numbers_up=_numbers(walk.up, habits),
        numbers_down=beside,
    )


def _sent_late(walk: Walk, states: _States, habits: Habits, round: int) -> UnderWay:
    """The messages of a round that are under way after it. Those of a pair that arrive together are
    one: the last tells all that those before it did."""
    letters, late = walk.letters, np.flatnonzero(walk.letters.late > 0)
    nodes = len(walk.clients)
    delay = letters.late[late]
    pair = letters.receiver[late] * nodes + letters.sender[late]
    heads = np.unique(pair * (delay.max(initial=0) + 1) + delay, return_inverse=True)[1]
    count = int(heads.max(initial=-1)) + 1
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, heads, np.arange(len(late)))
    told = np.stack(walk.told) if walk.told else np.zeros((0, walk.has.shape[1]), walk.has.dtype)
    mail = UnderWay(
        walk.clients[letters.receiver[late[last]]],
        walk.clients[letters.sender[late[last]]],
        np.full(count, round),
        round + delay[last],
        np.bincount(heads, walk.carried[0, late], count).astype(np.int64),
        np.bincount(heads, _numbers(walk.carried[:, late], habits), count).astype(np.int64),
        walk.tells[late[last]] if habits.takes_late else np.full(count, NOTHING),
        *states.unpacked(told),
    )
    return mail.only(np.ones(count, dtype=bool))


def _used(entries: Entries, round: int, known: np.ndarray, mail: UnderWay) -> np.ndarray:
    """The places of the entries from before a round that somebody has, or is being sent."""
    used = np.zeros(len(entries), dtype=bool)
    for told in np.unique(entries.round[entries.round < round]):
        for table in (known, mail.told):
            has = np.flatnonzero((table == told).any(axis=0))
            used |= (entries.round == told) & np.isin(entries.owner, has)
    return np.flatnonzero(used)


@dataclass(frozen=True)
class LocalGraph:
    """A node's weighted graph of the nodes it knows.

    Nodes are known by their number (`ids`) and counted here by position. The neighbours of node v
    are `second[starts[v]:starts[v + 1]]`; `cosine` and `pearson` are 1 − cos and 1 − Pearson's r of
    their models and that of v (S4 eq. 2-4).
    """

    node: int
    ids: np.ndarray
    size: np.ndarray
    accuracy: np.ndarray
    starts: np.ndarray
    second: np.ndarray
    cosine: np.ndarray
    pearson: np.ndarray

    def position(self, node: int) -> int:
        """Where a node is here; asking for one that nobody told of is an error."""
        at = int(np.searchsorted(self.ids, node))
        if at == len(self.ids) or self.ids[at] != node:
            raise FedloomError(
                f"Node {self.node} asks for node {node}, which it has never heard of. A node may "
                "only use what it has met or been told."
            )
        return at

    @property
    def degree(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def first(self) -> np.ndarray:
        """The other end of every link of `second`."""
        return np.repeat(np.arange(len(self.ids)), self.degree)


def widened(table: np.ndarray, columns: int, empty: float) -> np.ndarray:
    """More columns, filled with `empty`."""
    more = max(columns - table.shape[1], 0)
    return np.pad(table, [(0, 0), (0, more)], constant_values=empty) if more else table
