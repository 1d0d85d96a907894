"""The user's own data: arrays, a `.npz` file or a folder of images.

The keyword arguments of each function are the options a user may give; where the data has no
test part, `test_share` of every class is held out for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.data.dataset import Dataset, from_arrays, hold_out, measured
from fedloom.data.formats import read_image_folder, read_npz, reason
from fedloom.data.options import Value, integer, number, sizes
from fedloom.errors import FedloomError


def from_tuple(arrays: Sequence[Any], *, test_share: Value = 0.2, seed: Value = 0) -> Dataset:
    """(x, y) or (x, y, x_test, y_test)."""
    if len(arrays) not in (2, 4):
        raise FedloomError(
            f"{len(arrays)} arrays were given as data; give (x, y) or (x, y, x_test, y_test)."
        )
    x, y, x_test, y_test = (*arrays, None, None)[:4]
    share = number("test_share", test_share)
    return from_arrays(x, y, x_test, y_test, test_share=share, seed=integer("seed", seed))


def from_npz(path: Path, *, test_share: Value = 0.2, seed: Value = 0) -> Dataset:
    """A NumPy file with the arrays x and y, or x_train and y_train, and perhaps x_test, y_test."""
    try:
        held = {key.replace("_train", ""): array for key, array in read_npz(path).items()}
    except (OSError, ValueError) as error:
        raise FedloomError(f"Cannot read {path}: {reason(error)}") from None
    if not {"x", "y"} <= held.keys():
        raise FedloomError(
            f"{path} has the arrays {', '.join(sorted(held)) or 'none'}; it needs x and y, "
            "and may have x_test and y_test."
        )
    return from_arrays(
        held["x"],
        held["y"],
        held.get("x_test"),
        held.get("y_test"),
        name=path.stem,
        test_share=number("test_share", test_share),
        seed=integer("seed", seed),
    )


def from_folder(
    path: Path, *, size: Value | None = None, test_share: Value = 0.2, seed: Value = 0
) -> Dataset:
    """Images in a folder for each class."""
    height_width = None
    if size is not None:
        height, width = sizes("size", size, 2)
        height_width = height, width
    x, y, x_test, y_test, classes = read_image_folder(path, height_width)
    name = path.resolve().name
    if len(x_test):
        return measured(name, x, y, x_test, y_test, classes)
    share = number("test_share", test_share)
    return hold_out(name, x, y, classes, share, integer("seed", seed))
