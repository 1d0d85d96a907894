"""What everything that fedloom draws has in common: colours, dashes, and the files of its pages."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES = ("-", "--", "-.", ":")


def look(i: int) -> dict[str, Any]:
    """Colour and style of the i-th curve: no two of the first 32 are alike, and neighbours differ
    in both, so that equal curves don't hide each other.

    >>> len({tuple(look(i).values()) for i in range(32)})
    32
    """
    colour, style = i % len(COLOURS), i + i // len(COLOURS)
    return {"color": COLOURS[colour], "linestyle": STYLES[style % len(STYLES)]}


def asset(name: str) -> str:
    """A file of the report's pages, such that it may stand inside a page."""
    text = resources.files("fedloom.report").joinpath("assets", name).read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def finite(value: object) -> object:
    """A value for JSON, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value
