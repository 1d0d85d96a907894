"""What a model takes: images as floats or, where it looks its input up, tokens as integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)


def blank(module: nn.Module, shape: Sequence[int], samples: int) -> Tensor:
    """Samples of zeros, of the type that the model takes and where its weights are."""
    like = next(module.parameters(), torch.zeros(()))
    dtype = torch.int64 if looks_up(module, shape) else like.dtype
    return torch.zeros((samples, *shape), dtype=dtype, device=like.device)


def looks_up(module: nn.Module, shape: Sequence[int]) -> bool:
    """Whether the model's input are tokens: what is given to an embedding follows from them.

    An embedding alone does not tell: that of positions is given the same for all images.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _LOOK_UPS)]
    if not layers:
        return False
    given: list[list[Tensor]] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given[-1].append(inputs[0] if inputs else next(iter(named.values())))

    device, training = next(module.parameters()).device, module.training
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        for token in (0, 1):
            given.append([])
            with torch.no_grad():
                module.eval()(torch.full((2, *shape), token, device=device))
    except Exception:  # whatever a model raises that takes no whole numbers
        return False
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return any(not torch.equal(a, b) for a, b in zip(*given, strict=True))
