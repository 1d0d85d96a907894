"""What the layers of any `nn.Module` answer to a batch, caught by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError, unknown


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """The layers that are compared unless others are named: those with weights of their own.

    >>> layers_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)))
    ('0', '3')
    """
    found = tuple(
        name
        for name, layer in module.named_modules()
        if any(p.ndim > 1 for p in layer.parameters(recurse=False))
    )
    if not found:
        raise FedloomError(
            f"{type(module).__name__} has no layer with a weight matrix: say which layers to look "
            "at."
        )
    return found


def activations(
    module: nn.Module, inputs: Tensor, layers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """What each layer answers to the inputs, flattened to samples × features: those named, or all
    with weights that answer at all.

    The module is put in evaluation mode for this, and nothing of it changes. A layer that is used
    several times gives its answers side by side.
    """
    names = layers_of(module) if layers is None else tuple(layers)
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    with _evaluating(module), _hooked(module, caught), torch.no_grad():
        try:
            module(inputs.to(_device(module, inputs)))
        except (RuntimeError, ValueError, TypeError) as e:
            reason = str(e).splitlines()[0]
            raise FedloomError(
                f"{type(module).__name__} can't take inputs of shape {tuple(inputs.shape)}: "
                f"{reason}."
            ) from e
    if layers is None:
        caught = {name: answers for name, answers in caught.items() if answers}
    out = {}
    for name, answers in caught.items():
        if not answers:
            raise FedloomError(
                f"The layer '{name}' took no part in the forward pass: leave it out."
            )
        if any(a.ndim < 1 or len(a) != len(inputs) for a in answers):
            raise FedloomError(
                f"The layer '{name}' answers with {tuple(answers[0].shape)} to {len(inputs)} "
                "inputs: choose layers whose first axis counts the samples."
            )
        out[name] = torch.cat([a.reshape(len(a), -1) for a in answers], dim=1)
    return out


def _device(module: nn.Module, inputs: Tensor) -> torch.device:
    return next((p.device for p in module.parameters()), inputs.device)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every part goes back to the mode that it was in."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextmanager
def _hooked(module: nn.Module, caught: dict[str, list[Tensor]]) -> Iterator[None]:
    parts = dict(module.named_modules())
    for name in caught:
        if name not in parts:
            raise unknown("layer", name, (n for n in parts if n))
    hooks = [parts[n].register_forward_hook(_catch(n, into)) for n, into in caught.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _catch(name: str, into: list[Tensor]) -> Callable[[nn.Module, object, object], None]:
    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(first, Tensor):
            raise FedloomError(
                f"The layer '{name}' answers with {type(output).__name__}, not a tensor: choose "
                "other layers."
            )
        into.append(first.detach())

    return hook
