"""Data sets in the cache: a folder of memory-mapped arrays and a small description.

A fetched data set is converted once to `.npy` files, so that loading it later takes little time
and no memory until images are used. The folder appears whole or not at all, and checksums of all
that is in it, verified by every program that loads it, tell of damage since (0.2 s for CIFAR-10).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.data.images import channel_scale
from fedloom.errors import FedloomError
from fedloom.files import atomic_file, atomic_folder

_PARTS = ("x", "y", "x_test", "y_test")
_DESCRIBED = ("name", "classes", "mean", "std", "grouping")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Grouping:
    """A coarser labelling: the names of the groups, and the group of every class."""

    names: tuple[str, ...]
    group_of: tuple[int, ...]


def cache_dir() -> Path:
    """Where data sets are kept: $FEDLOOM_DATA, else the platform's place for caches."""
    if chosen := os.environ.get("FEDLOOM_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedloom"


def write(folder: Path, data: Dataset, grouping: Grouping | None = None) -> None:
    """Keep a data set as `folder`."""
    small = np.min_scalar_type(data.n_classes - 1)
    with atomic_folder(folder) as fresh:
        for part in _PARTS:
            array = getattr(data, part)
            np.save(fresh / f"{part}.npy", array.astype(small) if part[0] == "y" else array)
        grouped = grouping and dataclasses.asdict(grouping)
        values = (data.name, data.classes, data.mean, data.std, grouped)
        _describe(fresh, dict(zip(_DESCRIBED, values, strict=True)))


def holds(folder: Path) -> bool:
    """Whether a data set is kept as `folder`."""
    return (folder / "dataset.json").is_file()


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))


def read(folder: Path, grouped: bool = False, fetch: str | None = None) -> Dataset:
    """The data set kept as `folder`, images memory-mapped; `grouped` for its coarser labels,
    `fetch` is the command that fetches it."""
    try:
        description = _verified(folder)
        x, y, x_test, y_test = (np.load(folder / f"{p}.npy", mmap_mode="r") for p in _PARTS)
        y, y_test = y.astype(np.int64), y_test.astype(np.int64)
        classes = description["classes"]
        if grouped:
            group_of = np.array(description["grouping"]["group_of"], np.int64)
            classes, y, y_test = description["grouping"]["names"], group_of[y], group_of[y_test]
        return Dataset(
            description["name"],
            x,
            y,
            x_test,
            y_test,
            tuple(classes),
            tuple(description["mean"]),
            tuple(description["std"]),
        )
    except (
        OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, FedloomError,
    ) as error:  # fmt: skip
        again = fetch or f"fedloom data fetch {folder.name}"
        raise FedloomError(
            f"The data set in {folder} is corrupted ({error}). Fetch it again with: {again} --force"
        ) from None


def _describe(folder: Path, described: Mapping[str, Any]) -> None:
    """Write the description of the arrays in `folder`, with checksums of them and of itself."""
    sums = {part: _crc32(*_stamped(folder / f"{part}.npy")) for part in _PARTS}
    content = {**described, "crc32": sums}
    with atomic_file(folder / "dataset.json") as file:
        file.write_text(json.dumps({**content, "seal": _seal(content)}, indent=1))


def _verified(folder: Path) -> dict[str, Any]:
    """The description of the arrays in `folder`, all of them as they were written."""
    content = json.loads((folder / "dataset.json").read_text())
    if set(content) == set(_DESCRIBED):
        return _adopted(folder, content)
    if content.pop("seal") != _seal(content):
        raise ValueError("dataset.json has changed since it was written")
    for part, expected in content["crc32"].items():
        if _crc32(*_stamped(folder / f"{part}.npy")) != expected:
            raise ValueError(f"{part}.npy is not as it was written")
    return dict(content)


def _adopted(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """A data set from before there were checksums: it gets them if its images still have the mean
    and std that were measured when it was made."""
    found = channel_scale(np.load(folder / "x.npy", mmap_mode="r"))
    if found != (tuple(content["mean"]), tuple(content["std"])):
        raise ValueError("the mean and std of x.npy have changed since it was written")
    with suppress(OSError):  # a cache that can't be written to stays as it is
        _describe(folder, content)
    return content


def _seal(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _stamped(file: Path) -> tuple[Path, int, int]:
    state = file.stat()
    return file, state.st_size, state.st_mtime_ns


@cache
def _crc32(file: Path, size: int, changed: int) -> int:
    """Of a file's content, worked out once by a program that loads it for many runs."""
    total = 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total
