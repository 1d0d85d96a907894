"""Ctrl-C that is never swallowed, and requests to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(KeyboardInterrupt):
    """Somebody asked the run to stop, and it did, after `round`, of which there is a checkpoint."""

    def __init__(self, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round


@contextmanager
def heeding_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed in this block.

    Python raises KeyboardInterrupt wherever the program happens to be, and compiled code that calls
    back into Python may drop it: pandas does, in comparisons of data types. Without this, a run
    would then go on as if nobody had asked it to stop.
    """
    before = signal.getsignal(signal.SIGINT)
    pressed = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        pressed.set()
        raise KeyboardInterrupt

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    ours = (
        before is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
