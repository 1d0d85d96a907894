"""A model for a newcomer, from a trained run and a few labelled images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, as_images
from fedloom.data.images import empty_like, noun
from fedloom.data.partition import Partition
from fedloom.data.split import Federation
from fedloom.engine import Serial, Setting
from fedloom.engine.batches import Source
from fedloom.engine.kernels import nearest
from fedloom.errors import FedloomError
from fedloom.experiment.evaluation import Adapting
from fedloom.experiment.rescore import scored_with
from fedloom.experiment.setup import own_loss, placed
from fedloom.experiment.state import State
from fedloom.kinds import Sizes
from fedloom.models.norm import has_batch_norm, has_measured_norm, settle
from fedloom.models.voting import Voting
from fedloom.tasks import Classification, Loss, task_of

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
    settings: Mapping[str, Any],
    loss: Loss | None = None,
) -> nn.Module:
    """The model that the run's method gives to a newcomer with these images."""
    tensors, about = result.store.checkpoint()
    config, options = scored_with(result.config, settings)
    method = placed(config, options.build())
    if method.mix.part == "none":
        raise FedloomError(
            f"Clients of {config.method} share nothing, so there is no model for a newcomer."
        )
    sizes = Sizes(layout, about["classes"], about.get("public_size", 0))
    remembered = config.optimiser_at(1).values if config.optimiser_state == "kept" else None
    owners = tensors["kept/weights"].numpy() if "kept/weights" in tensors else np.empty(0)
    state = State.of(method, sizes, tensors["shared"], lambda clients: owners, optimiser=remembered)
    state.restore(tensors)
    module, submodels = build(), bool(about.get("submodels", False))
    dataset = _dataset(images, labels, about)
    own = own_loss(config, loss)
    dataset = replace(dataset, task=replace(dataset.task, own_loss=own))
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
        submodels=submodels,
        static=has_measured_norm(module, submodels),
        static_samples=config.static_samples,
        tokens=about.get("tokens", False),
        kernels=nearest(about.get("kernels", "torch")),
    )
    engine = Serial(setting)
    budget = replace(config.budget, least=2 if has_batch_norm(module) else 1)
    last = config.optimiser_at(config.rounds)
    adapting = Adapting(method.adapt, budget, last, round=0, learns="all")

    def adapted(row: Tensor) -> Tensor:
        return adapting.rows(engine, _ME, row.unsqueeze(0))[0]

    candidates = state.candidates(method.newcomer, owners)
    scale = dataset.mean, dataset.std
    source = Source(dataset.x, dataset.y, *scale, setting.device, tokens=setting.tokens)

    def ready(made: nn.Module, row: Tensor) -> nn.Module:
        images = source.batches(np.arange(len(dataset.y)))
        return settle(layout.load(made, row), images, submodels)

    if method.newcomer.choice == "vote":
        return Voting([ready(build(), adapted(row)) for row in candidates]).eval()
    best = adapting.best(engine, _ME, candidates)[0] if len(candidates) > 1 else 0
    return ready(module, adapted(candidates[int(best)]))


def _dataset(images: npt.ArrayLike, labels: npt.ArrayLike, about: dict[str, Any]) -> Dataset:
    x = raw_images(images, about)
    if not len(x):
        raise FedloomError("Give at least one image.")
    task = task_of(about.get("task", Classification(about["classes"]).plain()))
    if task.by_class:
        y = np.array(_numbers(labels, about["labels"]), dtype=np.int64)
    else:
        y = np.asarray(labels)
        whole = y.dtype.kind in "iub" and task.name not in ("regression", "multi-label")
        y = y.astype(np.int64 if whole else np.float32)
        y = y[:, None] if y.ndim == 1 and task.dims == 1 else y
    if len(y) != len(x):
        raise FedloomError(f"There are {len(x)} images and {len(y)} labels: give one for each.")
    kept = np.int32 if about.get("tokens") else np.float32
    x = x.astype(np.uint8 if about["unit"] == 255 else kept)
    return Dataset("newcomer", x, y, empty_like(x), y[:0], tuple(about["labels"]),
                   tuple(about["mean"]), tuple(about["std"]), task=task)  # fmt: skip


def raw_images(images: npt.ArrayLike, about: dict[str, Any]) -> np.ndarray:
    """Images of the run's shape, in the units of its data, as (N, C, H, W)."""
    x, shape = as_images("The data", images), tuple(about["shape"])
    if x.ndim != 4 or x.shape[1:] != shape:
        raise FedloomError(
            f"This run's {noun((1, *shape))} are (N, {', '.join(map(str, shape))}); these have "
            f"shape {x.shape}."
        )
    if not np.isfinite(x).all():
        raise FedloomError(f"Some of the {noun(x.shape)} contain NaN or infinity.")
    if about.get("tokens") and x.dtype == np.float32:
        raise FedloomError("This run's data are tokens, whole numbers, and these are not.")
    if about["unit"] == 255 and (x.min(initial=0) < 0 or x.max(initial=0) > 255 or (x % 1).any()):
        raise FedloomError(
            "This run's images are whole numbers from 0 to 255, and these are not. Give them as "
            "they were, not scaled or normalised."
        )
    return x


def _numbers(labels: npt.ArrayLike, known: list[str]) -> list[int]:
    """Class numbers, from those or from the names of classes."""
    number = {name: i for i, name in enumerate(known)}
    out = []
    for label in np.asarray(labels).reshape(-1).tolist():
        text = f"{label:g}" if isinstance(label, float) else str(label)
        if text not in number and not (text.isdigit() and int(text) < len(known)):
            raise FedloomError(
                f"{label!r} is not a label of this run. Its classes are "
                f"{', '.join(known[:12])}{', ...' if len(known) > 12 else ''} (or 0 to "
                f"{len(known) - 1})."
            )
        out.append(number.get(text, int(text) if text.isdigit() else 0))
    return out
