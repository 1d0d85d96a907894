"""Which cells of a table are marked as the best of their column: one rule for pages, terminals and
papers. It reads what is printed, so that cells which look the same are marked the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell of a table: `best` of its column, or not significantly different from that (`tie`)."""

    text: str
    best: bool = False
    tie: bool = False


def bests(texts: Sequence[str], lower: bool = False) -> list[bool]:
    """Which cells of a column have the best mean, the highest or the lowest: all that print the
    same one, and none where all do.

    >>> bests(["1.5 ± 0.1", "2.5 ± 0.2", "2.5 ± 0.3"]), bests(["0.01", "0.01", "–"])
    ([False, True, True], [False, False, False])
    """
    means = [_mean(text) for text in texts]
    found = {mean for mean in means if mean is not None}
    if len(found) < 2:
        return [False] * len(texts)
    best = min(found) if lower else max(found)
    return [mean == best for mean in means]


def _mean(text: str) -> float | None:
    try:
        return float(text.partition(" ")[0])
    except ValueError:
        return None
