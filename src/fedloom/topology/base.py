"""The contract of a topology: who is there this round, and who can talk to whom.

A topology is a pure function of (round, stream): it keeps no history, so that resuming needs no
saved state. It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Stream = Callable[..., np.random.Generator]


@dataclass(frozen=True)
class Contacts:
    """The learners that train this round, and the pairs that meet (None: all meet the server)."""

    participants: np.ndarray
    edges: np.ndarray | None = None


@dataclass(frozen=True)
class Topology:
    """Who takes part. `pools` says that all training data is gathered at one learner first."""

    pools: bool = False
    server: bool = True

    def contacts(self, round: int, clients: int, participants: int, stream: Stream) -> Contacts:
        """Who trains and who meets in `round`, with `participants` of `clients` asked for."""
        raise NotImplementedError
