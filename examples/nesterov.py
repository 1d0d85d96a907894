"""FedAvg with Nesterov momentum at the server, the outer optimiser of DiLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

import fedloom
from fedloom.kinds import Weights
from fedloom.local import SGD
from fedloom.mix import Gathering, ServerStep


@dataclass(frozen=True)
class Nesterov(ServerStep):
    """v ← βv + Δ,  w ← w + η(Δ + βv), where Δ is the clients' mean update."""

    beta: float = 0.9
    keeps: ClassVar = {"velocity": Weights()}

    def step(self, change: Tensor, g: Gathering) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.beta * g.state["velocity"] + change
        return self.lr * (change + self.beta * velocity), {"velocity": velocity}


class FedNesterov(fedloom.MethodOptions):
    """FedAvg with Nesterov momentum at the server; β = 0 and η = 1 is FedAvg."""

    name = "fednesterov"
    family = "example"
    source = "Douillard et al. 2023"

    beta: float = Field(0.9, ge=0, lt=1, description="β: server momentum")
    server_lr: float = Field(1.0, gt=0, le=1e30, description="η: server learning rate")

    def build(self) -> fedloom.Method:
        return fedloom.Method(local=SGD(), mix=Nesterov(lr=self.server_lr, beta=self.beta))
