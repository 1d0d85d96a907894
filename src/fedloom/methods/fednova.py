"""FedNova (Wang et al. 2020): clients that take more steps do not count for more."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import NormalisedAverage


@register
class FedNova(MethodOptions):
    """Every client's change is divided by the length of its local walk before it is averaged. With
    equal numbers of steps it is FedAvg."""

    name = "fednova"
    family = "classic"
    source = "Wang et al. 2020"
    fixed = {"optimiser": "sgd", "optimiser_state": "fresh"}  # whose walks it knows the length of

    server_lr: float = Field(1.0, gt=0, le=1e30, description="step of the server")

    def build(self) -> Method:
        return Method(local=SGD(), mix=NormalisedAverage(lr=self.server_lr))
