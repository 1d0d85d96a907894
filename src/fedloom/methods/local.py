"""Local training only: the lower baseline, without any communication."""

from __future__ import annotations

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Keep


@register
class Local(MethodOptions):
    """Every client trains its own model on its own data and sends nothing. The same clients train
    in each round as in FedAvg with the same participation, so both do the same amount of work."""

    name = "local"
    family = "reference"
    source = "lower baseline"
    fixed = {"topology": None, "faults": "none"}

    def build(self) -> Method:
        return Method(local=SGD(), mix=Keep())
