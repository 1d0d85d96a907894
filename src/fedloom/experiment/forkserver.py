"""Starts the runs of a study without importing torch for each of them, which takes longer than many
a run: a process that has imported everything, and has done nothing else, forks for each.

Who asks writes a line for each run to that process, and reads its number and, later, how it ended.
A run is in a session of its own, so that Ctrl-C is for the study, which then ends its runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

#: what a run imports, also what it imports late
_NEEDED = (
    "fedloom.cli",
    "fedloom.engine.stacked",
    "fedloom.experiment.api",
    "fedloom.experiment.evaluation",
    "fedloom.experiment.reporting",
    "fedloom.experiment.runner",
    "fedloom.experiment.setup",
    "fedloom.native.selftest",
    "fedloom.report.terminal",
    "numpy.ctypeslib",
    "pandas",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
)
_PAUSE = 0.02  # seconds between two looks at what has ended


class Process(Protocol):
    """What a study asks of a run's process; `subprocess.Popen` has it too."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int | None: ...


class Forked:
    """A process that the server has started."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.returncode: int | None = None
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        self._server.listen()
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int | None:
        while self.poll() is None:
            time.sleep(_PAUSE)
        return self.returncode


class ForkServer:
    """The process that forks, as a study sees it. Leaving it ends the runs that are left."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._heard = b""
        self._new: Forked | None = None
        self._running: dict[int, Forked] = {}

    def start(self, words: Sequence[str], log: Path) -> Forked:
        """`fedloom WORDS`, with its errors in `log`; OSError: the server is gone."""
        assert self._process.stdin is not None
        asked = {"words": list(words), "log": str(log)}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        while self._new is None:
            if not self.listen(wait=True):
                raise BrokenPipeError("the process that starts runs has ended")
        new, self._new = self._new, None
        return new

    def listen(self, wait: bool = False) -> bool:
        """Take note of what the server says; False: it is gone."""
        assert self._process.stdout is not None
        said = self._process.stdout.fileno()
        while select.select([said], [], [], None if wait else 0)[0]:
            more = os.read(said, 1 << 16)
            if not more:
                self._look_after()
                return False
            *lines, self._heard = (self._heard + more).split(b"\n")
            for line in lines:
                pid, code = json.loads(line)
                if code is None:
                    self._new = self._running[pid] = Forked(self, pid)
                else:
                    self._running.pop(pid).returncode = code
            wait = False
        return True

    def _look_after(self) -> None:
        """Without a server nobody tells how runs end, but whether they have can be seen."""
        for pid, forked in list(self._running.items()):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                forked.returncode = 1
                del self._running[pid]

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> list[str] | None:
    """Fork for each line that is read, until the last; in a fork: the words of its line."""
    for name in _NEEDED:
        importlib.import_module(name)
    gc.freeze()  # what is shared with forks is not looked at by their collector
    asks = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    running: set[int] = set()
    heeding = True
    while heeding or running:
        if heeding and select.select([asks], [], [], _PAUSE)[0]:
            line = asks.readline()
            heeding = bool(line)
            if not line:  # who asked is gone, or wants no more: neither wants a run to go on
                for pid in running:
                    os.kill(pid, signal.SIGTERM)
            else:
                asked = json.loads(line)
                pid = _fork()
                if not pid:
                    _settle(asked["log"])
                    return list(asked["words"])
                running.add(pid)
                _say(pid, None)
        elif not heeding:
            time.sleep(_PAUSE)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _say(pid, os.waitstatus_to_exitcode(status))
    return None


def _fork() -> int:
    with warnings.catch_warnings():
        # Of numpy's threads, which its library ends and starts again around a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _settle(log: str) -> None:
    """Away from the server: another session, no input, no output but errors."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for found, standard in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(found, standard)
    os.close(nothing)
    os.close(errors)


def _say(pid: int, code: int | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        os.write(1, json.dumps([pid, code]).encode() + b"\n")


if __name__ == "__main__":
    words = serve()
    if words is not None:
        from fedloom.__main__ import main

        sys.argv = ["fedloom", *words]
        main()
