"""Who holds what: the sample indices of every client, in two flat arrays.

Client k holds `indices[offsets[k]:offsets[k + 1]]`, so a million clients cost no more than the
list of their samples. A partition knows indices only; labels are given to those methods that
need them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.data.formats import open_npz
from fedloom.errors import FedloomError
from fedloom.files import atomic_file

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client; `note` says what a reader of results should know.

    >>> p = Partition.of_lists([[0, 2], [1]])
    >>> len(p), p[0].tolist(), p.sizes.tolist()
    (2, [0, 2], [2, 1])
    """

    indices: IntArray
    offsets: IntArray
    note: tuple[str, ...] = ()

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

    def summary(self, y: np.ndarray, n_classes: int) -> dict[str, object]:
        """The partition in a few numbers.

        `label_distance` is the total variation distance of a client's label distribution to that
        of all data, mean over clients: 0 for identical, near 1 for one rare class each.
        """
        counts = self.label_counts(y, n_classes)
        sizes, held = self.sizes, (counts > 0).sum(axis=1)
        shares = counts[sizes > 0] / sizes[sizes > 0, None]
        everywhere = np.bincount(y, minlength=n_classes) / len(y)
        return {
            "clients": len(self),
            "samples_used": len(self.indices),
            "samples_total": len(y),
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
        except (OSError, ValueError, OverflowError, EOFError, zipfile.BadZipFile) as error:
            raise FedloomError(f"Cannot read the partition {path}: {error}") from None
        if len(loaded.indices) and loaded.indices.min() < 0:
            raise FedloomError(
                f"The partition {path} has the negative index {loaded.indices.min()}."
            )
        distinct, times = np.unique(loaded.indices, return_counts=True)
        if len(distinct) < len(loaded.indices):
            raise FedloomError(
                f"The partition {path} deals sample {distinct[times > 1][0]} more than once."
            )
        return loaded


def _index_file(path: Path | str) -> Path:
    path = Path(path).expanduser()
    if path.suffix not in (".json", ".npz"):
        raise FedloomError(f"A partition file ends in .json or .npz, not as '{path}' does.")
    return path


def _read_json(path: Path) -> Partition:
    lists = json.loads(path.read_text())
    if not isinstance(lists, list) or not all(isinstance(held, list) for held in lists):
        raise ValueError("it must be a list with a list of sample indices for every client.")
    for client, held in enumerate(lists):
        for index in held:
            if type(index) is not int:
                raise ValueError(f"client {client} has {index!r} where an index should be.")
    return Partition.of_lists(lists)


def _read_npz(path: Path) -> Partition:
    with open_npz(path) as file:
        if not {"indices", "offsets"} <= set(file.files):
            raise ValueError("it must hold the arrays indices and offsets.")
        indices, offsets = file["indices"], file["offsets"]
    whole = indices.dtype.kind in "iu" and offsets.dtype.kind in "iu"
    if not whole or indices.ndim != 1 or offsets.ndim != 1 or not len(offsets):
        raise ValueError("indices and offsets must be rows of integers.")
    if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets must rise from 0 to the number of indices.")
    return Partition(indices.astype(np.int64), offsets.astype(np.int64))


def _offsets(sizes: np.ndarray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
