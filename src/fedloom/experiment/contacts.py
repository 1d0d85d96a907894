"""The network of a run without a server, made again from its settings: all of it follows from them
and the seed, so nothing has to be stored. Without torch, for pages that only show runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.experiment.settings import Config
from fedloom.streams import streams_of
from fedloom.topology import Contacts, Faults, Peers, network
from fedloom.topology.waypoint import Waypoint


def peers_of(config: Mapping[str, Any]) -> Peers:
    """The network that a run's nodes were in, with its faults."""
    params = config.get("params") or {}
    return Peers(
        network(config.get("topology") or Waypoint.name),
        Faults.parse(config.get("faults") or "none"),
        int(params.get("self_training", 0)),
        bool(params.get("alone", True)),
    )


def contacts_of(peers: Peers, config: Mapping[str, Any], round: int) -> Contacts:
    """Who was there and who met whom in a round."""
    nodes = int(config["clients"])
    asked = Config.model_construct(clients=nodes, participation=config.get("participation", 1.0))
    return peers.contacts(round, nodes, asked.participants, streams_of(int(config["seed"]), round))
