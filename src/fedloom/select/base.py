"""The contract of a selector: which columns a client trains in a round.

A selection is an index vector into the flat model plus a way to build the really smaller module
that those columns fill. Gathering them, training that module and scattering the result back is the
engine's and the mix's work; a selector only chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.local.rule import Batch
from fedloom.models.norm import settle
from fedloom.select.channels import Channels
from fedloom.select.scores import AT_ONCE, activations, gradients

if TYPE_CHECKING:
    from fedloom.data.public import PublicSet


@dataclass(frozen=True)
class Last:
    """The sub-model that a client last sent: its values, and the columns that they are."""

    row: Tensor
    index: Tensor | None


class Scores(Protocol):
    """What `fedloom.select.scores` gives for a row, faster, of samples that it `takes`."""

    def takes(self, x: Tensor, y: Tensor | None = None) -> bool: ...

    def activations(self, row: Tensor, x: Tensor, measure: bool = True) -> list[np.ndarray]: ...

    def gradients(self, row: Tensor, batch: Batch) -> list[np.ndarray]: ...


class Answers(Protocol):
    """What `Ask.answers` gives, faster."""

    def __call__(
        self, row: Tensor, x: Tensor, shape: Hashable, build: Callable[[], nn.Module] | None
    ) -> Tensor: ...


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
    strongest: float = 1.0  # capacity of all clients
    scores: Scores | None = None
    asked: Answers | None = None
    settled: Callable[[], Tensor] | None = None  # the row with norms that all measured together

    def load(self, row: Tensor | None = None) -> nn.Module:
        """The client's whole model, or another row of it, to look at and not to train."""
        module = self.module if self.channels is None else self.channels.module
        return self.layout.load(module.to(self.module_device), self.row if row is None else row)

    def activations(self, x: Tensor) -> list[np.ndarray]:
        """By group: the mean activation of every channel of the client's whole model, with norms
        measured on these samples, or as the selector says (`own_norms`)."""
        assert self.channels is not None
        own = self.settled is None
        row = self.row if self.settled is None else self.settled()
        if self.scores is not None and self.scores.takes(x):
            return self.scores.activations(row, x, own)
        return activations(self.load(row), self.channels, x, own)

    def gradients(self, batch: Batch) -> list[np.ndarray]:
        """By group: how large the gradient at every channel is, on these samples."""
        assert self.channels is not None
        if self.scores is not None and self.scores.takes(batch.x, batch.y):
            return self.scores.gradients(self.row, batch)
        return gradients(self.load(), self.channels, batch)

    def answers(
        self,
        row: Tensor,
        x: Tensor,
        shape: Hashable = None,
        build: Callable[[], nn.Module] | None = None,
    ) -> Tensor:
        """Logits of the whole model, or of what `build` gives (equal `shape`s mean equal modules,
        which are built once), with the weights `row` and norms measured on the same images."""
        if self.asked is not None:
            return self.asked(row, x, shape, build)
        module = self.module if build is None else build().to(self.module_device)
        layout = self.layout if build is None else Layout.of(module, self.layout.extras)
        settle(layout.load(module, row), x.split(AT_ONCE), every=True)
        with torch.no_grad():
            return torch.cat([module(some) for some in x.split(AT_ONCE)])

    @property
    def module_device(self) -> torch.device:
        return next(self.module.parameters()).device


@dataclass(frozen=True)
class Selection:
    """A sub-model: `row[index]` is the row of `build()`; the index ascends. Equal `shape`s mean
    equal modules. Where narrower nets are trained inside it, `channels` is its structure. `held`
    builds it to be used on its own, if that is another module than the one that trains."""

    index: Tensor
    shape: Hashable
    build: Callable[[], nn.Module]
    channels: Channels | None = None
    samples: int = 0  # that the client ran through the whole model to choose
    held: Callable[[], nn.Module] | None = None


class Select:
    """Which part a client trains.

    `needs` are facts: with `data` it chooses on the client, from the whole model and its own data;
    without, on the server. `public` and `labels` are the public set, of which it wants
    `public_samples`; `last` is what the client last sent, which the server then keeps. `cuts`: it
    chooses among the model's channels. `nested`: a smaller choice is always part of a larger one.
    `follows`: the choice follows from capacity and round, so that no message has to tell it.
    `measures`: each client also trains the whole model, for the record only, to tell how far its
    sub-model's gradient and update are from the whole's.
    `own_norms`: what it looks at on a client, it looks at with norms measured on that client's
    data; without, those of a shared model are measured by all who take part in the round together.
    `model_options` are what it needs the model to be built with.
    """

    probabilities: str = ""  # what it does with classes, as in `LocalRule`
    needs: frozenset[str] = frozenset()
    measures: bool = False
    own_norms: bool = True
    public_samples: int = 0
    cuts: bool = False
    nested: bool = False
    follows: bool = False
    model_options: Mapping[str, Any] = {}

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
    """All clients train the whole model."""

    follows = True

    def choose(self, ask: Ask) -> Selection | None:
        return None


@dataclass(frozen=True)
class Uncut(Whole):
    """The same, with the narrower nets of another selector inside."""

    of: Select

    def narrowed(self, channels: Channels, width: float) -> tuple[tuple[int, ...], float]:
        return self.of.narrowed(channels, width)
