"""Labels as a user gives them, and the task that they imply.

`auto` goes by the labels alone, by a fixed rule: names and whole numbers are classes (of two, it is
binary), fractions are values, rows of 0 and 1 are labels that hold or not, a map of classes of the
size of the image is a segmentation, and a row of tokens as long as the sample is what follows at
every place. Ambiguous labels are refused with the settings that decide.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.errors import FedloomError
from fedloom.tasks import (
    Binary,
    Classification,
    MultiLabel,
    NextToken,
    Regression,
    Segmentation,
    Task,
    kind,
)

Given = npt.ArrayLike | Sequence[Hashable]

_LEAST = 20  # samples; fewer may well have as many classes
_MANY = 20  # whole numbers that may be values, where there are few samples of each
_FEW = 5  # samples of a class, below which its number may be a value


@dataclass(frozen=True)
class Labels:
    """Labels as they are stored, the names of a model's outputs, and the task."""

    y: np.ndarray
    classes: tuple[str, ...]
    task: Task


def read_labels(
    y: Given,
    *,
    task: str = "auto",
    classes: Sequence[str] | None = None,
    names: Sequence[str] = (),
    shape: Sequence[int] = (),
    whole: bool = False,
) -> Labels:
    """Labels of samples of `shape`, (C, H, W), whose values are `whole` numbers or not.

    If `classes` are given, labels are numbers of these; `names` are those of several columns.
    """
    known = plain(y)
    if isinstance(known, np.ndarray) and known.ndim == 2 and known.shape[1] == 1:
        known = known[:, 0]
    name = task if task != "auto" else guess(known, shape, whole)
    if isinstance(known, np.ndarray) and known.ndim > 1:
        return _wide(known, name, classes, names)
    flat = known.tolist() if isinstance(known, np.ndarray) else known
    if name == Regression.name:
        return _values(_numbers(flat)[:, None], names or ("value",))
    if name not in (Classification.name, Binary.name):
        raise FedloomError(
            f"task={name} needs {_WANTED[name]}, and the labels are one for each sample. Give them "
            "so, or choose another --task."
        )
    numbers, found = _numbered(flat, classes, asked=task != "auto")
    return Labels(numbers, found, as_task(name if task != "auto" else "auto", len(found)))


def as_task(name: str, classes: int) -> Task:
    """The task for this number of classes."""
    if name == Binary.name and classes != 2:
        raise FedloomError(
            f"task=binary is for two classes, and there are {classes}. Use --task classification."
        )
    two = classes == 2 and name != Classification.name
    return Binary(2) if two else Classification(classes)


_WANTED = {
    MultiLabel.name: "a row of 0 and 1 for each sample, (N, labels)",
    NextToken.name: "a token for every place of a sequence, (N, places)",
    Segmentation.name: "a class for every pixel, (N, height, width)",
}


def guess(y: np.ndarray | list[Hashable], shape: Sequence[int], whole: bool) -> str:
    """The task of these labels, by their kind and shape."""
    if isinstance(y, list) or y.ndim == 1:
        numbers = [v for v in y if isinstance(v, float | np.floating)]
        fraction = any(np.isfinite(v) and not float(v).is_integer() for v in numbers)
        return Regression.name if fraction else Classification.name
    if y.ndim == 3 and y.shape[1:] == tuple(shape[1:]) and y.dtype.kind in "iub":
        return Segmentation.name
    if y.ndim != 2:
        raise FedloomError(
            f"Labels must be one per sample, a row of labels or values, or a class for every "
            f"pixel, not of shape {y.shape} for samples of shape {tuple(shape)}."
        )
    if np.isin(y, (0, 1)).all():
        if (y.sum(1) == 1).all():
            raise FedloomError(
                f"Labels are rows of {y.shape[1]} with a single 1 in each: classes, one-hot, or "
                "several labels of which one holds? Turn one-hot rows into numbers with "
                "y.argmax(1), or say --task multi-label."
            )
        return MultiLabel.name
    if y.dtype.kind == "f" and (y % 1 != 0).any():
        return Regression.name
    if whole and tuple(shape) == (1, 1, y.shape[1]):
        return NextToken.name
    raise FedloomError(
        f"Labels are rows of {y.shape[1]} whole numbers. Say what they are: values (--task "
        "regression) or tokens that follow (--task next-token)."
    )


def plain(y: Given) -> np.ndarray | list[Hashable]:
    """An array of numbers, or a list of anything."""
    if isinstance(y, list | tuple) and not (
        y and all(isinstance(label, list | tuple | np.ndarray) for label in y)
    ):
        return list(y)  # a tuple among others is the name of a class
    try:
        labels = np.asarray(y)
    except ValueError as e:  # ragged lists
        raise FedloomError(f"Labels must be one per sample: {e}") from None
    if labels.ndim == 1:
        return list(labels.tolist())
    if labels.dtype.kind not in "biuf":
        raise FedloomError(f"Labels of shape {labels.shape} must be numbers, not {labels.dtype}.")
    return labels


def _wide(y: np.ndarray, name: str, classes: Sequence[str] | None, names: Sequence[str]) -> Labels:
    """Labels that are more than one number for each sample."""
    if name == Regression.name and y.ndim == 2:
        return _values(y.astype(np.float64), names or [f"value {i}" for i in range(y.shape[1])])
    if name == MultiLabel.name and y.ndim == 2:
        if not np.isin(y, (0, 1)).all():
            raise FedloomError("task=multi-label needs labels of 0 and 1, and some are others.")
        named = tuple(names or [f"label {i}" for i in range(y.shape[1])])
        return Labels(y.astype(np.float32), named, MultiLabel(y.shape[1]))
    cls = kind(name)
    if cls not in (NextToken, Segmentation) or y.ndim != 1 + cls.dims:
        raise FedloomError(
            f"task={name} does not go with labels of shape {y.shape}. "
            + (f"It needs {_WANTED[name]}." if name in _WANTED else "It needs one per sample.")
        )
    if y.dtype.kind == "f" and (y % 1 != 0).any():
        raise FedloomError(f"task={name} needs whole numbers as labels, and some are not.")
    numbers = y.astype(np.int64)
    found = tuple(classes or map(str, range(int(numbers.max(initial=0)) + 1)))
    return Labels(numbers, found, cls(len(found)))


def _values(y: npt.NDArray[np.float64], names: Sequence[str]) -> Labels:
    if not np.isfinite(y).all():
        raise FedloomError(
            "Some labels are NaN or infinite. Remove these rows or give them a value."
        )
    spread = y.std(axis=0)
    lost = (np.abs(y.astype(np.float32) - y).max(axis=0, initial=0) > 1e-3 * spread) & (spread > 0)
    if lost.any():
        at = int(lost.argmax())
        raise FedloomError(
            f"The values of '{names[at]}' are large and close together ({y[:, at].mean():.6g} ± "
            f"{spread[at]:.2g}): as single-precision numbers they would be rounded to one another. "
            "Subtract a constant from them first."
        )
    return Labels(y.astype(np.float32), tuple(names), Regression(y.shape[1]))


def scaled(task: Task, y: np.ndarray) -> Task:
    """A regression that knows the scale of its training values; any other task as it is."""
    if not isinstance(task, Regression):
        return task
    std = y.std(axis=0, dtype=np.float64)
    std[std <= 1e-7 * np.maximum(np.abs(y).max(axis=0, initial=0), 1e-30)] = 1.0  # all the same
    mean = y.mean(axis=0, dtype=np.float64)
    return Regression(task.outputs, task.own_loss, tuple(mean.tolist()), tuple(std.tolist()))


def _numbers(labels: Sequence[Hashable]) -> npt.NDArray[np.float64]:
    odd = next((v for v in labels if not isinstance(v, int | float | np.number)), None)
    if odd is not None:
        raise FedloomError(f"task=regression needs numbers as labels, not {odd!r}.")
    return np.array(labels, dtype=np.float64)


def _numbered(
    labels: Sequence[Hashable], classes: Sequence[str] | None, asked: bool
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    if classes is None:
        return _number(labels, asked)
    numbers = [_whole(label) for label in labels]
    if odd := [n for n in numbers if not isinstance(n, int | np.integer)]:
        raise FedloomError(f"Labels must be numbers of the named classes, not {odd[0]!r}.")
    return np.array(numbers, np.int64), tuple(classes)


def _number(
    labels: Sequence[Hashable], asked: bool
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Classes in sorted order; whole numbers that may well be values, only where `asked` for."""
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
            f"Some labels are not whole numbers, such as {fraction:g}, so they are no classes. "
            "Predict them as values (--task regression), cut them into classes (np.digitize), or "
            "write names of classes as text."
        )
    numeric = all(isinstance(label, int | np.integer) for label in distinct)
    many = numeric and len(distinct) > max(_MANY, len(labels) / _FEW)
    if not asked and len(labels) >= _LEAST and (many or len(distinct) > len(labels) / 2):
        values = "values to predict (--task regression) or " if numeric else ""
        raise FedloomError(
            f"There are {len(distinct)} different labels for {len(labels)} samples. Say what they "
            f"are: {values}classes, of which there should be several samples each (--task "
            "classification)."
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
