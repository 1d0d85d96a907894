"""The optimiser that all local rules share, on flat rows: one fused update per step.

It works on one row or on a matrix of rows (a client each), and equals torch's optimiser of the same
name with `clip_grad_norm_` before it. Its state is reset every round or kept by the client between
rounds, as the run says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import FedloomError, nearest, unknown
from fedloom.kinds import Scalar, Values, Weights

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
    """SGD, Adam, AdamW or Adagrad, with weight decay and gradient-norm clipping before them.

    What it remembers between steps is a small dictionary that `memory` makes and `step` updates:
    empty for plain SGD.
    """

    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    kind: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def values(self) -> Values:
        """What it remembers, by name and kind, where a client keeps it between rounds."""
        named = {name: Weights() for name in _MOMENTS[self.kind]}
        if self.kind == "sgd":
            return named if self.momentum else {}
        return named | ({"count": Scalar()} if self.kind in ("adam", "adamw") else {})

    def memory(self, weights: Tensor) -> dict[str, Tensor]:
        """What it remembers before the first step on these weights (a vector, or rows of them)."""
        whole = {name: torch.zeros_like(weights) for name in self.values if name != "count"}
        return whole | ({"count": weights.new_zeros(*weights.shape[:-1], 1)}
                        if "count" in self.values else {})  # fmt: skip

    def step(self, weights: Tensor, grad: Tensor, memory: dict[str, Tensor]) -> None:
        """Update `weights` (a vector, or a row per client) and `memory`, both in place."""
        if self.clip is not None:
            norm = grad.norm(dim=-1, keepdim=True)
            grad = grad * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.weight_decay and self.kind == "adamw":
            weights.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            grad = grad.add(weights, alpha=self.weight_decay)
        if self.kind == "sgd":
            if self.momentum:
                grad = memory["velocity"].mul_(self.momentum).add_(grad)
            weights.add_(grad, alpha=-self.lr)
        elif self.kind == "adagrad":
            total = memory["squares"].addcmul_(grad, grad)
            weights.addcdiv_(grad, total.sqrt().add_(self.eps), value=-self.lr)
        else:
            count = memory["count"].add_(1)
            first = memory["first"].lerp_(grad, 1 - self.beta1)
            second = memory["second"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
            # In double precision: 1 − 0.999 has few digits left in single.
            short, long = ((1 - b ** count.double()).to(grad) for b in (self.beta1, self.beta2))
            scale = (second.sqrt() / long.sqrt()).add_(self.eps)
            weights.sub_(first / scale * (self.lr / short))


#: what each kind remembers for every weight
_MOMENTS = {
    "sgd": ("velocity",),
    "adam": ("first", "second"),
    "adamw": ("first", "second"),
    "adagrad": ("squares",),
}
KINDS = tuple(_MOMENTS)


def parse(
    spec: str,
    lr: float = 0.05,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimiser:
    """The optimiser that a line of text describes.

    >>> parse("adam,beta2=0.99").beta2
    0.99
    """
    kind, *words = (word.strip() for word in spec.split(","))
    if kind not in KINDS:
        raise unknown("optimiser", kind, KINDS)
    allowed = {"sgd": (), "adagrad": ("eps",)}.get(kind, ("beta1", "beta2", "eps"))
    given: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            given[name] = math.nan
        low = given[name] > 0 if name == "eps" else 0 <= given[name] < 1
        if name not in allowed or not low or not given[name] < math.inf:
            bounds = "betas from 0 to below 1, eps above 0"
            takes = f"{', '.join(allowed)} ({bounds})" if allowed else "no constants"
            raise FedloomError(f"optimiser={spec} is not valid: '{word}'. {kind} takes {takes}.")
    return Optimiser(lr, momentum, weight_decay, clip, kind, **given)
