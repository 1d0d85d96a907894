"""A trained run, scored again: its last state, with what only matters there set otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from fedloom.errors import FedloomError
from fedloom.experiment.config import make_config, merge
from fedloom.experiment.plugins import method_class
from fedloom.experiment.result import flat_scores
from fedloom.experiment.runner import Runner
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import prepare
from fedloom.methods.registry import MethodOptions

if TYPE_CHECKING:
    from fedloom.experiment.result import Result
    from fedloom.models import Factory

#: who is scored, on what and where; none of it was learned
FREE = frozenset({
    "eval_clients", "eval_common", "static_samples",
    "device", "engine", "workers", "precision", "ray_address", "threads",
})  # fmt: skip
_LEARNED = ("local", "mix", "topology", "select")  # parts of a method that shape what is learned


@dataclass(frozen=True)
class Scores:
    """`summary`: the scores by the names that `Result.summary` has; `clients`: a row for each."""

    summary: dict[str, Any]
    clients: pd.DataFrame


def rescore(
    result: Result, settings: Mapping[str, Any], data: Any = None, model: Factory | None = None
) -> Scores:
    config, options = scored_with(result.config, settings)
    experiment = prepare(config, options.build(), data=data, model=model)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        t = experiment.restore(result.store)
        record, clients = Runner(experiment, result.store).score(t)
    finally:
        torch.set_num_threads(threads)
        experiment.engine.close()
    return Scores(flat_scores(record), pd.DataFrame() if clients is None else clients)


def scored_with(
    config: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Config, MethodOptions]:
    """A run's settings with these over them, if it would have learned the same with them."""
    method = method_class(config["method"])
    before, trained = make_config(config, method)
    after, asked = make_config(merge(config, settings), method)
    old, new = ({**c.model_dump(), **c.params} for c in (before, after))
    changed = [key for key in new if key != "params" and new[key] != old[key]]
    refused = [key for key in changed if key in Config.model_fields and key not in FREE]
    parts, others = trained.build(), asked.build()
    if any(getattr(parts, name) != getattr(others, name) for name in _LEARNED):
        refused += [key for key in changed if key not in Config.model_fields]
    if refused:
        key = refused[0]
        raise FedloomError(
            f"{key}={new[key]} is about how a run is trained, and this one was trained with "
            f"{key}={old[key]}. Start a new run with it. To score one again, give "
            f"{', '.join(sorted(FREE))}, or an option of {before.method} that speaks of test time."
        )
    return after, asked
