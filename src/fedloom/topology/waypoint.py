"""Random waypoint: nodes that walk to places drawn at random, and meet whom they come near.

A node draws a destination in a square, walks there at a speed of its own, pauses, and draws the
next one. Its way follows from the seed alone, so where everybody is in any round can be worked out
without the rounds before.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from fedloom.errors import FedloomError
from fedloom.topology.base import Stream
from fedloom.topology.network import Network, pairs

_LEGS = 16  # ways from one place to the next that are drawn together
_MOST_CROSSINGS = 100  # of the area in a step


class Waypoint(Network):
    """Two nodes meet in a round if they are in range at one of its steps."""

    name = "waypoint"
    about = "moving nodes that meet in range (random waypoint)"

    area: float = Field(1000, gt=0, le=1e12, description="side of the square that nodes move in")
    range: float = Field(100, gt=0, le=1e13, description="distance at which two nodes can talk")
    slowest: float = Field(3, gt=0, description="lowest speed, in distance per step")
    fastest: float = Field(7, gt=0, description="highest speed, in distance per step")
    pause: float = Field(10, ge=0, description="steps that a node rests where it arrives")
    steps: int = Field(10, ge=1, description="steps of movement in a round")

    @model_validator(mode="after")
    def _speeds(self) -> Waypoint:
        if self.slowest > self.fastest:
            raise FedloomError(
                f"slowest={self.slowest:g} is faster than fastest={self.fastest:g}. Swap them."
            )
        if self.fastest > _MOST_CROSSINGS * self.area:
            raise FedloomError(
                f"fastest={self.fastest:g} crosses an area of {self.area:g} more than "
                f"{_MOST_CROSSINGS} times in a step. Give lower speeds, or a larger area."
            )
        return self

    def edges(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        from scipy.spatial import cKDTree

        times = (round - 1) * self.steps + np.arange(1, self.steps + 1, dtype=np.float64)
        near = [
            cKDTree(places).query_pairs(self.range, output_type="ndarray")
            for places in self.places(times, nodes, stream)
        ]
        return pairs(np.concatenate(near).astype(np.int64), nodes)

    def positions(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        return self.places(np.array([float(round * self.steps)]), nodes, stream)[0]

    @property
    def frame(self) -> tuple[float, float]:
        return 0.0, self.area

    def places(self, times: np.ndarray, nodes: int, stream: Stream) -> np.ndarray:
        """Where everybody is at these steps: times × nodes × 2."""
        stops, speed = self._ways(float(times.max()), nodes, stream)
        away = np.linalg.norm(np.diff(stops, axis=0), axis=-1)
        walks = away / speed
        ends = np.cumsum(walks + self.pause, axis=0)
        leg = (ends[None] <= times[:, None, None]).sum(axis=1)  # times × nodes
        node = np.arange(nodes)[None]
        begun = np.where(leg > 0, ends[leg - 1, node], 0.0)
        walk = np.maximum(walks[leg, node], 1e-12)
        share = np.clip((times[:, None] - begun) / walk, 0, 1)[..., None]
        return stops[leg, node] + share * (stops[leg + 1, node] - stops[leg, node])

    def _ways(self, until: float, nodes: int, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """Everybody's stops and the speeds between them, for longer than `until`."""
        stops = stream("waypoint-start", round=0).random((1, nodes, 2)) * self.area
        speed, spent = np.empty((0, nodes)), np.zeros(nodes)
        block = 0
        while spent.min() <= until:
            drawn = stream("waypoint", block, round=0).random((_LEGS, nodes, 3))
            ways = np.concatenate([stops[-1:], drawn[..., :2] * self.area])
            paces = self.slowest + drawn[..., 2] * (self.fastest - self.slowest)
            walks = np.linalg.norm(np.diff(ways, axis=0), axis=-1) / paces
            spent = spent + (walks + self.pause).sum(axis=0)
            stops, speed = np.concatenate([stops, ways[1:]]), np.concatenate([speed, paces])
            block += 1
        return stops, speed
