"""Quantity skew: everyone's labels are alike, but some clients have far more samples.

Sizes follow a log-normal law (`sigma` of the logarithm) or Zipf's: the r-th largest client is
proportional to 1 / r**a.
"""

from __future__ import annotations

import numpy as np

from fedloom.data.partition.deal import Dealing, Partitioner, Spec, counts
from fedloom.data.partition.table import Partition
from fedloom.errors import nearest

LEAST = 2  # samples of the smallest client, where there are as many
PARAMETER = {"lognormal": "sigma", "zipf": "a"}


def deal(spec: Spec, dealing: Dealing) -> Partition:
    law = spec.argument
    if law not in PARAMETER:
        raise spec.wrong(f"there is no law '{law}'. {nearest(law, PARAMETER)}".rstrip())
    parameter = PARAMETER[law]
    if foreign := spec.options.keys() - {parameter}:
        raise spec.wrong(f"{law} has the parameter {parameter}, not {foreign.pop()}.")
    strength = spec.number(parameter, spec.options.get(parameter, 1.0), low=0)
    if law == "lognormal":
        shares = np.exp(strength * dealing.rng.standard_normal(dealing.clients))
    else:
        shares = dealing.rng.permutation(np.arange(1.0, dealing.clients + 1) ** -strength)
    sizes = counts(shares, len(dealing.y), least=min(LEAST, len(dealing.y) // dealing.clients))
    owner = dealing.nobody()
    owner[dealing.rng.permutation(len(owner))] = np.repeat(np.arange(dealing.clients), sizes)
    return Partition.of_owners(owner, dealing.clients)


PARTITIONER = Partitioner(
    "quantity:lognormal[,sigma=1] | quantity:zipf[,a=1]",
    "same labels, sizes skewed by a log-normal or Zipf's law",
    deal,
    argument="LAW",
    options=("sigma", "a"),
)
