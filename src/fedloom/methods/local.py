"""Local-only training: the lower reference line, where nobody talks to anybody."""

from __future__ import annotations

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Keep


@register
class Local(MethodOptions):
    """Every client trains its own model on its own data and sends nothing. The same clients train
    in each round as in FedAvg with the same participation, so both spend the same work."""

    name = "local"
    family = "reference"
    source = "reference line"
    fixed = {"topology": None, "faults": "none"}

    def build(self) -> Method:
        return Method(local=SGD(), mix=Keep())
