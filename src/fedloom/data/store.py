"""Data sets in the cache: a folder of memory-mapped arrays and a small description.

A fetched data set is converted once to `.npy` files, so that loading it later takes no time and
no memory until images are used. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.errors import FedloomError
from fedloom.files import atomic_folder

_PARTS = ("x", "y", "x_test", "y_test")


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
        description = {
            "name": data.name,
            "classes": data.classes,
            "mean": data.mean,
            "std": data.std,
            "grouping": grouping and {"names": grouping.names, "group_of": grouping.group_of},
        }
        (fresh / "dataset.json").write_text(json.dumps(description, indent=1))


def holds(folder: Path) -> bool:
    """Whether a data set is kept as `folder`."""
    return (folder / "dataset.json").is_file()


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))


def read(folder: Path, grouped: bool = False) -> Dataset:
    """The data set kept as `folder`, images memory-mapped; `grouped` for its coarser labels."""
    try:
        description = json.loads((folder / "dataset.json").read_text())
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
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise FedloomError(
            f"The data set in {folder} is damaged ({error}). Fetch it again with: fedloom data "
            f"fetch {folder.name} --force"
        ) from None
