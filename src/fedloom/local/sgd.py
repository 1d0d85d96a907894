"""The classic local rules: SGD, SGD with a proximal term, and the bare gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.local.rule import Budget, LocalRule, Step, positive


@dataclass(frozen=True)
class SGD(LocalRule):
    """Mini-batch SGD on the client's training part: the contract's defaults are this rule."""


@dataclass(frozen=True)
class Proximal(LocalRule):
    """FedProx: minimise F_k(w) + (μ/2)‖w − w_global‖², whose extra gradient is μ(w − w_global)."""

    mu: float

    def __post_init__(self) -> None:
        positive("mu", self.mu)

    def at(self, round: int) -> LocalRule:
        # Engines have faster steps for plain SGD, whose last bits are others.
        return SGD() if self.mu == 0 and type(self) is Proximal else self

    def direction(self, grad: Tensor, weights: Tensor, anchor: Tensor) -> Tensor:
        return grad + self.mu * (weights - anchor)


@dataclass(frozen=True)
class FullGradient(LocalRule):
    """FedSGD: one gradient over the whole local set, handed back in place of the weights."""

    sends = "gradients"

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Step]:
        return [{"train": np.arange(sizes["train"])}] if sizes["train"] else []

    def finish(self, start: Tensor, row: Tensor, grad: Tensor) -> Tensor:
        return torch.cat([grad, row[grad.numel() :]])
