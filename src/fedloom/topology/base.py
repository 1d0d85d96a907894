"""The contract of a topology: who is present this round, and who can talk to whom, in order of
time.

A topology is a pure function of (round, stream): it keeps no history, so that resuming needs no
saved state. `stream(purpose)` is random by round; `stream(purpose, round=0)` is the same in every
round, for what is drawn once (a fixed graph, the ways that nodes go). It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from fedloom.errors import FedloomError

Stream = Callable[..., np.random.Generator]

NO_FACTS: Mapping[str, np.ndarray] = MappingProxyType({})
LOST = -1  # in place of the rounds that a message is late


def _nobody() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


def pairs(edges: np.ndarray, nodes: int) -> np.ndarray:
    """Links in any order and direction as pairs (a, b) with a < b, each once, sorted.

    >>> pairs(np.array([[2, 1], [1, 2], [0, 0], [0, 2]]), 3).tolist()
    [[0, 2], [1, 2]]
    """
    low, high = edges.min(axis=1), edges.max(axis=1)
    codes = np.unique((low * nodes + high)[low < high])
    return np.stack([codes // nodes, codes % nodes], axis=1)


def stepped(step: int, edges: np.ndarray) -> np.ndarray:
    """Pairs as meetings: rows (step, a, b)."""
    return np.column_stack([np.full(len(edges), step, dtype=np.int64), edges])


@dataclass(frozen=True)
class Contacts:
    """The learners that train this round, and who meets whom and when.

    `meetings` are rows (step, a, b) in the order of time, with steps from 1 on (None: all meet the
    server); pairs alone all meet at one step. Those that meet at a step tell each other what they
    knew before it, in two messages. `late` says, for all messages from the first to the second of a
    meeting and then for all those back, how many rounds late each arrives (None: none is), or that
    it is `LOST`. `refused` are pairs of a node and another whose model of this round it does not
    take. `forgotten` are nodes that came back without their state; `present` are all that could
    have met somebody (None: those that train).
    """

    participants: np.ndarray
    meetings: np.ndarray | None = None
    late: np.ndarray | None = None
    forgotten: np.ndarray = field(default_factory=_nobody)
    present: np.ndarray | None = None
    refused: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))

    def __post_init__(self) -> None:
        if self.meetings is None:
            return
        rows = np.asarray(self.meetings, dtype=np.int64)
        if not rows.size:
            rows = np.empty((0, 3), dtype=np.int64)
        if rows.ndim == 2 and rows.shape[1] == 2:
            rows = stepped(1, rows)
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise FedloomError(
                f"Meetings of shape {rows.shape} are not valid: give rows (step, a, b), or pairs "
                "(a, b) that all meet at one step."
            )
        if len(rows) and (rows[0, 0] < 1 or (np.diff(rows[:, 0]) < 0).any()):
            raise FedloomError(
                "Meetings must be in the order of time, with steps from 1 on: sort the rows "
                "(step, a, b) by step."
            )
        object.__setattr__(self, "meetings", rows)

    @cached_property
    def edges(self) -> np.ndarray | None:
        """The pairs (a, b) with a < b that meet in the round, each once, sorted."""
        if self.meetings is None:
            return None
        met = self.meetings[:, 1:]
        return pairs(met, int(met.max(initial=-1)) + 1)

    def messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step, sender, receiver and lateness of every message, ordered by step, receiver and
        sender."""
        rows = np.empty((0, 3), dtype=np.int64) if self.meetings is None else self.meetings
        step = np.concatenate([rows[:, 0], rows[:, 0]])
        sender = np.concatenate([rows[:, 1], rows[:, 2]])
        receiver = np.concatenate([rows[:, 2], rows[:, 1]])
        late = np.zeros(len(sender), dtype=np.int64) if self.late is None else self.late
        order = np.lexsort((sender, receiver, step))
        return step[order], sender[order], receiver[order], late[order]


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
