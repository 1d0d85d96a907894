"""A data set: images, labels, class names and the scale that normalises a batch.

What a user gives is checked here, once, so that everything after may trust it. A `Dataset` knows
nothing of clients; who holds what is the matter of `partition`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedloom.data.images import (
    Images,
    Joined,
    channel_scale,
    chunks,
    empty_like,
    noun,
    pixel_scale,
    unit_of,
)
from fedloom.errors import FedloomError, unknown
from fedloom.streams import stream

__all__ = ["Dataset", "Images", "as_images", "from_arrays", "hold_out", "measured", "resized",
           "stratified"]  # fmt: skip

SCALES = ("standard", "unit", "pixel", "half")
_CLASSES_CHECKED = 20  # samples; fewer may well have as many classes

Labels = npt.ArrayLike | Sequence[Hashable]


@dataclass(frozen=True)
class Dataset:
    """Images (N, C, H, W), labels 0..n_classes-1, and the scale that normalises a batch.

    A network is fed `(x / 255 - mean) / std` for uint8 images and `(x - mean) / std` for others,
    channel by channel; there may be a mean and std for every pixel instead, as tables (1, 1, F)
    have them for every column. Rows are in the order of the user's file. Where that has no test
    part, `held_out` are the rows of `x` that stand in for one. `columns` are what is known of every
    row, those of `x` and then those of `x_test`, beside what a model sees: its user, for one.
    `features` names the columns of a table.
    """

    name: str
    x: Images
    y: npt.NDArray[np.int64]
    x_test: Images
    y_test: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    held_out: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise FedloomError(f"Data set '{self.name}' has no training {noun(self.x.shape)}.")
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            _check_images(f"The {part} {noun(x.shape)} of '{self.name}'", x)
            _check_labels(f"The {part} labels of '{self.name}'", y, len(x), len(self.classes))
        if self.x.shape[1:] != self.x_test.shape[1:] or self.x.dtype != self.x_test.dtype:
            raise FedloomError(
                f"Training and test {noun(self.x.shape)} of '{self.name}' differ: "
                f"{_look(self.x)} and {_look(self.x_test)}. Give both the same shape and type."
            )
        channels, height, width = self.shape
        scaled = {channels, channels * height * width}
        finite = np.isfinite([*self.mean, *self.std]).all()
        if (
            not (len(self.mean) == len(self.std) and len(self.mean) in scaled)
            or not finite
            or min(self.std) <= 0
        ):
            raise FedloomError(
                f"'{self.name}' has {channels} channel(s): give one mean and one positive std "
                f"per channel (or per pixel), not mean={self.mean} and std={self.std}."
            )
        for column, values in self.columns.items():
            if len(values) != len(self.x) + len(self.x_test):
                raise FedloomError(
                    f"The column '{column}' of '{self.name}' has {len(values)} values for "
                    f"{len(self.x)} training and {len(self.x_test)} test {noun(self.x.shape)}. "
                    "Give one for each."
                )
        if len(self.held_out) and len(self.x_test):
            raise FedloomError(f"'{self.name}' has a test part, so no rows can be held out for it.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.x.shape[1:]
        return channels, height, width

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def training_rows(self) -> npt.NDArray[np.int64]:
        """The rows of `x` that are for training."""
        rows = np.arange(len(self.y))
        return np.delete(rows, self.held_out) if len(self.held_out) else rows

    def pooled(self) -> Dataset:
        """Training images and, behind them, test images as one set to be dealt to clients, with no
        test set left."""
        if len(self.held_out):
            return dataclasses.replace(self, held_out=np.empty(0, np.int64))
        if len(self.x_test) == 0:
            return self
        return dataclasses.replace(
            self,
            x=Joined(self.x, self.x_test),
            y=np.concatenate([self.y, self.y_test]),
            x_test=empty_like(self.x),
            y_test=np.empty(0, np.int64),
        )

    def normalised(self, scale: str) -> Dataset:
        """The same images on another scale: `unit` leaves bytes at 0..1, `half` puts them at -1..1,
        `pixel` centres and scales every pixel by itself, `standard` is how data sets come.

        S1 adds 0.001 to the spread of a pixel of bytes (0..255), as some are the same in all
        images.
        """
        if scale not in SCALES:
            raise unknown("scale", scale, SCALES)
        if scale == "standard":
            return self
        if scale == "pixel":
            means, stds = pixel_scale(self.x, self.training_rows if len(self.held_out) else None)
            if self.x.dtype == np.uint8:
                stds = tuple(s + 0.001 / unit_of(self.x.dtype) for s in stds)
        else:
            mean, std = (0.0, 1.0) if scale == "unit" else (0.5, 0.5)
            means, stds = (mean,) * self.shape[0], (std,) * self.shape[0]
        return dataclasses.replace(self, mean=means, std=stds)


def measured(
    name: str,
    x: Images,
    y: np.ndarray,
    x_test: Images,
    y_test: np.ndarray,
    classes: Sequence[str],
    table: bool = False,
) -> Dataset:
    """A data set whose mean and std are measured on its training images, of a `table` column by
    column."""
    _check_images(f"The training {noun(x.shape)} of '{name}'", x)  # bad images have no mean
    mean, std = (pixel_scale if table else channel_scale)(x)
    y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    return Dataset(name, x, y, x_test, y_test, tuple(classes), mean, std)


def resized(data: Dataset, side: int) -> Dataset:
    """The same images with so many pixels a side: smaller ones get a black (0) frame, of larger
    ones squares of pixels are averaged.

    >>> pixels = np.arange(64.0).reshape(1, 8, 8).repeat(10, 0)
    >>> resized(from_arrays(pixels, list("ababababab")), 4).x[0, 0, 0].tolist()
    [4.5, 6.5, 8.5, 10.5]
    """
    height, width = data.shape[1:]
    if height != width or (side < height and height % side):
        raise FedloomError(
            f"size={side} does not fit '{data.name}', whose images have {height}×{width} pixels: "
            "only square images can be padded, or shrunk by a whole factor."
        )
    if side == height:
        return data
    x, x_test = (_to_side(np.asarray(images), side) for images in (data.x, data.x_test))
    mean, std = channel_scale(x)
    return dataclasses.replace(data, x=x, x_test=x_test, mean=mean, std=std)


def _to_side(images: np.ndarray, side: int) -> np.ndarray:
    before = images.shape[-1]
    if side > before:
        frame = (side - before) // 2, side - before - (side - before) // 2
        return np.pad(images, ((0, 0), (0, 0), frame, frame))
    factor = before // side
    squares = images.reshape(*images.shape[:2], side, factor, side, factor).mean((3, 5))
    whole = images.dtype != np.float32
    return np.asarray(np.rint(squares) if whole else squares).astype(images.dtype)


def from_arrays(
    x: npt.ArrayLike,
    y: Labels,
    x_test: npt.ArrayLike | None = None,
    y_test: Labels | None = None,
    name: str = "arrays",
    test_share: float = 0.2,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set from plain arrays; without a test set, a stratified share is held out.

    Images are (N, C, H, W) or (N, H, W), a table or sequences of tokens (N, F). Bytes and other
    integers are kept; any other number becomes float32. Labels may be anything hashable but
    fractions, and are numbered in sorted order; if `classes` are given, they are numbers of these.

    >>> data = from_arrays(np.eye(10), list("ababababab"))
    >>> data.shape, data.classes, len(data.x), len(data.held_out)
    ((1, 1, 10), ('a', 'b'), 10, 2)
    """
    images, labels = as_images("The data", x), _as_labels(y)
    table = np.ndim(x) == 2
    if x_test is not None and y_test is not None:
        test_images, test_labels = as_images("The test data", x_test), _as_labels(y_test)
        if images.dtype != test_images.dtype:
            common = np.result_type(images.dtype, test_images.dtype)
            common = common if common.kind == "i" else np.dtype(np.float32)
            images, test_images = images.astype(common), test_images.astype(common)
        numbers, names = _numbered([*labels, *test_labels], classes)
        cut = len(labels)
        return measured(name, images, numbers[:cut], test_images, numbers[cut:], names, table)
    if x_test is not None or y_test is not None:
        raise FedloomError("Give both x_test and y_test, or neither.")
    return hold_out(name, images, *_numbered(labels, classes), test_share, seed, table)


def hold_out(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: Sequence[str],
    test_share: float,
    seed: int,
    table: bool = False,
) -> Dataset:
    """A data set without a test part, of which a stratified share is held out for one. Rows stay
    where they are, so that a partition may name them."""
    _check_images(f"The {noun(x.shape)} of '{name}'", x)
    _check_labels(f"The labels of '{name}'", y, len(x), len(classes))
    held_out = np.flatnonzero(stratified(y, test_share, seed))
    rows = np.delete(np.arange(len(y)), held_out)
    mean, std = (pixel_scale if table else channel_scale)(x, rows)
    nobody = np.empty(0, np.int64)
    return Dataset(
        name, x, y.astype(np.int64), empty_like(x), nobody, tuple(classes), mean, std, held_out
    )


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
    images = _narrow(images)
    if images.ndim == 2:
        return images[:, None, None, :]
    if images.ndim == 3:
        return images[:, None, :, :]
    if images.ndim == 4:
        _check_order(what, images.shape)
    return images


def _narrow(x: np.ndarray) -> np.ndarray:
    """Bytes stay bytes and integers integers, which may be tokens; the rest becomes float32."""
    if x.dtype == np.uint8:
        return x
    limits = np.iinfo(np.int32)
    if x.dtype.kind in "iu" and limits.min <= x.min(initial=0) <= x.max(initial=0) <= limits.max:
        return x.astype(np.int32)
    with np.errstate(over="ignore"):  # what overflows is refused as infinite
        return x.astype(np.float32)


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
    try:
        labels = np.asarray(y)
    except ValueError as e:  # ragged lists
        raise FedloomError(f"Labels must be one per sample: {e}") from None
    if labels.ndim != 1:
        hint = " Turn one-hot rows into numbers with y.argmax(1)." if labels.ndim == 2 else ""
        raise FedloomError(f"Labels must be one per sample, not of shape {labels.shape}.{hint}")
    return list(labels.tolist())


def _numbered(
    labels: Sequence[Hashable], classes: Sequence[str] | None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    if classes is None:
        return _number(labels)
    numbers = [_whole(label) for label in labels]
    if odd := [n for n in numbers if not isinstance(n, int | np.integer)]:
        raise FedloomError(f"Labels must be numbers of the named classes, not {odd[0]!r}.")
    return np.array(numbers, np.int64), tuple(classes)


def _number(labels: Sequence[Hashable]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    labels = [_whole(label) for label in labels]
    try:
        distinct = set(labels)
    except TypeError as e:
        raise FedloomError(f"Labels must be numbers or names, one per sample: {e}.") from None
    if any(label != label for label in distinct):  # only NaN differs from itself
        raise FedloomError("Some labels are NaN. Remove these rows or give them a label.")
    fraction = next((label for label in labels if isinstance(label, float | np.floating)), None)
    if fraction is not None:
        raise FedloomError(
            f"Some labels are not whole numbers, such as {fraction:g}: fedloom does "
            "classification, so it needs a class for every sample, not a continuous target. Bin "
            "the values into classes (np.digitize), or give class names as text."
        )
    if len(labels) >= _CLASSES_CHECKED and len(distinct) > len(labels) / 2:
        raise FedloomError(
            f"There are {len(distinct)} different labels for {len(labels)} samples: labels are "
            "classes, and each class should have several samples; regression targets are not "
            "supported. Bin the values into classes (np.digitize), or give more samples per "
            "class."
        )
    try:
        ordered = sorted(distinct)  # type: ignore[type-var]
    except TypeError:  # kinds that do not compare, such as 3 and "three"
        ordered = sorted(distinct, key=lambda label: (type(label).__name__, repr(label)))
    number = {label: i for i, label in enumerate(ordered)}
    numbers = np.fromiter((number[label] for label in labels), np.int64, len(labels))
    return numbers, tuple(str(label) for label in ordered)


def _whole(label: Hashable) -> Hashable:
    """Classes 0.0 and 1.0 are the classes 0 and 1."""
    if isinstance(label, float | np.floating) and float(label).is_integer():
        return int(label)
    return label


def _look(x: Images) -> str:
    return f"{'x'.join(map(str, x.shape[1:]))} {x.dtype}"


def _check_images(what: str, x: Images) -> None:
    if len(x.shape) != 4 or 0 in x.shape[1:]:
        raise FedloomError(
            f"{what} have shape {tuple(x.shape)}; give (N, C, H, W), (N, H, W) or (N, F)."
        )
    if x.dtype not in (np.uint8, np.int32, np.float32):
        raise FedloomError(f"{what} have type {x.dtype}; give uint8, int32 or float32.")
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        for start, rows in chunks(x):
            bad = np.flatnonzero(~np.isfinite(rows).all(axis=(1, 2, 3)))
            if len(bad):
                raise FedloomError(
                    f"{what} contain NaN or infinity, first in {noun(x.shape)[:-1]} "
                    f"{start + bad[0]}."
                )


def _check_labels(what: str, y: np.ndarray, rows: int, classes: int) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise FedloomError(f"{what} must be a row of integers, not {y.ndim}-D {y.dtype}.")
    if len(y) != rows:
        raise FedloomError(f"{what} number {len(y)}, but there are {rows} samples.")
    if len(y) and y.min() < 0:
        raise FedloomError(f"{what} go down to {y.min()}; labels start at 0.")
    if len(y) and y.max() >= classes:
        raise FedloomError(f"{what} go up to {y.max()}, but there are {classes} classes (from 0).")
