"""A worker trains and scores one client at a time on a resident module.

This is the reference for every engine: serial is one worker, a pool is many of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.engine.base import Block, Done, Scored, Setting, Task
from fedloom.engine.batches import SCORE_BATCH, Shelf, Source
from fedloom.engine.memory import keep_freed_memory
from fedloom.engine.resident import Narrower, Resident
from fedloom.errors import FedloomError, telling_memory
from fedloom.layout import Layout
from fedloom.local import Batch, LocalRule
from fedloom.local.rule import Step
from fedloom.models.counts import forward_macs, passing_bytes, saved_bytes, training_macs
from fedloom.models.norm import has_tracked_norm, settle
from fedloom.models.strided import tame_strides
from fedloom.select import Ask, Last, Public, Selection
from fedloom.select.scores import AT_ONCE as LOOKED_AT_ONCE
from fedloom.streams import stream, torch_seed


class Diverged(FedloomError):
    """A client's update is not finite."""

    exit_code = 1


@dataclass(frozen=True)
class Job:
    """One client, ready to train: what it starts from, its data and its steps."""

    client: int
    selection: Selection | None
    start: Tensor
    shelves: Mapping[str, Shelf]
    steps: list[Step]
    widths: list[float | None]
    held: Tensor | None
    seconds: dict[str, float]


class Worker:
    """One resident model, one client at a time."""

    @telling_memory("a worker and its copy of the model")
    def __init__(self, setting: Setting, stacks: bool = False) -> None:
        keep_freed_memory()
        self.setting = setting
        self._residents: dict[Hashable, Resident] = {}
        self._macs: dict[Hashable, int] = {}
        self._saved: dict[Hashable, int] = {}
        self._narrower: dict[Hashable, Narrower] = {}
        module = setting.build()
        self._whole = self._settle(None, module, setting.layout)
        convolves = any(isinstance(m, nn.Conv2d) for m in module.modules())
        data, device, last = setting.dataset, setting.device, convolves and not stacks
        scale, tokens = (data.mean, data.std), setting.tokens
        self._train = Source(data.x, data.y, *scale, device, last, tokens)
        self._test = Source(data.x_test, data.y_test, *scale, device, last, tokens)
        self._pool: dict[str, np.ndarray] = {}

    def prepare(self, task: Task, client: int, row: Tensor, last: Last | None = None) -> Job:
        """Let `client` choose its part of `row`, take out its data and plan its steps."""
        s, rule = self.setting, task.rule
        started = time.perf_counter()
        selection = task.select.choose(self._ask(task, client, row, last))
        if selection is not None and not (selection.index.diff() > 0).all():
            raise FedloomError(
                f"{type(task.select).__name__} chose columns that do not ascend. Sort the index of "
                "its Selection, and let each column be there once."
            )
        start = row if selection is None else row[selection.index]
        chosen = time.perf_counter()
        shelves = {}
        for part in rule.parts:
            rng = stream(s.seed, "augment", task.round, client, part) if s.augment else None
            indices = self._indices(client, task.data.get(part, part))
            shelves[part] = Shelf(self._train, indices, s.augment, rng)
        sizes = {part: len(shelf) for part, shelf in shelves.items()}
        steps = rule.plan(sizes, task.budget, stream(s.seed, "batches", task.round, client))
        widths: list[float | None] = [None] * len(steps)
        if rule.narrows:
            capacity = float(s.capacities[client])
            drawn = rule.widths(len(steps), capacity, stream(s.seed, "widths", task.round, client))
            widths = [None if width == capacity else width for width in drawn]
        held = None
        if rule.sees_classes and not s.pools:
            held = torch.from_numpy(s.federation.classes_of(client)).to(s.device)
        seconds = {"select": chosen - started, "data": time.perf_counter() - chosen}
        return Job(client, selection, start, shelves, steps, widths, held, seconds)

    def train(self, task: Task, client: int, row: Tensor, last: Last | None = None) -> Done:
        """Prepare and train one client; `last` is what it sent before, for selectors that ask."""
        try:
            with telling_memory(f"training client {client} in round {task.round}"):
                return self._walk(task, self.prepare(task, client, row, last))
        except ValueError as e:
            if "more than 1 value per channel" not in str(e):
                raise
            raise FedloomError(
                f"Client {client} has a batch of one image, on which batch norm can't be computed. "
                "Give clients more samples, a --batch above 1, or use another norm "
                "(--set model_options.norm=group)."
            ) from None

    def _walk(self, task: Task, job: Job) -> Done:
        started = time.perf_counter()
        s, rule, optimiser = self.setting, task.rule.at(task.round), task.optimiser
        resident = self.resident(job.selection)
        resident.load(job.start)
        resident.module.train()
        _seed_torch(torch_seed(s.seed, "torch", task.round, job.client), s.device)
        anchor = resident.weights.clone()
        velocity: Tensor | None = None
        loss_sum = torch.zeros((), device=s.device)
        seen, data_seconds = 0, 0.0
        for step, width in zip(job.steps, job.widths, strict=True):
            fetched = time.perf_counter()
            data = {part: job.shelves[part].batch(at) for part, at in step.items()}
            if job.held is not None:
                data = {part: replace(batch, held=job.held) for part, batch in data.items()}
            data_seconds += time.perf_counter() - fetched
            resident.at(self.narrower(task, job.selection, width))
            if rule.differentiates:
                loss = self._functional_gradient(resident, rule, data)
            else:
                resident.grad.zero_()
                with s.autocast():
                    loss = rule.objective(resident, resident.params, data)
                loss.backward()
            with torch.no_grad():
                grad = rule.direction(resident.grad, resident.weights, anchor)
                if rule.sends == "weights":
                    velocity = optimiser.step(resident.weights, grad, velocity)
                size = sum(at.size for at in step.values())
                loss_sum += loss.detach() * size
                seen += size
        with torch.no_grad():
            row = rule.finish(job.start.to(s.device), resident.read(), resident.grad).cpu().clone()
        train_seconds = time.perf_counter() - started - data_seconds
        job.seconds.update(data=job.seconds["data"] + data_seconds, train=train_seconds)
        return self.hand_back(task, job, row, float(loss_sum), seen)

    def hand_back(self, task: Task, job: Job, row: Tensor, loss_sum: float, seen: int) -> Done:
        """What a client returns, refused if it is not finite."""
        # The sum tells at once; only where it is not finite must every value be looked at.
        if not torch.isfinite(row.sum()) and not torch.isfinite(row).all():
            raise Diverged(
                f"Training diverged: the update of client {job.client} in round {task.round} holds "
                f"NaN or infinite values (learning rate {task.optimiser.lr:g}, {task.rule}). Lower "
                "--lr (and alpha, where the method has one), or bound the gradient with --clip 1."
            )
        chosen = job.selection
        macs, memory = self._costs(task, job, seen)
        index = None if chosen is None else chosen.index
        loss = loss_sum / max(seen, 1)
        gap = None if chosen is None else chosen.gap
        return Done(row, index, loss, seen, len(job.steps), macs, memory, job.seconds, gap)

    def _costs(self, task: Task, job: Job, seen: int) -> tuple[int, int]:
        """Multiply-accumulates and memory of a client's round."""
        chosen, data = job.selection, self.setting.dataset
        resident = self.resident(chosen)
        macs = seen * self._macs[None if chosen is None else chosen.shape]
        inside = 0  # of the narrower nets, the largest that is in memory beside the client's own
        for width, count in Counter(job.widths).items():
            narrower = self.narrower(task, chosen, width)
            if narrower is not None:
                each, saved = narrower.costs(data.shape)
                macs += seen * count // len(job.steps) * each
                inside = max(inside, saved)
        sizes = (sum(at.shape[-1] for at in step.values()) for step in job.steps)
        batch = max(sizes, default=0)
        copies = 3 if task.optimiser.momentum else 2
        memory = copies * resident.layout.trainable * resident.layout.bytes
        memory += batch * (self._saved[None if chosen is None else chosen.shape] + inside)
        if task.select.sees_data and chosen is not None:  # it chose from the whole model
            each, passing = self._inference
            macs += chosen.samples * each * (2 if self.setting.static else 1)  # norms are measured
            whole = self.setting.layout.size * self.setting.layout.bytes
            memory = whole + max(memory, min(chosen.samples, LOOKED_AT_ONCE) * passing)
        return macs, memory

    @cached_property
    def _inference(self) -> tuple[int, int]:
        """Of one sample's pass through the whole model: multiply-accumulates and bytes."""
        module, shape = self._whole.module, self.setting.dataset.shape
        return forward_macs(module, shape), passing_bytes(module, shape)

    @telling_memory("scoring")
    def score(self, row: Tensor, block: Block) -> Scored:
        """One row on a block of samples."""
        resident = self._whole
        resident.load(row)
        if self.setting.static:
            most = self.setting.static_samples
            measured_on = self.setting.federation.calibration(block.calibrate, most)
            settle(resident.module, self._train.batches(measured_on), self.setting.submodels)
        resident.module.eval()
        source = self.source(block)
        classes, groups = self.setting.dataset.n_classes, len(block.who)
        loss = np.zeros(groups)
        confusion = np.zeros(groups * classes * classes, dtype=np.int64)
        kept = []
        with torch.inference_mode(), self.setting.autocast():
            for at in range(0, len(block.indices), SCORE_BATCH):
                batch = source.batch(block.indices[at : at + SCORE_BATCH])
                logits = resident.module(batch.x).float()
                cells, losses = cells_and_losses(logits, batch.y, classes)
                if block.probabilities:
                    kept.append(logits.softmax(-1).double().cpu().numpy())
                who = block.owner[at : at + SCORE_BATCH]
                cell = who * classes * classes + cells
                confusion += np.bincount(cell, minlength=len(confusion))
                loss += np.bincount(who, weights=losses, minlength=groups)
        known = np.concatenate(kept) if kept else None
        return Scored(confusion.reshape(groups, classes, classes), loss, known)

    def source(self, block: Block) -> Source:
        return self._test if block.common and len(self._test.y) else self._train

    def _functional_gradient(
        self, resident: Resident, rule: LocalRule, data: Mapping[str, Batch]
    ) -> Tensor:
        weights = resident.weights.detach().requires_grad_()
        # Second derivatives of convolutions are faster channel by channel.
        data = {part: replace(batch, x=batch.x.contiguous()) for part, batch in data.items()}
        params = {n: p.contiguous() for n, p in resident.layout.tensors(weights).items()}
        with self.setting.autocast():
            loss = rule.objective(resident, params, data)
        (grad,) = torch.autograd.grad(loss, weights)
        resident.grad.copy_(grad)
        if has_tracked_norm(resident.module):  # its statistics come from the step's last part
            *_, last = data.values()
            with torch.no_grad(), self.setting.autocast():
                resident.module(last.x)
        return loss

    def resident(self, selection: Selection | None) -> Resident:
        if selection is None:
            return self._whole
        if selection.shape not in self._residents:
            module = selection.build()
            self._settle(selection.shape, module, Layout.of(module, self.setting.extras))
        return self._residents[selection.shape]

    def narrower(
        self, task: Task, selection: Selection | None, width: float | None
    ) -> Narrower | None:
        """The net of this width inside a client's own."""
        if width is None:
            return None
        key = (None if selection is None else selection.shape, width)
        if key not in self._narrower:
            whole = self.setting.channels
            assert whole is not None
            mine = whole if selection is None else selection.channels
            assert mine is not None
            counts, scale = task.select.narrowed(whole, width)
            self._narrower[key] = Narrower(mine, counts, scale)
        return self._narrower[key]

    def _settle(self, shape: Hashable, module: nn.Module, layout: Layout) -> Resident:
        data = self.setting.dataset
        tame_strides(module)
        self._macs[shape] = training_macs(module, data.shape)
        self._saved[shape] = saved_bytes(module, data.shape)
        self._residents[shape] = Resident(module, layout, self.setting.device)
        return self._residents[shape]

    def _ask(self, task: Task, client: int, row: Tensor, last: Last | None) -> Ask:
        s = self.setting

        @cache  # a selector may look more than once
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
            data=data if task.select.sees_data or task.select.measures else None,
            channels=s.channels,
            public=self._public if task.select.sees_public else None,
            last=last if task.select.recalls else None,
        )

    @cached_property
    def _public(self) -> Public | None:
        found, device = self.setting.public, self.setting.device
        if found is None:
            return None
        y = None if found.y is None else torch.from_numpy(found.y).to(device)
        return Public(torch.from_numpy(found.x).to(device), y)

    def _indices(self, client: int, part: str) -> np.ndarray:
        federation = self.setting.federation
        if not self.setting.pools:
            return federation.indices(client, part)
        if part not in self._pool:
            everyone = range(federation.n_clients)
            self._pool[part] = np.concatenate([federation.indices(c, part) for c in everyone])
        return self._pool[part]


def _seed_torch(seed: int, device: torch.device) -> None:
    """`torch.manual_seed`, which takes half a millisecond to note where it was called for devices
    that are not there; the CPU's own generator takes a microsecond."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def cells_and_losses(logits: Tensor, y: Tensor, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Per sample: its cell of the confusion matrix, and its loss."""
    losses = F.cross_entropy(logits, y, reduction="none").double().cpu().numpy()
    return (y * classes + logits.argmax(-1)).cpu().numpy(), losses
