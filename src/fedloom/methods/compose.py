"""Two methods as one: `heterofl+fedper` is a method like any other.

A method is a few choices (`fedloom.method`), most of which are the same as FedAvg's. Two methods
combine when they differ from FedAvg in different choices: one in which part of the model a client
trains, the other in which part it keeps, how it learns or whom it meets. If both make the same
choice, the two are merged where that makes sense and refused with a reason where it does not.
"""

from __future__ import annotations

import types
from dataclasses import fields, replace
from typing import Any

from fedloom.errors import FedloomError
from fedloom.local import SGD, LocalRule, MaskedSGD, Proximal
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, find
from fedloom.mix import Alternate, Average, Mix, PeerAverage
from fedloom.mix.base import ALL_OF_IT

SIGN = "+"

#: what a method chooses, in words
_CHOICES = {
    "topology": "who talks to whom",
    "select": "which part of the model a client trains",
    "adapt": "what happens to a model before it is scored",
    "newcomer": "what a client without a private part is given",
    "first": "what a private part starts from",
    "own": "a second model that clients keep",
}


def composed(name: str) -> type[MethodOptions]:
    """The options of all methods in a name such as `heterofl+fedper+fedprox`; where two have an
    option of one name, it is the same for both, with the default of the last."""
    kinds = [find(part) for part in name.split(SIGN)]
    twice = [k.name for k in kinds if kinds.count(k) > 1]
    if twice:
        raise FedloomError(f"{name} has {twice[0]} twice. Name each method once.")
    fixed: dict[str, Any] = {}
    for kind in kinds:
        for key, value in kind.fixed.items():
            if fixed.setdefault(key, value) != value:
                raise FedloomError(
                    f"{name} can't be combined: {kind.name} fixes {key} to {value} by definition, "
                    f"another method to {fixed[key]}."
                )

    def build(self: MethodOptions) -> Method:
        parts = [_own(kind, self).build() for kind in kinds]
        method = parts[0]
        for other in parts[1:]:
            try:
                method = together(method, other)
            except FedloomError as e:
                raise FedloomError(f"{name} can't be combined: {e}") from None
        return method

    words = {
        "__doc__": f"{' and '.join(kind.name for kind in kinds)} together: every choice in which "
        "one of them differs from FedAvg.",
        "__module__": __name__,
        "name": name,
        "family": " + ".join(dict.fromkeys(kind.family for kind in kinds)),
        "source": "; ".join(dict.fromkeys(kind.source for kind in kinds)),
        "fixed": fixed,
        "defaults": {key: value for kind in kinds for key, value in kind.defaults.items()},
        "presets": next((kind.presets for kind in kinds if kind.presets), {}),
        "at_test": tuple(key for kind in kinds for key in kind.at_test),
        "build": build,
    }
    bases = tuple(reversed(kinds))  # of options with one name, the last method's comes first
    return types.new_class(name, bases, {}, lambda space: space.update(words))


def _own(kind: type[MethodOptions], options: MethodOptions) -> MethodOptions:
    return kind(**{key: getattr(options, key) for key in kind.model_fields})


def together(first: Method, second: Method) -> Method:
    """Every choice in which either differs from FedAvg."""
    if first.topology.server and not second.topology.server:
        first, second = second, first  # how nodes mix models is up to the serverless method
    chosen: dict[str, Any] = {}
    for word, what in _CHOICES.items():
        plain, mine, other = (getattr(m, word) for m in (Method(), first, second))
        if not _alike(mine, plain) and not _alike(other, plain) and not _alike(mine, other):
            if word == "newcomer":  # the last that was named
                chosen[word] = other
                continue
            raise FedloomError(
                f"both define {what} ({_name(mine)} and {_name(other)}), and a method has only one."
            )
        chosen[word] = other if _alike(mine, plain) else mine
    return Method(
        local=_rules(first.local, second.local),
        mix=_mixes(first, second),
        **chosen,
    )


def _rules(first: LocalRule, second: LocalRule) -> LocalRule:
    """How clients learn."""
    if SGD() in (first, second) or first == second:
        return first if second == SGD() else second
    for rule, other in ((first, second), (second, first)):
        if isinstance(rule, MaskedSGD) and isinstance(other, Proximal):
            return replace(rule, mu=other.mu)
        if rule == MaskedSGD():
            return other
    raise FedloomError(
        f"both define how clients learn ({_name(first)} and {_name(second)}), and a client has one "
        "local rule."
    )


def _mixes(one: Method, two: Method) -> Mix:
    """How what clients send is combined: any mix of the part that the other one combines."""
    first, second = one.mix, two.mix
    if not one.topology.server:
        second = second.among_nodes()
        if isinstance(second, PeerAverage):
            return _of_part(first, second.part)
    for mix, other in ((first, second), (second, first)):
        if type(other) is Average:
            return _of_part(mix, other.part)
    if first == second:
        return first
    raise FedloomError(
        f"both define how models are combined ({_name(first)} and {_name(second)}), and a round "
        "has one mix."
    )


def _of_part(mix: Mix, part: str) -> Mix:
    if part in (*ALL_OF_IT, mix.part):
        return mix
    if mix.part not in ALL_OF_IT:
        raise FedloomError(
            f"both define which part of the model is shared ('{mix.part}' and '{part}'). Use the "
            "same part for both."
        )
    if isinstance(mix, Alternate):
        return replace(mix, usual=_of_part(mix.usual, part), then=_of_part(mix.then, part))
    if "part" not in {field.name for field in fields(mix)}:  # type: ignore[arg-type]
        raise FedloomError(f"{_name(mix)} can't combine only a part of the model ('{part}').")
    return replace(mix, part=part)  # type: ignore[type-var]


def _alike(one: object, other: object) -> bool:
    same = type(one) is type(other) and getattr(one, "__dict__", 0) == getattr(other, "__dict__", 1)
    return one == other or same


def _name(choice: object) -> str:
    return choice if isinstance(choice, str) else type(choice).__name__
