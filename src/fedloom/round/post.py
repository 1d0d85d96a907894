"""The channel between the two sides: messages are encoded, counted, corrupted if the run asks for
that, decoded, and checked before they are accepted.

This is the one place through which everything passes, whatever the method. Bytes are those of the
arrays that travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.mix.base import Traffic
from fedloom.population import Population
from fedloom.round.attack import Attack
from fedloom.round.encode import Encoding, Float32, choice, nbytes
from fedloom.round.messages import Sent, Told
from fedloom.round.plan import Plan
from fedloom.round.screen import Refusal, Screen, refuse_heard
from fedloom.select import Channels
from fedloom.topology.base import LOST, Contacts

#: where the models of senders were when the round began, for those who have to know
Starts = Callable[[], Tensor]


@dataclass(frozen=True)
class Arrived:
    """What came in: messages, the bytes that each of those sent took, and who was turned away.

    Among nodes a sender has a message for each that it meets: `skipped` counts those that were
    turned away, `left` those that were let in.
    """

    sent: Sent
    bytes: np.ndarray  # by message that was sent
    left: int
    refused: tuple[Refusal, ...] = ()
    skipped: int = 0

    def without(self, failed: np.ndarray, drop: bool) -> Arrived:
        """The same with those who diverged among the refused; `drop` what they sent."""
        known = {refusal.client for refusal in self.refused}
        more = [Refusal(int(c), "its training diverged") for c in failed if int(c) not in known]
        if not more:
            return self
        good = np.flatnonzero(~np.isin(self.sent.clients, failed) | (not drop))
        refused = sorted([*self.refused, *more], key=lambda refusal: refusal.client)
        return replace(
            self,
            sent=self.sent.only(good),
            left=self.left - len(more) * drop,
            refused=tuple(refused),
            skipped=self.skipped + len(more),
        )


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
    channels: Channels | None = None  # of the model, where sub-models are made of them

    def __post_init__(self) -> None:
        if self.nodes and self.encoding.changes and not self.encoding.whole:
            raise FedloomError(
                "This encoding sends changes relative to a model that both sides know, but here "
                "every client has its own model. Use --encode fp16 or int8."
            )
        # What an encoding lost of a client's messages: its own, and added to the next one.
        self.lost = Population(self.plan.columns, self.plan.sections.layout.dtype)

    @property
    def owes(self) -> bool:
        """Whether what the encoding loses of a message goes into the next one."""
        return self.encoding.changes and not self.nodes

    @property
    def private(self) -> int:
        """The bytes of a client's private part, where it leaves the client: as it is."""
        return Float32().size(len(self.plan.private))

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
        if self.plan.tells_choice(self.owes):
            sizes += self._choices(indexes)
        for name, value in told.values.items():
            cut = [self._part_of(name, index) for index in indexes]
            sizes += np.array([encoding.through(value[at])[1] for at in cut], dtype=np.int64)
        return sizes

    def _choices(self, indexes: Sequence[Tensor | None]) -> np.ndarray:
        """The bytes that tell which channels (of models without any: which values) each sub-model
        has."""
        columns, layout = self.plan.columns, self.plan.sections.layout
        sizes = np.zeros(len(indexes), dtype=np.int64)
        for i, index in enumerate(indexes):
            if index is not None and self.channels is None:
                sizes[i] = nbytes(choice([index.numpy()], [len(columns)]))
            elif index is not None and self.channels is not None:
                chosen = self.channels.kept(layout, columns.index[index])
                sizes[i] = nbytes(choice(chosen, self.channels.sizes))
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
        if self.plan.sends_choice:
            sizes += self._choices(sent.indexes)
        return Arrived(sent, sizes, left=len(sent.clients))

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
        changes = self.owes
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
        """Messages to a server that pass the check."""
        origin = torch.zeros_like(starts) if self.gradients else starts
        refused = self.screen.look(arrived.sent, origin)
        if not refused:
            return arrived
        bad = [refusal.client for refusal in refused]
        good = np.flatnonzero(~np.isin(arrived.sent.clients, bad))
        return replace(
            arrived,
            sent=arrived.sent.only(good),
            left=len(good),
            refused=tuple(refused),
            skipped=len(bad),
        )

    def let_through(
        self, arrived: Arrived, own: Tensor, starts: Starts, contacts: Contacts
    ) -> tuple[Arrived, Contacts]:
        """Who turns away whose model, where nodes meet; passed on by others, it does not come in
        either."""
        assert contacts.edges is not None
        refused: list[tuple[int, int]] = []
        why: dict[int, Refusal] = {}
        skipped = 0
        heard = refuse_heard(self.screen, arrived.sent, own, starts, contacts.edges)
        for node, refusal, meets in heard:
            refused.append((node, refusal.client))
            if meets:
                why[refusal.client] = refusal
                skipped += 1
        _, sender, receiver, late = contacts.messages()
        there = late != LOST
        told = set(zip(receiver[there].tolist(), sender[there].tolist(), strict=True))
        ordered = tuple(why[client] for client in sorted(why))
        left = len(told - set(refused))
        arrived = replace(arrived, refused=ordered, skipped=skipped, left=left)
        if not refused:
            return arrived, contacts
        pairs = np.array(sorted(refused), dtype=np.int64)
        return arrived, replace(contacts, refused=pairs)

    def exchanged(self, traffic: Traffic, arrived: Arrived) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each node sent to others and got."""
        each = self.bytes_per_value(arrived)

        def size(values: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
            models = np.ceil(np.asarray(values) * each).astype(np.int64)
            return models if numbers is None else models + 4 * numbers.astype(np.int64)

        return size(traffic.up, traffic.numbers_up), size(traffic.down, traffic.numbers_down)

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
