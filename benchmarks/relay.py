"""What meetings one after another cost: a round's exchange and mixing among walking nodes, alone.

The same contacts are mixed three ways: as one simultaneous exchange (all meetings at one step),
as feddom with relay and as P2P FedAvg with relay. Times are CPU seconds of one thread, turn by turn
in one process; ratios are to the simultaneous exchange.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedloom.layout import Layout
from fedloom.mix import DominatingSet, Gathering, Mix, PeerAverage
from fedloom.models import build
from fedloom.streams import streams_of
from fedloom.topology import Contacts, Peers, network

NODES = (100, 1000)
TURNS = 3


def gathering(nodes: int, hidden: int = 10, seed: int = 0) -> Gathering:
    """Nodes in a square of side 1000 with models that have moved a little from a common start."""
    layout = Layout.of(build("mlp", (1, 28, 28), 10, options={"hidden": (hidden,)}))
    rng = np.random.default_rng(seed)
    start = torch.from_numpy(rng.standard_normal(layout.size, dtype=np.float32))
    moved = torch.from_numpy(rng.standard_normal((nodes, layout.size), dtype=np.float32))
    where = Peers(network("waypoint,area=1000"))
    return Gathering(
        round=1, layout=layout, contacts=where.contacts(1, nodes, nodes, streams_of(seed, 1)),
        shared=start, clients=np.arange(nodes), weights=rng.integers(1, 60, nodes).astype(float),
        rows=start + 0.1 * moved, lr=0.1, stream=streams_of(seed, 1),
        memory={"mail": {}, "knowledge": {}}, facts={"accuracy": rng.random(nodes)},
    )  # fmt: skip


def measure() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = {str(nodes): _measure(gathering(nodes)) for nodes in NODES}
    torch.set_num_threads(threads)
    return out


def _measure(g: Gathering) -> dict[str, Any]:
    assert g.contacts.edges is not None
    flat = replace(g, contacts=Contacts(g.clients, g.contacts.edges))
    ways: dict[str, tuple[Mix, Gathering]] = {
        "simultaneous": (DominatingSet(), flat),
        "feddom": (DominatingSet(), g),
        "P2P FedAvg, relay": (PeerAverage(relay=True), g),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    known = {}
    for _ in range(TURNS):
        for name, (mix, given) in ways.items():
            begun = time.process_time()
            mixed = mix.combine(given)
            seconds[name].append(time.process_time() - begun)
            known[name] = mixed.metrics["known"]
    base = seconds["simultaneous"]
    ratios = {
        name: statistics.median(s / b for s, b in zip(mine, base, strict=True))
        for name, mine in seconds.items()
    }
    medians = {name: statistics.median(mine) for name, mine in seconds.items()}
    met = 2 * len(g.contacts.edges) / len(g.clients)
    return {"met": met, "known": known, "seconds": medians, "ratio": ratios}


def show(results: dict[str, Any]) -> None:
    print(f"\n{'meetings in order':<36}{'met':>6}{'known':>8}{'CPU s':>9}{'ratio':>8}")
    for nodes, found in results.items():
        for name, seconds in found["seconds"].items():
            title = f"{nodes} nodes, {name}"
            print(f"{title:<36}{found['met']:>6.1f}{found['known'][name]:>8.1f}{seconds:>9.3f}"
                  f"{found['ratio'][name]:>7.2f}×")  # fmt: skip
