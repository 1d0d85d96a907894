"""Independent and identical: every client gets an equal random share of everything."""

from __future__ import annotations

import numpy as np

from fedloom.data.partition.deal import Dealing, Partitioner, Spec
from fedloom.data.partition.table import Partition


def deal(spec: Spec, dealing: Dealing) -> Partition:
    owner = dealing.nobody()
    owner[dealing.rng.permutation(len(owner))] = np.arange(len(owner)) % dealing.clients
    return Partition.of_owners(owner, dealing.clients)


PARTITIONER = Partitioner("iid", "equal random shares of everything", deal)
