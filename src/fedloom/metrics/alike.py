"""How similar the clients' models are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fedloom.native.rows import squared_distances


def mean_similarity(rows: Iterable[Tensor], start: Tensor) -> float | None:
    """The mean cosine of all pairs of changes, how far each model has moved from where all began,
    from blocks of rows; None for less than two. (Models themselves are alike for long after a
    common start, whatever they learn.) A model that has not moved has similarity 0 to all others.

    It is the square of the sum of the unit rows, less the pairs of each with itself, so no pair is
    looked at.

    >>> start = torch.ones(2)
    >>> mean_similarity([torch.eye(2), torch.tensor([[2.0, 0.0]])], torch.zeros(2))
    0.333...
    >>> mean_similarity([torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]])], start)
    -0.333...
    """
    count, alone, total = 0, 0.0, torch.zeros(1, dtype=torch.float64)
    for block in rows:
        unit = torch.nn.functional.normalize(block.double() - start.double(), dim=1)
        total = total + unit.sum(0)
        alone += float((unit * unit).sum())
        count += len(block)
    return (float(total @ total) - alone) / (count * (count - 1)) if count > 1 else None


def divergence(rows: Tensor, weights: np.ndarray) -> float | None:
    """The mean distance of models from their average, ‖w_k − w̄‖ with w̄ = Σ n_k w_k / Σ n_k (S0
    §4-2); None for less than two, or where nobody has data.

    >>> divergence(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), np.array([3, 1]))
    2.0
    """
    if len(rows) < 2 or not weights.sum() > 0:
        return None
    shares = torch.from_numpy(weights / weights.sum()).to(rows.device, torch.float64)
    return float(squared_distances(rows, shares).sqrt().mean())
