"""Errors as sentences for the user: what was given, what was expected, what to do.

Everything a user can get wrong is raised as `FedloomError`; the command line prints its text and
exits with its code, without a traceback. Anything else that escapes is a defect of fedloom.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the exit code of what was stopped by Ctrl-C or on request


class FedloomError(Exception):
    """A user error, explained in one paragraph."""

    exit_code = 2


class Interrupted(FedloomError):
    """Not an error: somebody stopped it, and the text says what is left."""

    exit_code = INTERRUPTED


class OutOfMemory(FedloomError):
    """There is less memory than something takes."""

    exit_code = 1


@contextmanager
def telling_memory(doing: str) -> Iterator[None]:
    """Running out of memory while `doing` something, as a sentence."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as e:
        if not is_shortage(e):
            raise
        raise OutOfMemory(shortage(doing, e)) from e


def is_shortage(error: BaseException) -> bool:
    """Whether this is an out-of-memory error of NumPy, torch or the system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def shortage(doing: str, error: BaseException) -> str:
    """The sentence for it, with how much was asked for where the error tells."""
    asked = re.search(r"(?:allocate|allocating) (\d[\d.]*) ?(bytes|[KMGTP]iB)", str(error))
    amount = ""
    if asked is not None:
        number, unit = float(asked[1]), asked[2]
        size = f"{number / 1e9:,.2f} GB" if unit == "bytes" else f"{number:g} {unit}"
        amount = f" ({size} more were needed at once)"
    return (
        f"There is not enough memory for {doing}{amount}. Use a smaller model, a smaller --batch, "
        "fewer samples or clients, or fewer --workers."
    )


def unknown(kind: str, given: str, valid: Iterable[str]) -> FedloomError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(valid)
    hint = nearest(given, names)
    return FedloomError(f"Unknown {kind} '{given}'. {hint}Valid: {', '.join(names) or 'none'}.")


def nearest(given: str, valid: Iterable[str]) -> str:
    """A sentence that names the valid word nearest to the given one, if one is near."""
    near = difflib.get_close_matches(given, list(valid), n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'? " if near else ""
