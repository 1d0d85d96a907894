"""Learning without a server: peer-to-peer FedAvg and WAFL (S4).

Nodes train on their own data and combine models with those they meet. Who meets whom is a setting
of the run (`topology`); by default nodes move (random waypoint).
"""

from __future__ import annotations

from pydantic import Field

from fedloom.adapt import Adapt, AsIs
from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import Mix, PeerAverage, Pull
from fedloom.newcomer import MeanPart
from fedloom.topology import Peers

_RELAY = "relay what was heard earlier in the round, so that nodes combine all of it"


class Serverless(MethodOptions):
    """Base of the methods without a server. A newcomer gets the mean of all models."""

    family = "serverless"
    fixed = {"participation": 1.0}

    private: str = Field("none", description="part that nodes keep private: none, head, ...")
    self_training: int = Field(
        0, ge=0, description="rounds of local training before the first exchange"
    )
    alone: bool = Field(True, description="a node that meets nobody still trains in that round")

    def _method(self, mix: Mix) -> Method:
        peers = Peers(self_training=self.self_training, alone=self.alone)
        return Method(SGD(), mix, peers, adapt=self._adapt, newcomer=MeanPart())

    @property
    def _adapt(self) -> Adapt:
        return AsIs()

    @property
    def _shared(self) -> str:
        return f"not {self.private}"


@register
class P2PFedAvg(Serverless):
    """A node averages its model with those of the nodes it meets in the round, weighted by n_k."""

    name = "p2p-fedavg"
    source = "S4, baseline"

    relay: bool = Field(False, description=_RELAY)

    def build(self) -> Method:
        return self._method(PeerAverage(self._shared, self.relay))


@register
class WAFL(Serverless):
    """w_n ← w_n + λ Σ (w_k − w_n)/(|nbr(n)| + 1) over the nodes it meets, computed for all nodes
    from the models before the exchange. A node that meets nobody keeps its model."""

    name = "wafl"
    source = "Ochiai et al. 2022; S4, baseline"

    rate: float = Field(1.0, ge=0, le=2, description="λ: step towards the models of others")

    relay: bool = Field(False, description=_RELAY)

    def build(self) -> Method:
        return self._method(Pull(self.rate, self._shared, self.relay))
