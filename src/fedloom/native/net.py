"""A module run by the kernels: whole SGD steps, gradients, scores, and as a function for autograd.

A `Native` belongs to one module and its layout. It makes a plan for each mode on first use and
memory for the largest batch so far. What it computes is what torch computes, up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedloom.layout import Layout
from fedloom.models.norm import measured_layers, pieces
from fedloom.native.library import SETS, instructions, library, why_not
from fedloom.native.plan import Op, Plan, Unplanned, Value, plan
from fedloom.similarity.activations import without_repeats

_MEMORY = 256 * 2**20  # bytes that passes kept for backpropagation may hold
_MEASURED_ON = 384 * 2**20  # bytes that the activations of a batch may take to measure norms on it
CHUNK = 64  # samples that go through a net together where they do not depend on one another
_FEWER = 16  # and where two maps of so many fit a cache of this size, but not two of a chunk
_CACHE = 2 * 2**20  # bytes


@dataclass(frozen=True)
class Held:
    """The classes whose logits the loss sees, a truth value each. Those of others are taken for 0
    (`as_zero`) or −∞."""

    classes: np.ndarray
    as_zero: bool


@dataclass(frozen=True)
class Pictures:
    """Samples in memory: rows of an array, picked by index, with what to do to them on the way.

    Value j of a row becomes value · scale[j] − shift[j]. `flip` says per picked sample whether it
    is mirrored, `offset` where it is cut out of itself with a border of `crop` raw zeros.
    """

    array: np.ndarray
    at: np.ndarray
    scale: Tensor | None = None
    shift: Tensor | None = None
    flip: np.ndarray | None = None
    offset: np.ndarray | None = None
    crop: int = 0

    def __post_init__(self) -> None:
        assert can_read(self.array)

    def __len__(self) -> int:
        return len(self.at)

    @staticmethod
    def of(x: Tensor) -> Pictures:
        """Normalised images."""
        return Pictures(x.detach().contiguous().numpy(), np.arange(len(x)))

    def picked(self, places: np.ndarray) -> Pictures:
        """Those at these places, as they are stored."""
        return Pictures(self.array, self.at[places], self.scale, self.shift)

    def some(self, start: int, stop: int) -> Pictures:
        flip = None if self.flip is None else self.flip[start:stop]
        offset = None if self.offset is None else self.offset[start:stop]
        return Pictures(
            self.array, self.at[start:stop], self.scale, self.shift, flip, offset, self.crop
        )


def can_read(array: object) -> TypeGuard[np.ndarray]:
    """Whether the kernels can take samples straight from this array."""
    if not isinstance(array, np.ndarray):
        return False
    return array.flags.c_contiguous and array.dtype in (np.uint8, np.float32)


class Update(ctypes.Structure):
    """How weights follow a gradient, where what is remembered of them lies (momentum, or a second
    moment, and the number of steps so far), and what is added to each gradient of `steps`."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first", "second", "count")),
        *((name, ctypes.c_double) for name in (
            "lr", "momentum", "weight_decay", "clip", "beta1", "beta2", "eps",
        )),
        *((name, ctypes.c_void_p) for name in ("to", "push")),
        ("pull", ctypes.c_double),
    ]  # fmt: skip


class Batches(ctypes.Structure):
    """Batches of pictures with their labels, for the kernels."""

    _fields_ = [
        ("images", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "crop", "number")),
        *((name, ctypes.c_void_p) for name in (
            "at", "y", "cut", "scale", "shift", "flip", "offset",
        )),
    ]  # fmt: skip

    @classmethod
    def of(cls, pictures: Pictures, y: Tensor, cuts: np.ndarray) -> Batches:
        """What is given must live as long as what is returned."""
        given = pictures.array
        return cls(
            given.ctypes.data, int(given.dtype == np.uint8), pictures.crop, len(cuts) - 1,
            _data(pictures.at), y.data_ptr(), _data(cuts), _ptr(pictures.scale),
            _ptr(pictures.shift), _data(pictures.flip), _data(pictures.offset),
        )  # fmt: skip


class Program:
    """A plan with memory for batches of some size."""

    def __init__(self, made: Plan, batch: int, number: int) -> None:
        lib = library()
        assert lib is not None
        self.lib, self.plan, self.batch = lib, made, batch
        for which, struct in enumerate((Op, Value, Update, Batches)):
            assert lib.fl_sizes(which) == ctypes.sizeof(struct)
        ops, values = (Op * len(made.ops))(*made.ops), (Value * len(made.values))(*made.values)
        outputs = (ctypes.c_int64 * len(made.outputs))(*made.outputs)
        handle = lib.fl_make(
            number, ops, len(made.ops), values, len(made.values), outputs, len(made.outputs), batch
        )
        if not handle:
            raise MemoryError(f"no memory for the activations of {batch} samples")
        self.handle = handle
        self._holder: weakref.ref[_Pass] | None = None
        self._free = weakref.finalize(self, lib.fl_free, handle)

    @property
    def bytes(self) -> int:
        return self.lib.fl_bytes(self.handle)

    @property
    def holder(self) -> _Pass | None:
        """The pass whose activations are in memory, as long as it may be backpropagated."""
        return None if self._holder is None else self._holder()

    def held_by(self, this: _Pass | None) -> None:
        self._holder = None if this is None else weakref.ref(this)

    @contextlib.contextmanager
    def holding(self, held: Held | None) -> Iterator[None]:
        """Inside, the loss sees only what is held."""
        if held is None:
            yield
            return
        classes = np.ascontiguousarray(held.classes, dtype=np.uint8)
        assert len(classes) == self.plan.classes
        self.lib.fl_hold(self.handle, _data(classes), int(held.as_zero))
        try:
            yield
        finally:
            self.lib.fl_hold(self.handle, 0, 0)

    def load(self, pictures: Pictures) -> None:
        given = pictures.array
        self.lib.fl_load(
            self.handle, given.ctypes.data, int(given.dtype == np.uint8),
            _data(pictures.at), len(pictures), _ptr(pictures.scale), _ptr(pictures.shift),
            _data(pictures.flip), _data(pictures.offset), pictures.crop,
        )  # fmt: skip

    def load_batch(self, x: Tensor) -> None:
        """A batch as the module itself would get it."""
        x = x.detach().contiguous()
        self.lib.fl_load(self.handle, x.data_ptr(), 0, 0, len(x), 0, 0, 0, 0, 0)

    def load_masks(self, masks: list[Tensor]) -> None:
        for (op, _, _), mask in zip(self.plan.masks, masks, strict=True):
            self.lib.fl_mask(self.handle, op, mask.data_ptr())

    def forward(self, row: Tensor, n: int, update: bool) -> Tensor:
        out = torch.empty(len(self.plan.outputs), n, self.plan.classes)
        self.lib.fl_forward(self.handle, row.data_ptr(), int(update), out.data_ptr())
        return self.plan.combined(out)

    def read(self, value: int, to: Tensor) -> None:
        """Copy a value of the last forward pass into `to`: samples × features."""
        self.lib.fl_read(self.handle, value, to.data_ptr(), to.stride(0))


def passing_bytes(made: Plan) -> int:
    """What the values of one sample take where nothing goes back: those of a form make room for one
    another, as in kernels.cpp."""
    number = range(len(made.values))
    root = [v if made.values[v].of < 0 else made.values[v].of for v in number]
    read = {root[v]: i for i, op in enumerate(made.ops) for v in (op.in_, op.in2) if v >= 0}
    kept = {0, *(root[v] for v in made.outputs)}
    free: Counter[tuple[int, ...]] = Counter()
    placed, total = set[int](), 0
    for i, op in [(-1, None), *enumerate(made.ops)]:
        v = 0 if op is None else root[op.out]
        if v not in placed:
            value = made.values[v]
            form = value.c, value.h, value.w, value.pad
            if free[form]:
                free[form] -= 1
            else:
                total += value.c * (value.h + 2 * value.pad) * (value.w + 2 * value.pad)
            placed.add(v)
        for u in placed - kept:
            if read.get(u) == i:
                value = made.values[u]
                free[value.c, value.h, value.w, value.pad] += 1
    return 4 * total


@lru_cache(maxsize=2)  # one takes much memory, and many sub-models would have one each
def _measurer(made: Plan, batch: int, number: int) -> Program:
    return Program(made, batch, number)


def at_once(made: Plan) -> int:
    """How many samples go through a net together in evaluation; results do not depend on it."""
    pair = 2 * 4 * max(v.c * v.h * v.w for v in made.values)
    return _FEWER if _FEWER * pair <= _CACHE < CHUNK * pair else CHUNK


def _data(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Native:
    """One module, run by the kernels."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        shape: tuple[int, int, int],
        number: int | None = None,
    ) -> None:
        number = instructions() if number is None else number
        if number is None:
            raise Unplanned(why_not())
        self.module, self.layout, self.shape, self._number = module, layout, shape, number
        self._plans: dict[bool, Plan] = {}
        self._programs: dict[bool, Program] = {}
        # By whether every norm is measured: the plan, and the bytes of a sample's pass.
        self._measuring: dict[bool, tuple[Plan, int] | None] = {}
        self._passes: list[Program] = []  # of the function for autograd
        for training in (True, False):
            self._plans[training] = self._planned(training)
        if self._plans[False].masks:
            raise Unplanned("it drops units in evaluation too")
        if self._plans[False].coupled:  # they would be others than torch's, which are cut elsewhere
            raise Unplanned("its scores depend on which samples are scored together")

    def _planned(self, training: bool, **how: Any) -> Plan:
        modes = {m: m.training for m in self.module.modules()}
        self.module.train(training)
        try:
            return plan(self.module, self.layout, self.shape, **how)
        finally:
            for m, mode in modes.items():
                m.training = mode

    @property
    def name(self) -> str:
        return SETS[self._number][0]

    def plan(self, training: bool) -> Plan:
        return self._plans[training]

    def program(self, n: int, training: bool) -> Program:
        """With memory for n samples."""
        found = self._programs.get(training)
        if found is None or found.batch < n:
            self._programs.pop(training, None)
            found = Program(self._plans[training], max(n, 1), self._number)
            self._programs[training] = found
        return found

    def program_for(self, this: _Pass, n: int) -> Program:
        """For a pass that may be backpropagated: the program that still holds its activations, a
        free one, a new one or, if that takes too much memory, one taken from another pass."""
        mine = [p for p in self._passes if p.holder is this]
        if mine:
            return mine[0]
        fits = [p for p in self._passes if p.batch >= n]
        free = [p for p in fits if p.holder is None]
        if not free and sum(p.bytes for p in self._passes) < _MEMORY:
            free = [Program(self._plans[True], n, self._number)]
            self._passes += free
        if not free:
            self._passes = [p for p in self._passes if p.holder is not None and p.batch >= n]
            free = self._passes[:1] or [Program(self._plans[True], n, self._number)]
            self._passes = self._passes or free
        free[0].held_by(None)
        return free[0]

    # ---- training

    def gradient(
        self,
        row: Tensor,
        grad: Tensor,
        pictures: Pictures,
        y: Tensor,
        held: Held | None = None,
    ) -> float:
        """Write the gradient of the mean cross-entropy into `grad`; running statistics in `row`
        move. Returns the loss."""
        made, n = self._plans[True], len(pictures)
        self.check(n)
        size = n if made.coupled else min(n, CHUNK)
        program = self.program(size, True)
        loss = 0.0
        for at in range(0, n, size):
            some = pictures.some(at, at + size)
            program.load(some)
            program.load_masks(self.masks(len(some)))
            with program.holding(held):
                loss += program.lib.fl_gradient(
                    program.handle, row.data_ptr(), grad.data_ptr(), y[at : at + size].data_ptr(),
                    len(some) / n, 1, int(at > 0),
                )  # fmt: skip
        return loss

    def steps(
        self,
        row: Tensor,
        grad: Tensor,
        pictures: Pictures,
        y: Tensor,
        cuts: np.ndarray,
        update: Update,
        held: Held | None = None,
    ) -> float:
        """One step for each batch, which are `pictures` between `cuts`; `grad` is then the last
        one's. Returns the sum of the samples' losses."""
        sizes = np.diff(cuts)
        for n in (int(sizes.min()), int(sizes.max())):
            self.check(n)
        program = self.program(int(sizes.max()), True)
        given = pictures.array
        with program.holding(held):
            return program.lib.fl_train(
                program.handle, row.data_ptr(), grad.data_ptr(), self.layout.trainable,
                given.ctypes.data, int(given.dtype == np.uint8), _data(pictures.at), y.data_ptr(),
                _data(cuts), len(sizes), _ptr(pictures.scale), _ptr(pictures.shift),
                _data(pictures.flip), _data(pictures.offset), pictures.crop, ctypes.byref(update),
            )  # fmt: skip

    def can_meta(self, steps: int = 1) -> bool:
        """Whether `meta` can do so many inner steps: samples depend neither on one another nor on
        chance, and what it keeps of the steps is not too much."""
        made = self._plans[True]
        plain = not (made.coupled or made.masks) and len(made.outputs) == 1
        return plain and 8 * steps * self.layout.size <= _MEMORY

    def meta(
        self,
        row: Tensor,
        grad: Tensor,
        support: tuple[Pictures, Tensor, np.ndarray],
        query: tuple[Pictures, Tensor, np.ndarray],
        rate: float | None,
        second_order: bool,
    ) -> float:
        """Write the gradient of a step of meta-learning into `grad`: of the mean loss of the query
        batches (pictures, labels, cuts) after a step on each support batch. Without a `rate`, the
        trainable columns are weights and, behind them, their rates. Returns that mean loss."""
        inner = len(support[2]) - 1
        largest = max(int(np.diff(cuts).max()) for *_, cuts in (support, query))
        program = self.program(max(largest, CHUNK), True)
        n = self.layout.trainable // (2 if rate is None else 1)
        rows, grads, turn = (
            torch.empty(inner, self.layout.size),
            torch.zeros(inner, n),
            torch.zeros(2, n),
        )
        grad.zero_()
        loss = program.lib.fl_meta(
            program.handle, row.data_ptr(), self.layout.size, n,
            row[n:].data_ptr() if rate is None else 0, rate or 0.0, int(second_order),
            ctypes.byref(Batches.of(*support)), ctypes.byref(Batches.of(*query)),
            rows.data_ptr(), grads.data_ptr(), turn.data_ptr(),
            grad.data_ptr(), grad[n:].data_ptr() if rate is None else 0,
        )  # fmt: skip
        if loss < 0:
            raise MemoryError("no memory for second derivatives")
        return loss

    def update(self, weights: Tensor, grad: Tensor, update: Update) -> None:
        """Let weights follow a gradient."""
        lib = library()
        assert lib is not None
        grad = grad.contiguous()
        lib.fl_update(
            self._number, weights.data_ptr(), grad.data_ptr(), len(weights), ctypes.byref(update)
        )

    def check(self, n: int) -> None:
        """Refuse what batch norm can't be computed on, in torch's words."""
        made = self._plans[True]
        if made.coupled and n * made.least < 2:
            raise ValueError("Expected more than 1 value per channel when training")

    def masks(self, n: int) -> list[Tensor]:
        """What dropout leaves of n samples, drawn as torch draws it."""
        return [
            nn.functional.dropout(torch.ones(n, *shape), chance)
            for _, chance, shape in self._plans[True].masks
        ]

    # ---- looking

    def logits(self, row: Tensor, pictures: Pictures) -> Tensor:
        """The model's outputs in evaluation mode."""
        made, n, given = self._plans[False], len(pictures), pictures.array
        program = self.program(min(n, at_once(made)), False)
        out = torch.empty(len(made.outputs), n, made.classes)
        program.lib.fl_look(
            program.handle, row.data_ptr(), given.ctypes.data, int(given.dtype == np.uint8),
            _data(pictures.at), n, _ptr(pictures.scale), _ptr(pictures.shift),
            _data(pictures.flip), _data(pictures.offset), pictures.crop, out.data_ptr(),
        )  # fmt: skip
        return made.combined(out)

    def answers(self, row: Tensor, x: Tensor) -> Tensor:
        """The same, of normalised images."""
        return self.logits(row, Pictures.of(x))

    def measures(self, every: bool, size: int) -> bool:
        """Whether `measure` can do what `settle` does, with this many images at a time."""
        if every not in self._measuring:
            names = measured_layers(self.module, every)
            self._measuring[every] = None
            with contextlib.suppress(Unplanned):
                # Without a norm to measure, any plan will do.
                made = self._planned(training=False, measured=names)
                self._measuring[every] = made, passing_bytes(made) if names else 0
        found = self._measuring[every]
        return found is not None and found[1] * (size + 1) <= _MEASURED_ON

    def measure(self, row: Tensor, pictures: Pictures, every: bool, size: int) -> None:
        """Write the statistics of static (or `every` tracked) norms on these images into `row`, as
        `settle` has them: means over passes of `size` images."""
        found_plan = self._measuring[every]
        assert found_plan is not None
        made = found_plan[0]
        norms = [op for op in made.ops if op.batch == 1 and op.mean >= 0]
        cut = pieces(len(pictures), size)
        if not cut or not norms:
            return
        columns = torch.cat([
            torch.arange(start, start + made.values[op.out].c)
            for op in norms for start in (op.mean, op.var)
        ])  # fmt: skip
        found = torch.zeros(len(columns), dtype=torch.float64)
        program = _measurer(made, size + 1, self._number)
        for at in cut:
            program.load(pictures.picked(at))
            row[columns] = 0.0
            program.lib.fl_forward(program.handle, row.data_ptr(), 1, 0)
            found += row[columns].double() / len(cut)
        row[columns] = found.to(row.dtype)

    @cached_property
    def _watching(self) -> Program:
        made = self._planned(training=False, watching=True)
        return Program(made, at_once(made), self._number)

    def takes(self, x: Tensor, y: Tensor | None = None) -> bool:
        """Whether these are images, and labels, that the kernels can take: they do not look."""
        images = x.dtype == torch.float32 and tuple(x.shape[1:]) == tuple(self.shape) and len(x) > 0
        if y is None or not images:
            return images
        classes = self._plans[False].classes
        whole = y.dtype == torch.int64 and y.shape == x.shape[:1]
        return whole and bool(((y >= 0) & (y < classes)).all())

    def has(self, layers: Sequence[str] | None) -> bool:
        """Whether the kernels have the activations of these layers."""
        return layers is None or set(layers) <= set(self._watching.plan.activations)

    def activations(
        self, row: Tensor, x: Tensor, layers: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """What `fedloom.similarity.activations` gives for convolutions and linear layers, of
        normalised images; `Unplanned` if it has any that the kernels do not have."""
        program = self._watching
        known, values = program.plan.activations, program.plan.values
        if layers is None:
            distinct = without_repeats({n: [values[v] for v in at] for n, at in known.items()})
            layers = tuple(distinct)
        sizes = {name: [values[v].c * values[v].h * values[v].w for v in known[name]]
                 for name in layers}  # fmt: skip
        out = {name: torch.empty(len(x), sum(sizes[name])) for name in layers}
        size = program.batch
        for start in range(0, len(x), size):
            some = x[start : start + size]
            program.load_batch(some)
            program.forward(row, len(some), False)
            for name in layers:
                columns = out[name][start : start + size].split(sizes[name], dim=1)
                for value, to in zip(known[name], columns, strict=True):
                    program.read(value, to)
        return out

    @cached_property
    def _looking(self) -> Program:
        made = self._planned(training=False, watching=True, before_pools=True)
        return Program(made, at_once(made), self._number)

    @property
    def bends(self) -> tuple[tuple[str, int], ...]:
        """The non-linearities of a pass in their order, with the values that they give before any
        pooling; `Unplanned` if the kernels do not have them all."""
        return self._looking.plan.bends

    def value(self, number: int) -> Value:
        """The shape of one of those values."""
        return self._looking.plan.values[number]

    def channel_means(self, row: Tensor, x: Tensor, values: Sequence[int]) -> list[np.ndarray]:
        """The mean over samples and positions of every channel of these values, in evaluation mode,
        of normalised images."""
        program = self._looking
        sums = [np.zeros(self.value(v).c) for v in values]
        for some in x.split(program.batch):
            program.load_batch(some)
            program.lib.fl_forward(program.handle, row.data_ptr(), 0, 0)
            for v, total in zip(values, sums, strict=True):
                program.lib.fl_add_up(program.handle, v, total.ctypes.data)
        shapes = [self.value(v) for v in values]
        return [total / max(len(x) * s.h * s.w, 1) for total, s in zip(sums, shapes, strict=True)]

    def summed_gradients(
        self, row: Tensor, x: Tensor, y: Tensor, values: Sequence[int]
    ) -> list[np.ndarray]:
        """Σ over samples of the gradient of the mean cross-entropy at these values, channels ×
        positions, in evaluation mode, of normalised images."""
        program = self._looking
        shapes = [self.value(v) for v in values]
        sums = [np.zeros((s.c, s.h * s.w)) for s in shapes]
        grad = torch.empty(self.layout.trainable)
        try:
            for v, total in zip(values, sums, strict=True):
                if not program.lib.fl_watch(program.handle, v, total.ctypes.data):
                    raise Unplanned("nothing before an activation is learnt")
            for some, labels in zip(x.split(program.batch), y.split(program.batch), strict=True):
                program.load_batch(some)
                labels = labels.contiguous()
                program.lib.fl_gradient(
                    program.handle, row.data_ptr(), grad.data_ptr(), labels.data_ptr(),
                    len(some) / len(x), 0, 0,
                )  # fmt: skip
        finally:
            for v in values:
                program.lib.fl_watch(program.handle, v, 0)
        return sums

    # ---- as a function of weights that autograd can go through, twice

    def __call__(self, weights: Tensor, rest: Tensor, x: Tensor, update: bool = False) -> Tensor:
        """Logits in training mode; `rest` are the columns behind the trainable ones. With `update`,
        running statistics in it move."""
        self.check(len(x))
        return _Forward.apply(weights, x, _Pass(self, rest, self.masks(len(x)), update))


@dataclass(eq=False)
class _Pass:
    """One pass of a batch through a net: what is needed to go back, or to do it again."""

    native: Native
    rest: Tensor
    masks: list[Tensor]
    update: bool

    def row(self, weights: Tensor) -> Tensor:
        return torch.cat([weights, self.rest]) if self.rest.numel() else weights

    def run(self, weights: Tensor, x: Tensor) -> Tensor:
        """Forward; afterwards a program's memory holds this pass."""
        program = self.native.program_for(self, len(x))
        program.load_batch(x)
        program.load_masks(self.masks)
        row = self.row(weights.detach().contiguous())
        out = program.forward(row, len(x), self.update)
        if self.update and self.rest.numel():
            self.rest.copy_(row[weights.numel() :])
        self.update = False
        program.held_by(self)
        return out

    def ready(self, weights: Tensor, x: Tensor) -> Program:
        """A program with this pass in its memory."""
        program = self.native.program_for(self, len(x))
        if program.holder is not self:
            self.run(weights, x)
            program = self.native.program_for(self, len(x))
        return program


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, x: Tensor, this: _Pass) -> Tensor:
        ctx.this = this
        ctx.save_for_backward(weights, x)
        return this.run(weights, x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        weights, x = ctx.saved_tensors
        return _Backward.apply(weights, d, x, ctx.this), None, None


class _Backward(torch.autograd.Function):
    """d(d · outputs)/d(weights), which can be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, d: Tensor, x: Tensor, this: _Pass) -> Tensor:
        ctx.this = this
        ctx.save_for_backward(weights, d, x)
        program = this.ready(weights, x)
        grad = torch.zeros(weights.numel())
        row = this.row(weights.detach().contiguous())
        given = d.contiguous()
        program.lib.fl_backward(
            program.handle, row.data_ptr(), grad.data_ptr(), given.data_ptr(), 0
        )
        return grad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        weights, d, x = ctx.saved_tensors
        this = ctx.this
        program = this.ready(weights, x)
        row = this.row(weights.detach().contiguous())
        direction = torch.cat([v, torch.zeros_like(this.rest)]) if this.rest.numel() else v
        direction, given = direction.contiguous(), d.contiguous()
        grad, out = torch.zeros(weights.numel()), torch.empty_like(given)
        if not program.lib.fl_along(
            program.handle, row.data_ptr(), direction.data_ptr(), given.data_ptr(),
            out.data_ptr(), grad.data_ptr(),
        ):  # fmt: skip
            raise MemoryError("no memory for second derivatives")
        return grad, out, None, None
