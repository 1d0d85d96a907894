"""What a channel is worth on some data: its mean activation, or the gradient that reaches it.

The activation of a channel is what its layer's own non-linearity gives, behind the norm and before
any pooling (S2 §3.2.1); where a model takes a maximum first, as it may for a function that never
falls, the two change places here. Channels that several layers make, as those that are added up in
residual blocks, get the mean of all. Norm statistics are measured on the same data first, unless
the model comes with them: with those of one client's data a norm takes out what sets it apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedloom.errors import FedloomError
from fedloom.local.rule import Batch
from fedloom.models.norm import settle
from fedloom.models.viewed import pixel_by_pixel, tame_views
from fedloom.select.calls import name_of, tensors_of
from fedloom.select.channels import Channels, Tap, positions

AT_ONCE = 256


def activations(
    module: nn.Module, channels: Channels, x: Tensor, measure: bool = True
) -> list[np.ndarray]:
    """h_i of every group: the mean over samples and, for maps, positions. Without `measure`, norms
    have the statistics that they come with."""
    sums = [torch.zeros(n, dtype=torch.float64) for n in channels.sizes]
    x = _ready(module, x)
    settle(module, x.split(AT_ONCE) if measure else (), every=True)
    with torch.no_grad():
        for some in x.split(AT_ONCE):
            with _watching(module, channels) as seen:
                module(some)
            for g, group in enumerate(channels.groups):
                for tap in group.taps:
                    values = _mean(seen[tap.call][tap.item], tap, g)
                    sums[g] += len(some) * values.double().cpu() / len(group.taps)
    return [(total / max(len(x), 1)).numpy() for total in sums]


def gradients(module: nn.Module, channels: Channels, batch: Batch) -> list[np.ndarray]:
    """g_i of every group: Σ over positions of |Σ over samples of ∂L/∂h_i| (S2 Algorithm 4.4)."""
    sums: dict[tuple[int, int, int], Tensor] = {}
    images = _ready(module, batch.x)
    settle(module, images.split(AT_ONCE), every=True)
    for x, y in zip(images.split(AT_ONCE), batch.y.split(AT_ONCE), strict=True):
        with torch.enable_grad(), _watching(module, channels) as seen:
            loss = F.cross_entropy(module(x), y, reduction="sum") / len(batch.y)
        at = {(tap.call, tap.item) for group in channels.groups for tap in group.taps}
        reads = {key: seen[key[0]][key[1]] for key in sorted(at)}
        # A recurrent layer's outputs or its last state may be unused.
        found = torch.autograd.grad(
            loss, list(reads.values()), allow_unused=True, materialize_grads=True
        )
        by_tap = dict(zip(reads, found, strict=True))
        for g, group in enumerate(channels.groups):
            for tap in group.taps:
                total = by_tap[tap.call, tap.item].sum(tap.batch, keepdim=True).double()
                key, new = (g, tap.call, tap.item), _by_channel(total, tap, g).cpu()
                sums[key] = sums[key] + new if key in sums else new
    return [
        torch.stack([sums[g, t.call, t.item].abs().sum(1) for t in group.taps]).mean(0).numpy()
        for g, group in enumerate(channels.groups)
    ]


@contextmanager
def _watching(module: nn.Module, channels: Channels) -> Iterator[dict[int, tuple[Tensor, ...]]]:
    """What the taps see in one pass, by the number of the call."""
    watch = _Watch(module, {tap.call: tap for group in channels.groups for tap in group.taps})
    with watch:
        yield watch.seen
    watch.check()


class _Watch(TorchFunctionMode):
    """Keeps the results of some calls; a non-linearity behind a max pooling goes before it."""

    def __init__(self, module: nn.Module, taps: dict[int, Tap]) -> None:
        super().__init__()
        self._module, self._taps = module, taps
        self._pools = {tap.pool: tap for tap in taps.values() if tap.pool is not None}
        self._count = 0
        self._waiting: dict[
            int, tuple[Any, Any, Any]
        ] = {}  # poolings, by the call that they wait for
        self.seen: dict[int, tuple[Tensor, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, kwargs = self._count, kwargs or {}
        self._count += 1
        tap = self._taps.get(number)
        if tap is not None and name_of(func) != tap.name:
            raise self._astray()
        if number in self._pools:
            self._waiting[self._pools[number].call] = func, args, kwargs
            return args[0].clone()  # as the non-linearity may work in place
        if tap is None:
            return func(*args, **kwargs)
        out = self._keep(number, func(*args, **kwargs))
        if number in self._waiting:
            pool, (_, *more), named = self._waiting.pop(number)
            return pool(out, *more, **named)
        return out

    def check(self) -> None:
        """That the pass came by all taps."""
        if len(self.seen) < len(self._taps):
            raise self._astray()

    def _astray(self) -> FedloomError:
        return FedloomError(
            f"{type(self._module).__name__} takes a different path through forward() for "
            "different samples, so its activations can't be compared. Choose a method that "
            "does not look at them, or write forward() without branches on data."
        )

    def _keep(self, number: int, out: Any) -> Any:
        self.seen[number] = tensors_of(out)
        for tensor in self.seen[number]:
            if torch.is_grad_enabled() and not tensor.requires_grad:  # nothing before it is learned
                tensor.requires_grad_()
        return out


def _ready(module: nn.Module, x: Tensor) -> Tensor:
    """Images as torch's convolutions take least time for them."""
    if x.dim() != 4 or not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return x
    tame_views(module, x.shape[1:], x.device)
    return pixel_by_pixel(x)


def _mean(x: Tensor, tap: Tap, group: int) -> Tensor:
    """The mean of each of the group's channels."""
    at = torch.from_numpy(positions(tap.made_of, group)).to(x.device)
    return x.mean([d for d in range(x.dim()) if d != tap.dim])[at].mean(1)


def _by_channel(x: Tensor, tap: Tap, group: int) -> Tensor:
    """Values as a matrix: the group's channels × everything else."""
    at = torch.from_numpy(positions(tap.made_of, group)).to(x.device)
    return x.movedim(tap.dim, 0)[at].reshape(len(at), -1)
