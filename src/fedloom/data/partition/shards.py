"""Shards: the data sorted by label and cut into equal pieces, K random pieces for every client.

The first and best known label skew (McMahan et al. 2017): with K = 2 most clients see two
classes. Classes and sizes per client are not exact; `classes:K` is.
"""

from __future__ import annotations

import numpy as np

from fedloom.data.partition.deal import Dealing, Partitioner, Spec
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError


def deal(spec: Spec, dealing: Dealing) -> Partition:
    k = spec.integer("K", spec.argument, low=1)
    n, shards = len(dealing.y), k * dealing.clients
    if shards > n:
        raise FedloomError(
            f"{k} shards for each of {dealing.clients} clients are {shards}; there are only {n} "
            "samples. Use fewer clients or fewer shards."
        )
    shuffled = dealing.rng.permutation(n)
    by_label = shuffled[np.argsort(dealing.y[shuffled], kind="stable")]
    holder = dealing.rng.permutation(shards) // k
    owner = dealing.nobody()
    owner[by_label] = holder[np.arange(n) * shards // n]
    return Partition.of_owners(owner, dealing.clients)


PARTITIONER = Partitioner(
    "shards:K",
    "data sorted by label and cut into pieces, K random pieces per client",
    deal,
    argument="K",
)
