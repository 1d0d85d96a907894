"""The check at the door: every message is validated on arrival, before it is used.

Names, shapes and types are checked where a `Sent` is made; here its values must be finite and, if
the run asks for it, a change of a size that is usual in this round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.round.messages import Sent

SCREENS = "none | norm:SIZE | norm:TIMESx (relative to the round's median)"


@dataclass(frozen=True)
class Refusal:
    """A message that was refused, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Screen:
    """A bound on the norm of a client's change: absolute, or as a multiple of the median.

    >>> Screen.parse("norm:10x"), Screen.parse("norm:5")
    (Screen(bound=10.0, relative=True), Screen(bound=5.0, relative=False))
    """

    bound: float | None = None
    relative: bool = False

    @staticmethod
    def parse(spec: str) -> Screen:
        if spec == "none":
            return Screen()
        word, _, number = spec.partition(":")
        try:
            bound = float(number.removesuffix("x"))
        except ValueError:
            bound = 0.0
        if word != "norm" or not 0 < bound < float("inf"):
            raise FedloomError(f"screen={spec} is not valid. Give {SCREENS}.")
        return Screen(bound, number.endswith("x"))

    def __bool__(self) -> bool:
        return self.bound is not None

    def look(self, sent: Sent, starts: Tensor) -> list[Refusal]:
        """Messages that are not let in; `starts` is where each model began, as far as is known."""
        bad = {i for values in (sent.model, *sent.values.values()) for i in unsound(values)}
        why = "it holds NaN or infinite values"
        wrong = [Refusal(int(sent.clients[i]), why) for i in sorted(bad)]
        if self.bound is None:
            return wrong
        good = [i for i in range(len(sent.clients)) if i not in bad]
        norms = np.array([_change(sent, starts, i) for i in good])
        limit = self.bound * float(np.median(norms)) if self.relative and len(norms) else self.bound
        for i, norm in zip(good, norms, strict=True):
            if norm > limit:
                usual = f", {norm / limit * self.bound:.3g} times the median" * self.relative
                reason = f"its change has norm {norm:.3g}{usual}, and the bound is {limit:.3g}"
                wrong.append(Refusal(int(sent.clients[i]), reason))
        return sorted(wrong, key=lambda refusal: refusal.client)


def refuse_heard(
    screen: Screen, sent: Sent, own: Tensor, starts: Callable[[], Tensor], edges: np.ndarray
) -> Iterator[tuple[int, Refusal, bool]]:
    """Among nodes that meet: who turns away whose model, and whether it meets that node.

    A node measures what it hears by how far that is from its own model, relative to the lower
    median of that for those it meets and of its own change in the round: it can't know what others
    heard. The bound that it finds so is also that for models which come through others.
    """
    bad = set(unsound(sent.model))
    if screen.bound is None and not bad:
        return
    nodes = sent.clients
    place = np.searchsorted(nodes, edges)
    meets = np.zeros((len(nodes), len(nodes)), dtype=bool)
    meets[place[:, 0], place[:, 1]] = meets[place[:, 1], place[:, 0]] = True
    for me, i in itertools.product(range(len(nodes)), sorted(bad)):
        if me != i:
            refusal = Refusal(int(nodes[i]), "it holds NaN or infinite values")
            yield int(nodes[me]), refusal, bool(meets[me, i])
    if screen.bound is None:
        return
    change = (own.double() - starts().double()).norm(dim=1).numpy()
    good = np.array([i for i in range(len(nodes)) if i not in bad], dtype=np.int64)
    apart = torch.cdist(own.double(), sent.model[torch.from_numpy(good)].double()).numpy()
    for me, node in enumerate(nodes):
        met, far = meets[me, good], apart[me]
        if not met.any():
            continue
        usual = np.sort(np.append(far[met], change[me]))[met.sum() // 2]
        limit = screen.bound * usual if screen.relative else screen.bound
        for k in np.flatnonzero((far > limit) & (good != me)):
            reason = f"it is {far[k]:.3g} from what it met, and the bound is {limit:.3g}"
            yield int(node), Refusal(int(nodes[good[k]]), reason), bool(met[k])


def unsound(rows: Tensor) -> list[int]:
    """The rows that hold NaN or infinite values."""
    # The sum tells at once; only where it is not finite must every value be looked at.
    if torch.isfinite(rows.sum()):
        return []
    return [i for i, row in enumerate(rows) if not torch.isfinite(row).all()]


def _change(sent: Sent, starts: Tensor, i: int) -> float:
    change = sent.model[i].double() - starts[i].double()
    index = sent.indexes[i]
    return float((change if index is None else change[index]).norm())
