"""Label skew by degrees: each class is shared out in proportions drawn from Dirichlet(alpha).

Small alpha gives clients with few classes and very different sizes; large alpha nears IID.
(Hsu, Qi and Brown 2019, and most of the literature since.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.data.partition.deal import Dealing, Partitioner, Spec, counts, keep_minimum
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError


def deal(spec: Spec, dealing: Dealing) -> Partition:
    alpha = spec.number("ALPHA", spec.argument, low=0, above=True)
    least = spec.integer("min", spec.options.get("min", 2), low=0)
    if least * dealing.clients > len(dealing.y):
        raise FedloomError(
            f"{dealing.clients} clients with at least {least} samples each need "
            f"{least * dealing.clients} samples; there are {len(dealing.y)}. Use fewer clients "
            "or a smaller min."
        )
    owner = dealing.nobody()
    for label in range(dealing.n_classes):
        members = dealing.members(label)
        shares = _dirichlet(alpha, dealing.clients, dealing.rng)
        owner[members] = np.repeat(np.arange(dealing.clients), counts(shares, len(members)))
    owner, note = keep_minimum(owner, dealing.clients, least, dealing.rng)
    return Partition.of_owners(owner, dealing.clients, note)


def _dirichlet(alpha: float, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A draw from Dirichlet(alpha, …, alpha), by logarithms: at small alpha a gamma draw is 0."""
    logs = np.log(rng.standard_gamma(alpha + 1, n)) + np.log1p(-rng.random(n)) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    return shares


PARTITIONER = Partitioner(
    "dirichlet:ALPHA[,min=N]",
    "each class split by Dirichlet(ALPHA): the smaller, the more skewed",
    deal,
    argument="ALPHA",
    options=("min",),
)
