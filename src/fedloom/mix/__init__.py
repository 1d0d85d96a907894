"""How models combine: averages at a server, and whatever else turns rows into rows."""

from fedloom.mix.average import Average, GradientStep, Keep, weighted_mean
from fedloom.mix.base import Gathering, Mix, Mixed, Traffic
from fedloom.mix.coverage import Coverage

__all__ = [
    "Average",
    "Coverage",
    "Gathering",
    "GradientStep",
    "Keep",
    "Mix",
    "Mixed",
    "Traffic",
    "weighted_mean",
]
