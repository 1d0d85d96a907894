"""A method as a user names it: by name, with options, with settings of its own, or as an object.

`fedprox:mu=0.1` has an option of the method; `fedrolex@capacities=high-quality`, in a comparison,
a setting that is this method's alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.errors import FedloomError
from fedloom.experiment.config import parse_settings
from fedloom.experiment.plugins import check_files, is_file, method_class, trust
from fedloom.experiment.settings import Config
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions

MethodLike = str | Method | MethodOptions | type[MethodOptions]
_OWN = re.compile(r"@(?=[A-Za-z_][\w.]*=)")
_SHARED = ("seed", "method")  # of a comparison, not of one of its methods


@dataclass(frozen=True)
class Entry:
    """One method of a comparison, with settings that are its alone.

    >>> Entry.of("wafl@topology=waypoint,area=500,lr=0.1").own
    {'topology': 'waypoint,area=500', 'lr': 0.1}
    """

    method: MethodLike
    label: str
    own: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: MethodLike | tuple[MethodLike, Mapping[str, Any]]) -> Entry:
        """From `NAME@setting=value`, or in Python also `(method, {"setting": value})`. A file that
        is named here is trusted."""
        if isinstance(given, tuple):
            if len(given) != 2 or not isinstance(given[1], Mapping):
                raise FedloomError(
                    f"{given!r} is not a method: with settings of its own it is written "
                    "(method, {'setting': value})."
                )
            method, own = given[0], dict(given[1])
            if isinstance(method, str):
                trust(method)
            label = label_of(method) + "".join(f"@{k}={_word(v)}" for k, v in own.items())
        elif isinstance(given, str):
            method, *words = _OWN.split(given)
            trust(method)
            names = {*Config.model_fields, *named(method)[0].model_fields} if words else set()
            own, label = parse_settings(w for word in words for w in _cut(word, names)), given
        else:
            method, own, label = given, {}, label_of(given)
        for key in _SHARED:
            if key in own:
                raise FedloomError(
                    f"{label}: {key} is the same for all methods of a comparison, so a single "
                    "method can't set it."
                )
        return Entry(method, label, own)

    @staticmethod
    def stored(label: str, own: Mapping[str, Any] | None = None) -> Entry:
        """One that the record of a comparison or sweep names, with its settings if it has them: no
        reason to trust a file."""
        method = _OWN.split(label)[0]
        check_files({"method": method})
        own = Entry.of(label).own if own is None else own
        check_files(own)
        return Entry(method, label, own)


def _cut(words: str, names: set[str]) -> list[str]:
    """`a=1,b=2` into its settings. A comma in front of anything that is no setting's name belongs
    to the value before it."""
    out: list[str] = []
    for piece in words.split(","):
        key, sign, _ = piece.partition("=")
        if out and not (sign and key.strip().partition(".")[0] in names):
            out[-1] += f",{piece}"
        else:
            out.append(piece)
    return out


def _word(value: Any) -> str:
    plain = isinstance(value, str | int | float | list | dict | None)
    return str(value) if plain else getattr(value, "__name__", type(value).__name__)


def label_of(method: MethodLike) -> str:
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        return "custom"
    _options_class(method)
    if isinstance(method, type):
        return method.name
    chosen = method.model_dump(exclude_defaults=True)
    return method.name + "".join(f":{k}={v}" for k, v in chosen.items())


def named(method: MethodLike) -> tuple[type[MethodOptions], dict[str, Any]]:
    """The method's class, and the settings that name it and its options."""
    if isinstance(method, str):
        if _OWN.search(method):
            raise FedloomError(
                f"'{method}': settings after @ are for one method of a comparison. In a run, "
                "give them as options (--lr 0.1, or --set lr=0.1)."
            )
        name, _, words = (method, "", "") if is_file(method) else method.partition(":")
        params = parse_settings(words.split(",")) if words else {}
        cls = method_class(name)
    else:
        method = _wrapped(method) if isinstance(method, Method) else method
        cls = _options_class(method)
        name = cls.name
        params = {} if isinstance(method, type) else method.model_dump()
    return cls, {"method": name, "params": params} if params else {"method": name}


def _options_class(method: MethodOptions | type[MethodOptions]) -> type[MethodOptions]:
    cls = method if isinstance(method, type) else type(method)
    if not issubclass(cls, MethodOptions):
        raise FedloomError(
            f"{method!r} is not a method: give a name, with options as 'NAME:option=value', or a "
            "MethodOptions class."
        )
    return cls


def _wrapped(method: Method) -> type[MethodOptions]:
    """A bare declaration as a method without options."""

    class Given(MethodOptions):
        """A method that was given as a declaration, in Python."""

        name, family, source = "custom", "own", "given in Python"

        def build(self) -> Method:
            return method

    return Given
