"""The workloads that all contestants run: FedAvg, 10 of 100 clients a round, one epoch, batch 32.

The bare loop is what a researcher would write by hand in plain torch. It draws the same clients and
batches, so that all contestants must end with the same weights.
"""

from __future__ import annotations

import itertools
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
from fedloom.data.public import public_set
from fedloom.data.split import Federation
from fedloom.experiment.capacities import Capacities
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
    more: tuple[tuple[str, Any], ...] = ()  # settings
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
            **dict(self.more),
        }


DEVICES = (("capacities", "high-quality"), ("scaler", False))
SWAP = (("partner", "min"), ("average_every", 3), ("public", "noise:128"))
WORKLOADS = (
    Workload("mlp", "mlp", "1x28x28", 600),
    Workload("lenet", "lenet", "3x32x32", 500),
    Workload("lenet-28", "lenet", "1x28x28", 600),
    Workload("conv4", "conv4", "1x28x28", 200),
    Workload("fedmeta-per", "lenet", "3x32x32", 200, method="fedmeta-per-maml"),
    Workload("fedrolex", "conv4", "1x28x28", 200, method="fedrolex", more=DEVICES),
    Workload("feddse", "conv4", "1x28x28", 200, method="feddse",
             more=(*DEVICES, ("norms", "own"))),
    Workload("fedswap", "lenet", "3x32x32", 100, 50, 50, method="fedswap", more=SWAP),
    Workload("feddom", "mlp", "1x28x28", 60, participants=100, method="feddom", test_share=0.2),
)  # fmt: skip
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

    def __init__(
        self,
        workload: Workload,
        engine: str,
        workers: int,
        precision: str,
        kernels: str | None = None,
    ) -> None:
        more = {} if kernels is None else {"kernels": kernels}  # an old checkout has no such word
        self._experiment = experiment(
            workload, engine=engine, workers=workers, precision=precision, **more
        )
        store = RunStore(Path(tempfile.gettempdir()) / "unused")
        self._runner = Runner(self._experiment, store)
        self.macs: list[int] = []  # that clients spent in each round

    def round(self, t: int) -> None:
        self.macs.append(self._runner.round(t)["macs"])

    def weights(self) -> torch.Tensor:
        """The shared model, or the mean of the models of nodes."""
        x = self._experiment
        if x.method.mix.home == "server":
            return x.state.shared
        everybody: Any = np.arange(x.config.clients)
        state: Any = x.state  # of an old checkout: it calls them rows
        models = state.models(everybody) if hasattr(state, "models") else state.rows(everybody)
        return models.double().mean(0).float()

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


class BareSub(Bare):
    """Sub-models of conv4 by hand: slices of a state dict, and a count for every element."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        capacities = Capacities.parse(dict(workload.more)["capacities"])
        self._capacity = capacities.assign(workload.clients, 0)
        self._blocks = [f"blocks.{i}" for i in range(4)]

    def round(self, t: int) -> None:
        w = self._workload
        contacts = Star().contacts(t, w.clients, w.participants, lambda name: stream(0, name, t))
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in self._global.items()}
        count = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in self._global.items()}
        for client in contacts.participants:
            keep = self._choose(int(client), t)
            at = {k: self._slice(k, v, keep) for k, v in self._global.items()}
            whole = self._module
            self._module = build(w.model, self._data.shape, self._data.n_classes,
                                 options={"channels": [len(k) for k in keep]})  # fmt: skip
            full, self._global = self._global, {k: v[at[k]] for k, v in self._global.items()}
            self._train(int(client), t)
            self._global = full
            for key, value in self._module.state_dict().items():
                total[key][at[key]] += value
                count[key][at[key]] += 1
            self._module = whole
        self._global = {
            k: torch.where(count[k] > 0, total[k] / count[k].clamp(min=1), v).to(v.dtype)
            for k, v in self._global.items()
        }

    def _choose(self, client: int, t: int) -> list[torch.Tensor]:
        r = float(self._capacity[client])
        if self._workload.method == "fedrolex":
            sizes = [len(self._global[f"{b}.conv.bias"]) for b in self._blocks]
            return [torch.sort((t - 1 + torch.arange(int(np.ceil(r * m)))) % m).values
                    for m in sizes]  # fmt: skip
        return self._most_active(client, r)

    def _most_active(self, client: int, r: float) -> list[torch.Tensor]:
        self._module.load_state_dict(self._global)
        x, keep = self._part(client, "train")[0], []
        for layer in self._module.modules():  # statistics of widths that trained together fit none
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.momentum = None
        with torch.no_grad():
            self._module.train()(x)
            self._module.eval()
            for block in self._module.blocks:  # type: ignore[union-attr, operator]
                h = torch.relu(block.norm(block.conv(x))).mean((0, 2, 3)).abs()  # before pooling
                x = block(x)
                keep.append(torch.sort(torch.topk(h, int(np.ceil(r * len(h)))).indices).values)
        return keep

    def _slice(self, key: str, value: torch.Tensor, keep: list[torch.Tensor]) -> Any:
        if value.dim() == 0:
            return ()
        if key.startswith("out"):
            return (slice(None), keep[-1]) if value.dim() == 2 else (slice(None),)
        block = int(key.split(".")[1])
        if value.dim() == 1 or block == 0:
            return (keep[block],)
        return (keep[block][:, None], keep[block - 1][None, :])


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
                x, y = (v[torch.from_numpy(batch[batch >= 0])] for v in data[SUPPORT])
                loss = F.cross_entropy(functional_call(self._module, fast, (x,)), y)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {k: v - 0.01 * g for (k, v), g in zip(fast.items(), grads, strict=True)}
            losses = []
            for batch in step[QUERY]:
                x, y = (v[torch.from_numpy(batch[batch >= 0])] for v in data[QUERY])
                losses.append(F.cross_entropy(functional_call(self._module, fast, (x,)), y))
            grads = torch.autograd.grad(torch.stack(losses).mean(), list(w.values()))
            with torch.no_grad():
                for value, grad in zip(w.values(), grads, strict=True):
                    value.sub_(grad, alpha=0.05)
        trained = {k: v.detach() for k, v in w.items()}
        self._heads[client] = {k: v.clone() for k, v in trained.items() if k.startswith("out.")}
        # the server averages the base; its own head stays as it was
        heads = {k: v for k, v in self._global.items() if k.startswith("out.")}
        self._module.load_state_dict({**trained, **heads})


class BareSwap(Bare):
    """FedSwap by hand: a model for every client, CKA for each pair of them, least similar first."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        more = dict(workload.more)
        public = public_set(more["public"], self._federation)
        assert public is not None
        self._probes, self._every = public.x, more["average_every"]
        self._own = [self._global] * workload.clients

    def round(self, t: int) -> None:
        for client, start in enumerate(self._own):
            self._global = start
            self._train(client, t)
            self._own[client] = {k: v.clone() for k, v in self._module.state_dict().items()}
        if t % self._every:
            self._swap()
        else:
            self._own = [self._average()] * len(self._own)

    def _swap(self) -> None:
        centred = [self._centred_grams(own) for own in self._own]
        pairs = []
        for a, b in itertools.combinations(range(len(centred)), 2):
            layers = [
                (k * m).sum() / (k.norm() * m.norm())
                for k, m in zip(centred[a], centred[b], strict=True)
            ]
            pairs.append((float(sum(layers)) / len(layers), a, b))
        left = set(range(len(self._own)))
        for _, a, b in sorted(pairs):
            if {a, b} <= left:
                self._own[a], self._own[b] = self._own[b], self._own[a]
                left -= {a, b}

    def _centred_grams(self, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        self._module.load_state_dict(state)
        net: Any = self._module.eval()
        with torch.no_grad():
            a = F.relu(F.max_pool2d(net.conv1(self._probes), 2))
            b = F.relu(F.max_pool2d(net.conv2(a), 2))
            c = F.relu(net.fc1(b.flatten(1)))
            d = F.relu(net.fc2(c))
            found = [x.flatten(1) for x in (a, b, c, d, net.out(d))]
            return [x @ x.T for x in (x - x.mean(0) for x in found)]

    def _average(self) -> dict[str, torch.Tensor]:
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in self._own[0].items()}
        for own in self._own:
            for key, value in own.items():
                total[key] += value / len(self._own)
        return {k: v.float() for k, v in total.items()}

    def weights(self) -> torch.Tensor:
        self._global = self._average()
        return super().weights()
