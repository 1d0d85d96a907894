"""Centralised training: the upper baseline, with all data in one place."""

from __future__ import annotations

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Average
from fedloom.topology import Pooled


@register
class Centralised(MethodOptions):
    """All training data is sent to one learner once; a round is E epochs over all of it."""

    name = "centralised"
    family = "reference"
    source = "upper baseline"
    fixed = {"participation": 1.0, "topology": None, "faults": "none"}

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average(), topology=Pooled())
