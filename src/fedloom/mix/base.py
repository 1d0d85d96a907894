"""The contract of a mix: how what the clients sent becomes the next state.

A mix says which columns of the model it combines (`part`) and where they live afterwards (`home`):
on the server, as one shared row, or on each node. Everything else stays with the client that
trained it and never gets here: what a mix sees are the columns that were sent, the values sent with
them by name, the state that it declares and the facts that it needs. `combine` is pure: it reads a
`Gathering` and returns a `Mixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Values
from fedloom.layout import Columns, Layout
from fedloom.mix.networks import Networks
from fedloom.topology.base import Contacts

if TYPE_CHECKING:
    from fedloom.data.public import PublicSet

Home = Literal["server", "node"]
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Gathering:
    """Everything a mix may look at in one round: one row per client that sent something.

    `rows[i]` are the columns of the model that `clients[i]` sent, `layout` names them;
    `indexes[i]`, where it trained a sub-model, says which of them it really trained (None: all).
    `shared` are the same columns as they were told. `sent` holds what came besides the model, one
    line per client; `state` what the server keeps by name, `memory` what it keeps by name and key.
    `total` is the number of registered clients N; `weights` are n_k, `steps` the steps that each
    one took.

    `facts` are those that the mix `needs`; read them as `classes`, `class_of`, `public` and
    `accuracy`.
    """

    round: int
    layout: Layout
    contacts: Contacts
    shared: Tensor
    clients: np.ndarray
    weights: np.ndarray
    rows: Tensor
    lr: float
    stream: Callable[..., np.random.Generator]
    indexes: tuple[Tensor | None, ...] | None = None
    total: int = 0
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    momentum: float = 0.0  # of the clients' SGD
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Mapping[int, Fields]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrived: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether nobody trained a sub-model."""
        return self.indexes is None or all(index is None for index in self.indexes)

    @property
    def heard(self) -> Tensor:
        """The rows as other nodes receive them: encoded, or corrupted by an attack."""
        return self.rows if self.arrived is None else self.arrived

    @property
    def classes(self) -> np.ndarray:
        """Senders × classes: whether the client holds samples of the class."""
        return self.facts["classes"][0]

    @property
    def class_of(self) -> Tensor:
        """Per column, the class that it works for alone, or −1."""
        return self.facts["classes"][1]

    @property
    def public(self) -> PublicSet:
        """The server's public images, and their labels if it has them."""
        return self.facts["public"]

    @property
    def networks(self) -> Networks:
        """What was sent as networks, to run on the public set."""
        return self.facts["public networks"]

    @property
    def accuracy(self) -> np.ndarray:
        """Of what each client sent, on the part of its data that the mix `validates` on (NaN:
        nothing there)."""
        return self.facts["accuracy"]


@dataclass(frozen=True)
class Traffic:
    """What each of the gathered nodes sent to others in a round, and received: values of models,
    which are encoded as the run says, and other numbers, four bytes each (None: none)."""

    up: np.ndarray
    down: np.ndarray
    numbers_up: np.ndarray | None = None
    numbers_down: np.ndarray | None = None


@dataclass(frozen=True)
class Mixed:
    """What changes: the shared columns, those of some nodes, what the server keeps.

    `reset` has every client go on from the shared columns. `traffic` is for nodes that meet, where
    only the exchange itself tells who sent what to whom. `metrics` (numbers) go into the table of
    rounds, `notes` (plain values of any shape) into the round's record, for people and pictures.
    """

    shared: Tensor | None = None
    clients: np.ndarray | None = None
    rows: Tensor | None = None
    reset: bool = False
    state: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Mapping[int, Fields]] = field(default_factory=dict)
    traffic: Traffic | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


#: ways to say that all of the model is shared
ALL_OF_IT = ("all", "not none")


class Mix:
    """How models are combined.

    `keeps` are values that the server keeps between rounds, by name and kind; `takes` names
    what it combines besides the models that clients send; `memory` names what it keeps by key.
    `needs` are facts: `classes` (who holds which), `public` (the server's images), `accuracy` (of
    what was sent, on the part that it `validates` on). `takes_parts`: it can combine sub-models,
    element by element; `meets`: nodes combine what those they meet tell them; with fewer than
    `fewest` participants it can't do anything.
    """

    part: str = "all"
    home: Home = "server"
    expects: Literal["weights", "gradients"] = "weights"
    keeps: Values = MappingProxyType({})
    takes: frozenset[str] = frozenset()
    memory: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    validates: str | None = None
    takes_parts: bool = True
    meets: bool = False
    fewest: int = 1

    def among_nodes(self) -> Mix:
        """The same without a server, for nodes that meet."""
        if self.meets:
            return self
        raise FedloomError(
            f"{type(self).__name__} combines models at a server, so it can't run among nodes "
            "that only meet each other. Leave the topology out, or choose another method."
        )

    def senders(
        self, round: int, clients: np.ndarray, stream: Callable[..., np.random.Generator]
    ) -> np.ndarray:
        """Who of the round's participants is asked to send its model."""
        return clients

    def combine(self, g: Gathering) -> Mixed:
        raise NotImplementedError

    def kept(self, layout: Layout) -> Columns:
        """The columns that live with the clients."""
        return layout.columns("all") if self.home == "node" else layout.columns(self.part).others()
