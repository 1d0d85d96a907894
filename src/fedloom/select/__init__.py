"""Which part of the model a client trains: the whole, or a sub-model given by its columns."""

from fedloom.select.base import Ask, Last, Select, Selection, Whole
from fedloom.select.channels import Channels
from fedloom.select.depth import Prefix
from fedloom.select.width import ByActivation, ByGradient, Ordered, Random, Rolling, Width

__all__ = [
    "Ask",
    "ByActivation",
    "ByGradient",
    "Channels",
    "Last",
    "Ordered",
    "Prefix",
    "Random",
    "Rolling",
    "Select",
    "Selection",
    "Whole",
    "Width",
]
