"""The way from one side to the other: messages are written, counted, spoilt if the run asks for
that, read, and looked at before they are let in.

This is the one place through which everything passes, whatever the method. Bytes are those of the
arrays that travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.population import Population
from fedloom.round.attack import Attack
from fedloom.round.encode import Encoding, Float32
from fedloom.round.messages import Sent, Told
from fedloom.round.plan import Plan
from fedloom.round.screen import Refusal, Screen, refuse_heard
from fedloom.topology.base import LOST, Contacts

#: where the models of senders were when the round began, for those who have to know
Starts = Callable[[], Tensor]


@dataclass(frozen=True)
class Arrived:
    """What came in: messages, the bytes that each of those sent took, and who was turned away."""

    sent: Sent
    bytes: np.ndarray  # by message that was sent
    refused: tuple[Refusal, ...] = ()

    def without(self, failed: np.ndarray, drop: bool) -> Arrived:
        """The same with those who diverged among the refused; `drop` what they sent."""
        known = {refusal.client for refusal in self.refused}
        more = [Refusal(int(c), "its training diverged") for c in failed if int(c) not in known]
        if not more:
            return self
        good = np.flatnonzero(~np.isin(self.sent.clients, failed) | (not drop))
        refused = sorted([*self.refused, *more], key=lambda refusal: refusal.client)
        return replace(self, sent=self.sent.only(good), refused=tuple(refused))


@dataclass
class Post:
    """Carries the messages of a run. `gradients`: what travels as the model are gradients;
    `nodes`: models live on the nodes, so that nobody knows where a message starts from."""

    plan: Plan
    encoding: Encoding = field(default_factory=Float32)
    screen: Screen = field(default_factory=Screen)
    attack: Attack = field(default_factory=Attack)
    bad: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    seed: int = 0
    gradients: bool = False
    nodes: bool = False

    def __post_init__(self) -> None:
        if self.nodes and self.encoding.changes and not self.encoding.whole:
            raise FedloomError(
                "This encoding sends changes of a model that both sides know, and here every "
                "client has a model of its own. Use --encode fp16 or int8."
            )
        # What an encoding lost of a client's messages: its own, and added to the next one.
        self.lost = Population(self.plan.columns, self.plan.sections.layout.dtype)

    def told(self, told: Told) -> Told:
        """What the clients get to read of what the server tells them."""
        if not self.encoding.down:
            return told
        values = {name: self.encoding.through(value)[0] for name, value in told.values.items()}
        return Told(self.encoding.through(told.model)[0], values)

    def down(self, told: Told, indexes: tuple[Tensor | None, ...]) -> np.ndarray:
        """The bytes that each client is told: the model, or the columns of its sub-model, and
        values."""
        encoding = self.encoding if self.encoding.down else Float32()
        whole = encoding.through(told.model)[1]
        each = whole // max(len(told.model), 1)
        sizes = np.array([whole if i is None else each * len(i) for i in indexes], dtype=np.int64)
        for name, value in told.values.items():
            cut = [self._part_of(name, index) for index in indexes]
            sizes += np.array([encoding.through(value[at])[1] for at in cut], dtype=np.int64)
        return sizes

    def _part_of(self, name: str, index: Tensor | None) -> Tensor | EllipsisType:
        """Of a value like the weights, what belongs to the weights of a sub-model."""
        section = self.plan.sections[name]
        if index is None or not section.like_weights or not self.plan.columns.everything:
            return ...
        return index[index < section.shape[0]]

    def up(self, sent: Sent, starts: Starts, round: int) -> Arrived:
        """Messages to the server; `starts` tells where each model was when the round began."""
        origin = sent.model
        if self.attack or self.encoding.changes:
            origin = torch.zeros_like(sent.model) if self.gradients else starts()
        if self.attack:
            sent = self.attack.spoil(sent, origin, self.bad, round, self.seed)
        sent, sizes = self._carried(sent, origin)
        return Arrived(sent, sizes)

    def _carried(self, sent: Sent, origin: Tensor) -> tuple[Sent, np.ndarray]:
        """The messages as they are read, and the bytes that each took."""
        beside = self.encoding if self.encoding.beside else Float32()
        sizes = np.zeros(len(sent.clients), dtype=np.int64)
        values = {name: value.clone() for name, value in sent.values.items()}
        for name, value in values.items():
            for i, index in enumerate(sent.indexes):
                at = self._part_of(name, index)
                value[i, at], size = beside.through(value[i, at])
                sizes[i] += size
        if isinstance(self.encoding, Float32):
            counts = [len(m) if x is None else len(x) for m, x in zip(sent.model, sent.indexes,
                      strict=True)]  # fmt: skip
            return sent, sizes + np.array(counts, dtype=np.int64) * sent.model.element_size()
        model = sent.model.clone()
        changes = self.encoding.changes and not self.nodes
        lost = self.lost.compose(sent.clients, torch.zeros(self.plan.columns.width))
        lost = self.plan.columns.take(lost).clone()
        for i, index in enumerate(sent.indexes):
            here = slice(None) if index is None else index
            wanted = model[i, here] - origin[i, here] + lost[i, here] if changes else model[i, here]
            arrived, size = self.encoding.through(wanted)
            sizes[i] += size
            if changes:
                lost[i, here] = wanted - arrived
                arrived = origin[i, here] + arrived
            model[i, here] = arrived
        if changes:
            whole = torch.zeros((len(lost), self.plan.columns.width))
            self.plan.columns.put(whole, lost)
            self.lost.put(sent.clients, whole)
        return replace(sent, model=model, values=values), sizes

    def let_in(self, arrived: Arrived, starts: Tensor) -> Arrived:
        """Messages to a server that pass the door."""
        origin = torch.zeros_like(starts) if self.gradients else starts
        refused = self.screen.look(arrived.sent, origin)
        if not refused:
            return arrived
        bad = [refusal.client for refusal in refused]
        good = np.flatnonzero(~np.isin(arrived.sent.clients, bad))
        return replace(arrived, sent=arrived.sent.only(good), refused=tuple(refused))

    def let_through(
        self, arrived: Arrived, own: Tensor, starts: Starts, contacts: Contacts
    ) -> tuple[Arrived, Contacts]:
        """Messages from node to node that pass the receiver's door; the others are lost."""
        assert contacts.edges is not None
        edges = contacts.edges
        late = np.zeros(2 * len(edges), np.int64) if contacts.late is None else contacts.late
        refused: dict[int, Refusal] = {}
        sender = np.concatenate([edges[:, 0], edges[:, 1]])
        receiver = np.concatenate([edges[:, 1], edges[:, 0]])
        for at, refusal in refuse_heard(self.screen, arrived.sent, own, starts, sender, receiver):
            late = late.copy() if not refused else late
            late[at] = LOST
            refused[refusal.client] = refusal
        if not refused:
            return arrived, contacts
        ordered = tuple(refused[client] for client in sorted(refused))
        return replace(arrived, refused=ordered), replace(contacts, late=late)

    def bytes_per_value(self, arrived: Arrived) -> float:
        """What a value took on the way, in the mean of this round's messages."""
        values = sum(len(m) if i is None else len(i) for m, i in zip(arrived.sent.model,
                     arrived.sent.indexes, strict=True))  # fmt: skip
        return float(arrived.bytes.sum()) / values if values else 0.0

    def tensors(self) -> dict[str, Tensor]:
        if not len(self.lost):
            return {}
        return {f"lost/{name}": value for name, value in self.lost.tensors().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if "lost/clients" in tensors:
            self.lost.restore({name: tensors[f"lost/{name}"] for name in ("clients", "rows")})
