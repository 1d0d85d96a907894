"""How much of the model each client can train: capacities r ∈ (0, 1] and their shares. Speeds are
written in the same way."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.errors import FedloomError
from fedloom.streams import stream

GRAMMAR = (
    "R[:SHARE],R[:SHARE],... with {words} R above 0 and up to 1 and shares that sum to 1, "
    "rho:SHARE,STRONG,WEAK for a share of strong clients among weak ones, low-quality, "
    "high-quality, or a FILE.csv of columns client and {word}"
)
_PLURAL = {"capacity": "capacities", "speed": "speeds"}
#: S2's two populations, a fifth of the clients each
PRESETS = {
    "low-quality": "0.99,0.5,0.25,0.125,0.0625",
    "high-quality": "1,0.5,0.25,0.125,0.0625",
}


@dataclass(frozen=True)
class Capacities:
    """Capacities and the share of clients that has each; or, from a file, everyone's own. `word` is
    what they are called: a capacity, or a speed.

    >>> Capacities.parse("1:0.5,0.25:0.25,0.125:0.25").assign(4, seed=0).tolist()
    [1.0, 1.0, 0.25, 0.125]
    >>> Capacities.parse("rho:0.25,1,0.0625").assign(4, seed=0).tolist()
    [1.0, 0.0625, 0.0625, 0.0625]
    """

    values: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)
    each: tuple[float, ...] | None = None
    word: str = "capacity"

    @staticmethod
    def parse(spec: str, word: str = "capacity") -> Capacities:
        if spec.endswith(".csv"):
            return Capacities._read(Path(spec), word)
        if spec.startswith("rho:"):
            return Capacities._mix(spec, word)
        pairs = [word.partition(":") for word in PRESETS.get(spec, spec).split(",")]
        try:
            values = tuple(float(value) for value, _, _ in pairs)
            given = [share for _, _, share in pairs]
            equal = not any(given)
            shares = tuple(1 / len(pairs) if equal else float(share) for share in given)
        except ValueError:
            raise _wrong(spec, word) from None
        fits = all(0 < v <= 1 for v in values) and all(0 < s <= 1 for s in shares)
        if not fits or abs(sum(shares) - 1) > 1e-6 or len(set(values)) < len(values):
            raise _wrong(spec, word)
        return Capacities(values, shares, word=word)

    @staticmethod
    def speeds(spec: str) -> Capacities:
        return Capacities.parse(spec, "speed")

    @staticmethod
    def _mix(spec: str, word: str) -> Capacities:
        """A share ρ of strong clients; none or all of them may be."""
        try:
            rho, strong, weak = (float(word) for word in spec[4:].split(","))
        except ValueError:
            raise _wrong(spec, word) from None
        if not (0 <= rho <= 1 and 0 < weak <= 1 and 0 < strong <= 1):
            raise _wrong(spec, word)
        both = [(strong, rho), (weak, 1 - rho)]
        there = [(value, share) for value, share in both if share > 0]
        return Capacities(tuple(v for v, _ in there), tuple(s for _, s in there), word=word)

    @staticmethod
    def _read(path: Path, word: str) -> Capacities:
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                pairs = [(int(r["client"]), float(r[word])) for r in csv.DictReader(file)]
        except FileNotFoundError:
            raise FedloomError(f"There is no file '{path}' with {_PLURAL[word]}.") from None
        except (OSError, KeyError, ValueError, TypeError, csv.Error) as e:
            raise FedloomError(
                f"'{path}' can't be read as {_PLURAL[word]} ({e}): give a header line "
                f"'client,{word}' and a line for each client, numbered from 0."
            ) from None
        rows = dict(pairs)
        if sorted(client for client, _ in pairs) != list(range(len(pairs))) or not pairs:
            raise FedloomError(f"'{path}' must have one line for each client, numbered from 0.")
        wrong = [client for client, value in rows.items() if not 0 < value <= 1]
        if wrong:
            raise FedloomError(
                f"'{path}' gives client {wrong[0]} a {word} of {rows[wrong[0]]:g}: it must be "
                "above 0 and at most 1."
            )
        each = tuple(rows[client] for client in range(len(rows)))
        return Capacities(tuple(sorted(set(each), reverse=True)), (), each, word)

    @property
    def whole(self) -> bool:
        """Whether all clients can train the whole model."""
        return self.values == (1.0,)

    def assign(self, clients: int, seed: int) -> np.ndarray:
        """The capacity of every client: as the file says, or dealt randomly with shares kept as
        closely as can be."""
        if self.each is not None:
            if len(self.each) != clients:
                raise FedloomError(
                    f"The file of {_PLURAL[self.word]} has {len(self.each)} clients, the run "
                    f"{clients}."
                )
            return np.array(self.each)
        edges = np.rint(np.cumsum(self.shares) * clients).astype(int)
        counts = np.diff(edges, prepend=0)
        return stream(seed, "capacities").permutation(np.repeat(self.values, counts))


def _wrong(spec: str, word: str) -> FedloomError:
    words = _PLURAL[word]
    return FedloomError(
        f"{words}='{spec}' is not valid. Give {GRAMMAR.format(word=word, words=words)}."
    )
