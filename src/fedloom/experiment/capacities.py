"""How much of the model each client can train: capacities r ∈ (0, 1] and their shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.errors import FedloomError
from fedloom.streams import stream

GRAMMAR = "R[:SHARE],R[:SHARE],... with capacities R above 0 and up to 1, and shares that sum to 1"


@dataclass(frozen=True)
class Capacities:
    """Capacities and the share of clients that has each.

    >>> Capacities.parse("1:0.5,0.25:0.25,0.125:0.25").assign(4, seed=0).tolist()
    [1.0, 1.0, 0.25, 0.125]
    """

    values: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)

    @staticmethod
    def parse(spec: str) -> Capacities:
        pairs = [word.partition(":") for word in spec.split(",")]
        try:
            values = tuple(float(value) for value, _, _ in pairs)
            given = [share for _, _, share in pairs]
            equal = not any(given)
            shares = tuple(1 / len(pairs) if equal else float(share) for share in given)
        except ValueError:
            raise FedloomError(f"capacities='{spec}' is not valid. Give {GRAMMAR}.") from None
        fits = all(0 < v <= 1 for v in values) and all(0 < s <= 1 for s in shares)
        if not fits or abs(sum(shares) - 1) > 1e-6 or len(set(values)) < len(values):
            raise FedloomError(f"capacities='{spec}' is not valid. Give {GRAMMAR}.")
        return Capacities(values, shares)

    @property
    def whole(self) -> bool:
        """Whether everybody can train everything."""
        return self.values == (1.0,)

    def assign(self, clients: int, seed: int) -> np.ndarray:
        """The capacity of every client: dealt randomly, shares kept as closely as can be."""
        edges = np.rint(np.cumsum(self.shares) * clients).astype(int)
        counts = np.diff(edges, prepend=0)
        return stream(seed, "capacities").permutation(np.repeat(self.values, counts))
