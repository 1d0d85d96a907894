"""What a run costs in memory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch


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
