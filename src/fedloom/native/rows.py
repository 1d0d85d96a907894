"""What is computed of many rows of weights at once, in one pass where torch takes four."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom.native.library import instructions, library


def squared_distances(rows: Tensor, shares: Tensor) -> Tensor:
    """‖w_k − w̄‖² of each row, with w̄ = Σ share_k w_k, in double precision."""
    squares, number = torch.zeros_like(shares), _number(rows)
    if number is not None:
        lib, (n, size) = library(), rows.shape
        assert lib is not None
        where = (rows.data_ptr(), rows.stride(0), n, size)
        lib.fl_spread(number, *where, shares.data_ptr(), squares.data_ptr())
        return squares
    for some in rows.split(max(_AT_ONCE // len(rows), 1), dim=1):
        block = some.double()
        block -= shares @ block
        squares += torch.linalg.vector_norm(block, dim=1).square_()
    return squares


def add_weighted(sums: Tensor, rows: Tensor, weights: np.ndarray) -> None:
    """Add Σ weight_k row_k to `sums`, in the order of the rows and in double precision."""
    number = _number(rows)
    if number is None:
        for row, weight in zip(rows, weights, strict=True):
            sums.add_(row, alpha=float(weight))
        return
    lib, (n, size) = library(), rows.shape
    assert lib is not None
    given = np.ascontiguousarray(weights, dtype=np.float64)
    lib.fl_weigh(number, rows.data_ptr(), rows.stride(0), n, size, given.ctypes.data,
                 sums.data_ptr())  # fmt: skip


def add_weighted_part(
    sums: Tensor, coverage: Tensor, row: Tensor, weight: float, index: Tensor
) -> None:
    """Add a row's values at these columns, weighted, to `sums`, and the weight to `coverage`."""
    if _number(row.unsqueeze(0)) is None or not _inside(index, len(row)):
        sums.index_add_(0, index, row[index].double(), alpha=weight)
        coverage[index] += weight
        return
    lib, at = library(), index.contiguous()
    assert lib is not None
    lib.fl_weigh_part(
        row.data_ptr(), at.data_ptr(), len(at), weight, sums.data_ptr(), coverage.data_ptr()
    )


def _inside(index: Tensor, size: int) -> bool:
    """Whether all columns exist: the kernels do not look, torch does and says which does not."""
    if index.dtype != torch.int64 or not len(index):
        return False
    least, most = index.aminmax()
    return bool(least >= 0) and bool(most < size)


def _number(rows: Tensor) -> int | None:
    """The instruction set that can take these rows, if any."""
    mine = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(1) == 1
    return instructions() if mine else None


_AT_ONCE = 2**18  # values looked at together, which stay in a cache
