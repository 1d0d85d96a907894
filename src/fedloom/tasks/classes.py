"""Classification: each sample is of one class. With two classes, the scores of a test as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.base import Kept, Sums, Task, pixels, ratio, refuse_classes, to_numpy
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes, by cross-entropy."""

    name = "classification"
    what = "one of several classes: accuracy, precision, recall, F1"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("accuracy"),
        Measure("precision"),
        Measure("recall"),
        Measure("f1", "F1"),
    )
    by_class = True

    @property
    def tested(self) -> tuple[Measure, ...]:
        return (self.primary, super().tested[-1])

    def mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(outputs, y)

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return pixels(outputs, y, -1)

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        empty = np.zeros((clients, self.outputs, self.outputs), np.int64)
        return {"confusion": empty, "loss": np.zeros(clients)}

    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        from torch.nn import functional as F

        losses = F.cross_entropy(outputs, y, reduction="none").double().cpu().numpy()
        cells = (y * self.outputs + outputs.argmax(-1)).cpu().numpy()
        return {
            "confusion": confusion(who, cells, clients, self.outputs),
            "loss": np.bincount(who, weights=losses, minlength=clients),
        }

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        found = sums["confusion"]
        samples = found.sum((1, 2))
        correct = np.trace(found, axis1=1, axis2=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {"samples": samples, "correct": correct, "accuracy": correct / samples,
                    "loss": sums["loss"] / samples}  # fmt: skip

    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        if y.ndim != 1:
            raise FedloomError(f"{what} must be a row of integers, not {y.ndim}-D {y.dtype}.")
        refuse_classes(what, y, self.outputs)


@dataclass(frozen=True)
class Binary(Classification):
    """Two classes, of which the second is the one to find (positive). AUC is that of the difference
    of the two logits; it is not defined where all samples are of one class."""

    name = "binary"
    what = "two classes: accuracy, AUC, sensitivity, specificity"
    measures: ClassVar[tuple[Measure, ...]] = (
        *Classification.measures,
        Measure("auc", "AUC"),
        Measure("sensitivity"),
        Measure("specificity"),
    )

    @property
    def tested(self) -> tuple[Measure, ...]:
        return (*super().tested, *self.measures[-3:])

    def keep(self, outputs: Tensor, y: Tensor) -> np.ndarray | None:
        margin = outputs[:, 1].double() - outputs[:, 0].double()
        return np.stack([to_numpy(margin), to_numpy(y)], axis=1)

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        found = sums["confusion"]
        true = found.sum(2)
        auc = np.full(len(found), np.nan)
        if kept is not None:
            by = np.argsort(kept.owner, kind="stable")
            cuts = np.searchsorted(kept.owner[by], np.arange(len(found) + 1))
            for k, (a, b) in enumerate(pairwise(cuts.tolist())):
                margin, positive = kept.values[by[a:b]].T
                auc[k] = area(margin, positive > 0)
        return super().scores(sums) | {
            "auc": auc,
            "sensitivity": ratio(found[:, 1, 1], true[:, 1]),
            "specificity": ratio(found[:, 0, 0], true[:, 0]),
        }


def confusion(who: np.ndarray, cells: np.ndarray, clients: int, classes: int) -> np.ndarray:
    """Matrices (true × predicted) of clients, from each sample's cell."""
    size = classes * classes
    counted = np.bincount(who * size + cells, minlength=clients * size)
    return counted.reshape(clients, classes, classes)


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve: how often a positive sample scores above a negative one, ties
    counted half. NaN where there is only one kind.

    >>> area(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2  # ties share the mean of their ranks, from 1
    return float((rank[place][positive].sum() - n * (n + 1) / 2) / (n * m))
