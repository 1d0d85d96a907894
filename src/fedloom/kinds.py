"""Named values next to the model: what a client is told, keeps and sends, and what the server
keeps.

A part of a method declares such a value by its name and its kind. From the kind follow its size,
what it starts as, where it lies in a row, what a checkpoint holds and what a message costs. Nothing
here knows of clients, methods or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.layout import Columns, Layout

V = TypeVar("V")


@dataclass(frozen=True)
class Sizes:
    """What the shapes of named values may refer to."""

    layout: Layout
    classes: int
    public: int = 0  # images of the public set


@dataclass(frozen=True)
class Kind:
    """The kind of a named value; all its elements start as `start`."""

    start: float = 0.0

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        raise NotImplementedError

    def initial(self, sizes: Sizes, row: Tensor) -> Tensor:
        """The initial value; `row` is the initial model."""
        return torch.full(self.shape(sizes), self.start, dtype=row.dtype)


@dataclass(frozen=True)
class Weights(Kind):
    """A vector like the trainable weights: a control variate, a velocity."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes.layout.trainable,)


@dataclass(frozen=True)
class Model(Kind):
    """A whole model, buffers included, that starts as the initial one."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes.layout.size,)

    def initial(self, sizes: Sizes, row: Tensor) -> Tensor:
        return row.clone()


@dataclass(frozen=True)
class Array(Kind):
    """Numbers of a given shape; a dimension may be named: `classes`, `public`.

    >>> Array(dims=("classes", 3)), Scalar().dims
    (Array(start=0.0, dims=('classes', 3)), ())
    """

    dims: tuple[int | str, ...] = ()

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        named = {"classes": sizes.classes, "public": sizes.public}
        for d in self.dims:
            if isinstance(d, str) and d not in named:
                raise FedloomError(
                    f"'{d}' is not a dimension that a value can have: give a number, or one of "
                    f"{', '.join(named)}."
                )
        return tuple(named[d] if isinstance(d, str) else d for d in self.dims)


def PerClass(start: float = 0.0) -> Array:  # noqa: N802
    """A number for every class."""
    return Array(start, ("classes",))


def Scalar(start: float = 0.0) -> Array:  # noqa: N802
    """One number."""
    return Array(start)


#: names and kinds that a part declares
Values = Mapping[str, Kind]


class Declared(Mapping[str, V]):
    """Values by name; one that was not declared is refused in a sentence."""

    def __init__(self, values: Mapping[str, V], part: str, word: str) -> None:
        self._values, self._part, self._word = dict(values), part, word

    def __getitem__(self, name: str) -> V:
        if name not in self._values:
            raise FedloomError(
                f"{self._part} reads '{name}', which is not declared: add it to `{self._word}`, so "
                "that checkpoints, messages and the manifest know of it."
            )
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Section:
    """Where a named value lies in a row."""

    name: str
    start: int
    shape: tuple[int, ...]
    like_weights: bool = False  # a sub-model has those of its weights only

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """The value inside a row, or inside every row of a matrix."""
        return rows[..., self.start : self.stop].view((*rows.shape[:-1], *self.shape))


class Sections:
    """A row with room for named values: the model's columns first, then a section for each.

    So engines move one matrix, whatever a method adds; only the model's columns are optimised.

    >>> from torch import nn
    >>> layout = Layout.of(nn.Linear(2, 3))
    >>> rows = Sections.of({"c": Weights()}, Sizes(layout, classes=3))
    >>> layout.size, rows.width, rows["c"].start
    (9, 18, 9)
    """

    def __init__(self, layout: Layout, sections: Iterable[Section] = ()) -> None:
        self.layout = layout
        self._sections = {s.name: s for s in sections}
        self.width = max((s.stop for s in self._sections.values()), default=layout.size)

    @staticmethod
    def of(values: Values, sizes: Sizes) -> Sections:
        at, sections = sizes.layout.size, []
        for name, kind in values.items():
            sections.append(Section(name, at, kind.shape(sizes), isinstance(kind, Weights)))
            at = sections[-1].stop
        return Sections(sizes.layout, sections)

    def __getitem__(self, name: str) -> Section:
        return self._sections[name]

    def __bool__(self) -> bool:
        return bool(self._sections)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def model(self, rows: Tensor) -> Tensor:
        """The model's columns, as a view."""
        return rows[..., : self.layout.size]

    def views(self, rows: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self[name].view(rows) for name in names}

    def columns(self, model: Columns, names: Iterable[str] = ()) -> Columns:
        """These columns of the model and these sections, as columns of the whole row."""
        ranges = [*model.ranges, *((self[n].start, self[n].stop) for n in names)]
        return Columns.union(ranges, self.width)

    def widened(self, row: Tensor, initial: Mapping[str, Tensor]) -> Tensor:
        """A model's row with its sections behind it."""
        return torch.cat([row, *(initial[name].reshape(-1).to(row) for name in self.names)])
