"""One main label for every client, and a little of all others (WAFL, Ochiai et al. 2022).

Client k's main label is k mod C. Of each class, `SHARE` of the samples go evenly to the clients
whose main label it is, and the rest evenly to all others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.data.partition.deal import Dealing, Partitioner, Spec, keep_minimum
from fedloom.data.partition.table import Partition


def deal(spec: Spec, dealing: Dealing) -> Partition:
    share = spec.number("SHARE", spec.argument, low=0)
    if share > 1:
        raise spec.wrong(f"SHARE is {share:g}, but it is at most 1.")
    main_label = np.arange(dealing.clients) % dealing.n_classes
    owner = dealing.nobody()
    for label in range(dealing.n_classes):
        members = dealing.members(label)
        mains, others = np.flatnonzero(main_label == label), np.flatnonzero(main_label != label)
        if len(mains) == 0 or len(others) == 0:
            _deal_evenly(owner, members, np.arange(dealing.clients), dealing.rng)
            continue
        cut = round(share * len(members))
        _deal_evenly(owner, members[:cut], mains, dealing.rng)
        _deal_evenly(owner, members[cut:], others, dealing.rng)
    owner, note = keep_minimum(owner, dealing.clients, 1, dealing.rng)
    return Partition.of_owners(owner, dealing.clients, note)


def _deal_evenly(
    owner: npt.NDArray[np.int64],
    samples: npt.NDArray[np.int64],
    clients: npt.NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    owner[samples] = np.resize(rng.permutation(clients), len(samples))


PARTITIONER = Partitioner(
    "skew:SHARE",
    "client k has SHARE of its part of label k mod C, and a little of the others",
    deal,
    argument="SHARE",
)
