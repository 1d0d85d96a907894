"""From a module to the list of operations that the kernels know, or the reason why there is none.

The module is traced with torch.fx in the mode that it is in (training or evaluation). What follows
a convolution and can be done while its result is in registers (ReLU, pooling by 2×2) becomes a part
of it. Anything that is not known here raises `Unplanned` with a sentence.
"""

from __future__ import annotations

import ctypes
import operator
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedloom.layout import Entry, Layout
from fedloom.models.norm import StaticBatchNorm2d
from fedloom.models.scaler import scaler_of

KINDS = ("conv", "linear", "norm", "act", "maxpool", "avgpool", "add", "copy", "dropout")
_WIDE = 64  # channels
_FEW = 16  # channels from which on fewer products pay for the transforms
_RISING = ("relu", "tanh", "sigmoid", "leaky")  # non-linearities that never fall (slope ≥ 0)
#: non-linearities of a plan, by the name of the torch function that they are
CALLED = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu", "silu": "silu", "tanh": "tanh",
          "sigmoid": "sigmoid", "leaky": "leaky_relu"}  # fmt: skip
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "leaky")


class Unplanned(Exception):
    """Why a module can't be run by the kernels."""


class Op(ctypes.Structure):
    """One operation, as `Op` in kernels.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "kind", "in_", "in2", "out", "kh", "kw", "sy", "sx", "py", "px", "dy", "dx", "groups",
        "weight", "so", "si", "sky", "skx", "bias", "relu", "pool", "activation", "needs", "needs2",
        "again", "again2", "learns", "adds", "batch", "mean", "var", "tile",
    )] + [(name, ctypes.c_double) for name in ("eps", "momentum", "scale")]  # fmt: skip


class Value(ctypes.Structure):
    """The shape of what operations read and make, as `Value` in kernels.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("c", "h", "w", "pad", "of")]


@dataclass(eq=False)
class Made:
    """A value while the plan is made: its shape, and how it came about."""

    c: int
    h: int
    w: int
    flat: bool = False  # (N, features), not (N, C, H, W)
    by: Step | None = None
    of: Made | None = None  # another view of that one's memory
    pad: int = 0
    shared: bool = False  # more than one operation reads it
    learnt: bool = False  # whether anything before it has weights to learn
    behind: list[Use] = field(default_factory=list)  # layers whose non-linearity is still to come
    watched: bool = False  # it is an activation

    @property
    def root(self) -> Made:
        return self.of.root if self.of else self

    @property
    def size(self) -> int:
        return self.c * self.h * self.w

    @property
    def alone(self) -> bool:
        """Whether what comes next may become a part of what made it."""
        return not self.shared and not self.root.shared


@dataclass(eq=False)
class Use:
    """One use of a layer: what it gave, and what the first non-linearity behind it made of that, as
    in `fedloom.similarity.activations`."""

    layer: str
    own: Made | None  # None: only a pooled form of it is in memory
    activation: Made | None = None

    @property
    def made(self) -> Made | None:
        return self.own if self.activation is None else self.activation


@dataclass(eq=False)
class Step:
    """An operation while the plan is made."""

    kind: str
    inputs: list[Made]
    out: Made
    facts: dict[str, float] = field(default_factory=dict)
    chance: float = 0.0  # of dropout


@dataclass(frozen=True, eq=False)
class Plan:
    """What the kernels need to know of a module."""

    ops: Sequence[Op]
    values: Sequence[Value]
    outputs: tuple[int, ...]
    classes: int
    stacked: bool  # several outputs, as (outputs, N, classes)
    averaged: bool  # or the mean of several
    coupled: bool  # samples of a batch depend on one another (batch norm)
    least: int  # the smallest number of values over which a batch norm takes its statistics
    counters: tuple[str, ...]  # buffers that count training batches
    masks: tuple[tuple[int, float, tuple[int, ...]], ...]  # dropout: operation, chance, shape
    wide: float  # the share of multiplications in convolutions of 64 channels or more on both sides
    # that are not computed with fewer of them
    activations: dict[
        str, tuple[int, ...]
    ]  # by layer: the values that they are, of a watching plan
    bends: tuple[tuple[str, int], ...]  # non-linearities and what they gave, of a watching plan

    def combined(self, out: Tensor) -> Tensor:
        """What the module returns, of its outputs, (outputs, N, classes)."""
        if self.averaged:
            return out.mean(0)
        return out if self.stacked else out[0]


def plan(
    module: nn.Module,
    layout: Layout,
    shape: tuple[int, int, int],
    watching: bool = False,
    measured: frozenset[str] = frozenset(),
    before_pools: bool = False,
) -> Plan:
    """The plan of `module` for images of `shape`, in the mode that it is in. One that is `watching`
    has the activations of all layers in memory, at the price of some pooling on its own, and
    `before_pools` those before a maximum is taken of them. Norms that are `measured` write the
    statistics of a batch into the row."""
    planner = partial(_Planner, module, layout, shape, watching, measured, before_pools)
    made = planner(before_pools).plan() or planner(True).plan()
    assert made is not None
    return made


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, StaticBatchNorm2d) or super().is_leaf_module(m, name)


def _around(modules: dict[str, nn.Module]) -> list[Any]:
    """What a forward pass may change beside what it returns: if tracing does, no trace is the
    whole truth."""
    plain = (bool, int, float, str)
    own = [{k: repr(v) for k, v in vars(m).items() if not k.startswith("_") or isinstance(v, plain)}
           for m in modules.values()]  # fmt: skip
    numpy = pickle.dumps(np.random.get_state(legacy=False))  # far quicker than its repr
    return [own, random.getstate(), numpy, torch.get_rng_state().tolist()]


class _Rows:
    """Stands for the number of samples of a batch, in `x.view(x.size(0), -1)`."""


def _pair(value: Any) -> tuple[int, int]:
    a, b = value if isinstance(value, tuple | list) else (value, value)
    return int(a), int(b)


class _Planner:
    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        shape: tuple[int, int, int],
        watching: bool,
        measured: frozenset[str],
        before_pools: bool,
        pools_apart: bool,
    ) -> None:
        if layout.dtype != torch.float32:
            raise Unplanned(f"its weights are {layout.dtype}, not float32")
        self.module, self.layout, self.shape = module, layout, shape
        self.entries = {e.name: e for e in layout.entries}
        self.watching, self.pools_apart, self.before_pools = watching, pools_apart, before_pools
        self.to_measure = set(measured)
        self.measured = measured
        self.uses: list[Use] = []
        self.bends: list[tuple[str, Made]] = []
        self.steps: list[Step] = []
        self.counters: list[str] = []
        self.averaged = False
        self.macs = 0  # of one sample's forward pass
        self.wide: list[tuple[Step, int]] = []  # wide convolutions, and theirs

    def plan(self) -> Plan | None:
        """None: an activation that is watched would not be in memory, unless pools are apart."""
        modules = dict(self.module.named_modules())
        for name, m in modules.items():
            hooks = [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]
            if any(scaler_of(hook) is None for hook in hooks):
                raise Unplanned(f"'{name or type(m).__name__}' has a hook")
        before = _around(modules)
        try:
            graph = _Tracer().trace(self.module)
        except Exception as e:
            raise Unplanned(f"torch.fx can't trace it ({str(e).splitlines()[0]})") from None
        if _around(modules) != before:
            raise Unplanned("its forward draws random numbers, or changes its own attributes")
        image = Made(*self.shape)
        known: dict[fx.Node, Any] = {}
        result: Any = None
        seen = False
        for node in graph.nodes:
            if node.op == "placeholder":
                if seen:
                    raise Unplanned("it takes more than one input")
                known[node], seen = image, True
                image.shared = len(node.users) > 1
            elif node.op == "output":
                result = self._known(node.args[0], known)
            elif node.op == "get_attr":
                raise Unplanned(f"it uses its own tensor '{node.target}' directly")
            else:
                made = known[node] = self._node(node, modules, known)
                if isinstance(made, Made):
                    made.shared = made.shared or len(node.users) > 1
        outputs = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(o, Made) and o.flat for o in outputs):
            raise Unplanned("it does not end with logits of shape (N, classes)")
        if len({o.c for o in outputs}) != 1:
            raise Unplanned("its outputs differ in shape")
        if self.watching and any(use.made is None for use in self.uses):
            return None
        if self.to_measure:
            raise Unplanned(f"'{min(self.to_measure)}' took no part")
        return self._finish(image, outputs, isinstance(result, tuple))

    def _known(self, arg: Any, known: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(arg, lambda n: known[n])

    def _node(self, node: fx.Node, modules: dict[str, nn.Module], known: dict[fx.Node, Any]) -> Any:
        args = [self._known(a, known) for a in node.args]
        kwargs = {k: self._known(v, known) for k, v in node.kwargs.items()}
        if node.op == "call_module":
            name = str(node.target)
            return self._layer(name, modules[name], args[0])
        call = node.target if callable(node.target) else str(node.target)
        word = call if isinstance(call, str) else call.__name__
        if call in (getattr, "size") or word == "getitem":
            return self._about(word, args)
        if call is torch.stack and kwargs.get("dim", 0) == 0 and len(args) == 1:
            return tuple(args[0])
        x = args[0]
        if isinstance(x, tuple):
            if call in ("mean", torch.mean) and args[1:] == [0] and not kwargs:
                self.averaged = True
                return x
            raise Unplanned(f"it uses '{word}' on several outputs")
        if not isinstance(x, Made):
            raise Unplanned(f"it uses '{word}'")
        if call in (operator.add, operator.iadd, torch.add, "add", "add_"):
            if kwargs or len(args) != 2 or not isinstance(args[1], Made):
                raise Unplanned("it adds something other than two tensors")
            if call in (operator.iadd, "add_") and not x.alone:
                raise Unplanned("it changes a tensor in place that is used elsewhere")
            return self._add(x, args[1])
        if call in (F.relu, torch.relu, "relu", "relu_", F.relu_, torch.relu_):
            return self._relu(x, kwargs.get("inplace", False) or word.endswith("_"))
        if call in _FUNCTIONS:
            return self._activation(_FUNCTIONS[call], x, args[1:], kwargs)
        if call in (torch.flatten, "flatten"):
            start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0)
            if start != 1 or len(args) > 2 or set(kwargs) - {"start_dim"}:
                raise Unplanned("it flattens other dimensions than all but the first")
            return self._flatten(x)
        if call in ("view", "reshape", torch.reshape):
            to = args[1:] if not isinstance(args[1], tuple | list) else list(args[1])
            sizes = [s for s in to if not isinstance(s, _Rows)]
            if len(to) == 2 and (sizes == [-1] or (sizes[-1:] == [x.size] and to[0] in (-1,))):
                return self._flatten(x)
            raise Unplanned(f"it uses '{word}' for something other than flattening")
        if call in (F.max_pool2d, F.avg_pool2d):
            return self._pool_call(call is F.max_pool2d, x, args[1:], kwargs)
        if call is F.adaptive_avg_pool2d:
            return self._adaptive(x, args[1] if len(args) > 1 else kwargs["output_size"])
        if call in (torch.mean, "mean"):
            dims = args[1] if len(args) > 1 else kwargs.get("dim")
            if sorted(d % 4 for d in dims or ()) != [2, 3] or x.flat:
                raise Unplanned("it takes a mean over other dimensions than a map's")
            mean = self._pool("avgpool", x, (x.h, x.w), (1, 1), (0, 0))
            keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            return mean if keeps else self._flatten(mean)
        if call is F.dropout:
            given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            return self._dropout(x, given.get("p", 0.5), given.get("training", True))
        raise Unplanned(f"it uses '{word}'")

    def _about(self, word: str, args: list[Any]) -> Any:
        """`x.size(0)` and `x.shape[0]`: the number of samples."""
        if word == "getattr" and args[1] == "shape":
            return (_Rows(), None, None, None)
        if word == "size" and args[1:] in ([0], []):
            return _Rows() if args[1:] else (_Rows(), None, None, None)
        if word == "getitem" and isinstance(args[0], tuple) and args[1] == 0:
            return args[0][0]
        raise Unplanned("it looks at shapes")

    def _layer(self, name: str, layer: Any, x: Any) -> Made:
        if not isinstance(x, Made):
            raise Unplanned(f"'{name}' gets something other than one tensor")
        factor = 1.0
        for hook in layer._forward_hooks.values():
            factor *= scaler_of(hook, layer.training) or 1.0
        kind = type(layer)
        if factor != 1.0 and kind not in (nn.Conv2d, nn.Linear):
            raise Unplanned(f"'{name}' is scaled, and is no convolution or linear layer")
        if kind is nn.Conv2d:
            return self._used_layer(name, self._conv(name, layer, x, factor))
        if kind is nn.Linear:
            return self._used_layer(name, self._linear(name, layer, x, factor))
        if kind is nn.Identity:
            return x
        if kind is nn.ReLU:
            return self._relu(x, layer.inplace)
        if kind in _LAYERS:
            return self._activation(_LAYERS[kind], x, [], dict(vars(layer)))
        if kind in (nn.MaxPool2d, nn.AvgPool2d):
            given = {k: v for k, v in vars(layer).items() if not k.startswith("_")}
            given.pop("training")
            return self._pool_call(kind is nn.MaxPool2d, x, [], given)
        if kind is nn.AdaptiveAvgPool2d:
            return self._adaptive(x, layer.output_size)
        if kind is nn.Flatten:
            if (layer.start_dim, layer.end_dim) != (1, -1):
                raise Unplanned(f"'{name}' flattens other dimensions than all but the first")
            return self._flatten(x)
        if kind is nn.Dropout:
            return self._dropout(x, layer.p, layer.training)
        if kind in (nn.BatchNorm2d, nn.BatchNorm1d, StaticBatchNorm2d):
            return self._batch_norm(name, layer, x)
        if kind is nn.GroupNorm:
            return self._norm(name, layer, x, groups=layer.num_groups)
        if kind is nn.LayerNorm:
            if not x.flat or tuple(layer.normalized_shape) != (x.c,):
                raise Unplanned(f"'{name}' normalises something other than a row of features")
            return self._norm(name, layer, x, groups=1)
        raise Unplanned(f"'{name}' is of type {kind.__name__}")

    def _entry(self, name: str, layer: nn.Module, tensor: str) -> Entry | None:
        if layer._parameters.get(tensor) is None:
            if getattr(layer, tensor, None) is not None:
                raise Unplanned(f"'{name}.{tensor}' is computed, not a parameter")
            return None
        found = self.entries.get(f"{name}.{tensor}" if name else tensor)
        if found is None:
            raise Unplanned(f"'{name}.{tensor}' is shared under another name")
        return found

    def _weights(self, name: str, layer: nn.Module) -> dict[str, float]:
        weight, bias = (self._entry(name, layer, t) for t in ("weight", "bias"))
        kinds = {e.kind for e in (weight, bias) if e is not None}
        if len(kinds) > 1:
            raise Unplanned(f"'{name}' has its weight frozen or its bias, not both")
        return {
            "weight": -1 if weight is None else weight.start,
            "bias": -1 if bias is None else bias.start,
            "learns": int(kinds == {"param"}),
        }

    def _used_layer(self, name: str, out: Made) -> Made:
        use = Use(name, out)
        self.uses.append(use)
        out.behind.append(use)
        return out

    def _bent(self, word: str, x: Made, out: Made) -> Made:
        """A non-linearity makes `out` of x (or is done where x is made): it is the activation of
        the layers behind which it is the first."""
        self.bends.append((word, out))
        for use in x.behind:
            use.activation, out.watched = use.activation or out, True
        x.behind.clear()
        return out

    def _made(self, kind: str, inputs: list[Made], out: Made, **facts: float) -> Made:
        step = Step(kind, inputs, out, facts)
        out.by = step
        out.learnt = bool(facts.get("learns")) or any(x.learnt for x in inputs)
        if kind not in ("conv", "linear", "act"):
            uses = dict.fromkeys(use for x in inputs for use in x.behind)
            out.behind = [use for use in uses if use.activation is None]
        self.steps.append(step)
        return out

    def _conv(self, name: str, layer: nn.Conv2d, x: Made, factor: float) -> Made:
        if x.flat or x.c != layer.in_channels:
            raise Unplanned(f"'{name}' gets no map of {layer.in_channels} channels")
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise Unplanned(f"'{name}' pads by '{layer.padding}', mode '{layer.padding_mode}'")
        (kh, kw), (sy, sx), (dy, dx) = layer.kernel_size, layer.stride, layer.dilation
        py, px = layer.padding
        h = (x.h + 2 * py - dy * (kh - 1) - 1) // sy + 1
        w = (x.w + 2 * px - dx * (kw - 1) - 1) // sx + 1
        if h < 1 or w < 1:
            raise Unplanned(f"'{name}' has kernels larger than its input")
        inside = x.c // layer.groups
        macs = h * w * layer.out_channels * inside * kh * kw
        self.macs += macs
        x.root.pad = max(x.root.pad, py, px)
        made = self._made(
            "conv", [x], Made(layer.out_channels, h, w), **self._weights(name, layer),
            kh=kh, kw=kw, sy=sy, sx=sx, py=py, px=px, dy=dy, dx=dx, groups=layer.groups,
            so=kh * kw * inside, si=1, sky=kw * inside, skx=inside, scale=factor,
        )  # fmt: skip
        if min(inside, layer.out_channels // layer.groups) >= _WIDE and made.by is not None:
            self.wide.append((made.by, macs))
        return made

    def _linear(self, name: str, layer: nn.Linear, x: Made, factor: float) -> Made:
        if not x.flat or x.c != layer.in_features:
            raise Unplanned(f"'{name}' gets no rows of {layer.in_features} features")
        self.macs += layer.in_features * layer.out_features
        out = Made(layer.out_features, 1, 1, flat=True)
        return self._made("linear", [x], out, **self._weights(name, layer), scale=factor)

    def _flatten(self, x: Made) -> Made:
        if x.flat:
            return x
        return Made(x.size, 1, 1, flat=True, by=x.by, of=x, learnt=x.learnt, behind=x.behind)

    def _relu(self, x: Made, inplace: bool) -> Made:
        if inplace and not x.alone:
            raise Unplanned("it changes a tensor in place that is used elsewhere")
        by = x.by
        if self.before_pools and by is not None and by.kind == "maxpool" and x.alone:
            return self._before_pool("relu", x, by)
        if self._takes_relu(x):
            return self._bent("relu", x, x)
        return self._activation("relu", x, [], {})

    def _takes_relu(self, x: Made) -> bool:
        """Let what makes x do a ReLU as well, if it can."""
        by = x.by
        fits = by is not None and by.kind in ("conv", "linear", "norm", "add", "maxpool", "avgpool")
        if by is None or not fits or not x.alone or by.facts.get("relu"):
            return False
        by.facts["relu"] = 1
        return True

    def _activation(self, word: str, x: Made, args: list[Any], kwargs: dict[str, Any]) -> Made:
        slope = 1.0
        if word == "leaky":
            slope = args[0] if args else kwargs.get("negative_slope", 0.01)
        if word == "gelu":
            how = args[0] if args else kwargs.get("approximate", "none")
            word = "gelu" if how == "none" else "gelu_tanh"
        by, rises = x.by, word in _RISING and slope >= 0
        if self.before_pools and by is not None and by.kind == "maxpool" and x.alone and rises:
            return self._before_pool(word, x, by, slope)
        out = Made(x.c, x.h, x.w, x.flat)
        self._made("act", [x], out, activation=ACTIVATIONS.index(word), scale=slope)
        return self._bent(word, x, out)

    def _before_pool(self, word: str, pooled: Made, pool: Step, slope: float = 1.0) -> Made:
        """A non-linearity behind a max pooling goes before it, which gives the same."""
        x = pool.inputs[0]
        if word == "relu" and self._takes_relu(x):
            self._bent(word, pooled, x)
            return pooled
        out = Made(x.c, x.h, x.w, x.flat)
        step = Step("act", [x], out, {"activation": ACTIVATIONS.index(word), "scale": slope})
        out.by, out.learnt, pool.inputs[0] = step, x.learnt, out
        self.steps.insert(self.steps.index(pool), step)
        self._bent(word, pooled, out)
        return pooled

    def _pool_call(self, largest: bool, x: Made, args: list[Any], kwargs: dict[str, Any]) -> Made:
        names = ["kernel_size", "stride", "padding"]
        names += ["dilation", "ceil_mode"] if largest else ["ceil_mode", "count_include_pad"]
        given = dict(zip(names, args, strict=False)) | kwargs
        size = _pair(given["kernel_size"])
        stride = _pair(given.get("stride") or size)
        padding = _pair(given.get("padding", 0))
        odd = given.get("ceil_mode") or given.get("return_indices") or given.get("divisor_override")
        if odd or _pair(given.get("dilation", 1)) != (1, 1):
            raise Unplanned("it pools with an option that is not known here")
        if not largest and max(padding) and not given.get("count_include_pad", True):
            raise Unplanned("it averages without counting the border")
        by, plain = x.by, (size, stride, padding) == ((2, 2), (2, 2), (0, 0))
        behind = by is not None and by.kind == "conv" and not by.facts.get("pool")
        apart = self.pools_apart or (self.watching and x.watched)
        fits = largest and plain and behind and x.alone and x.of is None and min(x.h, x.w) >= 2
        if fits and not apart:
            assert by is not None
            by.facts["pool"] = 1
            for use in x.behind:
                use.own = None if use.own is x else use.own
            x.h, x.w = x.h // 2, x.w // 2
            return x
        return self._pool("maxpool" if largest else "avgpool", x, size, stride, padding)

    def _pool(
        self,
        kind: str,
        x: Made,
        size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Made:
        if x.flat:
            raise Unplanned("it pools rows of features")
        h, w = ((n + 2 * p - k) // s + 1
                for n, k, s, p in zip((x.h, x.w), size, stride, padding, strict=True))  # fmt: skip
        if h < 1 or w < 1:
            raise Unplanned("it pools over more than there is")
        return self._made(
            kind, [x], Made(x.c, h, w), kh=size[0], kw=size[1], sy=stride[0], sx=stride[1],
            py=padding[0], px=padding[1], scale=1 / (size[0] * size[1]),
        )  # fmt: skip

    def _adaptive(self, x: Made, size: Any) -> Made:
        h, w = (n if want is None else want
                for n, want in zip((x.h, x.w), size if isinstance(size, tuple | list)
                                   else (size, size), strict=True))  # fmt: skip
        if x.flat or x.h % h or x.w % w:
            raise Unplanned("it pools to a size that does not divide its input's")
        each = (x.h // h, x.w // w)
        return self._pool("avgpool", x, each, each, (0, 0))

    def _add(self, a: Made, b: Made) -> Made:
        if (a.c, a.h, a.w, a.flat) != (b.c, b.h, b.w, b.flat):
            raise Unplanned("it adds tensors of different shapes")
        return self._made("add", [a, b], Made(a.c, a.h, a.w, a.flat))

    def _dropout(self, x: Made, chance: float, training: bool) -> Made:
        if not training or chance == 0:
            return x
        out = self._made("dropout", [x], Made(x.c, x.h, x.w, x.flat))
        self.steps[-1].chance = chance
        return out

    def _batch_norm(self, name: str, layer: nn.modules.batchnorm._BatchNorm, x: Made) -> Made:
        static = isinstance(layer, StaticBatchNorm2d)
        tracked = layer.running_mean is not None
        if name in self.measured:
            if name not in self.to_measure:
                raise Unplanned(f"'{name}' is used more than once")
            self.to_measure.remove(name)
            mean, var = (self.entries[f"{name}.running_{t}"].start for t in ("mean", "var"))
            return self._norm(name, layer, x, batch=1, mean=mean, var=var, momentum=1.0)
        if layer.training or not tracked:
            if layer.training and tracked and not static:
                if layer.momentum is None:
                    raise Unplanned(f"'{name}' averages its statistics over all batches")
                where = [self.entries.get(f"{name}.running_{t}") for t in ("mean", "var")]
                if None in where:
                    raise Unplanned(f"'{name}' has statistics that are not part of the model")
                self.counters.append(f"{name}.num_batches_tracked")
                mean, var = (e.start for e in where if e is not None)
                return self._norm(name, layer, x, batch=1, mean=mean, var=var,
                                  momentum=layer.momentum)  # fmt: skip
            return self._norm(name, layer, x, batch=1)
        mean, var = (self.entries[f"{name}.running_{t}"].start for t in ("mean", "var"))
        return self._norm(name, layer, x, batch=2, mean=mean, var=var)

    def _norm(self, name: str, layer: Any, x: Made, **facts: float) -> Made:
        channels = layer.num_channels if isinstance(layer, nn.GroupNorm) else x.c
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            channels = layer.num_features
        if channels != x.c:
            raise Unplanned(f"'{name}' normalises {channels} channels and gets {x.c}")
        out = Made(x.c, x.h, x.w, x.flat)
        facts = {"groups": 1, "batch": 0, "mean": -1, "var": -1, "momentum": 0.0} | facts
        return self._made("norm", [x], out, **self._weights(name, layer), eps=layer.eps, **facts)

    def _finish(self, image: Made, outputs: tuple[Made, ...], stacked: bool) -> Plan:
        steps = self._used(outputs)
        steps, moved = _unpadded_where_flat(steps, outputs)
        outputs = tuple(moved.get(o, o) for o in outputs)
        if not any(s.facts.get("learns") for s in steps):
            raise Unplanned("nothing in it learns")
        values: list[Made] = [image]
        for made in [m for s in steps for m in (*s.inputs, s.out)]:
            for m in (made.root, made):
                if m not in values:
                    values.append(m)
        number = {m: i for i, m in enumerate(values)}
        ops = [_op(s, number) for s in steps]
        if self.measured:  # nothing goes back
            for op in ops:
                op.needs = op.needs2 = op.learns = 0
        _mark_sums(ops, steps, outputs)
        sizes = [s.out.h * s.out.w for s in steps if s.facts.get("batch") == 1]
        masks = [(i, s.chance, (s.out.c,) if s.out.flat else (s.out.c, s.out.h, s.out.w))
                 for i, s in enumerate(steps) if s.kind == "dropout"]  # fmt: skip
        return Plan(
            ops=ops,
            values=[Value(m.c, m.h, m.w, m.pad, -1 if m.of is None else number[m.root])
                    for m in values],
            outputs=tuple(number[o] for o in outputs),
            classes=outputs[0].c,
            stacked=stacked and not self.averaged,
            averaged=self.averaged,
            coupled=bool(sizes),
            least=min(sizes, default=2),
            counters=tuple(self.counters),
            masks=tuple(masks),
            wide=sum(macs for s, macs in self.wide if not _tile(s)) / max(self.macs, 1),
            activations=self._activations(number) if self.watching else {},
            bends=tuple((word, number.get(m.root, -1)) for word, m in self.bends)
            if self.watching
            else (),
        )  # fmt: skip

    def _activations(self, number: dict[Made, int]) -> dict[str, tuple[int, ...]]:
        """By layer, in the module's order: what its uses gave, if the outputs depend on that."""
        found: dict[str, list[int]] = {name: [] for name, _ in self.module.named_modules()}
        for use in self.uses:
            assert use.made is not None
            if use.made.root not in number:
                raise Unplanned(f"nothing depends on '{use.layer}'")
            found[use.layer].append(number[use.made.root])
        return {name: tuple(at) for name, at in found.items() if at}

    def _used(self, outputs: tuple[Made, ...]) -> list[Step]:
        """The steps that the outputs depend on."""
        wanted = {o.root for o in outputs}
        used = []
        for s in reversed(self.steps):
            if s.out.root in wanted:
                used.append(s)
                wanted |= {x.root for x in s.inputs}
        return used[::-1]


def _op(step: Step, number: dict[Made, int]) -> Op:
    ones = dict.fromkeys(("kh", "kw", "sy", "sx", "dy", "dx", "groups"), 1)
    none = dict.fromkeys(("weight", "bias", "mean", "var", "in2"), -1)
    facts: dict[str, Any] = {**ones, **none, "scale": 1.0, **step.facts}
    for place, needs, made in zip(("in_", "in2"), ("needs", "needs2"), step.inputs, strict=False):
        facts |= {place: number[made], needs: int(made.learnt)}
    facts["tile"] = _tile(step)
    given = {k: v if k in ("eps", "momentum", "scale") else int(v) for k, v in facts.items()}
    return Op(kind=KINDS.index(step.kind), out=number[step.out], **given)


def _tile(step: Step) -> int:
    """The outputs of a tile, across, of a convolution of 3×3 that is computed with fewer products
    (Winograd's minimal filtering); 0 where they are not half as many, or too few to pay for the
    transforms."""
    f = step.facts
    ones = [f[name] for name in ("sy", "sx", "dy", "dx", "groups")] if step.kind == "conv" else []
    if not ones or set(ones) != {1} or (f["kh"], f["kw"]) != (3, 3) or f["py"] != f["px"]:
        return 0
    x = step.inputs[0]
    if f["py"] > 2 or min(x.c, step.out.c) < _FEW:
        return 0
    h, w = (n + 2 * int(f["py"]) - 2 for n in (x.h, x.w))
    sizes = (4,) if f.get("pool") else (4, 3)
    products = {m: -(-h // m) * -(-w // m) * (m + 2) ** 2 for m in sizes}
    best = min(sizes, key=lambda m: products[m])
    return best if 2 * products[best] <= 9 * h * w else 0


def _unpadded_where_flat(
    steps: list[Step], outputs: tuple[Made, ...]
) -> tuple[list[Step], dict[Made, Made]]:
    """A row of features can't have a border in it: where a map has one, features are a copy."""
    out: list[Step] = []
    moved: dict[Made, Made] = {}

    def plain(m: Made) -> Made:
        if m.of is None or not m.root.pad:
            return m
        if m not in moved:
            r = m.root
            copied = Made(r.c, r.h, r.w, learnt=m.learnt)
            out.append(Step("copy", [r], copied))
            moved[m] = Made(m.c, m.h, m.w, m.flat, of=copied, learnt=m.learnt)
        return moved[m]

    for s in steps:
        s.inputs = [plain(m) for m in s.inputs]
        out.append(s)
    for o in outputs:
        plain(o)
    return out, moved


def _mark_sums(ops: list[Op], steps: list[Step], outputs: tuple[Made, ...]) -> None:
    """In the backward pass, which operation writes a gradient first, and which add to it."""
    written = {o.root for o in outputs}
    weights: set[int] = set()
    for op, step in zip(reversed(ops), reversed(steps), strict=True):
        for made, needs, again in [*zip(step.inputs, ("needs", "needs2"), ("again", "again2"),
                                        strict=False)][::-1]:  # fmt: skip
            if getattr(op, needs):
                setattr(op, again, int(made.root in written))
                written.add(made.root)
        if op.learns:
            place = op.weight if op.weight >= 0 else op.bias
            op.adds = int(place in weights)
            weights.add(place)


_FUNCTIONS: dict[Callable[..., Any] | str, str] = {
    F.gelu: "gelu", F.silu: "silu", torch.tanh: "tanh", F.tanh: "tanh", "tanh": "tanh",
    torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", "sigmoid": "sigmoid", F.leaky_relu: "leaky",
}  # fmt: skip
_LAYERS: dict[type, str] = {
    nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.LeakyReLU: "leaky",
}  # fmt: skip
