"""A data set: images, labels, class names and the scale that normalises a batch.

What a user gives is checked here, once, so that everything after may trust it. A `Dataset` knows
nothing of clients; who holds what is the matter of `partition`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.data.images import Images, Joined, channel_scale, chunks, empty_like
from fedloom.errors import FedloomError
from fedloom.streams import stream

__all__ = ["Dataset", "Images", "as_images", "from_arrays", "measured", "set_aside"]

Labels = npt.ArrayLike | Sequence[Hashable]


@dataclass(frozen=True)
class Dataset:
    """Images (N, C, H, W), labels 0..n_classes-1, and the scale that normalises a batch.

    A network is fed `(x / 255 - mean) / std` for uint8 images and `(x - mean) / std` for float32
    ones, channel by channel.
    """

    name: str
    x: Images
    y: npt.NDArray[np.int64]
    x_test: Images
    y_test: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise FedloomError(f"Data set '{self.name}' has no training images.")
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            _check_images(f"The {part} images of '{self.name}'", x)
            _check_labels(f"The {part} labels of '{self.name}'", y, len(x), len(self.classes))
        if self.x.shape[1:] != self.x_test.shape[1:] or self.x.dtype != self.x_test.dtype:
            raise FedloomError(
                f"Training and test images of '{self.name}' differ: "
                f"{_look(self.x)} and {_look(self.x_test)}. Give both the same shape and type."
            )
        if not len(self.mean) == len(self.std) == self.x.shape[1] or min(self.std) <= 0:
            raise FedloomError(
                f"'{self.name}' has {self.x.shape[1]} channel(s): give one mean and one "
                f"positive std for each, not mean={self.mean} and std={self.std}."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.x.shape[1:]
        return channels, height, width

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    def pooled(self) -> Dataset:
        """Training and test images as one set to be dealt to clients, with no test set left."""
        if len(self.x_test) == 0:
            return self
        return dataclasses.replace(
            self,
            x=Joined(self.x, self.x_test),
            y=np.concatenate([self.y, self.y_test]),
            x_test=empty_like(self.x),
            y_test=np.empty(0, np.int64),
        )


def measured(
    name: str, x: Images, y: np.ndarray, x_test: Images, y_test: np.ndarray, classes: Sequence[str]
) -> Dataset:
    """A data set whose mean and std are measured on its training images."""
    _check_images(f"The training images of '{name}'", x)  # bad images have no mean
    mean, std = channel_scale(x)
    y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    return Dataset(name, x, y, x_test, y_test, tuple(classes), mean, std)


def from_arrays(
    x: npt.ArrayLike,
    y: Labels,
    x_test: npt.ArrayLike | None = None,
    y_test: Labels | None = None,
    name: str = "arrays",
    test_share: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A data set from plain arrays; without a test set, a stratified share is set aside.

    Images are (N, C, H, W), (N, H, W) or (N, F); uint8 is kept and any other number becomes
    float32. Labels may be anything hashable and are numbered in sorted order.

    >>> data = from_arrays(np.eye(10), list("ababababab"))
    >>> data.shape, data.classes, len(data.x), len(data.x_test)
    ((1, 1, 10), ('a', 'b'), 8, 2)
    """
    images, labels = as_images("The images", x), _as_labels(y)
    if x_test is not None and y_test is not None:
        test_images, test_labels = as_images("The test images", x_test), _as_labels(y_test)
        if images.dtype != test_images.dtype:
            images, test_images = images.astype(np.float32), test_images.astype(np.float32)
        numbers, classes = _number([*labels, *test_labels])
        cut = len(labels)
        return measured(name, images, numbers[:cut], test_images, numbers[cut:], classes)
    if x_test is not None or y_test is not None:
        raise FedloomError("Give both x_test and y_test, or neither.")
    return set_aside(name, images, *_number(labels), test_share, seed)


def set_aside(
    name: str, x: np.ndarray, y: np.ndarray, classes: Sequence[str], test_share: float, seed: int
) -> Dataset:
    """A data set whose test part is a stratified share of its images."""
    _check_labels(f"The labels of '{name}'", y, len(x), len(classes))
    _check_images(f"The images of '{name}'", x)  # by the user's own numbers
    test = stratified(y, test_share, seed)
    return measured(name, x[~test], y[~test], x[test], y[test], classes)


def stratified(
    y: np.ndarray, share: float, seed: int, purpose: str = "held-out"
) -> npt.NDArray[np.bool_]:
    """A mask that sets aside this share of every class, but never the whole of one."""
    if not 0 <= share < 1:
        raise FedloomError(f"test_share is {share}; it must be at least 0 and below 1.")
    aside = np.zeros(len(y), bool)
    for label in np.unique(y):
        members = stream(seed, purpose, int(label)).permutation(np.flatnonzero(y == label))
        aside[members[: min(round(share * len(members)), len(members) - 1)]] = True
    return aside


def as_images(what: str, x: npt.ArrayLike) -> np.ndarray:
    try:
        images = np.asarray(x)
    except ValueError as e:  # ragged lists
        raise FedloomError(f"{what} are not an array: {e}") from None
    if images.dtype.kind not in "biuf":
        raise FedloomError(f"{what} must be numbers; they have type {images.dtype}.")
    if images.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what overflows is refused as infinite
            images = images.astype(np.float32)
    if images.ndim == 2:
        return images[:, None, None, :]
    if images.ndim == 3:
        return images[:, None, :, :]
    if images.ndim == 4:
        _check_order(what, images.shape)
    return images


def _check_order(what: str, shape: tuple[int, ...]) -> None:
    """Refuse what is very likely (N, H, W, C): it would train, on nonsense."""
    _, first, second, last = shape
    coloured = last in (3, 4) and min(first, second) > 4
    if coloured or (last == 1 and first == second > 4):
        raise FedloomError(
            f"{what} have shape {shape}, which looks like (N, H, W, C). Give (N, C, H, W): "
            "x.transpose(0, 3, 1, 2)."
        )


def _as_labels(y: Labels) -> list[Hashable]:
    if isinstance(y, list | tuple) and not any(isinstance(label, list) for label in y):
        return list(y)
    labels = np.asarray(y)
    if labels.ndim != 1:
        hint = " Turn one-hot rows into numbers with y.argmax(1)." if labels.ndim == 2 else ""
        raise FedloomError(f"Labels must be one per image, not of shape {labels.shape}.{hint}")
    return list(labels.tolist())


def _number(labels: Sequence[Hashable]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    distinct = set(labels)
    if any(label != label for label in distinct):  # only NaN differs from itself
        raise FedloomError("Some labels are NaN. Remove these rows or give them a label.")
    try:
        ordered = sorted(distinct)  # type: ignore[type-var]
    except TypeError:  # kinds that do not compare, such as 3 and "three"
        ordered = sorted(distinct, key=lambda label: (type(label).__name__, repr(label)))
    number = {label: i for i, label in enumerate(ordered)}
    numbers = np.fromiter((number[label] for label in labels), np.int64, len(labels))
    return numbers, tuple(str(label) for label in ordered)


def _look(x: Images) -> str:
    return f"{'x'.join(map(str, x.shape[1:]))} {x.dtype}"


def _check_images(what: str, x: Images) -> None:
    if len(x.shape) != 4:
        raise FedloomError(
            f"{what} have shape {tuple(x.shape)}; give (N, C, H, W), (N, H, W) or (N, F)."
        )
    if x.dtype not in (np.uint8, np.float32):
        raise FedloomError(f"{what} have type {x.dtype}; give uint8 or float32.")
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        for start, rows in chunks(x):
            bad = np.flatnonzero(~np.isfinite(rows).all(axis=(1, 2, 3)))
            if len(bad):
                raise FedloomError(
                    f"{what} contain NaN or infinity, first in image {start + bad[0]}."
                )


def _check_labels(what: str, y: np.ndarray, images: int, classes: int) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise FedloomError(f"{what} must be a row of integers, not {y.ndim}-D {y.dtype}.")
    if len(y) != images:
        raise FedloomError(f"{what} number {len(y)}, but there are {images} images.")
    if len(y) and y.min() < 0:
        raise FedloomError(f"{what} go down to {y.min()}; labels start at 0.")
    if len(y) and y.max() >= classes:
        raise FedloomError(f"{what} go up to {y.max()}, but there are {classes} classes (from 0).")
