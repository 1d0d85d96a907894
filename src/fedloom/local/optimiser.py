"""The optimiser that all local rules share: SGD on flat rows, one fused update per step.

It works on one row or on a matrix of rows (a client each), and equals `torch.optim.SGD` with
`clip_grad_norm_` before it. Momentum starts anew each round: a client's optimiser is not state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedloom.errors import FedloomError, nearest

SCHEDULES = "constant | cosine[:FLOOR] | step:EVERY,FACTOR | exp:FACTOR"


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each round, as a factor of the first.

    >>> [Schedule("step:2,0.1").factor(t, 5) for t in range(1, 5)]
    [1.0, 1.0, 0.1, 0.1]
    """

    spec: str = "constant"

    def __post_init__(self) -> None:
        self.factor(1, 1)

    def factor(self, round: int, rounds: int) -> float:
        kind, _, text = self.spec.partition(":")
        try:
            args = [float(a) for a in text.split(",")] if text else []
            if not all(map(math.isfinite, args)):
                raise ValueError
            match kind, args:
                case "constant", []:
                    return 1.0
                case "cosine", ([] | [_]) if all(a >= 0 for a in args):
                    floor = args[0] if args else 0.0
                    angle = math.pi * (round - 1) / max(rounds, 1)
                    return floor + (1 - floor) * (1 + math.cos(angle)) / 2
                case "step", [every, factor] if every >= 1 and factor > 0:
                    return factor ** ((round - 1) // every)
                case "exp", [factor] if factor > 0:
                    return factor ** (round - 1)
        except ValueError:
            pass
        hint = nearest(kind, ("constant", "cosine", "step", "exp"))
        hint = "" if kind in hint.split("'") else hint
        raise FedloomError(
            f"'{self.spec}' is not a learning-rate schedule. {hint}Valid: {SCHEDULES}, with "
            "factors above 0."
        )


@dataclass(frozen=True)
class Optimiser:
    """SGD with momentum, weight decay and gradient-norm clipping."""

    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def step(self, weights: Tensor, grad: Tensor, velocity: Tensor | None) -> Tensor | None:
        """Update `weights` in place (a vector, or a row per client); returns the new velocity."""
        if self.clip is not None:
            norm = grad.norm(dim=-1, keepdim=True)
            grad = grad * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.weight_decay:
            grad = grad.add(weights, alpha=self.weight_decay)
        if self.momentum:
            velocity = grad.clone() if velocity is None else velocity.mul_(self.momentum).add_(grad)
            grad = velocity
        weights.add_(grad, alpha=-self.lr)
        return velocity
