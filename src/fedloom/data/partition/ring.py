"""Classes stand in a ring, and client i holds K neighbours: i, i+1, ... mod their number.

So there are as many different hands as classes, each held by as many clients (S1 §4.1). How much of
a class each holder gets is even or by one of S1's two recipes: its MNIST split cuts pieces off what
is left of a class, its CIFAR-10 split has log-normal shares on top of a uniform draw.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from fedloom.data.partition.classes import unused
from fedloom.data.partition.deal import Dealing, Partitioner, Spec, counts
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError, unknown

IntArray = npt.NDArray[np.int64]

SHARES = ("even", "cuts", "lognormal")
FEW = 10  # samples of each of its classes that everybody gets first, of log-normal shares
_RINGS = 1000  # that are tried where some hands are reserved


def deal(spec: Spec, dealing: Dealing) -> Partition:
    k = spec.integer("K", spec.argument, low=1)
    shares = spec.options.get("shares", "even")
    if shares not in SHARES:
        raise unknown(f"kind of shares in partition '{spec.text}':", shares, SHARES)
    draws = spec.options.get("draws")
    if draws is not None and shares == "even":
        raise spec.wrong("draws would do nothing: even shares draw nothing.")
    number = None if draws is None else spec.integer("draws", draws, low=0)
    return deal_ring(dealing, k, shares, number)


def deal_ring(dealing: Dealing, k: int, shares: str, draws: int | None) -> Partition:
    """Deal to every client k neighbours of a ring; `draws` is the seed of the sizes, if they should
    not change with the run's."""
    available = np.bincount(dealing.y, minlength=dealing.n_classes)
    present = np.flatnonzero(available)
    if k > len(present):
        raise FedloomError(f"Clients cannot hold {k} classes: the data has {len(present)}.")
    ring = _ring(present, k, dealing)
    held = ring[(np.arange(dealing.clients)[:, None] + np.arange(k)) % len(ring)]
    holders = np.bincount(held.ravel(), minlength=dealing.n_classes)
    for label in present:
        if available[label] < holders[label]:
            raise FedloomError(
                f"{holders[label]} clients must hold class {label}, which has {available[label]} "
                "samples. Use fewer clients or fewer classes per client."
            )
    if draws is None:
        draws = int(dealing.rng.integers(2**31))
    size_of = {"even": _even, "cuts": _cuts, "lognormal": _lognormal}[shares]
    sizes = size_of(held, available, draws)
    owner = dealing.nobody()
    for label in present:
        who, which = np.nonzero(held == label)
        members = dealing.members(label)
        owner[members[: sizes[who, which].sum()]] = np.repeat(who, sizes[who, which])
    return Partition.of_owners(owner, dealing.clients, unused(owner))


def _ring(classes: IntArray, k: int, dealing: Dealing) -> IntArray:
    """The classes in order or, where some hands are reserved, in a random order without them."""
    if not dealing.reserve:
        return classes
    for _ in range(_RINGS):
        ring = dealing.rng.permutation(classes)
        hands = {frozenset(np.roll(ring, -i)[:k].tolist()) for i in range(len(ring))}
        if not hands & dealing.reserve:
            return ring
    raise FedloomError(
        f"No ring of {len(classes)} classes was found of which no client holds {k} neighbours: "
        "there are too few classes for that. Deal newcomers with classes:K, or take another K."
    )


def _even(held: IntArray, available: IntArray, draws: int) -> IntArray:
    sizes = np.zeros_like(held)
    for label in np.unique(held):
        mine = held == label
        sizes[mine] = counts(np.ones(mine.sum()), available[label])
    return sizes


def _cuts(held: IntArray, available: IntArray, draws: int) -> IntArray:
    """S1's MNIST: holder after holder takes a random piece of what is left of the class, at least
    1/(n + 1) of it and less than a half; the last of the n holders takes the rest."""
    rng = np.random.RandomState(draws % 2**32)
    sizes = np.zeros_like(held)
    for label in range(len(available)):
        where = np.argwhere(held == label)
        left = int(available[label])
        for i, at in enumerate(where):
            behind = len(where) - 1 - i
            piece = left
            if behind:
                low, high = left // (len(where) + 1), left // 2
                drawn = rng.randint(low, high) if low < high else low
                piece = min(max(drawn, 1), left - behind)
            sizes[tuple(at)] = piece
            left -= piece
    return sizes


def _lognormal(held: IntArray, available: IntArray, draws: int) -> IntArray:
    """S1's CIFAR-10, with its constants for 6,000 samples a class: 10 samples of each class, then
    the share of a log-normal draw and 300 to 600 more, or nothing where the class has too few left.

    The draws are those of the source's program: seed 1 gives its 52,497 samples.
    """
    shared, uniform = np.random.RandomState(draws % 2**32), random.Random(draws)
    clients, k = held.shape
    classes = len(available)
    shares = shared.lognormal(0.0, 2.0, (classes, clients, k))
    shares *= np.maximum(available - clients, 0)[:, None, None] / shares.sum((1, 2), keepdims=True)
    holders = np.bincount(held.ravel(), minlength=classes)
    few = np.maximum(np.minimum(FEW, available // np.maximum(4 * holders, 1)), 1)
    sizes = few[held]
    taken = few * holders
    group = max(clients // classes, 1)
    for client in range(clients):
        for j, label in enumerate(held[client]):
            n = int(available[label])
            more = int(shares[label, client // group, j])
            more += uniform.randint(n // 20, max(n // 10, n // 20))
            if taken[label] + more < n:
                sizes[client, j] += more
                taken[label] += more
    return sizes


PARTITIONER = Partitioner(
    "ring:K[,shares=even|cuts|lognormal][,draws=SEED]",
    "K neighbours of a ring of classes each; shares even, or S1's of MNIST (cuts) and CIFAR-10 "
    "(lognormal), their sizes the same in all runs with draws=1",
    deal,
    argument="K",
    options=("shares", "draws"),
)
