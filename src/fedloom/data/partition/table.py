"""Who holds what: the sample indices of every client, in two flat arrays.

Client k holds `indices[offsets[k]:offsets[k + 1]]`, so a million clients cost no more than the
list of their samples. A partition knows indices only; labels are given to those methods that
need them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
    many there must be in all, where that is known.

    >>> p = Partition.of_lists([[0, 2], [1]])
    >>> len(p), p[0].tolist(), p.sizes.tolist()
    (2, [0, 2], [2, 1])
    """

    indices: IntArray
    offsets: IntArray
    note: tuple[str, ...] = ()
    samples: int | None = None

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
        """From what a Python program has: the client of every row (-1 for nobody), or a list of row
        numbers for every client.

        >>> [Partition.of_object(g)[1].tolist() for g in ([0, 1, 0, 1], [[0], [3, 2]])]
        [[1, 3], [3, 2]]
        """
        if isinstance(given, Partition):
            return given._sound("The partition")
        rows = _array(given)
        if rows.ndim == 1 and rows.dtype.kind in "iu" and len(rows):
            if rows.min() < -1:
                raise FedloomError(
                    f"The partition has the client {rows.min()}: clients are numbered from 0, and "
                    "-1 is for rows that nobody holds."
                )
            made = cls.of_owners(rows.astype(np.int64), int(rows.max()) + 1)
            return replace(made, samples=len(rows))
        lists = [_array(held) for held in given] if isinstance(given, Iterable) else []
        if not lists or any(r.ndim != 1 or (len(r) and r.dtype.kind not in "iu") for r in lists):
            raise FedloomError(
                "A partition in Python is an array with the client of every row, a list with a "
                "list of row numbers for every client, or a Partition; this "
                f"{type(given).__name__} is none of them."
            )
        return cls.of_lists([held.tolist() for held in lists])._sound("The partition")

    def fitting(self, what: str, clients: int, samples: int) -> Partition:
        """This partition, if it is one of so many samples to so many clients."""
        if not len(self):
            raise FedloomError(f"{what} has no clients.")
        if len(self) != clients:
            raise FedloomError(
                f"{what} is for {len(self)} clients, not {clients}. Set clients to {len(self)}."
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
        """Write as a `.json` list of lists or, much smaller, as `.npz`; `file:PATH` reads both."""
        path = _index_file(path)
        with atomic_file(path) as temporary, temporary.open("wb") as out:
            if path.suffix == ".json":
                lists = [self[client].tolist() for client in range(len(self))]
                out.write(json.dumps(lists).encode())
            else:
                np.savez_compressed(out, indices=self.indices, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path | str) -> Partition:
        """Read what `save` wrote, or a list of lists of indices made elsewhere."""
        path = _index_file(path)
        try:
            loaded = _read_json(path) if path.suffix == ".json" else _read_npz(path)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            raise FedloomError(f"Cannot read the partition {path}: {reason(error)}") from None
        return loaded._sound(f"The partition {path}")


def _index_file(path: Path | str) -> Path:
    path = Path(path).expanduser()
    if path.suffix not in (".json", ".npz"):
        raise FedloomError(f"A partition file ends in .json or .npz, not as '{path}' does.")
    return path


def _read_json(path: Path) -> Partition:
    lists = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(lists, list) or not all(isinstance(held, list) for held in lists):
        raise ValueError("it must be a list with a list of sample indices for every client.")
    for client, held in enumerate(lists):
        for index in held:
            if type(index) is not int:
                raise ValueError(f"client {client} has {index!r} where an index should be.")
    return Partition.of_lists(lists)


def _read_npz(path: Path) -> Partition:
    held = read_npz(path)
    if not {"indices", "offsets"} <= held.keys():
        raise ValueError("it must hold the arrays indices and offsets.")
    indices, offsets = held["indices"], held["offsets"]
    whole = indices.dtype.kind in "iu" and offsets.dtype.kind in "iu"
    if not whole or indices.ndim != 1 or offsets.ndim != 1 or not len(offsets):
        raise ValueError("indices and offsets must be rows of integers.")
    if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets must rise from 0 to the number of indices.")
    return Partition(indices.astype(np.int64), offsets.astype(np.int64))


def _array(given: Any) -> np.ndarray:
    """As an array; of no dimension where it is none."""
    try:
        return np.asarray(given)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def _offsets(sizes: np.ndarray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
