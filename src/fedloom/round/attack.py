"""Simulated bad clients, to see how a method copes: their messages are corrupted on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.round.messages import Sent
from fedloom.streams import stream

ATTACKS = "none | scale:FACTOR | nan | noise[:SIZE], and ,share=FRACTION of the clients (0.05)"


@dataclass(frozen=True)
class Attack:
    """`scale` multiplies a client's change, and what it sends besides it, by a factor; `noise`
    adds Gaussian noise of `factor` times their size; `nan` sends no number at all.

    >>> Attack.parse("scale:-20,share=0.1")
    Attack(kind='scale', factor=-20.0, share=0.1)
    """

    kind: str = "none"
    factor: float = 1.0
    share: float = 0.05

    @staticmethod
    def parse(spec: str) -> Attack:
        head, _, tail = spec.partition(",")
        kind, colon, number = head.partition(":")
        word, _, share = (tail or "share=0.05").partition("=")
        try:
            made = Attack(kind, float(number) if colon else 1.0, float(share))
        except ValueError:
            made = Attack(share=0.0)
        needs_number = (kind == "scale") == bool(colon) or kind == "noise"
        fits = kind in ("none", "scale", "nan", "noise") and needs_number and word == "share"
        if not (
            fits
            and math.isfinite(made.factor)
            and 0 < made.share <= 1
            and (kind != "noise" or made.factor > 0)
        ):
            raise FedloomError(f"'{spec}' is not an attack. Valid: {ATTACKS}.")
        return made

    def __bool__(self) -> bool:
        return self.kind != "none"

    def bad(self, clients: int, seed: int) -> np.ndarray:
        """Who is bad: the same all through a run, and at least one."""
        count = max(round(self.share * clients), 1)
        return np.sort(stream(seed, "attack").choice(clients, count, replace=False))

    def spoil(self, sent: Sent, starts: Tensor, bad: np.ndarray, round: int, seed: int) -> Sent:
        """The messages of a round, with those of bad clients spoilt; `starts` is where each one's
        model was when the round began."""
        there = np.flatnonzero(np.isin(sent.clients, bad))
        if not len(there):
            return sent
        model = sent.model.clone()
        values = {name: value.clone() for name, value in sent.values.items()}
        for i in there:
            client = int(sent.clients[i])
            model[i] = self._spoilt(model[i], starts[i], round, client, seed)
            for value in values.values():
                flat, nothing = value[i].reshape(-1), torch.zeros(value[i].numel())
                value[i] = self._spoilt(flat, nothing, round, client, seed).view(value[i].shape)
        return replace(sent, model=model, values=values)

    def _spoilt(self, row: Tensor, start: Tensor, round: int, client: int, seed: int) -> Tensor:
        change = row - start
        if self.kind == "scale":
            return start + self.factor * change
        if self.kind == "nan":
            return torch.full_like(row, math.nan)
        rng = stream(seed, "attack", round, client)
        noise = torch.from_numpy(rng.standard_normal(len(row), dtype=np.float32))
        return row + self.factor * change.norm() / noise.norm().clamp(min=1e-30) * noise
