"""The scaler of sub-models: outputs of hidden layers grow as their number shrinks.

A layer with a share r of its inputs gives about r of its sum. In training, and only there, its
output is multiplied by 1/r (inverted dropout's scaling, S2 §3.3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class _Scaler:
    factor: float
    always: bool = False

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.factor if layer.training or self.always else output


def scale_output(layer: nn.Module, factor: float, always: bool = False) -> None:
    """Multiply what this layer gives in training, or `always`."""
    layer.register_forward_hook(_Scaler(factor, always))


def scaler_of(hook: object, training: bool = True) -> float | None:
    """The factor of a hook that `scale_output` made, in training or not; None for others."""
    if not isinstance(hook, _Scaler):
        return None
    return hook.factor if training or hook.always else 1.0
