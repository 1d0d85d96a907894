"""Which channels of a model belong together, read off two passes through the model itself, one in
evaluation and one in training mode.

Torch shows every operation of a pass, whatever the module's Python looks like; each of them says
how the axes of its inputs become those of its output (`axes.py`). Residual additions, norm layers,
depthwise and grouped convolutions, flattening before a linear layer and reshapes all follow from
that. An operation that is not known here is refused, with the layer that it is in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.errors import FedloomError
from fedloom.select.axes import Label, Mismatch, fix, fixed, free, merge, regroup, resolve

Labels = tuple[Label, ...]

_SAME = {"hardswish", "hardsigmoid", "hardtanh", "dropout", "alias", "lift_fresh", "clone",
         "detach", "_to_copy", "hardswish_", "hardtanh_", "leaky_relu", "leaky_relu_", "elu",
         "elu_", "native_dropout", "rrelu_with_noise", "normal_", "uniform_", "exponential_",
         "random_"}  # fmt: skip
_POINTWISE = {"_prelu_kernel"}
_POOLS = {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d",
          "max_pool1d", "avg_pool1d", "upsample_nearest2d", "upsample_bilinear2d", "max_pool2d",
          "_adaptive_avg_pool3d", "avg_pool3d", "max_pool3d_with_indices",
          "mkldnn_max_pool2d"}  # fmt: skip
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min"}
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
class Traced:
    """What the passes told: labels of all tensors by name, who reads channels (in evaluation), who
    makes them (in either mode; the first of them in evaluation), and the operations by mode."""

    labels: dict[str, Labels]
    readers: tuple[Reader, ...]
    makers: tuple[Reader, ...]
    training_makers: tuple[Reader, ...]
    depthwise: frozenset[str]  # convolutions whose number of groups is that of their channels
    weights: frozenset[str]  # tensors that products and convolutions read channels with
    operations: dict[bool, tuple[Operation, ...]]  # by whether it is in training
    output: Label


def trace(module: nn.Module, shape: Sequence[int], training: bool = True) -> Traced:
    """Watch passes of zeros through the module: in evaluation and, if asked to, in training."""
    module = copy.deepcopy(module)  # training passes move the statistics of norms
    tracer = _Tracer(module)
    parameter = next(module.parameters())
    x = torch.zeros((2, *shape), dtype=parameter.dtype, device=parameter.device)
    tracer.remember(x, tuple(fixed(n) for n in x.shape))
    out = tracer.watch(x, training=False)
    readers, makers = tuple(tracer.readers), tuple(tracer.makers)
    if training:
        tracer.makers.clear()
        tracer.watch(x, training=True)
    labels = {name: tracer.known(t) for t, name in tracer.named()}
    return Traced(
        labels, readers, makers, tuple(tracer.makers) if training else (),
        frozenset(tracer.depthwise), frozenset(tracer.weights),
        {mode: tuple(found) for mode, found in tracer.operations.items()}, tracer.known(out)[-1],
    )  # fmt: skip


def refusal(module: nn.Module, where: str, training: bool, reason: str) -> FedloomError:
    mode = " in training" if training else ""
    return FedloomError(
        f"{type(module).__name__} can't be cut into sub-models: in {where}{mode}, {reason}. Use "
        "one of the built-in models, or a method that trains the whole model."
    )


class _Tracer(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._names = {id(t): name for t, name in self.named()}
        self._labels: dict[int, tuple[Tensor, Labels]] = {}  # the tensor is kept: ids are reused
        self._origin: dict[int, str] = {}  # views of a parameter, such as its transpose
        self._layers: list[str] = []
        self._last = ""  # layer that ran
        self.readers: list[Reader] = []
        self.makers: list[Reader] = []
        self.depthwise: list[str] = []
        self.weights: list[str] = []
        self.operations: dict[bool, list[Operation]] = {}

    def watch(self, x: Tensor, training: bool) -> Tensor:
        """One pass; what comes out of it keeps all its positions."""
        self._module.train(training)
        self.operations[training] = []
        with torch.no_grad(), self.named_layers(), self:
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

    @contextmanager
    def named_layers(self) -> Iterator[None]:
        """Know which layer is running, for error messages."""
        hooks: list[Any] = []
        for name, layer in self._module.named_modules():
            if name:
                hooks.append(layer.register_forward_pre_hook(self._enter(name)))
                hooks.append(layer.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._layers.append(name)

    def _leave(self, *_: Any) -> None:
        self._last = self._layers.pop()

    def remember(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = tensor, labels

    def known(self, tensor: Tensor) -> Labels:
        if id(tensor) not in self._labels:
            name = self._names.get(id(tensor))
            # Constants of the program itself have no channels to choose from.
            labels = tuple(fixed(n) for n in tensor.shape)
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
        if not isinstance(first, Tensor) or not tensors:
            return out
        try:
            labels = self._follow(name, func, args, kwargs or {}, tensors, first)
        except Mismatch:
            raise self._refusal(f"the shapes in its operation '{name}' can't be followed") from None
        if labels is None:
            raise self._refusal(f"its operation '{name}' is not one whose channels are known")
        self.remember(first, labels)
        self.operations[self._module.training].append(Operation(name, self._where(), labels))
        return out

    def _where(self) -> str:
        after = f" after layer '{self._last}'" if self._last else ""
        return f"layer '{self._layers[-1]}'" if self._layers else f"its forward(){after}"

    def _refusal(self, reason: str) -> FedloomError:
        return refusal(self._module, self._where(), self._module.training, reason)

    def _follow(
        self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor
    ) -> Labels | None:
        """The labels of an operation's (first) result; None if the operation is not known."""
        if torch.Tag.pointwise in func.tags or name in _POINTWISE:
            return self._pointwise(tensors, out)
        x = self.known(tensors[0])
        if name in _SAME or name.startswith("bernoulli") or name.endswith("_like"):
            return x
        if name in _POOLS:
            return (*x[:2], *(fixed(n) for n in out.shape[2:]))
        if name in _VIEWS:
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
        if name in _NORMS:
            for other in tensors[1:]:
                if other.numel():
                    merge(self.known(other)[0], x[1])
            return x
        if name == "native_group_norm":
            return self._group_norm(args, x)
        if name == "native_layer_norm":
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
        if name in ("select", "index_select"):
            touched = {args[1] % len(x)}
        elif name == "index":
            by = [(d, index) for d, index in enumerate(args[1]) if index is not None]
            if len(by) != 1 or by[0][1].dim() != 1:
                return None
            touched = {by[0][0]}
        elif name in ("flip", "roll"):
            dims = args[1] if name == "flip" else args[2] if len(args) > 2 else []
            touched = {d % len(x) for d in dims} or set(range(len(x)))
        else:
            touched = {d for d in range(len(x)) if given.shape[d] != out.shape[d]}
        if any(not a.fixed for d in touched for a in resolve(x[d])):
            return None
        if name == "select":
            return tuple(label for d, label in enumerate(x) if d not in touched)
        sizes = zip(x, given.shape, out.shape, strict=True)
        return tuple(label if n == m else fixed(m) for label, n, m in sizes)

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
        dims = args[1] if len(args) > 1 else None
        if not isinstance(dims, int | list | tuple):
            return None
        gone = {d % len(x) for d in ([dims] if isinstance(dims, int) else dims)}
        if any(not a.fixed for d in gone for a in resolve(x[d])):
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
