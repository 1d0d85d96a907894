"""What a part of a method returned, checked where it comes in.

A wrong type would else show up as a traceback, deep inside the engine or the server. This knows no
part: it says which function of which class returned what, and what it must return.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar

from fedloom.errors import FedloomError

First = TypeVar("First")
Second = TypeVar("Second")


def returned(part: object, function: str, value: Any, kind: type[First], where: str = "") -> First:
    """The value that a function of a part returned, if it is of this kind.

    `where` is the place within a larger value, such as "as row of its Back".

    >>> returned("a part", "upper", 3, str)
    Traceback (most recent call last):
    ...
    fedloom.errors.FedloomError: str.upper returned an int; it must return a str.
    """
    if isinstance(value, kind):
        return value
    place, must = (f" {where}", "be") if where else ("", "return")
    raise FedloomError(
        f"{type(part).__name__}.{function} returned {with_article(type(value))}{place}; it must "
        f"{must} {with_article(kind)}."
    )


def returned_if_any(
    part: object, function: str, value: Any, kind: type[First], where: str = ""
) -> First | None:
    """The same where it may also be None."""
    return None if value is None else returned(part, function, value, kind, where)


def returned_names(part: object, function: str, value: Any, where: str) -> Mapping[str, Any]:
    """The same for values by name."""
    return value if type(value) is dict else returned(part, function, value, Mapping, where)  # type: ignore[type-abstract]


def returned_pair(
    part: object, function: str, value: Any, first: type[First], second: type[Second]
) -> tuple[First, Second]:
    """The same for a tuple of two."""
    made = returned(part, function, value, tuple)
    if len(made) != 2:
        raise FedloomError(
            f"{type(part).__name__}.{function} returned a tuple of {len(made)}; it must return "
            f"{with_article(first)} and {with_article(second)}."
        )
    return (
        returned(part, function, made[0], first, "first in its tuple"),
        returned(part, function, made[1], second, "second in its tuple"),
    )


def with_article(kind: type) -> str:
    """The name of a type in a sentence."""
    if kind is NoneType:
        return "None"
    name = kind.__name__
    return f"an {name}" if name[0] in "aeioAEIO" or name == "ndarray" else f"a {name}"
