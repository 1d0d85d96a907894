"""The moving network of a run, as frames to draw: where nodes are at every step, and who meets.

All of it follows from the run's settings and seed, so nothing but the dominating sets is read from
the records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import FedloomError
from fedloom.experiment.contacts import contacts_of, peers_of
from fedloom.streams import streams_of
from fedloom.topology.waypoint import Waypoint
from fedloom.watch.follow import Run

MOST_ROUNDS = 10  # in one answer
_MOST_NODES, _MOST_LINKS, _MOST_STEPS = 1000, 3000, 60  # that a page draws


def frames(run: Run, first: int, last: int) -> dict[str, Any]:
    """The rounds from `first` to `last`, at most `MOST_ROUNDS` of them."""
    config = run.config
    nodes = int(config["clients"])
    if nodes > _MOST_NODES:
        raise FedloomError(f"A network of more than {_MOST_NODES:,} nodes is not drawn.")
    peers = peers_of(config)
    links = peers.network
    last = min(last, first + MOST_ROUNDS - 1)
    low, high = links.frame
    out = []
    for t in range(first, last + 1):
        streams = streams_of(int(config["seed"]), t)
        contacts = contacts_of(peers, config, t)
        met = np.empty((0, 3), dtype=np.int64) if contacts.meetings is None else contacts.meetings
        there = contacts.participants if contacts.present is None else contacts.present
        count = getattr(links, "steps", None) or int(met[:, 0].max(initial=1))
        shown = np.unique(np.linspace(1, count, min(count, _MOST_STEPS)).astype(int))
        steps, before = [], 0
        for step in shown.tolist():  # between two that are shown, all meetings count for the later
            places = (links.places_at(t, step, nodes, streams) - low) / (high - low)
            pairs = met[(met[:, 0] > before) & (met[:, 0] <= step), 1:]
            steps.append({"places": places.round(4).ravel().tolist(), "met": len(pairs),
                          "links": pairs[:_MOST_LINKS].ravel().tolist()})  # fmt: skip
            before = step
        sets = run.record(t).get("mix", {}).get("dominating", [])
        out.append({"round": t, "steps": steps, "there": there.tolist(), "sets": sets})
    return {"nodes": nodes, "moves": isinstance(links, Waypoint), "rounds": out}
