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
    """Every client has a model of its own. It sends what that says of public images, the server
    sharpens the mean of it, and everybody learns from that in the next round: traffic does not
    depend on the size of the model. The public images need no labels."""

    name = "ds-fl"
    family = "distillation"
    source = "Itahara et al. 2021; S0 §3-4-2"
    defaults = {"public": "share:0.05"}

    temperature: float = Field(0.1, gt=0, le=1e30, description="T: below 1 makes the mean surer")

    def build(self) -> Method:
        mix = Sharpened(self.temperature)
        return Method(local=Codistillation(), mix=mix, newcomer=MeanPart())
