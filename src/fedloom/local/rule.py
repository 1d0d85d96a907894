"""The contract of a local rule: how one client turns a model and its data into a better model.

A rule is written once, for one client, as four small pure functions: which batches it sees
(`plan`), what it minimises on them (`objective`), how a gradient becomes a direction (`direction`)
and what it hands back (`finish`). What it was told and what it has kept, it finds in its `Context`
under the names that it declares. The loop over steps and the optimiser belong to the engine, so the
same rule runs serially, stacked with other clients under `vmap`, in processes or on a device. A
rule must not know which, nor anything of files, methods or other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Values
from fedloom.tasks import CLASSES, Task

Params = Mapping[str, Tensor]
WHOLE = "*"  # the name of all parameters as one flat tensor, for rules that treat them `alike`
#: the samples of one step: positions within each of the client's data parts
Samples = Mapping[str, np.ndarray]


class Net(Protocol):
    """The client's model as a function of its parameters."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The model's output: logits, or values."""
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
    """Images, labels, and the weight of each sample (None: all count; engines that pad give
    weights); `task` says what the labels are."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    held: Tensor | None = None  # per class, whether the client has it; for rules that need it
    at: Tensor | None = None  # positions within the part, where the part is public
    lengths: tuple[int, ...] | None = None  # of several batches, concatenated
    task: Task = CLASSES

    def loss(self, outputs: Tensor) -> Tensor:
        """The task's loss of a model's outputs, the mean over the samples that count."""
        return self.task.loss(outputs, self.y, self.weight)

    @property
    def several(self) -> bool:
        """Whether these are several batches."""
        return self.lengths is not None or self.y.dim() > 1 + self.task.dims

    def rows(self) -> Iterator[Batch]:
        """The batches of a part of which a step names several: concatenated or, from engines that
        pad, along the first axis."""
        if self.lengths is not None:
            parts = zip(self.x.split(self.lengths), self.y.split(self.lengths), strict=True)
            for x, y in parts:
                yield replace(self, x=x, y=y, weight=None, lengths=None)
            return
        for i in range(len(self.y)):
            weight = None if self.weight is None else self.weight[i]
            yield replace(self, x=self.x[i], y=self.y[i], weight=weight)


def side_by_side(batches: Sequence[np.ndarray]) -> np.ndarray:
    """Several batches as rows of a matrix; those that are shorter end in -1.

    >>> side_by_side([np.array([4, 2]), np.array([7])]).tolist()
    [[4, 2], [7, -1]]
    """
    rows = np.full((len(batches), max(map(len, batches))), -1, dtype=np.int64)
    for row, batch in zip(rows, batches, strict=True):
        row[: len(batch)] = batch
    return rows


def counted(step: Samples) -> int:
    """The number of samples of a step."""
    return sum(int((at >= 0).sum()) if at.ndim > 1 else len(at) for at in step.values())


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over the samples of a batch that count, whatever the task."""
    if not batch.task.by_class:
        raise FedloomError(
            f"This rule minimises the cross-entropy of classes, and the task is {batch.task.name}. "
            "Let it minimise batch.loss(outputs), which is the task's own loss."
        )
    return CLASSES.loss(logits, batch.y, batch.weight)


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
    least: int = 1  # a remainder smaller than this joins the batch before it (batch norm needs two)
    support_first: bool = False  # a pass goes over the support part, then over the query part

    def batches(self, n: int, rng: np.random.Generator, first: int = 0) -> list[np.ndarray]:
        """Positions of each batch, freshly shuffled for every pass; the last may be smaller. The
        `first` samples, where there are any, have batches of their own, before all others."""
        if n == 0:
            return []
        spans = [(a, b) for a, b in ((0, first), (first, n)) if a < b]
        ends = [self._ends(b - a) for a, b in spans]
        each = sum(map(len, ends))
        passes = self.epochs if self.steps is None else -(-self.steps // each)
        out: list[np.ndarray] = []
        for _ in range(passes):
            for (a, b), cuts in zip(spans, ends, strict=True):
                order = a + rng.permutation(b - a)
                out += [order[start:stop] for start, stop in cuts]
        return out if self.steps is None else out[: self.steps]

    def _ends(self, n: int) -> list[tuple[int, int]]:
        """Where the batches of n samples start and stop."""
        size = n if self.batch is None else self.batch
        cuts = list(range(size, n, size))
        if cuts and n - cuts[-1] < self.least:
            cuts.pop()
        return list(zip([0, *cuts], [*cuts, n], strict=True))


@dataclass(frozen=True)
class Context:
    """What a rule sees of its client's round besides the data. On the stacked engine, tensors have
    a first axis of clients where `direction` sees them.

    `start` are the trainable weights at the start of the round, `row` the whole model then, buffers
    included; `told` and `kept` hold what the rule declares; `logits(x)` are the trained model's
    logits, for `finish` only.
    """

    start: Tensor
    row: Tensor
    lr: float
    steps: int | Tensor
    told: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    public: Tensor | None = None  # images, for rules that need them
    logits: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Back:
    """What a client ends its round with: the model, and the values it keeps and sends, by name."""

    row: Tensor
    keeps: Mapping[str, Tensor] = field(default_factory=dict)
    sends: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Pull:
    """What a rule adds to every gradient: strength·(w − to) + push, each as long as the weights."""

    strength: float = 0.0
    to: Tensor | None = None
    push: Tensor | None = None

    def added(self, grad: Tensor, weights: Tensor) -> Tensor:
        if self.to is not None:
            grad = grad + self.strength * (weights - self.to)
        return grad if self.push is None else grad + self.push


class LocalRule:
    """How a client learns. Override what differs from plain SGD on the training part.

    `parts` are the client's data parts that a step may name; `weighs` is the part whose size is
    the client's weight n_k. `told`, `keeps` and `sends` name the values that the server tells the
    client besides the model, that the client keeps between rounds, and that it sends besides the
    model; `needs` the facts that it looks at (`classes`: which ones the client holds, in
    `batch.held`; `public`: the public images, in its context and as the part `public`). `extras`
    are columns that the rule learns for every weight, with their initial value (Meta-SGD's rates).

    `probabilities` says, as the end of a sentence, what the rule does with class probabilities:
    such a rule is refused where a task has none ("" where it needs none).

    `differentiates` says that `objective` takes derivatives itself, so the engine must call it on
    functional parameters, and `alike` that it treats all of them the same, whatever their names and
    shapes, so that the engine may give them as one flat tensor, which is faster (it is not
    inherited: a subclass that still does says so again); `narrows` that it also trains narrower
    nets inside its own, one of `widths` in each step; `hands_back` what the model's columns carry
    after `finish`.
    """

    parts: tuple[str, ...] = ("train",)
    weighs: str = "train"
    told: Values = MappingProxyType({})
    keeps: Values = MappingProxyType({})
    sends: Values = MappingProxyType({})
    needs: frozenset[str] = frozenset()
    extras: Mapping[str, float] = {}
    probabilities: str = ""
    differentiates: bool = False
    alike: bool = False
    narrows: bool = False
    hands_back: Literal["weights", "gradients"] = "weights"

    def at(self, round: int) -> LocalRule:
        """The rule of this round, for rules that change over time."""
        return self

    def widths(self, steps: int, capacity: float, rng: np.random.Generator) -> list[float]:
        """For a rule that `narrows`: the width of the narrower net of each step."""
        raise NotImplementedError

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Samples]:
        """The steps of this round: for each, positions within the client's data parts.

        Positions are one batch, or, as rows of a matrix, several (`Batch.rows`); a row that is
        shorter than others ends in -1 (`side_by_side`)."""
        first = sizes.get("train-support", 0)
        return [{"train": batch} for batch in budget.batches(sizes["train"], rng, first)]

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        """The scalar to minimise in one step; `net(params, x)` gives the outputs."""
        return data["train"].loss(net(params, data["train"].x))

    def pull(self, me: Context) -> Pull | None:
        """What is added to all gradients of a round, where that is all that `direction` does: our
        kernels do it inside their steps."""
        return None

    def direction(self, grad: Tensor, weights: Tensor, me: Context) -> Tensor:
        """The gradient to follow, from the objective's and the weights now; by default with what
        `pull` adds."""
        pull = self.pull(me)
        return grad if pull is None else pull.added(grad, weights)

    def passes(self, step: Samples) -> tuple[int, int]:
        """What a step costs: how many samples go forward and back, and for how many of them that
        is differentiated again. Work is counted by it."""
        return counted(step), 0

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        """The result of the round, from the last row and the last gradient."""
        return Back(row)


def non_negative(name: str, value: float) -> float:
    """Refuse a negative constant where a rule is made, before any work begins."""
    if not value >= 0:
        raise FedloomError(f"{name} must be zero or more, not {value}.")
    return value
