"""Kernels: how alike two samples are in one representation (S0 eq. 4-1 to 4-3).

Each is a function of the inner products of the samples, G = XXᵀ, so whatever a layer's width is,
n samples cost an n × n matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import FedloomError, unknown


class Kernel(ABC):
    """From the inner products of n samples to their n × n kernel matrix."""

    @abstractmethod
    def __call__(self, gram: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Linear(Kernel):
    """xᵀy."""

    def __call__(self, gram: Tensor) -> Tensor:
        return gram


@dataclass(frozen=True)
class Polynomial(Kernel):
    """(xᵀy + c)^d."""

    degree: int = 3
    c: float = 1.0

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise FedloomError(f"A polynomial kernel of degree {self.degree}: give 1 or more.")
        if not math.isfinite(self.c):
            raise FedloomError(f"A polynomial kernel with c = {self.c}: give a number.")

    def __call__(self, gram: Tensor) -> Tensor:
        return (gram + self.c) ** self.degree


@dataclass(frozen=True)
class RBF(Kernel):
    """exp(−‖x − y‖² / 2σ²), where σ is this fraction of the median distance between samples."""

    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not self.fraction > 0:
            raise FedloomError(f"An rbf kernel with σ = {self.fraction} medians: give more than 0.")

    def __call__(self, gram: Tensor) -> Tensor:
        norms = gram.diagonal()
        squares = (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0).fill_diagonal_(0)
        apart = squares[torch.ones_like(squares, dtype=torch.bool).triu(1)]
        if not len(apart) or apart.max() == 0:  # one point: everything is alike
            return torch.ones_like(gram)
        middle = apart.sqrt().quantile(0.5) if len(apart) < 2**24 else apart.sqrt().median()
        # More than half of the samples in one point: the others are at no distance from it.
        sigma = self.fraction * torch.where(middle > 0, middle, apart.max().sqrt())
        return torch.exp(-squares / (2 * sigma**2))


def kernel_named(spec: str) -> Kernel:
    """A kernel by name: `linear`, `poly[:DEGREE]`, `rbf[:FRACTION]`.

    >>> kernel_named("rbf:0.5")
    RBF(fraction=0.5)
    """
    name, _, value = spec.partition(":")
    try:
        if name == "linear" and not value:
            return Linear()
        if name == "poly":
            return Polynomial(int(value)) if value else Polynomial()
        if name == "rbf":
            return RBF(float(value)) if value else RBF()
    except ValueError:
        pass
    raise unknown("kernel", spec, ("linear", "poly", "poly:2", "rbf", "rbf:0.5"))
