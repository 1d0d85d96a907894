"""FedPer (Arivazhagan et al. 2019; S1 §3.2.1): a shared base, a private head."""

from __future__ import annotations

from pydantic import Field

from fedloom.local import SGD
from fedloom.method import First, Method
from fedloom.methods.registry import FIRST, MethodOptions, register
from fedloom.mix import Average
from fedloom.newcomer import MeanPart


@register
class FedPer(MethodOptions):
    """Clients train the whole model, send the shared part and keep the private one; the server
    averages the shared parts, weighted by n_i. A newcomer gets the average of all private parts."""

    name = "fedper"
    family = "personal"
    source = "Arivazhagan et al. 2019; S1 §3.2.1"

    private: str = Field("head", description="part that clients keep: head, head:K, a layer, none")
    first: First = Field("initial", description=FIRST)

    def build(self) -> Method:
        mix = Average(f"not {self.private}")
        return Method(local=SGD(), mix=mix, newcomer=MeanPart(), first=self.first)
