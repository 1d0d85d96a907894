"""Combining predictions instead of models: the size of messages does not depend on the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.errors import FedloomError
from fedloom.kinds import Array
from fedloom.mix.average import weighted_mean
from fedloom.mix.base import Gathering, Mix, Mixed


@dataclass(frozen=True)
class Sharpened(Mix):
    """DS-FL's server (Itahara et al. 2021): the mean of the class probabilities that clients sent
    for every public image, sharpened: softmax(mean / T)."""

    temperature: float = 0.1
    part = "none"
    home = "node"
    keeps = {"targets": Array(dims=("public", "classes"))}
    takes = frozenset({"probabilities"})

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FedloomError(f"temperature must be above 0, not {self.temperature}.")

    def combine(self, g: Gathering) -> Mixed:
        old = g.state["targets"]
        mean = weighted_mean(g.sent["probabilities"], np.ones(len(g.clients)), old)
        return Mixed(state={"targets": torch.softmax(mean / self.temperature, -1)})
