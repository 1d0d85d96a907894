"""pfl: its simulated backend, federated averaging and training loop, in one process or several.

Several processes share out the cohort and sum with torch.distributed, as pfl's guide to fast
simulations says. They are forked once the data is there, so that it is made and held only once.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import CORES, material
from benchmarks.workloads import Workload
from fedloom.layout import Layout


def run(workload: Workload, rounds: int, mark: Callable[[], None], processes: int) -> Tensor:
    torch.set_num_threads(
        CORES // processes
    )  # with one, there is no thread pool to break by a fork
    data = material.clients(workload)
    others = _fork(processes) if processes > 1 else []
    if others is None:
        _train(workload, rounds, lambda: None, data)
        os._exit(0)
    weights = _train(workload, rounds, mark, data)
    for pid in others:
        os.waitpid(pid, 0)
    return weights


def _fork(processes: int) -> list[int] | None:
    """Start the other ranks; None in those. pfl learns from the environment who is who."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    addresses = [f"localhost:{port}"] * processes  # all meet at the first
    os.environ |= {"PFL_WORKER_ADDRESSES": ",".join(addresses), "PFL_WORKER_RANK": "0"}
    others = []
    for rank in range(1, processes):
        pid = os.fork()
        if pid == 0:
            os.environ["PFL_WORKER_RANK"] = str(rank)
            return None
        others.append(pid)
    return others


def _train(
    workload: Workload, rounds: int, mark: Callable[[], None], data: list[tuple[Tensor, Tensor]]
) -> Tensor:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Shuffled(Dataset):
        """A client's data in the batches of this round."""

        def __init__(self, at: tuple[int, int]) -> None:
            self._t, self._client = at
            super().__init__(data[self._client])

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            x, y = self.raw_data
            for at in material.batches(len(y), self._t, self._client):
                yield x[at], y[at]

    class Stopwatch(TrainingProcessCallback):
        def after_central_iteration(self, *args, **kwargs):
            mark()
            return False, Metrics()

    draws = (
        (t, client) for t in itertools.count(1) for client in material.participants(workload, t)
    )
    federation = FederatedDataset(make_dataset_fn=Shuffled, user_sampler=lambda: next(draws))
    net = Trainee(material.model(workload))
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # only at first, and there is nothing to measure
            train_cohort_size=workload.participants,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=32, local_num_epochs=1, local_learning_rate=material.RATE
        ),
        callbacks=[Stopwatch()],
        send_metrics_to_platform=False,
    )
    layout = Layout.of(net.net)
    return layout.flatten(net.net)[: layout.trainable]


class Trainee(nn.Module):
    """A network with what pfl asks of it: its loss, and the metrics that it does not report."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        return {}
