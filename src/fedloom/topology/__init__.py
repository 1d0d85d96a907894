"""Who can talk to whom in a round."""

from fedloom.topology.base import LOST, Contacts, Topology
from fedloom.topology.faults import Faults
from fedloom.topology.network import Network
from fedloom.topology.peers import NETWORKS, Peers, network
from fedloom.topology.star import DrawnBy, Pooled, Star
from fedloom.topology.waypoint import Waypoint

__all__ = [
    "LOST",
    "NETWORKS",
    "Contacts",
    "DrawnBy",
    "Faults",
    "Network",
    "Peers",
    "Pooled",
    "Star",
    "Topology",
    "Waypoint",
    "network",
]
