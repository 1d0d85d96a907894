"""The user's own data: tables, arrays, pictures in folders, a file for every site, Python objects.

The keyword arguments of each function are the options a user may give; where the data has no
test part, `test_share` of every class is held out for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.dataset import Dataset, from_arrays, hold_out, measured
from fedloom.data.formats import class_folders, read_image_folder, read_npz, reason
from fedloom.data.options import Value, integer, number, sizes
from fedloom.data.origin import Origin
from fedloom.errors import FedloomError
from fedloom.tasks import AUTO

if TYPE_CHECKING:
    import pandas as pd

    from fedloom.data.raw import Raw

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")
_LEAF_HEAD = 4096  # bytes within which a LEAF file mentions its users
_LABELS_FILE = "labels.csv"
_FILE_COLUMNS = ("file", "filename", "file_name", "image", "path", "name")


def is_table(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(TABLES)


def is_leaf(path: Path) -> bool:
    """Whether there are LEAF's files: a .json, or a folder of them, or of train and test."""
    if path.is_file():
        return path.suffix == ".json"
    folders = [folder for folder in (path, path / "train") if folder.is_dir()]
    return any(_begins_as_leaf(file) for folder in folders for file in folder.glob("*.json"))


def _begins_as_leaf(file: Path) -> bool:
    with file.open("rb") as content:
        return b'"user' in content.read(_LEAF_HEAD)


def from_leaf(
    path: Path,
    *,
    shape: Value | None = None,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """LEAF's JSON; `shape` is what rows of numbers are pictures of, such as 1x28x28."""
    from fedloom.data.leaf import read

    return read(path, shape, test_share, seed, task)


def from_tuple(
    arrays: Sequence[Any], *, test_share: Value = 0.2, seed: Value = 0, task: str = AUTO
) -> Dataset:
    """(x, y) or (x, y, x_test, y_test)."""
    if len(arrays) not in (2, 4):
        raise FedloomError(
            f"{len(arrays)} arrays were given as data; give (x, y) or (x, y, x_test, y_test)."
        )
    x, y, x_test, y_test = (*arrays, None, None)[:4]
    share = number("test_share", test_share)
    return from_arrays(
        x, y, x_test, y_test, test_share=share, seed=integer("seed", seed), task=task
    )


def from_npz(path: Path, *, test_share: Value = 0.2, seed: Value = 0, task: str = AUTO) -> Dataset:
    """A NumPy file with the arrays x and y, or x_train and y_train, and perhaps x_test, y_test;
    other arrays with a value for each row are columns to deal by."""
    held = _read_npz(path)
    plain = {key.removesuffix("_train"): array for key, array in held.items()}
    if not {"x", "y"} <= plain.keys():
        raise FedloomError(
            f"{path} has the arrays {', '.join(sorted(held)) or 'none'}; it needs x and y, "
            "and may have x_test and y_test."
        )
    if set(plain) <= {"x", "y", "x_test", "y_test"}:
        return from_arrays(
            plain["x"], plain["y"], plain.get("x_test"), plain.get("y_test"), name=path.stem,
            test_share=number("test_share", test_share), seed=integer("seed", seed), task=task,
        )  # fmt: skip
    raw = _columns(path, held)
    return raw.dataset(
        path.stem, label="y", features="x", test_share=test_share, seed=seed, task=task
    )


def from_table(
    path: Path,
    *,
    label: Value | None = None,
    user: Value | None = None,
    features: Value | None = None,
    split: Value | None = None,
    test: Value | None = None,
    missing: Value = "refuse",
    text: Value | None = None,
    length: Value | None = None,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """A CSV or Parquet file; `test` is a second one with the test part."""
    from fedloom.data.raw import Raw

    raw = _table(path)
    if test is not None:
        file = Path(str(test)).expanduser()
        if not is_table(file):
            raise FedloomError(f"test={test} must be a file that ends in {' or '.join(TABLES)}.")
        raw = Raw.joined([raw, _table(file).as_test()])
    return raw.dataset(
        path.name.partition(".")[0], label=label, user=user, features=features, split=split,
        missing=missing, text=text, length=length, test_share=test_share, seed=seed, task=task,
    )  # fmt: skip


def from_folder(
    path: Path,
    *,
    size: Value | None = None,
    label: Value | None = None,
    user: Value | None = None,
    split: Value | None = None,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """Images in a folder for each class, or as a file labels.csv in the folder says."""
    name = path.resolve().name
    if (path / _LABELS_FILE).is_file():
        raw, image = _labelled(path)
        return raw.dataset(
            name, label=label, user=user, features=image, split=split, size=size,
            test_share=test_share, seed=seed, task=task,
        )  # fmt: skip
    for option, value in (("label", label), ("user", user), ("split", split)):
        if value is not None:
            raise FedloomError(
                f"{option}={value} names a column, but {path} has no {_LABELS_FILE} with "
                "columns: its classes are folders. Leave it out, or write that file."
            )
    height_width = None
    if size is not None:
        height, width = sizes("size", size, 2)
        height_width = height, width
    x, y, x_test, y_test, classes = read_image_folder(path, height_width)
    if len(x_test):
        return measured(name, x, y, x_test, y_test, classes)
    share = number("test_share", test_share)
    return hold_out(name, x, y, classes, share, integer("seed", seed))


def from_sites(
    path: Path,
    *,
    label: Value | None = None,
    user: Value | None = None,
    features: Value | None = None,
    text: Value | None = None,
    length: Value | None = None,
    missing: Value = "refuse",
    size: Value | None = None,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """A file or folder for every site; its name is the site's, in the column `site`."""
    from fedloom.data.raw import Raw

    if not path.is_dir():
        raise FedloomError(f"sites:{path} must be a folder with a file or folder for every site.")
    there = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    sites = {p.name if p.is_dir() else p.name.partition(".")[0]: p for p in there}
    if len(sites) < len(there):
        raise FedloomError(f"Two sites in {path} have the same name. Rename one of them.")
    return Raw.of_sites({name: _site(p) for name, p in sites.items()}).dataset(
        path.resolve().name, label=label, user=user, features=features, text=text, length=length,
        missing=missing, size=size,
        test_share=test_share, seed=seed, task=task,
    )  # fmt: skip


def from_object(
    given: Any,
    *,
    label: Value | None = None,
    user: Value | None = None,
    features: Value | None = None,
    split: Value | None = None,
    text: Value | None = None,
    length: Value | None = None,
    missing: Value = "refuse",
    size: Value | None = None,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """A Python object that `objects.reads`."""
    from fedloom.data.objects import raw

    return raw(given).dataset(
        "data", label=label, user=user, features=features, split=split, text=text, length=length,
        missing=missing, size=size,
        test_share=test_share, seed=seed, task=task,
    )  # fmt: skip


def _site(path: Path) -> Raw:
    """One site: a table, a .npz file, or a folder with train and test files or class folders."""
    from fedloom.data.raw import Raw

    if read := _reader(path):
        return read(path)
    if not path.is_dir():
        raise FedloomError(
            f"{path} is no site's data: give a table ({', '.join(TABLES)}), a .npz file, or a "
            "folder of these or of class folders with images."
        )
    files = {p.name.partition(".")[0]: p for p in sorted(path.iterdir()) if _reader(p)}
    if (path / _LABELS_FILE).is_file():
        return _labelled(path)[0]
    if "train" in files or len(files) == 1:
        train = files["train"] if "train" in files else next(iter(files.values()))
        parts = [_reader(train)(train)]  # type: ignore[misc]
        if "test" in files:
            parts.append(_reader(files["test"])(files["test"]).as_test())  # type: ignore[misc]
        return Raw.joined(parts)
    images, classes = class_folders(path)
    return Raw.of({"image": images, "label": classes})


def _reader(path: Path) -> Callable[[Path], Raw] | None:
    if is_table(path):
        return _table
    return _npz if path.is_file() and path.suffix == ".npz" else None


def _npz(path: Path) -> Raw:
    return _columns(path, _read_npz(path))


def _columns(path: Path, held: dict[str, np.ndarray]) -> Raw:
    from fedloom.data.raw import Raw

    try:
        return Raw.of_arrays(held)
    except FedloomError as error:
        raise FedloomError(f"{path}: {error}") from None


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        return read_npz(path)
    except (OSError, ValueError) as error:
        raise FedloomError(f"Cannot read {path}: {reason(error)}") from None


def _table(path: Path) -> Raw:
    from fedloom.data.raw import Raw

    frame, sign = _read_frame(path)
    if not len(frame):
        raise FedloomError(f"{path} has no rows.")
    raw = Raw.of({name: frame[name] for name in frame.columns})
    return replace(raw, origins=(Origin(path, len(frame), sign),))


def _read_frame(path: Path) -> tuple[pd.DataFrame, str]:
    """The table in a file, its columns' names as text; and what separates its cells ("": it is
    no text)."""
    import pandas as pd

    sign = ""
    try:
        if path.suffix in (".parquet", ".pq"):
            frame = pd.read_parquet(path)
        else:
            sign = "\t" if ".tsv" in path.name else ","
            frame = pd.read_csv(path, sep=sign)
            for other in (";", "\t"):
                if len(frame.columns) == 1 and other in str(frame.columns[0]):
                    frame, sign = pd.read_csv(path, sep=other), other
    except (OSError, ValueError) as error:
        raise FedloomError(f"Cannot read {path}: {reason(error)}") from None
    frame.columns = [str(name).strip() for name in frame.columns]
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise FedloomError(f"{path} has two columns '{twice}'. Rename one of them.")
    if len(frame.columns) > 1 and frame.columns[0] == "Unnamed: 0":
        frame = frame.iloc[:, 1:]  # the row numbers that pandas writes: nothing to learn from
    return frame, sign


def _labelled(path: Path) -> tuple[Raw, str]:
    """Images and what the folder's labels.csv says of them; the column that names their files."""
    from fedloom.data.raw import LABELS

    raw = _table(path / _LABELS_FILE)
    names = list(raw.columns)
    column = next((n for n in names if n.lower() in _FILE_COLUMNS), names[0])
    files = [path / str(file) for file in raw[column]]
    for file in files:
        if not file.is_file():
            raise FedloomError(f"{path / _LABELS_FILE} names {file}, and there is no such file.")
    raw.columns[column] = files
    if len(names) == 2 and not any(name.lower() in LABELS for name in names):
        other = next(name for name in names if name != column)
        raw.columns = {column: files, "label": raw[other]}
    return raw, column
