"""A server and its participants: the classic star, and its limiting case in which the data is
pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.topology.base import NO_FACTS, Contacts, Stream, Topology


@dataclass(frozen=True)
class Star(Topology):
    """Each round the server draws its participants, uniformly and without replacement."""

    def contacts(
        self,
        round: int,
        clients: int,
        participants: int,
        stream: Stream,
        facts: Mapping[str, np.ndarray] = NO_FACTS,
    ) -> Contacts:
        if participants >= clients:
            return Contacts(np.arange(clients))
        drawn = stream("participants").choice(clients, size=participants, replace=False)
        return Contacts(np.sort(drawn))


@dataclass(frozen=True)
class DrawnBy(Star):
    """Participants drawn by a fact of the clients: stratified by `capacity`, or with a probability
    proportional to their `samples` or `speed`."""

    by: Literal["capacity", "samples", "speed"] = "capacity"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({self.by})

    def contacts(
        self,
        round: int,
        clients: int,
        participants: int,
        stream: Stream,
        facts: Mapping[str, np.ndarray] = NO_FACTS,
    ) -> Contacts:
        if participants >= clients:
            return Contacts(np.arange(clients))
        rng, known = stream("participants"), facts[self.by]
        if self.by != "capacity":
            chance = np.maximum(known, 1e-12) / np.maximum(known, 1e-12).sum()
            drawn = rng.choice(clients, size=participants, replace=False, p=chance)
            return Contacts(np.sort(drawn))
        # A shuffled list, ordered by capacity, of which every n-th is taken.
        order = rng.permutation(clients)
        order = order[np.argsort(known[order], kind="stable")]
        at = (np.arange(participants) + rng.random()) * clients / participants
        return Contacts(np.sort(order[at.astype(np.int64)]))


@dataclass(frozen=True)
class Pooled(Topology):
    """All training data is sent to one place once; a single learner trains on it."""

    pools: bool = True

    def contacts(
        self,
        round: int,
        clients: int,
        participants: int,
        stream: Stream,
        facts: Mapping[str, np.ndarray] = NO_FACTS,
    ) -> Contacts:
        return Contacts(np.zeros(1, dtype=np.int64))
