"""The directory of a run: who may write to it, how it is created and how it is replaced.

A directory with a `config.yaml` is a run; that file is written first, so a process killed at any
moment leaves a run that can be resumed, or leftovers that are recognised. A run that is replaced is
moved to `.replaced` inside its directory and stays there until the new one has a checkpoint; where
its `config.yaml` is tells how far a killed process came.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.experiment.checksums import seal_yaml
from fedloom.experiment.ending import KILLED, Ending
from fedloom.files import atomic_file, is_locked, is_temporary, locked, sync

CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")
REPORT = "report.html"
COMPARISON, STUDY = "comparison.yaml", "study.yaml"  # what a folder of runs was asked for
_SWEPT = b"sweep:"  # how the latter begins if it is a sweep
_LOCK, _STOP, _RUNNING = ".lock", ".stop", ".running"
_TRIES, _PAUSE = 5, 0.02  # for the lock: another process may be checking whether it is held
_REPLACED, _DROPPED = ".replaced", ".dropped"


def resuming(path: Path) -> str:
    """The command that goes on with a run; one of a comparison or sweep goes on with all of it."""
    group = path.parent
    several = (group / COMPARISON).is_file()
    with contextlib.suppress(OSError):
        several = several or (group / STUDY).read_bytes().startswith(_SWEPT)
    command, where = ("compare", group) if several else ("run", path)
    return f"fedloom {command} --resume --out {shlex.quote(str(where))}"


class RunFolder:
    """The directory of one run, without what is in its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.rounds_file = path / "rounds.jsonl"
        self.clients_file = path / "clients.parquet"
        self.manifest_file = path / "manifest.yaml"
        self.report_file = path / REPORT
        self.names_file = path / "names.json"
        self.about_file = path / "about.json"
        self.error_file = path / "error.json"
        self.tracking = path / "tracking"
        self._parts = path / "clients"
        self._checkpoints = path / "checkpoints"
        self._replaced = path / _REPLACED
        self._dropped = path / _DROPPED

    @property
    def exists(self) -> bool:
        return self.config_file.exists()

    @property
    def interrupted(self) -> bool:
        """Whether a process was killed while it replaced this run, or is replacing it now."""
        return self._replaced.exists() or self._dropped.exists()

    @property
    def untouched(self) -> bool:
        """Whether a new run can start here: nothing is there, or only leftovers of a start."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and all(self._is_leftover(f) for f in self.path.iterdir())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only process that writes here; requests to stop count from now on."""
        with contextlib.ExitStack() as stack:
            for left in reversed(range(_TRIES)):
                try:
                    stack.enter_context(locked(self.path / _LOCK, wait=False))
                    break
                except BlockingIOError:
                    if left:
                        time.sleep(_PAUSE)
                        continue
                    raise FedloomError(
                        f"Another process is writing to '{self.path}'. Wait for it, or choose "
                        "another --out."
                    ) from None
            stop = self.path / _STOP
            stop.unlink(missing_ok=True)
            stack.callback(stop.unlink, missing_ok=True)
            yield

    @property
    def active(self) -> bool:
        """Whether a process is writing here; the lock of one that was killed is free."""
        return is_locked(self.path / _LOCK)

    def ask_to_stop(self) -> None:
        """Have the process that writes here stop after its current round."""
        (self.path / _STOP).touch()

    @property
    def stop_asked(self) -> bool:
        return (self.path / _STOP).exists()

    def begin(self) -> None:
        """A process trains from here on: how the one before it ended no longer counts."""
        self.error_file.unlink(missing_ok=True)
        (self.path / _RUNNING).touch()

    def end(self, ending: Ending | None = None) -> None:
        """The process ends in order: with what went wrong, or because it is done or was asked to
        stop. If a full disk takes no word of it, the run looks killed; that is no error, since
        another one may be on its way to the user."""
        with contextlib.suppress(OSError):
            if ending is not None:
                ending.write(self.error_file)
            (self.path / _RUNNING).unlink(missing_ok=True)

    @property
    def ending(self) -> Ending | None:
        """What went wrong with the last process; nothing while one is at work, or if the last was
        done or asked to stop."""
        if self.active:
            return None
        killed = Ending(KILLED) if (self.path / _RUNNING).exists() else None
        return Ending.read(self.error_file) or killed

    def check_whole(self) -> None:
        """Refuse to read a run that is only partly moved aside for another."""
        old = self._replaced / self.config_file.name
        if self._replaced.exists() and not (self.exists and old.exists()):
            raise FedloomError(
                f"A process was stopped while replacing the run in '{self.path}'. Nothing is "
                f"lost: fedloom run --resume --out {self.path} puts the old run back."
            )

    def check_free(self, *, overwrite: bool = False) -> None:
        """Refuse a directory that holds something which a new run would spoil."""
        if self.exists and not overwrite:
            raise FedloomError(
                f"'{self.path}' already holds a run. Continue it with --resume, choose another "
                "--out, or replace it with --overwrite."
            )
        if self.path.exists() and not self.path.is_dir():
            raise FedloomError(f"'{self.path}' is a file; --out names a directory.")
        if self.exists or self.untouched:
            return
        names = {file.name for file in self._files}
        if all(self._is_leftover(f) or f.name in names for f in self.path.iterdir()):
            if overwrite:
                return
            raise FedloomError(
                f"'{self.path}' holds parts of a run, without its config.yaml. Choose another "
                "--out, or replace them with --overwrite."
            )
        raise FedloomError(
            f"'{self.path}' is a directory with other files in it. Choose another --out."
        )

    def create(self, config: str, *, overwrite: bool = False) -> None:
        """Start a new run here; one that it replaces is kept until `drop_replaced`."""
        self.check_free(overwrite=overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        if self.exists:
            self._set_aside()
        else:
            self._clear()
        self.reconfigure(config)
        self._checkpoints.mkdir(exist_ok=True)
        self._parts.mkdir(exist_ok=True)

    def reconfigure(self, config: str) -> None:
        with atomic_file(self.config_file, synced=True) as part:
            part.write_bytes(seal_yaml(config).encode())

    def drop_if_empty(self) -> None:
        """Remove a run that completed no round."""
        if self.rounds_file.exists() and self.rounds_file.stat().st_size:
            return
        self._clear()
        for file in (self.config_file, *(self.path / name for name in (_STOP, _RUNNING, _LOCK))):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in it
            self.path.rmdir()

    def recover(self) -> bool:
        """Finish or undo a replacement that was stopped; whether the old run is back."""
        shutil.rmtree(self._dropped, ignore_errors=True)
        if not self._replaced.exists():
            return False
        old = self._replaced / self.config_file.name
        if old.exists():
            if self.has_checkpoint():
                self.drop_replaced()
                return False
            self._clear()
            os.replace(old, self.config_file)  # from here on, it is the old run again
        for file in self._files:
            moved = self._replaced / file.name
            if moved.exists():
                os.replace(moved, file)
        self._replaced.rmdir()
        return True

    def drop_replaced(self) -> None:
        """The new run is safe: delete the one that it replaced."""
        if self._replaced.exists():
            os.replace(self._replaced, self._dropped)  # in one step, so that it is never half back
            shutil.rmtree(self._dropped, ignore_errors=True)

    def has_checkpoint(self) -> bool:
        return bool(self._saved())

    def newest_checkpoint(self) -> int:
        """Its round, by the names of the files; 0 if there is none."""
        saved = self._saved()
        return saved[-1][0] if saved else 0

    def sweep(self) -> None:
        """Delete the temporary files of a killed process."""
        for folder in (self.path, self._parts, self._checkpoints):
            for file in folder.glob(".*.tmp"):
                if is_temporary(file):
                    file.unlink()

    def _saved(self) -> list[tuple[int, Path]]:
        """The checkpoints, by round."""
        found = [(m, f) for f in self._checkpoints.glob("*") if (m := CHECKPOINT.fullmatch(f.name))]
        return sorted((int(m[1]), f) for m, f in found)

    @property
    def _files(self) -> tuple[Path, ...]:
        """All that a run writes; its config, which makes the directory a run, last."""
        return (
            self.rounds_file, self.clients_file, self.manifest_file, self.names_file,
            self.about_file, self.error_file, self.report_file, self.tracking, self._parts,
            self._checkpoints, self.config_file,
        )  # fmt: skip

    def _set_aside(self) -> None:
        self._replaced.mkdir()
        for file in self._files:
            if file.exists():
                os.replace(file, self._replaced / file.name)
        sync(self.path)

    def _clear(self) -> None:
        """Delete all that belongs to a run but its config."""
        for folder in (self._parts, self._checkpoints, self.tracking):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (
            self.rounds_file, self.clients_file, self.manifest_file, self.names_file,
            self.about_file, self.error_file, self.report_file,
        ):  # fmt: skip
            file.unlink(missing_ok=True)
        self.sweep()

    def _is_leftover(self, file: Path) -> bool:
        """Whether a process that was killed in `create` or `drop_if_empty` may have left this."""
        known = (_LOCK, _STOP, _RUNNING, _DROPPED, self.manifest_file.name, self.names_file.name,
                 self.about_file.name, self.error_file.name)  # fmt: skip
        if file.name in known or is_temporary(file):
            return True
        ours = file in (self._parts, self._checkpoints) and file.is_dir()
        return ours and all(is_temporary(inside) for inside in file.iterdir())
