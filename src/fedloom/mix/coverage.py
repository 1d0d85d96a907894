"""Averages of sub-models: per element, over those who trained it (S2 eq. 3-4, 3-5).

Published code differs in details that move results; each is a switch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.mix.average import Average, weighted_mean
from fedloom.mix.base import Gathering, Mix, Mixed
from fedloom.mix.gossip import PeerAverage


@dataclass(frozen=True)
class Coverage(Average):
    """An element nobody trained keeps its value; of the others, a mean.

    `weigh`: by samples, or all the same. `by_class`: rows of the classifier count only from clients
    that hold their class. `old_votes`: the server's old value counts as one more client, of mean
    weight.
    """

    weigh: Literal["samples", "equal"] = "samples"
    by_class: bool = False
    old_votes: bool = False

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"classes"}) if self.by_class else frozenset()

    def among_nodes(self) -> Mix:
        if self != Coverage(self.part):
            raise FedloomError(
                "weigh=equal, by_class and old_votes are for a server that averages; nodes that "
                "meet average by samples. Leave them out, or leave the topology out."
            )
        return PeerAverage(self.part)

    def combine(self, g: Gathering) -> Mixed:
        rows, weights = g.rows, g.weights
        indexes = g.indexes or (None,) * len(g.clients)
        if self.weigh == "equal":
            weights = np.where(weights > 0, 1.0, 0.0)
        if self.by_class:
            indexes = tuple(_without(g, i, index) for i, index in enumerate(indexes))
        if self.old_votes:
            rows = torch.cat([rows, g.shared.unsqueeze(0)])
            weights = np.append(weights, weights.mean())
            indexes = (*indexes, None)
        return Mixed(shared=weighted_mean(rows, weights, g.shared, indexes))


def _without(g: Gathering, client: int, index: Tensor | None) -> Tensor:
    """A client's columns, but for the rows of classes that it does not hold."""
    counts = torch.ones(g.class_of.shape, dtype=torch.bool)
    owned = g.class_of >= 0
    counts[owned] = torch.from_numpy(g.classes[client])[g.class_of[owned]]
    return torch.nonzero(counts).flatten() if index is None else index[counts[index]]
