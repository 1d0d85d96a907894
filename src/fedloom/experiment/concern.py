"""Settings that only some methods use: which of them would do nothing in a run, and why.

A single run refuses them; a comparison ignores them for the methods that don't use them, and says
so.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedloom.experiment.capacities import Capacities
from fedloom.experiment.settings import Config
from fedloom.local import LocalRule
from fedloom.method import Method
from fedloom.select import Whole
from fedloom.topology import Faults, Peers, Star

#: how messages travel: of no use where there are none
_OF_MESSAGES = {"encode": "fp32", "screen": "none", "attack": "none"}


def idle(config: Config, method: Method) -> dict[str, str]:
    """Setting → why it would do nothing here; `method` as it was built, before it is placed."""
    return dict(_idle(config, method))


def _idle(config: Config, method: Method) -> Iterator[tuple[str, str]]:
    draws = config.draw if config.draw != "uniform" else None
    why = None if draws is None else idle_draw(config, method)
    if draws is not None and why is not None:
        yield "draw", why
        if draws == "speed" and config.speeds != "1":
            yield "speeds", "participants are not drawn by speed"
    by_capacity = draws == "capacity" and why is None
    if (
        isinstance(method.select, Whole)
        and not Capacities.parse(config.capacities).whole
        and not by_capacity
    ):
        yield "capacities", "every client trains the whole model"
    among = config.topology is not None or isinstance(method.topology, Peers)
    if not among and Faults.parse(config.faults) != Faults.parse("none"):
        yield "faults", "there is a server; faults are for nodes that meet"
    if config.order != "mixed" and type(method.local).plan is not LocalRule.plan:
        yield "order", f"{type(method.local).__name__} plans its steps itself"
    elif config.order != "mixed" and method.topology.pools:
        yield "order", "one learner has the data of all clients"
    if method.silent:
        for key, without in _OF_MESSAGES.items():
            if getattr(config, key) != without:
                yield key, "no messages are sent"


def idle_draw(config: Config, method: Method) -> str | None:
    """Why participants can't be drawn by anything here, or would all be drawn alike."""
    if type(method.topology) is not Star or config.topology is not None:
        return "there is no server to draw participants"
    if config.participants >= config.clients:
        return "all clients take part in every round (--participation)"
    known = {"capacity": config.capacities, "speed": config.speeds}
    if config.draw not in known:
        return None
    each = Capacities.parse(known[config.draw], config.draw).assign(config.clients, config.seed)
    if len(np.unique(each)) > 1:
        return None
    option = {"capacity": "--capacities", "speed": "--speeds"}[config.draw]
    return f"all clients have the same {config.draw} ({option})"
