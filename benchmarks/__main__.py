"""Measure: contestants interleaved and repeated, ratios to the bare loop with their spread.

    python -m benchmarks [--repeats 5] [--only mlp,lenet] [--out FILE.json]

A ratio below 1 means faster than the bare loop. Also the growth curve: seconds per round against
registered clients, which should be flat.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

import fedloom
from benchmarks.workloads import CONTESTANTS, WORKLOADS, Contestant, Fedloom, Workload


def measure(workload: Workload, repeats: int) -> dict[str, list[float]]:
    """Seconds per round of every contestant, taking turns."""
    runners: dict[str, Contestant] = {name: make(workload) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    t = 1
    for runner in runners.values():
        runner.round(t)  # warm up
    for _ in range(repeats):
        for name, runner in runners.items():
            started = time.perf_counter()
            for i in range(workload.rounds):
                runner.round(t + 1 + i)
            times[name].append((time.perf_counter() - started) / workload.rounds)
        t += workload.rounds
    first, *others = (runner.weights() for runner in runners.values())
    for name, weights in zip(list(runners)[1:], others, strict=True):
        if not torch.allclose(first, weights, atol=1e-3):
            raise SystemExit(f"{name} and the bare loop ended with different weights.")
    return times


def growth(repeats: int) -> dict[int, float]:
    """Seconds per round against the number of registered clients, 20 a round."""
    out = {}
    for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
        runner = Fedloom(Workload("mlp", "1x8x8", 20, 1, clients=clients, participants=20))
        runner.round(1)
        times = []
        for t in range(2, 2 + 5 * repeats):
            started = time.perf_counter()
            runner.round(t)
            times.append(time.perf_counter() - started)
        out[clients] = statistics.median(times)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(w.name for w in WORKLOADS))
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [w for w in WORKLOADS if w.name in args.only.split(",")]
    results: dict[str, object] = {
        "fedloom": fedloom.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "machine": platform.machine(), "threads": 1,
    }  # fmt: skip
    print(f"{'workload':<8} {'contestant':<16} {'s / round':>10}   ratio to bare (min – max)")
    for workload in chosen:
        times = measure(workload, args.repeats)
        base = times["bare loop"]
        for name, seconds in times.items():
            ratios = sorted(s / b for s, b in zip(seconds, base, strict=True))
            middle = statistics.median(ratios)
            print(
                f"{workload.name:<8} {name:<16} {statistics.median(seconds):>10.4f}   "
                f"{middle:.2f} ({ratios[0]:.2f} – {ratios[-1]:.2f})"
            )
        results[workload.name] = times
    print("\nregistered clients   s / round (20 take part)")
    curve = growth(args.repeats)
    for clients, seconds in curve.items():
        print(f"{clients:>18,}   {seconds:.4f}")
    results["registered_clients"] = curve
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
