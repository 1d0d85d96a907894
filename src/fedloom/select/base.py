"""The contract of a selector: which columns a client trains in a round.

A selection is an index vector into the flat model plus a way to build the really smaller module
that those columns fill. Gathering them, training that module and scattering the result back is the
engine's and the mix's work; a selector only chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.local.rule import Batch


@dataclass(frozen=True)
class Ask:
    """What a selector may look at: the client's model, capacity, and its data if it said so.

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


@dataclass(frozen=True)
class Selection:
    """A sub-model: `row[index]` is the row of `build()`. Equal `shape`s mean equal modules."""

    index: Tensor
    shape: Hashable
    build: Callable[[], nn.Module]


class Select:
    """Which part a client trains. `sees_data`: it chooses on the client, from the whole model."""

    sees_data: bool = False

    def choose(self, ask: Ask) -> Selection | None:
        """The sub-model of this client and round; None for the whole model."""
        raise NotImplementedError


@dataclass(frozen=True)
class Whole(Select):
    """Everybody trains everything."""

    def choose(self, ask: Ask) -> Selection | None:
        return None
