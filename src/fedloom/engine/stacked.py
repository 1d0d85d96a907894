"""The stacked engine: many clients at once, as one matrix of rows.

A local rule is written for one client; `torch.func.vmap` runs it on a stack of them. Clients are
sorted by their number of steps, so that those still training are a prefix of the stack, and
batches are padded and masked (or, under batch norm, where a padded sample would count, stacked
with those of their size only). For GPUs, and for models of linear layers on CPUs without kernels
of our own; all others are better served by processes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.engine import asked
from fedloom.engine.base import (
    Block,
    Done,
    Lasts,
    OneProcess,
    Order,
    Scored,
    Setting,
    Tally,
    same_row,
)
from fedloom.engine.batches import Shelf
from fedloom.engine.resident import Narrower, Resident
from fedloom.engine.worker import Job, Worker
from fedloom.errors import FedloomError, telling_memory
from fedloom.local.rule import Back, Batch, Context, LocalRule, Params, counted
from fedloom.models.norm import StaticBatchNorm2d, has_batch_norm, has_tracked_norm
from fedloom.tasks import Task

_AT_ONCE = 2**26  # values of the stack of models trained together (256 MB)
_STEP = 2**21  # multiplications of a stack's step below which its overhead shows
_LEAST = 4  # clients that are stacked at least, where there are enough
_SMALL = 2**20  # parameters up to which `auto` stacks convolutions on a GPU
_CONVOLVES = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, StaticBatchNorm2d)
_NOTHING = np.empty(0, dtype=np.int64)
_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.RReLU)

#: images, labels, and weights of the samples (None: all count), a client each
Stacked3 = tuple[Tensor, Tensor, Tensor | None]
#: the same by data part, with the classes that each client holds and which of the public images
#: these are (None: not needed)
Stack = Mapping[str, tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]]
#: whole rows, data, contexts, where the gradients go, the narrower net of the step → losses
Gradient = Callable[[Tensor, Stack, Context, Tensor, Narrower | None], Tensor]


def can_stack(module: nn.Module) -> str | None:
    """Why a model can't be stacked; None if it can."""
    for name, layer in module.named_modules():
        if isinstance(layer, _RANDOM):
            return f"'{name}' ({type(layer).__name__}) draws random numbers of its own"
    return None


def check_stackable(module: nn.Module) -> None:
    reason = can_stack(module)
    if reason is not None:
        raise FedloomError(
            f"This model can't be stacked: {reason}. Use --engine serial or processes."
        )


def stacks_well(module: nn.Module, device: torch.device) -> bool:
    """Whether a stack is what `auto` takes. Linear layers are stacked everywhere. On a GPU so are
    convolutions, which become one grouped convolution, as long as the model is too small to keep a
    GPU busy alone; norms that track statistics do not go with all rules in a stack, so they stay
    out. Models of other layers may turn out not to be stackable."""
    if can_stack(module) is not None:
        return False
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    if all(isinstance(m, nn.Linear) for m in owners):
        return True
    small = sum(p.numel() for p in module.parameters()) <= _SMALL
    known = all(isinstance(m, _CONVOLVES) for m in owners) and not has_tracked_norm(module)
    return device.type != "cpu" and small and known


class Stacked(OneProcess):
    """Trains and scores many clients in one go."""

    stacks = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._worker = Worker(setting, stacks=True)
        self._alone = False  # the model has a layer that only `_each_alone` can stack

    @staticmethod
    def cut(setting: Setting, sizes: Sequence[float], samples: float) -> list[list[int]]:
        """Even shares, an even number of them: as many as leave every step of a stack enough to do.
        A GPU takes all at once."""
        if setting.device.type != "cpu":
            return [list(range(len(sizes)))]
        each = max(round(_STEP / (setting.layout.trainable * max(samples, 1))), _LEAST)
        shares = min(2 * max(len(sizes) // (2 * each), 1), len(sizes))
        out: list[list[int]] = [[] for _ in range(shares)]
        order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        for turn, i in enumerate(order):  # there and back, so that the shares are even
            at = turn % (2 * shares)
            out[min(at, 2 * shares - 1 - at)].append(i)
        return out

    def train_job(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        with telling_memory(f"training {len(clients)} clients at once (--engine serial does less)"):
            return self._train_job(order, clients, rows, lasts)

    def _train_job(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts
    ) -> list[Done]:
        given = zip(clients, rows, lasts or [None] * len(clients), strict=True)
        jobs = [self._worker.prepare(order, int(c), row, last) for c, row, last in given]
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for i, job in enumerate(jobs):
            groups[None if job.selection is None else job.selection.shape].append(i)
        done: dict[int, Done] = {}
        for members in groups.values():
            members.sort(key=lambda i: (-len(jobs[i].steps), i))
            most = max(_AT_ONCE // jobs[members[0]].start.numel(), 1)
            for at in range(0, len(members), most):
                some = members[at : at + most]
                results = self._train_stack(order, [jobs[i] for i in some])
                done.update(zip(some, results, strict=True))
        return [done[i] for i in range(len(jobs))]

    @telling_memory("scoring")
    def score_job(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        alone = same_row(rows) or self.setting.static
        alone = alone or any(b.probabilities or b.held is not None for b in blocks)
        if alone:
            return [self._worker.score(rows[block.row], block) for block in blocks]
        most = max(_AT_ONCE // rows.shape[1], 1)
        return [
            scored
            for at in range(0, len(blocks), most)
            for scored in self._score_stack(rows, blocks[at : at + most])
        ]

    def _train_stack(self, order: Order, jobs: list[Job]) -> list[Done]:
        """Train clients whose models have one shape, sorted by their number of steps."""
        started = time.perf_counter()
        rule, optimiser = asked.rule_at(order.rule, order.round), order.optimiser
        device = self.setting.device
        resident = self._worker.resident(jobs[0].selection)
        if rule.differentiates and has_tracked_norm(resident.module):
            raise FedloomError(
                f"{type(rule).__name__} takes derivatives through passes that move batch-norm "
                "statistics, which can't be stacked. Use --engine serial or processes, or another "
                "norm (--set model_options.norm=group)."
            )
        moved = resident.layout.trainable
        rows = torch.stack([job.start for job in jobs]).to(device)
        gradient = self._gradient(rule, resident)
        reader = _Reader(jobs, rule.parts)
        lengths = np.array([len(job.steps) for job in jobs])
        me = self._contexts(order, rule, jobs, rows.clone(), moved)
        grad = torch.zeros_like(rows[:, :moved])
        memory = self._worker.optimiser_memory(order, jobs, rows[:, :moved])
        losses, seen = torch.zeros(len(jobs), device=device), np.zeros(len(jobs), dtype=np.int64)
        pads = not has_batch_norm(resident.module) and not rule.narrows
        for step in range(int(lengths.max(initial=0))):
            active = int((lengths > step).sum())
            weights = rows[:active, :moved]
            sizes = reader.sizes(step, active)
            with torch.no_grad(), self.setting.autocast():
                if pads:
                    data = reader.batch(step, range(active))
                    loss = gradient(rows[:active], data, _some(me, active), grad[:active], None)
                else:
                    loss = torch.zeros(active, device=device)
                    for some in reader.alike(step, active):
                        mine, found, first = rows[some], grad[some], jobs[some[0]]
                        narrow = self._worker.narrower(order, first.selection, first.widths[step])
                        data = reader.batch(step, some)
                        loss[some] = gradient(mine, data, _some(me, some), found, narrow)
                        rows[some], grad[some] = mine, found  # batch norm moves its statistics
            with torch.no_grad():
                bent = asked.direction(rule, grad[:active], weights, _some(me, active))
                if rule.hands_back == "weights":
                    past = {name: value[:active] for name, value in memory.items()}
                    optimiser.step(weights, bent, past)
                losses[:active] += loss * torch.from_numpy(sizes).to(device)
            seen[:active] += sizes
        each = (time.perf_counter() - started) / len(jobs)
        out = []
        for i, job in enumerate(jobs):
            back = self._finished(order, job, rule, rows[i], grad[i])
            past = {name: value[i] for name, value in memory.items()}
            job.seconds["train"] = each
            done = self._worker.hand_back(order, job, back, past, float(losses[i]), int(seen[i]))
            out.append(done)
        return out

    def _finished(self, order: Order, job: Job, rule: LocalRule, row: Tensor, grad: Tensor) -> Back:
        if type(rule).finish is LocalRule.finish:
            return Back(row)
        me = self._worker.context(order, job, rule)
        me = replace(me, logits=partial(self._worker.answers, job.selection, row))
        with torch.no_grad():
            return asked.finish(rule, me, row, grad)

    def _contexts(
        self, order: Order, rule: LocalRule, jobs: list[Job], starts: Tensor, moved: int
    ) -> Context:
        """The contexts of all, as one with a first axis of clients."""
        first = self._worker.context(order, jobs[0], rule)
        values = {
            name: torch.stack([job.values[name] for job in jobs]).to(starts.device)
            for name in (*rule.told, *rule.keeps)
        }
        steps = torch.tensor([[float(len(job.steps))] for job in jobs], device=starts.device)
        return replace(
            first,
            start=starts[:, :moved],
            row=starts,
            steps=steps,
            told={name: values[name] for name in rule.told},
            kept={name: values[name] for name in rule.keeps},
        )

    def _gradient(self, rule: LocalRule, resident: Resident) -> Gradient:
        """Gradients of a stack, by `vmap`."""
        layout, task = resident.layout, self.setting.task
        buffers = [e for e in layout.entries if e.kind == "buffer"]

        def one(
            narrower: Narrower | None,
            me: Context,
            weights: Tensor,
            row: Tensor,
            data: Stack,
            seen: Mapping[str, Any],
        ) -> tuple[Tensor, list[Tensor]]:
            rest = layout.views(row, ("frozen",))
            # Copies, of the types that the module has: its norms may update them in place.
            moving = {e.name: _own(e.view(row), e.dtype) for e in buffers}

            net = _Net(resident, {**rest, **moving}, narrower)
            batches = {part: _weighed(task, *values) for part, values in data.items()}
            # Under vmap some layers can't take channels-last kernels.
            params = {name: p.contiguous() for name, p in layout.tensors(weights).items()}
            loss = asked.objective(rule, net, params, batches, replace(me, **seen))
            return loss, [moving[e.name] for e in buffers]

        def many(
            rows: Tensor, data: Stack, me: Context, out: Tensor, narrower: Narrower | None
        ) -> Tensor:
            resident.module.train()
            axes = {part: tuple(None if v is None else 0 for v in vs) for part, vs in data.items()}
            seen = {name: getattr(me, name) for name in ("start", "row", "steps", "told", "kept")}
            stacks = partial(vmap, in_dims=(0, 0, axes, 0))
            given = (partial(one, narrower, me), rows[:, : layout.trainable], rows, data, seen)
            with _told():
                grads, losses, moved = self._differentiate(rule, stacks, *given)
            out.copy_(grads)
            for e, values in zip(buffers, moved, strict=True):
                e.view(rows).copy_(values)
            return losses

        return many

    def _differentiate(
        self, rule: LocalRule, stacks: Callable[..., Any], *given: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if not (rule.differentiates or self._alone):
            try:
                return _all_at_once(stacks, *given)
            except RuntimeError as e:
                if "Batching rule" not in str(e):
                    raise
                self._alone = True  # such as nn.GRU
        return _each_alone(stacks, *given)

    def _score_stack(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        """Blocks of different rows, each on its own model, in one go."""
        worker, task = self._worker, self.setting.task
        resident = worker.resident(None)
        resident.module.eval()
        layout, device = resident.layout, self.setting.device
        models = rows[[block.row for block in blocks]].to(device)
        views = layout.views(models, ("param", "frozen", "buffer"))
        state = {name: value.contiguous() for name, value in views.items()}

        def forward(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(resident.module, tensors, (x,))

        size = max(len(block.indices) for block in blocks)
        out = [Tally(task, len(block.who)) for block in blocks]
        for at in range(0, size, 256):
            parts = [worker.source(b).batch(b.indices[at : at + 256]) for b in blocks]
            x, y, _ = _pad(parts)
            with torch.inference_mode(), self.setting.autocast(), _told():
                logits = vmap(forward)(state, x).float()
            for i, (block, part) in enumerate(zip(blocks, parts, strict=True)):
                n = len(part.y)
                if n:
                    out[i].add(logits[i, :n], y[i, :n], block.owner[at : at + 256])
        return [tally.scored() for tally in out]


def _all_at_once(
    stacks: Callable[..., Any], one: Callable[..., Any], weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients, losses and what moved, with the derivatives of all clients taken in one go: a loss
    depends on its own client's weights only. So `torch.func.grad` is not needed, whose first call
    imports a compiler, sympy and much else: a second of computing, ten if the disk is slow."""
    with torch.enable_grad():
        weights = weights.detach().requires_grad_()
        losses, moved = stacks(one)(weights, *rest)
        (grads,) = torch.autograd.grad(losses.sum(), weights)
    return grads, losses.detach(), moved


def _each_alone(
    stacks: Callable[..., Any], one: Callable[..., Any], weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same for objectives that take derivatives themselves."""
    grads, (losses, moved) = stacks(grad_and_value(one, has_aux=True))(weights, *rest)
    return grads, losses, moved


def _weighed(
    task: Task,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    held: Tensor | None,
    at: Tensor | None,
) -> Batch:
    """A batch whose samples have weights: rules have one way to a loss under `vmap`."""
    samples = y.shape[: y.dim() - task.dims]
    if weight is None:
        weight = torch.ones(samples, device=x.device)
    return Batch(x, y, weight, held, at, task=task)


@dataclass(frozen=True)
class _Net:
    """One client's model under `vmap`; `rest` is what no gradient reaches."""

    resident: Resident
    rest: Params
    inner: Narrower | None

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return functional_call(self.resident.module, self._tensors(params), (x,))

    @property
    def narrower(self) -> bool:
        return self.inner is not None

    def narrow(self, params: Params, x: Tensor) -> Tensor:
        assert self.inner is not None
        return self.inner(self._tensors(params), x)

    def _tensors(self, params: Params) -> dict[str, Tensor]:
        own = {name: p for name, p in params.items() if name in self.resident.params}
        return {**own, **self.rest}


def _some(me: Context, which: int | list[int]) -> Context:
    """The contexts of some clients: the first so many, or those at these positions."""
    at = slice(which) if isinstance(which, int) else which
    assert isinstance(me.steps, Tensor)
    return replace(
        me,
        start=me.start[at],
        row=me.row[at],
        steps=me.steps[at],
        told={name: value[at] for name, value in me.told.items()},
        kept={name: value[at] for name, value in me.kept.items()},
    )


@contextmanager
def _told() -> Iterator[None]:
    """What `vmap` can't do with a model, as a sentence."""
    try:
        yield
    except RuntimeError as e:
        if "Batching rule" not in str(e) and "vmap" not in str(e):
            raise
        reason = str(e).splitlines()[0]
        raise FedloomError(
            f"This model can't be stacked: {reason} Use --engine serial or processes."
        ) from None


def _own(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of another type; counts that were averaged are rounded, as `Resident` does."""
    return values.clone() if dtype == values.dtype else values.round().to(dtype)


class _Reader:
    """Stacks the next batch of every active client, padded to the longest.

    Clients whose images are in memory are read from one tensor with one look-up.
    """

    def __init__(self, jobs: list[Job], parts: Sequence[str]) -> None:
        self._jobs = jobs
        self._flat: dict[str, tuple[Tensor, Tensor]] = {}
        self._at: dict[str, list[list[np.ndarray]]] = {}  # by client and step: where in these
        for part in parts:
            wholes = [job.shelves[part].whole for job in jobs]
            ready = [w for w in wholes if w is not None]
            if len(ready) == len(jobs):
                first = np.cumsum([0, *(len(y) for _, y in ready[:-1])])
                self._flat[part] = (
                    torch.cat([x for x, _ in ready]),
                    torch.cat([y for _, y in ready]),
                )
                self._at[part] = [
                    [_behind(step[part], at) if part in step else _NOTHING for step in job.steps]
                    for job, at in zip(jobs, first, strict=True)
                ]

    def sizes(self, step: int, active: int) -> np.ndarray:
        """The number of samples that each client has in this step."""
        return np.array([counted(job.steps[step]) for job in self._jobs[:active]], dtype=np.int64)

    def alike(self, step: int, active: int) -> list[list[int]]:
        """The active clients in groups whose batches and narrower nets are of one size."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for i, job in enumerate(self._jobs[:active]):
            shapes = tuple((at >= 0).sum(-1).tolist() for at in job.steps[step].values())
            groups[repr(shapes), job.widths[step]].append(i)
        return list(groups.values())

    def batch(self, step: int, who: Sequence[int]) -> Stack:
        """The stack of a step for some clients."""
        jobs = [self._jobs[i] for i in who]
        known = [job.held for job in jobs if job.held is not None]
        held = torch.stack(known) if known else None
        out: dict[str, Stacked3] = {}
        at: dict[str, Tensor] = {}
        for part in jobs[0].steps[step]:
            if part in self._flat:
                out[part] = self._look_up(part, [self._at[part][i][step] for i in who])
            else:
                positions = [job.steps[step][part] for job in jobs]
                batches = [
                    job.shelves[part].batch(p) for job, p in zip(jobs, positions, strict=True)
                ]
                out[part] = _pad(batches)
                if batches[0].at is not None:  # of the public images all have as many
                    at[part] = torch.stack([b.at for b in batches if b.at is not None])
        return {part: (*values, held, at.get(part)) for part, values in out.items()}

    def _look_up(self, part: str, positions: list[np.ndarray]) -> Stacked3:
        x, y = self._flat[part]
        shape, real = _common([p >= 0 for p in positions])
        index = np.empty((len(positions), *shape), dtype=np.int64)
        for i, p in enumerate(positions):
            if real is not None:
                index[i] = p.flat[0]
            index[i][_corner(p.shape)] = np.where(p >= 0, p, p.flat[0])
        flat = torch.from_numpy(index.reshape(-1)).to(x.device)
        shelf = self._jobs[0].shelves[part]
        assert isinstance(shelf, Shelf)  # public images are not looked up here
        images = shelf.source.normalise(x.index_select(0, flat))
        weight = None if real is None else real.to(x.device)
        labels = y.index_select(0, flat).unflatten(0, index.shape)
        return images.unflatten(0, index.shape), labels, weight


def _pad(batches: Sequence[Batch]) -> Stacked3:
    """Batches of different sizes as one stack, with weights where some are shorter."""
    masks = [_there(batch) for batch in batches]
    shape, real = _common(masks)
    first = batches[0]
    x = first.x.new_zeros(len(batches), *shape, *first.x.shape[1:])
    y = first.y.new_zeros(len(batches), *shape, *first.y.shape[1:])
    for i, (batch, there) in enumerate(zip(batches, masks, strict=True)):
        at = tuple(torch.from_numpy(each).to(x.device) for each in np.nonzero(there))
        x[i][at], y[i][at] = batch.x, batch.y
    return x, y, None if real is None else real.to(x.device)


def _there(batch: Batch) -> np.ndarray:
    """Where a batch, or each of several, has samples, if shorter ones are padded."""
    if batch.lengths is None:
        return np.ones(len(batch.y), bool)
    return np.arange(max(batch.lengths)) < np.array(batch.lengths)[:, None]


def _common(masks: Sequence[np.ndarray]) -> tuple[tuple[int, ...], Tensor | None]:
    """The least shape that holds all of these; and, where they differ or have gaps, 1 for what is
    really there, 0 for padding."""
    least = tuple(map(max, zip(*(mask.shape for mask in masks), strict=True)))
    if all(mask.shape == least and mask.all() for mask in masks):
        return least, None
    real = torch.zeros(len(masks), *least)
    for i, mask in enumerate(masks):
        real[i][_corner(mask.shape)] = torch.from_numpy(mask).float()
    return least, real


def _behind(positions: np.ndarray, start: int) -> np.ndarray:
    """The same positions behind `start` others; -1 stays what it is."""
    return np.where(positions >= 0, positions + start, -1)


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)
