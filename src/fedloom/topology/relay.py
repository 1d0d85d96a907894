"""Meetings one after another: what reaches whom within a round, and what is sent for it.

Those that meet at a step tell each other all they knew before it, so what a node hears at one step
it passes on at later ones. No model is copied for that. One table holds for the whole round which
state of every node has reached every other one; at a step, a node takes the largest of what it has
and of what those it meets had. Two that meet first say what they have, and then send what the other
lacks; what several would send it, it asks one of them for. Nothing here knows what a model is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fedloom.topology.base import LOST, Contacts


@dataclass(frozen=True)
class Letters:
    """Messages, in the order of time, then of receivers and senders, all known by position."""

    step: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    late: np.ndarray

    @staticmethod
    def of(contacts: Contacts, clients: np.ndarray) -> Letters:
        """Those of a round. What comes from somebody whose model a node refuses is turned away as a
        whole: paid for once, lost, and never asked for again."""
        step, sender, receiver, late = contacts.messages()
        sender, receiver = np.searchsorted(clients, sender), np.searchsorted(clients, receiver)
        letters = Letters(step, sender, receiver, late)
        if not len(contacts.refused):
            return letters
        nodes = len(clients)
        refused = np.searchsorted(clients, contacts.refused)
        pair = receiver * nodes + sender
        bad = np.isin(pair, refused[:, 0] * nodes + refused[:, 1])
        letters = Letters(step, sender, receiver, np.where(bad, LOST, late))
        return letters.only(firsts(pair) | ~bad)

    def only(self, which: np.ndarray) -> Letters:
        return Letters(*(v[which] for v in (self.step, self.sender, self.receiver, self.late)))

    def once(self) -> Letters:
        """Of the messages of each pair in a round, those up to the first that is not lost: where
        everybody tells of itself alone, there is nothing to send after that. Ordered by receiver
        and sender."""
        order = np.lexsort((self.step, self.sender, self.receiver))
        mine = self.only(order)
        new = np.diff(mine.receiver, prepend=-1) != 0
        new |= np.diff(mine.sender, prepend=-1) != 0
        there = (mine.late != LOST).astype(np.int64)
        before = np.cumsum(there) - there  # of all pairs; less those of the pairs before
        begun = before[np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))]
        return mine.only(before == begun)

    def known_of(self) -> np.ndarray:
        """For every late message two others, or -1, whose senders' states its receiver has when it
        arrives, as far as its own sender can know: the last of its pair before it that arrives no
        later, and the last that came from the receiver at once. What those told, it need not."""
        out = np.full((len(self.step), 2), -1)
        for delay in np.unique(self.late[self.late > 0]):
            mine = np.flatnonzero(self.late == delay)
            sooner = np.flatnonzero((self.late >= 0) & (self.late <= delay))
            sender, receiver, step = self.sender[mine], self.receiver[mine], self.step[mine]
            out[mine, 0] = self._last(sooner, sender, receiver, step - 1)
            out[mine, 1] = self._last(np.flatnonzero(self.late == 0), receiver, sender, step)
        return out

    def _last(
        self, among: np.ndarray, sender: np.ndarray, receiver: np.ndarray, step: np.ndarray
    ) -> np.ndarray:
        """The last of these messages from each sender to each receiver, up to a step; -1: none."""
        nodes = int(max(self.sender.max(initial=0), self.receiver.max(initial=0))) + 1
        steps = int(self.step.max(initial=0)) + 1
        pair = self.sender[among] * nodes + self.receiver[among]
        order = np.lexsort((self.step[among], pair))
        keys = (pair * steps + self.step[among])[order]
        at = np.searchsorted(keys, (sender * nodes + receiver) * steps + step, side="right") - 1
        found = at >= 0
        found[found] = keys[at[found]] // steps == (sender * nodes + receiver)[found]
        return np.where(found, among[order][at], -1) if len(among) else np.full(len(step), -1)

    def steps(self) -> Iterator[tuple[int, slice]]:
        """Every step at which somebody meets, and its messages."""
        bounds = np.flatnonzero(np.diff(self.step, prepend=-1, append=-1))
        for first, last in itertools.pairwise(bounds):
            yield int(self.step[first]), slice(first, last)


def firsts(keys: np.ndarray) -> np.ndarray:
    """Where a value stands for the first time.

    >>> firsts(np.array([4, 2, 4])).tolist()
    [True, True, False]
    """
    out = np.zeros(len(keys), dtype=bool)
    out[np.unique(keys, return_index=True)[1]] = True
    return out


@dataclass
class Walk:
    """A walk through the meetings of a round.

    `has[i, j]`, for every node there and every node that there is, is the state of j that has
    reached i: 0 for none, else a version of what j tells of itself in the upper bits and, in the
    lower `bits`, how many of its links j had made by then. Both only grow, and the version `now` is
    this round's. `makes` are the steps and nodes at which a link is made. `refuses[i, j]`: i does
    not take what j tells of itself now.

    What was sent and got is counted by node: models, links, and greetings, which name all that a
    node has; `most_links` is the largest number of links that a node tells of itself.
    """

    letters: Letters
    clients: np.ndarray
    has: np.ndarray
    bits: int = 0
    now: int = 1
    makes: tuple[np.ndarray, np.ndarray] = field(
        default_factory=lambda: (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    )
    refuses: np.ndarray | None = None
    most_links: int | None = None

    def __post_init__(self) -> None:
        nodes = len(self.clients)
        self.up, self.down = np.zeros((3, nodes)), np.zeros((3, nodes))
        #: of every message, how many models, links and greeted entries it carried
        self.carried = np.zeros((3, len(self.letters.step)))
        #: of every message that is late, or that one that is late goes on from, its sender's states
        #: when it was sent, as a place in `told`
        self.tells = np.full(len(self.letters.step), -1)
        self.told: list[np.ndarray] = []
        self._known_of = self.letters.known_of()
        self._kept = self.letters.late > 0
        self._kept[self._known_of[self._known_of >= 0]] = True

    def end(self) -> Walk:
        for _ in self.steps():
            pass
        return self

    def steps(self) -> Iterator[int]:
        """Go on from step to step; after each, `has` is what nodes know by then."""
        makes, at = self.makes, np.arange(len(self.clients))
        self._make(makes[1][makes[0] == 0])  # what came late from earlier rounds, before the first
        for step, which in self.letters.steps():
            before = self.has.copy()
            self._remember(before, which)
            self._exchange(before, which)
            self._make(makes[1][makes[0] == step])
            sender, receiver = self.letters.sender[which], self.letters.receiver[which]
            timely = self.letters.late[which] == 0
            for kind, count in enumerate(self.carried[:, which]):
                self.up[kind] += np.bincount(sender, count, len(at))
                self.down[kind] += np.bincount(receiver, count * timely, len(at))
            yield step

    def _make(self, who: np.ndarray) -> None:
        made = np.bincount(who, minlength=len(self.clients)).astype(self.has.dtype)
        self.has[np.arange(len(self.clients)), self.clients] += made

    def _exchange(self, before: np.ndarray, which: slice) -> None:
        """All messages of a step, one receiver after the other, from what was known before it."""
        sender, late = self.letters.sender[which], self.letters.late[which]
        receiver = self.letters.receiver[which]
        carried = self.carried[:, which]
        carried[2] = np.count_nonzero(before, axis=1)[sender]
        bounds = np.flatnonzero(np.diff(receiver, prepend=-1, append=-1))
        whole = not late.any()
        for first, last in itertools.pairwise(bounds):
            node, here = receiver[first], slice(first, last)
            offered = before[sender[here]]
            if self.refuses is not None:
                fresh = (offered >> self.bits) == self.now
                offered = np.where(fresh & self.refuses[node], 0, offered)
            arrives = offered
            if not whole:
                arrives = np.where((late[here] == 0)[:, None], offered, 0)
            had = np.empty((last - first + 1, before.shape[1]), dtype=before.dtype)
            had[0] = before[node]
            for i, told in enumerate(arrives):  # in place, it is faster than maximum.accumulate
                np.maximum(had[i], told, out=had[i + 1])
            self.has[node] = had[-1]
            if whole:
                carried[:2, here] = self._gained(had)
                continue
            # Nobody answers a late message, so it carries all that its receiver is not known to
            # have by then; one that is lost was asked for.
            lacks = had[:-1].copy()
            for i in np.flatnonzero(late[here] > 0).tolist():
                lacks[i] = 0
                for other in self._known_of[which.start + first + i]:
                    if other >= 0:
                        np.maximum(lacks[i], self.told[self.tells[other]], out=lacks[i])
            carried[:2, here] = self._lacked(lacks, np.maximum(lacks, offered))

    def _gained(self, chain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_lacked` of each row and the next, of rows that only grow."""
        if self.most_links is not None or self.now > 1:
            return self._lacked(chain[:-1], chain[1:])
        wide = np.int32 if chain.dtype.itemsize < 4 else np.int64
        models = (chain >> self.bits).sum(axis=1, dtype=wide)
        links = chain.sum(axis=1, dtype=wide) - (models << self.bits)
        return np.diff(models), np.diff(links)

    def _lacked(self, had: np.ndarray, gets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many models and links tell one state of knowledge from another, row by row."""
        models = np.count_nonzero((had >> self.bits) != (gets >> self.bits), axis=1)
        if not self.bits:
            return models, np.zeros(len(models))
        mask = had.dtype.type((1 << self.bits) - 1)
        links = (gets & mask) - (had & mask)
        if self.most_links is not None:
            links = np.minimum(links, self.most_links)
        return models, links.sum(axis=1, dtype=np.int64)

    def _remember(self, before: np.ndarray, which: slice) -> None:
        """What late messages carry is what their senders knew before the step."""
        kept = np.flatnonzero(self._kept[which])
        if not len(kept):
            return
        senders, place = np.unique(self.letters.sender[which][kept], return_inverse=True)
        self.tells[which.start + kept] = len(self.told) + place
        self.told.extend(before[senders])


def spreading(contacts: Contacts) -> Iterator[tuple[int, np.ndarray]]:
    """After each step of a round, from step 0 on: which node has whose model (there × there)."""
    there = contacts.participants if contacts.present is None else contacts.present
    has = np.eye(len(there), dtype=np.int8)
    walk = Walk(Letters.of(contacts, there), np.arange(len(there)), has)
    yield 0, walk.has > 0
    for step in walk.steps():
        yield step, walk.has > 0
