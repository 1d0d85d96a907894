"""What if nodes could read the newest models of those they know? For diagnosis only.

Where what nodes knew in earlier rounds counts (`forget`), some of feddom's models are old. Here a
node still knows only whom it was told of, but takes their models as they are now, which no node
could do: it breaks the rule that everything is local, to show what age costs. Compare

    fedloom compare feddom:forget=3,links=3 examples/feddom_oracle.py --clients 50 --rounds 50
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from fedloom.methods.feddom import FedDom
from fedloom.mix import DominatingSet
from fedloom.mix.knowledge import Knowledge


@dataclass(frozen=True)
class Oracle(DominatingSet):
    """A dominating set whose members' models are never old."""

    def places(self, knowledge: Knowledge, node: int, others: np.ndarray) -> np.ndarray:
        newest = np.zeros(len(knowledge.known), dtype=np.int64)
        np.maximum.at(newest, knowledge.entries.owner, np.arange(len(knowledge.entries)))
        return newest[others]  # entries stand in the order in which they were told


class FedDomOracle(FedDom):
    """feddom with the newest models of all that a node knows, which it could not have."""

    name = "feddom-oracle"
    family = "example"
    kind = Oracle

    forget: int | None = Field(3, ge=0, description="earlier rounds whose models count")
    links: int | None = Field(3, ge=0, description="earlier rounds whose meetings count as links")
