"""FedProx (Li et al. 2020; S0 §2-4-2): FedAvg with a proximal term in the local objective."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import Proximal
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average


@register
class FedProx(MethodOptions):
    """FedAvg whose clients minimise F_k(w) + (μ/2)‖w − w_global‖²; μ = 0 is exactly FedAvg."""

    name = "fedprox"
    family = "classic"
    source = "Li et al. 2020; S0 §2-4-2"

    mu: float = Field(0.1, ge=0, allow_inf_nan=False, description="μ: weight of the proximal term")

    def build(self) -> Method:
        return Method(local=Proximal(self.mu), mix=Average())
