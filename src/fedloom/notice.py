"""A word to the user before anything heavy is imported, so that no command looks dead.

On a terminal it is a line that the next output replaces; elsewhere a plain line, once.
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
    """Show this until the next output; where there is no terminal, only the first time."""
    global _shown
    if sys.stderr.isatty():
        sys.stderr.write(f"{_CLEAR}{text}")
        sys.stderr.flush()
    elif not _shown and _stays():
        print(text, file=sys.stderr, flush=True)
    _shown = True


def _stays() -> bool:
    """Whether what is said stays, so that it is worth a line of a log: not for a short look."""
    return len(sys.argv) > 1 and sys.argv[1] in _LONG[:4]


def clear() -> None:
    """Make room for what is said now."""
    if _shown and sys.stderr.isatty():
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
