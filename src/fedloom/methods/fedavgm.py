"""FedAvgM (Hsu et al. 2019; Reddi et al. 2021): FedAvg with momentum at the server."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import ServerMomentum


@register
class FedAvgM(MethodOptions):
    """v ← βv + Δ, w ← w + ηv, where Δ is the clients' mean update. β = 0 and η = 1 is FedAvg."""

    name = "fedavgm"
    family = "server optimiser"
    source = "Hsu et al. 2019; Reddi et al. 2021"

    beta: float = Field(0.9, ge=0, lt=1, description="β: server momentum")
    server_lr: float = Field(1.0, gt=0, le=1e30, description="η: server learning rate")

    def build(self) -> Method:
        return Method(local=SGD(), mix=ServerMomentum(lr=self.server_lr, beta=self.beta))
