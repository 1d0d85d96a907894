"""Options as users write them, on a command line or in a YAML file, made into numbers.

`what` in every function is how the option is called in the error message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedloom.errors import FedloomError

Value = str | int | float | Iterable[int]


def number(
    what: str, value: Value, *, low: float = -math.inf, high: float = math.inf, above: bool = False
) -> float:
    """A finite number from `low` to `high`; `above` low if it must not be reached."""
    bounds = f" {'above' if above else 'of at least'} {low:g}" if low > -math.inf else ""
    bounds += f" and at most {high:g}" if high < math.inf else ""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        given = float(value)
    except ValueError:
        given = math.nan
    if not math.isfinite(given) or given < low or given > high or (above and given == low):
        raise FedloomError(f"{what} must be a number{bounds}, not '{value}'.")
    return given


def integer(what: str, value: Value, *, low: int = 0) -> int:
    """A whole number of at least `low`."""
    given = number(what, value, low=low)
    if given != int(given):
        raise FedloomError(f"{what} must be a whole number, not '{value}'.")
    return int(given)


def sizes(what: str, value: Value, count: int) -> tuple[int, ...]:
    """`count` sizes as 3x32x32 or [3, 32, 32]; where two are wanted, one alone is a square."""
    parts: Iterable[Value]
    if isinstance(value, str):
        parts = value.lower().split("x")
    else:
        parts = value if isinstance(value, list | tuple) else [value]
    given = tuple(integer(what, part, low=1) for part in parts)
    if count == 2 and len(given) == 1:
        given *= 2
    if len(given) != count:
        example = "x".join(["1", "28", "28"][-count:])
        raise FedloomError(f"{what} must be {count} sizes such as {example}, not '{value}'.")
    return given
