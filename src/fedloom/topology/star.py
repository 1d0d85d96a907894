"""A server and its participants: the classic star, and its limit where the data moves instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.topology.base import Contacts, Stream, Topology


@dataclass(frozen=True)
class Star(Topology):
    """Each round the server draws its participants, uniformly and without replacement."""

    def contacts(self, round: int, clients: int, participants: int, stream: Stream) -> Contacts:
        if participants >= clients:
            return Contacts(np.arange(clients))
        drawn = stream("participants").choice(clients, size=participants, replace=False)
        return Contacts(np.sort(drawn))


@dataclass(frozen=True)
class Pooled(Topology):
    """All training data is sent to one place once; a single learner trains on it."""

    pools: bool = True

    def contacts(self, round: int, clients: int, participants: int, stream: Stream) -> Contacts:
        return Contacts(np.zeros(1, dtype=np.int64))
