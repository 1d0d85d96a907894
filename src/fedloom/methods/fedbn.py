"""FedBN (Li et al. 2021): norm layers stay with the clients."""

from __future__ import annotations

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average
from fedloom.newcomer import MeanPart


@register
class FedBN(MethodOptions):
    """FedAvg of everything except norm layers, whose weights and statistics each client keeps: for
    clients whose inputs look different. Needs a model with norm layers."""

    name = "fedbn"
    family = "personal"
    source = "Li et al. 2021"
    defaults = {"model": "conv4"}  # the model for small images has no norms

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average("not norm"), newcomer=MeanPart())
