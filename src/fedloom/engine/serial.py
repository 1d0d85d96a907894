"""The serial engine: one worker, one client after the other. The reference for all others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import Engine, Scored, Setting, Task, Trained
from fedloom.engine.worker import Done, Worker


class Serial(Engine):
    """Trains and scores in this process."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        with torch.random.fork_rng(devices=[]):
            self._worker = Worker(setting)

    def train(self, task: Task, clients: np.ndarray, rows: Tensor) -> Trained:
        with torch.random.fork_rng(devices=[]):
            return collect(
                [
                    self._worker.train(task, int(client), row)
                    for client, row in zip(clients, rows, strict=True)
                ]
            )

    def score(self, clients: np.ndarray, rows: Tensor, part: str) -> Scored:
        groups = [self._setting.federation.indices(int(c), part) for c in clients]
        if _same(rows):
            return self._worker.score(rows[0], groups, self._worker.calibration(clients))
        return _stack(
            [
                self._worker.score(row, [group], self._worker.calibration(clients[i : i + 1]))
                for i, (row, group) in enumerate(zip(rows, groups, strict=True))
            ]
        )

    def score_global(self, rows: Tensor, clients: np.ndarray) -> Scored:
        if _same(rows):
            return self._worker.score_global(rows[0], self._worker.calibration(clients))
        return _stack(
            [
                self._worker.score_global(row, self._worker.calibration(clients[i : i + 1]))
                for i, row in enumerate(rows)
            ]
        )


def collect(done: list[Done]) -> Trained:
    """The results of many clients, side by side."""
    return Trained(
        rows=[d.row for d in done],
        indexes=tuple(d.index for d in done),
        loss=np.array([d.loss for d in done]),
        samples=np.array([d.samples for d in done], dtype=np.int64),
        steps=np.array([d.steps for d in done], dtype=np.int64),
        macs=np.array([d.macs for d in done], dtype=np.int64),
    )


def _same(rows: Tensor) -> bool:
    """Whether this is one row, expanded: many clients with one model."""
    return len(rows) > 0 and (len(rows) == 1 or rows.stride(0) == 0)


def _stack(scores: list[Scored]) -> Scored:
    return Scored(
        np.concatenate([s.confusion for s in scores]), np.concatenate([s.loss for s in scores])
    )
