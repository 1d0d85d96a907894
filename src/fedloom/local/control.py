"""Rules with state on the client: SCAFFOLD's control variates, Ditto's second model, pFedMe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Weights
from fedloom.local.rule import (
    Back,
    Batch,
    Context,
    LocalRule,
    Net,
    Params,
    Pull,
    Samples,
    counted,
    gradient,
    non_negative,
)


@dataclass(frozen=True)
class Controlled(LocalRule):
    """SCAFFOLD (Karimireddy et al. 2020, algorithm 1): y ← y − η(g + c − c_i); after K steps
    c_i⁺ = c_i − c + (x − y)/(Kη), and the client sends Δc = c_i⁺ − c_i."""

    told = {"c": Weights()}
    keeps = {"ci": Weights()}
    sends = {"dc": Weights()}

    def pull(self, me: Context) -> Pull | None:
        return Pull(push=me.told["c"] - me.kept["ci"])

    def finish(self, me: Context, row: Tensor, grad: Tensor) -> Back:
        y, c, ci = row[: len(me.start)], me.told["c"], me.kept["ci"]
        new = ci - c + (me.start - y) / (me.steps * me.lr) if me.steps else ci
        return Back(row, keeps={"ci": new}, sends={"dc": new - ci})


@dataclass(frozen=True)
class Tethered(LocalRule):
    """Ditto's own model (Li et al. 2021): v ← v − η(∇F(v) + λ(v − w)), w as it was told."""

    lam: float
    told = {"model": Weights()}

    def __post_init__(self) -> None:
        non_negative("lam", self.lam)

    def pull(self, me: Context) -> Pull | None:
        return Pull(self.lam, me.told["model"])


@dataclass(frozen=True)
class MoreauEnvelope(LocalRule):
    """pFedMe (Dinh et al. 2020, algorithm 1): w ← w − ηλ(w − θ̂(w)), where θ̂ is about the minimum
    of F(θ) + (λ/2)‖θ − w‖², found by `inner` steps of rate `alpha` on the step's batch."""

    lam: float = 15.0
    alpha: float = 0.01
    inner: int = 5
    differentiates = True
    alike = True

    def __post_init__(self) -> None:
        non_negative("lam", self.lam)
        if self.inner < 1:
            raise FedloomError(f"inner must be at least 1, not {self.inner}.")

    def objective(self, net: Net, params: Params, data: Mapping[str, Batch], me: Context) -> Tensor:
        # Its gradient, with θ̂ held fixed, is λ(w − θ̂).
        batch, theta = data["train"], dict(params)

        def loss(at: Params) -> Tensor:
            return batch.loss(net(at, batch.x))

        for _ in range(self.inner):
            grads = gradient(loss, theta, differentiable=False)
            theta = {
                n: t - self.alpha * (grads[n] + self.lam * (t - params[n]))
                for n, t in theta.items()
            }
        far = sum(((params[n] - theta[n].detach()) ** 2).sum() for n in params)
        return self.lam / 2 * far  # type: ignore[return-value]

    def passes(self, step: Samples) -> tuple[int, int]:
        return self.inner * counted(step), 0
