"""A trained run, scored again: its last state, with other settings that only affect scoring."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from fedloom.data.partition import Partition
from fedloom.errors import FedloomError, nearest
from fedloom.experiment.config import make_config, merge
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.plugins import is_file, method_class
from fedloom.experiment.result import SCORED_ON, flat_scores
from fedloom.experiment.settings import RESCORABLE, Config
from fedloom.experiment.setup import prepare
from fedloom.methods.registry import MethodOptions

if TYPE_CHECKING:
    from fedloom.experiment.result import Result
    from fedloom.models import Factory
    from fedloom.tasks import Loss


@dataclass(frozen=True)
class Scores:
    """`summary`: the scores by the names that `Result.summary` has; `clients`: a row for each;
    `round`: the one that they are of; `scored_on`: the part of the clients' test data."""

    round: int
    summary: dict[str, Any]
    clients: pd.DataFrame
    scored_on: str


def rescore(
    result: Result,
    settings: Mapping[str, Any],
    data: Any = None,
    model: Factory | None = None,
    partition: Any = None,
    loss: Loss | None = None,
) -> Scores:
    config, options = scored_with(result.config, settings, RESCORABLE)
    tensors, about = result.store.checkpoint()
    dealt = None if partition is None else Partition.of_object(partition)
    experiment = prepare(
        config, options.build(), data=data, model=model, partition=dealt, loss=loss,
        options=options, before=about,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        experiment.restore(result.path, tensors, about, {*RESCORABLE, *options.at_test})
        t = int(about["round"])
        record, clients = Evaluation(experiment).score(t)
    finally:
        torch.set_num_threads(threads)
        experiment.engine.close()
    plain = {name: value for name, value in record.items() if not isinstance(value, dict)}
    table = pd.DataFrame() if clients is None else clients
    return Scores(t, plain | flat_scores(record), table, SCORED_ON[config.score_on])


def scored_with(
    config: Mapping[str, Any], settings: Mapping[str, Any], free: Collection[str] = ()
) -> tuple[Config, MethodOptions]:
    """A run's settings with these over them: `free` ones and the method's options of test time."""
    try:
        method = method_class(config["method"])
    except FedloomError as e:
        if is_file(config["method"]):
            raise
        raise FedloomError(
            f"{e} One that was given as a Python class is known after fedloom.register(CLASS)."
        ) from None
    may = {*free, *method.at_test}
    for key in settings:
        if key in may:
            continue
        allowed = f"What may be given here: {', '.join(sorted(may)) or 'nothing'}."
        if key not in {*Config.model_fields, *method.model_fields}:
            near = nearest(key, may)
            raise FedloomError(f"{config['method']} has no '{key}'. {near}{allowed}")
        raise FedloomError(
            f"A trained run can't be scored with another {key}: start a new run for that. {allowed}"
        )
    return make_config(merge(config, settings), method)
