"""The contract of a mix: how what came back from the clients becomes the next state.

A mix says which columns it combines (`part`) and where they live afterwards (`home`): on the
server, as one shared row, or on each node. Everything it does not combine stays with the client
that trained it. From those two words follow what is stored per client, what a checkpoint holds and
what crosses the network. `combine` is pure: it reads a `Gathering` and returns a `Mixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.layout import Columns, Layout
from fedloom.mix.probe import Probe
from fedloom.topology.base import Contacts

Home = Literal["server", "node"]
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Gathering:
    """All that a mix may look at in one round.

    `rows[i]` is the whole row of `clients[i]` after training (what its rule handed back);
    `indexes[i]`, where a selector chose a sub-model, are the columns that it really trained
    (None: all of them). `memory` holds what the mix declared, by name and key; `probe` the public
    set, if it said that it `sees_public`; `accuracy[i]` is that of `rows[i]` on the part that it
    `validates` on (NaN: nothing there).
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
    whole_down: bool = False  # sub-models are chosen on the client, from the whole model
    holds: np.ndarray | None = None  # clients × classes, for mixes that ask
    class_of: Tensor | None = None  # per column, the class it works for alone, or −1
    memory: Mapping[str, Mapping[int, Fields]] = field(default_factory=dict)
    probe: Probe | None = None
    accuracy: np.ndarray | None = None


@dataclass(frozen=True)
class Traffic:
    """Values sent by each of the gathered clients in a round, up and down."""

    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True)
class Mixed:
    """What changes: the shared row, some nodes' rows, what is remembered.

    `reset` forgets every kept row first, so that all go on from the shared one. `traffic` is for a
    mix that knows only now who was sent what. `record` (numbers) goes into the table of rounds,
    `report` (plain values of any shape) into the round's record, for people and pictures only.
    """

    shared: Tensor | None = None
    clients: np.ndarray | None = None
    rows: Tensor | None = None
    reset: bool = False
    memory: Mapping[str, Mapping[int, Fields]] = field(default_factory=dict)
    traffic: Traffic | None = None
    record: Mapping[str, float] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


class Mix:
    """How models combine. `memory` names what it remembers between rounds; `takes_parts`: it can
    combine sub-models, element by element; `sees_classes`: it wants to know who holds which
    classes; `sees_public`: it runs models on the public set, which the server then must have;
    `meets`: nodes combine what those they meet tell them; `validates`: the part of a client's data
    on which its row is scored before it is combined."""

    part: str = "all"
    home: Home = "server"
    expects: Literal["weights", "gradients"] = "weights"
    memory: tuple[str, ...] = ()
    takes_parts: bool = True
    sees_classes: bool = False
    sees_public: bool = False
    meets: bool = False
    validates: str | None = None

    def among_nodes(self) -> Mix:
        """The same without a server, for nodes that meet."""
        if self.meets:
            return self
        raise FedloomError(
            f"{type(self).__name__} combines models in one place, so it can't work among nodes "
            "that only meet one another. Leave the topology out, or choose another method."
        )

    def combine(self, g: Gathering) -> Mixed:
        raise NotImplementedError

    def traffic(self, g: Gathering) -> Traffic:
        """Values up and down per client: the mixed columns both ways, or those selected."""
        mixed = g.layout.columns(self.part)
        up = np.full(len(g.clients), len(mixed), dtype=np.int64)
        down = up.copy()
        for i, index in enumerate(g.indexes or ()):
            if index is not None:
                up[i] = _count_inside(index, mixed)
        return Traffic(up, down if g.whole_down else up.copy())

    def kept(self, layout: Layout) -> Columns:
        """The columns that live with the clients."""
        return layout.columns("all") if self.home == "node" else layout.columns(self.part).others()


def _count_inside(index: Tensor, columns: Columns) -> int:
    return int(sum(((index >= a) & (index < b)).sum() for a, b in columns.ranges))
