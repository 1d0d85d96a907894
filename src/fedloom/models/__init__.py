"""Models by name, or any factory `(shape, classes) -> nn.Module` of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fedloom.errors import FedloomError, OutOfMemory, is_shortage, shortage, unknown
from fedloom.models.exits import with_exits
from fedloom.models.nets import MLP, Conv4, LeNet, ResNet, Shape, TextGRU, UNet
from fedloom.streams import torch_seed

Factory = Callable[..., nn.Module]

MODELS: dict[str, tuple[Factory, dict[str, Any], str]] = {
    "mlp": (MLP, {}, "flatten, hidden layers (default one of 100), linear"),
    "lenet": (LeNet, {}, "two 5×5 convolutions, 120-84-classes (S1's CIFAR-10 net)"),
    "conv4": (Conv4, {}, "four conv blocks of 64-128-256-512 channels (S2's EMNIST net)"),
    "resnet18": (ResNet, {"depths": (2, 2, 2, 2)}, "ResNet-18; CIFAR stem for small images"),
    "resnet34": (ResNet, {"depths": (3, 4, 6, 3)}, "ResNet-34; CIFAR stem for small images"),
    "gru": (TextGRU, {}, "text: an embedding, a GRU (default of 96 units), linear"),
    "unet": (UNet, {}, "segmentation: a small U-Net (default of 16 channels)"),
}


TEXT = "gru"


def choose(shape: Shape, task: str = "classification", tokens: int = 0) -> str:
    """The model that `auto` stands for: by the data and the task only, so that every method gets
    the same; `tokens` is how many different ones text has."""
    if tokens or task == "next-token":
        return TEXT
    if task == "segmentation":
        return "unet"
    if min(shape[1:]) == 1:  # a table, however many columns it has
        return "mlp"
    if max(shape[1:]) > 32:
        return "resnet18"
    return "lenet" if shape[0] == 3 and min(shape[1:]) >= 16 else "mlp"


def build(
    model: str | Factory,
    shape: Shape,
    classes: int,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A freshly initialised model; its weights come from the stream (seed, "model").

    The option `exits`, of any model that says what its blocks are, puts a classifier behind each.
    """
    given = dict(options or {})
    exits = given.pop("exits", False)
    if not isinstance(exits, bool):
        raise FedloomError(
            f"exits={exits} is not valid: give true for a classifier after each block, or false."
        )
    if isinstance(model, str):
        name = choose(shape) if model == "auto" else model
        if name not in MODELS:
            raise unknown("model", name, ["auto", *MODELS])
        factory, fixed, _ = MODELS[name]
        valid = set(inspect.signature(factory).parameters) - {"shape", "classes", *fixed}
        for option in given:
            if option not in valid:
                raise unknown(f"option of model {name}", option, valid)
        given |= fixed
    else:
        factory, name = model, getattr(model, "__name__", "the given factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        try:
            module = factory(shape, classes, **given)
        except FedloomError:
            raise
        except Exception as e:  # whatever a factory may raise
            if is_shortage(e):
                raise OutOfMemory(shortage(f"the weights of the model '{name}'", e)) from e
            raise FedloomError(
                f"Building the model '{name}' failed: {e}. A model factory is called as "
                "factory(shape, classes, **model_options), with shape = (channels, height, width)."
            ) from e
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise FedloomError(
                f"The model factory '{name}' returned {kind}, not a torch.nn.Module."
            )
        return with_exits(module, shape, classes) if exits else module
