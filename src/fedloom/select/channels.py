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
from fedloom.select.attention import with_free_heads
from fedloom.select.axes import Axis, Label, is_free, leaves, resolve
from fedloom.select.trace import Called, Reader, Traced, trace

_CONVOLUTIONS = nn.modules.conv._ConvNd
#: layers whose sums of inputs the scaler can't reach, or that have none
_UNSCALED = (nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.MultiheadAttention)
_TRANSPOSED = nn.modules.conv._ConvTransposeNd


#: functions that give a layer's activation; recurrent layers have theirs inside
_NON_LINEAR = {"relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "selu",
               "celu", "softplus", "hardswish", "hardtanh", "hardsigmoid", "mish", "prelu", "rrelu",
               "glu", "logsigmoid", "softsign", "scaled_dot_product_attention", "lstm", "gru",
               "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell",
               "rnn_relu_cell"}  # fmt: skip
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
#: of these, the ones that never fall, so that a maximum may be taken before or after them
_RISING = {"relu", "relu6", "tanh", "sigmoid", "leaky_relu", "elu", "selu", "celu", "softplus",
           "hardtanh", "hardsigmoid", "logsigmoid", "softsign"}  # fmt: skip
_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_PRODUCTS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
             "conv_transpose3d", "embedding"}  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """A piece of a dimension: the channels of a group, or (None) positions that all stay, or what
    was concatenated (`parts`)."""

    group: int | None
    size: int
    parts: tuple[tuple[Factor, ...], ...] = ()


#: what one dimension of a tensor is made of, row-major
Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Tap:
    """Where the activation of channels can be seen: a result (the `item`-th) of a call of a torch
    function, by number, in dimension `dim`, which is `made_of` them; `batch` is that of the
    samples. A max pooling right before it (`pool`, a call) can as well come after it."""

    call: int
    name: str
    item: int
    dim: int
    made_of: Dim
    batch: int
    pool: int | None = None

    @property
    def width(self) -> int:
        """The size of that dimension."""
        return _size(self.made_of)


@dataclass(frozen=True)
class Group:
    """Channels that are chosen together. `readers` are the layers that have them as inputs; `taps`
    is where their activation can be seen."""

    name: str
    size: int
    readers: tuple[str, ...]
    taps: tuple[Tap, ...] = ()


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
    calls: tuple[str, ...] = ()  # of torch functions that return channels, by number; "": others
    whole: tuple[str, ...] = ()  # hidden layers that keep all their outputs at every capacity

    @staticmethod
    def of(module: nn.Module, shape: Sequence[int], training: bool = True) -> Channels:
        """Read off the module, in evaluation and `training`; refused, with the layer's name, where
        it can't be cut."""
        module = with_free_heads(copy.deepcopy(module))
        traced = trace(module, shape, training)
        axes, whole = _free_axes(traced), _whole(traced)
        if not axes:
            raise _nothing_to_choose(module, whole)
        number = {id(axis): i for i, axis in enumerate(axes)}

        def dim(label: Label) -> Dim:
            return tuple(
                Factor(None, a.size, tuple(dim(part) for part in a.parts))
                if a.parts
                else Factor(number.get(id(a)), a.size)
                for a in resolve(label)
            )

        def tap(i: int, call: Called, item: int, axis: Axis) -> Tap:
            labels, batch = call.results[item]
            d = next(d for d, label in enumerate(labels) if axis in leaves(label))
            pool = call.pooled if call.name in _RISING else None
            return Tap(i, call.name, item, d, dim(labels[d]), batch, pool)

        groups = tuple(
            Group(
                _name(axis, traced),
                axis.size,
                tuple(r.layer for r in traced.readers if axis in leaves(r.label)),
                tuple(tap(i, call, item, axis) for i, call, item in _seen(traced, axis)),
            )
            for axis in axes
        )
        dims = {name: tuple(dim(x) for x in labels) for name, labels in traced.labels.items()}
        hidden = [m.layer for m in _makers(traced) if is_free(m.label)]
        unscaled = {name for name, layer in module.named_modules() if isinstance(layer, _UNSCALED)}
        out = resolve(traced.output[-1])
        last = [m.layer for m in traced.makers if resolve(m.label) == out]
        steps = {
            mode: tuple(Step(o.name, o.where, tuple(dim(x) for x in o.labels)) for o in found)
            for mode, found in traced.operations.items()
        }
        return Channels(
            module, groups, dims, tuple(dict.fromkeys(n for n in hidden if n not in unscaled)),
            last[-1] if last else None, traced.depthwise, traced.weights, steps,
            tuple("" if call is None else call.name for call in traced.calls), whole,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(group.size for group in self.groups)

    def counts(self, capacity: float, rounding: str = "ceil") -> tuple[int, ...]:
        """The number of channels that a client of this capacity keeps of every group: at least one,
        and below capacity 1 never all of several."""
        shift = 1 - 1e-9 if rounding == "ceil" else 1e-9
        most = [n - 1 if capacity < 1 and n > 1 else n for n in self.sizes]
        shares = (int(np.floor(capacity * n + shift)) for n in self.sizes)
        return tuple(max(min(k, m), 1) for k, m in zip(shares, most, strict=True))

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
                for group in groups_in(dim):
                    if len(found[group]):
                        continue
                    some = entry.view(row).movedim(i, 0).reshape(entry.shape[i], -1).any(1)
                    found[group] = np.flatnonzero(some.numpy()[positions(dim, group)].any(1))
        return found

    def build(self, counts: Sequence[int], scale: float = 1.0, always: bool = False) -> nn.Module:
        """A module that has so many channels of each group; `scale` multiplies the outputs of its
        hidden layers in training (the scaler, S2 §3.3.3), or `always`."""
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
                scale_output(layer, scale, always)
        return module

    def narrow(self, counts: Sequence[int]) -> Channels:
        """The structure of the sub-model with so many channels."""

        def smaller(f: Factor) -> Factor:
            if f.parts:
                parts = tuple(narrower(part) for part in f.parts)
                return Factor(None, sum(_size(part) for part in parts), parts)
            return f if f.group is None else replace(f, size=counts[f.group])

        def narrower(dim: Dim) -> Dim:
            return tuple(smaller(f) for f in dim)

        groups = tuple(
            replace(g, size=n, taps=tuple(replace(t, made_of=narrower(t.made_of)) for t in g.taps))
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
    made = [a for maker in _makers(traced) for a in leaves(maker.label) if not a.fixed]
    return list({id(axis): axis for axis in made}.values())


def _whole(traced: Traced) -> tuple[str, ...]:
    """Layers that make neither channels to choose from nor what comes out of the model."""
    found, outputs = [], [resolve(label) for label in traced.output]
    for maker in traced.makers:
        made = resolve(maker.label)
        if not is_free(made) and made not in outputs and prod(axis.size for axis in made) > 1:
            found.append(maker.layer)
    return tuple(dict.fromkeys(found))


def _nothing_to_choose(module: nn.Module, whole: Sequence[str]) -> FedloomError:
    start = f"{type(module).__name__} can't be cut into sub-models: "
    if not whole:
        why = "it has no hidden channels that could be left out. Use a model with hidden layers."
        return FedloomError(start + why)
    names = " and ".join(f"'{name}'" for name in whole[:3])
    return FedloomError(
        f"{start}its forward() fixes how many outputs {names} must have. Take sizes from the "
        "tensors or layers."
    )


def _name(axis: Axis, traced: Traced) -> str:
    return next(m.layer for m in _makers(traced) if axis in leaves(m.label))


def _seen(traced: Traced, axis: Axis) -> list[tuple[int, Called, int]]:
    """The calls that give the activation of these channels: what non-linearities make of them, or,
    where there are none, norms, or the layers themselves."""
    there = [
        (i, call, item)
        for i, call in enumerate(traced.calls)
        if call is not None
        for item, (labels, _) in enumerate(call.results[: 2 if call.name in _RECURRENT else 1])
        if any(axis in leaves(label) for label in labels)
    ]
    for names in (_NON_LINEAR, _NORMS, _PRODUCTS):
        found = [each for each in there if each[1].name in names]
        if found:
            return found
    return there[:1]


def _size(dim: Dim) -> int:
    return prod(f.size for f in dim)


def groups_in(dim: Dim) -> set[int]:
    """The groups whose channels a dimension has."""
    inside = {g for f in dim for part in f.parts for g in groups_in(part)}
    return inside | {f.group for f in dim if f.group is not None}


def places(dim: Dim, keep: Sequence[np.ndarray]) -> np.ndarray:
    """Where the kept channels are in a dimension."""
    at = np.zeros(1, dtype=np.int64)
    for factor in dim:
        if factor.parts:
            chosen = _one_behind_another([places(part, keep) for part in factor.parts], factor)
        else:
            chosen = np.arange(factor.size) if factor.group is None else keep[factor.group]
        at = np.add.outer(at * factor.size, chosen).reshape(-1)
    return at


def positions(dim: Dim, group: int) -> np.ndarray:
    """Where each channel of a group is in a dimension: channels × places."""
    at: np.ndarray | None = None  # channels × places, once the group is there
    before = np.zeros(1, dtype=np.int64)
    for factor in dim:
        if at is None and factor.parts and group in groups_in((factor,)):
            each = [positions(part, group) if group in groups_in(part) else None
                    for part in factor.parts]  # fmt: skip
            starts = np.cumsum([0, *(_size(part) for part in factor.parts)])
            found = [start + a for start, a in zip(starts, each, strict=False) if a is not None]
            at = _spread(before * factor.size, np.concatenate(found, axis=1))
        elif at is None and factor.group == group:
            at = _spread(before * factor.size, np.arange(factor.size)[:, None])
        elif at is None:
            before = np.add.outer(before * factor.size, np.arange(factor.size)).reshape(-1)
        else:
            every = np.add.outer(at * factor.size, np.arange(factor.size))
            at = every.reshape(len(at), -1)
    assert at is not None
    return at


def _spread(before: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Channels × places, for each of the places that lie before them."""
    return np.add.outer(at, before).reshape(len(at), -1)


def _one_behind_another(chosen: Sequence[np.ndarray], factor: Factor) -> np.ndarray:
    starts = np.cumsum([0, *(_size(part) for part in factor.parts)])
    return np.concatenate([s + c for s, c in zip(starts, chosen, strict=False)])


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
    elif isinstance(layer, nn.RNNBase):
        own = dict(layer.named_parameters())
        layer.hidden_size = own["weight_hh_l0"].shape[1]
        layer.input_size = own["weight_ih_l0"].shape[1]
        layer._init_flat_weights()
    elif isinstance(layer, nn.RNNCellBase):
        layer.hidden_size, layer.input_size = layer.weight_hh.shape[1], layer.weight_ih.shape[1]
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        known = layer.running_mean if layer.weight is None else layer.weight
        if known is not None:
            layer.num_features = known.shape[0]
    elif isinstance(layer, nn.GroupNorm) and layer.weight is not None:
        layer.num_channels = layer.weight.shape[0]
    elif isinstance(layer, nn.LayerNorm) and layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)
