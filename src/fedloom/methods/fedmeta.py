"""FedMeta and FedMeta-Per (Chen et al. 2018; S1 §3.1, §3.3): meta-learning, alone and with private
parts.

The learning rate of the run is β, the one of the meta step; `alpha` is the inner one. Every client
fine-tunes on its support part, at the inner rate, before it is scored.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedloom.adapt import FineTune
from fedloom.errors import FedloomError
from fedloom.local import MAML, SGD, LearnedRates, LocalRule, MetaSGD, Outer, Reptile
from fedloom.method import First, Method
from fedloom.methods.registry import FIRST, MethodOptions, register
from fedloom.mix import Average
from fedloom.newcomer import BestPart, Newcomer, Shared


class _Meta(MethodOptions):
    at_test = ("tune_epochs",)

    alpha: float = Field(0.01, ge=0, le=1e30, description="learning rate of the inner steps")
    inner_steps: int | None = Field(
        None, ge=1, description="inner steps; none: one pass over the support batches"
    )
    outer: Outer = Field(
        "round",
        description="outer steps: round, one per epoch on the mean loss of all query batches; "
        "batch, one per query batch",
    )
    tune_epochs: int = Field(1, ge=1, description="passes over the support part at test time")

    def _method(self, local: LocalRule, adapt: FineTune) -> Method:
        return Method(
            local, Average(self._shared), adapt=adapt, newcomer=self._newcomer, first=self._first
        )

    @property
    def _first(self) -> First:
        return "initial"

    @property
    def _shared(self) -> str:
        return "all"

    @property
    def _newcomer(self) -> Newcomer:
        return Shared()


class _MAML(_Meta):
    rule: Literal["maml", "fomaml", "reptile"] = Field(
        "maml", description="maml, fomaml (no second derivatives) or reptile"
    )
    epsilon: float = Field(1.0, gt=0, le=1, description="ε of reptile: fraction of the way to move")

    @model_validator(mode="after")
    def _for_reptile(self) -> _MAML:
        if self.epsilon != 1 and self.rule != "reptile":
            raise FedloomError(f"epsilon={self.epsilon} would do nothing: it is for rule=reptile.")
        if self.rule == "reptile" and (self.outer != "round" or self.inner_steps is not None):
            raise FedloomError(
                "rule=reptile has no inner and outer steps: it is plain SGD, then a step part of "
                "the way there. Leave outer and inner_steps out."
            )
        return self

    def build(self) -> Method:
        first_order = self.rule == "fomaml"
        local: LocalRule = MAML(self.alpha, self.inner_steps, first_order, self.outer)
        if self.rule == "reptile":
            local = Reptile(self.epsilon)
        return self._method(local, FineTune(SGD(), epochs=self.tune_epochs, lr=self.alpha))


class _MetaSGD(_Meta):
    def build(self) -> Method:
        adapt = FineTune(LearnedRates(self.alpha), epochs=self.tune_epochs, lr=1.0)
        return self._method(MetaSGD(self.alpha, self.inner_steps, outer=self.outer), adapt)


class _Per(_Meta):
    private: str = Field("head", description="part kept by clients: head, head:K, a layer")
    first: First = Field("initial", description=FIRST)

    @property
    def _first(self) -> First:
        return self.first

    @property
    def _shared(self) -> str:
        return f"not {self.private}"

    @property
    def _newcomer(self) -> Newcomer:
        return BestPart()


@register
class FedMetaMAML(_MAML):
    """Clients adapt on their support part and send w − β∇_w L(ŵ; query), the gradient taken through
    the adaptation; the server averages by the size of the query parts."""

    name = "fedmeta-maml"
    family = "meta"
    source = "Chen et al. 2018; S1 §3.1.1"


@register
class FedMetaSGD(_MetaSGD):
    """FedMeta with learned inner rates, one per weight, which are averaged like the weights."""

    name = "fedmeta-metasgd"
    family = "meta"
    source = "Chen et al. 2018; S1 §3.1.2"


@register
class FedMetaPerMAML(_Per, _MAML):
    """FedMeta's step on a shared base and a private part. A newcomer tries every private part,
    fine-tunes each on its support part and keeps the one with the lowest loss there."""

    name = "fedmeta-per-maml"
    family = "personal + meta"
    source = "S1 §3.3"


@register
class FedMetaPerSGD(_Per, _MetaSGD):
    """FedMeta-Per with learned rates: rates of shared weights are shared, rates of private weights
    are private."""

    name = "fedmeta-per-metasgd"
    family = "personal + meta"
    source = "S1 §3.3"
