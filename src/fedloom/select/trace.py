"""Which channels of a model belong together, read off two passes through the model itself, one in
evaluation and one in training mode.

Torch shows every operation of a pass, whatever the module's Python looks like; each of them says
how the axes of its inputs become those of its output (`axes.py`). Residual additions, norm layers,
depthwise and grouped convolutions, concatenation, attention heads, flattening before a linear layer
and reshapes all follow from that. Recurrent layers are one operation. An operation that is not
known here is refused, with the layer that it is in and what to change.

The calls of torch functions are noted as well, in evaluation, with the labels of what they return:
from them follows where the activation of a channel can be seen (`scores.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.errors import FedloomError
from fedloom.models.inputs import blank
from fedloom.select.axes import (
    Label,
    Mismatch,
    cut,
    fix,
    fixed,
    free,
    is_free,
    leaves,
    merge,
    regroup,
    together,
)
from fedloom.select.calls import Calls, Layers

Labels = tuple[Label, ...]

_SAME = {"hardswish", "hardsigmoid", "hardtanh", "dropout", "alias", "lift_fresh", "clone",
         "detach", "_to_copy", "hardswish_", "hardtanh_", "leaky_relu", "leaky_relu_", "elu",
         "elu_", "native_dropout", "rrelu_with_noise", "normal_", "uniform_", "exponential_",
         "random_"}  # fmt: skip
_POINTWISE = {"_prelu_kernel"}
_POOLS = {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d",
          "max_pool1d", "avg_pool1d", "max_pool2d", "_adaptive_avg_pool3d", "avg_pool3d",
          "max_pool3d_with_indices", "mkldnn_max_pool2d"}  # fmt: skip
VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min", "var", "std"}
_PIECES = {"split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split",
           "unsafe_split_with_sizes"}  # fmt: skip
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
#: what to do about an operation that refuses channels
_INSTEAD = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std"),
                    "Reduce over positions, not over channels"),
    **dict.fromkeys(_SOFTMAX, "Take it over positions or classes, not over channels"),
    **dict.fromkeys(("select", "index", "index_select"),
                    "Cut channels with chunk or split, not by their numbers"),
    **dict.fromkeys(("flip", "roll", "constant_pad_nd"), "Let channels stay where they are"),
}  # fmt: skip
#: the same, of layers that do more than one
_OF_LAYERS = (
    (nn.RMSNorm, "Use nn.LayerNorm"),
    (nn.MultiheadAttention, "Leave out kdim, vdim, add_bias_kv and add_zero_attn"),
)
_NORMS = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
          "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
          "_batch_norm_no_update"}  # fmt: skip
_FACTORIES = {"new_empty", "new_zeros", "new_ones", "new_full"}
_POSITIONS = {"slice", "constant_pad_nd", "flip", "roll", "select", "index", "index_select"}


@dataclass(frozen=True)
class Reader:
    """A layer that reads channels: the label of its input's feature dimension tells which."""

    layer: str
    label: Label


@dataclass(frozen=True)
class Operation:
    """An operation of a pass: its name, where it is, and the labels of its (first) result."""

    name: str
    where: str
    labels: Labels


@dataclass(frozen=True)
class Called:
    """A call of a torch function in evaluation: which, and the labels of its results that are
    known: of the first, or of the outputs and the last state of recurrent layers."""

    name: str
    results: tuple[tuple[Labels, int], ...]  # with the dimension that is the samples
    pooled: int | None  # the call of a max pooling whose result this one alone is given


@dataclass(frozen=True)
class Traced:
    """What the passes told: labels of all tensors by name, who reads channels (in evaluation), who
    makes them (in either mode; the first of them in evaluation), the operations by mode, and the
    calls of functions by number."""

    labels: dict[str, Labels]
    readers: tuple[Reader, ...]
    makers: tuple[Reader, ...]
    training_makers: tuple[Reader, ...]
    depthwise: frozenset[str]  # convolutions whose number of groups is that of their channels
    weights: frozenset[str]  # tensors that products and convolutions read channels with
    operations: dict[bool, tuple[Operation, ...]]  # by whether it is in training
    calls: tuple[Called | None, ...]  # None: of one that returns no tensor with channels
    output: Labels


def trace(module: nn.Module, shape: Sequence[int], training: bool = True) -> Traced:
    """Watch passes of zeros through the module: in evaluation and, if asked to, in training."""
    module = copy.deepcopy(module)  # training passes move the statistics of norms
    tracer = _Tracer(module)
    x = blank(module, shape, 2)
    tracer.remember(x, tuple(fixed(n) for n in x.shape))
    calls = Calls()
    out = tracer.watch(x, False, calls)
    noted = tuple(tracer.called(x, calls))
    readers, makers = tuple(tracer.readers), tuple(tracer.makers)
    if training:
        tracer.makers.clear()
        tracer.watch(x, True, nullcontext())
    labels = {name: tracer.known(t) for t, name in tracer.named()}
    return Traced(
        labels, readers, makers, tuple(tracer.makers) if training else (),
        frozenset(tracer.depthwise), frozenset(tracer.weights),
        {mode: tuple(found) for mode, found in tracer.operations.items()}, noted,
        tracer.known(out),
    )  # fmt: skip


def refusal(
    module: nn.Module, where: str, training: bool, reason: str, instead: str = ""
) -> FedloomError:
    mode = " in training" if training else ""
    instead = instead or "Write it with other operations"
    return FedloomError(
        f"{type(module).__name__} can't be cut into sub-models: in {where}{mode}, {reason}. "
        f"{instead}, use one of the built-in models, or a method that trains the whole model."
    )


class _Tracer(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._names = {id(t): name for t, name in self.named()}
        self._labels: dict[int, tuple[Tensor, Labels]] = {}  # the tensor is kept: ids are reused
        self._origin: dict[int, str] = {}  # views of a parameter, such as its transpose
        self._layers = Layers()
        self._inside = 0  # recurrent layers that are running, which are followed as a whole
        self.readers: list[Reader] = []
        self.makers: list[Reader] = []
        self.depthwise: list[str] = []
        self.weights: list[str] = []
        self.operations: dict[bool, list[Operation]] = {}

    def watch(self, x: Tensor, training: bool, beside: AbstractContextManager[Any]) -> Tensor:
        """One pass; what comes out of it keeps all its positions."""
        self._module.train(training)
        self.operations[training] = []
        with torch.no_grad(), self.named_layers(), self, beside:
            out: Any = self._module(x)
        if not isinstance(out, Tensor):
            raise FedloomError(
                f"{type(self._module).__name__} can't be cut into sub-models: in "
                f"{'training' if training else 'evaluation'} it returns {type(out).__name__}, not "
                "a tensor of logits."
            )
        for label in self.known(out):
            fix(label)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # as in `metrics.cost`: don't import the compiler
        return False

    def named(self) -> Iterator[tuple[Tensor, str]]:
        for name, p in self._module.named_parameters():
            yield p, name
        for name, b in self._module.named_buffers():
            yield b, name

    def called(self, x: Tensor, calls: Calls) -> Iterator[Called | None]:
        """The calls of functions, with the labels of what they returned."""
        samples = {id(axis) for axis in leaves(self.known(x)[:1][0])}
        for call in calls.made:
            found = []
            for out in call.results:
                if id(out) not in self._labels:
                    break
                labels = self.known(out)
                at = [d for d, label in enumerate(labels) if samples & set(map(id, leaves(label)))]
                found.append((labels, at[0] if at else 0))
            yield Called(call.name, tuple(found), calls.pooled(call)) if found else None

    @contextmanager
    def named_layers(self) -> Iterator[None]:
        """Know which layer is running, for error messages, and follow recurrent ones."""
        with self._layers.followed(self._module), ExitStack() as hooks:
            for layer in self._module.modules():
                if isinstance(layer, nn.RNNBase):
                    hooks.enter_context(layer.register_forward_pre_hook(self._into_cells))
                    out = layer.register_forward_hook(self._out_of_cells, always_call=True)
                    hooks.enter_context(out)
            yield

    def _into_cells(self, layer: nn.RNNBase, inputs: tuple[Any, ...]) -> None:
        if layer.proj_size or not isinstance(inputs[0], Tensor):
            what = "proj_size" if layer.proj_size else "packed sequences"
            instead = "Give it padded tensors and leave proj_size out"
            raise self._refusal(f"its {what} can't be followed", instead)
        self._inside += 1

    def _out_of_cells(self, layer: nn.RNNBase, inputs: tuple[Any, ...], output: Any) -> None:
        """A recurrent layer: all its cells, layers and directions have the same hidden units."""
        self._inside -= 1
        if output is not None:  # it did not fail
            with torch._C.DisableTorchFunction():  # sizes read here are no calls of the model's
                self._follow_cells(layer, inputs, output)

    def _follow_cells(self, layer: nn.RNNBase, inputs: tuple[Any, ...], output: Any) -> None:
        out, state = output
        (name,) = [n for n, m in self._module.named_modules() if m is layer]
        data, units = self.known(inputs[0]), free(layer.hidden_size, name)
        sides = fixed(1 + layer.bidirectional)
        for key, tensor in layer.named_parameters():
            labels = self.known(tensor)
            merge(labels[0], (*fixed(tensor.shape[0] // layer.hidden_size), *units))
            if key.startswith("weight_hh"):
                merge(labels[1], units)
            elif key.startswith("weight_ih"):
                merge(labels[1], data[-1] if "_l0" in key else (*sides, *units))
            if key.startswith("weight"):
                self._reads_with(tensor)
        self._note(name, data[-1], units)
        self.remember(out, (*data[:-1], (*sides, *units)))
        for last in state if isinstance(state, tuple) else (state,):
            samples = data[0 if layer.batch_first else 1] if out.dim() == 3 else None
            between = () if samples is None else (samples,)
            self.remember(last, (fixed(last.shape[0]), *between, units))
        for given in inputs[1:]:
            for first in given if isinstance(given, tuple) else (given,):
                # One of a size that forward() fixes is no reason to keep all units: whether it fits
                # fewer of them is tried (`verify.py`).
                if first is not None and is_free(self.known(first)[-1]):
                    merge(self.known(first)[-1], units)

    def remember(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = tensor, labels

    def known(self, tensor: Tensor) -> Labels:
        if id(tensor) not in self._labels:
            name = self._names.get(id(tensor))
            # Constants of the program itself have no channels to choose from, but a recurrent cell
            # begins with zeros of its own size.
            layer = self._module.get_submodule(self._layers.name)
            own = isinstance(layer, nn.RNNCellBase)
            labels = tuple(free(n, "") if own else fixed(n) for n in tensor.shape)
            if name is not None:
                labels = _of_parameter(name, tensor)
                self._origin[id(tensor)] = name
            self.remember(tensor, labels)
        return self._labels[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        flat = (b for a in args for b in (a if isinstance(a, list | tuple) else (a,)))
        tensors = [a for a in flat if isinstance(a, Tensor)]
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor) or not tensors or self._inside:
            return out
        try:
            if name in _PIECES or name == "unbind":
                labels = self._pieces(name, args, kwargs or {}, tensors[0], out)
            else:
                labels = self._follow(name, func, args, kwargs or {}, tensors, first)
        except Mismatch:
            raise self._refusal(f"the shapes in its operation '{name}' can't be followed") from None
        if labels is None:
            reason = f"its operation '{name}' is not one whose channels are known"
            raise self._refusal(reason, _INSTEAD.get(name, ""))
        self.remember(first, labels)
        self.operations[self._module.training].append(Operation(name, self._layers.where, labels))
        return out

    def _refusal(self, reason: str, instead: str = "") -> FedloomError:
        where, training = self._layers.where, self._module.training
        layer = self._module.get_submodule(self._layers.name)
        instead = next((do for kind, do in _OF_LAYERS if type(layer) is kind), instead)
        return refusal(self._module, where, training, reason, instead)

    def _follow(
        self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor
    ) -> Labels | None:
        """The labels of an operation's (first) result; None if the operation is not known."""
        if torch.Tag.pointwise in func.tags or name in _POINTWISE:
            return self._pointwise(tensors, out)
        x = self.known(tensors[0])
        if name in _SAME or name.startswith("bernoulli") or name.endswith("_like"):
            return x
        if name in _POOLS or name.startswith("upsample_"):
            return (*x[:2], *(fixed(n) for n in out.shape[2:]))
        if name in VIEWS:
            self._keep_origin(tensors[0], out)
            return tuple(regroup(sum(x, ()), tuple(out.shape)))
        if name in ("t", "transpose", "permute"):
            self._keep_origin(tensors[0], out)
            return _permuted(name, x, args)
        if name in _REDUCTIONS:
            return self._reduced(x, args, kwargs, out)
        if name == "expand":
            lead = len(out.shape) - len(x)
            return tuple(
                fixed(n) if i < lead or tensors[0].shape[i - lead] != n else x[i - lead]
                for i, n in enumerate(out.shape)
            )
        if name == "convolution":
            return self._convolution(args, out)
        if name in ("addmm", "mm"):
            return self._product(args, name == "addmm")
        if name in ("bmm", "baddbmm"):
            return self._pairwise(args, name == "baddbmm")
        if name.startswith("_scaled_dot_product"):
            return self._attention(*(self.known(t) for t in args[:3]))
        if name in _SOFTMAX:
            return None if is_free(x[args[1]]) else x
        if name in ("cat", "stack"):
            return self._joined(name, args, kwargs, tensors)
        if name == "embedding":
            return self._looked_up(tensors)
        if name == "glu":
            dim = args[1] if len(args) > 1 else -1
            first, second = cut(x[dim], [out.shape[dim]] * 2)
            merge(first, second)
            return tuple(first if d == dim % len(x) else label for d, label in enumerate(x))
        if name in ("pixel_shuffle", "pixel_unshuffle"):
            area = args[1] ** 2
            if name == "pixel_unshuffle":
                channels = (*x[1], *fixed(area))
            else:
                channels, gone = regroup(x[1], (out.shape[1], area))
                fix(gone)
            return (x[0], channels, *(fixed(n) for n in out.shape[2:]))
        if name in ("channel_shuffle", "native_channel_shuffle"):
            groups, each = regroup(x[1], (args[1], out.shape[1] // args[1]))
            fix(groups)
            return (x[0], (*each, *groups), *x[2:])
        if name == "repeat":
            lead = len(out.shape) - len(x)
            padded = ((),) * lead + x
            return tuple((*fixed(n), *label) for n, label in zip(args[1], padded, strict=True))
        if name in _NORMS:
            for other in tensors[1:]:
                if other.numel():
                    merge(self.known(other)[0], x[1])
            return x
        if name == "native_group_norm":
            return self._group_norm(args, x)
        if name in ("native_layer_norm", "_fused_rms_norm"):
            last = x[len(x) - len(args[1]) :]
            for other in tensors[1:]:
                for mine, theirs in zip(self.known(other), last, strict=True):
                    merge(mine, theirs)
            return x
        if name in _FACTORIES:  # of a size that forward() took from other tensors
            return tuple(free(n, "") for n in out.shape)
        if name in _POSITIONS:
            return self._positions(name, args, x, tensors[0], out)
        return None

    def _positions(
        self, name: str, args: Any, x: Labels, given: Tensor, out: Tensor
    ) -> Labels | None:
        """What takes, moves or adds positions of a dimension, which must not be channels."""
        if name == "slice":
            return self._sliced(args, x, given, out)
        if name == "select":
            self._fix_inner(x[args[1] % len(x)])
        if name in ("select", "index_select"):
            touched = {args[1] % len(x)}
        elif name == "index":
            by = [(d, index) for d, index in enumerate(args[1]) if index is not None]
            if [d for d, _ in by] == [0] and id(given) in self._origin:  # a table of parameters
                fix(x[0])
                rows = out.shape[: out.dim() - len(x) + 1]
                return (*(fixed(n) for n in rows), *x[1:])
            if len(by) != 1 or by[0][1].dim() != 1:
                return None
            touched = {by[0][0]}
        elif name in ("flip", "roll"):
            dims = args[1] if name == "flip" else args[2] if len(args) > 2 else []
            touched = {d % len(x) for d in dims} or set(range(len(x)))
        else:
            touched = {d for d in range(len(x)) if given.shape[d] != out.shape[d]}
        if any(is_free(x[d]) for d in touched):
            return None
        if name == "select":
            return tuple(label for d, label in enumerate(x) if d not in touched)
        sizes = zip(x, given.shape, out.shape, strict=True)
        return tuple(label if n == m else fixed(m) for label, n, m in sizes)

    def _sliced(self, args: Any, x: Labels, given: Tensor, out: Tensor) -> Labels | None:
        """A run of positions; of channels, without gaps."""
        dim = (args[1] if len(args) > 1 else 0) % len(x)
        whole, kept = given.shape[dim], out.shape[dim]
        if whole == kept:
            self._keep_origin(given, out)
            return x
        if not is_free(x[dim]):
            return tuple(fixed(kept) if d == dim else label for d, label in enumerate(x))
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        start = max(start + whole, 0) if start < 0 else min(start, whole)
        if (len(args) > 4 and args[4] != 1) or not kept:
            return None
        sizes = [n for n in (start, kept, whole - start - kept) if n]
        self._keep_origin(given, out)
        run = cut(x[dim], sizes)[1 if start else 0]
        return tuple(run if d == dim else label for d, label in enumerate(x))

    def _pieces(self, name: str, args: Any, kwargs: Any, given: Tensor, out: Any) -> Labels | None:
        """A tensor cut into several; the labels of the first, the others are remembered."""
        x = self.known(given)
        at = 1 if name == "unbind" else 2
        dim = (args[at] if len(args) > at else kwargs.get("dim", 0)) % len(x)
        if name == "unbind":
            self._fix_inner(x[dim])
            if is_free(x[dim]):
                return None
            every = [x[:dim] + x[dim + 1 :]] * len(out)
        else:
            runs = cut(x[dim], [piece.shape[dim] for piece in out])
            every = [(*x[:dim], run, *x[dim + 1 :]) for run in runs]
        for piece, labels in zip(out, every, strict=True):
            self._keep_origin(given, piece)
            self.remember(piece, labels)
        return every[0]

    def _fix_inner(self, label: Label) -> None:
        """Positions that a reshape made of channels, one of which is taken, as of (3, heads, size)
        for queries, keys and values, are no channels to choose from."""
        if all(axis.inner for axis in leaves(label)):
            fix(label)

    def _joined(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Labels:
        """Tensors side by side."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if name == "stack":
            every = [self.known(t) for t in tensors]
            for other in every[1:]:
                for mine, theirs in zip(every[0], other, strict=True):
                    merge(mine, theirs)
            dim %= len(every[0]) + 1
            return (*every[0][:dim], fixed(len(every)), *every[0][dim:])
        every = [self.known(t) for t in tensors if t.numel()]
        dim %= len(every[0])
        for other in every[1:]:
            for d, (mine, theirs) in enumerate(zip(every[0], other, strict=True)):
                if d != dim:
                    merge(mine, theirs)
        beside = together([labels[dim] for labels in every])
        return (*every[0][:dim], beside, *every[0][dim + 1 :])

    def _pairwise(self, args: Any, biased: bool) -> Labels:
        """A product of two results, such as queries and keys: what they are multiplied over stays
        whole, as attention's scale depends on it. One with a parameter is a layer's."""
        left, right = args[1:3] if biased else args[:2]
        x, y = self.known(left), self.known(right)
        merge(x[0], y[0])
        merge(x[2], y[1])
        layer = self._owner(right)
        if layer:  # a parameter, as einsum multiplies with it
            self._reads_with(right)
            self._note(layer, x[2], y[2])
        else:
            fix(x[2])
        return (x[0], x[1], y[2])

    def _attention(self, query: Labels, key: Labels, value: Labels) -> Labels:
        """Heads may be left out; their sizes stay (see `_pairwise`), and so do positions."""
        for q, k, v in zip(query[:-2], key[:-2], value[:-2], strict=True):
            merge(q, k)
            merge(k, v)
        merge(query[-1], key[-1])
        fix(query[-1])
        fix(value[-1])
        merge(key[-2], value[-2])
        return (*query[:-1], value[-1])

    def _looked_up(self, tensors: list[Tensor]) -> Labels:
        table, at = (self.known(t) for t in tensors[:2])
        fix(table[0])
        self._note(self._owner(tensors[0]), (), table[1])
        return (*at, table[1])

    def _pointwise(self, tensors: list[Tensor], out: Tensor) -> Labels:
        """Dimensions that meet are the same; those of size one are spread."""
        labels: list[Label] = []
        for at in range(-out.dim(), 0):
            met = [self.known(t)[at] for t in tensors if t.dim() >= -at and t.shape[at] > 1]
            for other in met[1:]:
                merge(met[0], other)
            labels.append(met[0] if met else ())
        return tuple(labels)

    def _reduced(self, x: Labels, args: Any, kwargs: Any, out: Tensor) -> Labels | None:
        dims = args[1] if len(args) > 1 else kwargs.get("dim", range(len(x)))
        if not isinstance(dims, int | list | tuple | range):
            return None
        gone = {d % len(x) for d in ([dims] if isinstance(dims, int) else dims)}
        if any(is_free(x[d]) for d in gone):
            return None  # over the channels themselves
        keeps = out.dim() == len(x)
        return tuple(
            () if d in gone else label for d, label in enumerate(x) if keeps or d not in gone
        )

    def _convolution(self, args: Any, out: Tensor) -> Labels:
        x, weight, bias = args[:3]
        transposed, groups = args[6], args[8]
        data, kernel = self.known(x), self.known(weight)
        into, outof = (kernel[0], kernel[1]) if transposed else (kernel[1], kernel[0])
        layer = self._owner(weight)
        self._reads_with(weight)
        for positions in kernel[2:]:
            fix(positions)
        if groups == 1:
            merge(data[1], into)
        elif groups == x.shape[1] and not transposed:  # depthwise: a filter per channel
            self.depthwise.append(layer)
            merge(outof, (*data[1], *fixed(out.shape[1] // groups)))
        else:
            # The same channels of every group.
            split = (*fixed(groups), *free(x.shape[1] // groups, ""))
            merge(data[1], split)
            if transposed:
                merge(into, split)
                outof = (*fixed(groups), *outof)
            else:
                merge(split, (*fixed(groups), *into))
                merge(outof, (*fixed(groups), *free(out.shape[1] // groups, layer)))
        if bias is not None:
            merge(self.known(bias)[0], outof)
        self._note(layer, data[1], outof)
        return (data[0], outof, *(fixed(n) for n in out.shape[2:]))

    def _product(self, args: Any, biased: bool) -> Labels:
        x, weight = args[1:3] if biased else args[:2]
        data, columns = self.known(x), self.known(weight)
        merge(data[1], columns[0])
        self._reads_with(weight)
        if biased:
            merge(self.known(args[0])[-1], columns[1])
        if self._owner(weight):
            self._note(self._owner(weight), data[1], columns[1])
        return (data[0], columns[1])

    def _group_norm(self, args: Any, x: Labels) -> Labels:
        groups = args[6]
        if groups > 1:
            inner = args[0].shape[1] // groups
            merge(x[1], (*fixed(groups), *free(inner, "")))
        for other in args[1:3]:
            if other is not None:
                merge(self.known(other)[0], x[1])
        return x

    def _note(self, layer: str, into: Label, outof: Label) -> None:
        if layer:
            self.readers.append(Reader(layer, into))
            self.makers.append(Reader(layer, outof))

    def _reads_with(self, weight: Tensor) -> None:
        if id(weight) in self._origin:
            self.weights.append(self._origin[id(weight)])

    def _owner(self, weight: Tensor) -> str:
        """The layer of a weight; a parameter of the model itself goes by its own name."""
        name = self._origin.get(id(weight), "")
        return name.rpartition(".")[0] or name

    def _keep_origin(self, before: Tensor, after: Tensor) -> None:
        if id(before) in self._origin:
            self._origin[id(after)] = self._origin[id(before)]


def _of_parameter(name: str, tensor: Tensor) -> Labels:
    """Any dimension may be channels; a convolution fixes the positions of its kernel."""
    layer = name.rpartition(".")[0]
    return tuple(free(n, layer if i == 0 else "") for i, n in enumerate(tensor.shape))


def _permuted(name: str, x: Labels, args: Any) -> Labels:
    order = list(range(len(x)))
    if name == "t":
        order = order[::-1]
    elif name == "permute":
        order = [d % len(x) for d in args[1]]
    else:
        a, b = args[1] % len(x), args[2] % len(x)
        order[a], order[b] = b, a
    return tuple(x[d] for d in order)
