"""Next-token: at every place of a sequence, the token that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.base import Kept, Sums, Task, by_owner, pixels, ratio, refuse_classes, to_numpy
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NextToken(Task):
    """Cross-entropy at every place. A sample is a sequence; accuracy is the share of tokens that
    were the likeliest, and perplexity e to the mean loss."""

    name = "next-token"
    what = "the token that follows, at every place of a sequence: accuracy, perplexity"
    measures = (Measure("accuracy"), Measure("perplexity", share=False, lower=True))
    dims = 1

    def answers(self, samples: int, shape: Sequence[int]) -> tuple[int, ...]:
        return (samples, int(np.prod(shape)), self.outputs)

    def in_words(self) -> str:
        return f"a logit per token at every place, (batch, places, {self.outputs})"

    def mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(outputs.flatten(0, 1), y.flatten())

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return pixels(outputs, y, -1).mean(-1)

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        return super().nothing(clients) | {"right": np.zeros(clients)}

    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        right = (outputs.argmax(-1) == y).double().mean(-1)
        return {
            "right": by_owner(to_numpy(right), who, clients),
            "loss": by_owner(to_numpy(self.each(outputs, y)), who, clients),
            "samples": np.bincount(who, minlength=clients),
        }

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        samples = sums["samples"]
        loss = ratio(sums["loss"], samples)
        with np.errstate(over="ignore"):
            return {"samples": samples, "accuracy": ratio(sums["right"], samples),
                    "perplexity": np.exp(loss), "loss": loss}  # fmt: skip

    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        if y.ndim != 2 or y.shape[1] != int(np.prod(shape)):
            raise FedloomError(
                f"{what} must be a token for every place of a sequence, (N, {int(np.prod(shape))}),"
                f" not {y.shape}."
            )
        refuse_classes(what, y, self.outputs)
