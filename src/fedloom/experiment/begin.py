"""Weights to start from: a state_dict, a file that holds one, or another run's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.data.formats import reason
from fedloom.errors import FedloomError
from fedloom.models import Factory

State = Mapping[str, Tensor]


def weights(given: Any, factory: str | Factory) -> State:
    """The state_dict that `init` names or holds; a run with a custom model is built by the
    `factory` of this one."""
    if isinstance(given, nn.Module):
        return given.state_dict()
    if isinstance(given, Mapping):
        return _checked("init", given)
    if not isinstance(given, str | Path):
        if callable(getattr(given, "model", None)):  # a Result
            given = given.path
        else:
            raise FedloomError(
                "init must be a state_dict, a module, a run, its directory, or a .safetensors or "
                f".pt file, not {type(given).__name__}."
            )
    path = Path(given).expanduser()
    if path.is_file() and path.suffix not in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise FedloomError(
            f"init={given} is no file of weights: give a run's directory, or a state_dict in a "
            ".safetensors or .pt file."
        )
    if path.is_dir():
        from fedloom.experiment.result import Result

        own = None if isinstance(factory, str) else factory
        return Result(path).model(factory=own).state_dict()
    try:
        if path.suffix == ".safetensors":
            found: Any = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FedloomError(f"init={given}: there is no such file or run.") from None
    except (OSError, ValueError, RuntimeError, EOFError, safetensors.SafetensorError) as error:
        raise FedloomError(f"init={given} can't be read: {reason(error)}") from None
    except Exception:  # torch.load's own errors are about its options
        raise FedloomError(
            f"init={given} is no state_dict: it holds something else than tensors by name, or is "
            "damaged. Save one with torch.save(model.state_dict(), FILE)."
        ) from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    return _checked(f"init={given}", found)


def _checked(what: str, found: Any) -> State:
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise FedloomError(f"{what} is no state_dict: it must have a tensor for every name.")
    if "shared" in found and found["shared"].ndim == 1:
        raise FedloomError(f"{what} is a checkpoint of a run. Name the run's directory instead.")
    return found


def begun(make: Callable[[], nn.Module], state: State, what: str) -> nn.Module:
    """A model with these weights; refused where they are those of another one."""
    module = make()
    mine = module.state_dict()
    for name, value in mine.items():
        if name not in state:
            raise FedloomError(
                f"{what} has no '{name}', which this model has: it belongs to another model. Use "
                "the same --model and model_options."
            )
        if state[name].shape != value.shape:
            raise FedloomError(
                f"{what} has '{name}' of shape {tuple(state[name].shape)}, and this model of "
                f"{tuple(value.shape)}. Choose the same --model and model_options, and data with "
                "as many classes."
            )
        if not torch.isfinite(state[name]).all():
            raise FedloomError(f"{what} has NaN or infinite values in '{name}'.")
    if odd := sorted(set(state) - set(mine)):
        raise FedloomError(
            f"{what} has '{odd[0]}', which this model does not have: it belongs to another "
            "model. Use the same --model and model_options."
        )
    module.load_state_dict(dict(state))
    return module
