"""Images that the server may use: set aside from the clients' data, of another set, or noise.

A public set is the server's from the start, so it costs no traffic. What a share takes, it takes
from clients: nobody trains or is scored on these images any more, and `taken` says how many each
client gave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.catalog import load
from fedloom.data.dataset import Dataset, stratified
from fedloom.data.images import laid_out, unit_of
from fedloom.data.options import integer, number
from fedloom.data.partition import Partition
from fedloom.errors import FedloomError
from fedloom.streams import stream

if TYPE_CHECKING:
    from fedloom.data.split import Federation

IntArray = npt.NDArray[np.int64]

FORMS = "none | share:FRACTION | noise:COUNT | a data set or .npz file[:COUNT]"


@dataclass(frozen=True)
class Wish:
    """What was asked for, in parts.

    >>> Wish.parse("share:0.05")
    Wish(kind='share', share=0.05, count=None, source='')
    >>> Wish.parse("fashion-mnist:500")
    Wish(kind='data', share=0.0, count=500, source='fashion-mnist')
    """

    kind: str  # none, share, noise, data
    share: float = 0.0
    count: int | None = None
    source: str = ""

    @staticmethod
    def parse(spec: str) -> Wish:
        word, colon, tail = spec.strip().rpartition(":")
        name, value = (word, tail) if colon else (tail, "")
        if name == "none" and not value:
            return Wish("none")
        if name == "share":
            share = number(f"The share in public={spec} ({FORMS})", value, low=0, above=True)
            if share >= 1:
                raise FedloomError(
                    f"public={spec} leaves no data for the clients: give less than 1."
                )
            return Wish("share", share=share)
        if name == "noise":
            count = integer(f"The count in public={spec} ({FORMS})", value, low=1)
            return Wish("noise", count=count)
        if not name:
            raise FedloomError(f"public='{spec}' is not valid. Give {FORMS}.")
        if value.isdigit() and int(value) > 0:
            return Wish("data", count=int(value), source=name)
        return Wish("data", source=spec.strip())


@dataclass(frozen=True, eq=False)
class PublicSet:
    """Images (N, C, H, W) as networks are fed them, normalised unless they are tokens; labels where
    they are known."""

    x: Tensor
    y: Tensor | None
    note: str
    taken: IntArray | None = None  # from every client, where they are a share of its data

    @staticmethod
    def of(
        x: np.ndarray, y: np.ndarray | None, note: str, taken: IntArray | None = None
    ) -> PublicSet:
        labels = None if y is None else torch.from_numpy(y)
        return PublicSet(torch.from_numpy(x), labels, note, taken)

    def on(self, device: torch.device) -> PublicSet:
        """The same on this device."""
        return replace(self, x=self.x.to(device), y=None if self.y is None else self.y.to(device))

    def __len__(self) -> int:
        return len(self.x)


def set_aside(partition: Partition, y: np.ndarray, share: float, seed: int) -> Partition:
    """The partition without this share of every class; no client is left with nothing."""
    taken = stratified(y[partition.indices], share, seed, "public")
    emptied = np.bincount(partition.owners[taken], minlength=len(partition)) == partition.sizes
    taken &= ~emptied[partition.owners]
    if not taken.any():
        raise FedloomError(
            f"public=share:{share:g} of {len(partition.indices)} samples sets no images aside. "
            "Give a larger share."
        )
    left = np.bincount(partition.owners[~taken], minlength=len(partition))
    offsets = np.concatenate([[0], np.cumsum(left)]).astype(np.int64)
    return replace(partition, indices=partition.indices[~taken], offsets=offsets)


def public_set(spec: str, federation: Federation, tokens: bool = False) -> PublicSet | None:
    """The public set of a federation that was dealt with the same `public`, normalised unless it is
    of tokens; None for `none`."""
    wish, dataset = Wish.parse(spec), federation.dataset
    if wish.kind == "none":
        return None
    if wish.kind == "share":
        return _of_clients(federation, tokens)
    if wish.kind == "noise":
        if tokens:
            raise FedloomError(
                f"public={spec} does not work for a model that takes tokens: set some of the "
                "clients' data aside with public=share:0.01, or give another data set or file."
            )
        shape = (wish.count or 0, *dataset.shape)
        x = stream(federation.seed, "public").standard_normal(shape, dtype=np.float32)
        return PublicSet.of(x, None, f"{len(x)} images of noise, without labels")
    return _of_another(wish, dataset, federation.seed, tokens)


def _of_clients(federation: Federation, tokens: bool) -> PublicSet:
    dataset, dealt, left = federation.dataset, federation.dealt, federation.partition
    indices = np.setdiff1d(dealt.indices, left.indices)
    taken = dealt.sizes - left.sizes
    note = (
        f"{len(indices)} of the clients' {len(dealt.indices)} images, "
        f"{taken.min()} to {taken.max()} from each"
    )
    return PublicSet.of(_fed(dataset, dataset.x[indices], tokens), dataset.y[indices], note, taken)


def _of_another(wish: Wish, dataset: Dataset, seed: int, tokens: bool) -> PublicSet:
    other = None if wish.source == dataset.name else load(wish.source)
    if other is None or _same(other, dataset):
        raise FedloomError(
            f"public={wish.source} would give the server all data that the clients train on. Set "
            "a part of it aside with public=share:0.01, or give another data set or file."
        )
    if other.shape != dataset.shape or other.x.dtype != dataset.x.dtype:
        raise FedloomError(
            f"The public set '{wish.source}' has images of {other.shape} {other.x.dtype}, "
            f"'{dataset.name}' of {dataset.shape} {dataset.x.dtype}. Give a data set with the "
            "same shape."
        )
    indices = other.training_rows
    if wish.count is not None:
        if wish.count > len(indices):
            raise FedloomError(
                f"public={wish.source}:{wish.count} asks for more images than there are "
                f"({len(indices)})."
            )
        chosen = stream(seed, "public").choice(len(indices), wish.count, replace=False)
        indices = indices[np.sort(chosen)]
    labels = other.y[indices] if other.classes == dataset.classes else None
    known = "" if labels is not None else ", whose labels are not those of this run"
    note = f"{len(indices)} training images of {other.name}{known}"
    return PublicSet.of(_fed(dataset, other.x[indices], tokens), labels, note)


def _same(a: Dataset, b: Dataset) -> bool:
    """Whether both hold the same samples, by their labels and a look at the first images."""
    first = slice(0, 100)
    return np.array_equal(a.y, b.y) and np.array_equal(a.x[first], b.x[first])


def _fed(dataset: Dataset, images: np.ndarray, tokens: bool) -> np.ndarray:
    """As a batch of the run's own images is."""
    if tokens:
        return images.astype(np.int64)
    mean, std = (laid_out(v, dataset.shape) for v in (dataset.mean, dataset.std))
    return ((images / unit_of(images.dtype) - mean) / std).astype(np.float32)
