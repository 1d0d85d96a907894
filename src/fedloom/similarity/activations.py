"""The activations of any `nn.Module`: what comes out of the non-linearities behind its layers.

Non-linearities are often functions that no hook sees, so torch shows every call of a forward pass:
what a layer gives is followed through norms, pooling, residual sums and views to the first
non-linearity behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fedloom.errors import FedloomError, unknown

T = TypeVar("T")

#: functions and methods by name, without the "_" of those that work in place
NON_LINEARITIES = frozenset(
    {"relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu",
     "mish", "tanh", "sigmoid", "softplus", "softsign", "log_sigmoid", "logsigmoid", "hardtanh",
     "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "_threshold",
     "threshold", "glu", "clamp", "clamp_min", "clip", "maximum", "sin"}
)  # fmt: skip
#: what may stand between a layer and its non-linearity
PASSES = frozenset(
    {"batch_norm", "layer_norm", "group_norm", "instance_norm", "local_response_norm", "rms_norm",
     "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
     "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
     "adaptive_max_pool2d", "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d", "mean", "amax",
     "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
     "flatten", "unflatten", "view", "reshape", "permute", "transpose", "movedim", "squeeze",
     "unsqueeze", "contiguous", "clone", "detach", "to", "float", "double", "pixel_shuffle",
     "interpolate", "pad", "add", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__rsub__",
     "__isub__", "mul", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "__itruediv__"}
)  # fmt: skip

_FOLLOWED = NON_LINEARITIES | PASSES


class Network(Protocol):
    """A network that says itself what its layers give."""

    def activations(
        self, inputs: Tensor, layers: Sequence[str] | None = None
    ) -> Mapping[str, Tensor]: ...


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """The layers that are compared unless others are named: those with weights of their own.

    >>> layers_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)))
    ('0', '3')
    """
    found = tuple(
        name
        for name, layer in module.named_modules()
        if any(p.ndim > 1 for p in layer.parameters(recurse=False))
    )
    if not found:
        raise FedloomError(
            f"{type(module).__name__} has no layer with a weight matrix: say which layers to look "
            "at."
        )
    return found


def activations(
    module: nn.Module | Network, inputs: Tensor, layers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """What the non-linearity behind each layer gives for the inputs, flattened to samples ×
    features: of the layers named, or of all with weights that take part.

    A layer with none behind it, such as the last one, counts as it is; of layers that end in the
    same non-linearity, as in a residual block, the first counts unless they are named. The module
    is put in evaluation mode for this, and nothing of it changes. A layer that is used several
    times gives its activations side by side.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> found = activations(net, torch.randn(50, 2))
    >>> list(found), bool((found["0"] >= 0).all())
    (['0', '2'], True)
    """
    if not isinstance(module, nn.Module):
        return dict(module.activations(inputs, layers))
    names = layers_of(module) if layers is None else tuple(layers)
    watch = _Watch()
    with _evaluating(module), _hooked(module, names, watch), torch.no_grad():
        try:
            with watch:
                module(inputs.to(_device(module, inputs)))
        except (RuntimeError, ValueError, TypeError) as e:
            reason = str(e).splitlines()[0]
            raise FedloomError(
                f"{type(module).__name__} can't take inputs of shape {tuple(inputs.shape)}: "
                f"{reason}."
            ) from e
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    for call in watch.calls:
        caught[call.layer].append(call.own if call.activation is None else call.activation)
    if layers is None:
        caught = without_repeats(caught)
    out = {}
    for name, answers in caught.items():
        if not answers:
            raise FedloomError(
                f"The layer '{name}' took no part in the forward pass: leave it out."
            )
        if any(a.ndim < 1 or len(a) != len(inputs) for a in answers):
            raise FedloomError(
                f"The layer '{name}' answers with {tuple(answers[0].shape)} to {len(inputs)} "
                "inputs: choose layers whose first axis counts the samples."
            )
        flat = [a.reshape(len(a), -1) for a in answers]
        out[name] = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
    return out


def without_repeats(caught: Mapping[str, Sequence[T]]) -> dict[str, list[T]]:
    """Layers with what each of their uses gave: without those that gave nothing, or nothing that an
    earlier layer did not give."""
    out: dict[str, list[T]] = {}
    seen = set[int]()
    for name, given in caught.items():
        if any(id(one) not in seen for one in given):
            out[name] = list(given)
        seen.update(map(id, given))
    return out


@dataclass(eq=False)
class _Call:
    """One use of a layer: what it gave, and what the first non-linearity behind it made of that."""

    layer: str
    own: Tensor
    activation: Tensor | None = None


class _Watch(TorchFunctionMode):
    """Follows what layers give through a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # By tensor: the uses of layers whose non-linearity is still to come; whether it came.
        self._behind: Any = WeakIdKeyDictionary()
        self._bent: Any = WeakIdKeyDictionary()

    def layer(self, name: str, output: Tensor) -> None:
        # Copied, as what comes next may work in place.
        call = _Call(name, output.detach().clone())
        self.calls.append(call)
        if output not in self._bent:
            self._behind[output] = [*self._behind.get(output, ()), call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        word = getattr(func, "__name__", "")
        word = word if word.endswith("__") else word.removesuffix("_")
        made = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(made, Tensor) or word not in _FOLLOWED:
            return out
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        calls = [call for a in given for call in self._behind.get(a, ())]
        waiting = list(dict.fromkeys(call for call in calls if call.activation is None))
        if word in NON_LINEARITIES:
            activation = made.detach().clone() if waiting else None
            for call in waiting:
                call.activation = activation
            self._behind.pop(made, None)
            self._bent[made] = True
        elif waiting:
            self._behind[made] = waiting
        elif any(a in self._bent for a in given):
            self._bent[made] = True
        return out


def _device(module: nn.Module, inputs: Tensor) -> torch.device:
    return next((p.device for p in module.parameters()), inputs.device)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every part goes back to the mode that it was in."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextmanager
def _hooked(module: nn.Module, names: Sequence[str], watch: _Watch) -> Iterator[None]:
    parts = dict(module.named_modules())
    for name in names:
        if name not in parts:
            raise unknown("layer", name, (n for n in parts if n))
    hooks = [parts[n].register_forward_hook(_tell(n, watch)) for n in dict.fromkeys(names)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tell(name: str, watch: _Watch) -> Callable[[nn.Module, object, object], None]:
    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(first, Tensor):
            raise FedloomError(
                f"The layer '{name}' answers with {type(output).__name__}, not a tensor: choose "
                "other layers."
            )
        watch.layer(name, first)

    return hook
