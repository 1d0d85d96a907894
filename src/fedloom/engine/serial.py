"""The serial engine: one worker, one client after the other. The reference for all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import Block, Done, Lasts, OneProcess, Order, Scored, Setting
from fedloom.engine.worker import Worker


class Serial(OneProcess):
    """Trains and scores in this process."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.worker = Worker(setting)

    @staticmethod
    def cut(setting: Setting, sizes: Sequence[float], samples: float) -> list[list[int]]:
        return [[i] for i in range(len(sizes))]

    def train_each(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        with torch.random.fork_rng(devices=[]):  # clients seed it, each on its own
            return super().train_each(order, clients, rows, lasts)

    def train_job(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        given = zip(clients, rows, lasts or [None] * len(clients), strict=True)
        return [self.worker.train(order, int(c), row, last) for c, row, last in given]

    def score_job(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        return [self.worker.score(rows[block.row], block) for block in blocks]
