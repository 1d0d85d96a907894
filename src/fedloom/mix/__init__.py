"""How models combine: averages at a server, and whatever else turns rows into rows."""

from fedloom.mix.average import Average, GradientStep, Keep, weighted_mean
from fedloom.mix.base import Gathering, Mix, Mixed, Traffic
from fedloom.mix.dominating import DominatingSet
from fedloom.mix.gossip import Gossip, PeerAverage, Step

__all__ = [
    "Average",
    "DominatingSet",
    "Gathering",
    "Gossip",
    "GradientStep",
    "Keep",
    "Mix",
    "Mixed",
    "PeerAverage",
    "Step",
    "Traffic",
    "weighted_mean",
]
