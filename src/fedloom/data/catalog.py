"""The catalogue: a data set by name, from the user's files or from Python objects.

`load` never downloads. A published data set that is not in the cache is refused with the command
that fetches it.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedloom.data import own, sources, store, text
from fedloom.data.dataset import Dataset, from_arrays, measured, resized, stratified
from fedloom.data.fetch import command
from fedloom.data.options import Value, integer, number, sizes
from fedloom.data.synthetic import synthetic
from fedloom.errors import FedloomError, unknown
from fedloom.tasks import AUTO, Classification, kind

Source = str | Path | Dataset | Any
SITES = "sites:"  # before a folder with a file or folder for every site
Loader = Callable[..., Dataset]  # its keyword-only arguments are the options of the data set


def load(
    source: Source,
    *,
    cache: Path | str | None = None,
    options: Mapping[str, Value] | None = None,
    by: str | None = None,
    task: str = AUTO,
) -> Dataset:
    """The data set that `source` names or holds.

    A built-in name; the path of a table, a `.npz` file, a folder of images or LEAF's JSON;
    `sites:DIR`; a tuple of arrays (x, y) or (x, y, x_test, y_test), or another object that holds
    data; or a `Dataset`, which is returned as it is. `by` is a column that models don't see, since
    it says whose row it is; `task` says what its labels are. Options that all of them have are
    `size`, which scales images to that many pixels a side, and `positive`, the class to find of
    two.
    """
    what, loader = _find(source, cache)
    given = dict(options or {})
    size, positive = given.pop("size", None), given.pop("positive", None)
    parameters = inspect.signature(loader).parameters.values()
    accepted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "task"]
    if size is not None and "size" in accepted:
        given["size"], size = size, None  # it loads them in that size
    for option in given:
        if option not in accepted:
            raise unknown(f"option of {what}", option, [*accepted, "size", "positive"])
    if by is not None and "user" in accepted:
        users = given.get("user", [])
        known = users if isinstance(users, list | tuple) else str(users).split(",")
        given["user"] = [*known, by]  # type: ignore[list-item]
    if any(p.name == "task" for p in parameters):
        given["task"] = task
    found = loader(**given).learning(task)
    if positive is not None:
        found = found.finding(_class_called(positive, found.classes))
    return found if size is None else resized(found, integer("size", size, low=1))


def _class_called(given: object, classes: Sequence[str]) -> str:
    """The class that an option names; a config turns yes and no into truth values."""
    if isinstance(given, bool):
        words = ("yes", "true", "on") if given else ("no", "false", "off")
        return next((name for name in classes if name.lower() in words), str(given))
    return str(given)


def natural(source: Source) -> str | None:
    """The default column to partition by, for data that comes with its clients."""
    if isinstance(source, str | Path):
        if str(source).startswith(SITES):
            return "site"
        if str(source) in _BUILT_IN:
            return _BUILT_IN[str(source)].dealt_by
        path = Path(source).expanduser()
        return "user" if own.is_leaf(path) or text.is_text(path) else None
    return "site" if source is not None and _objects().has_sites(source) else None


def is_by_class(name: str) -> bool:
    """Whether this is built-in data whose samples are of classes."""
    return name in _BUILT_IN and kind(_BUILT_IN[name].task).by_class


def built_in_task(name: str) -> str | None:
    """The task of built-in data; None for any other."""
    return _BUILT_IN[name].task if name in _BUILT_IN else None


def names() -> tuple[str, ...]:
    """The built-in data sets, the default first."""
    return tuple(_BUILT_IN)


def describe(cache: Path | str | None = None) -> list[dict[str, str | int]]:
    """The catalogue as rows of a table: name, size, and whether it is in the cache."""
    root = _root(cache)
    return [
        {
            "name": name,
            "what": entry.what,
            "task": entry.task,
            "samples": entry.images,
            "shape": "x".join(map(str, entry.shape)),
            "classes": entry.classes,
            **_room(name, entry, root),
        }
        for name, entry in _BUILT_IN.items()
    ]


def _room(name: str, entry: _Entry, root: Path) -> dict[str, str | int]:
    """The disk space that the data set takes, or would take, in the cache."""
    if name not in sources.names():
        return {"size": "none", "here": "yes"}
    splits = sources.EMNIST_CLASSES if name == "emnist" else (None,)
    folders = [root / sources.source(name, split).folder for split in splits]
    size = sum(store.size_on_disk(folder) for folder in folders if store.holds(folder))
    expected = entry.images * (math.prod(entry.shape) + 1)
    return {"size": f"{(size or expected) / 1e6:.0f} MB", "here": "yes" if size else "no"}


def _find(source: Source, cache: Path | str | None) -> tuple[str, Loader]:
    """What `source` is, for messages, and how to load it."""
    if isinstance(source, Dataset):
        return "a Dataset", lambda: source
    if not isinstance(source, str | Path):
        if _objects().reads(source):
            return f"a {type(source).__name__}", partial(own.from_object, source)
        if isinstance(source, tuple | list):
            return "arrays", partial(own.from_tuple, source)
        raise FedloomError(f"Data must be {_objects().KINDS}, not {type(source).__name__}.")
    if (name := str(source)) in _BUILT_IN:
        return f"'{name}'", partial(_BUILT_IN[name].load, _root(cache))
    if name.startswith(SITES):
        folder = Path(name.removeprefix(SITES)).expanduser()
        return "a folder of sites", partial(own.from_sites, folder)
    path = Path(source).expanduser()
    if own.is_leaf(path):
        return "LEAF's JSON", partial(own.from_leaf, path)
    if text.is_text(path):
        return "text", partial(text.from_text, path)
    if path.is_dir():
        return "a folder of images", partial(own.from_folder, path)
    if path.suffix == ".npz" and path.is_file():
        return "a .npz file", partial(own.from_npz, path)
    if own.is_table(path):
        return "a table", partial(own.from_table, path)
    if path.exists():
        raise FedloomError(
            f"{path} is neither a table ({', '.join(own.TABLES)}), a .npz file, LEAF's .json, text "
            f"({', '.join(text.ENDINGS)}), nor a folder of images or texts."
        )
    if path.suffix or "/" in name or os.sep in name:
        raise FedloomError(f"There is no file or folder {path}.")
    raise FedloomError(
        f"{unknown('data set', name, _BUILT_IN)} "
        "The path of a .csv, .parquet, .npz or .txt file or of a folder of images or texts can be "
        "given as well."
    )


def _objects() -> ModuleType:
    from fedloom.data import objects  # with pandas, which the built-in data does without

    return objects


def _root(cache: Path | str | None) -> Path:
    return Path(cache) if cache is not None else store.cache_dir()


def _digits(root: Path) -> Dataset:
    x, y = _scikit_digits()
    images = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)  # 17 grey levels
    test = stratified(y, 0.2, seed=0)  # a fixed test part
    return measured("digits", images[~test], y[~test], images[test], y[test], string.digits)


def _scikit_digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, from its file: importing scikit-learn takes over a second."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x, y


def _breast_cancer(root: Path) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    names = np.array(["benign", "malignant"])  # the positive class comes second
    return _table("breast-cancer", found, names[1 - found.target])


def _wine(root: Path) -> Dataset:
    from sklearn.datasets import load_wine

    found = load_wine()
    return _table("wine", found, found.target_names[found.target])


def _diabetes(root: Path) -> Dataset:
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)
    return _table("diabetes", found, found.target, task="regression", names=["progression"])


def _table(name: str, found: Any, y: np.ndarray, **kind: Any) -> Dataset:
    """One of scikit-learn's tables, with a fixed test part."""
    made = from_arrays(found.data.astype(np.float32), y, name=name, **kind)
    return replace(made, features=tuple(map(str, found.feature_names)))


def _harbour(root: Path, *, length: Value = text.LENGTH) -> Dataset:
    from fedloom.data.harbour import texts

    return text.of_texts("harbour", texts(), length=length)


def _synthetic(
    root: Path,
    *,
    samples: Value = 20_000,
    test_samples: Value = 4_000,
    shape: Value = "1x8x8",
    classes: Value = 10,
    noise: Value = 0.9,
    seed: Value = 0,
) -> Dataset:
    channels, height, width = sizes("shape", shape, 3)
    return synthetic(
        integer("samples", samples, low=1),
        integer("test_samples", test_samples),
        (channels, height, width),
        integer("classes", classes, low=2),
        number("noise", noise, low=0),
        integer("seed", seed),
    )


def _kept(root: Path, source: sources.Source, grouped: bool = False) -> Dataset:
    folder = root / source.folder
    if not store.holds(folder):
        raise FedloomError(f"Data set '{source.folder}' is not in {root}. Run: {command(source)}")
    return store.read(folder, grouped, command(source))


def _published(name: str) -> Loader:
    return lambda root: _kept(root, sources.source(name))


def _emnist(root: Path, *, split: Value = sources.EMNIST_DEFAULT) -> Dataset:
    return _kept(root, sources.source("emnist", str(split)))


def _cifar100(root: Path, *, labels: Value = "fine") -> Dataset:
    if labels not in ("fine", "coarse"):
        raise unknown("labels of cifar100", str(labels), ("fine", "coarse"))
    return _kept(root, sources.source("cifar100"), grouped=labels == "coarse")


@dataclass(frozen=True)
class _Entry:
    what: str
    images: int
    shape: tuple[int, int, int]
    classes: int
    load: Loader
    dealt_by: str | None = None  # a column, where the data comes with its clients
    task: str = Classification.name


_BUILT_IN = {
    "digits": _Entry("handwritten digits, with scikit-learn", 1_797, (1, 8, 8), 10, _digits),
    "breast-cancer": _Entry(
        "tumours by 30 numbers, benign or malignant, with scikit-learn",
        569,
        (1, 1, 30),
        2,
        _breast_cancer,
        task="binary",
    ),
    "wine": _Entry(
        "wines by 13 numbers, of three growers, with scikit-learn", 178, (1, 1, 13), 3, _wine
    ),
    "diabetes": _Entry(
        "patients by 10 numbers, and how the disease went on, with scikit-learn",
        442,
        (1, 1, 10),
        1,
        _diabetes,
        task="regression",
    ),
    "harbour": _Entry(
        "what eight people of a harbour say, letter by letter; length=",
        906,
        (1, 1, text.LENGTH),
        47,
        _harbour,
        dealt_by="user",
        task="next-token",
    ),
    "mnist": _Entry("handwritten digits", 70_000, (1, 28, 28), 10, _published("mnist")),
    "fashion-mnist": _Entry(
        "pictures of clothes", 70_000, (1, 28, 28), 10, _published("fashion-mnist")
    ),
    "emnist": _Entry(
        "handwritten letters and digits; split=" + "|".join(sources.EMNIST_CLASSES),
        131_600,
        (1, 28, 28),
        47,
        _emnist,
    ),
    "cifar10": _Entry("small photographs", 60_000, (3, 32, 32), 10, _published("cifar10")),
    "cifar100": _Entry(
        "small photographs; labels=fine|coarse", 60_000, (3, 32, 32), 100, _cifar100
    ),
    "tiny-imagenet": _Entry(
        "photographs of 200 kinds", 110_000, (3, 64, 64), 200, _published("tiny-imagenet")
    ),
    "synthetic": _Entry(
        "pictures made on demand; samples=, shape=, classes=, noise=",
        24_000,
        (1, 8, 8),
        10,
        _synthetic,
    ),
}
