"""One contestant on one workload, in a process of its own.

    python -m benchmarks.contest CONTESTANT WORKLOAD --rounds R --weights FILE.npy [--turns]

prints one line of JSON: `startup`, seconds from the start of the process to the end of round 1;
`rounds`, seconds of each round after it; `peak_memory`, bytes of all its processes together; of
fedloom also `macs`, multiply-accumulates of each of those rounds, and `source`, where it is. With
`--turns` it says "mark" after each round and waits for a line before the next, so that several
contestants can take turns.
FILE.npy gets the trained model as a row of fedloom's layout, as far as the contestant averages it:
pfl leaves batch statistics alone, so its row ends with the parameters, which come first.

A contestant is a function that trains a workload for some rounds, calls `mark` on the server's side
at the end of each (with what the round cost, if it knows), and returns that row. It imports what it
needs itself: the start-up of one must not hold the imports of another.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.memory import PeakMemory

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.workloads import Bare, Workload

Mark = Callable[..., None]
Contestant = Callable[["Workload", int, Mark], "Tensor"]


def by_hand(workload: Workload) -> Bare:
    """The loop that does a workload in plain torch."""
    from benchmarks.bare_dom import BareDom
    from benchmarks.workloads import Bare, BareMeta, BareSub, BareSwap

    loops = {"fedavg": Bare, "fedmeta-per-maml": BareMeta, "fedswap": BareSwap,
             "fedrolex": BareSub, "feddse": BareSub, "feddom": BareDom}  # fmt: skip
    return loops[workload.method](workload)


def bare(workload: Workload, rounds: int, mark: Mark, *, threads: int) -> Tensor:
    import torch

    torch.set_num_threads(threads)
    runner = by_hand(workload)
    for t in range(1, rounds + 1):
        runner.round(t)
        mark()
    return runner.weights()


def fedloom(
    workload: Workload,
    rounds: int,
    mark: Mark,
    *,
    engine: str,
    workers: str = "0",
    precision: str = "fp32",
    kernels: str | None = None,
) -> Tensor:
    import torch

    from benchmarks.workloads import Fedloom

    torch.set_num_threads(1)
    runner = Fedloom(workload, engine, int(workers), precision, kernels)
    for t in range(1, rounds + 1):
        runner.round(t)
        mark(runner.macs[-1])
    weights = runner.weights()
    runner.close()
    return weights


def pfl(workload: Workload, rounds: int, mark: Mark, *, processes: int) -> Tensor:
    from benchmarks.peers import pfl_peer

    return pfl_peer.run(workload, rounds, mark, processes)


def flower(workload: Workload, rounds: int, mark: Mark) -> Tensor:
    from benchmarks.peers import flower_peer

    return flower_peer.run(workload, rounds, mark)


CONTESTANTS: dict[str, Contestant] = {
    "bare-1": partial(bare, threads=1),
    "bare-2": partial(bare, threads=2),
    "pfl-1": partial(pfl, processes=1),
    "pfl-2": partial(pfl, processes=2),
    "flower": flower,
}


def find(name: str) -> Contestant:
    """The contestant of this name; `fedloom:ENGINE[:WORKERS[:PRECISION[:KERNELS]]]` names one of
    ours."""
    family, *options = name.split(":")
    if family == "fedloom" and 1 <= len(options) <= 4:
        names = ("engine", "workers", "precision", "kernels")
        return partial(fedloom, **dict(zip(names, options, strict=False)))
    if name not in CONTESTANTS:
        raise SystemExit(
            f"There is no contestant '{name}'. Choose one of {', '.join(CONTESTANTS)} or "
            "fedloom:ENGINE[:WORKERS[:PRECISION[:KERNELS]]]."
        )
    return CONTESTANTS[name]


def process_start() -> float:
    """When the kernel started this process, on CLOCK_BOOTTIME; exact to a clock tick (10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest", description=__doc__)
    parser.add_argument("contestant")
    parser.add_argument("workload")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--clients", type=int, help="registered, in place of the workload's")
    parser.add_argument("--participants", type=int)
    parser.add_argument("--samples", type=int, help="of a client")
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()
    contestant = find(args.contestant)
    stdin, stdout = os.fdopen(os.dup(0)), os.dup(1)
    os.dup2(2, 1)  # whatever a peer prints is not the answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    memory = PeakMemory()

    gc.disable()  # during imports, as fedloom's command does: for all contestants alike
    import numpy as np

    from benchmarks.workloads import workload_named

    gc.enable()
    names = ("clients", "participants", "samples")
    sizes = {k: v for k in names if (v := getattr(args, k)) is not None}
    workload = replace(workload_named(args.workload), **sizes)
    begun, ended, spent = [process_start()], list[float](), list[int]()

    def mark(*macs: int) -> None:
        ended.append(time.clock_gettime(time.CLOCK_BOOTTIME))
        spent.extend(macs)
        if len(ended) == args.rounds:
            memory.stop()
        elif args.turns:
            os.write(stdout, b"mark\n")
            stdin.readline()
        begun.append(time.clock_gettime(time.CLOCK_BOOTTIME))

    weights = contestant(workload, args.rounds, mark)
    np.save(args.weights, weights.numpy())
    result = {
        "contestant": args.contestant,
        "workload": args.workload,
        "startup": ended[0] - begun[0],
        "rounds": [b - a for a, b in zip(begun[1:], ended[1:], strict=False)],
        "peak_memory": memory.peak,
    }
    if spent:
        import fedloom as ours

        result |= {"macs": spent[1:], "source": str(Path(str(ours.__file__)).parent)}
    os.write(stdout, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
