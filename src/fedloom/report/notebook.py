"""How a run goes, in a notebook: a bar, the time left, and a line for each run that is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from fedloom.report.terminal import Clock, score_of

_PAUSE = 0.2  # seconds between two pictures of the same bar


def here() -> bool:
    """Whether a notebook shows what this process displays."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Display:
    """A place in the output of a cell that is written anew."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0

    def show(self, html: str, *, now: bool = False) -> None:
        from IPython.display import HTML, display

        if not now and time.perf_counter() - self._shown < _PAUSE:
            return
        self._shown = time.perf_counter()
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))


class NotebookProgress:
    """A watcher that shows itself in the output of the cell."""

    def __init__(self, runs: int = 1) -> None:
        self._runs, self._run, self._name, self._score = runs, 0, "", ""
        self._round, self._rounds = 0, 1
        self._done: list[tuple[str, str]] = []
        self._clock, self._display = Clock(), Display()

    def start(self, name: str, rounds: int, done: int) -> None:
        self._run += 1
        self._name, self._rounds, self._round = name, rounds, done
        self._score = "finished before" if done >= rounds else ""
        self._clock.begin(self._share)
        self._show(now=True)

    def round(self, record: dict[str, Any]) -> None:
        self._round = record["round"]
        self._score = score_of(record) or self._score
        self._clock.at(self._share)
        self._show()

    def end(self) -> None:
        self._done.append((self._name, self._score))
        self._show(now=True)

    @property
    def _share(self) -> float:
        return (self._run - 1 + self._round / self._rounds) / self._runs

    def _show(self, *, now: bool = False) -> None:
        number = f"{self._run}/{self._runs} " if self._runs > 1 else ""
        words = f"{number}{self._name}: round {self._round} of {self._rounds}. {self._score}"
        left = self._clock.left() if self._share < 1 else ""
        table = _rows(self._done) if self._runs > 1 else ""
        self._display.show(table + _bar(self._share, f"{words} {left}"), now=now)


class NotebookStudy:
    """The same for runs in processes of their own: what `run_jobs` says."""

    def __init__(self) -> None:
        self._done: list[tuple[str, str]] = []
        self._clock, self._display = Clock(), Display()

    def __call__(self, names: str, done: int, rounds: int, finished: int, jobs: int,
                 ended: Mapping[str, Mapping[str, Any]]) -> None:  # fmt: skip
        share = done / max(rounds, 1)
        self._clock.begin(share)
        self._clock.at(share)
        self._done += [(name, score_of(record)) for name, record in ended.items()]
        words = f"{finished} of {jobs} runs finished. {names} {self._clock.left() * (share < 1)}"
        self._display.show(_rows(self._done) + _bar(share, words), now=bool(ended))


def _bar(share: float, words: str) -> str:
    return (
        f'<div><progress value="{share:.4f}" max="1" style="width: 16em"></progress> '
        f"{escape(words)}</div>"
    )


def _rows(done: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(n)}</td><td>{escape(s)}</td></tr>" for n, s in done)
    return f"<table>{cells}</table>" if done else ""
