"""Networks without a server: which nodes are linked in a round.

A network is written `name[:argument][,option=value...]`, such as `ring` or `erdos-renyi:0.1`; its
options are the fields of its class. What is random about a fixed graph is drawn once for a run.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.errors import FedloomError, unknown
from fedloom.returned import returned
from fedloom.topology.base import Stream, pairs, stepped


class Described(BaseModel):
    """Options that are written in a line of text and checked where they enter."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Network(Described):
    """Pairs of nodes that are linked in a round, and when they meet."""

    name: ClassVar[str]
    about: ClassVar[str]
    argument: ClassVar[str | None] = None  # the option that stands behind the colon

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        """The links of this round: pairs (a, b) with a < b, each once, in order."""
        raise NotImplementedError

    def meetings(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        """Who meets whom and when: rows (step, a, b) in the order of time; all at one step, unless
        the network knows better."""
        return stepped(1, self._edges(round, nodes, stream))

    def _edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        return returned(self, "edges", self.edges(round, nodes, stream), np.ndarray)

    def positions(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        """Where to draw each node at the end of the round: on a circle, unless it has a place."""
        angle = 2 * np.pi * np.arange(nodes) / nodes
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)

    def places_at(self, round: int, step: int, nodes: int, stream: Stream) -> np.ndarray:
        """Where to draw each node at a step of the round."""
        return self.positions(round, nodes, stream)

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the file that it reads, if it reads one."""
        return ""

    @property
    def frame(self) -> tuple[float, float]:
        """The smallest and largest coordinate of a picture."""
        return -1.1, 1.1


class Fixed(Network):
    """A static network: its links are up at each of `hops` steps of a round, so that a relayed
    message can travel that many hops within the round."""

    hops: int = Field(
        1, ge=1, le=10_000, description=("steps per round, in each of which all linked nodes meet")
    )

    def meetings(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        edges = self._edges(round, nodes, stream)
        return np.concatenate([stepped(step, edges) for step in range(1, self.hops + 1)])


class Ring(Fixed):
    """Every node is linked to the next one, the last to the first."""

    name = "ring"
    about = "a ring"

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        here = np.arange(nodes)
        return pairs(np.stack([here, (here + 1) % nodes], axis=1), nodes)


class Complete(Fixed):
    """Every node is linked to every other."""

    name = "complete"
    about = "everybody with everybody"

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        return np.stack(np.triu_indices(nodes, 1), axis=1)


class Hub(Fixed):
    """Node 0 is linked to all others. It is a node with data of its own, not a server."""

    name = "star"
    about = "node 0 with all others"

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        others = np.arange(1, nodes)
        return np.stack([np.zeros_like(others), others], axis=1)


class Grid(Fixed):
    """Nodes in rows of `width`, each linked to the next ones right and below."""

    name = "grid"
    about = "rows of nodes, each linked to its neighbours"
    argument = "width"

    width: int | None = Field(None, ge=1, le=10**6, description="nodes per row; none: a square")

    def _width(self, nodes: int) -> int:
        return self.width or int(np.ceil(np.sqrt(nodes)))

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        width, here = self._width(nodes), np.arange(nodes)
        right = here[(here % width < width - 1) & (here + 1 < nodes)]
        below = here[here + width < nodes]
        links = [np.stack([a, b], axis=1) for a, b in ((right, right + 1), (below, below + width))]
        return pairs(np.concatenate(links), nodes)

    def positions(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        width = self._width(nodes)
        here, rows = np.arange(nodes), -(-nodes // width)
        place = np.stack([here % width, rows - 1 - here // width], axis=1)
        return 2 * place / max(width - 1, rows - 1, 1) - 1


class ErdosRenyi(Fixed):
    """Every pair is linked with the same chance, drawn once for the run."""

    name = "erdos-renyi"
    about = "every pair with the same probability"
    argument = "chance"

    chance: float = Field(0.1, ge=0, le=1, description="probability of a link")

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        every = np.stack(np.triu_indices(nodes, 1), axis=1)
        return every[stream("graph", round=0).random(len(every)) < self.chance]


class WattsStrogatz(Fixed):
    """A small world: a ring of near neighbours with some links rewired."""

    name = "watts-strogatz"
    about = "a ring of near neighbours with some links rewired"
    argument = "near"

    near: int = Field(4, ge=2, description="neighbours per node on the ring")
    chance: float = Field(0.1, ge=0, le=1, description="probability that a link is rewired")

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        import networkx

        if self.near % 2:
            raise FedloomError(
                f"watts-strogatz:{self.near} gives each node as many neighbours on one side of the "
                f"ring as on the other: give an even number, such as {self.near + 1}."
            )
        if self.near >= nodes:
            raise FedloomError(
                f"watts-strogatz:{self.near} needs more than {self.near} nodes, and there are "
                f"{nodes}. Give a smaller number of neighbours."
            )
        seed = int(stream("graph", round=0).integers(2**31))
        graph = networkx.watts_strogatz_graph(nodes, self.near, self.chance, seed=seed)
        return pairs(np.array(graph.edges, dtype=np.int64).reshape(-1, 2), nodes)


class FromFile(Network):
    """A network read from a file."""

    argument = "file"

    file: str

    @property
    def fingerprint(self) -> str:
        return f"{zlib.crc32(Path(self.file).read_bytes()):08x}"


class EdgeList(FromFile, Fixed):
    """Links read from a CSV file: two nodes in a line (see `numbered`). A heading above numbers is
    skipped; among names it can't be told from a link, so there it must begin with #."""

    name = "edges"
    about = "links from a CSV file: node,node"

    file: str = Field(description="CSV file with two nodes in a line")

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        links = _edge_list(*stamped(self.file))
        enough(self.file, links, nodes)
        return pairs(links, nodes)


@lru_cache(maxsize=8)
def _edge_list(file: str, stamp: int) -> np.ndarray:
    rows = table(file, 2, "two nodes")
    numbers = [_number(word) is not None for _, row in rows for word in row]
    if any(numbers) and not any(numbers[:2]):
        rows = rows[1:]  # a heading
    if not rows:
        raise FedloomError(f"'{file}' holds no link. Each line holds two nodes.")
    return numbered(file, rows)


def stamped(file: str) -> tuple[str, int]:
    """A file with the time of its last change: its contents may be cached until it changes."""
    path = Path(file).absolute()
    return str(path), path.stat().st_mtime_ns if path.exists() else 0


def table(file: str, columns: int, what: str) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file with their numbers, without comments."""
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as text:
            lines = csv.reader(text)
            rows = [(lines.line_num, [word.strip() for word in row]) for row in lines if row]
    except FileNotFoundError:
        raise FedloomError(f"There is no file '{file}'. Give a CSV file with {what}.") from None
    except IsADirectoryError:
        raise FedloomError(f"'{file}' is a folder. Give a CSV file with {what}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise FedloomError(f"'{file}' can't be read as CSV: {e}.") from None
    rows = [(line, row) for line, row in rows if not row[0].startswith("#")]
    for line, row in rows:
        if len(row) != columns:
            raise FedloomError(
                f"'{file}' has {len(row)} values in line {line}: each line holds {what}."
            )
    return rows


def numbered(file: str, rows: Sequence[tuple[int, Sequence[str]]]) -> np.ndarray:
    """The pairs of nodes in the lines of a file as numbers: numbers are the nodes', counted from 0;
    names are numbered in alphabetical order.

    >>> numbered("f", [(1, ["3", "0.0"])]).tolist(), numbered("f", [(1, ["cid", "ann"])]).tolist()
    ([[3, 0]], [[1, 0]])
    """
    words = sorted({word for _, row in rows for word in row})
    found = {word: value for word in words if (value := _number(word)) is not None}
    number = {word: int(value) for word, value in found.items() if _counts(value)}
    if not found:
        number = {word: i for i, word in enumerate(words) if word}
    for line, row in rows:
        for word in row:
            if word not in number:
                raise FedloomError(
                    f"'{word}' in line {line} of '{file}' is not a node: they are numbered from 0, "
                    "or all have names."
                )
    pairs = [[number[word] for word in row] for _, row in rows]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def enough(file: str, links: np.ndarray, nodes: int) -> None:
    """A file may not name more nodes than there are."""
    last = int(links.max(initial=-1))
    if last >= nodes:
        raise FedloomError(
            f"'{file}' has a node {last}, but the {nodes} nodes are numbered 0 to {nodes - 1}. "
            f"Give --clients {last + 1}, or another file."
        )


def _counts(value: float) -> bool:
    return 0 <= value < 10**9 and value == int(value)


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_Kind = TypeVar("_Kind", bound=Described)


def read(cls: type[_Kind], text: str, words: dict[str, str]) -> _Kind:
    """The options of a line of text, checked; a wrong one is refused in a sentence."""
    for word in words:
        if word not in cls.model_fields:
            raise unknown(f"option in '{text}'", word, cls.model_fields)
    try:
        return cls(**words)
    except ValidationError as e:
        first = e.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        about = cls.model_fields[name].description if name else ""
        raise FedloomError(
            f"'{text}' is not valid: {name}: {message[:1].lower()}{message[1:]}"
            + (f" ({name}: {about})." if about else ".")
        ) from None


def options(text: str, words: list[str]) -> dict[str, str]:
    """`key=value` words of a line of text."""
    out: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.strip() or key.strip() in out:
            raise FedloomError(f"'{text}' is not valid: write each option once, as option=value.")
        out[key.strip()] = value.strip()
    return out
