"""What is computed of many rows of weights at once, in one pass where torch takes four."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.native.library import instructions, library


def squared_distances(rows: Tensor, shares: Tensor) -> Tensor:
    """‖w_k − w̄‖² of each row, with w̄ = Σ share_k w_k, in double precision."""
    squares, number = torch.zeros_like(shares), instructions()
    mine = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(1) == 1
    if mine and number is not None:
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


_AT_ONCE = 2**18  # values looked at together, which stay in a cache
