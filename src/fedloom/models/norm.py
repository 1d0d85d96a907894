"""Normalisation layers by name, so that every built-in model can be built with each of them.

`batch` tracks running statistics; `static` (sBN) uses batch statistics in training and has its
statistics measured once, right before evaluation, by whoever evaluates (`settle`); `group` needs no
statistics; `none` leaves the layer out. Statistics that narrower and wider networks tracked
together fit none of them, so where clients train sub-models all tracked norms are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.errors import unknown

NORMS = ("batch", "static", "group", "none")


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics no training step touches; see `measuring`."""

    measure = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.measure:
            return nn.functional.batch_norm(
                x, None, None, self.weight, self.bias, True, 0.0, self.eps
            )
        return super().forward(x)


def norm2d(kind: str, channels: int) -> nn.Module:
    """A normalisation of `channels` feature maps."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "static":
        return StaticBatchNorm2d(channels, momentum=None)
    if kind == "group":
        # 16 channels a group (Wu and He 2018): a few of them on a 1×1 map would say nothing.
        groups = next(g for g in range(max(channels // 16, 1), 0, -1) if channels % g == 0)
        return nn.GroupNorm(groups, channels)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, NORMS)


def norm_of(module: nn.Module) -> str:
    """The kind of norm that a model has, by the name that builds it."""
    kinds = {StaticBatchNorm2d: "static", nn.BatchNorm2d: "batch", nn.GroupNorm: "group"}
    return next((kinds[type(m)] for m in module.modules() if type(m) in kinds), "none")


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def has_tracked_norm(module: nn.Module) -> bool:
    """Whether training passes move statistics that are kept in buffers."""
    return any(_tracks(m) and not isinstance(m, StaticBatchNorm2d) for m in module.modules())


def has_measured_norm(module: nn.Module, every: bool) -> bool:
    """Whether statistics are measured before scoring: of static norms, of `every` tracked norm."""
    return bool(_measured(module, every))


def _tracks(layer: nn.Module) -> bool:
    """Any class of norm: what counts is that it tracks a mean and a variance."""
    kept = [getattr(layer, name, None) for name in ("running_mean", "running_var")]
    return bool(getattr(layer, "track_running_stats", False)) and all(
        isinstance(t, Tensor) for t in kept
    )


def _measured(module: nn.Module, every: bool) -> list[nn.Module]:
    layers = [m for m in module.modules() if _tracks(m)]
    return layers if every else [m for m in layers if isinstance(m, StaticBatchNorm2d)]


def measured_layers(module: nn.Module, every: bool = False) -> frozenset[str]:
    """The names of the norms that `settle` measures."""
    modes = {m: m.training for m in module.modules()}
    module.train()
    layers = {id(m) for m in _measured(module, every) if m.training}
    for m, mode in modes.items():
        m.training = mode
    return frozenset(name for name, m in module.named_modules() if id(m) in layers)


def pieces(n: int, size: int) -> list[np.ndarray]:
    """The places of n images, `size` at a time, as `settle` takes them: one that is left over joins
    those before it, and a single image counts twice.

    >>> [p.tolist() for p in pieces(5, 2)], [p.tolist() for p in pieces(1, 2)]
    ([[0, 1], [2, 3, 4]], [[0, 0]])
    """
    if n == 1:
        return [np.zeros(2, dtype=np.int64)]
    ends = [*range(size, n - 1, size), n] if n else []
    return [np.arange(a, b) for a, b in pairwise([0, *ends])]


@contextmanager
def measuring(module: nn.Module, every: bool = False) -> Iterator[None]:
    """Inside, forward passes gather the statistics of static (or `every` tracked) norms afresh: as
    means over the passes, in which only these layers are in training mode."""
    module.train()
    layers = [m for m in _measured(module, every) if m.training]  # others are frozen on purpose
    module.eval()
    before = [getattr(layer, "momentum", None) for layer in layers]
    hooks = [layer.register_forward_pre_hook(_CountingMean()) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
        layer.training = True
        if isinstance(layer, StaticBatchNorm2d):
            layer.measure = True
    try:
        yield
    finally:
        for layer, momentum, hook in zip(layers, before, hooks, strict=True):
            hook.remove()
            layer.momentum = momentum  # type: ignore[assignment]
            layer.training = False
            if isinstance(layer, StaticBatchNorm2d):
                layer.measure = False


class _CountingMean:
    """Lets every use of a norm count alike (instance norm takes no momentum=None for that)."""

    def __init__(self) -> None:
        self.uses = 0

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        self.uses += 1
        layer.momentum = 1.0 / self.uses  # type: ignore[assignment]


def settle(module: nn.Module, batches: Iterable[Tensor], every: bool = False) -> nn.Module:
    """Ready for evaluation: in evaluation mode, the statistics of static (or `every` tracked) norms
    measured on these images; without images they stay as they are."""
    module.eval()
    if not has_measured_norm(module, every):
        return module
    images = _without_single(batches)
    first = next(images, None)
    if first is None:
        return module
    with measuring(module, every), torch.no_grad():
        for x in chain([first], images):
            module(x)
    return module


def _without_single(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same images; one that is left over joins the batch before it, as a variance needs two. A
    single image counts twice."""
    before: Tensor | None = None
    for x in batches:
        if before is not None and len(x) == 1:
            x = torch.cat([before, x])
        elif before is not None:
            yield before
        before = x
    if before is not None:
        yield before if len(before) > 1 else torch.cat([before, before])
