"""Selectors of width: a share r of the channels of every hidden layer.

They differ only in which channels they take: the first, random ones, a moving window, those that
the client's own data activates most, or those with the largest gradient on similar public data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.local.rule import Batch
from fedloom.models.inputs import blank
from fedloom.select.base import Ask, Select, Selection
from fedloom.select.channels import Channels
from fedloom.select.verify import not_too_rigid, too_rigid

Rounding = Literal["ceil", "floor"]


@dataclass(frozen=True)
class Width(Select):
    """⌈r·m⌉ of the m channels of every group; `scaler` multiplies by 1/r what hidden layers give in
    training; `measures` notes how far gradients and updates are from the whole model's."""

    rounding: Rounding = "ceil"
    scaler: bool = False
    measures: bool = field(default=False, kw_only=True)

    cuts = True

    def choose(self, ask: Ask) -> Selection | None:
        if ask.capacity == 1:
            return None
        channels = ask.channels
        assert channels is not None
        counts, scale = self.narrowed(channels, ask.capacity)
        keep = self.channels(ask, channels, counts)
        return Selection(
            index=channels.index(ask.layout, keep),
            shape=(*counts, scale),
            build=partial(channels.build, counts, scale),
            channels=channels.narrow(counts) if self.nested else None,
            samples=self.looked_at(ask),
            held=partial(channels.build, counts, scale, always=True) if scale != 1 else None,
        )

    def looked_at(self, ask: Ask) -> int:
        """How many samples the client ran through the whole model."""
        return 0

    def narrowed(self, channels: Channels, width: float) -> tuple[tuple[int, ...], float]:
        return channels.counts(width, self.rounding), 1 / width if self.scaler else 1.0

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        """The channels of every group that this client trains."""
        raise NotImplementedError

    def check(self, module: nn.Module, shape: tuple[int, int, int], capacity: float) -> None:
        channels = Channels.of(module, shape)
        smaller = channels.build(*self.narrowed(channels, capacity)).eval()
        share = f"a share of {capacity:g}"
        with torch.no_grad():
            with not_too_rigid(smaller, share):
                logits = smaller(blank(smaller, shape, 2))
            training = module.training
            wanted = module.eval()(blank(module, shape, 2)).shape
            module.train(training)
        if logits.shape != wanted:
            raise too_rigid(module, share, f"it returned {tuple(logits.shape)}")


@dataclass(frozen=True)
class Ordered(Width):
    """HeteroFL, FjORD: the first channels, always the same."""

    nested = True
    follows = True

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        return [np.arange(k) for k in counts]


@dataclass(frozen=True)
class Random(Width):
    """Federated Dropout: a fresh random choice for every client and round."""

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        rng, sizes = ask.stream("channels"), channels.sizes
        return [rng.choice(m, k, replace=False) for m, k in zip(sizes, counts, strict=True)]


@dataclass(frozen=True)
class Rolling(Width):
    """FedRolex: a window that moves by one channel every round and wraps around."""

    follows = True

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        first = ask.round - 1
        return [(first + np.arange(k)) % m for m, k in zip(channels.sizes, counts, strict=True)]


@dataclass(frozen=True)
class ByActivation(Width):
    """FedDSE (S2 Algorithms 3.1, 3.2): the channels that the client's own data activate most.

    T = 0 takes the largest |h_i|; T > 0 draws without replacement with p(i) = softmax(h_i / T).
    Norms of a shared model have statistics of the data of all who take part in the round, or, with
    `own_norms`, of the client's own, with which clients look more alike than they are.
    """

    temperature: float = 0.0
    samples: int | None = None  # of the client's training data; None: all of it
    own_norms: bool = field(default=False, kw_only=True)

    needs = frozenset({"data"})

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        assert ask.data is not None
        x = ask.data("train").x
        if self.samples is not None and len(x) > self.samples:
            some = ask.stream("inference").permutation(len(x))[: self.samples]
            x = x[torch.from_numpy(some).to(x.device)]
        found = ask.activations(x)
        rng = ask.stream("channels")
        return [
            _largest(np.abs(h), k) if self.temperature == 0 else draw(h / self.temperature, k, rng)
            for h, k in zip(found, counts, strict=True)
        ]

    def looked_at(self, ask: Ask) -> int:
        assert ask.data is not None
        size = len(ask.data("train").y)
        return size if self.samples is None else min(size, self.samples)


@dataclass(frozen=True)
class ByGradient(Width):
    """FedGSE (S2 Algorithms 4.1 to 4.4): the channels whose gradient is largest on public samples
    that are like the client's.

    `spl` takes those that the client's last sub-model labels correctly (any, where there are none),
    `csl` takes any, with that model's predictions as labels. The global model stands in for that of
    a client that sent none yet. That sub-model is asked as it was trained, with its scaler.
    """

    probabilities = "takes public samples by the class that a model gives them"

    labels: Literal["spl", "csl"] = "spl"
    samples: int | None = 128  # None: all that are public

    @property
    def public_samples(self) -> int:  # type: ignore[override]
        return self.samples or 0

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"public", "last"} | ({"labels"} if self.labels == "spl" else set()))

    def channels(self, ask: Ask, channels: Channels, counts: Sequence[int]) -> list[np.ndarray]:
        similar = self.similar(ask, channels)
        found = ask.gradients(similar)
        return [_largest(g, k) for g, k in zip(found, counts, strict=True)]

    def similar(self, ask: Ask, channels: Channels) -> Batch:
        """The public samples that are like this client's, with labels."""
        assert ask.public is not None
        x, y = ask.public.x, ask.public.y
        order = torch.from_numpy(ask.stream("public").permutation(len(x))).to(x.device)
        if self.labels == "csl":
            some = x[order[: self.samples]]
            return Batch(some, self._predictions(ask, channels, some))
        assert y is not None
        right = order[(self._predictions(ask, channels, x) == y)[order]]
        if not len(right):  # it knows nothing yet: no sample is more like its own than another
            right = order
        right = right[: self.samples]
        return Batch(x[right], y[right])

    def _predictions(self, ask: Ask, channels: Channels, x: Tensor) -> Tensor:
        last = ask.last
        if last is None or last.index is None:
            return ask.answers(ask.row if last is None else last.row, x).argmax(-1)
        counts = [len(k) for k in channels.kept(ask.layout, last.index)]
        _, scale = self.narrowed(channels, ask.capacity)
        build = partial(channels.build, counts, scale, always=True)
        return ask.answers(last.row, x, (*counts, scale), build).argmax(-1)


def draw(scores: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """k of them without replacement, each draw with softmax(scores) of what is left: the k largest
    after adding Gumbel noise."""
    return _largest(scores + rng.gumbel(size=len(scores)), k)


def _largest(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, kind="stable")[:k]
