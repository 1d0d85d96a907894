"""The workloads that all contestants run: FedAvg, 10 of 100 clients a round, one epoch, batch 32.

The bare loop is what a researcher would write by hand in plain torch. It draws the same clients and
batches, so that all contestants must end with the same weights.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedloom.data.dataset import Dataset
from fedloom.data.split import Federation
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.runner import Runner
from fedloom.experiment.setup import Experiment, load_dataset, make_federation, prepare
from fedloom.experiment.store import RunStore
from fedloom.files import atomic_file
from fedloom.layout import Layout
from fedloom.local import MAML, Budget
from fedloom.local.meta import QUERY, SUPPORT
from fedloom.models import build
from fedloom.streams import stream
from fedloom.topology import Star

FOLDER = "FEDLOOM_BENCH_DATA"  # environment variable: where the images are


@dataclass(frozen=True)
class Workload:
    """A model, images of a shape, and how many of them each client has."""

    name: str
    model: str
    shape: str
    samples: int
    clients: int = 100
    participants: int = 10
    options: tuple[tuple[str, Any], ...] = ()  # of the model
    method: str = "fedavg"
    test_share: float = 0.0  # of a client's data, for methods that validate

    @property
    def trainable(self) -> int:
        """The number of weights that training moves."""
        c, h, w = map(int, self.shape.split("x"))
        return Layout.of(build(self.model, (c, h, w), 10, options=dict(self.options))).trainable

    def settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "data": "synthetic",
            "data_options": {"shape": self.shape, "samples": self.clients * self.samples},
            "model": self.model,
            "model_options": dict(self.options),
            "clients": self.clients,
            "participation": 1.0 if self.participants == self.clients else self.participants,
            "partition": "iid",
            "test_share": self.test_share,
            "rounds": 10_000,
        }


WORKLOADS = (
    Workload("mlp", "mlp", "1x28x28", 600),
    Workload("lenet", "lenet", "3x32x32", 500),
    Workload("conv4", "conv4", "1x28x28", 200),
    Workload("fedmeta-per", "lenet", "3x32x32", 200, method="fedmeta-per-maml"),
    Workload("feddom", "mlp", "1x28x28", 60, participants=100, method="feddom", test_share=0.2),
)
#: for the growth curves: small enough that the engine's own cost shows
SMALL = Workload("small", "mlp", "1x8x8", 20, participants=20)
WIDE = tuple(
    Workload(f"mlp-{width}", "mlp", "1x28x28", 100, options=(("hidden", (width,)),))
    for width in (50, 200, 800, 3200)
)


def workload_named(name: str) -> Workload:
    found = {w.name: w for w in (*WORKLOADS, SMALL, *WIDE)}.get(name)
    if found is None:
        raise SystemExit(f"There is no workload '{name}'.")
    return found


def dataset(workload: Workload) -> Dataset:
    """The synthetic images as a memory-mapped file, as a published data set would be, not made on
    demand. Whoever comes first writes it; the driver does, before any clock runs."""
    config, _ = make_config(workload.settings(), method_class(workload.method))
    data = load_dataset(config)
    folder = os.environ.get(FOLDER)
    if folder is None or workload.clients > Workload.clients:
        return data
    file = Path(folder) / f"{workload.shape}-{len(data.x)}.npy"
    if not file.exists():
        with atomic_file(file) as part, part.open("wb") as out:
            np.save(out, data.x[slice(None)])
    return replace(data, x=np.load(file, mmap_mode="r"))


def federation(workload: Workload) -> Federation:
    config, _ = make_config(workload.settings(), method_class(workload.method))
    return make_federation(config, dataset(workload))


def experiment(workload: Workload, **settings: Any) -> Experiment:
    given = {**workload.settings(), **settings, "data_options": {}}
    config, options = make_config(given, method_class(workload.method))
    return prepare(config, options.build(), data=dataset(workload))


class Fedloom:
    """The runner without evaluation or files."""

    def __init__(self, workload: Workload, engine: str, workers: int, precision: str) -> None:
        self._experiment = experiment(workload, engine=engine, workers=workers, precision=precision)
        store = RunStore(Path(tempfile.gettempdir()) / "unused")
        self._runner = Runner(self._experiment, store)

    def round(self, t: int) -> None:
        self._runner.round(t)

    def weights(self) -> torch.Tensor:
        """The shared model, or the mean of the models of nodes."""
        x = self._experiment
        if x.method.mix.home == "server":
            return x.state.shared
        return x.state.rows(np.arange(x.config.clients)).double().mean(0).float()

    def close(self) -> None:
        self._experiment.engine.close()


class Bare:
    """Plain torch: state dicts, an optimiser per client, a running average."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._federation = workload, federation(workload)
        self._data = self._federation.dataset
        options = dict(workload.options)
        self._module = build(
            workload.model, self._data.shape, self._data.n_classes, options=options
        )
        self._global = {k: v.clone() for k, v in self._module.state_dict().items()}
        self._mean, self._std = (
            torch.tensor(v).view(1, -1, 1, 1) for v in (self._data.mean, self._data.std)
        )

    def round(self, t: int) -> None:
        w = self._workload
        contacts = Star().contacts(t, w.clients, w.participants, lambda name: stream(0, name, t))
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in self._global.items()}
        for client in contacts.participants:
            self._train(int(client), t)
            for key, value in self._module.state_dict().items():
                total[key] += value / len(contacts.participants)
        self._global = {k: total[k].to(v.dtype) for k, v in self._global.items()}

    def _part(self, client: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        indices = self._federation.indices(client, part)
        x = torch.from_numpy(self._data.x[indices])
        y = torch.from_numpy(self._data.y[indices].astype(np.int64))
        return (x.float() / 255 - self._mean) / self._std, y

    def _train(self, client: int, t: int) -> None:
        self._module.load_state_dict(self._global)
        self._fit(client, t)

    def _fit(self, client: int, t: int) -> None:
        self._module.train()
        optimiser = torch.optim.SGD(self._module.parameters(), lr=0.05)
        x, y = self._part(client, "train")
        for batch in Budget().batches(len(y), stream(0, "batches", t, client)):
            at = torch.from_numpy(batch)
            optimiser.zero_grad()
            F.cross_entropy(self._module(x[at]), y[at]).backward()
            optimiser.step()

    def weights(self) -> torch.Tensor:
        self._module.load_state_dict(self._global)
        return Layout.of(self._module).flatten(self._module)


class BareMeta(Bare):
    """FedMeta-Per by hand: second-order MAML with autograd, a head for every client."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._heads: dict[int, dict[str, torch.Tensor]] = {}

    def _train(self, client: int, t: int) -> None:
        rule = MAML(0.01)
        start = {**self._global, **self._heads.get(client, {})}
        w = {k: v.clone().requires_grad_() for k, v in start.items()}
        data = {part: self._part(client, part) for part in (SUPPORT, QUERY)}
        sizes = {part: len(y) for part, (_, y) in data.items()}
        for step in rule.plan(sizes, Budget(), stream(0, "batches", t, client)):
            fast = w
            for batch in step[SUPPORT]:
                x, y = (v[torch.from_numpy(batch)] for v in data[SUPPORT])
                loss = F.cross_entropy(functional_call(self._module, fast, (x,)), y)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {k: v - 0.01 * g for (k, v), g in zip(fast.items(), grads, strict=True)}
            x, y = (v[torch.from_numpy(step[QUERY])] for v in data[QUERY])
            loss = F.cross_entropy(functional_call(self._module, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(w.values()))
            with torch.no_grad():
                for value, grad in zip(w.values(), grads, strict=True):
                    value.sub_(grad, alpha=0.05)
        trained = {k: v.detach() for k, v in w.items()}
        self._heads[client] = {k: v.clone() for k, v in trained.items() if k.startswith("out.")}
        # the server averages the base; its own head stays as it was
        heads = {k: v for k, v in self._global.items() if k.startswith("out.")}
        self._module.load_state_dict({**trained, **heads})
