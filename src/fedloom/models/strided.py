"""1×1 convolutions with a stride, computed in a way that does not crash."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F


def tame_strides(module: nn.Module) -> nn.Module:
    """Let 1×1 convolutions with a stride drop the positions that they pass over first.

    The result is the same. oneDNN as of torch 2.13 (on AVX2) writes beyond its memory in the
    gradient of such a convolution over 2 to 6 channels that lie pixel by pixel, which a narrow
    sub-model of a ResNet has.
    """
    for layer in module.modules():
        if (
            type(layer) is nn.Conv2d
            and layer.kernel_size == (1, 1)
            and max(layer.stride) > 1
            and layer.padding in ((0, 0), "valid")
        ):
            layer.__dict__["_conv_forward"] = partial(_pointwise, layer.stride, layer.groups)
    return module


def _pointwise(
    stride: tuple[int, ...], groups: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    down, right = stride
    return F.conv2d(x[..., ::down, ::right], weight, bias, groups=groups)
