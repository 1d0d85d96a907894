"""What a weaker device saves: one client's round of conv4 at each capacity, in turns.

Capacity 1/4 must be at least five times as fast as capacity 1, with memory to match.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Workload, experiment
from fedloom.engine import Order, Serial
from fedloom.local import SGD, Budget, Optimiser
from fedloom.select import Ordered

CAPACITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)
TURNS = 5
#: a client of each capacity, all of one size
WORKLOAD = Workload("devices", "conv4", "1x28x28", 200, clients=5, participants=5,
                    method="heterofl",
                    more=(("capacities", "high-quality"), ("engine", "serial")))  # fmt: skip


def measure() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    x = experiment(WORKLOAD)
    assert isinstance(x.engine, Serial)
    seconds: dict[float, list[float]] = {r: [] for r in CAPACITIES}
    memory, macs = {}, {}
    for t in range(1, TURNS + 2):
        for r in CAPACITIES:
            client = np.flatnonzero(x.capacities == r)[:1]
            order = Order(SGD(), Budget(), Optimiser(0.05), t, Ordered())
            started = time.perf_counter()
            (done,) = x.engine.train_each(order, client, x.state.models(client))
            if t > 1:  # the first builds the network
                seconds[r].append(time.perf_counter() - started)
            memory[r], macs[r] = done.memory, done.macs
    return [
        {"capacity": r, "seconds": statistics.median(seconds[r]), "memory": memory[r],
         "macs": macs[r]}
        for r in CAPACITIES
    ]  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    whole = rows[0]
    print(f"\n{'capacity':<10}{'s/round':>9}{'faster':>8}{'MMAC':>9}{'MB':>7}{'less':>7}")
    for row in rows:
        print(
            f"{row['capacity']:<10g}{row['seconds']:>9.4f}"
            f"{whole['seconds'] / row['seconds']:>7.1f}x{row['macs'] / 1e6:>9.0f}"
            f"{row['memory'] / 1e6:>7.1f}{whole['memory'] / row['memory']:>6.1f}x"
        )
