"""FedAvg (McMahan et al. 2017; S0 §2-4-1): train locally, average the weights."""

from __future__ import annotations

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average


@register
class FedAvg(MethodOptions):
    """m = max(⌊C·K⌋, 1) participants train E epochs of SGD from the global weights; then
    w ← Σ (n_k / n) w_k over the participants."""

    name = "fedavg"
    family = "classic"
    source = "McMahan et al. 2017; S0 §2-4-1"

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average())
