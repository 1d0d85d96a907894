"""SCAFFOLD (Karimireddy et al. 2020): control variates against client drift."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import Controlled
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import ControlledAverage


@register
class Scaffold(MethodOptions):
    """Clients step along g + c − c_i: the gradient, corrected for how this client's usually differs
    from the average. Both sides update their control variates from the round's update."""

    name = "scaffold"
    family = "classic"
    source = "Karimireddy et al. 2020"
    # (x − y)/(Kη) is a mean gradient only after K plain steps.
    fixed = {"optimiser": "sgd", "optimiser_state": "fresh", "momentum": 0.0}

    server_lr: float = Field(1.0, gt=0, le=1e30, description="η_g: server learning rate")

    def build(self) -> Method:
        return Method(local=Controlled(), mix=ControlledAverage(lr=self.server_lr))
