"""Rows as networks, for mixes that run the received models on the public set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.models.norm import has_measured_norm, settle
from fedloom.native.net import Native
from fedloom.native.plan import Unplanned
from fedloom.native.verify import near
from fedloom.similarity import Network, activations

_SAMPLES = 5


@dataclass(frozen=True)
class Networks:
    """A scratch module (on the run's device) that is filled with one row after the other, and the
    kernels that can run it, if there are any."""

    module: nn.Module
    layout: Layout
    native: Native | None = None

    def of(self, rows: Tensor, x: Tensor) -> Loaded:
        """Rows as networks, iterable again and again; each is valid until the next one. Norms whose
        statistics are measured before use are measured on `x`."""
        return Loaded(self, rows, x)


@dataclass(frozen=True)
class Loaded:
    networks: Networks
    rows: Tensor
    x: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Network]:
        return map(self._network, range(len(self)))

    def _network(self, i: int) -> _Network:
        return _Network(self, self.rows[i])

    @cached_property
    def native(self) -> Native | None:
        """The kernels, if they have the module's activations."""
        native, some = self.networks.native, self.x[:_SAMPLES]
        if native is None:
            return None
        try:
            got = native.activations(self._network(0).row, some)
        except Unplanned:
            return None
        wanted = activations(self._network(0).module, some)
        same = got.keys() == wanted.keys() and all(near(got[k], wanted[k]) for k in got)
        return native if same else None


@dataclass(frozen=True)
class _Network:
    """One row as a network."""

    loaded: Loaded
    given: Tensor

    def activations(self, inputs: Tensor, layers: Sequence[str] | None = None) -> dict[str, Tensor]:
        native = self.loaded.native
        if native is not None and native.has(layers):
            return native.activations(self.row, inputs, layers)
        return activations(self.module, inputs, layers)

    @property
    def module(self) -> nn.Module:
        n, x = self.loaded.networks, self.loaded.x
        device = next(n.module.parameters()).device
        return settle(n.layout.load(n.module, self.given), [x.to(device)])

    @cached_property
    def row(self) -> Tensor:
        """With the statistics of static norms in it."""
        n = self.loaded.networks
        if not has_measured_norm(n.module, every=False):
            return self.given.contiguous()
        return n.layout.flatten(self.module)
