"""The contract of a topology: who is there this round, and who can talk to whom.

A topology is a pure function of (round, stream): it keeps no history, so that resuming needs no
saved state. `stream(purpose)` is random by round; `stream(purpose, round=0)` is the same in every
round, for what is drawn once (a fixed graph, the ways that nodes go). It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import numpy as np

Stream = Callable[..., np.random.Generator]

NO_FACTS: Mapping[str, np.ndarray] = MappingProxyType({})
LOST = -1  # in place of the rounds that a message is late


def _nobody() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Contacts:
    """The learners that train this round, and the pairs that meet (None: all meet the server).

    Every pair of `edges` exchanges two messages. `late` says, for all messages from the first to
    the second of a pair and then for all those back, how many rounds late each arrives (None: none
    is), or that it is `LOST`. `forgotten` are nodes that came back without their state; `present`
    are all that could have met somebody (None: those that train).
    """

    participants: np.ndarray
    edges: np.ndarray | None = None
    late: np.ndarray | None = None
    forgotten: np.ndarray = field(default_factory=_nobody)
    present: np.ndarray | None = None

    def messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sender, receiver and lateness of every message, ordered by receiver, then sender."""
        edges = np.empty((0, 2), dtype=np.int64) if self.edges is None else self.edges
        sender = np.concatenate([edges[:, 0], edges[:, 1]])
        receiver = np.concatenate([edges[:, 1], edges[:, 0]])
        late = np.zeros(len(sender), dtype=np.int64) if self.late is None else self.late
        order = np.lexsort((sender, receiver))
        return sender[order], receiver[order], late[order]


@dataclass(frozen=True)
class Topology:
    """Who takes part. `pools` says that all training data is gathered at one learner first;
    `needs` names facts of the clients that it looks at."""

    pools: bool = False
    server: bool = True
    needs: ClassVar[frozenset[str]] = frozenset()

    def contacts(
        self,
        round: int,
        clients: int,
        participants: int,
        stream: Stream,
        facts: Mapping[str, np.ndarray] = NO_FACTS,
    ) -> Contacts:
        """Who trains and who meets in `round`, with `participants` of `clients` asked for; `facts`
        are those that the topology `needs`, a value for each client."""
        raise NotImplementedError
