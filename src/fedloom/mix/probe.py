"""The public set on the server, and the models that came back to put it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.models.norm import settle


@dataclass(frozen=True)
class Probe:
    """Public images as a model is fed them, their labels if they have any, and a scratch module
    (on the run's device): `models` fills it with one row after the other."""

    x: Tensor
    y: Tensor | None
    module: nn.Module
    layout: Layout

    def models(self, rows: Tensor) -> Loaded:
        """Rows as networks, which can be walked through again; each is gone when the next comes."""
        return Loaded(self, rows)


@dataclass(frozen=True)
class Loaded:
    probe: Probe
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[nn.Module]:
        module = self.probe.module
        x = self.probe.x.to(next(module.parameters()).device)
        for row in self.rows:
            yield settle(self.probe.layout.load(module, row), [x])
