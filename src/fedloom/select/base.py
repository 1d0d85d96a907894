"""The contract of a selector: which columns a client trains in a round.

A selection is an index vector into the flat model plus a way to build the really smaller module
that those columns fill. Gathering them, training that module and scattering the result back is the
engine's and the mix's work; a selector only chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.local.rule import Batch
from fedloom.select.channels import Channels

if TYPE_CHECKING:
    from fedloom.data.public import PublicSet


@dataclass(frozen=True)
class Last:
    """The sub-model that a client last sent: its values, and the columns that they are."""

    row: Tensor
    index: Tensor | None


@dataclass(frozen=True)
class Ask:
    """What a selector may look at: the client's model and capacity, the model's channels, and what
    it declared: the client's data, or the public set and what the client last sent.

    `stream(purpose)` is random by (seed, purpose, round, client).
    """

    round: int
    client: int
    capacity: float
    layout: Layout
    row: Tensor
    module: nn.Module
    stream: Callable[..., np.random.Generator]
    data: Callable[[str], Batch] | None = None
    channels: Channels | None = None
    public: PublicSet | None = None
    last: Last | None = None

    def load(self) -> nn.Module:
        """The client's whole model, to look at and not to train."""
        return self.layout.load(self.module, self.row)


@dataclass(frozen=True)
class Selection:
    """A sub-model: `row[index]` is the row of `build()`; the index ascends. Equal `shape`s mean
    equal modules. Where narrower nets are trained inside it, `channels` is its structure."""

    index: Tensor
    shape: Hashable
    build: Callable[[], nn.Module]
    channels: Channels | None = None
    samples: int = 0  # that the client ran through the whole model to choose
    gap: float | None = None  # Σ|g − g_sub| on the client's data, where it is measured


class Select:
    """Which part a client trains.

    `needs` are facts: with `data` it chooses on the client, from the whole model and its own data;
    without, on the server. `public` and `labels` are the public set, of which it wants
    `public_samples`; `last` is what the client last sent, which the server then keeps. `cuts`: it
    chooses among the model's channels. `nested`: a smaller choice is always part of a larger one.
    `follows`: the choice follows from capacity and round, so that no message has to tell it.
    `measures`: the client's data tell, for the record only, what the choice leaves out.
    `model_options` are what it needs the model to be built with.
    """

    needs: frozenset[str] = frozenset()
    measures: bool = False
    public_samples: int = 0
    cuts: bool = False
    nested: bool = False
    follows: bool = False
    model_options: Mapping[str, Any] = {}

    def fitted(self, module: nn.Module, strongest: float) -> Mapping[str, Any]:
        """What the model must be built with as well, where nobody is stronger than this."""
        return {}

    def check(self, module: nn.Module, shape: tuple[int, int, int], capacity: float) -> None:
        """Refuse, before any work, a model that gives no sub-model of this capacity."""

    def choose(self, ask: Ask) -> Selection | None:
        """The sub-model of this client and round; None for the whole model."""
        raise NotImplementedError

    def narrowed(self, channels: Channels, width: float) -> tuple[tuple[int, ...], float]:
        """For `nested` choices of channels: how many there are at this width, and their scale."""
        raise NotImplementedError


@dataclass(frozen=True)
class Whole(Select):
    """Everybody trains everything."""

    follows = True

    def choose(self, ask: Ask) -> Selection | None:
        return None
