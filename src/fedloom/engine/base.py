"""The contract of an engine: the same local work on many clients, whoever runs it.

An engine gets a `Task` (what all clients do this round), the clients and the rows they start from,
and returns the rows they end with, in the order of the clients. It knows nothing of methods'
names, servers, files or time. Results must not depend on the number of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset
from fedloom.data.split import Federation
from fedloom.engine.batches import Augment
from fedloom.layout import Layout
from fedloom.local import Budget, LocalRule, Optimiser
from fedloom.select import Select, Whole


@dataclass(frozen=True)
class Setting:
    """What stays the same for a whole run: the model's shape, the data and where it is computed."""

    build: Callable[[], nn.Module]
    layout: Layout
    dataset: Dataset
    federation: Federation
    device: torch.device
    seed: int
    capacities: np.ndarray
    augment: Augment = field(default_factory=Augment)
    extras: tuple[str, ...] = ()  # columns that the local rule adds
    pools: bool = False  # one learner, number 0, trains on everyone's data
    static_samples: int = 5000


@dataclass(frozen=True)
class Task:
    """The local work of one round. `data` maps the rule's parts to other parts than their own."""

    rule: LocalRule
    budget: Budget
    optimiser: Optimiser
    round: int
    select: Select = field(default_factory=Whole)
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What came back, a client each: rows, or sub-rows with the columns that they are."""

    rows: list[Tensor]
    indexes: tuple[Tensor | None, ...]
    loss: np.ndarray
    samples: np.ndarray  # trained on, counting repeats
    steps: np.ndarray
    macs: np.ndarray  # multiply-accumulates spent


@dataclass(frozen=True)
class Scored:
    """Per client: the confusion matrix (true × predicted) and the summed loss."""

    confusion: np.ndarray
    loss: np.ndarray


class Engine(ABC):
    """Runs local work on clients."""

    @abstractmethod
    def train(self, task: Task, clients: np.ndarray, rows: Tensor) -> Trained:
        """Train each client from its row; rows may be one row expanded."""

    @abstractmethod
    def score(self, clients: np.ndarray, rows: Tensor, part: str) -> Scored:
        """Score each client's row on its data part; one expanded row is scored in one pass."""

    @abstractmethod
    def score_global(self, rows: Tensor, clients: np.ndarray) -> Scored:
        """Score each row on the common test set; `clients` are whose rows they are."""

    def close(self) -> None:
        """Let go of workers, if there are any."""
