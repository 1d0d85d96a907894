"""A run on disk: config, one JSON line per round, a per-client table, checkpoints.

Everything is written so that a kill at any moment loses at most the current round: lines are
appended and flushed, tables and checkpoints appear under their name only when they are whole. What
stands behind the last whole checkpoint is cut off before a run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.files import atomic_file, locked

_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")
_META = "fedloom"
_SUM = "crc32"
_WRITTEN = {"round", "participants", "seconds"}  # in every record
_LOCK = ".lock"


class RunStore:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.rounds_file = path / "rounds.jsonl"
        self.clients_file = path / "clients.parquet"
        self._parts = path / "clients"
        self._checkpoints = path / "checkpoints"

    @property
    def exists(self) -> bool:
        return self.config_file.exists()

    @staticmethod
    def open(path: Path) -> RunStore:
        """A run that is there, or an error that says what is wrong."""
        store = RunStore(Path(path))
        if not store.exists:
            what = (
                "is not a run: it has no config.yaml" if store.path.exists() else "does not exist"
            )
            inside = sorted(p.parent.name for p in store.path.glob("*/config.yaml"))
            hint = f"It holds the runs {', '.join(inside)}" if inside else "Runs are directories"
            hint += (
                f": name one of them, such as {store.path / inside[0]}."
                if inside
                else (" such as runs/NAME.")
            )
            raise FedloomError(f"'{path}' {what}. {hint}")
        return store

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only process that writes here."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / _LOCK, wait=False))
            except BlockingIOError:
                raise FedloomError(
                    f"Another process is writing to '{self.path}'. Wait for it, or choose another "
                    "--out."
                ) from None
            yield

    def check_free(self, *, overwrite: bool = False) -> None:
        """Refuse a directory that holds something which a new run would spoil."""
        if self.exists and not overwrite:
            raise FedloomError(
                f"'{self.path}' holds a run already. Continue it with --resume, choose another "
                "--out, or replace it with --overwrite."
            )
        if self.path.exists() and not self.path.is_dir():
            raise FedloomError(f"'{self.path}' is a file; --out names a directory.")
        foreign = self.path.exists() and not self.exists
        if foreign and any(f.name != _LOCK for f in self.path.iterdir()):
            raise FedloomError(
                f"'{self.path}' is a directory with other files in it. Choose another --out."
            )

    def create(self, config: str, *, overwrite: bool = False) -> None:
        """Start a new run here."""
        self.check_free(overwrite=overwrite)
        if self.exists:
            self.config_file.unlink()
            for old in (self._parts, self._checkpoints):
                shutil.rmtree(old, ignore_errors=True)
            for old in (self.rounds_file, self.clients_file):
                old.unlink(missing_ok=True)
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(exist_ok=True)
        self._replace(self.config_file, config.encode())

    def drop_if_empty(self) -> None:
        """Leave nothing behind of a run that came to no whole round."""
        if self.rounds_file.exists() and self.rounds_file.stat().st_size:
            return
        for part in (self._parts, self._checkpoints):
            shutil.rmtree(part, ignore_errors=True)
        for file in (self.rounds_file, self.config_file, self.path / _LOCK):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in it
            self.path.rmdir()

    def reconfigure(self, config: str) -> None:
        self._replace(self.config_file, config.encode())

    # -- writing -------------------------------------------------------------------------------

    def add_round(self, record: dict[str, Any]) -> None:
        with self.rounds_file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def add_clients(self, round: int, table: pd.DataFrame) -> None:
        with atomic_file(self._parts / f"round-{round:06d}.parquet") as part:
            table.to_parquet(part, index=False)

    def add_checkpoint(self, round: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Keep the state after `round`; the one before it is dropped once this one is whole."""
        known = {"round": round, _SUM: _sum(tensors), **about}
        meta = {_META: json.dumps(known, sort_keys=True)}  # one key: several have no fixed order
        with atomic_file(self._checkpoints / f"round-{round:06d}.safetensors") as part:
            try:
                safetensors.torch.save_file(tensors, part, metadata=meta)
            except safetensors.SafetensorError as e:
                full = "os error 28" in str(e)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(e)) from None
            os.chmod(part, 0o666 & ~_umask())  # as all other files; safetensors makes it private
        for number, old in self._saved():
            if number < round:
                old.unlink()

    def finish(self) -> None:
        """Gather the per-client tables into one file."""
        parts = sorted(self._parts.glob("*.parquet"))
        if parts:
            with atomic_file(self.clients_file) as whole:
                self.clients().to_parquet(whole, index=False)
            for part in parts:
                part.unlink()

    # -- reading -------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The settings that the run was resolved to."""
        try:
            content = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            content = None
        if not isinstance(content, dict) or not isinstance(content.get("method"), str):
            raise FedloomError(f"'{self.config_file}' is damaged: it is not a run's config.")
        return content

    def rounds(self) -> list[dict[str, Any]]:
        """The records of all whole rounds; a torn last line is passed over."""
        if not self.rounds_file.exists():
            return []
        out = []
        lines = self.rounds_file.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError:  # of JSON or of UTF-8
                record = None
            if not isinstance(record, dict) or not record.keys() >= _WRITTEN:
                if number == len(lines) and not line.endswith(b"\n"):
                    break
                raise FedloomError(
                    f"'{self.rounds_file}' is damaged: line {number} is not the record of a round. "
                    "Nothing was changed. Mend the line, or start a new run."
                )
            out.append(record)
        return out

    def clients(self) -> pd.DataFrame:
        """Every client's scores at every evaluation."""
        files = [self.clients_file] if self.clients_file.exists() else []
        files += sorted(self._parts.glob("*.parquet"))
        if not files:
            return pd.DataFrame()
        return (
            pd.concat([_table(f) for f in files], ignore_index=True)
            .drop_duplicates(["round", "population", "client"], keep="last")
            .reset_index(drop=True)
        )

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest whole state and what is known about it."""
        saved = self._saved()
        for _, file in reversed(saved):
            try:
                with safetensors.safe_open(file, framework="pt") as f:
                    tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
                    about = json.loads(f.metadata()[_META])
                    if about.pop(_SUM) == _sum(tensors):
                        return tensors, about
            except (safetensors.SafetensorError, OSError, KeyError, TypeError):
                continue
        if saved:
            raise FedloomError(
                f"The checkpoint '{saved[-1][1]}' is damaged. Put a good copy in its place; or "
                "delete it, and --resume trains all rounds anew."
            )
        raise FedloomError(f"'{self.path}' has no whole checkpoint yet, so there is no model.")

    def has_checkpoint(self) -> bool:
        return bool(self._saved())

    def cut(self, round: int) -> None:
        """Forget everything after `round`, so that a resumed run writes it anew."""
        known = [r["round"] for r in self.rounds() if r["round"] <= round]
        if known != list(range(1, round + 1)):
            raise FedloomError(
                f"'{self.rounds_file}' is damaged: there is a checkpoint of round {round}, but not "
                "a record of every round until then. Nothing was changed. Put a good copy in its "
                "place; or delete the checkpoint too, and --resume trains all rounds anew."
            )
        for torn in self.path.rglob(".*.tmp"):
            torn.unlink()
        for folder in (self._checkpoints, self._parts):
            folder.mkdir(exist_ok=True)
        lines = "".join(json.dumps(r) + "\n" for r in self.rounds() if r["round"] <= round)
        if self.rounds_file.exists() and self.rounds_file.read_text(encoding="utf-8") != lines:
            self._replace(self.rounds_file, lines.encode())
        for part in self._parts.glob("round-*.parquet"):
            if int(part.stem.split("-")[1]) > round:
                part.unlink()
        if self.clients_file.exists():
            table = _table(self.clients_file)
            if (table["round"] > round).any():
                with atomic_file(self.clients_file) as whole:
                    table[table["round"] <= round].to_parquet(whole, index=False)

    def _saved(self) -> list[tuple[int, Path]]:
        found = [
            (m, f) for f in self._checkpoints.glob("*") if (m := _CHECKPOINT.fullmatch(f.name))
        ]
        return sorted((int(m[1]), f) for m, f in found)

    @staticmethod
    def _replace(file: Path, content: bytes) -> None:
        with atomic_file(file) as part:
            part.write_bytes(content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sum(tensors: dict[str, Tensor]) -> str:
    """A checksum of all values, so that a damaged state is never taken for a good one."""
    total = 0
    for name in sorted(name for name, value in tensors.items() if value.numel()):
        values = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        total = zlib.crc32(values.numpy().data, total)
    return f"{total:08x}"


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except (ValueError, OSError) as e:  # pyarrow's errors are ValueErrors
        raise FedloomError(f"'{file}' is damaged: {e}.") from None


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: a score that is none is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
