"""How a client learns: local rules, the budget they spend and the optimiser they share."""

from fedloom.local.optimiser import Optimiser, Schedule
from fedloom.local.rule import Batch, Budget, LocalRule, Net, Params, cross_entropy
from fedloom.local.sgd import SGD, FullGradient, Proximal

__all__ = [
    "SGD",
    "Batch",
    "Budget",
    "FullGradient",
    "LocalRule",
    "Net",
    "Optimiser",
    "Params",
    "Proximal",
    "Schedule",
    "cross_entropy",
]
