"""Random streams by name: every random choice comes from (seed, purpose, round, client).

A stream depends on its names only, never on what was drawn before, so a run is the same for any
number of workers and a resumed run is the uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def key(seed: int, *names: str | int) -> int:
    """A 128-bit key for the stream with these names, the same on every machine."""
    parts = (f"s:{name}" if isinstance(name, str) else f"i:{int(name)}" for name in (seed, *names))
    text = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator named (seed, *names).

    >>> stream(0, "batches", 3).random() == stream(0, "batches", 3).random()
    True
    """
    return np.random.Generator(np.random.Philox(_Key(key(seed, *names))))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """A key for Philox. Given as `key=`, it would first draw entropy from the system that is never
    used, which takes longer than all the rest."""

    def __init__(self, number: int) -> None:
        self._words = np.frombuffer(number.to_bytes(16, "little"), "<u8")  # as Philox has them

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        return self._words


def streams_of(seed: int, round: int) -> Callable[..., np.random.Generator]:
    """The streams of a round, by purpose; with `round=0`, those that are the same in all rounds.

    >>> draw = streams_of(0, 3)
    >>> draw("graph", round=0).random() == streams_of(0, 4)("graph", round=0).random()
    True
    """
    this = round

    def draw(*purpose: str | int, round: int = this) -> np.random.Generator:
        return stream(seed, *purpose, round)

    return draw


def torch_seed(seed: int, *names: str | int) -> int:
    """A seed for `torch.manual_seed` from the same names."""
    return key(seed, *names) & (2**63 - 1)
