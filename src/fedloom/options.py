"""Settings and options as checked fields: what `Config` and every method's options have in common.

Values come from a command line, a YAML file or Python, so anything may be in them. What pydantic
would accept as a number but is not meant as one (`clients=true`) is refused, and a wrong value is
quoted in a few words, however large it is.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

_QUOTED = 120  # characters of a wrong value that are worth reading
_LONGEST = 4096  # characters: that of a path
_LARGEST = 2**63 - 1  # what numpy and torch can count to
_DEEP = 4  # levels of lists that a setting has at most


class Options(BaseModel):
    """Fields whose numbers are numbers, and finite unless a field says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if _holds_truth(value) and not _takes(annotation, (bool, Any)):
            raise ValueError(f"true and false are not allowed here; give {_wanted(annotation)}")
        if isinstance(value, str) and len(value) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} characters")
        return value

    @field_validator("*")
    @classmethod
    def _not_endless(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"whole numbers are at most {_LARGEST:,}")
        return value


def quoted(value: Any) -> str:
    """A value as the user may recognise it, in a few characters.

    >>> quoted("x" * 200)[-25:], quoted(10**5000)
    ("xxx...' (200 characters)", 'a number of 5,000 digits')
    """
    if isinstance(value, int) and abs(value) >= 10**_QUOTED:
        return f"a number of {round(value.bit_length() * 0.30103):,} digits"  # log10 of 2
    if isinstance(value, str) and len(value) > _QUOTED:
        return f"{value[:_QUOTED]!r}"[:-1] + f"...' ({len(value):,} characters)"
    text = " ".join(repr(value).split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def wrong(error: ValidationError) -> tuple[str, str, str]:
    """The first field that is wrong, the value as it was given, and why not."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    message = first["msg"].removeprefix("Value error, ")
    return name, quoted(first.get("input")), message[:1].lower() + message[1:]


def _wanted(annotation: Any) -> str:
    """What a field takes, in words.

    >>> _wanted(int), _wanted(float | None), _wanted(Literal["kept", "lost"])
    ('a whole number', 'a number or none', 'kept or lost')
    """
    plain = {int: "a whole number", float: "a number", str: "text", NoneType: "none"}
    if annotation in plain:
        return plain[annotation]
    origin = get_origin(annotation)
    if origin in (list, tuple, dict):
        return "options by name" if origin is dict else "a list"
    inner = get_args(annotation)
    words = inner if origin is Literal else [_wanted(kind) for kind in inner]
    return " or ".join(map(str, dict.fromkeys(words))) or "another value"


def _takes(annotation: Any, kinds: tuple[Any, ...]) -> bool:
    return annotation in kinds or any(_takes(inner, kinds) for inner in get_args(annotation))


def _holds_truth(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list | tuple) and depth < _DEEP:
        return any(_holds_truth(inner, depth + 1) for inner in value)
    return type(value).__name__ in ("bool", "bool_")  # numpy's is the second
