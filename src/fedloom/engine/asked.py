"""A local rule's functions, with what they return checked: all engines ask rules through here.

It knows one rule and what it was given, and nothing of clients: who asks says whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.local.rule import Back, Batch, Budget, Context, LocalRule, Net, Params, Pull, Samples
from fedloom.returned import returned, returned_if_any, returned_names


def rule_at(rule: LocalRule, round: int) -> LocalRule:
    """The rule of a round."""
    return returned(rule, "at", rule.at(round), LocalRule)


def plan(
    rule: LocalRule, sizes: Mapping[str, int], budget: Budget, rng: np.random.Generator
) -> list[Samples]:
    """The steps of a round."""
    steps = returned(rule, "plan", rule.plan(sizes, budget, rng), list)
    for step in steps:
        for part, at in returned_names(rule, "plan", step, "as a step").items():
            returned(rule, "plan", at, np.ndarray, f"for '{part}' in a step")
    return steps


def widths(
    rule: LocalRule, steps: int, capacity: float, rng: np.random.Generator
) -> list[float | None]:
    """The width of the narrower net of each step (None: the client's own)."""
    drawn = returned(rule, "widths", rule.widths(steps, capacity, rng), list)
    if len(drawn) != steps:
        raise FedloomError(
            f"{type(rule).__name__}.widths returned {len(drawn)} widths; it must return one for "
            f"each of {steps} steps."
        )
    return [None if width == capacity else width for width in drawn]


def objective(
    rule: LocalRule, net: Net, params: Params, data: Mapping[str, Batch], me: Context
) -> Tensor:
    """The scalar to minimise."""
    loss = returned(rule, "objective", rule.objective(net, params, data, me), Tensor)
    if loss.dim():
        raise FedloomError(
            f"{type(rule).__name__}.objective returned a Tensor of shape {tuple(loss.shape)}; it "
            "must return a single number, such as the mean over the samples."
        )
    return loss


def pull(rule: LocalRule, me: Context) -> Pull | None:
    """What is added to all gradients, such that kernels can read it."""
    found = returned_if_any(rule, "pull", rule.pull(me), Pull)
    if found is None:
        return None
    for name, value in (("to", found.to), ("push", found.push)):
        if value is not None and value.shape != me.start.shape:
            raise FedloomError(
                f"{type(rule).__name__}.pull returned a Pull whose `{name}` has the shape "
                f"{tuple(value.shape)}; it must have the weights' shape, {tuple(me.start.shape)}."
            )
    to, push = (None if t is None else t.to(me.start).contiguous() for t in (found.to, found.push))
    return Pull(float(found.strength), to, push)


def direction(rule: LocalRule, grad: Tensor, weights: Tensor, me: Context) -> Tensor:
    """The gradient to follow."""
    if type(rule).direction is LocalRule.direction:
        found = pull(rule, me)
        return grad if found is None else found.added(grad, weights)
    bent = returned(rule, "direction", rule.direction(grad, weights, me), Tensor)
    if bent.shape != grad.shape:
        raise FedloomError(
            f"{type(rule).__name__}.direction returned a Tensor of shape {tuple(bent.shape)}; it "
            f"must have the gradient's shape, {tuple(grad.shape)}."
        )
    return bent.to(grad)  # kernels read its memory


def _is_count(n: object) -> bool:
    whole = isinstance(n, int | np.integer) and not isinstance(n, bool)
    return whole and 0 <= n < 1 << 40  # type: ignore[operator]


def passes(rule: LocalRule, steps: Sequence[Samples]) -> tuple[int, int]:
    """Samples that went forward and back, and those of which that was differentiated again."""
    once = again = 0
    for step in steps:
        found = rule.passes(step)
        if not isinstance(found, tuple) or len(found) != 2 or not all(map(_is_count, found)):
            raise FedloomError(
                f"{type(rule).__name__}.passes returned {found!r}; it must return two whole "
                "numbers: samples that go forward and back, and those differentiated again."
            )
        once, again = once + int(found[0]), again + int(found[1])
    return once, again


def finish(rule: LocalRule, me: Context, row: Tensor, grad: Tensor) -> Back:
    """The result of a round; names and shapes are checked by who knows the client."""
    back = returned(rule, "finish", rule.finish(me, row, grad), Back)
    returned(rule, "finish", back.row, Tensor, "as row of its Back")
    for word, values in (("keeps", back.keeps), ("sends", back.sends)):
        for name, value in returned_names(rule, "finish", values, f"as `{word}`").items():
            returned(rule, "finish", value, Tensor, f"as '{name}' in `{word}`")
    return back
