"""What a channel is worth on some data: its mean activation, or the gradient that reaches it.

The activation of a channel is what the layers that read it are given, so behind its norm,
non-linearity and pooling. Channels that several layers read, as behind residual additions, get the
mean of what those say. Norm statistics are measured on the same data first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import FedloomError
from fedloom.local.rule import Batch
from fedloom.models.norm import settle
from fedloom.select.channels import Channels, Dim, Group

AT_ONCE = 256
_WATCHED = (nn.Linear, nn.modules.conv._ConvNd)


def activations(module: nn.Module, channels: Channels, x: Tensor) -> list[np.ndarray]:
    """h_i of every group: the mean over samples and, for maps, positions."""
    sums = [torch.zeros(n, dtype=torch.float64) for n in channels.sizes]
    settle(module, x.split(AT_ONCE), every=True)
    with torch.no_grad(), _inputs(module, channels) as given:
        for some in x.split(AT_ONCE):
            given.clear()
            module(some)
            for g, group in enumerate(channels.groups):
                for (layer, dim), read in zip(group.readers, _uses(group, given), strict=True):
                    values = _by_channel(module, layer, read, dim, g)
                    sums[g] += len(some) * values.double().mean(1).cpu() / len(group.readers)
    return [(total / max(len(x), 1)).numpy() for total in sums]


def gradients(module: nn.Module, channels: Channels, batch: Batch) -> list[np.ndarray]:
    """g_i of every group: Σ over positions of |Σ over samples of ∂L/∂h_i| (S2 Algorithm 4.4)."""
    sums: list[dict[int, Tensor]] = [{} for _ in channels.groups]
    settle(module, batch.x.split(AT_ONCE), every=True)
    with torch.enable_grad(), _inputs(module, channels) as given:
        for x, y in zip(batch.x.split(AT_ONCE), batch.y.split(AT_ONCE), strict=True):
            given.clear()
            loss = F.cross_entropy(module(x), y, reduction="sum") / len(batch.y)
            reads = [read for uses in given.values() for read in uses]
            found = iter(torch.autograd.grad(loss, reads))
            by_layer = {name: [next(found) for _ in uses] for name, uses in given.items()}
            for g, group in enumerate(channels.groups):
                grads = _uses(group, by_layer)
                for i, ((layer, dim), grad) in enumerate(zip(group.readers, grads, strict=True)):
                    total = grad.double().sum(0, keepdim=True)
                    new = _by_channel(module, layer, total, dim, g).cpu()
                    sums[g][i] = sums[g][i] + new if i in sums[g] else new
    return [
        torch.stack([s.abs().sum(1) for s in by.values()]).mean(0).numpy() if by else np.zeros(n)
        for by, n in zip(sums, channels.sizes, strict=True)
    ]


@contextmanager
def _inputs(module: nn.Module, channels: Channels) -> Iterator[dict[str, list[Tensor]]]:
    """What the layers that read channels are given, by layer, each time that they are used."""
    given: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            # Leaves of the graph's own, so that gradients with respect to them can be asked for.
            x = inputs[0] if inputs else next(iter(named.values()))
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()
            given.setdefault(name, []).append(x)
            if inputs:
                return (x, *inputs[1:]), named
            return inputs, {**named, next(iter(named)): x}

        return hook

    layers = {layer for group in channels.groups for layer, _ in group.readers}
    modules = dict(module.named_modules())
    for name in layers:
        if not isinstance(modules.get(name), _WATCHED):
            raise FedloomError(
                f"What the layer '{name}' of {type(module).__name__} reads can't be watched, so "
                "channels can't be chosen by activation or gradient. Use nn.Conv2d and nn.Linear "
                "modules for its weights, or a method that needs no look at the model."
            )
    hooks = [modules[n].register_forward_pre_hook(keep(n), with_kwargs=True) for n in layers]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def _uses(group: Group, given: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
    """For every reader of a group, what it was given: a layer that is used twice reads twice."""
    next_use: Counter[str] = Counter()
    out = []
    for layer, _ in group.readers:
        out.append(given[layer][min(next_use[layer], len(given[layer]) - 1)])
        next_use[layer] += 1
    return out


def _by_channel(module: nn.Module, layer: str, x: Tensor, dim: Dim, group: int) -> Tensor:
    """The values of a layer's input as a matrix: the group's channels × everything else."""
    features = -1 if isinstance(module.get_submodule(layer), nn.Linear) else 1
    at = next(i for i, factor in enumerate(dim) if factor.group == group)
    cut = x.movedim(features, 0).unflatten(0, [f.size for f in dim]).movedim(at, 0)
    return cut.reshape(dim[at].size, -1)
