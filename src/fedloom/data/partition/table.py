"""Who holds what: the sample indices of every client, in two flat arrays.

Client k holds `indices[offsets[k]:offsets[k + 1]]`, so a million clients cost no more than the
list of their samples. A partition knows indices only; labels are given to those methods that
need them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.formats import read_npz, reason
from fedloom.errors import FedloomError
from fedloom.files import atomic_file

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client; `note` says what a reader of results should know, `samples` how
    many there must be in all, where that is known. Clients may have `names`.

    >>> p = Partition.of_lists([[0, 2], [1]])
    >>> len(p), p[0].tolist(), p.sizes.tolist()
    (2, [0, 2], [2, 1])
    """

    indices: IntArray
    offsets: IntArray
    note: tuple[str, ...] = ()
    samples: int | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of_ids(cls, ids: npt.ArrayLike) -> Partition:
        """From the name or number of the client of every row; clients are in the order of these.

        >>> p = Partition.of_ids(["bob", "al", "bob"])
        >>> p.names, p[1].tolist()
        (('al', 'bob'), [0, 2])
        """
        names, owner = distinct(np.asarray(ids))
        made = cls.of_owners(owner, len(names))
        return replace(made, samples=len(owner), names=names)

    @classmethod
    def of_owners(cls, owner: np.ndarray, clients: int, note: Iterable[str] = ()) -> Partition:
        """From the client of every sample, -1 for a sample that nobody holds."""
        order = np.argsort(owner, kind="stable")
        indices = order[np.count_nonzero(owner < 0) :]
        return cls(indices, _offsets(np.bincount(owner[indices], minlength=clients)), tuple(note))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]], note: Iterable[str] = ()) -> Partition:
        """From a list of indices for every client."""
        indices = np.fromiter((index for held in lists for index in held), np.int64)
        return cls(indices, _offsets(np.array([len(held) for held in lists])), tuple(note))

    @classmethod
    def of_object(cls, given: Any) -> Partition:
        """From what a Python program has: the client of every row (a number from 0, -1 for nobody,
        or any name), or the row numbers of every client, by name in a dict.

        >>> given = ([0, 1, 0, 1], ["a", "b", "a", "b"], [[0], [3, 2]], {"a": [0], "b": [3, 2]})
        >>> [Partition.of_object(g)[1].tolist() for g in given]
        [[1, 3], [1, 3], [3, 2], [3, 2]]
        """
        if isinstance(given, Partition):
            return given._sound("The partition")
        if isinstance(given, Mapping) and given:
            made = cls.of_object(list(given.values()))
            return replace(made, names=tuple(map(str, given)))
        rows = _array(given)
        if rows.ndim == 1 and len(rows) and _are_names(rows):
            return cls.of_ids(rows)
        if rows.ndim == 1 and rows.dtype.kind in "iu" and len(rows):
            if rows.min() < -1:
                raise FedloomError(
                    f"The partition has the client {rows.min()}: clients are numbered from 0, and "
                    "-1 is for rows that nobody holds. Give other ids as text."
                )
            made = cls.of_owners(rows.astype(np.int64), int(rows.max()) + 1)
            return replace(made, samples=len(rows))
        lists = [_array(held) for held in given] if isinstance(given, Iterable) else []
        if not lists or any(r.ndim != 1 or (len(r) and r.dtype.kind not in "iu") for r in lists):
            raise FedloomError(
                "A partition in Python is an array with the client of every row, a list or dict "
                "with a list of row numbers for every client, or a Partition; this "
                f"{type(given).__name__} is none of them."
            )
        return cls.of_lists([held.tolist() for held in lists])._sound("The partition")

    def fitting(self, what: str, clients: int, samples: int) -> Partition:
        """This partition, if it is one of so many samples to so many clients."""
        if not len(self):
            raise FedloomError(f"{what} has no clients.")
        if len(self) != clients:
            raise FedloomError(
                f"{what} is for {len(self)} clients, not {clients}. Set clients to {len(self)}, "
                "or leave it out."
            )
        if self.samples not in (None, samples):
            raise FedloomError(
                f"{what} says who holds each of {self.samples} rows, but the data has {samples}. "
                "Give a client for every row (-1 for nobody); rows of the data's test part come "
                "behind the others with --pool."
            )
        if len(self.indices) and self.indices.max() >= samples:
            raise FedloomError(
                f"{what} has index {self.indices.max()}, but the data has {samples} rows, "
                "numbered from 0. Was it made for other data? Rows of the data's test part come "
                "behind the others with --pool."
            )
        return self

    def _sound(self, what: str) -> Partition:
        if len(self.indices) and self.indices.min() < 0:
            raise FedloomError(f"{what} has the negative index {self.indices.min()}.")
        distinct, times = np.unique(self.indices, return_counts=True)
        if len(distinct) < len(self.indices):
            raise FedloomError(f"{what} deals sample {distinct[times > 1][0]} more than once.")
        return self

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> IntArray:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> IntArray:
        """The number of samples of every client."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> IntArray:
        """The client of every entry of `indices`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def label_counts(self, y: np.ndarray, n_classes: int) -> IntArray:
        """How many samples of each class every client holds, (clients, classes)."""
        cells = self.owners * n_classes + y[self.indices]
        return np.bincount(cells, minlength=len(self) * n_classes).reshape(len(self), n_classes)

    def class_sets(self, y: np.ndarray, n_classes: int) -> frozenset[frozenset[int]]:
        """The combinations of classes that clients hold."""
        masks = np.unique(self.label_counts(y, n_classes) > 0, axis=0)
        return frozenset(frozenset(np.flatnonzero(mask).tolist()) for mask in masks)

    def summary(
        self, y: np.ndarray, n_classes: int, rows: IntArray | None = None
    ) -> dict[str, object]:
        """The partition in a few numbers, of all samples or of the `rows` that were to be dealt.

        `label_distance` is the total variation distance of a client's label distribution to that
        of all data, mean over clients: 0 for identical, near 1 for one rare class each.
        """
        counts = self.label_counts(y, n_classes)
        sizes, held = self.sizes, (counts > 0).sum(axis=1)
        shares = counts[sizes > 0] / sizes[sizes > 0, None]
        labels = y if rows is None else y[rows]
        everywhere = np.bincount(labels, minlength=n_classes) / len(labels)
        return {
            "clients": len(self),
            "samples_used": len(self.indices),
            "samples_total": len(labels),
            "size_min": int(sizes.min()),
            "size_mean": float(sizes.mean()),
            "size_std": float(sizes.std()),
            "size_max": int(sizes.max()),
            "classes_min": int(held.min()),
            "classes_mean": float(held.mean()),
            "classes_max": int(held.max()),
            "label_distance": float(np.abs(shares - everywhere).sum(axis=1).mean() / 2),
            "notes": list(self.note),
        }

    def save(self, path: Path | str) -> None:
        """Write as `.json` (a list of row numbers for every client, by name where they have
        names), as `.csv` (columns row and client) or, much smaller, as `.npz`; `file:PATH` reads
        all of them."""
        path = _index_file(path)
        with atomic_file(path) as temporary, temporary.open("wb") as out:
            if path.suffix == ".json":
                lists = [self[client].tolist() for client in range(len(self))]
                named = dict(zip(self.names, lists, strict=True)) if self.names else lists
                out.write(json.dumps(named).encode())
            elif path.suffix == ".csv":
                text = io.StringIO()
                table = csv.writer(text, lineterminator="\n")
                names = self.names or range(len(self))
                table.writerow(("row", "client"))
                table.writerows(
                    (row, names[client])
                    for row, client in zip(self.indices.tolist(), self.owners.tolist(), strict=True)
                )
                out.write(text.getvalue().encode())
            else:
                named = {"names": np.array(self.names)} if self.names else {}
                np.savez_compressed(out, indices=self.indices, offsets=self.offsets, **named)

    @classmethod
    def load(cls, path: Path | str) -> Partition:
        """Read what `save` wrote, or the like made elsewhere."""
        path = _index_file(path)
        try:
            loaded = _READERS[path.suffix](path)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            raise FedloomError(f"Cannot read the partition {path}: {reason(error)}") from None
        return loaded._sound(f"The partition {path}")


def _index_file(path: Path | str) -> Path:
    path = Path(path).expanduser()
    if path.suffix not in _READERS:
        raise FedloomError(f"A partition file ends in .json, .csv or .npz, not as '{path}' does.")
    return path


def _read_json(path: Path) -> Partition:
    content = json.loads(path.read_text(encoding="utf-8"))
    names, lists = (), content
    if isinstance(content, dict):
        names, lists = tuple(content), list(content.values())
    if not isinstance(lists, list) or not all(isinstance(held, list) for held in lists):
        raise ValueError(
            "it must be a list, or an object with names, of a list of sample indices for every "
            "client."
        )
    for client, held in enumerate(lists):
        for index in held:
            if type(index) is not int:
                raise ValueError(f"client {client} has {index!r} where an index should be.")
    return replace(Partition.of_lists(lists), names=names)


def _read_csv(path: Path) -> Partition:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = [line for line in csv.reader(file) if line]
    head = [word.strip() for word in lines[0]] if lines else []
    if "client" not in head or set(head) - {"row", "client"}:
        raise ValueError(
            "its first line must name the columns: client, with a line for every row of the data, "
            "or row and client."
        )
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(head):
            raise ValueError(f"line {number} has {len(line)} cells, not {len(head)}.")
    clients = [line[head.index("client")].strip() for line in lines[1:]]
    made = Partition.of_object(_numbers(clients))
    if "row" not in head:
        return made
    rows = _numbers([line[head.index("row")].strip() for line in lines[1:]])
    if rows.dtype.kind != "i":
        bad = next(word for word in rows.tolist() if not word.isdigit())
        raise ValueError(f"its column row has {bad!r} where a row number should be.")
    return replace(made, indices=rows[made.indices], samples=None)


def _numbers(words: Sequence[str]) -> np.ndarray:
    """As whole numbers where all of them are, else as they are."""
    whole = all(word.removeprefix("-").isdigit() for word in words)
    return np.array([int(word) for word in words] if whole else words)


def _read_npz(path: Path) -> Partition:
    held = read_npz(path)
    if "client" in held:
        return Partition.of_object(held["client"])
    if not {"indices", "offsets"} <= held.keys():
        raise ValueError(
            "it must hold the array client, with the client of every row, or indices and offsets."
        )
    indices, offsets = held["indices"], held["offsets"]
    whole = indices.dtype.kind in "iu" and offsets.dtype.kind in "iu"
    if not whole or indices.ndim != 1 or offsets.ndim != 1 or not len(offsets):
        raise ValueError("indices and offsets must be rows of integers.")
    if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets must rise from 0 to the number of indices.")
    names = tuple(map(str, held["names"].tolist())) if "names" in held else ()
    if names and len(names) != len(offsets) - 1:
        raise ValueError(f"there are {len(names)} names for {len(offsets) - 1} clients.")
    return Partition(indices.astype(np.int64), offsets.astype(np.int64), names=names)


_READERS = {".json": _read_json, ".csv": _read_csv, ".npz": _read_npz}


def distinct(ids: np.ndarray) -> tuple[tuple[str, ...], IntArray]:
    """The names that occur, numbers in their own order, and the place of each row's among them."""
    if ids.dtype == object and all(isinstance(value, int) for value in ids.tolist()):
        ids = ids.astype(np.int64)
    if ids.dtype.kind == "f" and np.isfinite(ids).all() and (ids == np.rint(ids)).all():
        ids = ids.astype(np.int64)  # as tables have whole numbers that were beside empty cells
    if ids.dtype.kind not in "iu":
        ids = np.array([_text(value) for value in ids.tolist()])
    found, owner = np.unique(ids, return_inverse=True)
    return tuple(map(str, found.tolist())), owner.astype(np.int64).reshape(-1)


def _text(value: Any) -> str:
    if value is None or value != value or (text := str(value).strip()) == "":
        raise FedloomError("Some rows have no client. Give every row a client, or drop those rows.")
    return text


def _are_names(rows: np.ndarray) -> bool:
    """Texts, or numbers that don't count clients from 0."""
    if rows.dtype.kind in "US":
        return True
    if rows.dtype.kind == "O":
        return all(isinstance(value, str) for value in rows.tolist())
    if rows.dtype.kind not in "iu" or rows.min() < 0:
        return False
    return len(np.unique(rows)) <= int(rows.max())


def _array(given: Any) -> np.ndarray:
    """As an array; one of no dimension if it can't be one."""
    try:
        return np.asarray(given)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def _offsets(sizes: np.ndarray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
