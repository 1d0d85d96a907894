"""FedAdagrad (Reddi et al. 2021): the server applies the clients' mean update with Adagrad."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Adaptive


@register
class FedAdagrad(MethodOptions):
    """v ← v + Δ², w ← w + ηm/(√v + τ): steps shrink where updates have been large."""

    name = "fedadagrad"
    family = "server optimiser"
    source = "Reddi et al. 2021"

    server_lr: float = Field(0.03, gt=0, le=1e30, description="η: server learning rate")
    beta1: float = Field(0.0, ge=0, lt=1, description="β₁: decay of the mean update")
    tau: float = Field(1e-3, gt=0, le=1e30, description="τ: added to √v; larger is less adaptive")

    def build(self) -> Method:
        mix = Adaptive(lr=self.server_lr, kind="adagrad", beta1=self.beta1, tau=self.tau)
        return Method(local=SGD(), mix=mix)
