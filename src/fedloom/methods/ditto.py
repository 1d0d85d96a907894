"""Ditto (Li et al. 2021): a personal model next to the shared one, tethered to it."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD, Tethered
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average


@register
class Ditto(MethodOptions):
    """FedAvg, plus a second model v on every client that minimises F(v) + (λ/2)‖v − w‖²; the client
    keeps it and is scored with it. λ = 0 is local training next to FedAvg. A newcomer gets the
    shared model."""

    name = "ditto"
    family = "personal"
    source = "Li et al. 2021"

    lam: float = Field(0.1, ge=0, le=1e30, description="λ: strength of the tether")

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average(), own=Tethered(self.lam))
