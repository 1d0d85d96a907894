"""What happens to a model on a client before it is scored.

`AsIs` scores what the state gives; `FineTune` lets the client learn from the support part of its
test data first and is scored on the query part, with the score before it kept beside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.local.rule import LocalRule
from fedloom.local.sgd import SGD


@dataclass(frozen=True)
class Adapt:
    """By which rule, on which part and for how long a model is adapted, and where it is scored."""

    rule: LocalRule | None = None  # None: not at all
    scored: str = "test"
    learns: str = "test-support"
    epochs: int = 1  # passes, in batches of the run's size
    lr: float | None = None  # None: the run's own


@dataclass(frozen=True)
class AsIs(Adapt):
    """The model is scored as it is, on all of the client's test part."""


@dataclass(frozen=True)
class FineTune(Adapt):
    """One pass of `rule` over the support part by default, then scored on the query part."""

    rule: LocalRule | None = field(default_factory=SGD)
    scored: str = "test-query"
