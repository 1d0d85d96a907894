"""SCAFFOLD (Karimireddy et al. 2020), written out: state on both sides."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

import fedloom
from fedloom.kinds import Weights
from fedloom.local import Back, Context, LocalRule
from fedloom.mix import Average, Gathering, Mixed


@dataclass(frozen=True)
class Corrected(LocalRule):
    """y ← y − η(g + c − c_i); after K steps c_i⁺ = c_i − c + (x − y)/(Kη)."""

    told: ClassVar = {"c": Weights()}
    keeps: ClassVar = {"ci": Weights()}
    sends: ClassVar = {"dc": Weights()}

    def direction(self, grad: Tensor, weights: Tensor, me: Context) -> Tensor:
        return grad + me.told["c"] - me.kept["ci"]

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        x, y, c, ci = me.start, row[: len(me.start)], me.told["c"], me.kept["ci"]
        new = ci - c + (x - y) / (me.steps * me.lr) if me.steps else ci
        return Back(row, keeps={"ci": new}, sends={"dc": new - ci})


@dataclass(frozen=True)
class AverageBoth(Average):
    """x ← mean of the models, by n_k as in FedAvg;  c ← c + Σ Δc_i / N."""

    keeps: ClassVar = {"c": Weights()}
    takes: ClassVar = frozenset({"dc"})

    def combine(self, g: Gathering) -> Mixed:
        c = g.state["c"] + sum(g.sent["dc"]) / g.total
        return replace(super().combine(g), state={"c": c})


class Scaffold(fedloom.MethodOptions):
    """FedAvg along gradients corrected for how this client's usually differ from the average."""

    name = "my-scaffold"
    family = "example"
    source = "Karimireddy et al. 2020"

    def build(self) -> fedloom.Method:
        return fedloom.Method(local=Corrected(), mix=AverageBoth())
