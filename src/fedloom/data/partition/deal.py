"""What partitioners share: what they are given and the arithmetic of dealing samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedloom.data.options import Value, integer, number
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError

IntArray = npt.NDArray[np.int64]
ClassSets = frozenset[frozenset[int]]


@dataclass(frozen=True)
class Spec:
    """A partition as the user wrote it: `name[:argument][,key=value...]`."""

    text: str
    grammar: str
    argument: str
    options: dict[str, str]

    def number(self, name: str, value: Value, *, low: float, above: bool = False) -> float:
        try:
            return number(name, value, low=low, above=above)
        except FedloomError as error:
            raise self.wrong(str(error)) from None

    def integer(self, name: str, value: Value, *, low: int) -> int:
        try:
            return integer(name, value, low=low)
        except FedloomError as error:
            raise self.wrong(str(error)) from None

    def wrong(self, why: str) -> FedloomError:
        return FedloomError(f"Partition '{self.text}': {why} It is written {self.grammar}.")


@dataclass(frozen=True)
class Dealing:
    """What is to be dealt, to how many clients, and by which random stream."""

    y: np.ndarray
    clients: int
    n_classes: int
    rng: np.random.Generator
    reserve: ClassSets = frozenset()  # combinations of classes that no client may hold
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # of the data, besides x and y

    def members(self, label: int | np.integer) -> IntArray:
        """The samples of one class, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.y == label))

    def nobody(self) -> IntArray:
        """The owner of every sample before any is dealt: none."""
        return np.full(len(self.y), -1, np.int64)


@dataclass(frozen=True)
class Partitioner:
    """A way to deal, its grammar and what it is for; `argument` is its name, if there is one."""

    grammar: str
    about: str
    deal: Callable[[Spec, Dealing], Partition]
    argument: str | None = None
    options: tuple[str, ...] = ()
    names_rows: bool = False  # it says itself who holds which row, so all rows must be in place

    @property
    def name(self) -> str:
        return self.grammar.split(":")[0].split("[")[0]


def counts(shares: npt.NDArray[np.float64], total: int, least: int = 0) -> IntArray:
    """`total` samples in these proportions, at least `least` each, the sum exact.

    >>> counts(np.array([1.0, 1.0, 2.0]), 10).tolist()
    [2, 3, 5]
    """
    whole = shares.sum()
    if not 0 < whole < np.inf:
        raise FedloomError(
            "This partition is too extreme to compute: its shares overflow. Use a value closer "
            "to 1."
        )
    free = total - least * len(shares)
    cuts = np.rint(np.cumsum(shares / whole) * free).astype(np.int64)
    cuts[-1] = free
    dealt: IntArray = np.diff(cuts, prepend=0) + least
    return dealt


def keep_minimum(
    owner: IntArray, clients: int, least: int, rng: np.random.Generator
) -> tuple[IntArray, tuple[str, ...]]:
    """Owners such that everyone holds `least` samples, and a note if any had to move.

    The largest clients give: all that hold more than some level are cut down to it, and what they
    give up is dealt to the needy. Nothing is drawn again, so the shape of the draw is kept.
    """
    sizes = np.bincount(owner, minlength=clients)
    lack = np.maximum(least - sizes, 0)
    moved = int(lack.sum())
    if moved == 0:
        return owner, ()
    gives = _cut_largest(sizes, moved)
    shuffled = rng.permutation(len(owner))
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its owner
    taken = order[place < np.repeat(gives, sizes)]
    owner = owner.copy()
    owner[rng.permutation(taken)] = np.repeat(np.arange(clients), lack)
    return owner, (f"{moved} samples moved so that every client holds at least {least}",)


def _cut_largest(sizes: IntArray, amount: int) -> IntArray:
    """How many each client gives so that `amount` come together and the largest stay level."""
    falling = np.sort(sizes)[::-1]
    # Cutting the i largest to the size of the next one yields `room[i]` samples.
    room = np.cumsum(falling) - np.arange(1, len(sizes) + 1) * np.append(falling[1:], 0)
    donors = int(np.searchsorted(room, amount)) + 1
    level = (int(falling[:donors].sum()) - amount) // donors
    gives = np.maximum(sizes - level, 0)
    surplus = int(gives.sum()) - amount
    gives[np.flatnonzero(gives)[:surplus]] -= 1
    return gives
