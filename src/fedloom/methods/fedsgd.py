"""FedSGD (McMahan et al. 2017; S0 §2-4-1): one full-batch gradient per client and round."""

from __future__ import annotations

from fedloom.local import FullGradient
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import GradientStep


@register
class FedSGD(MethodOptions):
    """Each participant returns the gradient over its whole local data; the server steps
    w ← w − η Σ (n_k / n) g_k. The same as FedAvg with E = 1 and B = ∞."""

    name = "fedsgd"
    family = "classic"
    source = "McMahan et al. 2017; S0 §2-4-1"
    fixed = {
        "epochs": 1,
        "steps": None,
        "batch": "inf",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": None,
        "optimiser": "sgd",
        "optimiser_state": "fresh",
    }

    def build(self) -> Method:
        return Method(local=FullGradient(), mix=GradientStep())
