"""The channel groups of a model, and the sub-models that a choice of channels gives.

A group is a set of channels that must be chosen together wherever they appear: the outputs of a
convolution, the norm behind it, the inputs of whatever reads them. A choice of channels for every
group is an index vector into the flat model and a really smaller module of the same kind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.models.scaler import scale_output
from fedloom.select.axes import Axis, Label, resolve
from fedloom.select.trace import Reader, Traced, trace

_CONVOLUTIONS = nn.modules.conv._ConvNd
_TRANSPOSED = nn.modules.conv._ConvTransposeNd


@dataclass(frozen=True)
class Factor:
    """A piece of a dimension: the channels of a group, or (None) positions that all stay."""

    group: int | None
    size: int


#: what one dimension of a tensor is made of, row-major
Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Group:
    """Channels that are chosen together. `readers` are the layers that have them as inputs, with
    what the features of those inputs are made of."""

    name: str
    size: int
    readers: tuple[tuple[str, Dim], ...]


@dataclass(frozen=True)
class Step:
    """An operation of a pass through the model, and what its result is made of."""

    name: str
    where: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Channels:
    """The groups of a model, and how each of its tensors is made of them."""

    module: nn.Module = field(repr=False)
    groups: tuple[Group, ...]
    dims: Mapping[str, tuple[Dim, ...]] = field(repr=False)
    scaled: tuple[str, ...]  # layers followed by others: what the scaler multiplies
    classifier: str | None  # the layer that makes the logits, a row of its weights for each class
    depthwise: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()  # tensors that products and convolutions read with
    steps: Mapping[bool, tuple[Step, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(module: nn.Module, shape: Sequence[int], training: bool = True) -> Channels:
        """Read off the module, in evaluation and `training`; refused, with the layer's name, where
        it can't be cut."""
        traced = trace(module, shape, training)
        axes = _free_axes(traced)
        if not axes:
            raise FedloomError(
                f"{type(module).__name__} can't be cut into sub-models: it has no hidden channels "
                "that could be left out. Use a model with hidden layers."
            )
        number = {id(axis): i for i, axis in enumerate(axes)}

        def dim(label: Label) -> Dim:
            return tuple(Factor(number.get(id(a)), a.size) for a in resolve(label))

        readers: list[list[tuple[str, Dim]]] = [[] for _ in axes]
        for reader in traced.readers:
            for i in {number[id(a)] for a in resolve(reader.label) if id(a) in number}:
                readers[i].append((reader.layer, dim(reader.label)))
        names = [_name(axis, traced) for axis in axes]
        groups = tuple(
            Group(name, axis.size, tuple(r))
            for name, axis, r in zip(names, axes, readers, strict=True)
        )
        dims = {name: tuple(dim(x) for x in labels) for name, labels in traced.labels.items()}
        hidden = [m.layer for m in _makers(traced) if any(not a.fixed for a in resolve(m.label))]
        out = resolve(traced.output)
        last = [m.layer for m in traced.makers if resolve(m.label) == out]
        steps = {
            mode: tuple(Step(o.name, o.where, tuple(dim(x) for x in o.labels)) for o in found)
            for mode, found in traced.operations.items()
        }
        return Channels(
            copy.deepcopy(module), groups, dims, tuple(dict.fromkeys(hidden)),
            last[-1] if last else None, traced.depthwise, traced.weights, steps,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(group.size for group in self.groups)

    def counts(self, capacity: float, rounding: str = "ceil") -> tuple[int, ...]:
        """The number of channels that a client of this capacity keeps of every group."""
        shift = 1 - 1e-9 if rounding == "ceil" else 1e-9
        return tuple(max(int(np.floor(capacity * n + shift)), 1) for n in self.sizes)

    def index(self, layout: Layout, keep: Sequence[np.ndarray]) -> Tensor:
        """The columns of the sub-model with these channels (ascending), in its own order."""
        kept = [np.sort(k) for k in keep]
        out = []
        for entry in layout.entries:
            at = [places(dim, kept) for dim in self.dims[entry.tensor]]
            shape = entry.shape
            if len(shape) == 4:  # kernels lie in a row channels last
                at, shape = [at[i] for i in (0, 2, 3, 1)], tuple(shape[i] for i in (0, 2, 3, 1))
            columns = np.full(1, entry.start)
            for i, positions in enumerate(at):
                columns = np.add.outer(columns, positions * prod(shape[i + 1 :])).reshape(-1)
            out.append(columns)
        return torch.from_numpy(np.concatenate(out))

    def kept(self, layout: Layout, index: Tensor) -> list[np.ndarray]:
        """The channels of a sub-model, from its columns, or from those of some layers: the reverse
        of `index`."""
        there = np.zeros(layout.size, dtype=bool)
        there[index.numpy()] = True
        row = torch.from_numpy(there)
        found = [np.empty(0, dtype=np.int64) for _ in self.groups]
        for entry in layout.entries:
            for i, dim in enumerate(self.dims[entry.tensor]):
                for j, factor in enumerate(dim):
                    if factor.group is None or len(found[factor.group]):
                        continue
                    some = entry.view(row).movedim(i, 0).reshape(entry.shape[i], -1).any(1)
                    some = some.view([f.size for f in dim]).movedim(j, 0)
                    found[factor.group] = np.flatnonzero(some.reshape(factor.size, -1).any(1))
        return found

    def build(self, counts: Sequence[int], scale: float = 1.0) -> nn.Module:
        """A module that has so many channels of each group; `scale` multiplies the outputs of its
        hidden layers in training (the scaler, S2 §3.3.3)."""
        smaller = self.narrow(counts)
        module = copy.deepcopy(self.module)
        unscaled = set(self.scaled) - {name for name, _ in module.named_modules()}
        if scale != 1 and unscaled:
            raise FedloomError(
                f"The scaler can't reach what '{sorted(unscaled)[0]}' gives, which is a parameter "
                "and no layer. Put it into a module, or set scaler=false."
            )
        tensors = [*module.named_parameters(), *module.named_buffers()]
        names = {id(tensor): name for name, tensor in tensors}
        made: dict[str, Tensor] = {}  # a tensor that layers share stays one

        def cut(tensor: Tensor) -> Tensor:
            name = names[id(tensor)]
            if name not in made:
                new = tensor.new_zeros([_size(dim) for dim in smaller.dims[name]])
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                made[name] = new
            return made[name]

        for name, layer in module.named_modules():
            for own in (layer._parameters, layer._buffers):
                for key, tensor in own.items():
                    if tensor is not None:
                        own[key] = cut(tensor)
            _tell_sizes(layer, name in self.depthwise)
            if scale != 1 and name in self.scaled:
                scale_output(layer, scale)
        return module

    def narrow(self, counts: Sequence[int]) -> Channels:
        """The structure of the sub-model with so many channels."""

        def narrower(dim: Dim) -> Dim:
            return tuple(f if f.group is None else replace(f, size=counts[f.group]) for f in dim)

        groups = tuple(
            Group(g.name, n, tuple((layer, narrower(dim)) for layer, dim in g.readers))
            for g, n in zip(self.groups, counts, strict=True)
        )
        dims = {name: tuple(narrower(d) for d in ds) for name, ds in self.dims.items()}
        return replace(self, groups=groups, dims=dims)

    def first(self, counts: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the sub-model of everyone's first channels, cut out of these."""
        keep = [np.arange(n) for n in counts]
        out = {}
        for name, tensor in tensors.items():
            for i, dim in enumerate(self.dims[name]):
                at = places(dim, keep)
                if len(at) == tensor.shape[i]:
                    continue
                if len(at) == at[-1] + 1:  # a view, into which norms can write
                    tensor = tensor.narrow(i, 0, len(at))
                else:
                    tensor = tensor.index_select(i, torch.from_numpy(at).to(tensor.device))
            out[name] = tensor
        return out


def _makers(traced: Traced) -> tuple[Reader, ...]:
    return (*traced.makers, *traced.training_makers)


def _free_axes(traced: Traced) -> list[Axis]:
    """The groups, in the order in which layers make them."""
    made = [a for maker in _makers(traced) for a in resolve(maker.label) if not a.fixed]
    return list({id(axis): axis for axis in made}.values())


def _name(axis: Axis, traced: Traced) -> str:
    return next(m.layer for m in _makers(traced) if any(a is axis for a in resolve(m.label)))


def _size(dim: Dim) -> int:
    return prod(f.size for f in dim)


def places(dim: Dim, keep: Sequence[np.ndarray]) -> np.ndarray:
    """Where the kept channels are in a dimension."""
    at = np.zeros(1, dtype=np.int64)
    for factor in dim:
        chosen = np.arange(factor.size) if factor.group is None else keep[factor.group]
        at = np.add.outer(at * factor.size, chosen).reshape(-1)
    return at


def _tell_sizes(layer: nn.Module, depthwise: bool) -> None:
    """Make the layer's own numbers those of its tensors."""
    if isinstance(layer, _CONVOLUTIONS):
        first, second = layer.weight.shape[:2]
        if depthwise:  # so many outputs for each channel as before
            layer.groups = first // (layer.out_channels // layer.groups)
        if isinstance(layer, _TRANSPOSED):
            first, second = second, first
            layer.out_channels, layer.in_channels = first * layer.groups, second
        else:
            layer.out_channels, layer.in_channels = first, second * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.modules.batchnorm._NormBase) and layer.weight is not None:
        layer.num_features = layer.weight.shape[0]
    elif isinstance(layer, nn.GroupNorm) and layer.weight is not None:
        layer.num_channels = layer.weight.shape[0]
    elif isinstance(layer, nn.LayerNorm) and layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)
