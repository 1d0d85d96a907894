"""DS-FL (Itahara et al. 2021; S0 §3-4-2): clients exchange class probabilities, not weights."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import Codistillation
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Sharpened
from fedloom.newcomer import MeanPart


@register
class DSFL(MethodOptions):
    """Every client has its own model and sends its predictions on public images. The server
    averages and sharpens them, and all clients learn from the result in the next round, so traffic
    does not depend on the size of the model. The public images need no labels."""

    name = "ds-fl"
    family = "distillation"
    source = "Itahara et al. 2021; S0 §3-4-2"
    defaults = {"public": "share:0.05"}

    temperature: float = Field(0.1, gt=0, le=1e30, description="T of the softmax; lower is sharper")

    def build(self) -> Method:
        mix = Sharpened(self.temperature)
        return Method(local=Codistillation(), mix=mix, newcomer=MeanPart())
