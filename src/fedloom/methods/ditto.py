"""Ditto (Li et al. 2021): a model of one's own beside the shared one, tethered to it."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD, Tethered
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average


@register
class Ditto(MethodOptions):
    """FedAvg, and on every client a second model v that minimises F(v) + (λ/2)‖v − w‖², is kept
    and scored. λ = 0 is local training beside FedAvg; a newcomer has the shared model."""

    name = "ditto"
    family = "personal"
    source = "Li et al. 2021"

    lam: float = Field(0.1, ge=0, le=1e30, description="λ: how strong the tether is")

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average(), own=Tethered(self.lam))
