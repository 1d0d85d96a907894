"""How a client learns: local rules, the budget they spend and the optimiser they share."""

from fedloom.local.control import Controlled, MoreauEnvelope, Tethered
from fedloom.local.distil import Codistillation, MaskedSGD, OrderedDropout, SelfDistillation
from fedloom.local.meta import MAML, LearnedRates, MetaSGD, Outer, Reptile
from fedloom.local.optimiser import Optimiser, Schedule
from fedloom.local.rule import (
    Back,
    Batch,
    Budget,
    Context,
    LocalRule,
    Net,
    Params,
    Pull,
    cross_entropy,
    gradient,
)
from fedloom.local.sgd import SGD, FullGradient, Proximal

__all__ = [
    "MAML",
    "SGD",
    "Back",
    "Batch",
    "Budget",
    "Codistillation",
    "Context",
    "Controlled",
    "FullGradient",
    "LearnedRates",
    "LocalRule",
    "MaskedSGD",
    "MetaSGD",
    "MoreauEnvelope",
    "Net",
    "Optimiser",
    "OrderedDropout",
    "Outer",
    "Params",
    "Proximal",
    "Pull",
    "Reptile",
    "Schedule",
    "SelfDistillation",
    "Tethered",
    "cross_entropy",
    "gradient",
]
