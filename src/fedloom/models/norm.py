"""Normalisation layers by name, so that every built-in model can be built with each of them.

`batch` tracks running statistics; `static` (sBN) uses batch statistics in training and has its
statistics measured once, right before evaluation, by whoever evaluates (`measuring`); `group`
needs no statistics; `none` leaves the layer out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def has_tracked_norm(module: nn.Module) -> bool:
    """Whether training passes move statistics that are kept in buffers."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm)
        and m.track_running_stats
        and not isinstance(m, StaticBatchNorm2d)
        for m in module.modules()
    )


def has_static_norm(module: nn.Module) -> bool:
    return bool(_static(module))


def _static(module: nn.Module) -> list[StaticBatchNorm2d]:
    return [m for m in module.modules() if isinstance(m, StaticBatchNorm2d)]


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Inside, forward passes in training mode gather the static statistics afresh."""
    layers = _static(module)
    for layer in layers:
        layer.reset_running_stats()
        layer.measure = True
    try:
        yield
    finally:
        for layer in layers:
            layer.measure = False


def settle(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Ready to be looked at: in evaluation mode, static norms measured on these images."""
    if has_static_norm(module):
        module.train()
        with measuring(module), torch.no_grad():
            for x in batches:
                module(x)
    return module.eval()
