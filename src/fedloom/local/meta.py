"""Meta-learning rules: learn a model that adapts well, not one that is good as it is.

A step adapts the weights on batches of the support part (the inner steps) and follows the gradient
of the query part's loss, through that adaptation, with respect to where it began (S1 §3.1). There
is one such step a round, on all of the query part, or one for each of its batches. The rules are
written for one client, so that every engine can run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.local.rule import (
    Back,
    Batch,
    Budget,
    Context,
    LocalRule,
    Net,
    Params,
    Samples,
    counted,
    gradient,
    non_negative,
    side_by_side,
)

SUPPORT, QUERY = "train-support", "train-query"
Outer = Literal["round", "batch"]


@dataclass(frozen=True)
class MAML(LocalRule):
    """ŵ = w − α∇L(w; support), then w ← w − β∇_w L(ŵ(w); query); β is the run's learning rate.

    With `outer="round"` the outer loss is the mean of the losses of all query batches, and there is
    one step for each of the budget's epochs (S1, algorithms 1, 5 and 6); with `outer="batch"` every
    query batch is an outer step. Before each step the inner loop takes `inner_steps` batches of the
    support part, or (None) one pass over it. `first_order` drops the second derivatives (FO-MAML).
    """

    alpha: float = 0.01
    inner_steps: int | None = None
    first_order: bool = False
    outer: Outer = "round"

    parts = (SUPPORT, QUERY)
    weighs = QUERY
    differentiates = True
    alike = True

    def __post_init__(self) -> None:
        non_negative("alpha", self.alpha)
        if self.inner_steps is not None and self.inner_steps < 1:
            raise FedloomError(f"inner_steps must be at least 1, not {self.inner_steps}.")

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Samples]:
        if not sizes[SUPPORT] or not sizes[QUERY]:
            return []
        inner = replace(budget, epochs=1, steps=self.inner_steps)
        query = replace(budget, epochs=1, steps=None)
        if self.outer == "batch":
            outer = budget.batches(sizes[QUERY], rng)
        else:
            steps = range(budget.steps or budget.epochs)
            outer = [side_by_side(query.batches(sizes[QUERY], rng)) for _ in steps]
        return [
            {SUPPORT: side_by_side(inner.batches(sizes[SUPPORT], rng)), QUERY: at} for at in outer
        ]

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        query = data[QUERY]
        adapted = self.adapted(net, params, data[SUPPORT])
        if query.several:
            return _mean_loss(net, adapted, list(query.rows()))
        return query.loss(net(adapted, query.x))

    def passes(self, step: Samples) -> tuple[int, int]:
        support = counted({SUPPORT: step[SUPPORT]})
        return counted(step), 0 if self.first_order else support

    @property
    def rate(self) -> float | None:
        """The inner steps' rate; None: every weight has its own."""
        return self.alpha

    def adapted(self, net: Net, params: Params, support: Batch) -> Params:
        """The weights after the inner steps."""
        weights = {name: value for name, value in params.items() if "/" not in name}
        rates = self.rates(params, weights)
        for batch in support.rows():

            def inner(w: Params, batch: Batch = batch) -> Tensor:
                return batch.loss(net(w, batch.x))

            grads = gradient(inner, weights, differentiable=not self.first_order)
            weights = {name: w - rates[name] * grads[name] for name, w in weights.items()}
        return weights

    def rates(self, params: Params, weights: Params) -> Mapping[str, Tensor | float]:
        """The inner steps' rates, by the names of the weights."""
        return dict.fromkeys(weights, self.alpha)


def _mean_loss(net: Net, adapted: Params, batches: Sequence[Batch]) -> Tensor:
    """The mean of the batches' losses, differentiated batch by batch, so that only one batch's
    activations are in memory: what is returned has the value of that mean, and the gradient."""
    losses: list[Tensor] = []
    grads: dict[str, Tensor] = {}
    for batch in batches:

        def loss(weights: Params, batch: Batch = batch) -> Tensor:
            losses.append(batch.loss(net(weights, batch.x)))
            return losses[-1]

        found = gradient(loss, adapted, differentiable=False)
        grads = {name: grads[name] + g if grads else g for name, g in found.items()}
    real = [batch.weight.amax(-1) for batch in batches if batch.weight is not None]
    number = torch.stack(real).sum() if real else len(batches)  # a batch of padding is none
    along = torch.stack([(adapted[name] * g.detach()).sum() for name, g in grads.items()]).sum()
    return (torch.stack([each.detach() for each in losses]).sum() + along - along.detach()) / number


@dataclass(frozen=True)
class MetaSGD(MAML):
    """ŵ = w − α∘∇L(w; support) with a rate of its own for every weight, learned with the weights:
    (w, α) ← (w, α) − β∇_(w,α) L(ŵ; query). All rates start at `alpha`."""

    alike = True
    extras: Mapping[str, float] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "extras", {"alpha": self.alpha})

    @property
    def rate(self) -> float | None:
        return None

    def rates(self, params: Params, weights: Params) -> Mapping[str, Tensor | float]:
        return {name: params[f"alpha/{name}"] for name in weights}


@dataclass(frozen=True)
class LearnedRates(LocalRule):
    """Plain steps whose rates are the α that Meta-SGD learned: w ← w − α∘∇L, with lr = 1."""

    alpha: float = 0.01
    extras: Mapping[str, float] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extras", {"alpha": self.alpha})

    def direction(self, grad: Tensor, weights: Tensor, me: Context) -> Tensor:
        half = grad.shape[-1] // 2  # the weights come first, then their rates
        step = grad[..., :half] * weights[..., half:]
        return torch.cat([step, torch.zeros_like(step)], -1)


@dataclass(frozen=True)
class Reptile(LocalRule):
    """Plain SGD to ŵ, then only part of the way there: w ← w + ε(ŵ − w) (Nichol et al. 2018)."""

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise FedloomError(f"epsilon must be above 0 and at most 1, not {self.epsilon}.")

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        return Back(row if self.epsilon == 1 else me.row + self.epsilon * (row - me.row))
