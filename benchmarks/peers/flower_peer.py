"""Flower: its simulation runtime on Ray, message-based FedAvg strategy and client app.

One actor per core with one thread each. The server writes the data to a file that every actor maps,
so that it is made and held once; an actor keeps its model from client to client.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import CORES, material
from benchmarks.workloads import WORKLOADS, Workload
from fedloom.layout import Layout

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch on the client that the message names."""
    config = message.content["config"]
    t, client = int(config["server-round"]), int(config["client"])
    net, data = _resident(str(config["workload"]), str(config["data"]))
    x, y = data[client]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(net.parameters(), lr=material.RATE)
    for at in material.batches(len(y), t, client):
        optimiser.zero_grad()
        F.cross_entropy(net(x[at]), y[at]).backward()
        optimiser.step()
    reply = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


@cache
def _resident(workload: str, data: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """What an actor keeps from client to client."""
    torch.set_num_threads(1)
    chosen = next(w for w in WORKLOADS if w.name == workload)
    return material.model(chosen).train(), torch.load(data, mmap=True)


class Paired(FedAvg):
    """FedAvg whose participants are ours, and whose rounds are timed."""

    def __init__(self, workload: Workload, mark: Callable[[], None]) -> None:
        super().__init__(
            fraction_train=workload.participants / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.participants,  # nodes may still be registering
            min_available_nodes=workload.clients,
        )
        self._workload, self._mark = workload, mark

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # Which node stands in for a client does not matter: the message says whose data it has.
        messages = super().configure_train(server_round, arrays, config, grid)
        clients = material.participants(self._workload, server_round)
        for message, client in zip(messages, clients, strict=True):
            own = ConfigRecord({**config, "client": client})
            message.content = RecordDict({"arrays": arrays, "config": own})
            yield message

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        done = super().aggregate_train(server_round, replies)
        self._mark()
        return done


def run(workload: Workload, rounds: int, mark: Callable[[], None]) -> Tensor:
    net = material.model(workload)
    server_app = ServerApp()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "clients.pt"
        torch.save(material.clients(workload), data)

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            result = Paired(workload, mark).start(
                grid,
                initial_arrays=ArrayRecord(net.state_dict()),
                num_rounds=rounds,
                train_config=ConfigRecord({"workload": workload.name, "data": str(data)}),
            )
            net.load_state_dict(result.arrays.to_torch_state_dict())

        run_simulation(
            server_app,
            client_app,
            num_supernodes=workload.clients,
            backend_config={
                # A cluster of its own, even where another one runs.
                "init_args": {"address": "local", "num_cpus": CORES, "_temp_dir": folder},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    return Layout.of(net).flatten(net)
