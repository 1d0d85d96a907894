"""What happens to a model on a client before it is scored.

`AsIs` scores what the state gives; `FineTune` lets the client learn from the support part of its
test data first and is scored on the query part, with the score before it kept beside.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedloom.errors import FedloomError
from fedloom.local.rule import LocalRule
from fedloom.local.sgd import SGD

#: what the setting `score_on` may ask for → the part of a client's data
SCORED = {"test": "test", "query": "test-query", "validation": "validation"}


@dataclass(frozen=True)
class Adapt:
    """The rule, data part and duration of the adaptation, and where the model is scored."""

    rule: LocalRule | None = None  # None: not at all
    scored: str = "test"
    learns: str = "test-support"
    epochs: int = 1  # passes, in batches of the run's size
    lr: float | None = None  # None: the run's own

    @property
    def score_on(self) -> str:
        """Where it is scored unless a run says otherwise, by the names that the setting has."""
        return next((name for name, part in SCORED.items() if part == self.scored), "auto")

    def on(self, part: str) -> Adapt:
        """The same, scored on this part (`auto`: its own), so that methods can be compared on the
        same samples."""
        if part in ("auto", self.score_on):
            return self
        if self.scored != "test":
            raise FedloomError(
                f"score_on={part} can't be: this method adapts on some of the clients' test data "
                f"and is scored on the rest ({self.scored}), so it would be scored on data that "
                "it was tuned on. Leave score_on out."
            )
        return replace(self, scored=SCORED[part])


@dataclass(frozen=True)
class AsIs(Adapt):
    """The model is scored as it is, on all of the client's test part."""


@dataclass(frozen=True)
class FineTune(Adapt):
    """One pass of `rule` over the support part by default, then scored on the query part."""

    rule: LocalRule | None = field(default_factory=SGD)
    scored: str = "test-query"
