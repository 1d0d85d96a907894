"""Server steps: the average is a direction to follow, not the result.

Reddi et al. 2021: the clients' mean change Δ is a pseudo-gradient, which an optimiser at the server
follows. Only trainable columns are stepped: batch-norm statistics and other buffers are averaged,
because a step beyond their mean could make variances negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.kinds import Values, Weights
from fedloom.mix.average import Average
from fedloom.mix.base import Gathering, Mixed
from fedloom.returned import returned_pair


@dataclass(frozen=True)
class ServerStep(Average):
    """w ← w + `step`(Δ) on trainable columns, with Δ = average − w; other columns are averaged.

    A subclass names what it keeps in `keeps`, finds it in `g.state`, and returns the step and the
    new state. Columns that nobody trained have Δ = 0.
    """

    lr: float = 1.0

    def step(self, change: Tensor, g: Gathering) -> tuple[Tensor, dict[str, Tensor]]:
        """The step for the mean update Δ of the trainable columns, and the new state."""
        return self.lr * change, {}

    def combine(self, g: Gathering) -> Mixed:
        average = super().combine(g).shared
        assert average is not None
        moved = g.layout.trainable
        found = self.step(average[:moved].double() - g.shared[:moved].double(), g)
        step, state = returned_pair(self, "step", found, Tensor, dict)
        return Mixed(shared=moved_by(g, step, average), state=state)


def moved_by(g: Gathering, step: Tensor, average: Tensor) -> Tensor:
    """Trainable columns moved by `step`, all others averaged. In double precision: the step to the
    average ends there to the bit."""
    moved = g.layout.trainable
    return torch.cat([(g.shared[:moved].double() + step).to(average.dtype), average[moved:]])


@dataclass(frozen=True)
class ServerMomentum(ServerStep):
    """FedAvgM (Hsu et al. 2019): v ← βv + Δ, w ← w + ηv."""

    beta: float = 0.9
    keeps = {"velocity": Weights()}

    def step(self, change: Tensor, g: Gathering) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.beta * g.state["velocity"] + change
        return self.lr * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class Adaptive(ServerStep):
    """FedOpt (Reddi et al. 2021, algorithm 2): m ← β₁m + (1 − β₁)Δ, w ← w + ηm / (√v + τ).

    The kinds differ in v: Adagrad adds Δ² to it, Adam averages Δ² into it, Yogi moves it towards
    Δ² by a step that does not depend on its own size.
    """

    kind: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @property
    def keeps(self) -> Values:  # type: ignore[override]
        return {"mean": Weights(), "squares": Weights(self.tau**2)}

    def step(self, change: Tensor, g: Gathering) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.beta1 * g.state["mean"] + (1 - self.beta1) * change
        v, square = g.state["squares"], change**2
        if self.kind == "adagrad":
            v = v + square
        elif self.kind == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        else:
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        return self.lr * mean / (v.sqrt() + self.tau), {"mean": mean, "squares": v}
