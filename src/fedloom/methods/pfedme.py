"""pFedMe (Dinh et al. 2020): personal models by Moreau envelopes."""

from __future__ import annotations

from pydantic import Field

from fedloom.adapt import FineTune
from fedloom.local import MoreauEnvelope, Proximal
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import ServerStep


@register
class PFedMe(MethodOptions):
    """Learns a shared model w that is close to every client's personal model θ = argmin F(θ) +
    (λ/2)‖θ − w‖². A client is scored with its θ, found on its support part."""

    name = "pfedme"
    family = "personal"
    source = "Dinh et al. 2020"
    at_test = ("tune_epochs",)

    lam: float = Field(15.0, ge=0, le=1e30, description="λ: how strongly θ is pulled towards w")
    alpha: float = Field(0.01, gt=0, le=1e30, description="learning rate of the steps that find θ")
    inner: int = Field(5, ge=1, description="steps per batch that find θ")
    beta: float = Field(1.0, gt=0, le=1e30, description="β: server learning rate")
    tune_epochs: int = Field(1, ge=1, description="passes over the support part at test time")

    def build(self) -> Method:
        theta = FineTune(Proximal(self.lam), epochs=self.tune_epochs, lr=self.alpha)
        local = MoreauEnvelope(self.lam, self.alpha, self.inner)
        return Method(local=local, mix=ServerStep(lr=self.beta), adapt=theta)
