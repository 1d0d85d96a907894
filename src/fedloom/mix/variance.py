"""Averages that correct client drift: SCAFFOLD's, FedNova's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.kinds import Weights
from fedloom.mix.average import weighted_mean
from fedloom.mix.base import Gathering, Mixed
from fedloom.mix.server_step import ServerStep, moved_by


@dataclass(frozen=True)
class ControlledAverage(ServerStep):
    """SCAFFOLD's server: x ← x + η_g · mean(y_i − x), c ← c + |S|/N · mean(Δc_i), as in algorithm 1
    of Karimireddy et al. 2020. Models are weighed by n_k, as in FedAvg; control variates alike."""

    keeps = {"c": Weights()}
    takes = frozenset({"dc"})

    def combine(self, g: Gathering) -> Mixed:
        mixed = super().combine(g)
        alike = np.ones(len(g.clients))
        change = weighted_mean(g.sent["dc"], alike, torch.zeros_like(g.state["c"]))
        return Mixed(
            shared=mixed.shared,
            state={"c": g.state["c"] + len(g.clients) / g.total * change},
        )


@dataclass(frozen=True)
class NormalisedAverage(ServerStep):
    """FedNova (Wang et al. 2020): every client's update is divided by a_k, its effective number of
    steps, and the mean of those is scaled by τ = Σ p_k a_k.

    For SGD a_k is the number of steps; with momentum ρ, a_k = (τ_k − ρ(1 − ρ^τ_k)/(1 − ρ))/(1 − ρ).
    """

    def combine(self, g: Gathering) -> Mixed:
        mixed = super().combine(g)
        moved, share = g.layout.trainable, g.weights / max(g.weights.sum(), 1.0)
        rho = g.momentum
        a = (g.steps - rho * (1 - rho**g.steps) / (1 - rho)) / (1 - rho)
        rates = np.where(g.steps > 0, share * (share @ a) / np.maximum(a, 1), 0.0)
        start = g.shared[:moved].double()
        step = torch.zeros_like(start)
        for row, rate in zip(g.rows, rates, strict=True):
            step.add_(row[:moved].double() - start, alpha=self.lr * float(rate))
        assert mixed.shared is not None
        return Mixed(shared=moved_by(g, step, mixed.shared))
