"""Axes: the symbolic sizes that tie the dimensions of a model's tensors together.

Every dimension of every tensor is labelled with axes. Where two tensors meet in an operation their
labels are merged; where a dimension is reshaped, its axis is split into factors; where tensors are
concatenated or cut, an axis is the sum of parts. In the end two dimensions have the same free axis
exactly if their channels must be chosen together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod


class Mismatch(Exception):
    """Two labels that can't be the same."""


@dataclass(eq=False)
class Axis:
    """A run of positions: free (its channels can be chosen), fixed (all of them stay), or the
    concatenation of `parts`."""

    size: int
    fixed: bool = False
    name: str = ""  # of the layer that made it
    inner: bool = False  # one of the dimensions that a reshape made of channels
    factors: tuple[Axis, ...] = field(default=(), repr=False)  # what it was merged with or split in
    parts: tuple[Label, ...] = field(default=(), repr=False)


#: what a dimension is made of, row-major: (channels, height, width) for a flattened map
Label = tuple[Axis, ...]


def fixed(size: int) -> Label:
    return (Axis(size, fixed=True),) if size > 1 else ()


def free(size: int, name: str) -> Label:
    return (Axis(size, name=name),) if size > 1 else ()


def together(labels: Sequence[Label]) -> Label:
    """One after the other, as a concatenation has them."""
    if not any(is_free(label) for label in labels):
        return fixed(sum(length(label) for label in labels))
    return labels[0] if len(labels) == 1 else (_sum(labels),)


def resolve(label: Label) -> Label:
    """The same, in terms of axes that are neither merged nor split."""
    out: list[Axis] = []
    for axis in label:
        out += resolve(axis.factors) if axis.factors else (axis,)
    return tuple(out)


def leaves(label: Label) -> Iterator[Axis]:
    """The free and fixed axes that this is made of, those of concatenated parts too."""
    for axis in resolve(label):
        if axis.parts:
            for part in axis.parts:
                yield from leaves(part)
        else:
            yield axis


def is_free(label: Label) -> bool:
    """Whether any of these positions can be left out."""
    return any(not axis.fixed for axis in leaves(label))


def length(label: Label) -> int:
    return prod(axis.size for axis in label)


def fix(label: Label) -> None:
    """All of these positions stay."""
    for axis in leaves(label):
        axis.fixed = True


def merge(a: Label, b: Label) -> None:
    """Make two labels one: they name the same positions."""
    left, right = list(resolve(a)), list(resolve(b))
    while left and right:
        x, y = resolve((left.pop(0),)), resolve((right.pop(0),))
        if len(x) != 1 or len(y) != 1:  # split meanwhile
            left[:0], right[:0] = x, y
        elif x[0].size == y[0].size:
            _join(x[0], y[0])
        elif x[0].size > y[0].size:
            left[:0] = _split(x[0], y[0].size)
            right.insert(0, y[0])
        else:
            right[:0] = _split(y[0], x[0].size)
            left.insert(0, x[0])
    if left or right:
        raise Mismatch


def regroup(label: Label, sizes: tuple[int, ...]) -> list[Label]:
    """The positions of `label` as dimensions of these sizes (a reshape)."""
    rest = list(resolve(label))
    out: list[Label] = []
    for size in sizes:
        taken: list[Axis] = []
        left = size
        while left > 1:
            if not rest:
                raise Mismatch
            axis = rest.pop(0)
            if axis.size > left:
                rest[:0] = _split(axis, left)
                continue
            if left % axis.size:
                raise Mismatch
            taken.append(axis)
            left //= axis.size
        out.append(tuple(taken))
    if rest:
        raise Mismatch
    return out


def cut(label: Label, sizes: Sequence[int]) -> list[Label]:
    """The positions of `label` in runs of these sizes, one after the other."""
    whole = resolve(label)
    if len(sizes) == 1 or not whole:
        return [whole] * len(sizes)
    inner = length(whole[1:])
    if any(size % inner for size in sizes):
        raise Mismatch
    outer, counts = whole[0], [size // inner for size in sizes]
    if outer.parts:
        runs = _aligned(outer, counts)
    else:
        runs = [(_like(outer, n),) if n > 1 else () for n in counts]
        outer.factors = (_sum(runs),)
    return [(*run, *whole[1:]) for run in runs]


def _sum(labels: Sequence[Label]) -> Axis:
    return Axis(sum(length(label) for label in labels), parts=tuple(labels))


def _runs(axis: Axis) -> list[Label]:
    """What is concatenated in an axis, without sums of sums."""
    out: list[Label] = []
    for part in axis.parts:
        label = resolve(part)
        out += _runs(label[0]) if len(label) == 1 and label[0].parts else [label]
    return out


def _aligned(axis: Axis, sizes: Sequence[int]) -> list[Label]:
    """The runs of a sum, put together or cut to these sizes."""
    rest, out = _runs(axis), []
    for size in sizes:
        taken: list[Label] = []
        left = size
        while left:
            if not rest:
                raise Mismatch
            run = rest.pop(0)
            if length(run) > left:
                run, behind = cut(run, (left, length(run) - left))
                rest.insert(0, behind)
            taken.append(run)
            left -= length(run)
        out.append(together(taken))
    return out


def _join(a: Axis, b: Axis) -> None:
    if a is b:
        return
    if a.parts and b.parts:
        mine = [length(run) for run in _runs(a)]
        for x, y in zip(_runs(a), _aligned(b, mine), strict=True):
            merge(x, y)
        b.factors = (a,)
        return
    if b.parts:
        a, b = b, a
    if a.parts:
        if b.fixed:
            fix((a,))
    else:
        a.fixed = a.fixed or b.fixed
        a.name = a.name or b.name
        a.inner = a.inner and b.inner
    b.factors = (a,)


def _like(axis: Axis, size: int, inner: bool = False) -> Axis:
    return Axis(size, axis.fixed, axis.name, axis.inner or inner)


def _split(axis: Axis, first: int) -> Label:
    """Cut an axis into an outer and an inner one; both keep the name."""
    if axis.size % first:
        raise Mismatch
    second = axis.size // first
    if axis.parts:  # the same channels of each of so many runs
        run, *others = _aligned(axis, [second] * first)
        for other in others:
            merge(run, other)
        axis.factors = (*fixed(first), *run)
    else:
        axis.factors = (_like(axis, first, inner=True), _like(axis, second, inner=True))
    return axis.factors
