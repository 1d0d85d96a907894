"""FedAvgM (Hsu et al. 2019): FedAvg whose server steps with momentum."""

from dataclasses import dataclass

import torch
from pydantic import Field

import fedloom
from fedloom.local import SGD
from fedloom.mix import Average, Gathering, Mixed


@dataclass(frozen=True)
class ServerMomentum(Average):
    """v ← β v + (average − w);  w ← w + v, for trained weights; batch statistics are averaged."""

    beta: float = 0.9
    memory = ("velocity",)

    def combine(self, g: Gathering) -> Mixed:
        new, n = super().combine(g).shared, g.layout.trainable
        before = g.memory["velocity"].get(0, {"v": torch.zeros(n)})["v"]
        velocity = self.beta * before + new[:n] - g.shared[:n]
        new[:n] = g.shared[:n] + velocity
        return Mixed(shared=new, memory={"velocity": {0: {"v": velocity}}})


class FedAvgM(fedloom.MethodOptions):
    """FedAvg with server momentum β; β = 0 is FedAvg."""

    name = "fedavgm"
    family = "example"
    source = "Hsu et al. 2019"

    beta: float = Field(0.9, ge=0, lt=1, description="server momentum")

    def build(self) -> fedloom.Method:
        return fedloom.Method(local=SGD(), mix=ServerMomentum(beta=self.beta))
