"""What one core can do at most: fused multiply-adds in registers, two operations each.

Measured by a small loop in C, compiled here for this machine; without a compiler, by the product of
two large matrices on one thread, which comes near it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TURNS = 5
_LOOP = r"""
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 12 /* enough to fill two units of 4 to 5 cycles */
typedef float vec __attribute__((vector_size(4 * LANES)));

double multiply_add(long times, float by, float *out) {
    vec sum[CHAINS], factor, more;
    for (int lane = 0; lane < LANES; lane++) { factor[lane] = by; more[lane] = 1e-7f; }
    for (int k = 0; k < CHAINS; k++) for (int lane = 0; lane < LANES; lane++) sum[k][lane] = k;
    for (long i = 0; i < times; i++)
        for (int k = 0; k < CHAINS; k++) sum[k] = sum[k] * factor + more;
    for (int k = 0; k < CHAINS; k++) for (int lane = 0; lane < LANES; lane++) *out += sum[k][lane];
    return 2.0 * LANES * CHAINS * times;
}
"""
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-funroll-loops", "-shared", "-fPIC")


@dataclass(frozen=True)
class Peak:
    """Operations a second of one core, in billions, and how they were measured."""

    gflops: float
    how: str


def measure() -> Peak:
    """The best of a few turns: whatever else runs can only take from it."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is not None:
        with tempfile.TemporaryDirectory() as folder:
            loop = _compiled(compiler, Path(folder))
            if loop is not None:
                return Peak(_best(loop), "a loop of fused multiply-adds in C")
    return Peak(_best(_product()), "the product of two 1024 × 1024 matrices by torch")


def _best(work: Callable[[], float]) -> float:
    """Billions of operations a second; `work` returns how many it did."""
    work()
    rates = []
    for _ in range(TURNS):
        started = time.perf_counter()
        done = work()
        rates.append(done / (time.perf_counter() - started))
    return max(rates) / 1e9


def _compiled(compiler: str, folder: Path) -> Callable[[], float] | None:
    source, library = folder / "peak.c", folder / "peak.so"
    source.write_text(_LOOP)
    words = [compiler, *_FLAGS, str(source), "-o", str(library)]
    try:
        subprocess.run(words, check=True, capture_output=True)
        loop = ctypes.CDLL(str(library)).multiply_add
    except (subprocess.CalledProcessError, OSError) as e:
        print(f"  The loop in C can't be built ({e}); torch measures the peak.", file=sys.stderr)
        return None
    loop.restype, out = ctypes.c_double, ctypes.c_float(0)
    loop.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.POINTER(ctypes.c_float)]
    return lambda: float(loop(10_000_000, 0.999, ctypes.byref(out)))


def _product() -> Callable[[], float]:
    import torch

    side = 1024
    a, b, out = torch.rand(side, side), torch.rand(side, side), torch.empty(side, side)

    def work() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.mm(a, b, out=out)
        torch.set_num_threads(threads)
        return 2.0 * side**3

    return work
