"""A resident module: its parameters, gradients and buffers are views of flat vectors.

Loading a model is one copy, an SGD step is one fused update, and nothing is packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.layout import Entry, Layout
from fedloom.local.rule import WHOLE, Params
from fedloom.models.counts import saved_bytes, training_macs
from fedloom.models.strided import tame_strides
from fedloom.native.net import Native
from fedloom.select.channels import Channels


class Resident:
    """One module bound to one row. Where there are kernels for it (`native`), they run its passes
    in training; the module is there for everything else."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        device: torch.device,
        native: Native | str = "torch's kernels were chosen",
    ) -> None:
        self.module = module.to(device)
        self.layout = layout
        self.native = native if isinstance(native, Native) else None
        self.why = "" if isinstance(native, Native) else native  # torch runs it
        self.row = torch.empty(layout.size, dtype=layout.dtype, device=device)
        self.weights = self.row[: layout.trainable]
        self.grad = torch.zeros(layout.trainable, dtype=layout.dtype, device=device)
        self._whole: list[tuple[Entry, Tensor]] = []  # integer buffers can't be views
        self._narrower: Narrower | None = None
        self._bind()

    def _bind(self) -> None:
        params = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        self.params: Params = {}
        for e in self.layout.entries:
            if e.kind in ("param", "frozen"):
                params[e.name].data = e.view(self.row)
                if e.kind == "param":
                    params[e.name].grad = e.view(self.grad)
            elif e.kind == "buffer" and e.dtype == self.layout.dtype:
                buffers[e.name].data = e.view(self.row)
            elif e.kind == "buffer":
                self._whole.append((e, buffers[e.name]))
        self._trained = [e for e in self.layout.entries if e.kind == "param"]
        self.params = {e.name: params[e.name] for e in self._trained}
        # All trainable columns as one leaf: gradients through the kernels add up in `grad` as well.
        self._leaf = self.weights.detach().requires_grad_()
        self._leaf.grad = self.grad

    def load(self, row: Tensor) -> None:
        self.row.copy_(row)
        for entry, buffer in self._whole:
            buffer.copy_(entry.view(self.row).round())

    def read(self) -> Tensor:
        """The row as it is now (the resident one: copy it to keep it)."""
        for entry, buffer in self._whole:
            entry.view(self.row).copy_(buffer)
        return self.row

    def as_one(self, weights: Tensor) -> Params:
        """The trainable columns for a rule that treats all parameters alike: the parameters as one
        tensor, and each of its extra columns as one."""
        extras = [e.name.split("/")[0] for e in self.layout.entries if e.kind == "extra"]
        names = [WHOLE, *(f"{extra}/{WHOLE}" for extra in dict.fromkeys(extras))]
        return (
            dict(zip(names, weights.chunk(len(names)), strict=True)) if extras else {WHOLE: weights}
        )

    def at(self, narrower: Narrower | None) -> Resident:
        """The same, with the narrower net that the next steps have."""
        self._narrower = narrower
        return self

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Logits: straight through the module for its own parameters, else functionally."""
        if self.native is not None and self.module.training and can_pass(x):
            mine = params is self.params
            weights = self._leaf if mine else flat(self.layout, params)
            logits = self.native(weights, self.row[self.layout.trainable :], x, update=mine)
            if mine:
                self.count(1)
            return logits
        if params is self.params:
            return self.module(x)
        if WHOLE in params:
            params = {e.name: e.view(params[WHOLE]) for e in self._trained}
        own = {name: value for name, value in params.items() if name in self.params}
        # Norms move their statistics in place, which no derivative may see: they get copies.
        moving = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return functional_call(self.module, {**own, **moving}, (x,))

    def count(self, batches: int) -> None:
        """Norms have seen so many batches in training, by the kernels."""
        assert self.native is not None
        counters = self.native.plan(training=True).counters
        for entry, buffer in self._whole:
            buffer += batches * counters.count(entry.name)  # a norm may be used twice

    @property
    def narrower(self) -> bool:
        return self._narrower is not None

    def narrow(self, params: Params, x: Tensor) -> Tensor:
        assert self._narrower is not None
        own = {name: params[name] for name in self.params}
        return self._narrower(own | dict(self.module.named_buffers()), x)


def can_pass(x: Tensor) -> bool:
    """Whether the kernels can take this batch: they have no gradient of their input, and know
    nothing of functions that `torch.func` transforms."""
    return not x.requires_grad and torch._C._functorch.peek_interpreter_stack() is None


def flat(layout: Layout, tensors: Params) -> Tensor:
    """Tensors by name as the trainable columns of a row, so that gradients reach them; columns that
    a rule adds are 0, as no pass looks at them."""
    parts = (
        [tensors[WHOLE]]
        if WHOLE in tensors
        else [
            (tensors[e.name].movedim(1, -1) if len(e.shape) == 4 else tensors[e.name]).reshape(-1)
            for e in layout.entries
            if e.kind == "param"
        ]
    )
    extra = layout.trainable - sum(p.numel() for p in parts)
    parts += [parts[0].new_zeros(extra)] if extra else []
    return _Joined.apply(*parts) if len(parts) > 1 else parts[0]


class _Joined(torch.autograd.Function):
    """`torch.cat`, whose gradient is cut in one go: where that is differentiated again, torch's own
    would make a row of zeros for each of the pieces."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.numel() for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.split(grad, ctx.sizes)


class Narrower:
    """A narrower net inside a client's own: the first channels of every group."""

    def __init__(
        self,
        channels: Channels,
        counts: Sequence[int],
        scale: float,
        native: Callable[[nn.Module, Layout], Native | str],
    ) -> None:
        self._channels = channels
        self._counts = [min(k, n) for k, n in zip(counts, channels.sizes, strict=True)]
        self.module = tame_strides(channels.build(self._counts, scale))
        self._layout = Layout.of(self.module)
        found = native(self.module, self._layout)
        self._native = found if isinstance(found, Native) else None
        self._costs: tuple[int, int] | None = None

    def costs(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        """Of one sample's training pass: multiply-accumulates, and bytes kept for going back."""
        if self._costs is None:
            self._costs = training_macs(self.module, shape), saved_bytes(self.module, shape)
        return self._costs

    def __call__(self, tensors: Params, x: Tensor) -> Tensor:
        """Logits, from the tensors of the client's net."""
        cut = self._channels.first(self._counts, tensors)
        if self._native is not None and can_pass(x):
            rest = {e.name: cut[e.name] for e in self._layout.entries if e.kind != "param"}
            behind = [t.reshape(-1).to(x.dtype) for t in rest.values()] or [x.new_zeros(0)]
            moving = torch.cat(behind)
            logits = self._native(flat(self._layout, cut), moving, x, update=True)
            parts = moving.split([t.numel() for t in rest.values()]) if rest else ()
            for (name, t), part in zip(rest.items(), parts, strict=True):
                # Statistics are a part of the wide net's, which autograd may have on record though
                # no gradient in training reads them: `data`, so that it does not object.
                if count := self._native.plan(training=True).counters.count(name):
                    t.data += count
                elif t.is_floating_point():
                    t.data.copy_(part.view(t.shape))
            return logits
        return functional_call(self.module.train(), cut, (x,))
