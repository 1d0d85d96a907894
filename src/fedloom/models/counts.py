"""What a model costs: multiply-accumulates of a sample, parameters, memory of a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedloom.models.inputs import blank


def training_macs(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """Multiply-accumulates of one sample's forward and backward pass, counted by torch."""
    samples = 2  # batch norm needs more than one
    x = blank(module, shape, samples)
    with _unfused(module), _Counter() as counter:
        module.train()(x).sum().backward()
    return counter.flops // 2 // samples


def second_macs(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """What differentiating a sample's gradient once more adds to `training_macs`."""
    module, samples = copy.deepcopy(module).train(), 2
    weights = [p for p in module.parameters() if p.requires_grad]
    grad = partial(torch.autograd.grad, inputs=weights, allow_unused=True, materialize_grads=True)
    with torch.random.fork_rng([]), _unfused(module), _Counter() as counter, torch.enable_grad():
        # The loss must bend, or there is nothing to differentiate again.
        loss = module(blank(module, shape, samples)).square().sum()
        grads = grad(loss, create_graph=True)
        once = counter.flops
        grad(torch.stack([g.square().sum() for g in grads]).sum())
    return (counter.flops - once) // 2 // samples


@contextmanager
def _unfused(module: nn.Module) -> Iterator[None]:
    """Recurrent layers and attention without the fused kernels that torch has no formula for."""
    fast, fused = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(fused and not recurrent)  # `mkldnn.flags` warns of other devices
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(fused)


class _Counter(TorchDispatchMode):
    """Sums torch's own flop formulas. `FlopCounterMode` does too, and takes a second to import."""

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's way to say: don't import the compiler for this
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def forward_macs(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """Multiply-accumulates of one sample's forward pass."""
    x = blank(module, shape, 1)
    training = module.training
    with torch.no_grad(), _unfused(module), _Counter() as counter:
        module.eval()(x)
    module.train(training)
    return counter.flops // 2


def saved_bytes(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """What the backward pass needs of one sample's forward pass: activations, without weights."""
    samples = 2  # batch norm needs more than one
    x = blank(module, shape, samples)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.data_ptr()] = max(t.nbytes, sizes.get(t.data_ptr(), 0))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.enable_grad():
        out = module.train()(x)
    del out
    return sum(sizes.values()) // samples


def passing_bytes(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """What is in memory at once while one sample passes: a layer's largest input and output."""
    sizes = [0]

    def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        sizes.append(sum(t.nbytes for t in (*inputs, *_tensors(output)) if _is_tensor(t)))

    leaves = [m for m in module.modules() if not list(m.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    x = blank(module, shape, 1)
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(x)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return max(sizes)


def _tensors(output: Any) -> tuple[Any, ...]:
    """What a layer gives: one tensor or, as recurrent layers and attention do, several."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@dataclass(frozen=True)
class LayerCost:
    """A layer with weights: what it gives for one sample, and what that costs."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    macs: int


def layer_costs(module: nn.Module, shape: tuple[int, int, int]) -> list[LayerCost]:
    """Every layer that has weights of its own, in the order in which a forward pass meets them."""
    found: list[LayerCost] = []
    before: list[int] = []
    x = blank(module, shape, 1)
    counter = _Counter()

    def enter(*_: Any) -> None:
        before.append(counter.flops)

    def leave(name: str) -> Callable[..., None]:
        def note(layer: nn.Module, _: Any, output: Any) -> None:
            own = sum(p.numel() for p in layer.parameters(recurse=False))
            kind, size = type(layer).__name__, tuple(_tensors(output)[0].shape[1:])
            found.append(LayerCost(name, kind, size, own, (counter.flops - before.pop()) // 2))

        return note

    hooks = []
    for name, layer in module.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            hooks += [
                layer.register_forward_pre_hook(enter),
                layer.register_forward_hook(leave(name)),
            ]
    training = module.training
    try:
        with torch.no_grad(), _unfused(module), counter:
            module.eval()(x)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return found
