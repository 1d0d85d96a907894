"""Contact statistics of a topology, for one round or many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedloom.topology.base import Contacts, Topology

if TYPE_CHECKING:
    import pandas as pd


def meetings(contacts: Contacts) -> dict[str, float]:
    """Of the nodes there in a round: how many others each meets, the share that meets nobody, the
    pairs that meet, and the groups that are linked among themselves. Nothing with a server."""
    if contacts.edges is None:
        return {}
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    there = contacts.participants if contacts.present is None else contacts.present
    edges = contacts.edges
    position = np.searchsorted(there, edges)
    shape = (len(there), len(there))
    links = coo_matrix((np.ones(len(edges)), (position[:, 0], position[:, 1])), shape=shape)
    degree = np.bincount(position.ravel(), minlength=len(there))
    groups = connected_components(links, directed=False, return_labels=False) if len(there) else 0
    return {
        "degree": float(degree.mean()) if len(there) else 0.0,
        "isolated": float((degree == 0).mean()) if len(there) else 0.0,
        "contacts": len(edges),
        "components": int(groups),
    }


@dataclass(frozen=True)
class ContactReport:
    """Contact statistics of some rounds."""

    nodes: int
    rounds: list[Contacts]

    @staticmethod
    def of(topology: Topology, nodes: int, rounds: int, seed: int = 0) -> ContactReport:
        """What a run of these settings would see."""
        from fedloom.streams import streams_of

        return ContactReport(
            nodes,
            [topology.contacts(t, nodes, nodes, streams_of(seed, t)) for t in range(1, rounds + 1)],
        )

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per round: degree, share of isolated nodes, contacts, components."""
        import pandas as pd

        rows = [{"round": t, **meetings(c)} for t, c in enumerate(self.rounds, 1)]
        return pd.DataFrame(rows)

    @cached_property
    def gaps(self) -> np.ndarray:
        """Inter-contact times: rounds from the end of a contact to the next of the same pair."""
        code = np.concatenate([self._pairs(c) for c in self.rounds])
        when = np.repeat(np.arange(len(self.rounds)), [len(self._pairs(c)) for c in self.rounds])
        order = np.lexsort((when, code))
        same = np.diff(code[order]) == 0
        apart = np.diff(when[order])[same]
        return apart[apart > 1]

    @cached_property
    def met(self) -> float:
        """The share of all pairs that met at least once."""
        every = self.nodes * (self.nodes - 1) / 2
        seen = np.concatenate([self._pairs(c) for c in self.rounds])
        return len(np.unique(seen)) / every if every else 0.0

    def _pairs(self, contacts: Contacts) -> np.ndarray:
        """A number for every pair that meets in a round."""
        if contacts.edges is None:
            return np.empty(0, dtype=np.int64)
        return contacts.edges[:, 0] * self.nodes + contacts.edges[:, 1]
