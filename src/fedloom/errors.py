"""Errors that are sentences for the user: what was given, what was expected, what to do.

Everything a user can get wrong is raised as `FedloomError`; the command line prints its text and
exits with its code, without a traceback. Anything else that escapes is a defect of fedloom.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """A mistake in what was asked, told in one paragraph."""

    exit_code = 2


def unknown(kind: str, given: str, valid: Iterable[str]) -> FedloomError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(valid)
    hint = nearest(given, names)
    return FedloomError(f"Unknown {kind} '{given}'. {hint}Valid: {', '.join(names) or 'none'}.")


def nearest(given: str, valid: Iterable[str]) -> str:
    """A sentence that names the valid word nearest to the given one, if one is near."""
    near = difflib.get_close_matches(given, list(valid), n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'? " if near else ""
