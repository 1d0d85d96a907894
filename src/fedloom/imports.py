"""Imports of many modules at once, without looking for garbage in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile. Torch alone makes some hundred thousand objects that stay,
    and looking through them again and again is an eighth of the time that its import takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
