"""Gossip: every node combines its model with those that reach it in the round, all at once.

The new rows are one mixing matrix times the rows before the exchange, so the order of the nodes
can't matter. Nodes tell of themselves alone, or, with `relay`, pass on what they heard earlier in
the round. A message that is late travels as it was sent and is combined when it arrives; until then
it is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedloom.mix.base import Fields, Gathering, Mix, Mixed, Traffic
from fedloom.mix.knowledge import NOTHING, Habits, meet, products
from fedloom.returned import returned_pair
from fedloom.topology.relay import Letters

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: nodes that relay know what reached them in the round, and whose it is
_RELAY = Habits(forget=None, tells_links=False, remembers=False)


@dataclass(frozen=True)
class Mail:
    """Messages under way: whose row each carries, to whom, and when it arrives.

    `rows[carries[i]]` is what message i carries; a row that goes to several is stored once.
    """

    rows: Tensor
    covers: Tensor  # which columns of a row were trained; all, where no sub-models are
    carries: np.ndarray
    receiver: np.ndarray
    due: np.ndarray
    weight: np.ndarray

    @staticmethod
    def of(fields: Fields | None, width: int, dtype: torch.dtype) -> Mail:
        if fields is None:
            none = np.empty(0, dtype=np.int64)
            rows = torch.empty((0, width), dtype=dtype)
            return Mail(rows, torch.empty((0, width), dtype=torch.bool), none, none, none, none)
        numbers = {k: fields[k].numpy() for k in ("carries", "receiver", "due", "weight")}
        return Mail(fields["rows"], fields["covers"], **numbers)

    def fields(self) -> Fields:
        numbers = {k: getattr(self, k) for k in ("carries", "receiver", "due", "weight")}
        out = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in numbers.items()}
        return {"rows": self.rows, "covers": self.covers, **out}

    def keep(self, which: np.ndarray) -> Mail:
        """Only these messages, and the rows that they carry."""
        used, carries = np.unique(self.carries[which], return_inverse=True)
        at = slice(None) if len(used) == len(self.rows) else torch.from_numpy(used)
        numbers = (v[which] for v in (self.receiver, self.due, self.weight))
        return Mail(self.rows[at], self.covers[at], carries, *numbers)

    def joined(self, other: Mail) -> Mail:
        carries = np.concatenate([self.carries, other.carries + len(self.rows)])
        pairs = ((getattr(self, k), getattr(other, k)) for k in ("receiver", "due", "weight"))
        numbers = (np.concatenate(pair) for pair in pairs)
        rows = torch.cat([self.rows, other.rows])
        return Mail(rows, torch.cat([self.covers, other.covers]), carries, *numbers)


class Gossip(Mix):
    """A node's new row is a weighted sum of its own and those that reached it: `shares` says with
    which weights. Columns that are not in `part` stay as the node trained them; of sub-models,
    every element is combined from those who trained it."""

    relay: bool = False

    home = "node"
    meets = True
    memory = ("mail",)

    def shares(
        self, receiver: np.ndarray, sent: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The share of every message, to node `receiver` from one with weight n_k `sent`, and each
        node's share of its own row, from its weight `own`."""
        raise NotImplementedError

    def _shares(
        self, receiver: np.ndarray, sent: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        found = self.shares(receiver, sent, own)
        return returned_pair(self, "shares", found, np.ndarray, np.ndarray)

    def combine(self, g: Gathering) -> Mixed:
        from scipy.sparse import csr_array

        if self.relay:
            return self._relayed(g)
        now, later, traffic = self._deliver(g)
        share, own = self._shares(now.receiver, now.weight, g.weights)
        shape = len(g.clients), len(now.rows)
        matrix = csr_array((share, (now.receiver, now.carries)), shape=shape)
        if g.whole:
            rows = _combined(g.rows, own, matrix, now.rows)
        else:
            rows = self._combined_parts(g, own, matrix, now)
        late = bool(len(later.due)) or 0 in g.memory["mail"]
        memory = {"mail": {0: later.fields()}} if late else {}
        return Mixed(clients=g.clients, rows=rows, memory=memory, traffic=traffic)

    @staticmethod
    def _combined_parts(g: Gathering, own: np.ndarray, matrix: csr_array, now: Mail) -> Tensor:
        """The same for sub-models: every element over those who have it."""
        mine, theirs = _covers(g).numpy(), now.covers.numpy()
        covered = matrix @ theirs.astype(np.float64) + own[:, None] * mine
        total = matrix @ (now.rows.double().numpy() * theirs)
        total += own[:, None] * (g.rows.double().numpy() * mine)
        with np.errstate(invalid="ignore"):
            mixed = np.where(covered > 0, total / covered, g.rows.double().numpy())
        return torch.from_numpy(mixed).to(g.rows.dtype)

    def _relayed(self, g: Gathering) -> Mixed:
        """Every node's own model, and all that reached it in the round, through whomever; of what
        was late, the newest of each node."""
        from scipy.sparse import csr_array

        met = meet(g, _RELAY, "mail")
        knowledge, entries = met.knowledge, met.knowledge.entries
        known = knowledge.known[g.clients]
        known[np.arange(len(g.clients)), g.clients] = NOTHING  # its own it has as it is
        receiver, owner = np.nonzero(known != NOTHING)
        place = entries.places(owner, known[receiver, owner])
        share, own = self._shares(receiver, entries.size[place], g.weights)
        matrix = csr_array((share, (receiver, place)), shape=(len(g.clients), len(entries)))
        rows = _combined(g.rows, own, matrix, entries.rows)
        kept = knowledge.kept(g.round, _RELAY)
        late = bool(len(kept.mail.due)) or 0 in g.memory["mail"]
        return Mixed(
            clients=g.clients,
            rows=rows,
            memory={"mail": {0: kept.fields()}} if late else {},
            traffic=met.traffic,
            metrics={"known": 1 + len(receiver) / max(len(g.clients), 1)},
        )

    def _deliver(self, g: Gathering) -> tuple[Mail, Mail, Traffic]:
        """What arrives in this round, receivers as positions; what is still under way; bytes."""
        letters = Letters.of(g.contacts, g.clients).once()
        sender, receiver, late = letters.sender, g.clients[letters.receiver], letters.late
        covers = _covers(g)
        weight, due = g.weights[sender], g.round + late
        sent = Mail(g.heard, covers, sender, receiver, due, weight)
        mail = Mail.of(g.memory["mail"].get(0), g.layout.size, g.rows.dtype)
        mail = mail.joined(sent.keep(late > 0)) if (late > 0).any() else mail
        arrives = (mail.due <= g.round) & np.isin(mail.receiver, g.clients)
        now = sent.keep(late == 0)
        if arrives.any():
            now = now.joined(mail.keep(arrives))
        later = mail.keep(~arrives)
        place = np.searchsorted(g.clients, now.receiver)
        now = Mail(now.rows, now.covers, now.carries, place, now.due, now.weight)
        count = len(g.clients)
        up = np.bincount(sender, _sizes(covers)[sender], count).astype(np.int64)
        down = np.bincount(place, _sizes(now.covers)[now.carries], count).astype(np.int64)
        return now, later, Traffic(up, down)


def _combined(rows: Tensor, own: np.ndarray, matrix: csr_array, others: Tensor) -> Tensor:
    """Each node's share of its own row, and what the matrix makes of the others'."""
    out, mine = torch.empty_like(rows), torch.from_numpy(own)[:, None]
    for some, theirs in products(matrix, others):
        out[:, some] = (theirs + mine * rows[:, some]).to(out.dtype)
    return out


def _covers(g: Gathering) -> Tensor:
    """Which of these columns each client trained."""
    if g.whole or g.indexes is None:
        return torch.ones(1, 1, dtype=torch.bool).expand(len(g.clients), g.layout.size)
    out = torch.ones((len(g.clients), g.layout.size), dtype=torch.bool)
    for i, index in enumerate(g.indexes):
        if index is not None:
            out[i] = False
            out[i, index] = True
    return out


def _sizes(covers: Tensor) -> np.ndarray:
    """The columns in each row that were trained; of whole models, one look is enough for all."""
    if covers.stride(0) == covers.stride(1) == 0:
        return np.full(len(covers), covers.shape[1])
    return covers.sum(1).numpy()


@dataclass(frozen=True)
class PeerAverage(Gossip):
    """Peer-to-peer FedAvg: w_n ← Σ n_k w_k / Σ n_k over the node and those that reached it."""

    part: str = "all"
    relay: bool = False

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """What is passed on is passed on whole."""
        return not self.relay

    def shares(
        self, receiver: np.ndarray, sent: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        total = own + np.bincount(receiver, sent, len(own))
        some = np.where(total > 0, total, 1.0)
        return sent / some[receiver], np.where(total > 0, own / some, 1.0)


@dataclass(frozen=True)
class Pull(Gossip):
    """WAFL: w_n ← w_n + λ Σ (w_k − w_n) / (|nbr(n)| + 1) over those that reached it."""

    rate: float = 1.0  # λ
    part: str = "all"
    relay: bool = False

    takes_parts = False  # its step counts all neighbours, not those who trained an element

    def shares(
        self, receiver: np.ndarray, sent: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        met = np.bincount(receiver, minlength=len(own))
        return self.rate / (met[receiver] + 1), 1 - self.rate * met / (met + 1)
