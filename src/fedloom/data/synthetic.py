"""Pictures made on demand: a data set of any size that costs only its labels.

Every class has a few prototypes, smooth random patterns. Image i is one prototype of its class
plus the difference of two rows of a noise table; which ones is a hash of i, so any image can be
made at any time, in any order, on any machine. Prototypes and noise live in the same
low-dimensional space, which keeps the task about equally hard for every image size: at the
default noise a linear model gets about 85 %, a small network more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset
from fedloom.data.images import Index, channel_scale, positions
from fedloom.errors import FedloomError
from fedloom.streams import key, stream

Shape = tuple[int, int, int]

MODES = 3  # prototypes of a class: more than one, so that no linear model is perfect
TABLE = 1024  # rows of noise: a million differences
SPACE = 24  # dimensions in which prototypes and noise live
MIDDLE = 128  # grey
# Tables are finer than the images made of them: a rounded prototype would carry a fingerprint
# outside the common space by which classes could be told apart.
FINE_BITS = 7


def synthetic(
    samples: int, test_samples: int, shape: Shape, classes: int, noise: float, seed: int
) -> Dataset:
    """The synthetic data set: the first `samples` images train, the next ones test."""
    if samples < 1 or test_samples < 0:
        raise FedloomError("synthetic needs samples >= 1 and test_samples >= 0.")
    if classes < 2 or min(shape) < 1 or not 0 <= noise < float("inf"):
        raise FedloomError(
            "synthetic needs at least 2 classes, a shape of positive sizes and noise >= 0."
        )
    world = _world(shape, classes, noise, seed)
    x = SyntheticImages(world, 0, samples)
    x_test = SyntheticImages(world, samples, test_samples)
    mean, std = channel_scale(SyntheticImages(world, 0, min(samples, 2048)))
    names = tuple(str(label) for label in range(classes))
    return Dataset("synthetic", x, x.labels(), x_test, x_test.labels(), names, mean, std)


@dataclass(frozen=True)
class _World:
    """What all images of one seed are made of; tables have one pattern a row."""

    shape: Shape
    classes: int
    prototypes: npt.NDArray[np.int16]
    noise: npt.NDArray[np.int16]
    key: np.uint64


class SyntheticImages:
    """`count` images of an endless world, from number `first` on, as uint8 (C, H, W)."""

    dtype = np.dtype(np.uint8)

    def __init__(self, world: _World, first: int, count: int) -> None:
        self.shape: tuple[int, ...] = (count, *world.shape)
        self._world = world
        self._first = np.uint64(first)

    def __len__(self) -> int:
        return self.shape[0]

    def labels(self) -> npt.NDArray[np.int64]:
        """All labels: the classes in turn."""
        return np.arange(len(self), dtype=np.int64) % self._world.classes

    def __getitem__(self, index: Index, /) -> np.ndarray:
        at = positions(index, len(self))
        world = self._world
        bits = _hash(at.astype(np.uint64) + self._first + world.key)
        mode = ((bits >> np.uint64(32)) % MODES).astype(np.int64)
        rows: npt.NDArray[np.int16] = world.prototypes[at % world.classes * MODES + mode]
        rows += world.noise[bits % TABLE]
        rows -= world.noise[(bits >> np.uint64(16)) % TABLE]
        rows >>= FINE_BITS
        return rows.reshape(len(at), *world.shape).astype(np.uint8)


def _world(shape: Shape, classes: int, noise: float, seed: int) -> _World:
    rng = stream(seed, "synthetic", "tables")
    pixels = int(np.prod(shape))
    fields = _smooth(rng.standard_normal((min(SPACE, pixels), *shape))).reshape(-1, pixels)
    basis = np.linalg.qr(fields.T)[0].T * np.sqrt(pixels / len(fields))  # pixels of std about 1
    prototypes = rng.standard_normal((classes * MODES, len(fields))) @ basis
    rows = rng.standard_normal((TABLE, len(fields))) @ basis
    rows *= noise / np.sqrt(2)  # so that the difference of two has std `noise`
    contrast = (MIDDLE - 1) / (np.abs(prototypes).max() + 2 * np.abs(rows).max())  # no sum clips
    unit = 1 << FINE_BITS
    return _World(
        shape,
        classes,
        np.rint(unit * (MIDDLE + contrast * prototypes)).astype(np.int16),
        np.rint(unit * contrast * rows).astype(np.int16),
        np.uint64(key(seed, "synthetic", "hash") & (2**64 - 1)),
    )


def _smooth(fields: np.ndarray) -> np.ndarray:
    """Average every pixel with its neighbours, wider in larger images."""
    for axis in (2, 3):
        for _ in range(fields.shape[axis] // 4):
            fields = (fields + np.roll(fields, 1, axis) + np.roll(fields, -1, axis)) / 3
    return fields


def _hash(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of every number (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
