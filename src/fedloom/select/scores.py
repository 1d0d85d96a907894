"""What a channel is worth on some data: its mean activation, or the gradient that reaches it.

The activation of a channel is what the layers that read it are given, so behind its norm,
non-linearity and pooling. Channels that several layers read, as behind residual additions, get the
mean of what those say. Static norms are measured on the same data first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.local.rule import Batch
from fedloom.models.norm import settle
from fedloom.select.channels import Channels, Dim

_AT_ONCE = 256


def activations(module: nn.Module, channels: Channels, x: Tensor) -> list[np.ndarray]:
    """h_i of every group: the mean over samples and, for maps, positions."""
    sums = [torch.zeros(n, dtype=torch.float64) for n in channels.sizes]
    settle(module, x.split(_AT_ONCE))
    with torch.no_grad(), _inputs(module, channels) as given:
        for some in x.split(_AT_ONCE):
            module(some)
            for g, group in enumerate(channels.groups):
                for layer, dim in group.readers:
                    values = _by_channel(module, layer, given[layer], dim, g)
                    sums[g] += len(some) * values.double().mean(1).cpu() / len(group.readers)
    return [(total / max(len(x), 1)).numpy() for total in sums]


def gradients(module: nn.Module, channels: Channels, batch: Batch) -> list[np.ndarray]:
    """g_i of every group: Σ over positions of |Σ over samples of ∂L/∂h_i| (S2 Algorithm 4.4)."""
    sums: list[dict[str, Tensor]] = [{} for _ in channels.groups]
    settle(module, batch.x.split(_AT_ONCE))
    with torch.enable_grad(), _inputs(module, channels) as given:
        for x, y in zip(batch.x.split(_AT_ONCE), batch.y.split(_AT_ONCE), strict=True):
            loss = F.cross_entropy(module(x), y, reduction="sum") / len(batch.y)
            layers = list(given)
            found = torch.autograd.grad(loss, [given[name] for name in layers])
            by_layer = dict(zip(layers, found, strict=True))
            for g, group in enumerate(channels.groups):
                for layer, dim in group.readers:
                    grad = by_layer[layer].double().sum(0, keepdim=True)
                    new = _by_channel(module, layer, grad, dim, g).cpu()
                    sums[g][layer] = sums[g][layer] + new if layer in sums[g] else new
    return [
        torch.stack([s.abs().sum(1) for s in by.values()]).mean(0).numpy() if by else np.zeros(n)
        for by, n in zip(sums, channels.sizes, strict=True)
    ]


@contextmanager
def _inputs(module: nn.Module, channels: Channels) -> Iterator[dict[str, Tensor]]:
    """What the layers that read channels are given, by layer, renewed in every pass."""
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            # Leaves of the graph's own, so that gradients with respect to them can be asked for.
            x = inputs[0]
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()
            given[name] = x
            return (x, *inputs[1:])

        return hook

    layers = {layer for group in channels.groups for layer, _ in group.readers}
    hooks = [module.get_submodule(n).register_forward_pre_hook(keep(n)) for n in layers]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def _by_channel(module: nn.Module, layer: str, x: Tensor, dim: Dim, group: int) -> Tensor:
    """The values of a layer's input as a matrix: the group's channels × everything else."""
    features = -1 if isinstance(module.get_submodule(layer), nn.Linear) else 1
    at = next(i for i, factor in enumerate(dim) if factor.group == group)
    cut = x.movedim(features, 0).unflatten(0, [f.size for f in dim]).movedim(at, 0)
    return cut.reshape(dim[at].size, -1)
