"""Run the tests of each error against a copy of the source that has it, several at a time.

An error is noticed when pytest says that a test failed (or does not come back), it survives when
all pass. Anything else, such as a collection error, says that the entry itself is broken.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mutants.entries import ROOT, STRICT, Mutant

TIMEOUT = 300.0  # seconds; an error that makes a test hang is noticed too
ENOUGH = 0.9  # of the errors that change something

Fate = Literal["noticed", "survived", "broken"]


@dataclass(frozen=True)
class Outcome:
    """What became of one error; `output` is pytest's."""

    mutant: Mutant
    fate: Fate
    seconds: float
    output: str = ""

    @property
    def as_wanted(self) -> bool:
        return self.fate == ("noticed" if self.mutant.harmless is None else "survived")


class Unsound(Exception):
    """The tests fail before there is any error in the source."""


def run(
    mutants: Sequence[Mutant],
    *,
    root: Path = ROOT,
    jobs: int = os.cpu_count() or 1,
    timeout: float = TIMEOUT,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """The outcome of each error, in the order given; `done` hears of each as it comes."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        clean = Path(folder) / "clean"
        shutil.copytree(root / "src", clean, ignore=shutil.ignore_patterns("__pycache__"))
        named = sorted({test for m in mutants for test in m.tests})
        code, output = _pytest(named, clean, root, timeout=None, jobs=min(jobs, len(named)))
        if code != 0:
            raise Unsound(output)
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(_try, m, clean, root, timeout) for m in mutants]
            try:
                for future in as_completed(futures):
                    done(future.result())
            except BaseException:  # Ctrl-C: those that are under way come to their end, no others
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]


def _try(mutant: Mutant, clean: Path, root: Path, timeout: float) -> Outcome:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=clean.parent) as folder:
        copy = Path(folder) / "src"
        shutil.copytree(clean, copy)  # with the compiled files: times are copied as well
        changed = mutant.apply(copy / "fedloom")
        for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*.pyc"):
            compiled.unlink()
        code, output = _pytest(mutant.tests, copy, root, timeout)
    fates: dict[int | None, Fate] = {0: "survived", 1: "noticed", None: "noticed"}
    return Outcome(mutant, fates.get(code, "broken"), time.perf_counter() - started, output)


def _pytest(
    tests: Sequence[str], copy: Path, root: Path, timeout: float | None, jobs: int = 0
) -> tuple[int | None, str]:
    """Pytest's exit code (None: out of time) and output, with `copy` for the source."""
    split = str(jobs if jobs > 1 else 0)  # one process more is only worth it for others beside it
    options = ["-x", "-q", "-n", split, "-p", "no:cacheprovider", "-p", "mutants.guard"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)]),
        "MUTANTS_COPY": str(copy),
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a time-out ends the test's own processes as well
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, "out of time"
    return process.returncode, output


def enough(outcomes: Sequence[Outcome]) -> bool:
    """Whether the tests notice what they should: all errors of the strict groups, most others."""
    real = [o for o in outcomes if o.mutant.harmless is None]
    noticed = sum(o.fate == "noticed" for o in real)
    strict = all(o.as_wanted for o in real if o.mutant.group in STRICT)
    labels = all(o.as_wanted for o in outcomes if o.mutant.harmless is not None)
    whole = all(o.fate != "broken" for o in outcomes)
    return noticed >= ENOUGH * len(real) and strict and labels and whole
