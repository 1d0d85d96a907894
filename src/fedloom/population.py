"""A population of flat models: a matrix, clients × columns, that holds only what is kept.

A method whose clients keep nothing has an empty population; one whose clients keep their heads
stores those columns; a client that was never seen costs nothing. Rows are found by client number
and live in one contiguous buffer that grows as clients appear.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.layout import Columns


class Population:
    """The kept columns of the clients seen so far.

    >>> kept = Population(Columns(((1, 3),), width=3))
    >>> kept.put([7], torch.tensor([[0.0, 1.0, 2.0]]))
    >>> kept.compose([7, 8], torch.full((3,), 9.0)).tolist()
    [[9.0, 1.0, 2.0], [9.0, 9.0, 9.0]]
    """

    def __init__(self, columns: Columns, dtype: torch.dtype = torch.float32) -> None:
        self.columns = columns
        self._slots: dict[int, int] = {}
        self._data = torch.empty((0, len(columns)), dtype=dtype)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, client: int) -> bool:
        return client in self._slots

    @property
    def clients(self) -> np.ndarray:
        """Who has something kept, in ascending order."""
        return np.array(sorted(self._slots), dtype=np.int64)

    def put(self, clients: Sequence[int] | np.ndarray, rows: Tensor) -> None:
        """Keep these clients' columns of their whole rows."""
        values = self.columns.take(rows)
        for client in clients:
            self._slots.setdefault(int(client), len(self._slots))
        if len(self._slots) > len(self._data):
            size = max(len(self._slots), 2 * len(self._data))
            grown = torch.empty((size, len(self.columns)), dtype=self._data.dtype)
            grown[: len(self._data)] = self._data
            self._data = grown
        self._data[self._at(clients)] = values.to(self._data)

    def compose(self, clients: Sequence[int] | np.ndarray, base: Tensor) -> Tensor:
        """Whole rows: each client's kept columns over `base`. Read-only where nothing is kept."""
        rows = base.expand(len(clients), -1)
        known = [i for i, client in enumerate(clients) if int(client) in self._slots]
        if not known or not len(self.columns):
            return rows
        rows = rows.clone()
        held = self._data[self._at([clients[i] for i in known])]
        if len(known) == len(clients):
            self.columns.put(rows, held)
        else:
            some = rows[known]
            self.columns.put(some, held)
            rows[known] = some
        return rows

    def forget(self, clients: Sequence[int] | np.ndarray) -> None:
        """Drop what these clients kept: they go on from the base row."""
        gone = {int(client) for client in clients} & set(self._slots)
        if gone:
            rest = [client for client in self._slots if client not in gone]
            self._data = self._data[self._at(rest)]
            self._slots = {client: i for i, client in enumerate(rest)}

    def clear(self) -> None:
        """Forget everyone: all go on from the base row."""
        self._slots.clear()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold, ordered by client so that its bytes are determined."""
        clients = self.clients
        return {"clients": torch.from_numpy(clients), "rows": self._data[self._at(clients)]}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._slots = {int(c): i for i, c in enumerate(tensors["clients"])}
        self._data = tensors["rows"].clone()

    def _at(self, clients: Sequence[int] | np.ndarray) -> list[int]:
        return [self._slots[int(client)] for client in clients]
