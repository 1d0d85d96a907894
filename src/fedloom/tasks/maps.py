"""Segmentation: a class for every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.base import Kept, Sums, Task, by_owner, pixels, ratio, refuse_classes, to_numpy
from fedloom.tasks.classes import confusion
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Segmentation(Task):
    """Cross-entropy over pixels. IoU is the mean over the classes that are there or were predicted
    of |there and predicted| / |there or predicted|; accuracy is over pixels."""

    name = "segmentation"
    what = "a class for every pixel: IoU, accuracy by pixel"
    measures = (Measure("iou", "IoU"), Measure("accuracy", "pixel accuracy"))
    dims = 2

    def answers(self, samples: int, shape: Sequence[int]) -> tuple[int, ...]:
        return (samples, self.outputs, *shape[1:])

    def in_words(self) -> str:
        return f"a logit per class for every pixel, (batch, {self.outputs}, height, width)"

    def mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(outputs, y)

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return pixels(outputs, y, -3).mean((-2, -1))

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        empty = np.zeros((clients, self.outputs, self.outputs), np.int64)
        return super().nothing(clients) | {"confusion": empty}

    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        cells = (y * self.outputs + outputs.argmax(-3)).flatten(1).cpu().numpy()
        whose = np.repeat(who, cells.shape[1])
        return {
            "confusion": confusion(whose, cells.reshape(-1), clients, self.outputs),
            "loss": by_owner(to_numpy(self.each(outputs, y)), who, clients),
            "samples": np.bincount(who, minlength=clients),
        }

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        found, samples = sums["confusion"], sums["samples"]
        hits = np.diagonal(found, axis1=1, axis2=2)
        either = found.sum(1) + found.sum(2) - hits
        there = either > 0
        iou = np.where(there, hits / np.maximum(either, 1), 0.0).sum(1)
        return {
            "samples": samples,
            "iou": ratio(iou, there.sum(1)),
            "accuracy": ratio(hits.sum(1), found.sum((1, 2))),
            "loss": ratio(sums["loss"], samples),
        }

    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        if y.ndim != 3 or tuple(y.shape[1:]) != tuple(shape[1:]):
            raise FedloomError(
                f"{what} must be a class for every pixel, (N, {shape[1]}, {shape[2]}), not "
                f"{y.shape}."
            )
        refuse_classes(what, y, self.outputs)
