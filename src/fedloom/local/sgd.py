"""The classic local rules: SGD, SGD with a proximal term, and the bare gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.local.rule import Back, Budget, Context, LocalRule, Pull, Samples, non_negative


@dataclass(frozen=True)
class SGD(LocalRule):
    """Mini-batch SGD on the client's training part. This is what the contract's defaults do."""


@dataclass(frozen=True)
class Proximal(LocalRule):
    """FedProx: minimise F_k(w) + (μ/2)‖w − w_global‖², whose extra gradient is μ(w − w_global)."""

    mu: float

    def __post_init__(self) -> None:
        non_negative("mu", self.mu)

    def at(self, round: int) -> LocalRule:
        # Engines have faster steps for plain SGD, whose last bits are others.
        return SGD() if self.mu == 0 and type(self) is Proximal else self

    def pull(self, me: Context) -> Pull | None:
        return Pull(self.mu, me.start)


@dataclass(frozen=True)
class FullGradient(LocalRule):
    """FedSGD: one gradient over the whole local data, handed back instead of the weights."""

    hands_back = "gradients"

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Samples]:
        return [{"train": np.arange(sizes["train"])}] if sizes["train"] else []

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        return Back(torch.cat([grad, row[grad.numel() :]]))
