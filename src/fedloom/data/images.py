"""Stacks of images that need not be in memory.

Images may be an array, a memory-mapped file, two stacks joined or pictures made on demand;
all that the rest of fedloom asks of them is `Images`: the look of an (N, C, H, W) array, and rows
for an array of indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64] | slice

_CHUNK = 4096  # images looked at together, so that scanning a large set takes little memory


class Images(Protocol):
    """An (N, C, H, W) stack of uint8 or float32 images that gives rows by index."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> np.ndarray: ...


class Joined:
    """Two stacks of images seen as one, without copying either."""

    def __init__(self, first: Images, second: Images) -> None:
        self._first, self._second = first, second
        self.shape: tuple[int, ...] = (len(first) + len(second), *first.shape[1:])
        self.dtype = first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index, /) -> np.ndarray:
        at = positions(index, len(self))
        late = at >= len(self._first)
        rows = np.empty((len(at), *self.shape[1:]), self.dtype)
        rows[~late] = self._first[at[~late]]
        rows[late] = self._second[at[late] - len(self._first)]
        return rows


def positions(index: Index, n: int) -> npt.NDArray[np.int64]:
    """An index into n rows (slice, mask or integers) as plain positions 0..n-1."""
    if isinstance(index, slice):
        return np.arange(*index.indices(n), dtype=np.int64)
    at = np.asarray(index)
    if at.dtype == bool:
        return np.flatnonzero(at)
    if at.size and not (-n <= at.min() and at.max() < n):
        raise IndexError(f"index {at.min()}..{at.max()} is outside a set of {n} images")
    return np.where(at < 0, at + n, at).astype(np.int64, copy=False)


def chunks(x: Images) -> Iterator[tuple[int, np.ndarray]]:
    """The images a few thousand at a time, each chunk with the index of its first image."""
    for start in range(0, len(x), _CHUNK):
        yield start, x[slice(start, start + _CHUNK)]


def empty_like(x: Images) -> np.ndarray:
    """An empty stack of the same kind of images."""
    return np.empty((0, *x.shape[1:]), x.dtype)


def channel_scale(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of every channel, on the 0..1 scale for uint8 images."""
    total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for _, rows in chunks(x):
        values = rows.astype(np.float64)
        total += values.sum(axis=(0, 2, 3))
        squares += np.square(values).sum(axis=(0, 2, 3))
    pixels = max(len(x) * x.shape[2] * x.shape[3], 1)
    unit = 255.0 if x.dtype == np.uint8 else 1.0
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - np.square(mean), 0.0))
    std[std < 1e-6 * unit] = unit  # a constant channel is only centred
    return tuple((mean / unit).tolist()), tuple((std / unit).tolist())
