"""What a model costs: multiply-accumulates of a sample, parameters, memory of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def training_macs(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """Multiply-accumulates of one sample's forward and backward pass, counted by torch."""
    samples = 2  # batch norm needs more than one
    parameter = next(module.parameters())
    x = torch.zeros((samples, *shape), dtype=parameter.dtype, device=parameter.device)
    with _Counter() as counter:
        module.train()(x).sum().backward()
    return counter.flops // 2 // samples


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
