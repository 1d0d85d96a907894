"""FedAvg and FedPer, fine-tuned before scoring (S1 §4.3.3): the baselines for meta-learning.

Training is unchanged; at test time a client first fine-tunes the model on its support part.
"""

from __future__ import annotations

from pydantic import Field

from fedloom.adapt import FineTune
from fedloom.local import SGD
from fedloom.method import First, Method
from fedloom.methods.registry import FIRST, MethodOptions, register
from fedloom.mix import Average
from fedloom.newcomer import MeanPart


class _Tuned(MethodOptions):
    family = "meta baseline"
    source = "S1 §4.3.3"
    at_test = ("tune_epochs", "tune_lr")

    tune_epochs: int = Field(1, ge=1, description="passes over the support part at test time")
    tune_lr: float | None = Field(
        None, gt=0, le=1e30, description="learning rate at test time; none: the run's"
    )

    @property
    def adapt(self) -> FineTune:
        return FineTune(epochs=self.tune_epochs, lr=self.tune_lr)


@register
class FedAvgMeta(_Tuned):
    """Trained as FedAvg; every client fine-tunes on its support part before it is scored."""

    name = "fedavg-meta"

    def build(self) -> Method:
        return Method(local=SGD(), mix=Average(), adapt=self.adapt)


@register
class FedPerMeta(_Tuned):
    """Trained as FedPer; every client fine-tunes on its support part before it is scored."""

    name = "fedper-meta"

    private: str = Field("head", description="part kept by clients: head, head:K, a layer")
    first: First = Field("initial", description=FIRST)

    def build(self) -> Method:
        mix = Average(f"not {self.private}")
        return Method(local=SGD(), mix=mix, adapt=self.adapt, newcomer=MeanPart(), first=self.first)
