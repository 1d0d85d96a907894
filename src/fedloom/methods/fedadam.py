"""FedAdam (Reddi et al. 2021): the server applies the clients' mean update with Adam."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Adaptive


@register
class FedAdam(MethodOptions):
    """m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)Δ², w ← w + ηm/(√v + τ)."""

    name = "fedadam"
    family = "server optimiser"
    source = "Reddi et al. 2021"
    kind: ClassVar[Literal["adam", "yogi"]] = "adam"

    server_lr: float = Field(0.03, gt=0, le=1e30, description="η: server learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="β₁: decay of the mean update")
    beta2: float = Field(0.99, ge=0, lt=1, description="β₂: decay of its square")
    tau: float = Field(1e-3, gt=0, le=1e30, description="τ: added to √v; larger is less adaptive")

    def build(self) -> Method:
        mix = Adaptive(
            lr=self.server_lr, kind=self.kind, beta1=self.beta1, beta2=self.beta2, tau=self.tau
        )
        return Method(local=SGD(), mix=mix)
