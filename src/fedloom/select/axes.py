"""Axes: the symbolic sizes that tie the dimensions of a model's tensors together.

Every dimension of every tensor is labelled with axes. Where two tensors meet in an operation their
labels are merged; where a dimension is cut up or flattened, its axis is split into factors. In the
end two dimensions have the same free axis exactly if their channels must be chosen together.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Mismatch(Exception):
    """Two labels that can't be the same."""


@dataclass(eq=False)
class Axis:
    """A run of positions: free (its channels can be chosen) or fixed (all of them stay)."""

    size: int
    fixed: bool = False
    name: str = ""  # of the layer that made it
    factors: tuple[Axis, ...] = field(default=(), repr=False)  # what it was merged with or split in


#: what a dimension is made of, row-major: (channels, height, width) for a flattened map
Label = tuple[Axis, ...]


def fixed(size: int) -> Label:
    return (Axis(size, fixed=True),) if size > 1 else ()


def free(size: int, name: str) -> Label:
    return (Axis(size, name=name),) if size > 1 else ()


def resolve(label: Label) -> Label:
    """The same, in terms of axes that are neither merged nor split."""
    out: list[Axis] = []
    for axis in label:
        out += resolve(axis.factors) if axis.factors else (axis,)
    return tuple(out)


def fix(label: Label) -> None:
    """All of these positions stay."""
    for axis in resolve(label):
        axis.fixed = True


def merge(a: Label, b: Label) -> None:
    """Make two labels one: they name the same positions."""
    left, right = list(resolve(a)), list(resolve(b))
    while left and right:
        x, y = resolve((left.pop(0),)), resolve((right.pop(0),))
        if len(x) > 1 or len(y) > 1:  # split meanwhile
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
                first, second = _split(axis, left)
                axis = first
                rest.insert(0, second)
            if left % axis.size:
                raise Mismatch
            taken.append(axis)
            left //= axis.size
        out.append(tuple(taken))
    if rest:
        raise Mismatch
    return out


def _join(a: Axis, b: Axis) -> None:
    if a is b:
        return
    a.fixed = a.fixed or b.fixed
    a.name = a.name or b.name
    b.factors = (a,)


def _split(axis: Axis, first: int) -> tuple[Axis, Axis]:
    """Cut an axis in two; its outer part keeps the name."""
    if axis.size % first:
        raise Mismatch
    parts = Axis(first, axis.fixed, axis.name), Axis(axis.size // first, axis.fixed, axis.name)
    axis.factors = parts
    return parts
