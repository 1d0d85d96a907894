"""Allocator settings: keep freed memory instead of giving it back and asking again.

Training allocates and frees the same large buffers in every step. By default glibc returns them to
the system each time, and every step pays for page faults anew.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_BYTES = 512 * 2**20
_BYTES_BEFORE = 32 * 2**20  # the highest mmap threshold that older versions take


def keep_freed_memory() -> None:
    """Raise glibc's trim and mmap thresholds; other C libraries are left alone."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return
    mallopt(_TRIM_THRESHOLD, _BYTES)
    _ = mallopt(_MMAP_THRESHOLD, _BYTES) or mallopt(_MMAP_THRESHOLD, _BYTES_BEFORE)
