"""What a channel is worth, by the kernels: the scores of `fedloom.select.scores`, up to rounding.

A selector sees activations as results of torch functions; the kernels have them as values of a
plan. The n-th non-linearity of a pass is the same in both, which is tried with numbers once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedloom.local.rule import Batch
from fedloom.native.net import Native, Pictures
from fedloom.native.plan import CALLED, Unplanned
from fedloom.native.verify import drawn, near
from fedloom.select.channels import Channels, Tap, positions
from fedloom.select.scores import AT_ONCE, activations, gradients

_SAMPLES = 5
#: the values of each group's taps
Places = list[list[tuple[Tap, int]]]


class Looker:
    """The scores of one model's channels."""

    def __init__(self, native: Native, channels: Channels, places: Places) -> None:
        self._native, self._channels, self._places = native, channels, places
        self._values = list(dict.fromkeys(value for group in places for _, value in group))

    @staticmethod
    def of(native: Native, channels: Channels) -> Looker | None:
        """None: the kernels do not have these activations, or others than torch."""
        try:
            places = _places(native, channels)
            if places is None or not native.measures(True, AT_ONCE):
                return None
            made = Looker(native, channels, places)
            return made if made._agrees() else None
        except Unplanned:
            return None

    def takes(self, x: Tensor, y: Tensor | None = None) -> bool:
        return self._native.takes(x, y)

    def activations(self, row: Tensor, x: Tensor, measure: bool = True) -> list[np.ndarray]:
        """h_i of every group, as in `scores`."""
        row = self._measured(row, x) if measure else row.contiguous()
        means = self._native.channel_means(row, x, self._values)
        return self._by_group(means, lambda found, at: found[at].mean(1))

    def gradients(self, row: Tensor, batch: Batch) -> list[np.ndarray]:
        """g_i of every group, as in `scores`."""
        measured = self._measured(row, batch.x)
        sums = self._native.summed_gradients(measured, batch.x, batch.y, self._values)
        return self._by_group(sums, lambda found, at: np.abs(found[at]).sum((1, 2)))

    def _measured(self, row: Tensor, x: Tensor) -> Tensor:
        row = row.clone()
        self._native.measure(row, Pictures.of(x), True, AT_ONCE)
        return row

    def _by_group(
        self, found: list[np.ndarray], of: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        """The mean over each group's taps."""
        by_value = dict(zip(self._values, found, strict=True))
        return [
            np.mean([of(by_value[v], positions(tap.made_of, g)) for tap, v in group], axis=0)
            for g, group in enumerate(self._places)
        ]

    def _agrees(self) -> bool:
        """Whether scores are torch's, for weights and samples that are the same everywhere."""
        native, channels = self._native, self._channels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module, layout = channels.module, native.layout
            row = drawn(layout, layout.flatten(module, dict.fromkeys(layout.extras, 0.0)))
            x = torch.randn(_SAMPLES, *native.shape)
            y = torch.arange(_SAMPLES) % native.plan(training=False).classes
            layout.load(module, row)
            pairs = [
                *zip(self.activations(row, x), activations(module, channels, x), strict=True),
                *zip(self.gradients(row, Batch(x, y)), gradients(module, channels, Batch(x, y)),
                     strict=True),
            ]  # fmt: skip
        return all(near(*map(torch.from_numpy, pair)) for pair in pairs)


def _places(native: Native, channels: Channels) -> Places | None:
    """The values of every group's taps; None: not all of them are to be had."""
    calls = [i for i, name in enumerate(channels.calls) if name in CALLED.values()]
    bends, numbers = native.bends, {call: k for k, call in enumerate(calls)}
    if [CALLED[word] for word, _ in bends] != [channels.calls[i] for i in calls]:
        return None
    if len(native.plan(training=False).outputs) > 1:
        return None
    out: Places = []
    for group in channels.groups:
        found = []
        for tap in group.taps:
            value = bends[numbers[tap.call]][1] if tap.call in numbers else -1
            if value < 0 or (tap.item, tap.dim, tap.batch) != (0, 1, 0):
                return None
            if native.value(value).c != tap.width:
                return None
            found.append((tap, value))
        out.append(found)
    return out
