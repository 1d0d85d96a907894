"""FedNova (Wang et al. 2020): clients that take more local steps do not get more weight."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import NormalisedAverage


@register
class FedNova(MethodOptions):
    """Every client's update is divided by its (effective) number of local steps before averaging.
    With equal numbers of steps it is FedAvg."""

    name = "fednova"
    family = "classic"
    source = "Wang et al. 2020"
    fixed = {"optimiser": "sgd", "optimiser_state": "fresh"}  # a_k is known for SGD only

    server_lr: float = Field(1.0, gt=0, le=1e30, description="server learning rate")

    def build(self) -> Method:
        return Method(local=SGD(), mix=NormalisedAverage(lr=self.server_lr))
