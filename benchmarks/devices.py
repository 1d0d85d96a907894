"""What a weaker device saves: one client's round at each capacity, in turns.

HeteroFL's clients train sub-models, FedDSE's first look at the whole one, DepthFL's train its first
blocks; with S2's settings (all local data twice, batch 16, momentum), of each network in `NETS`.
Capacity 1/4 of the largest must be at least five times as fast as capacity 1, with memory to match.
Memory is counted, and measured: by how much a process grows in which one such client trains on
torch's kernels.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Workload, experiment
from fedloom.engine import Order, Serial
from fedloom.experiment.setup import Experiment
from fedloom.metrics.cost import peak_memory, reset_peak_memory

CAPACITIES = {
    "heterofl": (1.0, 0.5, 0.25, 0.125, 0.0625),
    "feddse": (1.0, 0.5, 0.25, 0.125, 0.0625),
    "depthfl": (1.0, 0.75, 0.5, 0.25),
}
#: label, network, its options, images
NETS = (
    ("conv4 of 64-512 channels", "conv4", {"channels": (64, 128, 256, 512)}, "1x28x28"),
    ("conv4 of 16-128 channels", "conv4", {"channels": (16, 32, 64, 128)}, "1x28x28"),
    ("resnet18 of width 8", "resnet18", {"width": 8}, "3x32x32"),
)
TURNS = 5
SAMPLES = 200


def measure() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [{"net": label, **row} for label, *net in NETS for row in _measured(*net)]


def _measured(model: str, sizes: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    net = model, (*sizes.items(), ("norm", "static")), shape
    runs = {method: _experiment(method, *net) for method in CAPACITIES}
    of = [(method, r) for method, mine in CAPACITIES.items() for r in mine]
    plain = {method: _experiment(method, *net, kernels="torch") for method in CAPACITIES}
    grown = {(method, r): _grown(plain[method], r) for method, r in of}
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    seconds: dict[tuple[str, float], list[float]] = {each: [] for each in of}
    for t in range(1, TURNS + 2):
        for method, r in of:
            spent, facts = _round(runs[method], r, t)
            rows[method, r] = {"method": method, "capacity": r,
                               "measured": grown[method, r], **facts}  # fmt: skip
            if t > 1:  # the first builds the network
                seconds[method, r].append(spent)
    return [{**rows[each], "seconds": statistics.median(seconds[each])} for each in of]


def _experiment(
    method: str, model: str, options: tuple[tuple[str, Any], ...], shape: str, kernels: str = "auto"
) -> Experiment:
    capacities = CAPACITIES[method]
    more = {"preset": "tuned", "capacities": ",".join(map(str, capacities)), "engine": "serial",
            "partition": "iid", "draw": "uniform", "kernels": kernels}  # fmt: skip
    if method == "feddse":  # measured on its own data: as much work as its share with others
        more["norms"] = "own"
    x = experiment(Workload(
        "devices", model, shape, SAMPLES, clients=len(capacities),
        participants=len(capacities), options=options, method=method, more=tuple(more.items()),
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


def _grown(x: Experiment, capacity: float) -> int:
    """By how many bytes a process that has trained the smallest sub-model grows at the most while
    it trains this one."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_grow, args=(x, capacity, there))
    child.start()
    there.close()
    grown = int(here.recv())
    child.join()
    return grown


def _grow(x: Experiment, capacity: float, out: Connection) -> None:
    torch.set_num_threads(1)
    _round(x, x.capacities.min(), 1)  # imports and traces what every client needs
    before = _settled()
    _round(x, capacity, 1)  # builds the network
    _settled()
    _round(x, capacity, 2)
    out.send(peak_memory(torch.device("cpu")) - before)


def _settled() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory()
    return peak_memory(torch.device("cpu"))


def show(rows: list[dict[str, Any]]) -> None:
    for net in dict.fromkeys(row["net"] for row in rows):
        print(f"\n{net}")
        print(f"{'method':<10}{'capacity':<10}{'s/round':>9}{'faster':>8}{'values':>11}"
              f"{'MMAC':>9}{'MB':>7}{'less':>7}{'measured':>10}")  # fmt: skip
        mine = [row for row in rows if row["net"] == net]
        for row in mine:
            whole = next(w for w in mine if w["method"] == row["method"])
            print(
                f"{row['method']:<10}{row['capacity']:<10g}{row['seconds']:>9.4f}"
                f"{whole['seconds'] / row['seconds']:>7.1f}x{row['parameters']:>11,}"
                f"{row['macs'] / 1e6:>9.0f}{row['memory'] / 1e6:>7.1f}"
                f"{whole['memory'] / row['memory']:>6.1f}x{row['measured'] / 1e6:>10.1f}"
            )
