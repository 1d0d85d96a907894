"""How alike the models of clients are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def mean_similarity(rows: Iterable[Tensor]) -> float | None:
    """The mean cosine of all pairs of models, from blocks of rows; None for less than two.

    It is the square of the sum of the unit rows, less the pairs of each with itself, so no pair is
    looked at.

    >>> mean_similarity([torch.eye(2), torch.tensor([[2.0, 0.0]])])
    0.333...
    """
    count, total = 0, torch.zeros(1, dtype=torch.float64)
    for block in rows:
        unit = torch.nn.functional.normalize(block.double(), dim=1)
        total = total + unit.sum(0)
        count += len(block)
    return (float(total @ total) - count) / (count * (count - 1)) if count > 1 else None
