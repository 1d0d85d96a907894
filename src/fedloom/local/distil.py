"""Rules that distil a client's own model into its smaller parts, and the masked cross-entropy.

FjORD trains a narrower net inside the client's own in every batch, DepthFL the exits of its blocks,
DS-FL learns from the clients' combined predictions on public images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.errors import FedloomError
from fedloom.kinds import Array
from fedloom.local.rule import (
    Back,
    Batch,
    Budget,
    Context,
    LocalRule,
    Net,
    Params,
    Pull,
    Samples,
)
from fedloom.local.sgd import Proximal

Mask = Literal["none", "zero", "inf"]

ON_PUBLIC = Array(dims=("public", "classes"))


@dataclass(frozen=True)
class MaskedSGD(LocalRule):
    """Plain SGD whose loss sees no logit of a class that the client does not hold (S2 §3.3.3).

    `zero` sets those logits to 0, as published code does; `inf` to −∞, so that such classes take no
    probability at all; `none` leaves them. `mu` is the weight of FedProx's term, as in `Proximal`.
    """

    mask: Mask = "none"
    mu: float = field(default=0.0, kw_only=True)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset() if self.mask == "none" else frozenset({"classes"})

    def at(self, round: int) -> LocalRule:
        # Engines have faster steps for plain SGD, whose last bits are others.
        if self.mask == "none" and type(self) is MaskedSGD:
            return Proximal(self.mu).at(round)
        return self

    def pull(self, me: Context) -> Pull | None:
        return Pull(self.mu, me.start) if self.mu else None

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        batch = data["train"]
        return batch.loss(self.masked(net(params, batch.x), batch))

    def masked(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.held is None or self.mask == "none":
            return logits
        instead = 0.0 if self.mask == "zero" else -torch.inf
        return torch.where(batch.held, logits, instead)


@dataclass(frozen=True)
class OrderedDropout(MaskedSGD):
    """FjORD (Horváth et al. 2021): each batch trains the client's widest net and a narrower one,
    p drawn from `levels` up to the client's capacity, that also learns from the widest:

        L = CE(widest) + (1 − α)·CE(narrow) + α·T²·KL(widest ‖ narrow)

    Where p is the client's own width, there is nothing narrower and L = CE(widest).
    """

    levels: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    distil: float = 0.5
    temperature: float = 1.0

    @property
    def narrows(self) -> bool:  # type: ignore[override]
        return min(self.levels) < 1

    @property
    def probabilities(self) -> str:  # type: ignore[override]
        distils = self.narrows and self.distil > 0
        return (
            "distils class probabilities into narrower nets (distil=0 does without)"
            if distils
            else ""
        )

    def __post_init__(self) -> None:
        if not self.levels or not all(0 < p <= 1 for p in self.levels):
            raise FedloomError(f"levels must be above 0 and at most 1, not {self.levels}.")
        if not 0 <= self.distil <= 1 or not self.temperature > 0:
            raise FedloomError("distil must be from 0 to 1, and its temperature above 0.")

    def at(self, round: int) -> LocalRule:
        if self.narrows or self.mask != "none":
            return self
        return Proximal(self.mu).at(round)

    def widths(self, steps: int, capacity: float, rng: np.random.Generator) -> list[float]:
        below = [p for p in self.levels if p < capacity]
        return [float(p) for p in rng.choice([*below, capacity], size=steps)]

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        batch = data["train"]
        wide = self.masked(net(params, batch.x), batch)
        loss = batch.loss(wide)
        if not net.narrower:
            return loss
        narrow = self.masked(net.narrow(params, batch.x), batch)
        learnt = divergence(wide.detach(), narrow, batch, self.temperature)
        return loss + (1 - self.distil) * batch.loss(narrow) + self.distil * learnt


@dataclass(frozen=True)
class SelfDistillation(MaskedSGD):
    """DepthFL (Kim et al. 2023): every exit learns from the labels and from all other exits:

        L = Σ_i CE_i + w/(n − 1) · Σ_i Σ_{j≠i} KL(exit j ‖ exit i)

    The weight w grows linearly to `weight` over the first `ramp` rounds.
    """

    weight: float = 1.0
    ramp: int = 300
    share: float = 1.0  # of the weight, in this round

    @property
    def probabilities(self) -> str:  # type: ignore[override]
        return (
            "distils class probabilities from exit to exit (distil=0 does without)"
            if self.weight
            else ""
        )

    def at(self, round: int) -> SelfDistillation:
        return replace(self, share=min(round / self.ramp, 1.0) if self.ramp else 1.0)

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        batch = data["train"]
        exits = [self.masked(logits, batch) for logits in net(params, batch.x)]
        loss = torch.stack([batch.loss(logits) for logits in exits]).sum()
        if len(exits) == 1 or self.weight == 0:
            return loss
        pairs = [
            divergence(teacher.detach(), pupil, batch)
            for i, pupil in enumerate(exits)
            for j, teacher in enumerate(exits)
            if i != j
        ]
        return loss + self.weight * self.share / (len(exits) - 1) * torch.stack(pairs).sum()


@dataclass(frozen=True)
class Codistillation(LocalRule):
    """DS-FL (Itahara et al. 2021): learn from the clients' combined predictions on the public
    images of the previous round, then from the client's own data, and send this model's
    predictions."""

    parts = ("public", "train")
    told = {"targets": ON_PUBLIC}
    sends = {"probabilities": ON_PUBLIC}
    needs = frozenset({"public"})
    probabilities = "exchanges class probabilities, on public images"

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Samples]:
        return [{part: b} for part in self.parts for b in budget.batches(sizes[part], rng)]

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        if "public" not in data:
            return super().objective(net, params, data, me)
        batch = data["public"]
        assert batch.at is not None
        # Before the first exchange all targets are 0: the loss is, too, and nothing moves.
        each = -(me.told["targets"][batch.at] * F.log_softmax(net(params, batch.x), -1)).sum(-1)
        return each.mean()

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        assert me.logits is not None
        assert me.public is not None
        return Back(row, sends={"probabilities": me.logits(me.public).softmax(-1)})


def divergence(teacher: Tensor, pupil: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
    """T²·KL(teacher ‖ pupil), the mean over the samples that count."""
    target = F.log_softmax(teacher / temperature, -1)
    found = F.log_softmax(pupil / temperature, -1)
    # A class that is masked out for both has no probability and costs nothing.
    each = (target.exp() * torch.where(target.isneginf(), 0.0, target - found)).sum(-1)
    if batch.weight is None:
        return temperature**2 * each.mean()
    return temperature**2 * (each * batch.weight).sum() / batch.weight.sum().clamp(min=1)
