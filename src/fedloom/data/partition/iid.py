"""Independent and identical: every client gets an equal random share of everything."""

from __future__ import annotations

import numpy as np

from fedloom.data.partition.deal import Partitioner, Spec, Task
from fedloom.data.partition.table import Partition


def deal(spec: Spec, task: Task) -> Partition:
    owner = task.nobody()
    owner[task.rng.permutation(len(owner))] = np.arange(len(owner)) % task.clients
    return Partition.of_owners(owner, task.clients)


PARTITIONER = Partitioner("iid", "equal random shares of everything", deal)
