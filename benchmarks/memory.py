"""The peak memory of a process and all it started, with shared pages counted once (Linux).

Proportional set sizes add up to what the tree really takes, but the kernel walks every page to tell
them: tens of milliseconds per gigabyte. So the cheap resident sizes are watched, and the exact
sizes read only where those reach a new height; and the watcher rests a hundred times as long as it
looked, so that it takes no more than 1 % of a core from what is measured.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL = 0.05  # seconds, at least
REST = 100  # times as long as a look took
NEW_HEIGHT = 1.01  # of the resident sizes, before the exact ones are read again

_PAGE = os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Watches this process and its descendants from a thread, from now until `stop`."""

    def __init__(self) -> None:
        self.peak = self._height = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last look; call it while the processes still hold what they have."""
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _total(_proportional, _tree(os.getpid())))

    def _watch(self) -> None:
        pause = INTERVAL
        while not self._done.wait(pause):
            started = time.perf_counter()
            self._look()
            pause = max(INTERVAL, REST * (time.perf_counter() - started))

    def _look(self) -> None:
        tree = _tree(os.getpid())
        resident = _total(_resident, tree)
        if resident > NEW_HEIGHT * self._height:
            self._height = resident
            self.peak = max(self.peak, _total(_proportional, tree))


def _tree(root: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def _total(measure: Callable[[int], int], pids: list[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += measure(pid)
        except OSError:
            continue
    return total


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def _proportional(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
