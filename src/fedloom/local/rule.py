"""The contract of a local rule: how one client turns a model and its data into a better model.

A rule is written once, for one client, as four small pure functions: which batches it sees
(`plan`), what it minimises on them (`objective`), how a gradient becomes a direction (`direction`)
and what it hands back (`finish`). The walk through the steps and the optimiser are the engine's,
so the same rule runs serially, stacked with other clients under `vmap`, in processes or on a
device. A rule must not know which, nor anything of files, methods or other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.errors import FedloomError

Params = Mapping[str, Tensor]
Step = Mapping[str, np.ndarray]


class Net(Protocol):
    """The client's model as a function of its parameters."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Logits."""
        ...

    @property
    def narrower(self) -> bool:
        """Whether this step has a net that is narrower than the client's own."""
        ...

    def narrow(self, params: Params, x: Tensor) -> Tensor:
        """Logits of that net (`LocalRule.widths`)."""
        ...


@dataclass(frozen=True)
class Batch:
    """Images, labels, and which of them count (None: all; engines that pad give weights)."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    held: Tensor | None = None  # per class, whether the client has it; for rules that ask

    def rows(self) -> Iterator[Batch]:
        """The batches of a part that a step names several of: the first axis counts them."""
        for i in range(len(self.y)):
            weight = None if self.weight is None else self.weight[i]
            yield Batch(self.x[i], self.y[i], weight, self.held)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over the samples of a batch that count."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    losses = F.cross_entropy(logits, batch.y, reduction="none")
    # A batch that is all padding costs nothing and moves nothing.
    return (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def gradient(
    function: Callable[[Params], Tensor], at: Params, *, differentiable: bool = True
) -> dict[str, Tensor]:
    """The gradient of a scalar function, for rules that `differentiate`; by default one that can
    be differentiated again. It works in a plain call and under the engines' `torch.func`."""
    at = {name: t if t.requires_grad else t.detach().requires_grad_() for name, t in at.items()}
    found = torch.autograd.grad(
        function(at),
        list(at.values()),
        create_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(at, found, strict=True))


@dataclass(frozen=True)
class Budget:
    """How much a client trains in a round: `epochs` passes, or exactly `steps` batches."""

    epochs: int = 1
    steps: int | None = None
    batch: int | None = 32  # None: all samples at once (B = ∞)
    least: int = 1  # a rest smaller than this joins the batch before it (batch norm needs two)

    def batches(self, n: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Positions of each batch, freshly shuffled for every pass; the last may be smaller."""
        if n == 0:
            return []
        size = n if self.batch is None else self.batch
        cuts = list(range(size, n, size))
        if cuts and n - cuts[-1] < self.least:
            cuts.pop()
        passes = self.epochs if self.steps is None else -(-self.steps // (len(cuts) + 1))
        out = [batch for _ in range(passes) for batch in np.split(rng.permutation(n), cuts)]
        return out if self.steps is None else out[: self.steps]


class LocalRule:
    """How a client learns. Override what differs from plain SGD on the training part.

    `parts` are the client's data parts that a step may name; `weighs` is the part whose size is
    the client's weight n_k; `extras` are columns the rule adds to every weight, with their initial
    value (Meta-SGD's learned rates); `differentiates` says that `objective` takes derivatives
    itself, so the engine must call it on functional parameters; `sees_classes` that batches tell
    which classes the client holds; `narrows` that it also trains narrower nets inside its own,
    one of `widths` in each step; `sends` is what `finish` returns.
    """

    parts: tuple[str, ...] = ("train",)
    weighs: str = "train"
    extras: Mapping[str, float] = {}
    differentiates: bool = False
    sees_classes: bool = False
    narrows: bool = False
    sends: Literal["weights", "gradients"] = "weights"

    def at(self, round: int) -> LocalRule:
        """The rule of this round, for rules that change over time."""
        return self

    def widths(self, steps: int, capacity: float, rng: np.random.Generator) -> list[float]:
        """For a rule that `narrows`: the width of the narrower net of each step."""
        raise NotImplementedError

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Step]:
        """The steps of this round: for each, positions within the client's data parts.

        Positions are one batch, or, as rows of a matrix, several (`Batch.rows`)."""
        return [{"train": batch} for batch in budget.batches(sizes["train"], rng)]

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch]) -> Tensor:
        """The scalar to minimise in one step; `net(params, x)` gives the logits."""
        return cross_entropy(net(params, data["train"].x), data["train"])

    def direction(self, grad: Tensor, weights: Tensor, anchor: Tensor) -> Tensor:
        """The gradient to follow, from the objective's and the weights now and at the start."""
        return grad

    def finish(self, start: Tensor, row: Tensor, grad: Tensor) -> Tensor:
        """What the client hands back, from its first and last row and its last gradient."""
        return row


def positive(name: str, value: float) -> float:
    """Refuse a negative constant where a rule is made, before any work begins."""
    if not value >= 0:
        raise FedloomError(f"{name} must be zero or more, not {value}.")
    return value
