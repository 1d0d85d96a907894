"""Averages at the server: FedAvg's weighted mean, over a part or by coverage; FedSGD's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.mix.base import Gathering, Mix, Mixed
from fedloom.mix.gossip import PeerAverage
from fedloom.native.rows import add_weighted, add_weighted_part


def weighted_mean(
    rows: Tensor,
    weights: np.ndarray,
    old: Tensor,
    indexes: tuple[Tensor | None, ...] | None = None,
) -> Tensor:
    """Per column, the mean over the rows that trained it; a column nobody trained keeps `old`.

    Sums run over clients in their order, in double precision, so neither the number of threads
    nor that of workers changes a bit.
    """
    total = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    if indexes is None or all(index is None for index in indexes):
        if not weights.sum() > 0:
            return old.clone()
        add_weighted(total, rows, weights)
        return total.div_(float(weights.sum())).to(old.dtype)
    coverage = torch.zeros_like(total)
    for row, weight, index in zip(rows, weights, indexes, strict=True):
        if index is None:
            total.add_(row, alpha=float(weight))
            coverage.add_(float(weight))
        else:
            add_weighted_part(total, coverage, row, float(weight), index)
    return torch.where(coverage > 0, (total / coverage).to(old.dtype), old)


@dataclass(frozen=True)
class Average(Mix):
    """w ← Σ n_k w_k / Σ n_k over the participants, for the columns of `part`.

    With sub-models the sums run over those who trained each element (S2 eq. 3-4, 3-5).
    """

    part: str = "all"

    def among_nodes(self) -> Mix:
        if type(self) is not Average:
            return super().among_nodes()
        return PeerAverage(self.part)

    def combine(self, g: Gathering) -> Mixed:
        return Mixed(shared=weighted_mean(g.rows, g.weights, g.shared, g.indexes))


@dataclass(frozen=True)
class GradientStep(Mix):
    """FedSGD's server: w ← w − η Σ (n_k/n) g_k; columns without gradient are averaged."""

    expects = "gradients"

    def among_nodes(self) -> Mix:
        raise FedloomError(
            "GradientStep applies gradients to the one model that they were taken at, but nodes "
            "without a server each have their own model. Use a method that sends weights, such "
            "as fedavg."
        )

    def combine(self, g: Gathering) -> Mixed:
        moved = g.layout.trainable
        mean = weighted_mean(g.rows, g.weights, torch.zeros_like(g.shared))
        if not g.weights.sum() > 0:
            return Mixed()
        step = g.shared[:moved] - g.lr * mean[:moved]
        return Mixed(shared=torch.cat([step, mean[moved:]]))


@dataclass(frozen=True)
class Keep(Mix):
    """Nothing is combined: every client keeps the model it trained (local training only)."""

    part = "none"
    home = "node"

    def among_nodes(self) -> Mix:
        raise FedloomError(
            "Local training has no communication, so a topology would do nothing. Leave it out, "
            "or choose a method that combines models."
        )

    def combine(self, g: Gathering) -> Mixed:
        return Mixed()
