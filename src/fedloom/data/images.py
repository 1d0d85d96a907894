"""Stacks of images that need not be in memory.

Images may be an array, a memory-mapped file, two stacks joined or pictures made on demand; the rest
of fedloom needs only `Images`: the interface of an (N, C, H, W) array that gives rows for an array
of indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64] | slice

_CHUNK = 4096  # images looked at together, so that scanning a large set takes little memory


class Images(Protocol):
    """An (N, C, H, W) stack of uint8, int32 or float32 images that gives rows by index."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> np.ndarray: ...


def noun(shape: Sequence[int]) -> str:
    """What to call the rows of a stack (N, C, H, W): rows of a table are not images."""
    return "samples" if tuple(shape[1:3]) == (1, 1) else "images"


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


def chunks(
    x: Images, rows: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """The images, or these rows of them, a few thousand at a time, each chunk with the position of
    its first image."""
    for start in range(0, len(x if rows is None else rows), _CHUNK):
        piece = slice(start, start + _CHUNK)
        yield start, x[piece if rows is None else rows[piece]]


def empty_like(x: Images) -> np.ndarray:
    """An empty stack of the same kind of images."""
    return np.empty((0, *x.shape[1:]), x.dtype)


Scale = tuple[tuple[float, ...], tuple[float, ...]]  # means and stds


def unit_of(dtype: np.dtype) -> float:
    """What one stands for: bytes are read on a scale of 0..1, other numbers as they are."""
    return 255.0 if dtype == np.uint8 else 1.0


def channel_scale(x: Images, rows: npt.NDArray[np.int64] | None = None) -> Scale:
    """Mean and std of every channel of all images, or of these rows, in the images' unit."""
    total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for _, some in chunks(x, rows):
        values = some.astype(np.float64)
        total += values.sum(axis=(0, 2, 3))
        squares += np.square(values).sum(axis=(0, 2, 3))
    pixels = max(len(x if rows is None else rows) * x.shape[2] * x.shape[3], 1)
    unit = unit_of(x.dtype)
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - np.square(mean), 0.0))
    std[std < 1e-6 * unit] = unit  # a constant channel is only centred
    return tuple((mean / unit).tolist()), tuple((std / unit).tolist())


def pixel_scale(x: Images, rows: npt.NDArray[np.int64] | None = None) -> Scale:
    """Mean and std of every pixel of all images, or of every column of a table, (N, 1, 1, F):
    columns have units of their own."""
    mean, square = np.zeros(x.shape[1:]), np.zeros(x.shape[1:])
    count = max(len(x if rows is None else rows), 1)
    for _, some in chunks(x, rows):
        mean += some.sum(axis=0, dtype=np.float64) / count
    for _, some in chunks(x, rows):  # a second pass: a mean may be large compared with the spread
        square += np.square(some - mean).sum(axis=0) / count
    mean, std = mean.reshape(-1), np.sqrt(square).reshape(-1)
    std[std <= np.maximum(1e-7 * np.abs(mean), 1e-30)] = unit_of(x.dtype)  # constant in float32
    unit = unit_of(x.dtype)
    return tuple((mean / unit).tolist()), tuple((std / unit).tolist())


def laid_out(values: Sequence[float], shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """A scale's values, to be broadcast over images (C, H, W): one for each channel, or for each
    pixel."""
    one = (-1, 1, 1) if len(values) == shape[0] else shape
    return np.asarray(values, np.float64).reshape(one)
