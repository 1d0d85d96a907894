"""Who can talk to whom in a round."""

from fedloom.topology.base import Contacts, Topology
from fedloom.topology.star import Pooled, Star

__all__ = ["Contacts", "Pooled", "Star", "Topology"]
