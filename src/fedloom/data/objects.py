"""Data in Python objects of other libraries, recognised by their interface: none is required here.

A pandas DataFrame, a torch `Dataset`, a Hugging Face `datasets` object, a dict of arrays; parts of
one for training and for test; the partitions that `flwr_datasets` deals; or one object per site.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.data.raw import Raw
from fedloom.errors import FedloomError

KINDS = (
    "a name, a path, a tuple of arrays (x, y) or (x, y, x_test, y_test), a dict of arrays, a "
    "DataFrame, a torch or Hugging Face dataset, a pair (train, test) of these, a dict or list "
    "with one for every client, flwr_datasets partitions, or a Dataset"
)


def reads(given: Any) -> bool:
    """Whether `raw` takes this."""
    return has_sites(given) or _part(given) is not None or _is_pair(given) or _has_splits(given)


def has_sites(given: Any) -> bool:
    """Whether the object says itself what each client holds."""
    if hasattr(given, "load_partition"):
        return True
    if isinstance(given, Mapping):
        return bool(given) and not _has_splits(given) and all(map(_is_site, given.values()))
    return isinstance(given, list) and bool(given) and all(_part(one) is not None for one in given)


def raw(given: Any) -> Raw:
    """The columns of an object that `reads` is true of."""
    if hasattr(given, "load_partition"):
        return _flower(given)
    if _has_splits(given):
        test = next((given[word] for word in ("test", "validation", "val") if word in given), None)
        parts = [raw(given["train"])] + ([] if test is None else [raw(test).as_test()])
        return Raw.joined(parts)
    if _is_pair(given):
        return Raw.joined([raw(given[0]), raw(given[1]).as_test()])
    if has_sites(given):
        each = given if isinstance(given, Mapping) else dict(enumerate(given))
        return Raw.of_sites({str(name): _site(value) for name, value in each.items()})
    read = _part(given)
    assert read is not None
    return read(given)


def _part(given: Any) -> Callable[[Any], Raw] | None:
    """What reads a single object."""
    if hasattr(given, "iloc") and hasattr(given, "columns"):
        return lambda frame: Raw.of({name: frame[name] for name in frame.columns})
    if hasattr(given, "column_names") and hasattr(given, "features"):
        return _hugging_face
    if isinstance(given, Mapping) and given and all(map(_is_column, given.values())):
        return _arrays
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.utils.data.Dataset):
        return _torch
    return None


def _is_column(values: Any) -> bool:
    listed = isinstance(values, list) and not (values and _part(values[0]) is not None)
    return listed or (hasattr(values, "__array__") and hasattr(values, "shape"))


def _is_site(value: Any) -> bool:
    return _is_arrays(value) or _part(value) is not None


def _is_arrays(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (2, 4) and _part(value[0]) is None


def _is_pair(given: Any) -> bool:
    """(train, test), neither of them an array."""
    return isinstance(given, tuple) and len(given) == 2 and all(_part(g) is not None for g in given)


def _has_splits(given: Any) -> bool:
    return isinstance(given, Mapping) and "train" in given and _part(given["train"]) is not None


def _site(value: Any) -> Raw:
    if not _is_arrays(value):
        return raw(value)
    names = ("x", "y", "x_test", "y_test")
    return Raw.of_arrays({n: np.asarray(v) for n, v in zip(names, value, strict=False)})


def _arrays(given: Mapping[str, Any]) -> Raw:
    held = {name: v if isinstance(v, list) else np.asarray(v) for name, v in given.items()}
    return Raw.of_arrays(held) if {"x", "x_train"} & held.keys() else Raw.of(held)


def _hugging_face(given: Any) -> Raw:
    classes = {
        name: kind.names
        for name, kind in dict(given.features or {}).items()
        if isinstance(getattr(kind, "names", None), list | tuple)
    }
    return Raw.of({name: list(given[name]) for name in given.column_names}, classes)


def _torch(given: Any) -> Raw:
    """Pairs of a sample and its label."""
    tensors = getattr(given, "tensors", None)
    if tensors is not None and len(tensors) == 2:
        x, y = (np.asarray(tensor) for tensor in tensors)
        return Raw.of({"x": x, "y": y})
    try:
        pairs: list[Any] = [given[i] for i in range(len(given))]
    except (TypeError, NotImplementedError):  # one that is only iterated over
        pairs = list(given)
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise FedloomError(
            f"A torch dataset gives pairs of a sample and its label; this {type(given).__name__} "
            "does not. Give arrays (x, y) instead."
        )
    names = getattr(getattr(given, "dataset", given), "classes", None)
    whole = names is not None and all(isinstance(int(y), int) and y == int(y) for _, y in pairs)
    samples = [x if hasattr(x, "convert") else np.asarray(x) for x, _ in pairs]
    if np.ndim(samples[0]) == 0 and not hasattr(samples[0], "convert"):
        samples = [np.reshape(x, 1) for x in samples]
    labels = [y.item() if hasattr(y, "item") else y for _, y in pairs]
    return Raw.of({"x": samples, "y": labels}, {"y": _texts(names)} if whole else None)


def _texts(names: Any) -> Sequence[str]:
    return [str(name) for name in names]


def _flower(given: Any) -> Raw:
    """The partitions of a flwr_datasets FederatedDataset, or of one of its partitioners."""
    first = given.load_partition(0)  # which makes the object read its data
    by_split = getattr(given, "partitioners", None)
    dealer, split = given, ""
    if by_split is not None:
        split = "train" if "train" in by_split else next(iter(by_split))
        dealer = by_split[split]
        if len(by_split) > 1:
            first = given.load_partition(0, split)
    count = int(dealer.num_partitions)
    more = (split,) if by_split is not None and len(by_split) > 1 else ()
    parts = [first, *(given.load_partition(i, *more) for i in range(1, count))]
    named = getattr(dealer, "partition_id_to_natural_id", None) or {}
    read = {named.get(i, str(i)): raw(part) for i, part in enumerate(parts)}
    owners = _owners(read) if named else ()
    sites = Raw.of_sites({str(name): _without(part, owners) for name, part in read.items()})
    test = _flower_test(given, split)
    if test is None:
        return sites
    nobody = Raw.of_sites({"": _without(raw(test), owners).as_test()})
    return Raw.joined([sites, nobody])


def _owners(parts: Mapping[Any, Raw]) -> list[str]:
    """The columns that say whose each row is: they are no features."""
    first = next(iter(parts.values()))
    return [
        name
        for name in first.columns
        if all(
            isinstance(value, type(owner)) and value == owner
            for owner, part in parts.items()
            for value in part.columns.get(name, (None,))
        )
    ]


def _without(part: Raw, names: Sequence[str]) -> Raw:
    kept = {name: values for name, values in part.columns.items() if name not in names}
    return replace(part, columns=kept)


def _flower_test(given: Any, split: str) -> Any:
    if split == "test" or not hasattr(given, "load_split"):
        return None
    try:
        return given.load_split("test")
    except (ValueError, KeyError):  # it has none
        return None
