"""A worker trains and scores one client at a time on a resident module.

This is the reference for every engine: serial is one worker, a pool is many of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.public import PublicSet
from fedloom.engine import asked
from fedloom.engine.base import BLOCK, Block, Done, Order, Scored, Setting, Tally
from fedloom.engine.base import Held as HeldPart
from fedloom.engine.batches import SCORE_BATCH, PublicShelf, Shelf, Source
from fedloom.engine.kernels import kernels_for, masks_logits, meta_steps, update_of, whole_steps
from fedloom.engine.looking import Looker
from fedloom.engine.memory import keep_freed_memory
from fedloom.engine.resident import Narrower, Resident
from fedloom.errors import FedloomError, telling_memory
from fedloom.kinds import Declared, Section
from fedloom.layout import Layout
from fedloom.local import Batch, LocalRule
from fedloom.local.distil import MaskedSGD
from fedloom.local.meta import MAML
from fedloom.local.rule import Back, Context, Params, Samples, counted
from fedloom.models.counts import (
    forward_macs,
    passing_bytes,
    saved_bytes,
    second_macs,
    training_macs,
)
from fedloom.models.norm import has_tracked_norm, settle
from fedloom.models.strided import tame_strides
from fedloom.models.viewed import tame_views
from fedloom.native.net import Held, Native, Pictures
from fedloom.returned import returned, returned_if_any
from fedloom.select import Ask, Last, Selection, Whole
from fedloom.select.base import Uncut
from fedloom.select.scores import AT_ONCE as LOOKED_AT_ONCE
from fedloom.streams import stream, torch_seed

OPTIMISER = "optimiser."  # in front of the names of what an optimiser remembers
_LOOK = 5000  # samples at most that clients measure a model's norms with before they look at it


class Diverged(FedloomError):
    """A client's update is not finite."""

    exit_code = 1


@dataclass(frozen=True)
class Job:
    """One client, ready to train: what it starts from, its data and its steps.

    `row` is all that it was given; `start` is its model, or its part of it; `values` are the named
    values in the row, cut like the model where they are like its weights."""

    client: int
    selection: Selection | None
    row: Tensor
    start: Tensor
    values: Mapping[str, Tensor]
    shelves: Mapping[str, Shelf | PublicShelf]
    steps: list[Samples]
    widths: list[float | None]
    held: Tensor | None
    seconds: dict[str, float]


class Worker:
    """One resident model, one client at a time."""

    @telling_memory("a worker and its copy of the model")
    def __init__(self, setting: Setting, stacks: bool = False) -> None:
        keep_freed_memory()
        self.setting = setting
        self._kernels = "torch" if stacks else setting.kernels
        self._residents: dict[Hashable, Resident] = {}
        self._macs: dict[Hashable, int] = {}
        self._second: dict[Hashable, int] = {}
        self._saved: dict[Hashable, int] = {}
        self._narrower: dict[Hashable, Narrower] = {}
        #: the last row that was looked at: by whom it was measured, as it came, and settled
        self._known: tuple[tuple[int, ...], Tensor, Tensor] | None = None
        module = setting.build()
        self._whole = self._settle(None, module, setting.layout)
        convolves = any(isinstance(m, nn.Conv2d) for m in module.modules())
        data, device = setting.dataset, setting.device
        last = convolves and not stacks and self._whole.native is None
        source = partial(
            Source, mean=data.mean, std=data.std, device=device, channels_last=last,
            tokens=setting.tokens, task=setting.task,
        )  # fmt: skip
        self._train, self._test = source(data.x, data.y), source(data.x_test, data.y_test)
        self._pool: dict[str, np.ndarray] = {}

    def prepare(self, order: Order, client: int, row: Tensor, last: Last | None = None) -> Job:
        """Let `client` choose its part of `row`, take out its data and plan its steps."""
        s, rule = self.setting, order.rule
        started = time.perf_counter()
        model = row[: s.layout.size]
        selection = None
        if type(order.select) is not Whole:
            mine = HeldPart(client, order.round, order.select, last)
            selection = self._chosen(mine, model, order.together)
        if selection is not None and not (selection.index.diff() > 0).all():
            raise FedloomError(
                f"{type(order.select).__name__} chose columns that do not ascend. Sort the index "
                "of its Selection and remove duplicates."
            )
        start = model if selection is None else model[selection.index]
        chosen = time.perf_counter()
        shelves: dict[str, Shelf | PublicShelf] = {}
        for part in rule.parts:
            if part == "public":
                shelves[part] = self._public_shelf
                continue
            rng = stream(s.seed, "augment", order.round, client, part) if s.augment else None
            indices = self._indices(client, order.data.get(part, part))
            shelves[part] = Shelf(self._train, indices, s.augment, rng)
        sizes = {part: len(shelf) for part, shelf in shelves.items()}
        if order.budget.support_first:
            sizes["train-support"] = s.federation.size(client, "train-support")
        steps = asked.plan(
            rule, sizes, order.budget, stream(s.seed, "batches", order.round, client)
        )
        widths: list[float | None] = [None] * len(steps)
        if rule.narrows:
            capacity = float(s.capacities[client])
            rng = stream(s.seed, "widths", order.round, client)
            widths = asked.widths(rule, len(steps), capacity, rng)
        held = None
        if "classes" in rule.needs and not s.pools:
            held = torch.from_numpy(s.federation.classes_of(client)).to(s.device)
        seconds = {"select": chosen - started, "data": time.perf_counter() - chosen}
        values = self._values(order, row, selection)
        return Job(client, selection, row, start, values, shelves, steps, widths, held, seconds)

    def _values(self, order: Order, row: Tensor, selection: Selection | None) -> dict[str, Tensor]:
        """The named values in a row."""
        if order.sections is None:
            return {}
        at = {n: section_columns(order.sections[n], selection, self.setting.layout)
              for n in order.sections.names}  # fmt: skip
        return {n: row[columns].view(shape) for n, (columns, shape) in at.items()}

    def train(self, order: Order, client: int, row: Tensor, last: Last | None = None) -> Done:
        """Prepare and train one client; `last` is what it sent before, for selectors that ask."""
        try:
            with telling_memory(f"training client {client} in round {order.round}"):
                return self._walk(order, self.prepare(order, client, row, last))
        except ValueError as e:
            if "more than 1 value per channel" not in str(e):
                raise
            raise FedloomError(
                f"Client {client} has a batch of one image, which batch norm can't handle. Give "
                "clients more samples, a --batch above 1, or use another norm (--set "
                "model_options.norm=group)."
            ) from None

    def _walk(self, order: Order, job: Job) -> Done:
        started = time.perf_counter()
        s, rule = self.setting, asked.rule_at(order.rule, order.round)
        resident = self.resident(job.selection)
        resident.load(job.start)
        _seed_torch(torch_seed(s.seed, "torch", order.round, job.client), s.device)
        me = self.context(order, job, rule)
        memory = self.optimiser_memory(order, [job], resident.weights.unsqueeze(0))
        memory = {name: value[0] for name, value in memory.items()}
        if resident.native is not None and job.steps and whole_steps(rule, s.task):
            walk = self._native_steps
        elif resident.native is not None and meta_steps(rule, s.task, resident.native, job.steps):
            walk = self._meta_steps
        else:
            walk = self._steps
        loss_sum, seen, data_seconds = walk(order, job, rule, resident, me, memory)
        with torch.no_grad():
            row = resident.read()
            me = replace(me, logits=partial(self.answers, job.selection, row))
            back = asked.finish(rule, me, row, resident.grad)
            back = replace(back, row=back.row.cpu().clone())  # the resident one is used again
        train_seconds = time.perf_counter() - started - data_seconds
        job.seconds.update(data=job.seconds["data"] + data_seconds, train=train_seconds)
        return self.hand_back(order, job, back, memory, loss_sum, seen)

    def _native_steps(
        self,
        order: Order,
        job: Job,
        rule: LocalRule,
        resident: Resident,
        me: Context,
        memory: dict[str, Tensor],
    ) -> tuple[float, int, float]:
        """The summed loss, the samples seen and the seconds spent on data."""
        shelf, native, optimiser = job.shelves["train"], resident.native, order.optimiser
        assert isinstance(shelf, Shelf)
        assert native is not None
        started = time.perf_counter()
        batches = [step["train"] for step in job.steps]
        pictures, y = shelf.pictures(batches)
        data_seconds = time.perf_counter() - started
        cuts = np.array([0, *accumulate(map(len, batches))])
        held = _held(rule, job)
        follows = rule.hands_back == "weights"
        bends = type(rule).direction is not LocalRule.direction
        if follows and not bends and not native.plan(training=True).masks:
            pull = asked.pull(rule, me)
            update = update_of(optimiser, memory, pull)
            loss = native.steps(resident.row, resident.grad, pictures, y, cuts, update, held)
            resident.count(len(batches))
            return loss, int(cuts[-1]), data_seconds
        loss_sum, update = 0.0, update_of(optimiser, memory)
        for a, b in pairwise(cuts.tolist()):
            loss = native.gradient(resident.row, resident.grad, pictures.some(a, b), y[a:b], held)
            resident.count(1)
            grad = asked.direction(rule, resident.grad, resident.weights, me)
            if follows:
                native.update(resident.weights, grad, update)
            loss_sum += loss * (b - a)
        return loss_sum, int(cuts[-1]), data_seconds

    def _meta_steps(
        self,
        order: Order,
        job: Job,
        rule: LocalRule,
        resident: Resident,
        me: Context,
        memory: dict[str, Tensor],
    ) -> tuple[float, int, float]:
        """The same, of meta-learning."""
        native, update = resident.native, update_of(order.optimiser, memory)
        assert native is not None
        assert isinstance(rule, MAML)
        loss_sum, seen, data_seconds = 0.0, 0, 0.0
        for step in job.steps:
            fetched = time.perf_counter()
            support, query = (_taken(job.shelves[part], step[part]) for part in rule.parts)
            data_seconds += time.perf_counter() - fetched
            loss = native.meta(
                resident.row, resident.grad, support, query, rule.rate, not rule.first_order
            )
            grad = asked.direction(rule, resident.grad, resident.weights, me)
            native.update(resident.weights, grad, update)
            loss_sum += loss * counted(step)
            seen += counted(step)
        return loss_sum, seen, data_seconds

    def _steps(
        self,
        order: Order,
        job: Job,
        rule: LocalRule,
        resident: Resident,
        me: Context,
        memory: dict[str, Tensor],
    ) -> tuple[float, int, float]:
        """The same, through autograd."""
        s, optimiser = self.setting, order.optimiser
        resident.module.train()
        native = resident.native
        update = None if native is None else update_of(optimiser, memory)
        loss_sum = torch.zeros((), device=s.device)
        seen, data_seconds = 0, 0.0
        for step, width in zip(job.steps, job.widths, strict=True):
            fetched = time.perf_counter()
            data = {part: job.shelves[part].batch(at) for part, at in step.items()}
            if job.held is not None:
                data = {part: replace(batch, held=job.held) for part, batch in data.items()}
            data_seconds += time.perf_counter() - fetched
            resident.at(self.narrower(order, job.selection, width))
            if rule.differentiates:
                loss = self._functional_gradient(resident, rule, data, me)
            else:
                resident.grad.zero_()
                with s.autocast():
                    loss = asked.objective(rule, resident, resident.params, data, me)
                loss.backward()
            with torch.no_grad():
                grad = asked.direction(rule, resident.grad, resident.weights, me)
                if rule.hands_back == "weights" and native is not None and update is not None:
                    native.update(resident.weights, grad, update)
                elif rule.hands_back == "weights":
                    optimiser.step(resident.weights, grad, memory)
                size = counted(step)
                loss_sum += loss.detach() * size
                seen += size
        return float(loss_sum), seen, data_seconds

    def context(self, order: Order, job: Job, rule: LocalRule) -> Context:
        device = self.setting.device
        values = {name: value.to(device) for name, value in job.values.items()}
        row = job.start.to(device)
        return Context(
            start=row[: self.resident(job.selection).layout.trainable],
            row=row,
            lr=order.optimiser.lr,
            steps=len(job.steps),
            told=Declared({n: values[n] for n in rule.told}, type(rule).__name__, "told"),
            kept=Declared({n: values[n] for n in rule.keeps}, type(rule).__name__, "keeps"),
            public=self._public.x if "public" in rule.needs and self._public else None,
        )

    def optimiser_memory(
        self, order: Order, jobs: Sequence[Job], weights: Tensor
    ) -> dict[str, Tensor]:
        """What the optimiser remembers, a line for each client: nothing yet, or what they kept."""
        names = {name: f"{OPTIMISER}{name}" for name in order.optimiser.values}
        if not all(key in jobs[0].values for key in names.values()):
            return order.optimiser.memory(weights)
        return {
            name: torch.stack([job.values[key] for job in jobs]).to(weights).view(len(jobs), -1)
            for name, key in names.items()
        }

    def hand_back(
        self,
        order: Order,
        job: Job,
        back: Back,
        memory: Mapping[str, Tensor],
        loss_sum: float,
        seen: int,
    ) -> Done:
        """What a client returns, refused if it is not finite."""
        row, index = self._gathered(order, job, back, memory)
        # The sum tells at once; only where it is not finite must every value be looked at.
        bad = not math.isfinite(row.sum()) and not torch.isfinite(row).all()
        if bad and not order.screened:
            if math.isfinite(loss_sum) and torch.isfinite(back.row).all():
                check_values(order, job.client, back)
            raise diverged(job.client, order)
        macs, bytes_needed = self._costs(order, job, seen)
        loss = loss_sum / max(seen, 1)
        gaps = self._gaps(order, job, back) if order.select.measures and job.selection else None
        steps = len(job.steps)
        return Done(row, index, loss, seen, steps, macs, bytes_needed, job.seconds, gaps)

    def _gaps(self, order: Order, job: Job, back: Back) -> tuple[float, float]:
        """‖∇f(w) − ∇f(w_sub)‖ before training (S2 theorem 1), and ‖Δw − Δw_sub‖ after it, had this
        client trained the whole model on the same batches (S2 figure 4.3). What a sub-model does
        not have counts as 0."""
        assert job.selection is not None
        index, trainable = job.selection.index, self.setting.layout.trainable
        mine = index[index < trainable]
        whole = replace(order, select=Uncut(order.select))
        model = job.row[: self.setting.layout.size]
        apart = self._gradient(whole, replace(job, selection=None, start=model))
        apart[mine] -= self._gradient(order, job)
        moved = self.train(whole, job.client, job.row).row[:trainable] - job.row[:trainable]
        moved[mine] -= (back.row.cpu() - job.start)[: len(mine)]
        return float(apart.double().norm()), float(moved.double().norm())

    def _gradient(self, order: Order, job: Job) -> Tensor:
        """The gradient of the rule's objective on all data of a client, as its module trains."""
        s, rule = self.setting, asked.rule_at(order.rule, order.round)
        resident = self.resident(job.selection)
        resident.load(job.start)
        resident.at(None)
        resident.module.train()
        me = self.context(order, job, rule)
        indices = {p: self._indices(job.client, order.data.get(p, p)) for p in rule.parts}
        most = max(len(some) for some in indices.values())
        cuts = max(-(-most // LOOKED_AT_ONCE), 1)
        several = [p for p, at in next(iter(job.steps), {}).items() if at.ndim > 1]
        total = torch.zeros_like(resident.grad)
        for i in range(cuts):
            some = {p: np.array_split(at, cuts)[i] for p, at in indices.items()}
            data = {p: replace(self._train.batch(at), held=job.held) for p, at in some.items()}
            for part in several:  # a single batch of those
                data[part] = replace(data[part], lengths=(len(some[part]),))
            if rule.differentiates:
                self._functional_gradient(resident, rule, data, me)
            else:
                resident.grad.zero_()
                with s.autocast():
                    asked.objective(rule, resident, resident.params, data, me).backward()
            weighed = some[rule.weighs]
            total += resident.grad * (len(weighed) / max(len(indices[rule.weighs]), 1))
        return total.cpu()

    def _gathered(
        self, order: Order, job: Job, back: Back, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The row that goes back, with named values in their sections, and its columns."""
        chosen, layout, sections = job.selection, self.setting.layout, order.sections
        model = back.row.cpu()
        index = None if chosen is None else chosen.index
        given = {**back.keeps, **back.sends}
        check_back(order.rule, job, back)
        if sections is None:
            return model, index
        given |= {key: value for name, value in memory.items()
                  if (key := f"{OPTIMISER}{name}") in job.values}  # fmt: skip
        at = {n: section_columns(sections[n], chosen, layout)[0] for n in given}
        if index is None:
            row = job.row.clone()
            row[: layout.size] = model
            for name, value in given.items():
                row[at[name]] = value.cpu().reshape(-1)
            return row, None
        parts = sorted(given, key=lambda name: sections[name].start)
        columns = torch.cat([index, *(at[name] for name in parts)])
        return torch.cat([model, *(given[name].cpu().reshape(-1) for name in parts)]), columns

    def _costs(self, order: Order, job: Job, seen: int) -> tuple[int, int]:
        """Multiply-accumulates and memory of a client's round."""
        chosen, data = job.selection, self.setting.dataset
        resident = self.resident(chosen)
        shape = None if chosen is None else chosen.shape
        rule = asked.rule_at(order.rule, order.round)
        once, again = seen, 0
        if type(rule).passes is not LocalRule.passes:
            once, again = asked.passes(rule, job.steps)
        macs = once * self._macs[shape]
        if again:
            if shape not in self._second:
                self._second[shape] = second_macs(resident.module, data.shape)
            macs += again * self._second[shape]
        inside = 0  # of the narrower nets, the largest that is in memory beside the client's own
        for width, count in Counter(job.widths).items() if order.rule.narrows else ():
            narrower = self.narrower(order, chosen, width)
            if narrower is not None:
                each, saved = narrower.costs(data.shape)
                macs += seen * count // len(job.steps) * each
                inside = max(inside, saved)
        batch = max(map(_size, job.steps), default=0)
        copies = 2 + sum(name != "count" for name in order.optimiser.values)
        memory = copies * resident.layout.trainable * resident.layout.bytes
        memory += batch * (self._saved[shape] + inside)
        if "data" in order.select.needs:  # it chose from the whole model, or measured its norms
            looked = measured = 0 if chosen is None else chosen.samples
            if order.together or not self.setting.static:
                measured = self._share(order.together) if order.together else 0
            each, passing = self._inference
            macs += (looked + measured) * each
            whole = self.setting.layout.size * self.setting.layout.bytes
            passed = min(max(looked, measured), LOOKED_AT_ONCE) * passing
            if chosen is not None:
                memory = whole + max(memory, passed)
            elif passed:
                memory = max(memory, whole + passed)
        return macs, memory

    @cached_property
    def _inference(self) -> tuple[int, int]:
        """Of one sample's pass through the whole model: multiply-accumulates and bytes."""
        module, shape = self._whole.module, self.setting.dataset.shape
        return forward_macs(module, shape), passing_bytes(module, shape)

    @telling_memory("scoring")
    def score(self, row: Tensor, block: Block) -> Scored:
        """One row, or a client's part of it, on a block of samples."""
        resident, row = self._scored(row, block)
        resident.load(row)
        if self.setting.static:
            most = self.setting.static_samples
            measured_on = self.setting.federation.calibration(block.calibrate, most)
            self._measure(resident, measured_on)
        resident.module.eval()
        source = self.source(block)
        tally = Tally(self.setting.task, len(block.who))
        kept = []
        size = SCORE_BATCH if resident.native is None else BLOCK  # kernels cut it up themselves
        with torch.inference_mode(), self.setting.autocast():
            for at in range(0, len(block.indices), size):
                logits, y = self._look(resident, source, block.indices[at : at + size])
                tally.add(logits, y, block.owner[at : at + size])
                if block.probabilities:
                    kept.append(logits.softmax(-1).double().cpu().numpy())
        return tally.scored(np.concatenate(kept) if kept else None)

    def _scored(self, row: Tensor, block: Block) -> tuple[Resident, Tensor]:
        """The network that is scored, and its row."""
        held = block.held
        if held is None:
            return self._whole, row
        everybody = self.setting.federation.everybody.tolist()
        chosen = self._chosen(held, row, tuple(everybody) if self.setting.shares_norms else ())
        if chosen is None:
            return self._whole, row
        build = chosen.build if chosen.held is None else chosen.held
        return self._on_its_own(chosen.shape, build), row[chosen.index]

    def _settled(self, row: Tensor, together: tuple[int, ...]) -> Tensor:
        """A model with norms measured on data of these clients, once for all who look at it."""
        known = self._known
        if known is None or known[0] != together or not torch.equal(known[1], row):
            self._whole.load(row)
            parts = [self._indices(client, "train") for client in together]
            mixed = stream(self.setting.seed, "static-norm").permutation(np.concatenate(parts))
            self._measure(self._whole, mixed[:_LOOK])
            self._known = known = together, row.clone(), self._whole.read().cpu().clone()
        return known[2]

    def _share(self, together: tuple[int, ...]) -> int:
        """The samples that each of them runs for that."""
        total = sum(self.setting.federation.size(client, "train") for client in together)
        return math.ceil(min(total, _LOOK) / len(together))

    def _on_its_own(self, shape: Hashable, build: Callable[[], nn.Module]) -> Resident:
        """A sub-model that is used and not trained."""
        key = ("held", shape)
        if shape is None or key not in self._residents:
            module = tame_strides(build())
            layout = Layout.of(module, self.setting.extras)
            native = self._native(module, layout)
            self._residents[key] = Resident(module, layout, self.setting.device, native)
        return self._residents[key]

    def _measure(self, resident: Resident, indices: np.ndarray) -> None:
        """Measure the loaded model's norms on these samples of training data."""
        every, native = self.setting.submodels, resident.native
        if native is not None and native.measures(every, SCORE_BATCH):
            native.measure(resident.row, self._train.pictures(indices), every, SCORE_BATCH)
        else:
            settle(resident.module, self._train.batches(indices), every)

    def _asked(
        self, row: Tensor, x: Tensor, shape: Hashable, build: Callable[[], nn.Module] | None
    ) -> Tensor:
        """As `Ask.answers`."""
        resident = self._whole if build is None else self._on_its_own(shape, build)
        resident.load(row)
        native = resident.native
        if native is not None and native.takes(x) and native.measures(True, LOOKED_AT_ONCE):
            native.measure(resident.row, Pictures.of(x), True, LOOKED_AT_ONCE)
            return native.answers(resident.row, x)
        module = settle(resident.module, x.split(LOOKED_AT_ONCE), every=True)
        with torch.no_grad():
            return torch.cat([module(some) for some in x.split(LOOKED_AT_ONCE)])

    def _look(
        self, resident: Resident, source: Source, indices: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The model's outputs for these samples, and their labels."""
        if resident.native is not None:
            pictures, y = source.pictures(indices), source.labels(indices)
            return resident.native.logits(resident.row, pictures), y
        batch = source.batch(indices)
        return resident.module(batch.x).float(), batch.y

    def source(self, block: Block) -> Source:
        return self._test if block.common and len(self._test.y) else self._train

    def _functional_gradient(
        self, resident: Resident, rule: LocalRule, data: Mapping[str, Batch], me: Context
    ) -> Tensor:
        weights = resident.weights.detach().requires_grad_()
        alike = vars(type(rule)).get("alike", False) and not rule.narrows
        as_one = alike and resident.native is not None
        params: Params = resident.as_one(weights) if as_one else resident.layout.tensors(weights)
        if resident.native is None:  # torch's second derivatives are faster channel by channel
            data = {part: replace(batch, x=batch.x.contiguous()) for part, batch in data.items()}
            params = {n: p.contiguous() for n, p in params.items()}
        with self.setting.autocast():
            loss = asked.objective(rule, resident, params, data, me)
        (grad,) = torch.autograd.grad(loss, weights)
        resident.grad.copy_(grad)
        if has_tracked_norm(resident.module):  # its statistics come from the step's last part
            *_, last = data.values()
            with torch.no_grad(), self.setting.autocast():
                resident(resident.params, last.x)
        return loss

    def answers(self, selection: Selection | None, row: Tensor, x: Tensor) -> Tensor:
        """Logits of a trained model, in evaluation mode."""
        resident = self.resident(selection)
        resident.load(row)
        if resident.native is not None:
            return resident.native.answers(resident.row, x)
        module = resident.module.eval()
        return torch.cat([module(some) for some in x.split(SCORE_BATCH)])

    def resident(self, selection: Selection | None) -> Resident:
        if selection is None:
            return self._whole
        if selection.shape not in self._residents:
            module = selection.build()
            self._settle(selection.shape, module, Layout.of(module, self.setting.extras))
        return self._residents[selection.shape]

    def narrower(
        self, order: Order, selection: Selection | None, width: float | None
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
            counts, scale = order.select.narrowed(whole, width)
            self._narrower[key] = Narrower(mine, counts, scale, self._native)
        return self._narrower[key]

    def _settle(self, shape: Hashable, module: nn.Module, layout: Layout) -> Resident:
        data = self.setting.dataset
        tame_strides(module)
        self._macs[shape] = training_macs(module, data.shape)
        self._saved[shape] = saved_bytes(module, data.shape)
        native = self._native(module, layout)
        made = self._residents[shape] = Resident(module, layout, self.setting.device, native)
        if made.native is None and not self.setting.tokens:
            tame_views(made.module, data.shape, self.setting.device)
        return made

    def _native(self, module: nn.Module, layout: Layout) -> Native | str:
        s = self.setting
        return kernels_for(self._kernels, module, layout, s.dataset.shape, s.tokens)

    def _chosen(
        self, held: HeldPart, row: Tensor, together: tuple[int, ...] = ()
    ) -> Selection | None:
        select = held.select
        found = select.choose(self._ask(held, row, together))
        chosen = returned_if_any(select, "choose", found, Selection)
        if chosen is not None:
            returned(select, "choose", chosen.index, Tensor, "as index of its Selection")
        return chosen

    def _ask(self, held: HeldPart, row: Tensor, together: tuple[int, ...]) -> Ask:
        s, needs, client = self.setting, held.select.needs, held.client

        @cache  # a selector may look more than once
        def data(part: str) -> Batch:
            return self._train.batch(self._indices(client, part))

        return Ask(
            round=held.round,
            client=client,
            capacity=float(s.capacities[client]),
            layout=s.layout,
            row=row,
            module=self._whole.module,
            stream=lambda *names: stream(s.seed, *names, held.round, client),
            data=data if "data" in needs else None,
            channels=s.channels,
            strongest=float(s.capacities[: s.federation.n_clients].max()),
            public=self._public if "public" in needs else None,
            last=held.last if "last" in needs else None,
            scores=self._looker if {"data", "public"} & needs else None,
            asked=self._asked,
            settled=partial(self._settled, row, together) if together else None,
        )

    @cached_property
    def _looker(self) -> Looker | None:
        native, channels = self._whole.native, self.setting.channels
        return None if native is None or channels is None else Looker.of(native, channels)

    @cached_property
    def _public(self) -> PublicSet | None:
        found = self.setting.public
        return None if found is None else found.on(self.setting.device)

    @cached_property
    def _public_shelf(self) -> PublicShelf:
        assert self._public is not None
        return PublicShelf(self._public.x)

    def _indices(self, client: int, part: str) -> np.ndarray:
        federation = self.setting.federation
        if not self.setting.pools:
            return federation.indices(client, part)
        if part not in self._pool:
            everyone = range(federation.n_clients)
            self._pool[part] = np.concatenate([federation.indices(c, part) for c in everyone])
        return self._pool[part]


def _held(rule: LocalRule, job: Job) -> Held | None:
    """The classes whose logits the loss sees."""
    if job.held is None or not isinstance(rule, MaskedSGD) or not masks_logits(rule):
        return None
    return Held(job.held.numpy(), rule.mask == "zero")


def _taken(shelf: Shelf | PublicShelf, at: np.ndarray) -> tuple[Pictures, Tensor, np.ndarray]:
    """Batches at these positions, their labels, and where each of them ends."""
    assert isinstance(shelf, Shelf)
    batches = [row[row >= 0] for row in np.atleast_2d(at)]
    return *shelf.pictures(batches), np.array([0, *accumulate(map(len, batches))])


def diverged(client: int, order: Order) -> Diverged:
    return Diverged(
        f"Training diverged: the update of client {client} in round {order.round} holds NaN or "
        f"infinite values (learning rate {order.optimiser.lr:g}, {order.rule}). Lower --lr (and "
        "alpha, where the method has one), bound the gradient with --clip 1, or continue "
        "without such clients: --on-bad skip."
    )


def check_values(order: Order, client: int, back: Back) -> None:
    """Refuse a value beside a sound model that is not finite: the rule made it so, not training."""
    for word, values in (("sent", back.sends), ("kept", back.keeps)):
        for name, value in values.items():
            if not torch.isfinite(value).all():
                what = "NaN" if value.isnan().any() else "infinite values"
                raise Diverged(
                    f"{type(order.rule).__name__}.finish of client {client} {word} '{name}' with "
                    f"{what} in round {order.round}; the trained model is finite. Look at how "
                    f"'{name}' is computed: a division by zero, or a value that grows from round "
                    "to round? Or continue without such clients: --on-bad skip."
                )


def section_columns(
    section: Section, selection: Selection | None, layout: Layout
) -> tuple[Tensor, tuple[int, ...]]:
    """The columns of a section that a client has, and the shape of their values: those of its
    weights only, where the section is like the weights and the client has a sub-model."""
    if selection is None or not section.like_weights:
        return torch.arange(section.start, section.stop), section.shape
    mine = selection.index[selection.index < layout.trainable]
    return section.start + mine, tuple(mine.shape)


def check_back(rule: LocalRule, job: Job, back: Back) -> None:
    """What a rule hands back must be what it declares, in that shape."""
    name = type(rule).__name__
    for word, given, declared in (("keeps", back.keeps, rule.keeps),
                                  ("sends", back.sends, rule.sends)):  # fmt: skip
        if set(given) != set(declared):
            odd = sorted(set(given) ^ set(declared))[0]
            what = "without declaring it" if odd in given else "and did not hand it back"
            verb = word if odd in given else f"declares that it {word}"
            raise FedloomError(
                f"{name} {verb} '{odd}' {what} (client {job.client}): let `{word}` and what "
                "`finish` returns have the same names."
            )
        for key, value in given.items():
            if value.shape != job.values[key].shape:
                raise FedloomError(
                    f"{name} handed back '{key}' of shape {tuple(value.shape)} for client "
                    f"{job.client}; it is declared as {tuple(job.values[key].shape)}."
                )
    if back.row.shape != job.start.shape:
        raise FedloomError(
            f"{name} handed back a model of {back.row.numel():,} values for client {job.client}, "
            f"whose model has {job.start.numel():,}."
        )


def _size(step: Samples) -> int:
    """The samples of a step, or of the largest of its batches."""
    return sum([at.shape[-1] for at in step.values()])


def _seed_torch(seed: int, device: torch.device) -> None:
    """`torch.manual_seed`, which takes half a millisecond to note where it was called for devices
    that are not there; the CPU's own generator takes a microsecond."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
