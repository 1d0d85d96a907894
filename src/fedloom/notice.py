"""A message before anything heavy is imported, so that no command seems to hang.

It is a line that the next output replaces, so it is for terminals only.
"""

from __future__ import annotations

import sys

_LONG = ("run", "compare", "tune", "study", "show", "report", "score", "export")
_CLEAR = "\r\x1b[K"
_shown = False


def greet(words: list[str]) -> None:
    """Say at once that a command has begun which takes a while to load what it needs."""
    if words and words[0] in _LONG and not {"--help", "-h"} & set(words):
        say(f"fedloom {words[0]}: loading ...")


def say(text: str) -> None:
    """Show this until the next output."""
    global _shown
    if sys.stderr.isatty():
        sys.stderr.write(f"{_CLEAR}{text}")
        sys.stderr.flush()
        _shown = True


def clear() -> None:
    """Clear the notice for the output that follows."""
    if _shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
