"""Faults among nodes: nodes fail and come back, messages are lost or late."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedloom.topology.base import LOST, Stream
from fedloom.topology.network import Described, options, read


class Faults(Described):
    """Probabilities of faults, drawn from streams named by the round. A lost message is sent again
    if the two nodes meet at a later step of the round."""

    fail: float = Field(0, ge=0, le=1, description="probability that a node fails in a round")
    back: float = Field(0.5, gt=0, le=1, description=("probability that a failed node comes back"))
    state: Literal["kept", "lost"] = Field(
        "kept", description="whether a node comes back with its state"
    )
    loss: float = Field(0, ge=0, le=1, description="probability that a message is lost")
    late: int = Field(
        0, ge=0, le=10_000, description="maximum delay of a message in rounds, uniform from 0"
    )

    @staticmethod
    def parse(text: str) -> Faults:
        """From words such as `fail=0.1,state=lost,late=2`; `none` is none.

        >>> Faults.parse("loss=0.2,late=3").late
        3
        """
        words = [] if text.strip() in ("", "none") else text.split(",")
        return read(Faults, text, options(text, words))

    def nodes(self, round: int, nodes: int, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """Who is up in this round, and who has just come back, as masks."""
        up = np.ones(nodes, dtype=bool)
        back = np.zeros(nodes, dtype=bool)
        if self.fail == 0:
            return up, back
        for past in range(1, round + 1):  # drawn again from the start: nothing has to be saved
            chance = stream("faults", round=past).random(nodes)
            back = ~up & (chance < self.back)
            up = np.where(up, chance >= self.fail, back)
        return up, back

    def messages(self, count: int, stream: Stream) -> np.ndarray | None:
        """How many rounds late each of `count` messages is; None where none can be."""
        if self.loss == 0 and self.late == 0:
            return None
        rng = stream("messages")
        lost = rng.random(count) < self.loss
        return np.where(lost, LOST, rng.integers(self.late + 1, size=count))
