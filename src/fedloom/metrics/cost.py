"""What a run costs: multiply-accumulates per trained sample, and memory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def training_macs(module: nn.Module, shape: tuple[int, int, int], classes: int) -> int:
    """Multiply-accumulates of one sample's forward and backward pass, counted by torch."""
    samples = 2  # batch norm needs more than one
    parameter = next(module.parameters())
    x = torch.zeros((samples, *shape), dtype=parameter.dtype, device=parameter.device)
    y = torch.zeros(samples, dtype=torch.int64, device=parameter.device) % classes
    with _Counter() as counter:
        F.cross_entropy(module.train()(x), y).backward()
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


def reset_peak_memory() -> None:
    """Start a new peak, where the system allows it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """The largest resident size in bytes since the last reset, or the accelerator's own."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
