"""All pairs of many networks as one product, against comparing them pair by pair.

    python -m benchmarks.similarity [--models 100] [--probes 256] [--pairs 40]

The loop calls `similarity(a, b, probes)` for some pairs, drawn at random, and its time is scaled to
all of them; so is that of a loop which keeps what each network answered. Values must be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.models import build
from fedloom.similarity import CKA, activations, similarity, similarity_matrix

SHAPE = (3, 32, 32)
SAME = 1e-9


def networks(count: int) -> list[nn.Module]:
    """LeNets of different weights: distance between them is all that matters here."""
    return [build("lenet", SHAPE, 10, seed) for seed in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    done = work()
    return time.perf_counter() - started, done


def measure(models: int = 100, probes: int = 256, pairs: int = 40) -> dict[str, float]:
    torch.set_num_threads(1)
    nets = networks(models)
    x = torch.randn((probes, *SHAPE), generator=torch.Generator().manual_seed(0))
    every = list(itertools.combinations(range(models), 2))
    drawn = np.random.default_rng(0).choice(len(every), min(pairs, len(every)), replace=False)
    some = [every[i] for i in drawn]
    similarity_matrix(nets[:2], x)  # nobody pays for the first call
    product, matrix = timed(lambda: similarity_matrix(nets, x))
    loop, values = timed(lambda: [similarity(nets[a], nets[b], x) for a, b in some])
    kept, cached = timed(lambda: {i: activations(nets[i], x) for pair in some for i in pair})

    def from_kept() -> list[float]:
        return [
            float(np.mean([CKA().between(p, q) for p, q in zip(
                cached[a].values(), cached[b].values(), strict=True)]))
            for a, b in some
        ]  # fmt: skip

    again, same = timed(from_kept)
    off = max(
        abs(found - float(matrix[a, b]))
        for answers in (values, same)
        for (a, b), found in zip(some, answers, strict=True)
    )
    if off > SAME:
        raise SystemExit(f"The product and the loop differ by {off:.2g}.")
    scale = len(every) / len(some)
    loop *= scale
    return {
        "models": models,
        "probes": probes,
        "product": product,
        "loop": loop,
        "faster": loop / product,
        "loop_kept": again * scale + kept * models / len(cached),
        "off": off,
    }


def show(found: dict[str, float]) -> None:
    print(
        f"\nall-pairs CKA of {found['models']:.0f} LeNets on {found['probes']:.0f} probes: "
        f"{found['product']:.2f} s as one product, {found['loop']:.0f} s pair by pair "
        f"({found['faster']:.0f}× slower), {found['loop_kept']:.0f} s pair by pair with answers "
        f"kept; largest difference {found['off']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.similarity", description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--probes", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    found = measure(args.models, args.probes, args.pairs)
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
