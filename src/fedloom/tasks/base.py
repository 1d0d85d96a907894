"""The contract of a task: what a label is, what is minimised, and how a model is scored.

A task is a small object that a data set carries with it. Local rules minimise its loss, engines let
it count while they score, and everything that shows results asks it for its measures. It knows
nothing of clients, methods, engines or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor

#: a user's own: outputs and labels of a batch → a scalar
Loss = Callable[["Tensor", "Tensor"], "Tensor"]
#: what scoring adds up, by client: name → an array whose first axis is the clients
Sums = Mapping[str, np.ndarray]

LOSS = Measure("loss", share=False, lower=True)


@dataclass(frozen=True)
class Kept:
    """What a measure needs of every sample: whose it is (a position), and some values."""

    owner: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Task(ABC):
    """What is learned. `outputs` is how many numbers a model returns: one for each class,
    label or value, of a sample or (next-token, segmentation) of each of its places.

    `by_class` says that each sample is of one class, so that data can be dealt by class, and losses
    masked or distilled by it; `dims` is the number of axes that a label has.
    """

    outputs: int
    own_loss: Loss | None = field(default=None, compare=False)

    name: ClassVar[str]
    what: ClassVar[str]  # one line, for lists
    measures: ClassVar[tuple[Measure, ...]]  # the first is the one that methods are compared by
    by_class: ClassVar[bool] = False
    dims: ClassVar[int] = 0

    @property
    def primary(self) -> Measure:
        return self.measures[0]

    @property
    def tested(self) -> tuple[Measure, ...]:
        """The measures reported for the common test set."""
        return (*self.measures, LOSS)

    @property
    def is_cross_entropy(self) -> bool:
        """Whether its loss is the plain cross-entropy over classes, which kernels compute."""
        return self.by_class and self.own_loss is None

    def answers(self, samples: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a model must return for so many samples of a shape (C, H, W)."""
        return (samples, self.outputs)

    def in_words(self) -> str:
        """The same shape, for errors."""
        return f"one logit per class, (batch, {self.outputs})"

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean loss of a batch, or of the samples of it that count."""
        if self.own_loss is not None:
            return self._own(outputs, y)
        if weight is None:
            return self.mean(outputs, y)
        # A batch that is all padding costs nothing and moves nothing.
        return (self.each(outputs, y) * weight).sum() / weight.sum().clamp(min=1)

    def _own(self, outputs: Tensor, y: Tensor) -> Tensor:
        assert self.own_loss is not None
        try:
            found = _scalar(self.own_loss(outputs, y))
        except FedloomError:
            raise
        except Exception as e:  # a user's function may raise anything
            raise FedloomError(
                f"Your loss failed with {type(e).__name__}: {e}. It is called as loss(outputs, "
                f"labels), here with outputs of shape {tuple(outputs.shape)} and labels of shape "
                f"{tuple(y.shape)} ({y.dtype}), and returns the mean over the batch."
            ) from e
        if outputs.requires_grad and not found.requires_grad:
            raise FedloomError(
                "Your loss does not depend on the outputs in a way that can be differentiated: "
                "compute it with torch from the outputs as they are, without .detach(), .item() or "
                "numpy."
            )
        return found

    def mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return self.each(outputs, y).mean()

    @abstractmethod
    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample; it must run under `vmap`."""

    @abstractmethod
    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        """What these samples add to the scores of the clients that they belong to; with `loss`, the
        sum of their losses, and what tells the number of `samples`."""

    def keep(self, outputs: Tensor, y: Tensor) -> np.ndarray | None:
        """What a measure needs of every sample, if one does."""
        return None

    @abstractmethod
    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        """Of every client: `samples`, the measures and `loss`; NaN where there is nothing to score
        or a measure is not defined."""

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        """The sums before anything was counted."""
        return {"samples": np.zeros(clients, np.int64), "loss": np.zeros(clients)}

    @abstractmethod
    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        """Refuse labels that are not of this task; `shape` is (C, H, W) of a sample."""

    def plain(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"name": self.name, "outputs": self.outputs}


def by_owner(values: np.ndarray, who: np.ndarray, clients: int) -> np.ndarray:
    """Values of samples (N,) or (N, k), added up by whose they are.

    >>> by_owner(np.array([1.0, 2.0, 4.0]), np.array([0, 1, 0]), 2)
    array([5., 2.])
    """
    if values.ndim == 1:
        return np.bincount(who, weights=values, minlength=clients)
    each = [np.bincount(who, weights=column, minlength=clients) for column in values.T]
    return np.stack(each, axis=1)


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, NaN where there is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, a / b, np.nan)


def to_numpy(values: Tensor) -> np.ndarray:
    """Values in double precision, on the CPU."""
    found: np.ndarray = values.double().cpu().numpy()
    return found


def pixels(logits: Tensor, y: Tensor, axis: int) -> Tensor:
    """The cross-entropy of every place; classes are on `axis`, counted from the end."""
    from torch.nn import functional as F

    # By hand, as `vmap` takes F.cross_entropy apart in Python, and imports sympy for that.
    chances = F.log_softmax(logits, axis)
    return -chances.gather(axis, y.unsqueeze(axis)).squeeze(axis)


def _scalar(found: Any) -> Tensor:
    if getattr(found, "shape", None) != ():
        shape = tuple(getattr(found, "shape", ())) or type(found).__name__
        raise FedloomError(
            f"loss= must return one number for a batch, a tensor without axes, not {shape}. Take "
            "the mean over the batch."
        )
    made: Tensor = found
    return made


def refuse_classes(what: str, y: np.ndarray, classes: int) -> None:
    """Refuse labels that are no numbers of classes."""
    if y.dtype.kind not in "iu":
        raise FedloomError(f"{what} must be integers, not {y.dtype}.")
    if y.size and y.min() < 0:
        raise FedloomError(f"{what} go down to {y.min()}; labels start at 0.")
    if y.size and y.max() >= classes:
        raise FedloomError(f"{what} go up to {y.max()}, but there are {classes} classes (from 0).")
