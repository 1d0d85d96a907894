"""A worker trains and scores one client at a time on a resident module.

This is the reference for every engine: serial is one worker, a pool is many of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.engine.base import Scored, Setting, Task
from fedloom.engine.batches import Shelf, Source
from fedloom.engine.resident import Resident
from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.local import Batch
from fedloom.metrics.cost import training_macs
from fedloom.models.norm import has_static_norm, measuring
from fedloom.select import Ask, Selection
from fedloom.streams import stream, torch_seed

_SCORE_BATCH = 256


class Diverged(FedloomError):
    """A client's update is not finite."""

    exit_code = 1


@dataclass(frozen=True)
class Done:
    """What one client hands back, and what it took."""

    row: Tensor
    index: Tensor | None  # the columns of a sub-model; None: the whole
    loss: float
    samples: int
    steps: int
    macs: int


class Worker:
    """One resident model, one client at a time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        data, device = setting.dataset, setting.device
        self._train = Source(data.x, data.y, data.mean, data.std, device)
        self._test = Source(data.x_test, data.y_test, data.mean, data.std, device)
        self._residents: dict[Hashable, Resident] = {}
        self._macs: dict[Hashable, int] = {}
        self._whole = self._settle(None, setting.build(), setting.layout)
        self._static = has_static_norm(self._whole.module)
        self._pool: dict[str, np.ndarray] = {}

    def train(self, task: Task, client: int, row: Tensor) -> Done:
        """Let `client` choose its part of `row` and train it."""
        s, rule, optimiser = self.setting, task.rule, task.optimiser
        selection = task.select.choose(self._ask(task, client, row))
        start = row if selection is None else row[selection.index]
        resident = self._resident(selection)
        resident.load(start)
        resident.module.train()
        torch.manual_seed(torch_seed(s.seed, "torch", task.round, client))
        shelves = {}
        for part in rule.parts:
            rng = stream(s.seed, "augment", task.round, client, part) if s.augment else None
            indices = self._indices(client, task.data.get(part, part))
            shelves[part] = Shelf(self._train, indices, s.augment, rng)
        sizes = {part: len(shelf) for part, shelf in shelves.items()}
        steps = rule.plan(sizes, task.budget, stream(s.seed, "batches", task.round, client))

        anchor = resident.weights.clone()
        velocity: Tensor | None = None
        loss_sum = torch.zeros((), device=s.device)
        seen = 0
        for step in steps:
            data = {part: shelves[part].batch(at) for part, at in step.items()}
            if rule.differentiates:
                loss = self._functional_gradient(resident, task, data)
            else:
                resident.grad.zero_()
                loss = rule.objective(resident.net, resident.params, data)
                loss.backward()
            with torch.no_grad():
                grad = rule.direction(resident.grad, resident.weights, anchor)
                if rule.sends == "weights":
                    velocity = optimiser.step(resident.weights, grad, velocity)
                size = sum(len(at) for at in step.values())
                loss_sum += loss.detach() * size
                seen += size
        with torch.no_grad():
            done = rule.finish(start.to(s.device), resident.read(), resident.grad).cpu().clone()
        if not torch.isfinite(done).all():
            raise Diverged(
                f"Training diverged: the update of client {client} in round {task.round} holds "
                f"NaN or infinite values (learning rate {optimiser.lr:g}). Lower --lr, or bound "
                "the gradient with --clip 1."
            )
        shape, index = (None, None) if selection is None else (selection.shape, selection.index)
        mean_loss = float(loss_sum) / max(seen, 1)
        return Done(done, index, mean_loss, seen, len(steps), seen * self._macs[shape])

    def score(self, row: Tensor, groups: list[np.ndarray], calibrate: np.ndarray) -> Scored:
        """One row on the data of several clients; `calibrate` measures static norms if any."""
        return self._score(row, self._train, groups, calibrate)

    def score_global(self, row: Tensor, calibrate: np.ndarray) -> Scored:
        """One row on the common test set."""
        source = self._test if len(self._test.y) else self._train
        return self._score(row, source, [self._common()], calibrate)

    def calibration(self, clients: np.ndarray) -> np.ndarray:
        """Training data of these clients by which a model's static norms are measured."""
        if not self._static:
            return np.empty(0, dtype=np.int64)
        known = self.setting.federation.n_clients
        pooled = np.concatenate(
            [
                self.setting.federation.indices(int(c), "train" if c < known else "test-support")
                for c in clients
            ]
        )
        most = self.setting.static_samples
        if len(pooled) > most:
            pooled = stream(self.setting.seed, "static-norm").permutation(pooled)[:most]
        return pooled

    def _score(
        self, row: Tensor, source: Source, groups: list[np.ndarray], calibrate: np.ndarray
    ) -> Scored:
        resident = self._whole
        resident.load(row)
        if self._static and len(calibrate):
            self._measure(resident, calibrate)
        resident.module.eval()
        classes = self.setting.dataset.n_classes
        owner = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
        indices = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
        loss = np.zeros(len(groups))
        confusion = np.zeros(len(groups) * classes * classes, dtype=np.int64)
        with torch.inference_mode():
            for at in range(0, len(indices), _SCORE_BATCH):
                batch = source.batch(indices[at : at + _SCORE_BATCH])
                logits = resident.module(batch.x)
                losses = F.cross_entropy(logits, batch.y, reduction="none").double().cpu().numpy()
                guess = logits.argmax(1).cpu().numpy()
                who = owner[at : at + _SCORE_BATCH]
                cell = (who * classes + batch.y.cpu().numpy()) * classes + guess
                confusion += np.bincount(cell, minlength=len(confusion))
                loss += np.bincount(who, weights=losses, minlength=len(groups))
        return Scored(confusion.reshape(len(groups), classes, classes), loss)

    def _measure(self, resident: Resident, indices: np.ndarray) -> None:
        resident.module.train()
        with measuring(resident.module), torch.no_grad():
            for at in range(0, len(indices), _SCORE_BATCH):
                resident.module(self._train.batch(indices[at : at + _SCORE_BATCH]).x)

    def _functional_gradient(self, resident: Resident, task: Task, data: dict) -> Tensor:
        kinds = ("param", "extra")
        layout = resident.layout

        def objective(weights: Tensor) -> Tensor:
            pieces = torch.split(weights, [e.size for e in layout.entries if e.kind in kinds])
            named = (e for e in layout.entries if e.kind in kinds)
            params = {e.name: p.view(e.shape) for e, p in zip(named, pieces, strict=True)}
            return task.rule.objective(resident.net, params, data)

        grad, loss = torch.func.grad_and_value(objective)(resident.weights.detach())
        resident.grad.copy_(grad)
        return loss

    def _resident(self, selection: Selection | None) -> Resident:
        if selection is None:
            return self._whole
        if selection.shape not in self._residents:
            module = selection.build()
            self._settle(selection.shape, module, Layout.of(module, self.setting.extras))
        return self._residents[selection.shape]

    def _settle(self, shape: Hashable, module: nn.Module, layout: Layout) -> Resident:
        data = self.setting.dataset
        self._macs[shape] = training_macs(module, data.shape, data.n_classes)
        self._residents[shape] = Resident(module, layout, self.setting.device)
        return self._residents[shape]

    def _ask(self, task: Task, client: int, row: Tensor) -> Ask:
        s = self.setting

        def data(part: str) -> Batch:
            return self._train.batch(self._indices(client, part))

        return Ask(
            round=task.round,
            client=client,
            capacity=float(s.capacities[client]),
            layout=s.layout,
            row=row,
            module=self._whole.module,
            stream=lambda *names: stream(s.seed, *names, task.round, client),
            data=data if task.select.sees_data else None,
        )

    def _indices(self, client: int, part: str) -> np.ndarray:
        federation = self.setting.federation
        if not self.setting.pools:
            return federation.indices(client, part)
        if part not in self._pool:
            everyone = range(federation.n_clients)
            self._pool[part] = np.concatenate([federation.indices(c, part) for c in everyone])
        return self._pool[part]

    def _common(self) -> np.ndarray:
        return self.setting.federation.global_test()
