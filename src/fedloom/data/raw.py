"""Named columns, one value a row: data from files and Python objects, before it is a data set.

A `Raw` is what readers make: it does not say yet which column is the label. `dataset` finds that
out, encodes what is text, and drops what no model should see, such as whose row it is.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedloom.data.dataset import Dataset, from_arrays
from fedloom.data.formats import read_images
from fedloom.data.options import Value, integer, number, sizes
from fedloom.data.origin import Origin
from fedloom.errors import FedloomError, unknown
from fedloom.tasks import AUTO, Regression

LABELS = ("label", "labels", "target", "class", "y")  # a label column is known by these names
SITE = "site"  # the column that says which site a row is of

_MOST_VALUES = 100  # different texts in a column that is encoded, one number for each
_MISSING = ("refuse", "drop")
_CORRECT = (
    "Write numbers there, or leave such cells empty and drop their rows (data_options.missing=drop)"
)
_LEAVE_OUT = "leave the column out (data_options.features=COLUMN,COLUMN)"
_TEST_WORDS = {"train": False, "training": False, "test": True, "val": True, "validation": True}

Mask = npt.NDArray[np.bool_]


@dataclass
class Raw:
    """Columns by name; `test` marks the rows of the test part, `classes` are the names behind
    the numbers in a column, and `origins` the files that the rows are of, one after another."""

    columns: dict[str, Any]
    test: Mask
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alphabet: str = ""  # of a column of text, by the numbers of its letters
    origins: tuple[Origin, ...] = ()

    @staticmethod
    def of(columns: Mapping[str, Any], classes: Mapping[str, Sequence[str]] | None = None) -> Raw:
        """Columns of training data."""
        held = {str(name): values for name, values in columns.items()}
        lengths = {name: len(values) for name, values in held.items()}
        if len(set(lengths.values())) > 1:
            few, many = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise FedloomError(
                f"Column '{many}' has {lengths[many]} rows, but '{few}' has {lengths[few]}."
            )
        named = {str(name): tuple(map(str, names)) for name, names in (classes or {}).items()}
        return Raw(held, np.zeros(next(iter(lengths.values()), 0), bool), named)

    @staticmethod
    def of_arrays(held: Mapping[str, Any]) -> Raw:
        """Arrays x and y (or x_train, y_train), perhaps x_test and y_test, and others with a value
        for each row, whose names may end in the same way."""
        plain = {key.removesuffix("_train"): array for key, array in held.items()}
        test = {key[:-5]: array for key, array in plain.items() if key.endswith("_test")}
        train = {key: array for key, array in plain.items() if not key.endswith("_test")}
        if not {"x", "y"} <= train.keys() or not ({"x", "y"} <= test.keys() or not test):
            raise FedloomError(
                f"There are the arrays {', '.join(sorted(held)) or 'none'}; x and y are needed, "
                "and there may be x_test and y_test, both or neither."
            )
        if not test:
            return Raw.of(train)
        for one in set(train) ^ set(test):
            raise FedloomError(
                f"The array '{one}' exists for only one of training and test data. Give {one} "
                f"and {one}_test, or neither."
            )
        return Raw.joined([Raw.of(train), Raw.of(test).as_test()])

    def as_test(self) -> Raw:
        """The same rows, for testing."""
        return dataclasses.replace(self, test=np.ones_like(self.test))

    @staticmethod
    def joined(parts: Sequence[Raw]) -> Raw:
        """The parts concatenated; all must have the same columns."""
        first, *others = parts
        for part in others:
            if odd := set(first.columns) ^ set(part.columns):
                raise FedloomError(
                    f"Not all parts of the data have the column '{min(odd)}'. Give all of them the "
                    "same columns."
                )
        columns = {name: _stacked([part.columns[name] for part in parts]) for name in first.columns}
        classes = {name: names for part in parts for name, names in part.classes.items()}
        known = all(part.origins for part in parts)
        origins = tuple(origin for part in parts for origin in part.origins) if known else ()
        test = np.concatenate([part.test for part in parts])
        return Raw(columns, test, classes, origins=origins)

    @staticmethod
    def of_sites(sites: Mapping[str, Raw]) -> Raw:
        """The rows of all sites, and the column `site`."""
        if not sites:
            raise FedloomError("There are no sites. Give data for each.")
        named = []
        for site, raw in sites.items():
            if SITE in raw.columns:
                raise FedloomError(
                    f"The data of {site} has a column '{SITE}'  of its own, but that name is "
                    "reserved for the site. Rename it."
                )
            column = np.full(len(raw.test), site, dtype=object)
            named.append(dataclasses.replace(raw, columns={**raw.columns, SITE: column}))
        return Raw.joined(named)

    def dataset(
        self,
        name: str,
        *,
        label: Value | None = None,
        user: Value | None = None,
        features: Value | None = None,
        split: Value | None = None,
        missing: Value = "refuse",
        size: Value | None = None,
        text: Value | None = None,
        length: Value | None = None,
        test_share: Value = 0.2,
        seed: Value = 0,
        task: str = AUTO,
    ) -> Dataset:
        """The data set of these columns, by the options that a user may give.

        `label` (several: labels or values of each sample) and `features` are columns, `user` those
        that no model sees; `split` says train or test of each row; rows with empty cells are
        refused, or left out (`missing=drop`); pictures are scaled to `size`; the column `text` is
        read letter by letter, as sequences of `length`.
        """
        if text is not None:
            self._spell(self._name(text, "text"), length)
            features = text
        elif length is not None:
            raise FedloomError("data_options.length is of sequences: say which column with text.")
        asked, aside = self._names(features, "features"), self._names(user, "user")
        aside += [SITE] * (SITE in self.columns and SITE not in aside)
        targets = self._labels_of(label)
        if split is not None:
            column = self._name(split, "split")
            self.test |= self._is_test(column)
            aside.append(column)
        other = [n for n in self.columns if n not in (*targets, *aside)]
        wide = [n for n in asked or other if n not in (*targets, *aside) and _is_wide(self[n])]
        seen = asked or wide or other
        if not seen or (wide and len(seen) > 1):
            raise FedloomError(
                f"'{name}' must have one column of pictures or arrays, or others of numbers and "
                f"texts, besides its label '{targets[0]}'; it has {', '.join(seen) or 'none'}. "
                "Choose it with data_options.features=COLUMN."
            )
        used = [*targets, *seen, *(n for n in aside if n not in seen)]
        rows = self._rows(used, seen, str(missing))
        labels = self._labels(targets, rows, task)
        if wide:
            (one,) = seen
            x, names = _array(one, _picked(self[one], rows), size), list[str]()
        else:
            x, names = self._encoded({n: self._series(n)[rows] for n in seen})
        cut = int(np.count_nonzero(~self.test[rows]))
        x_test, y_test = (x[cut:], labels[cut:]) if cut < len(rows) else (None, None)
        made = from_arrays(
            x[:cut], labels[:cut], x_test, y_test, name=name, classes=self.classes.get(targets[0]),
            test_share=number("test_share", test_share), seed=integer("seed", seed), task=task,
            names=targets,
        )  # fmt: skip
        kept = [n for n in self.columns if not _is_wide(self[n]) and (n not in seen or n in aside)]
        columns = {n: self._series(n)[rows].to_numpy() for n in kept}
        tokens = len(self.alphabet)
        return dataclasses.replace(made, columns=columns, features=tuple(names), tokens=tokens)

    def _spell(self, name: str, length: Value | None) -> None:
        """A column of texts as rows of numbers of letters, cut or filled to one length."""
        from fedloom.data.text import alphabet_of, spelled

        texts = [str(text) for text in self[name]]
        self.alphabet = alphabet_of(texts)
        most = max(map(len, texts), default=1)
        wanted = most if length is None else integer("length", length, low=1)
        self.columns[name] = spelled(texts, self.alphabet, wanted)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def _series(self, name: str) -> pd.Series:
        values = self.columns[name]
        if isinstance(values, pd.Series):
            return values.reset_index(drop=True)
        return pd.Series(np.asarray(values) if hasattr(values, "__array__") else list(values))

    def _names(self, given: Value | None, option: str) -> list[str]:
        """Columns as a user lists them: a,b or [a, b]."""
        if given is None:
            return []
        words: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if len(words) == 1 and str(words[0]) not in self.columns:
            words = str(words[0]).split(",")
        found = [str(word).strip() for word in words]
        for word in found:
            if word not in self.columns:
                what = "column of users (by:COLUMN)" if option == "user" else f"column in {option}"
                raise unknown(what, word, self.columns)
        return list(dict.fromkeys(found))

    def _name(self, given: Value, option: str) -> str:
        if str(given) not in self.columns:
            raise unknown(f"column in {option}", str(given), self.columns)
        return str(given)

    def _label(self, given: Value | None) -> str:
        if given is not None:
            return self._name(given, "label")
        lower = {name.lower(): name for name in reversed(self.columns)}
        found = next((lower[word] for word in LABELS if word in lower), None)
        if found is None:
            raise FedloomError(
                "Which column is the label? Set data_options.label=COLUMN; there are "
                f"{', '.join(map(str, self.columns))}."
            )
        return found

    def _labels_of(self, given: Value | None) -> list[str]:
        """The columns that are to be predicted."""
        if given is None or (isinstance(given, str) and given in self.columns):
            return [self._label(given)]
        return self._names(given, "label")

    def _labels(self, names: Sequence[str], rows: npt.NDArray[np.int64], task: str) -> Any:
        if len(names) > 1:
            columns = [self._series(name)[rows] for name in names]
            for name, column in zip(names, columns, strict=True):
                self._check_label(name, column, task)
                if not pd.api.types.is_numeric_dtype(column) and column.dtype != bool:
                    raise FedloomError(
                        f"The label column '{name}' must hold numbers, as there are several: 0 or "
                        "1 where a label holds, or values."
                    )
            return np.stack([column.to_numpy() for column in columns], axis=1)
        (name,) = names
        if _is_wide(self[name]):
            return _array(name, _picked(self[name], rows), None)
        column = self._series(name)[rows]
        self._check_label(name, column, task)
        if isinstance(column.dtype, pd.CategoricalDtype):
            column = column.astype(object)
        return list(column.tolist())

    def _is_test(self, column: str) -> Mask:
        words = self._series(column).astype(str).str.strip().str.lower()
        odd = sorted(set(words) - set(_TEST_WORDS))
        if odd:
            raise FedloomError(
                f"The column '{column}' says of every row whether it is for training: train or "
                f"test, not '{odd[0]}'."
            )
        return np.array([_TEST_WORDS[word] for word in words], bool)

    def _rows(
        self, names: Sequence[str], features: Sequence[str], missing: str
    ) -> npt.NDArray[np.int64]:
        """The rows to use: those for training first, and none with an empty cell in the columns of
        these names, of which some are `features`."""
        if missing not in _MISSING:
            raise unknown("way with missing values", missing, _MISSING)
        narrow = {name: self._series(name).isna() for name in names if not _is_wide(self[name])}
        blank = {name: cells.to_numpy() for name, cells in narrow.items() if cells.any()}
        if blank and missing == "refuse":
            raise FedloomError(
                "; ".join(self._blank(name, cells, features) for name, cells in blank.items())
                + ". Fill them, or drop such rows (data_options.missing=drop)"
                + f"; or {_LEAVE_OUT}" * any(name in features for name in blank)
                + "."
            )
        empty = np.logical_or.reduce([np.zeros(len(self.test), bool), *blank.values()])
        counts = ", ".join(f"{name} {cells.sum()}" for name, cells in blank.items())
        if blank and empty.all():
            raise FedloomError(
                f"All {len(empty)} rows have empty cells ({counts}), so missing=drop leaves none. "
                f"Fill them, or {_LEAVE_OUT}."
            )
        if blank:
            warnings.warn(
                f"{empty.sum()} of {len(empty)} rows left out for empty cells: {counts}.",
                stacklevel=3,
            )
        order = np.argsort(self.test, kind="stable")
        return order[~empty[order]].astype(np.int64)

    def _blank(self, name: str, cells: Mask, features: Sequence[str]) -> str:
        """How many cells of a column are empty, in words."""
        count, first = int(cells.sum()), self._place(int(cells.argmax()))
        unknown = "" if name in features else ", so it does not say whose or what those rows are"
        return f"'{name}' has {_cells(count, 'empty ')}, the first in {first}{unknown}"

    def _place(self, row: int) -> str:
        """Where a row is, as the user finds it."""
        for origin in self.origins:
            if row < origin.rows:
                return origin.place(row) + f" of {origin.file.name}" * (len(self.origins) > 1)
            row -= origin.rows
        return f"row {row} (from 0)"

    def _encoded(self, columns: Mapping[str, pd.Series]) -> tuple[np.ndarray, list[str]]:
        """A table of numbers and its columns' names: text columns are one-hot encoded. The index
        of every column says which rows these are."""
        parts: list[np.ndarray] = []
        names: list[str] = []
        for column, values in columns.items():
            if pd.api.types.is_bool_dtype(values) or pd.api.types.is_numeric_dtype(values):
                self._check_finite(column, values)
                parts.append(values.to_numpy()[:, None])
                names.append(column)
                continue
            if pd.api.types.is_datetime64_any_dtype(values):
                raise FedloomError(
                    f"The column '{column}' holds dates. Convert them to numbers, or {_LEAVE_OUT}."
                )
            texts = values.astype(str)
            found = sorted(texts.unique())
            self._check_texts(column, texts, len(found))
            if len(found) > _MOST_VALUES:
                raise FedloomError(
                    f"The column '{column}' has {len(found)} different texts, such as "
                    f"'{found[0]}'; at most {_MOST_VALUES} become columns of numbers. Does it name "
                    f"the owner of a row (--partition by:{column}, or data_options.user={column})? "
                    f"Else {_LEAVE_OUT}."
                )
            parts.append(texts.to_numpy()[:, None] == np.array(found, dtype=object))
            names += [f"{column}={text}" for text in found]
        whole = all(part.dtype.kind in "biu" for part in parts)
        kind = np.int64 if whole else np.float64
        return np.concatenate([part.astype(kind) for part in parts], 1), names

    def _check_finite(
        self, column: str, values: pd.Series, instead: str = f"; or {_LEAVE_OUT}"
    ) -> None:
        """Refuse what no model can compute with."""
        with np.errstate(over="ignore"):  # models compute in single precision
            bad = ~np.isfinite(values.to_numpy().astype(np.float32))
        if bad.any():
            first, count = values.index[int(bad.argmax())], int(bad.sum())
            raise FedloomError(
                f"'{column}' has {_cells(count)} with infinite or too large numbers, the first "
                f"in {self._place(first)}: {values[first]}. {_CORRECT}{instead}."
            )

    def _check_texts(self, column: str, texts: pd.Series, different: int) -> None:
        """Refuse a column of numbers with a word in it that has too many values to be text."""
        said = self._almost_numbers(column, texts)
        if said and different > _MOST_VALUES:
            raise FedloomError(f"{said} {_CORRECT}; or {_LEAVE_OUT}.")
        if said:
            warnings.warn(
                f"{said} So all of it is taken for text, and each of its {different} different "
                "values becomes a column. If they are numbers, write a number there, too.",
                stacklevel=4,
            )

    def _check_label(self, column: str, values: pd.Series, task: str) -> None:
        """The same for what is to be predicted: values, unless they are said to be classes."""
        if pd.api.types.is_numeric_dtype(values):
            self._check_finite(column, values, "")
        elif task in (AUTO, Regression.name):
            texts = values.astype(str)
            said = self._almost_numbers(column, texts)
            many = texts.nunique() > max(_MOST_VALUES, len(texts) / 2)
            if said and (many or task == Regression.name):
                raise FedloomError(f"{said} {_CORRECT}.")

    def _almost_numbers(self, column: str, texts: pd.Series) -> str:
        """A sentence on the cells of a column of numbers that hold something else; "" if it is no
        column of numbers, or nothing but numbers."""
        odd = texts[pd.to_numeric(texts, errors="coerce").isna()]
        if not len(odd) or 2 * len(odd) >= len(texts):
            return ""
        first = f"'{odd.iloc[0]}', {self._place(odd.index[0])}"
        where = f"1 cell: {first}" if len(odd) == 1 else f"{len(odd)} cells, the first: {first}"
        return f"'{column}' is a number except in {where}."


def _cells(count: int, kind: str = "") -> str:
    return f"{count} {kind}cell{'s' * (count > 1)}"


def _stacked(parts: Sequence[Any]) -> Any:
    """The same column of several parts, concatenated."""
    if any(isinstance(part, pd.Series) for part in parts):
        return pd.concat([pd.Series(part) for part in parts], ignore_index=True)
    if all(isinstance(part, np.ndarray) for part in parts):
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = " and ".join(sorted({str(part.shape[1:]) for part in parts}))
            raise FedloomError(f"Parts of the data have samples of different shapes: {shapes}.")
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def _is_wide(values: Any) -> bool:
    """Whether a cell is more than a number or a text: a picture or an array."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.ndim > 1
    first = next(iter(values), None)
    picture = isinstance(first, Path) or hasattr(first, "convert")
    return picture or (hasattr(first, "__len__") and not isinstance(first, str))


def _picked(values: Any, rows: npt.NDArray[np.int64]) -> Any:
    """These rows of a column; all of them, in order, are no copy."""
    if isinstance(values, np.ndarray):
        return values if np.array_equal(rows, np.arange(len(values))) else values[rows]
    held = list(values)
    return [held[row] for row in rows.tolist()]


def _array(name: str, cells: Sequence[Any], size: Value | None) -> np.ndarray:
    """Pictures or arrays of one shape as one array."""
    if isinstance(cells[0], Path) or hasattr(cells[0], "convert"):
        wanted = None
        if size is not None:
            height, width = sizes("size", size, 2)
            wanted = height, width
        return read_images(cells, wanted)
    if size is not None:
        raise FedloomError(f"data_options.size is for pictures, and '{name}' holds arrays.")
    if isinstance(cells, np.ndarray) and cells.dtype != object:
        return cells
    arrays = [np.asarray(cell) for cell in cells]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise FedloomError(
                f"'{name}' has arrays of shape {arrays[0].shape} and, in row {row}, of "
                f"{array.shape}. Give all the same shape: pad or cut them."
            )
    return np.stack(arrays)
