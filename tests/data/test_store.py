"""A data set in the cache is as it was written, or it is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import store
from fedloom.data.catalog import load
from fedloom.data.dataset import Dataset
from fedloom.errors import FedloomError

PARTS = ("x", "y", "x_test", "y_test")


def flip(file: Path, at: int) -> None:
    """One bit, and the times of the file as they were: what a disk does, for the next program."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[at] ^= 4
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    store._crc32.cache_clear()


def test_what_is_read_is_what_was_written(small: Dataset, tmp_path: Path) -> None:
    store.write(tmp_path / "toy", small, store.Grouping(("low", "high"), (0,) * 5 + (1,) * 5))
    read = store.read(tmp_path / "toy")
    assert (read.classes, read.mean, read.std) == (small.classes, small.mean, small.std)
    for part in PARTS:
        assert np.array_equal(getattr(read, part), getattr(small, part))
    assert store.read(tmp_path / "toy", grouped=True).classes == ("low", "high")


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_in_an_array_is_noticed(small: Dataset, tmp_path: Path, part: str) -> None:
    store.write(tmp_path / "toy", small)
    flip(tmp_path / "toy" / f"{part}.npy", -1)
    with pytest.raises(FedloomError, match=rf"toy is corrupted \({part}.npy is not as .* --force"):
        store.read(tmp_path / "toy")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"std": [', '"std": [Infinity, '),
        lambda text: text.replace('"std"', '"sud"'),
        lambda text: text.replace('"seal"', '"seam"'),
        lambda text: text.replace('"crc32"', '"crc31"'),
        lambda text: text.replace('"0"', '"zero"'),
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
    ],
)
def test_a_changed_description_is_noticed(
    small: Dataset, tmp_path: Path, change: Callable[[str], str]
) -> None:
    store.write(tmp_path / "toy", small)
    about = tmp_path / "toy" / "dataset.json"
    about.write_text(change(about.read_text()))
    with pytest.raises(FedloomError, match=r"toy is corrupted .* fetch toy --force"):
        store.read(tmp_path / "toy")


def test_the_command_that_mends_it_names_the_split(small: Dataset, cache: Path) -> None:
    store.write(cache / "emnist-letters", small)
    flip(cache / "emnist-letters" / "x.npy", -1)
    with pytest.raises(FedloomError, match="fetch emnist --split letters --force"):
        load("emnist", options={"split": "letters"})


def before_checksums(folder: Path, data: Dataset) -> Path:
    """A data set as earlier versions kept it."""
    store.write(folder, data)
    about = json.loads((folder / "dataset.json").read_text())
    old = {key: value for key, value in about.items() if key not in ("crc32", "seal")}
    (folder / "dataset.json").write_text(json.dumps(old))
    return folder


def test_a_data_set_without_checksums_gets_them(small: Dataset, tmp_path: Path) -> None:
    folder = before_checksums(tmp_path / "toy", small)
    assert np.array_equal(store.read(folder).y, small.y)
    flip(folder / "y.npy", -1)
    with pytest.raises(FedloomError, match=r"y\.npy is not as it was written"):
        store.read(folder)


def test_a_data_set_without_checksums_is_verified_by_its_mean_and_std(
    small: Dataset, tmp_path: Path
) -> None:
    folder = before_checksums(tmp_path / "toy", small)
    flip(folder / "x.npy", -1)
    with pytest.raises(FedloomError, match=r"mean and std of x\.npy have changed"):
        store.read(folder)
