"""Random waypoint: nodes move to random places and meet the nodes they come near.

A node draws a destination in a square, walks there at a speed of its own, pauses, and draws the
next one. Its way follows from the seed alone, so where everybody is in any round can be worked out
without the rounds before. Nodes start in the stationary distribution of the walk: started
uniformly, they would drift towards the middle, and early rounds would differ from late ones.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from fedloom.errors import FedloomError
from fedloom.topology.base import Stream, pairs, stepped
from fedloom.topology.network import Network

_LEGS = 16  # ways from one place to the next that are drawn together
_MEAN_WAY = (
    2 + np.sqrt(2) + 5 * np.log(1 + np.sqrt(2))
) / 15  # between two points of a unit square
_MOST_CROSSINGS = 100  # of the area in a step


class Waypoint(Network):
    """Two nodes meet at every step of a round at which they are in range."""

    name = "waypoint"
    about = "moving nodes that meet in range (random waypoint)"

    area: float = Field(1000, gt=0, le=1e12, description="side of the square that nodes move in")
    range: float = Field(100, gt=0, le=1e13, description="distance at which two nodes can talk")
    slowest: float = Field(3, gt=0, description="lowest speed, in distance per step")
    fastest: float = Field(7, gt=0, description="highest speed, in distance per step")
    pause: float = Field(10, ge=0, description="pause at each destination, in steps")
    steps: int = Field(10, ge=1, le=10_000, description="steps of movement per round")

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
        return pairs(self.meetings(round, nodes, stream)[:, 1:], nodes)

    def meetings(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        from scipy.spatial import cKDTree

        times = (round - 1) * self.steps + np.arange(1, self.steps + 1, dtype=np.float64)
        near = (
            cKDTree(places).query_pairs(self.range, output_type="ndarray")
            for places in self.places(times, nodes, stream)
        )
        steps = [stepped(i, pairs(met.astype(np.int64), nodes)) for i, met in enumerate(near, 1)]
        return np.concatenate(steps)

    def positions(self, round: int, nodes: int, stream: Stream) -> np.ndarray:
        return self.places(np.array([float(round * self.steps)]), nodes, stream)[0]

    def places_at(self, round: int, step: int, nodes: int, stream: Stream) -> np.ndarray:
        return self.places(np.array([float((round - 1) * self.steps + step)]), nodes, stream)[0]

    @property
    def frame(self) -> tuple[float, float]:
        return 0.0, self.area

    def places(self, times: np.ndarray, nodes: int, stream: Stream) -> np.ndarray:
        """Where everybody is at these steps: times × nodes × 2."""
        stops, speed, spent = self._ways(float(times.max()), nodes, stream)
        walks = _lengths(stops) / speed
        ends = np.cumsum(walks + self.pause, axis=0) - spent
        leg = (ends[None] <= times[:, None, None]).sum(axis=1)  # times × nodes
        node = np.arange(nodes)[None]
        begun = np.where(leg > 0, ends[leg - 1, node], -spent)
        walk = np.maximum(walks[leg, node], 1e-12)
        share = np.clip((times[:, None] - begun) / walk, 0, 1)[..., None]
        return stops[leg, node] + share * (stops[leg + 1, node] - stops[leg, node])

    def _ways(
        self, until: float, nodes: int, stream: Stream
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Everybody's stops and the speeds between them, for longer than `until`, and how much of
        the first of these ways was over when time began."""
        stops, speed, spent = self._under_way(nodes, stream("waypoint-start", round=0))
        done = (_lengths(stops) / speed + self.pause).sum(axis=0) - spent
        block = 0
        while done.min() <= until:
            drawn = stream("waypoint", block, round=0).random((_LEGS, nodes, 3))
            ways = np.concatenate([stops[-1:], drawn[..., :2] * self.area])
            paces = self.slowest + drawn[..., 2] * (self.fastest - self.slowest)
            done = done + (_lengths(ways) / paces + self.pause).sum(axis=0)
            stops, speed = np.concatenate([stops, ways[1:]]), np.concatenate([speed, paces])
            block += 1
        return stops, speed, spent

    def _under_way(
        self, nodes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The way that everybody is on at some time after long walking, its speed, and the time
        since it began.

        A node is seen on a way in proportion to the time that it takes: long and slow ones more
        often. In a pause it has been at its place, anywhere in the area, for some part of it.
        """
        low, high = self.slowest, self.fastest
        slowness = np.log(high / low) / (high - low) if high > low else 1 / low  # mean of 1/speed
        walking = _MEAN_WAY * self.area * slowness
        rests = rng.random(nodes) < self.pause / (walking + self.pause)
        ends = rng.random((2, nodes, 2)) * self.area
        short = rng.random(nodes) * np.sqrt(2) * self.area > _lengths(ends)[0]
        while short.any():
            ends[:, short] = rng.random((2, int(short.sum()), 2)) * self.area
            lots = rng.random(int(short.sum())) * np.sqrt(2) * self.area
            short[short] = lots > _lengths(ends[:, short])[0]
        speed = low * (high / low) ** rng.random(nodes)  # with a density that falls as 1/speed
        ends[:, rests] = rng.random((1, int(rests.sum()), 2)) * self.area
        lasts = np.where(rests, self.pause, _lengths(ends)[0] / speed)
        return ends, speed[None], rng.random(nodes) * lasts


def _lengths(stops: np.ndarray) -> np.ndarray:
    """Of the ways from each stop to the next."""
    return np.linalg.norm(np.diff(stops, axis=0), axis=-1)
