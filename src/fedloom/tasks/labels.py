"""Multi-label: any number of labels holds for a sample, each one yes or no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.base import Kept, Sums, Task, by_owner, ratio, to_numpy
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MultiLabel(Task):
    """The mean binary cross-entropy over labels. F1, precision and recall are over all pairs of a
    sample and a label; `exact` is the share of samples all of whose labels are right."""

    name = "multi-label"
    what = "several labels, each yes or no: F1, precision, recall, accuracy by label, exact matches"
    measures = (Measure("f1", "F1"), Measure("precision"), Measure("recall"),
                Measure("accuracy"), Measure("exact", "exact matches"))  # fmt: skip
    dims = 1

    def in_words(self) -> str:
        return f"one logit per label, (batch, {self.outputs})"

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        return (F.softplus(outputs) - outputs * y).mean(-1)

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        names = ("hits", "false", "missed", "exact")
        return super().nothing(clients) | {name: np.zeros(clients) for name in names}

    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        said, true = outputs > 0, y > 0.5
        each = {"hits": (said & true).sum(-1), "false": (said & ~true).sum(-1),
                "missed": (~said & true).sum(-1), "exact": (said == true).all(-1),
                "loss": self.each(outputs, y)}  # fmt: skip
        found = {name: by_owner(to_numpy(v), who, clients) for name, v in each.items()}
        return found | {"samples": np.bincount(who, minlength=clients)}

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        samples, hits = sums["samples"], sums["hits"]
        wrong = sums["false"] + sums["missed"]
        return {
            "samples": samples,
            "f1": ratio(2 * hits, 2 * hits + wrong),
            "precision": ratio(hits, hits + sums["false"]),
            "recall": ratio(hits, hits + sums["missed"]),
            "accuracy": 1 - ratio(wrong, samples * self.outputs),
            "exact": ratio(sums["exact"], samples),
            "loss": ratio(sums["loss"], samples),
        }

    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        if y.ndim != 2 or y.shape[1] != self.outputs or not np.isin(y, (0, 1)).all():
            raise FedloomError(
                f"{what} must be 0 or 1 for each of {self.outputs} labels, (N, {self.outputs}); "
                f"they have shape {y.shape}."
            )
