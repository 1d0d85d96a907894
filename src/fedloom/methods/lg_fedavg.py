"""LG-FedAvg (Liang et al. 2020; S1 §3.2.2): private features, a shared head."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import First, Method
from fedloom.methods.registry import FIRST, MethodOptions, register
from fedloom.mix import Average
from fedloom.newcomer import Vote


@register
class LGFedAvg(MethodOptions):
    """FedPer the other way round: clients keep the feature layers and share the head. For a
    newcomer, all private parts vote."""

    name = "lg-fedavg"
    family = "personal"
    source = "Liang et al. 2020; S1 §3.2.2"

    shared: str = Field("head", description="part that is averaged: head, head:K, a layer")
    first: First = Field("initial", description=FIRST)

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average(self.shared), newcomer=Vote(), first=self.first)
