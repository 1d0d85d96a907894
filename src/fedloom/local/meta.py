"""Meta-learning rules: learn a model that adapts well, not one that is good as it is.

A step adapts the weights on batches of the support part (the inner steps) and follows the gradient
of the query part's loss, through that adaptation, with respect to where it began (S1 §3.1). The
rules are written for one client, so that every engine can run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    cross_entropy,
    gradient,
    non_negative,
)

SUPPORT, QUERY = "train-support", "train-query"


@dataclass(frozen=True)
class MAML(LocalRule):
    """ŵ = w − α∇L(w; support), then w ← w − β∇_w L(ŵ(w); query); β is the run's learning rate.

    The outer steps are the budget's batches of the query part. Before each of them the inner loop
    takes `inner_steps` batches of the support part, or (None) one pass over it. `first_order` drops
    the second derivatives (FO-MAML).
    """

    alpha: float = 0.01
    inner_steps: int | None = None
    first_order: bool = False

    parts = (SUPPORT, QUERY)
    weighs = QUERY
    differentiates = True

    def __post_init__(self) -> None:
        non_negative("alpha", self.alpha)
        if self.inner_steps is not None and self.inner_steps < 1:
            raise FedloomError(f"inner_steps must be at least 1, not {self.inner_steps}.")

    def plan(
        self, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
    ) -> list[Samples]:
        if not sizes[SUPPORT] or not sizes[QUERY]:
            return []
        return [
            {SUPPORT: self._inner(sizes[SUPPORT], budget, rng), QUERY: batch}
            for batch in budget.batches(sizes[QUERY], rng)
        ]

    def _inner(self, n: int, budget: Budget, rng: np.random.Generator) -> np.ndarray:
        """Batches of one size, a row each; where a pass has a rest, it is filled from its front."""
        size = n if budget.batch is None else min(budget.batch, n)
        steps = self.inner_steps or -(-n // size)
        passes = -(-steps * size // n)
        order = np.concatenate([rng.permutation(n) for _ in range(passes)])
        return np.resize(order, (steps, size))

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        query = data[QUERY]
        adapted = self._adapted(net, params, data[SUPPORT])
        return cross_entropy(net(adapted, query.x), query)

    def _adapted(self, net: Net, params: Params, support: Batch) -> Params:
        weights = {name: value for name, value in params.items() if "/" not in name}
        rates = self._rates(params, weights)
        for batch in support.rows():

            def inner(w: Params, batch: Batch = batch) -> Tensor:
                return cross_entropy(net(w, batch.x), batch)

            grads = gradient(inner, weights, differentiable=not self.first_order)
            weights = {name: w - rates[name] * grads[name] for name, w in weights.items()}
        return weights

    def _rates(self, params: Params, weights: Params) -> Mapping[str, Tensor | float]:
        return dict.fromkeys(weights, self.alpha)


@dataclass(frozen=True)
class MetaSGD(MAML):
    """ŵ = w − α∘∇L(w; support) with a rate of its own for every weight, learned with the weights:
    (w, α) ← (w, α) − β∇_(w,α) L(ŵ; query). All rates start at `alpha`."""

    extras: Mapping[str, float] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "extras", {"alpha": self.alpha})

    def _rates(self, params: Params, weights: Params) -> Mapping[str, Tensor | float]:
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
    """Plain SGD to ŵ, then only a part of the way there: w ← w + ε(ŵ − w) (Nichol et al. 2018)."""

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise FedloomError(f"epsilon must be above 0 and at most 1, not {self.epsilon}.")

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        return Back(row if self.epsilon == 1 else me.row + self.epsilon * (row - me.row))
