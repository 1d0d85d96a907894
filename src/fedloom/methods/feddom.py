"""feddom (S4): nodes that combine a dominating set of those they know."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedloom.method import Method
from fedloom.methods.registry import register
from fedloom.methods.serverless import Serverless
from fedloom.mix import DominatingSet
from fedloom.mix.dominating import PAIRWISE


@register
class FedDom(Serverless):
    """Nodes that meet exchange what they know by then, their own and what they heard earlier in the
    round: models, data sizes, accuracies, who met whom. Each scores the nodes of its own graph,
    takes a greedy dominating set, weighs its members by AHP and WASPAS and moves towards their
    mean: w_i ← δ Σ Q̄_j w_j + (1 − δ) w_i."""

    name = "feddom"
    source = "S4"
    kind: ClassVar[type[DominatingSet]] = DominatingSet

    theta: float = Field(0.2, ge=0, le=1, description="θ: threshold of the accuracy")
    balance: float = Field(0.4, ge=0, le=1, description="λ: cosine (1) or Pearson (0) distance")
    delta: float = Field(0.7, ge=0, le=1, description="δ: how far towards the dominating set")
    pairwise: list[list[float]] = Field(
        [list(row) for row in PAIRWISE],
        description="3×3: how many times accuracy, data size and score outweigh each other",
    )
    layers: str = Field("all", description="layers that distances are taken on: all, head, ...")
    members: Literal["dominating", "all"] = Field(
        "dominating", description="whom a node combines: a dominating set, or all that it knows"
    )
    weigh: Literal["waspas", "equal", "size"] = Field(
        "waspas", description="their shares: by AHP and WASPAS, equal, or by data size"
    )
    neighbours: int | None = Field(
        None, ge=1, description="most neighbours that a node tells of, the last met; none: all"
    )
    most: int | None = Field(
        None, ge=1, description="most nodes in a node's graph, the newest; none: all"
    )
    forget: int | None = Field(
        0, ge=0, description="earlier rounds whose models count; 0: this round's only, none: all"
    )
    links: int | None = Field(
        0, ge=0, description="earlier rounds whose meetings count as links; 0: this round's only, "
        "none: all",
    )  # fmt: skip
    mix_alone: bool = Field(
        False,
        description="whether a node that nobody reaches still moves towards what it knows, from "
        "earlier rounds (forget)",
    )

    def build(self) -> Method:
        mix = self.kind(
            part=self._shared,
            theta=self.theta,
            balance=self.balance,
            delta=self.delta,
            pairwise=tuple(map(tuple, self.pairwise)),
            layers=self.layers,
            members=self.members,
            weigh=self.weigh,
            neighbours=self.neighbours,
            most=self.most,
            forget=self.forget,
            links=self.links,
            mix_alone=self.mix_alone,
        )
        return self._method(mix)
