"""Contact traces: who met whom and when, read from a file."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pydantic import Field

from fedloom.errors import FedloomError
from fedloom.topology.base import Stream
from fedloom.topology.network import Network, pairs, stamped, table


class Trace(Network):
    """Round t sees the contacts of the t-th window of `every` units of time, counted from the first
    contact; when the trace has ended it begins again. Nodes may have any names: they are numbered
    in the order of their names."""

    name = "trace"
    about = "contacts from a CSV file: time,node,node"
    argument = "file"

    file: str = Field(description="CSV file with a time and two nodes in a line")
    every: float = Field(1, gt=0, description="time that a round takes, in the file's unit")

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        windows, links, names = _contacts(*stamped(self.file), self.every)
        if names > nodes:
            raise FedloomError(
                f"'{self.file}' has {names} nodes, more than the run ({nodes}). Give --clients "
                f"{names}, or another file."
            )
        now = (round - 1) % (windows[-1] + 1)
        first, last = np.searchsorted(windows, [now, now + 1])
        return pairs(links[first:last], nodes)


@lru_cache(maxsize=8)
def _contacts(file: str, stamp: int, every: float) -> tuple[np.ndarray, np.ndarray, int]:
    """The window and the two nodes of every contact, in order, and the number of nodes."""
    rows = table(file, 3, "a time and two nodes")
    if not rows:
        raise FedloomError(f"'{file}' holds no contact. Each line holds a time and two nodes.")
    try:
        times = np.array([float(row[0]) for row in rows])
    except ValueError as e:
        raise FedloomError(f"A time in '{file}' is not a number: {e}.") from None
    words = {word for row in rows for word in row[1:]}
    names = sorted(words, key=lambda w: (int(w), w) if w.isdigit() else (1 << 62, w))
    number = {name: i for i, name in enumerate(names)}
    links = np.array([[number[a], number[b]] for _, a, b in rows], dtype=np.int64)
    windows = ((times - times.min()) // every).astype(np.int64)
    order = np.argsort(windows, kind="stable")
    return windows[order], links[order], len(names)
