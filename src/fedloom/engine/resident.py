"""A resident module: its parameters, gradients and buffers are views of flat vectors.

Loading a model is one copy, an SGD step is one fused update, and nothing is packed or unpacked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.layout import Entry, Layout
from fedloom.local.rule import Params


class Resident:
    """One module bound to one row."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = module.to(device)
        self.layout = layout
        self.row = torch.empty(layout.size, dtype=layout.dtype, device=device)
        self.weights = self.row[: layout.trainable]
        self.grad = torch.zeros(layout.trainable, dtype=layout.dtype, device=device)
        self._whole: list[tuple[Entry, Tensor]] = []  # integer buffers can't be views
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
        self.params = {e.name: params[e.name] for e in self.layout.entries if e.kind == "param"}

    def load(self, row: Tensor) -> None:
        self.row.copy_(row)
        for entry, buffer in self._whole:
            buffer.copy_(entry.view(self.row).round())

    def read(self) -> Tensor:
        """The row as it is now (the resident one: copy it to keep it)."""
        for entry, buffer in self._whole:
            entry.view(self.row).copy_(buffer)
        return self.row

    def net(self, params: Params, x: Tensor) -> Tensor:
        """Logits: straight through the module for its own parameters, else functionally."""
        if params is self.params:
            return self.module(x)
        own = {name: value for name, value in params.items() if name in self.params}
        # Norms move their statistics in place, which no derivative may see: they get copies.
        moving = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return functional_call(self.module, {**own, **moving}, (x,))
