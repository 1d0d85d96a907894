"""Contact traces: who met whom and when, read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from pydantic import Field

from fedloom.errors import FedloomError
from fedloom.topology.base import Stream, pairs
from fedloom.topology.network import FromFile, enough, numbered, stamped, table

_MOST_WINDOWS = 2**53  # beyond it, numbers of rounds would be rounded


class Trace(FromFile):
    """Round t sees the contacts of the t-th window of `every` units of time, counted from the first
    contact, with a step for every time at which somebody meets; when the trace has ended it begins
    again. Nodes are as in `numbered`."""

    name = "trace"
    about = "contacts from a CSV file: time,node,node; repeated at its end"

    file: str = Field(description="CSV file with a time and two nodes in a line")
    every: float = Field(1, gt=0, description="duration of a round, in the file's unit")

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        return pairs(self.meetings(round, nodes, stream)[:, 1:], nodes)

    def meetings(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        windows, times, links = _contacts(*stamped(self.file), self.every)
        enough(self.file, links, nodes)
        now = (round - 1) % (windows[-1] + 1)
        first, last = np.searchsorted(windows, [now, now + 1])
        step = np.unique(times[first:last], return_inverse=True)[1] + 1
        low, high = links[first:last].min(axis=1), links[first:last].max(axis=1)
        rows = np.stack([step, low, high], axis=1)
        return np.unique(rows[low < high], axis=0)  # in order, and nobody twice at a time


@lru_cache(maxsize=8)
def _contacts(file: str, stamp: int, every: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The window, the time and the two nodes of every contact, in order."""
    rows = table(file, 3, "a time and two nodes")
    if rows and _is_heading(rows[0][1], [row for _, row in rows[1:]]):
        rows = rows[1:]
    if not any(a != b for _, (_, a, b) in rows):
        raise FedloomError(
            f"'{file}' holds no contact. Each line holds a time and two different nodes."
        )
    times = np.empty(len(rows))
    for i, (line, (word, *_)) in enumerate(rows):
        time = _time(word)
        if time is None or not np.isfinite(time):
            raise FedloomError(
                f"'{word}' in line {line} of '{file}' is not a time. Each line holds a time, as a "
                "number, and two nodes."
            )
        times[i] = time
    links = numbered(file, [(line, row[1:]) for line, row in rows])
    with np.errstate(over="ignore"):
        last = (times.max() - times.min()) / every
    if not last < _MOST_WINDOWS:
        raise FedloomError(
            f"The times in '{file}' are {last:.3g} rounds of every={every:g} apart. Give the time "
            "that a round takes in the file's unit."
        )
    windows = ((times - times.min()) // every).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return windows[order], times[order], links[order]


def _is_heading(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether a line names the columns: nothing in it is a number, or a node of the lines below."""
    nodes = {word for _, *ends in rest for word in ends}
    return all(word and _time(word) is None for word in first) and not nodes & set(first[1:])


def _time(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
