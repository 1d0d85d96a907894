"""Initial model for a client with no private part: one that joined late, or never took part.

Methods with private parts have none for a newcomer. These rules say which private parts of others
it may try and how one is chosen; trying, fine-tuning and scoring are the runner's job.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from fedloom.mix import weighted_mean
from fedloom.population import Population

Choice = Literal["only", "best", "vote"]


class Newcomer:
    """The models that a newcomer may try; `choice` says how to choose among several.

    `best`: each is adapted to the support part and the one with the lowest loss on it is taken.
    `vote`: all of them predict, and the class with most votes wins.
    """

    choice: Choice = "only"
    needs_private: bool = False  # others' private parts have to leave them, then

    def candidates(self, shared: Tensor, kept: Population, weights: np.ndarray) -> Tensor:
        """Rows to try, from the shared one, the kept parts and their owners' weights n_i."""
        raise NotImplementedError


class Shared(Newcomer):
    """The shared model, with initial values for the parts that clients keep private."""

    def candidates(self, shared: Tensor, kept: Population, weights: np.ndarray) -> Tensor:
        return shared.unsqueeze(0)


class MeanPart(Newcomer):
    """FedPer: the private parts' average, w_P = Σ (n_i/N) w_P(i)."""

    needs_private = True

    def candidates(self, shared: Tensor, kept: Population, weights: np.ndarray) -> Tensor:
        if not len(kept):
            return shared.unsqueeze(0)
        rows = kept.compose(kept.clients, shared)
        return weighted_mean(rows, weights, shared).unsqueeze(0)


class EveryPart(Newcomer):
    """Every private part that there is, on the shared rest."""

    needs_private = True

    def candidates(self, shared: Tensor, kept: Population, weights: np.ndarray) -> Tensor:
        return kept.compose(kept.clients, shared) if len(kept) else shared.unsqueeze(0)


class BestPart(EveryPart):
    """FedMeta-Per: try every private part, keep the one with the lowest support loss."""

    choice = "best"


class Vote(EveryPart):
    """LG-FedAvg: all private parts with the shared rest, an ensemble that votes."""

    choice = "vote"
