"""Nodes without a server: a network, its faults, and who trains when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedloom.errors import unknown
from fedloom.returned import returned
from fedloom.topology.base import NO_FACTS, Contacts, Stream, Topology
from fedloom.topology.faults import Faults
from fedloom.topology.network import (
    Complete,
    EdgeList,
    ErdosRenyi,
    Grid,
    Hub,
    Network,
    Ring,
    WattsStrogatz,
    options,
    read,
)
from fedloom.topology.star import Star
from fedloom.topology.trace import Trace
from fedloom.topology.waypoint import Waypoint

NETWORKS: dict[str, type[Network]] = {
    each.name: each
    for each in (Waypoint, Ring, Complete, Hub, Grid, ErdosRenyi, WattsStrogatz, EdgeList, Trace)
}


def network(text: str) -> Network:
    """The network that a line of text describes.

    >>> network("erdos-renyi:0.2"), network("waypoint,area=500").area
    (ErdosRenyi(hops=1, chance=0.2), 500.0)
    """
    head, *words = text.split(",")
    name, colon, argument = head.partition(":")
    cls = NETWORKS.get(name.strip())
    if cls is None:
        raise unknown("topology", name, NETWORKS)
    if cls.argument is None and colon:
        words.insert(0, argument)
    elif colon:
        words.insert(0, f"{cls.argument}={argument}")
    return read(cls, text, options(text, words))


@dataclass(frozen=True)
class Peers(Topology):
    """Nodes that exchange models with those they meet in the round, one meeting after another.

    In the first `self_training` rounds all nodes train on their own; with `alone` off, a node that
    meets nobody in a round does not train in it. Participation below one lets only some nodes,
    drawn anew every round, train and talk. A late message waits for a receiver that does not take
    part in the round in which it arrives, until that one does.
    """

    network: Network = field(default_factory=lambda: network(Waypoint.name))
    faults: Faults = field(default_factory=lambda: Faults.parse("none"))
    self_training: int = 0
    alone: bool = True
    pools: bool = field(default=False, init=False)
    server: bool = field(default=False, init=False)

    def contacts(
        self,
        round: int,
        clients: int,
        participants: int,
        stream: Stream,
        facts: Mapping[str, np.ndarray] = NO_FACTS,
    ) -> Contacts:
        up, back = self.faults.nodes(round, clients, stream)
        drawn = Star().contacts(round, clients, participants, stream).participants
        there = np.zeros(clients, dtype=bool)
        there[drawn] = up[drawn]
        present = np.flatnonzero(there)
        meetings = np.empty((0, 3), dtype=np.int64)
        if round > self.self_training:
            meetings = self.network.meetings(round, clients, stream)
            meetings = returned(self.network, "meetings", meetings, np.ndarray)
            meetings = meetings[there[meetings[:, 1:]].all(axis=1)]
        if not self.alone and round > self.self_training:
            met = np.zeros(clients, dtype=bool)
            met[meetings[:, 1:].ravel()] = True
            there &= met
        late = self.faults.messages(2 * len(meetings), stream)
        forgotten = np.flatnonzero(back & (self.faults.state == "lost"))
        return Contacts(np.flatnonzero(there), meetings, late, forgotten, present)
