"""How models are combined: averages at a server, and anything else that turns rows into rows."""

from fedloom.mix.average import Average, GradientStep, Keep, weighted_mean
from fedloom.mix.base import Gathering, Mix, Mixed, Traffic
from fedloom.mix.coverage import Coverage
from fedloom.mix.dominating import DominatingSet
from fedloom.mix.gossip import Gossip, PeerAverage, Pull
from fedloom.mix.networks import Networks
from fedloom.mix.probabilities import Sharpened
from fedloom.mix.server_step import Adaptive, ServerMomentum, ServerStep
from fedloom.mix.swap import (
    Alternate,
    Greedy,
    InTurn,
    LeastSimilar,
    OnProbes,
    OnWeights,
    Partners,
    RandomPairs,
    Rotating,
    Swap,
)
from fedloom.mix.variance import ControlledAverage, NormalisedAverage

__all__ = [
    "Adaptive",
    "Alternate",
    "Average",
    "ControlledAverage",
    "Coverage",
    "DominatingSet",
    "Gathering",
    "Gossip",
    "GradientStep",
    "Greedy",
    "InTurn",
    "Keep",
    "LeastSimilar",
    "Mix",
    "Mixed",
    "Networks",
    "NormalisedAverage",
    "OnProbes",
    "OnWeights",
    "Partners",
    "PeerAverage",
    "Pull",
    "RandomPairs",
    "Rotating",
    "ServerMomentum",
    "ServerStep",
    "Sharpened",
    "Swap",
    "Traffic",
    "weighted_mean",
]
