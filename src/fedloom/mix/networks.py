"""Rows as networks, for mixes that run what was sent on the public set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.models.norm import settle


@dataclass(frozen=True)
class Networks:
    """A scratch module (on the run's device) that is filled with one row after the other."""

    module: nn.Module
    layout: Layout

    def of(self, rows: Tensor, x: Tensor) -> Loaded:
        """Rows as networks, which can be walked through again; each is gone when the next comes.
        Norms whose statistics are measured before use are measured on `x`."""
        return Loaded(self, rows, x)


@dataclass(frozen=True)
class Loaded:
    networks: Networks
    rows: Tensor
    x: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[nn.Module]:
        module = self.networks.module
        x = self.x.to(next(module.parameters()).device)
        for row in self.rows:
            yield settle(self.networks.layout.load(module, row), [x])
