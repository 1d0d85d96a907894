"""What crosses the line between a client and the server, and nothing else does.

In simulation the messages of a round are gathered in two objects, a line for each client: `Told`
goes down, `Sent` goes up. Both hold the columns of the model that travel and other values
by name. They know nothing of methods, and no data, private column or client state is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Told:
    """What the server tells the participants of a round: the shared columns of the model, and
    values by name. All are told the same, except that a client with a sub-model gets only its
    columns."""

    model: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """What clients send: the columns of the model that travel, which of them each one trained
    (None: all), and values by name. `weights` are n_k, `steps` the steps that were taken."""

    clients: np.ndarray
    model: Tensor
    indexes: tuple[Tensor | None, ...]
    values: Mapping[str, Tensor]
    weights: np.ndarray
    steps: np.ndarray
    accuracy: np.ndarray | None = None

    def only(self, at: np.ndarray) -> Sent:
        """The messages at these positions."""
        if len(at) == len(self.clients):
            return self
        some = torch.from_numpy(at)
        return replace(
            self,
            clients=self.clients[at],
            model=self.model[some],
            indexes=tuple(self.indexes[i] for i in at),
            values={name: value[some] for name, value in self.values.items()},
            weights=self.weights[at],
            steps=self.steps[at],
            accuracy=None if self.accuracy is None else self.accuracy[at],
        )

    @property
    def whole(self) -> bool:
        """Whether nobody trained a sub-model."""
        return all(index is None for index in self.indexes)
