"""A data set: images, labels, class names and the scale that normalises a batch.

What a user gives is checked here, once, so that all other code can trust it. A `Dataset` knows
nothing of clients: `partition` decides who holds what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from fedloom.data.labels import Given, Labels, as_task, plain, read_labels, scaled
from fedloom.errors import FedloomError, unknown
from fedloom.streams import stream
from fedloom.tasks import AUTO, CLASSES, Binary, Classification, Task

__all__ = ["Dataset", "Images", "as_images", "from_arrays", "hold_out", "measured", "resized",
           "stratified"]  # fmt: skip

SCALES = ("standard", "unit", "pixel", "half")


@dataclass(frozen=True)
class Dataset:
    """Images (N, C, H, W), labels, and the scale that normalises a batch.

    `task` says what labels are: classes 0..n_classes-1 unless something else is given. `classes`
    are the names of a model's outputs: of classes, labels, values or tokens.

    A network is fed `(x / 255 - mean) / std` for uint8 images and `(x - mean) / std` for others,
    channel by channel; there may be a mean and std for every pixel instead, as tables (1, 1, F)
    have them for every column. Rows are in the order of the user's file. Where that has no test
    part, `held_out` are the rows of `x` that stand in for one. `columns` hold what else is known of
    every row (those of `x`, then those of `x_test`), such as its user; models don't see them.
    `features` names the columns of a table; `tokens` is how many different tokens there are, where
    the data is text.
    """

    name: str
    x: Images
    y: np.ndarray
    x_test: Images
    y_test: np.ndarray
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    held_out: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    task: Task = CLASSES
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.task == CLASSES:
            object.__setattr__(self, "task", as_task("auto", len(self.classes)))
        if self.task.outputs != len(self.classes):
            raise FedloomError(
                f"'{self.name}' names {len(self.classes)} of {self.task.outputs} outputs."
            )
        if len(self.x) == 0:
            raise FedloomError(f"Data set '{self.name}' has no training {noun(self.x.shape)}.")
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            _check_images(f"The {part} {noun(x.shape)} of '{self.name}'", x)
            _check_labels(f"The {part} labels of '{self.name}'", y, len(x), self.task, x.shape[1:])
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
    def strata(self) -> npt.NDArray[np.int64]:
        """The class of every row of `x`; one class for all if the task has none."""
        return self.y if self.task.by_class else np.zeros(len(self.y), np.int64)

    @property
    def n_strata(self) -> int:
        return self.n_classes if self.task.by_class else 1

    @property
    def training_rows(self) -> npt.NDArray[np.int64]:
        """The rows of `x` that are for training."""
        rows = np.arange(len(self.y))
        return np.delete(rows, self.held_out) if len(self.held_out) else rows

    def pooled(self) -> Dataset:
        """Training images followed by test images, as one set to be dealt to clients, with no test
        set left."""
        if len(self.held_out):
            return dataclasses.replace(self, held_out=np.empty(0, np.int64))
        if len(self.x_test) == 0:
            return self
        return dataclasses.replace(
            self,
            x=Joined(self.x, self.x_test),
            y=np.concatenate([self.y, self.y_test]),
            x_test=empty_like(self.x),
            y_test=self.y_test[:0],
        )

    def finding(self, positive: str) -> Dataset:
        """The same two classes, with this one second: sensitivity is of it."""
        if self.task.name != Binary.name:
            raise FedloomError(
                f"data_options.positive={positive} is for two classes, and the task of "
                f"'{self.name}' is {self.task.name}. Leave it out."
            )
        if positive not in self.classes:
            raise unknown("class", positive, self.classes)
        if positive == self.classes[1]:
            return self
        return dataclasses.replace(
            self, y=1 - self.y, y_test=1 - self.y_test, classes=self.classes[::-1]
        )

    def learning(self, task: str) -> Dataset:
        """The same data for the named task, if its labels fit; two classes may also be learned as
        plain classification."""
        if task in (AUTO, self.task.name):
            return self
        if not self.task.by_class or task not in (Classification.name, Binary.name):
            raise FedloomError(
                f"task={task} does not go with '{self.name}', whose labels are made for "
                f"{self.task.name}. Leave --task out, or give other data."
            )
        made = dataclasses.replace(as_task(task, self.n_classes), own_loss=self.task.own_loss)
        return dataclasses.replace(self, task=made)

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
    task: Task = CLASSES,
) -> Dataset:
    """A data set whose mean and std are measured on its training images, of a `table` column by
    column."""
    _check_images(f"The training {noun(x.shape)} of '{name}'", x)  # bad images have no mean
    mean, std = (pixel_scale if table else channel_scale)(x)
    if y.dtype != np.float32:
        y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    task = scaled(task, y)
    return Dataset(name, x, y, x_test, y_test, tuple(classes), mean, std, task=task)


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
    y: Given,
    x_test: npt.ArrayLike | None = None,
    y_test: Given | None = None,
    name: str = "arrays",
    test_share: float = 0.2,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    task: str = "auto",
    names: Sequence[str] = (),
) -> Dataset:
    """A data set from plain arrays; without a test set, a stratified share is held out.

    Images are (N, C, H, W) or (N, H, W), a table or sequences of tokens (N, F). Bytes and other
    integers are kept; any other number becomes float32. The `task` decides what labels are
    (`labels.py`): classes may be anything hashable, and are numbered in sorted order; if `classes`
    are given, labels are numbers of these. `names` are those of several labels or values.

    >>> data = from_arrays(np.eye(10), list("ababababab"))
    >>> data.shape, data.classes, len(data.x), len(data.held_out)
    ((1, 1, 10), ('a', 'b'), 10, 2)
    """
    images, labels = as_images("The data", x), plain(y)
    table = np.ndim(x) == 2
    shape, whole = images.shape[1:], images.dtype.kind in "iu"

    def read(given: Given) -> Labels:
        return read_labels(given, task=task, classes=classes, names=names, shape=shape, whole=whole)

    if x_test is not None and y_test is not None:
        test_images, test_labels = as_images("The test data", x_test), plain(y_test)
        if images.dtype != test_images.dtype:
            common = np.result_type(images.dtype, test_images.dtype)
            common = common if common.kind == "i" else np.dtype(np.float32)
            images, test_images = images.astype(common), test_images.astype(common)
        cut = len(labels)
        found = read(_behind(labels, test_labels))
        parts = found.y[:cut], test_images, found.y[cut:]
        return measured(name, images, *parts, found.classes, table, found.task)
    if x_test is not None or y_test is not None:
        raise FedloomError("Give both x_test and y_test, or neither.")
    found = read(labels)
    return hold_out(name, images, found.y, found.classes, test_share, seed, table, found.task)


def _behind(first: np.ndarray | list[Any], second: np.ndarray | list[Any]) -> Any:
    """Labels of two parts, concatenated."""
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    shapes = [np.shape(labels)[1:] for labels in (first, second)]
    if shapes[0] != shapes[1]:
        raise FedloomError(
            f"Training and test labels differ: they have shape {shapes[0]} and {shapes[1]}."
        )
    return np.concatenate([first, second])


def hold_out(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: Sequence[str],
    test_share: float,
    seed: int,
    table: bool = False,
    task: Task = CLASSES,
) -> Dataset:
    """A data set without a test part, of which a stratified share is held out for one. Rows stay
    where they are, so that a partition may name them."""
    _check_images(f"The {noun(x.shape)} of '{name}'", x)
    if task == CLASSES:
        task = as_task("auto", len(classes))
    _check_labels(f"The labels of '{name}'", y, len(x), task, x.shape[1:])
    strata = y if task.by_class else np.zeros(len(y), np.int64)
    held_out = np.flatnonzero(stratified(strata, test_share, seed))
    rows = np.delete(np.arange(len(y)), held_out)
    mean, std = (pixel_scale if table else channel_scale)(x, rows)
    y = y if y.dtype == np.float32 else y.astype(np.int64)
    return Dataset(
        name, x, y, empty_like(x), y[:0], tuple(classes), mean, std, held_out,
        task=scaled(task, y[rows]),
    )  # fmt: skip


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


def _check_labels(what: str, y: np.ndarray, rows: int, task: Task, shape: Sequence[int]) -> None:
    if len(y) != rows:
        raise FedloomError(f"{what} number {len(y)}, but there are {rows} samples.")
    task.checked(what, y, shape)
