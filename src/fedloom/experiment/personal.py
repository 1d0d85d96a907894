"""A model for somebody new: a trained run and a few labelled images of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset
from fedloom.data.images import empty_like
from fedloom.data.partition import Partition
from fedloom.data.split import Federation
from fedloom.engine import Serial, Setting, Task
from fedloom.errors import FedloomError
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.state import State
from fedloom.local import Optimiser
from fedloom.models.norm import has_batch_norm, has_static_norm
from fedloom.models.voting import Voting

if TYPE_CHECKING:
    from fedloom.experiment.result import Result
    from fedloom.layout import Layout

_ME = np.zeros(1, dtype=np.int64)  # the newcomer's number, in a federation of one


def personal_model(
    result: Result,
    images: npt.ArrayLike,
    labels: npt.ArrayLike,
    build: Any,
    layout: Layout,
) -> nn.Module:
    """The model that the run's method gives to a newcomer with these images."""
    tensors, about = result.store.checkpoint()
    config, options = make_config(result.config, method_class(result.config["method"]))
    method = options.build()
    state = State(layout, method.mix, tensors["shared"])
    state.restore(tensors)
    module = build()
    dataset = _dataset(images, labels, about)
    setting = Setting(
        build=build,
        layout=layout,
        dataset=dataset,
        federation=Federation(
            dataset, Partition.of_lists([list(range(len(dataset.y)))]), seed=0, test_share=0.0
        ),
        device=torch.device("cpu"),
        seed=config.seed,
        capacities=np.ones(1),
        extras=tuple(method.local.extras),
        static=has_static_norm(module),
        static_samples=config.static_samples,
    )
    engine = Serial(setting)
    budget = replace(
        config.budget,
        epochs=method.adapt.epochs,
        steps=None,
        least=2 if has_batch_norm(module) else 1,
    )

    def adapted(row: Tensor) -> Tensor:
        rule, rate = method.adapt.rule, method.adapt.lr
        if rule is None:
            return row
        optimiser = config.optimiser(config.rounds) if rate is None else Optimiser(rate)
        task = Task(rule, budget, optimiser, 0, data=dict.fromkeys(rule.parts, "all"))
        return engine.train(task, _ME, row.unsqueeze(0)).rows[0]

    weights = tensors["kept/weights"].numpy() if state.personal else np.empty(0)
    candidates = method.newcomer.candidates(state.shared, state.kept, weights)
    tried = [adapted(row) for row in candidates]
    if method.newcomer.choice == "vote":
        return Voting([layout.load(build(), row) for row in tried]).eval()
    losses = [float(engine.score(_ME, row.unsqueeze(0), "all").loss[0]) for row in tried]
    return layout.load(module, tried[int(np.argmin(losses))]).eval()


def _dataset(images: npt.ArrayLike, labels: npt.ArrayLike, about: dict[str, Any]) -> Dataset:
    shape, classes = tuple(about["shape"]), int(about["classes"])
    x, y = np.asarray(images), np.asarray(labels)
    if x.ndim != 4 or x.shape[1:] != shape or len(x) == 0:
        raise FedloomError(
            f"This run's images are (N, {', '.join(map(str, shape))}); these have shape {x.shape}."
        )
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= classes:
        raise FedloomError(
            f"Give one label for each of the {len(x)} images, as a whole number from 0 to "
            f"{classes - 1}."
        )
    x = x.astype(np.uint8 if about["unit"] == 255 else np.float32)
    names = tuple(str(i) for i in range(classes))
    nobody = np.empty(0, np.int64)
    return Dataset("newcomer", x, y.astype(np.int64), empty_like(x), nobody, names,
                   tuple(about["mean"]), tuple(about["std"]))  # fmt: skip
