"""What a weaker device saves: one client's round of conv4 at each capacity, in turns.

HeteroFL's clients train sub-models, FedDSE's first look at the whole one, DepthFL's train its first
blocks; with S2's settings (all local data twice, batch 16, momentum) at `SIZES` of the network.
Capacity 1/4 of the larger one must be at least five times as fast as capacity 1, with memory to
match.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Workload, experiment
from fedloom.engine import Order, Serial
from fedloom.experiment.setup import Experiment

CAPACITIES = {
    "heterofl": (1.0, 0.5, 0.25, 0.125, 0.0625),
    "feddse": (1.0, 0.5, 0.25, 0.125, 0.0625),
    "depthfl": (1.0, 0.75, 0.5, 0.25),
}
SIZES = ((64, 128, 256, 512), (16, 32, 64, 128))
TURNS = 5
SAMPLES = 200


def measure() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [row for channels in SIZES for row in _measured(channels)]


def _measured(channels: tuple[int, ...]) -> list[dict[str, Any]]:
    runs = {method: _experiment(method, channels) for method in CAPACITIES}
    of = [(method, r) for method, mine in CAPACITIES.items() for r in mine]
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    seconds: dict[tuple[str, float], list[float]] = {each: [] for each in of}
    for t in range(1, TURNS + 2):
        for method, r in of:
            spent, facts = _round(runs[method], r, t)
            rows[method, r] = {"channels": channels, "method": method, "capacity": r, **facts}
            if t > 1:  # the first builds the network
                seconds[method, r].append(spent)
    return [{**rows[each], "seconds": statistics.median(seconds[each])} for each in of]


def _experiment(method: str, channels: tuple[int, ...]) -> Experiment:
    capacities = CAPACITIES[method]
    more = {"preset": "tuned", "capacities": ",".join(map(str, capacities)), "engine": "serial",
            "partition": "iid", "draw": "uniform"}  # fmt: skip
    if method == "feddse":  # measured on its own data: as much work as its share with others
        more["norms"] = "own"
    x = experiment(Workload(
        "devices", "conv4", "1x28x28", SAMPLES, clients=len(capacities),
        participants=len(capacities), options=(("channels", channels), ("norm", "static")),
        method=method, more=tuple(more.items()),
    ))  # fmt: skip
    assert isinstance(x.engine, Serial)
    return x


def _round(x: Experiment, capacity: float, t: int) -> tuple[float, dict[str, Any]]:
    """One client's work, from what it is told to what it sends."""
    clients, method, state = np.flatnonzero(x.capacities == capacity)[:1], x.method, x.state
    order = Order(method.local, x.budget, x.config.optimiser_at(t), t, method.select,
                  sections=state.plan.sections or None)  # fmt: skip
    told = state.server.tell()
    started = time.perf_counter()
    trained = state.clients.train(order, clients, told, state.server.lasts(clients)).trained
    spent = time.perf_counter() - started
    (index,) = trained.indexes
    return spent, {
        "parameters": x.layout.size if index is None else len(index),
        "macs": int(trained.macs[0]),
        "memory": int(trained.memory[0]),
    }


def show(rows: list[dict[str, Any]]) -> None:
    for channels in dict.fromkeys(row["channels"] for row in rows):
        print(f"\nconv4 of {'-'.join(map(str, channels))} channels")
        print(f"{'method':<10}{'capacity':<10}{'s/round':>9}{'faster':>8}{'values':>11}"
              f"{'MMAC':>9}{'MB':>7}{'less':>7}")  # fmt: skip
        mine = [row for row in rows if row["channels"] == channels]
        for row in mine:
            whole = next(w for w in mine if w["method"] == row["method"])
            print(
                f"{row['method']:<10}{row['capacity']:<10g}{row['seconds']:>9.4f}"
                f"{whole['seconds'] / row['seconds']:>7.1f}x{row['parameters']:>11,}"
                f"{row['macs'] / 1e6:>9.0f}{row['memory'] / 1e6:>7.1f}"
                f"{whole['memory'] / row['memory']:>6.1f}x"
            )
