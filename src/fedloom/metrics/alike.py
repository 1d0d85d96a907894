"""How alike the models of clients are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def mean_similarity(rows: Iterable[Tensor], start: Tensor) -> float | None:
    """The mean cosine of all pairs of changes, how far each model has moved from where all began,
    from blocks of rows; None for less than two. (Models themselves are alike for long after a
    common start, whatever they learn.) One that has not moved is like no other.

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
