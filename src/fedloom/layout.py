"""The layout of a model: any `nn.Module` as one flat vector, and back, exactly.

A layout names the coordinates of that vector (a *row*): which columns belong to which parameter,
buffer, layer or part ("body", "head", ...). It knows nothing of clients, methods or training.

Columns stand in this order: trainable parameters, extra columns that a method adds (such as
learned step sizes), then everything that no gradient reaches: frozen parameters and persistent
buffers (batch-norm statistics). So `row[:layout.trainable]` is what an optimiser moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.errors import FedloomError, unknown

Kind = Literal["param", "extra", "frozen", "buffer"]


@dataclass(frozen=True)
class Entry:
    """One tensor of the model and the columns it takes."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size

    def view(self, rows: Tensor) -> Tensor:
        """This tensor inside a row (or a matrix of rows), as a view of it.

        Kernels of convolutions lie in a row channels last (OHWI): such a view makes torch choose
        its channels-last convolutions, which are faster on CPUs.
        """
        lead, flat = rows.shape[:-1], rows[..., self.start : self.stop]
        if len(self.shape) != 4:
            return flat.view((*lead, *self.shape))
        o, i, h, w = self.shape
        return flat.view(*lead, o, h, w, i).movedim(-1, -3)

    @property
    def tensor(self) -> str:
        """The name of the model's tensor: an extra column's without its prefix."""
        return self.name.split("/", 1)[-1]

    @property
    def layer(self) -> str:
        """The module that owns this tensor."""
        return self.tensor.rpartition(".")[0]


@dataclass(frozen=True)
class Columns:
    """A set of columns as sorted, disjoint ranges: what is shared, kept, sent or mixed."""

    ranges: tuple[tuple[int, int], ...]
    width: int  # of the whole row

    @staticmethod
    def union(ranges: Iterable[tuple[int, int]], width: int) -> Columns:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(r for r in ranges if r[0] < r[1]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return Columns(tuple(merged), width)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def everything(self) -> bool:
        return self.ranges == ((0, self.width),)

    def others(self) -> Columns:
        """The columns that are not in this set."""
        edges = [0, *itertools.chain.from_iterable(self.ranges), self.width]
        return Columns.union(zip(edges[::2], edges[1::2], strict=True), self.width)

    @cached_property
    def index(self) -> Tensor:
        parts = [torch.arange(start, stop) for start, stop in self.ranges]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def take(self, rows: Tensor) -> Tensor:
        """These columns of a row or of a matrix of rows; a view where they are one range."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return rows[..., start:stop]
        return rows.index_select(-1, self.index.to(rows.device))

    def within(self, index: Tensor) -> Tensor:
        """Whole-row columns as positions inside this set; those outside are left out."""
        position = torch.full((self.width,), -1, dtype=torch.int64)
        position[self.index] = torch.arange(len(self))
        inside = position[index]
        return inside[inside >= 0]

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Write `values` into these columns of `rows`, in place."""
        at = 0
        for start, stop in self.ranges:
            rows[..., start:stop] = values[..., at : at + stop - start]
            at += stop - start


class Layout:
    """Names for the columns of a flat model.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> layout.size, len(layout.columns("head")), len(layout.columns("body"))
    (13, 4, 9)
    """

    def __init__(
        self,
        entries: tuple[Entry, ...],
        dtype: torch.dtype,
        norms: Collection[str] = (),
        whole: Layout | None = None,
    ) -> None:
        self.entries = entries
        self.dtype = dtype
        self.norms = frozenset(norms)  # layers that normalise: what the part `norm` names
        self.size = entries[-1].stop if entries else 0
        moved = [e for e in entries if e.kind in ("param", "extra")]
        self.trainable = moved[-1].stop if moved else 0
        self._whole = whole

    @staticmethod
    def of(module: nn.Module, extras: Iterable[str] = ()) -> Layout:
        """The layout of `module`; each of `extras` adds a column to every trainable weight."""
        params = dict(module.named_parameters())
        if any(is_lazy(p) for p in params.values()):
            raise FedloomError(
                f"{type(module).__name__} has lazy layers, whose shapes are not known yet. Run a "
                "batch through it before the factory returns it, or give the sizes."
            )
        trainable = {n: p for n, p in params.items() if p.requires_grad}
        frozen = {n: p for n, p in params.items() if not p.requires_grad}
        dtypes = {p.dtype for p in params.values()}
        if not trainable:
            raise FedloomError(
                f"{type(module).__name__} has no trainable parameter, so there is nothing to learn."
            )
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            kinds = ", ".join(sorted(str(d) for d in dtypes))
            raise FedloomError(
                f"{type(module).__name__} mixes parameter types ({kinds}); a flat model needs one "
                "floating type. Convert it first, for example with model.float()."
            )
        tensors: list[tuple[str, Kind, Tensor]] = [(n, "param", p) for n, p in trainable.items()]
        for extra in extras:
            tensors += [(f"{extra}/{n}", "extra", p) for n, p in trainable.items()]
        tensors += [(n, "frozen", p) for n, p in frozen.items()]
        tensors += [(n, "buffer", b) for n, b in _persistent_buffers(module)]
        entries: list[Entry] = []
        at = 0
        for name, kind, tensor in tensors:
            entries.append(Entry(name, kind, tuple(tensor.shape), at, tensor.dtype))
            at += tensor.numel()
        norms = [name for name, layer in module.named_modules() if _normalises(layer)]
        return Layout(tuple(entries), next(iter(dtypes)), norms)

    def part(self, columns: Columns) -> Layout:
        """The layout of these columns alone, for a receiver that gets only them.

        >>> net = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> net.part(net.columns("head")).entries[0].name
        '2.weight'
        """
        if columns.everything:
            return self
        entries, at = [], 0
        for e in self.entries:
            if any(start <= e.start and e.stop <= stop for start, stop in columns.ranges):
                entries.append(replace(e, start=at))
                at += e.size
        return Layout(tuple(entries), self.dtype, self.norms, whole=self)

    @cached_property
    def extras(self) -> tuple[str, ...]:
        """The names of the extra columns that every trainable weight has."""
        names = (e.name.partition("/")[0] for e in self.entries if e.kind == "extra")
        return tuple(dict.fromkeys(names))

    @property
    def bytes(self) -> int:
        """What one value costs on the wire."""
        return self.dtype.itemsize

    @property
    def norm_bytes(self) -> int:
        """What the statistics of tracked norms cost on the wire."""
        names = ("running_mean", "running_var")
        return self.bytes * sum(e.size for e in self.entries if e.name.endswith(names))

    def views(self, rows: Tensor, kinds: tuple[Kind, ...] = ("param",)) -> dict[str, Tensor]:
        """The named tensors inside a row (or a matrix of rows), as views of it."""
        return {e.name: e.view(rows) for e in self.entries if e.kind in kinds}

    def tensors(self, weights: Tensor) -> dict[str, Tensor]:
        """The trainable tensors inside `row[:trainable]`, cut so that gradients flow cheaply."""
        moved = [e for e in self.entries if e.kind in ("param", "extra")]
        pieces = torch.split(weights, [e.size for e in moved])
        return {
            e.name: replace(e, start=0).view(piece) for e, piece in zip(moved, pieces, strict=True)
        }

    def flatten(self, module: nn.Module, extras: Mapping[str, float] | None = None) -> Tensor:
        """The row that holds `module`'s values; extra columns start at the values given."""
        tensors = {**dict(module.named_parameters()), **dict(_persistent_buffers(module))}
        row = torch.empty(self.size, dtype=self.dtype)
        for e in self.entries:
            if e.kind == "extra":
                row[e.start : e.stop] = (extras or {})[e.name.split("/", 1)[0]]
                continue
            value = tensors[e.name].detach().cpu()
            e.view(row).copy_(value)
            if not e.dtype.is_floating_point and not torch.equal(e.view(row).to(e.dtype), value):
                raise FedloomError(
                    f"The buffer '{e.name}' holds integers too large for a {self.dtype} row. "
                    "Register it with persistent=False if it is not part of the model."
                )
        return row

    def load(self, module: nn.Module, row: Tensor) -> nn.Module:
        """Copy a row's values into `module`; integer buffers are rounded. Returns the module."""
        if row.shape != (self.size,):
            raise FedloomError(
                f"This model has {self.size:,} values, the row has {tuple(row.shape)}."
            )
        tensors = {**dict(module.named_parameters()), **dict(_persistent_buffers(module))}
        with torch.no_grad():
            for e in self.entries:
                if e.kind != "extra":
                    value = e.view(row)
                    value = value if e.dtype.is_floating_point else value.round()
                    tensors[e.name].copy_(value)
        return module

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Modules that own parameters, in the order of the model."""
        return tuple(dict.fromkeys(e.layer for e in self.entries if e.kind in ("param", "frozen")))

    def outputs(self, layers: Collection[str]) -> Tensor:
        """Per column of these layers, which of the layer's outputs it works for; −1 elsewhere."""
        out = torch.full((self.size,), -1, dtype=torch.int64)
        for entry in self.entries:
            if entry.layer in layers:
                rows = torch.arange(entry.shape[0]).view(-1, *[1] * (len(entry.shape) - 1))
                entry.view(out).copy_(rows.expand(entry.shape))
        return out

    def columns(self, part: str) -> Columns:
        """The columns of a named part.

        `all`, `none`; `head` (the last layer) or `head:K` (the last K layers) and `body[:K]` (all
        the rest); `norm` (layers that normalise); the name of any module or tensor (`fc1`,
        `layer1.0`, `fc1.weight`); several of those joined by `+`; or `not` any of these.
        """
        if part.startswith("not "):
            return self.columns(part[4:]).others()
        if self._whole is not None and part not in ("all", "none"):
            return self._inside(part, self._whole.columns(part))
        return Columns.union(
            itertools.chain.from_iterable(self._ranges(p.strip()) for p in part.split("+")),
            self.size,
        )

    def _inside(self, part: str, wanted: Columns) -> Columns:
        """These columns of the whole model, where they are in this part of it."""
        assert self._whole is not None
        mine = {e.name: e for e in self.entries}
        named = [
            e.name
            for e in self._whole.entries
            if any(start <= e.start and e.stop <= stop for start, stop in wanted.ranges)
        ]
        missing = next((name for name in named if name not in mine), None)
        if missing is not None:
            raise FedloomError(
                f"'{part}' has columns that are not here: '{missing}' stays with the clients. Let "
                "the mix's `part` name what it combines."
            )
        return Columns.union(((mine[n].start, mine[n].stop) for n in named), self.size)

    def _ranges(self, part: str) -> list[tuple[int, int]]:
        word, _, count = part.partition(":")
        if part == "all":
            return [(0, self.size)]
        if part == "none":
            return []
        if word == "body":
            head = Columns.union(self._ranges("head" + part[4:]), self.size)
            return list(head.others().ranges)
        if word == "head" and not self._named(part):
            last = set(self.layers[-self._head_size(part, count) :])
            return [(e.start, e.stop) for e in self.entries if e.layer in last]
        if part == "norm" and not self._named(part):
            found = [(e.start, e.stop) for e in self.entries if e.layer in self.norms]
            if not found:
                raise FedloomError(
                    "'norm' names the model's norm layers, and this model has none with weights "
                    "or statistics. Choose a model with norms (--set model_options.norm=batch), or "
                    "another part."
                )
            return found
        found = self._named(part)
        if not found:
            names = ["all", "none", "body", "head", "head:2", "norm", *self.layers]
            raise unknown("part of the model", part, names)
        return found

    def _named(self, part: str) -> list[tuple[int, int]]:
        return [
            (e.start, e.stop)
            for e in self.entries
            if e.tensor == part or e.tensor.startswith(part + ".")
        ]

    def _head_size(self, part: str, count: str) -> int:
        most = len(self.layers) - 1
        if not count:
            return 1
        if not count.isdigit() or not 1 <= int(count) <= most:
            raise FedloomError(
                f"'{part}': the number of layers in the head must be from 1 to {most} "
                f"for this model of {most + 1} layers."
            )
        return int(count)


def _normalises(layer: nn.Module) -> bool:
    """Batch, instance, group, layer and RMS norms, and whatever else tracks a mean."""
    kinds = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return isinstance(layer, kinds) or "running_mean" in layer._buffers


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return ((name, b) for name, b in module.named_buffers() if name in kept)
