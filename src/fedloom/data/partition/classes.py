"""Every client holds exactly K classes, each class held by about equally many clients.

Balanced, a class is dealt evenly to its holders. Uneven, their shares are log-normal, which gives
clients of very different sizes; `uneven=s1-mnist` and `uneven=s1-cifar10` come close to the sizes
reported in S1 §4.1.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from fedloom.data.partition.deal import ClassSets, Dealing, Partitioner, Spec, counts
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError

FEW = 8  # samples of each of its classes that a client gets at least, where there are plenty

# sigma, and the share of all samples that is used, for the pooled data and 50 clients of S1 §4.1.
# Client sizes as min, mean, std, max; ours are medians over seeds:
#   MNIST     S1 135, 1398, 1424, 5201   sigma 1.3:  130, 1398, 1149, 5076
#   CIFAR-10  S1 506, 1049,  250, 1986   sigma 0.36: 597, 1050,  252, 1670
S1 = {"s1-mnist": (1.3, 69_909 / 70_000), "s1-cifar10": (0.36, 52_497 / 60_000)}


def deal(spec: Spec, dealing: Dealing) -> Partition:
    k = spec.integer("K", spec.argument, low=1)
    uneven = spec.options.get("uneven", "0")
    if uneven in S1:
        sigma, used = S1[uneven]
    else:
        sigma, used = spec.number("uneven", uneven, low=0), 1.0
    return deal_classes(dealing, k, sigma, used)


def deal_classes(dealing: Dealing, k: int, sigma: float = 0.0, used: float = 1.0) -> Partition:
    """Deal to every client k classes; `sigma` of the log of shares, `used` share of the samples."""
    available = np.bincount(dealing.y, minlength=dealing.n_classes)
    present = np.flatnonzero(available)
    if k > len(present):
        raise FedloomError(f"Clients cannot hold {k} classes: the data has {len(present)}.")
    held = hands(dealing.clients, present, k, dealing.rng, dealing.reserve)
    owner = dealing.nobody()
    for label in present:
        holders = np.flatnonzero((held == label).any(axis=1))
        members = dealing.members(label)[: round(used * available[label])]
        if len(members) < len(holders):
            raise FedloomError(
                f"{len(holders)} clients must hold class {label}, which has {len(members)} "
                "samples. Use fewer clients or fewer classes per client."
            )
        if len(holders):
            shares = np.exp(sigma * dealing.rng.standard_normal(len(holders)))
            least = max(1, min(FEW, len(members) // len(holders) // 4))
            owner[members] = np.repeat(holders, counts(shares, len(members), least))
    return Partition.of_owners(owner, dealing.clients, unused(owner))


def hands(
    count: int,
    classes: npt.NDArray[np.int64],
    k: int,
    rng: np.random.Generator,
    reserve: ClassSets = frozenset(),
    distinct: bool = False,
) -> npt.NDArray[np.int64]:
    """`count` hands of k different classes, each class in about equally many, (count, k).

    Always dealing from the classes with the most cards left keeps their numbers within one of
    each other, or nearly so where a reserved hand has to be passed over. `distinct` hands are
    all different.
    """
    cards = np.full(len(classes), count * k // len(classes))
    cards[rng.permutation(len(classes))[: count * k % len(classes)]] += 1
    barred = set(reserve)
    dealt = np.empty((count, k), np.int64)
    for row in dealt:
        order = np.lexsort((rng.random(len(classes)), -cards))  # ties at random
        for hand in combinations(order.tolist(), k):
            combination = frozenset(classes[list(hand)].tolist())
            if combination not in barred:
                break
        else:
            raise FedloomError(
                f"No combination of {k} classes is left: of {comb(len(classes), k)}, all are "
                "reserved or already used. Use another number of classes or clients."
            )
        row[:] = classes[list(hand)]
        cards[list(hand)] -= 1
        if distinct:
            barred.add(combination)
    return dealt


def reserved(
    classes: npt.NDArray[np.int64], k: int, newcomers: int, rng: np.random.Generator
) -> ClassSets:
    """Combinations of k classes to keep from clients, so that newcomers can bring new ones.

    As many as there are newcomers, up to a third of all, but enough for every class to be in one;
    never more than half, since clients need combinations too.
    """
    if k == 1:  # a reserved class would be held by nobody, and so newcomers could not have it
        return frozenset()
    every = comb(len(classes), k)
    wanted = max(-(-len(classes) // k), min(newcomers, every // 3))
    kept = hands(min(wanted, every // 2), classes, k, rng, distinct=True)
    return frozenset(frozenset(hand) for hand in kept.tolist())


def unused(owner: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """A note on samples that no client holds."""
    left = int(np.count_nonzero(owner < 0))
    return (f"{left} samples are held by no client",) if left else ()


PARTITIONER = Partitioner(
    "classes:K[,uneven=SIGMA]",
    "exactly K classes each, shares even or log-normal; uneven=s1-mnist|s1-cifar10 for S1's",
    deal,
    argument="K",
    options=("uneven",),
)
