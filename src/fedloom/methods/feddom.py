"""feddom (S4): nodes combine a dominating set of the nodes they know."""

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
    """Nodes that meet exchange what they know, including what they heard earlier in the round:
    models, data sizes, accuracies, who met whom. Each node scores the nodes of its own graph, takes
    a greedy dominating set, weights its members by AHP and WASPAS and moves towards their mean:
    w_i ← δ Σ Q̄_j w_j + (1 − δ) w_i."""

    name = "feddom"
    source = "S4"
    kind: ClassVar[type[DominatingSet]] = DominatingSet

    theta: float = Field(0.2, ge=0, le=1, description="θ: accuracy threshold")
    balance: float = Field(0.4, ge=0, le=1, description="λ: cosine (1) or Pearson (0) distance")
    delta: float = Field(0.7, ge=0, le=1, description="δ: step towards the dominating set")
    pairwise: list[list[float]] = Field(
        [list(row) for row in PAIRWISE],
        description="3×3 AHP matrix: how much accuracy, data size and score outweigh each other",
    )
    layers: str = Field("all", description="layers compared by distance: all, head, ...")
    members: Literal["dominating", "all"] = Field(
        "dominating", description="nodes to combine: a dominating set, or all known nodes"
    )
    weigh: Literal["waspas", "equal", "size"] = Field(
        "waspas", description="their weights: by AHP and WASPAS, equal, or by data size"
    )
    neighbours: int | None = Field(
        None, ge=1, description="report at most this many neighbours, the latest; none: all"
    )
    most: int | None = Field(
        None, ge=1, description="keep at most this many nodes in a graph, the newest; none: all"
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
        description="a node that hears from nobody still moves towards what it knows from earlier "
        "rounds (forget)",
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
