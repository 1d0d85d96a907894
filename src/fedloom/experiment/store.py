"""A run on disk: config, one JSON line per round, a per-client table, checkpoints.

Everything is written so that a kill at any moment loses at most the current round: lines are
appended, tables and checkpoints appear under their name only when they are whole, and everything
after the newest whole checkpoint is cut off before a run continues. So that a power cut loses
hardly more, a checkpoint and all that was written before it are synced to the disk, at most once a
second: shorter rounds would take several times as long. Everything has a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.experiment.checksums import (
    Damaged,
    open_json,
    open_names,
    open_table,
    open_yaml,
    seal_json,
    seal_names,
    seal_table,
    seal_yaml,
)
from fedloom.experiment.folder import CHECKPOINT, RunFolder
from fedloom.experiment.settings import BadYaml, parse_yaml
from fedloom.files import atomic_file, sync

if TYPE_CHECKING:
    import pandas as pd

_KEPT = 2  # checkpoints: if the newest is damaged, there is one before it
_SYNC_EVERY = 1.0  # seconds
_META = "fedloom"
_SUM, _OLD_SUM = "tensors", "crc32"  # of names, shapes and values; of values only
_WRITTEN = {"round", "participants", "seconds"}  # in every record
_NUMBERS = ("seed", "rounds", "clients", "checkpoint_every")  # in every config, the last at its end
_KEY = ["round", "population", "client"]  # of a row in the per-client table


class DamagedFile(FedloomError):
    """`what` is wrong with a file of a run; the text says what to do about it as well."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


class RunStore(RunFolder):
    """The directory of one run and what is in its files."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._unsynced: set[Path] = set()
        self._synced, self._synced_at = 0, time.monotonic()  # the round of a checkpoint, and when

    @staticmethod
    def open(path: Path) -> RunStore:
        """A run that is there, or an error that says what is wrong."""
        store = RunStore(Path(path))
        store.check_whole()
        if not store.exists:
            what = (
                "is not a run: it has no config.yaml" if store.path.exists() else "does not exist"
            )
            raise FedloomError(f"'{path}' {what}. {_inside(store.path)}")
        return store

    # -- writing -------------------------------------------------------------------------------

    def add_manifest(self, manifest: dict[str, Any]) -> None:
        """What leaves a client, what stays with it and what the server keeps, for people."""
        text = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True)
        _replace(self.manifest_file, seal_yaml(text).encode())

    def manifest(self) -> dict[str, Any]:
        """What `add_manifest` wrote; nothing for a run of an older version."""
        try:
            text = self.manifest_file.read_bytes().decode()
            found = parse_yaml(text)
            if not isinstance(found, dict):
                raise Damaged("it is not a manifest")
            open_yaml(text)
        except FileNotFoundError:
            return {}
        except (OSError, BadYaml, ValueError) as e:
            raise self._not_needed(self.manifest_file, e, "reports then lack it") from None
        return found

    def add_names(self, names: Sequence[str]) -> None:
        """What the clients are called, in their order, where the data says so."""
        _replace(self.names_file, seal_names(names).encode())

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """What made the run, and what it was made of: versions, and who holds how much of what."""
        _replace(self.about_file, seal_json(facts, ensure_ascii=False).encode())

    def facts(self) -> dict[str, Any]:
        """What `add_facts` wrote; nothing for a run of an older version."""
        try:
            return open_json(self.about_file.read_bytes().decode())[0]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            lack = "reports then lack versions and classes"
            raise self._not_needed(self.about_file, e, lack) from None

    def _not_needed(self, file: Path, why: Exception, without: str) -> DamagedFile:
        """A file that no result depends on is damaged."""
        advice = f"Delete it: {without}, and the rest of the run is intact."
        return DamagedFile(f"'{file}' is damaged: {why}", advice)

    def add_round(self, record: dict[str, Any]) -> None:
        with self.rounds_file.open("ab") as f:
            f.write(seal_json(_finite(record), allow_nan=False).encode() + b"\n")
        self._unsynced |= {self.rounds_file, self.path}

    def add_clients(self, round: int, table: pd.DataFrame) -> None:
        file = self._parts / f"round-{round:06d}.parquet"
        _replace(file, seal_table(table))
        self._unsynced |= {file, self._parts}

    def add_checkpoint(self, round: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Keep the state after `round`; a run that this one replaces is dropped.

        The last two are kept, and the last one that was synced.
        """
        due = self._replaced.exists() or time.monotonic() >= self._synced_at + _SYNC_EVERY
        if due:
            self.sync()
        known = {"round": round, _SUM: _sum(tensors), **about}
        meta = {_META: seal_json(known, sort_keys=True)}  # one key: several have no fixed order
        target = self._checkpoints / f"round-{round:06d}.safetensors"
        with atomic_file(target, synced=due) as part:
            try:
                safetensors.torch.save_file(tensors, part, metadata=meta)
            except safetensors.SafetensorError as e:
                full = "os error 28" in str(e)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(e)) from None
            os.chmod(part, 0o666 & ~_umask())  # as all other files; safetensors makes it private
        if due:
            self._synced, self._synced_at = round, time.monotonic()
        else:
            self._unsynced |= {target, self._checkpoints}
        self.drop_replaced()
        for number, old in self._saved()[:-_KEPT]:
            if number != self._synced:
                old.unlink()

    def sync(self) -> None:
        """Return once all that was written is on the disk itself."""
        there = sorted(path for path in self._unsynced if path.exists())
        for path in reversed(there):  # files before the folders that they are in
            sync(path)
        self._unsynced.clear()

    def finish(self) -> None:
        """Gather the per-client tables into one file; the run is over."""
        parts = sorted(self._parts.glob("*.parquet"))
        if parts:
            _replace(self.clients_file, seal_table(self._tables()), synced=True)
            for part in parts:
                part.unlink()
        self.sync()
        self.error_file.unlink(missing_ok=True)
        self.end()

    def inherit(self, other: RunStore, round: int) -> None:
        """Start with the records and tables of another run until `round`."""
        lines = [seal_json(r) + "\n" for r in other.rounds() if r["round"] <= round]
        _replace(self.rounds_file, "".join(lines).encode())
        self._unsynced |= {self.rounds_file, self.path}
        other.warn_of_lost_tables()
        table = other._tables()
        if len(table) and (table["round"] <= round).any():
            self.add_clients(round, table[table["round"] <= round])

    def cut(self, round: int) -> None:
        """Forget everything after `round`, so that a resumed run writes it anew."""
        lines = self._lines()
        kept = [self._record(line, number) for number, line in enumerate(lines[:round], 1)]
        if len(kept) < round:
            raise self._gap(round)
        self.sweep()
        for folder in (self._checkpoints, self._parts):
            folder.mkdir(exist_ok=True)
        sealed = "".join(seal_json(record) + "\n" for record in kept).encode()
        if lines and b"".join(lines) != sealed:
            _replace(self.rounds_file, sealed, synced=True)
        for number, file in self._saved():
            if number > round:
                file.unlink()
        for part in self._parts.glob("round-*.parquet"):
            if int(part.stem.split("-")[1]) > round:
                part.unlink()
        if self.clients_file.exists():
            table = self._table(self.clients_file)
            if (table["round"] > round).any():
                kept_rows = table[table["round"] <= round]
                _replace(self.clients_file, seal_table(kept_rows), synced=True)

    # -- reading -------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The settings that the run was resolved to."""
        try:
            text = self.config_file.read_bytes().decode()
            content = parse_yaml(text)
        except (BadYaml, UnicodeDecodeError):
            content = None
        fits = (
            isinstance(content, dict)
            and isinstance(content.get("method"), str)
            and all(isinstance(content.get(key), int) for key in _NUMBERS)
        )
        if not fits:
            raise DamagedFile(
                f"'{self.config_file}' is damaged: it is not a run's config",
                "Put a good copy in its place; or start a new run from the last checkpoint: "
                f"--fork {self.path} --out NEW.",
            )
        try:
            open_yaml(text)
        except Damaged:
            raise DamagedFile(
                f"'{self.config_file}' is not as fedloom wrote it: it was edited, or is damaged"
                f"{self._edited(content)}",
                "Restore it. Speed and length can be changed with --resume, such as --resume "
                f"--out {self.path} --rounds 100; for other settings start a new run from here: "
                f"--fork {self.path} --out NEW.",
            ) from None
        return dict(content)

    def names(self) -> tuple[str, ...]:
        """What the clients are called; nothing where they have numbers only."""
        try:
            return open_names(self.names_file.read_bytes().decode())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as e:
            lack = "clients then go by their numbers"
            raise self._not_needed(self.names_file, e, lack) from None

    def rounds(self) -> list[dict[str, Any]]:
        """The records of all whole rounds; a torn last line is passed over."""
        lines, safe, out = self._lines(), self._safe_round(), []
        for number, line in enumerate(lines, 1):
            if number == len(lines) > safe and not line.endswith(b"\n"):
                break
            out.append(self._record(line, number))
        if len(out) < safe:
            raise self._gap(safe)
        return out

    def clients(self) -> pd.DataFrame:
        """Every client's scores at every evaluation."""
        table = self._tables()
        lost = self._lost(table)
        if lost and not len(table):
            raise self._without_tables(lost)
        if lost:
            warnings.warn(str(self._without_tables(lost)), stacklevel=2)
        return table

    def warn_of_lost_tables(self) -> None:
        """A warning if clients were scored and the table of it is gone."""
        lost = self._lost(self._tables())
        if lost:
            warnings.warn(str(self._without_tables(lost)), stacklevel=2)

    def _tables(self) -> pd.DataFrame:
        """The per-client tables that are there."""
        import pandas as pd  # here: training needs no tables

        files = [self.clients_file] if self.clients_file.exists() else []
        files += sorted(self._parts.glob("*.parquet"))
        if not files:
            return pd.DataFrame()
        return (
            pd.concat([self._table(f) for f in files], ignore_index=True)
            .drop_duplicates(_KEY, keep="last")
            .reset_index(drop=True)
        )

    def _table(self, file: Path) -> pd.DataFrame:
        try:
            table = open_table(file.read_bytes())
            if not set(_KEY) <= set(table.columns):
                raise Damaged("it is not a table of clients")
        except (Damaged, OSError) as e:
            raise DamagedFile(f"'{file}' is damaged: {e}", self._scores_again) from None
        return table

    def _lost(self, table: pd.DataFrame) -> list[int]:
        """The rounds whose clients were scored, by the records, and are not in the table."""
        there = set(table["round"]) if len(table) else set()
        scored = [r["round"] for r in self.rounds() if "clients" in r or "newcomers" in r]
        return [number for number in scored if number not in there]

    def _without_tables(self, lost: list[int]) -> FedloomError:
        which = f"round {lost[0]}" if len(lost) == 1 else f"rounds {lost[0]} to {lost[-1]}"
        return DamagedFile(
            f"'{self.clients_file}' is missing, or does not hold the clients' scores of {which}",
            self._scores_again,
        )

    @property
    def _scores_again(self) -> str:
        return (
            "Put a good copy in its place; or score the clients of the last checkpoint again: "
            f"fedloom score {self.path} --table FILE.csv."
        )

    @property
    def gathered(self) -> bool:
        """Whether `finish` has nothing left to do."""
        return not any(self._parts.glob("*.parquet"))

    def checkpoint(self, round: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest state, or that of `round`, and what is known about it."""
        saved = self._saved()
        if not saved:
            raise FedloomError(
                f"'{self.path}' has no complete checkpoint yet, so there is no model."
            )
        number = saved[-1][0] if round is None else round
        if number not in dict(saved):
            rounds = ", ".join(str(number) for number, _ in saved)
            raise FedloomError(
                f"'{self.path}' has no checkpoint of round {round}; it has those of: {rounds}."
            )
        file = dict(saved)[number]
        try:
            return _state(file)
        except Damaged:
            before = [n for n, _ in saved if n < number]
            rest = (
                f"--resume continues from the previous checkpoint, of round {before[-1]}"
                if before
                else self._anew
            )
            raise DamagedFile(
                f"The checkpoint '{file}' is damaged", f"Put a good copy in its place; or {rest}."
            ) from None

    def last_whole(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest state that is whole, with all that was written until then.

        There may be newer ones that are not, after a power cut: that is a warning.
        """
        first: DamagedFile | None = None
        readable = False
        for number, _ in reversed(self._saved()):
            try:
                found = self.checkpoint(number)
                readable = True
                self._check(number)
            except DamagedFile as e:
                first = first or e
                continue
            if first is not None:
                warnings.warn(f"Going on from round {number}. {first.what}.", stacklevel=2)
            return found
        if first is not None and not readable:
            raise DamagedFile(
                first.what,
                f"There is no complete one before it. Restore a good copy; or {self._anew}.",
            )
        raise first or FedloomError(f"'{self.path}' has no whole checkpoint yet.")

    def check_begun(self, first: int) -> int:
        """The records of a run without a checkpoint, whose first was due after round `first`.

        If there are more, the checkpoints were lost: training again would drop what was recorded.
        """
        done = sum(line.endswith(b"\n") for line in self._lines())
        if self.has_checkpoint() or (done <= first and not self.clients_file.exists()):
            return done
        raise DamagedFile(
            f"'{self.path}' has the records of {done} rounds, but its checkpoints are gone, so "
            "there is nothing to continue from",
            f"Nothing was changed. Put the checkpoints back; or {self._anew}. To replace this run "
            f"instead: --out {self.path} --overwrite.",
        )

    def _check(self, round: int) -> None:
        """Refuse if a record or a table until `round` is damaged."""
        lines = self._lines()[:round]
        for number, line in enumerate(lines, 1):
            self._record(line, number)
        if len(lines) < round:
            raise self._gap(round)
        for part in self._parts.glob("round-*.parquet"):
            if int(part.stem.split("-")[1]) <= round:
                self._table(part)

    def _lines(self) -> list[bytes]:
        if not self.rounds_file.exists():
            return []
        return self.rounds_file.read_bytes().splitlines(keepends=True)

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        """The record in a line, which must be whole and that of this round."""
        try:
            record, has_sum = open_json(line.decode().removesuffix("\n"))
            fits = record.keys() >= _WRITTEN and record["round"] == number
            if fits and (has_sum or not self.is_sealed()):
                return record
        except (Damaged, UnicodeDecodeError):
            pass
        raise DamagedFile(
            f"'{self.rounds_file}' is damaged: line {number} is not the record of round {number}",
            "Nothing was changed. Mend the line, or start a new run.",
        )

    def is_sealed(self) -> bool:
        """Whether the run was written with checksums, so that none may be missing."""
        try:
            return open_yaml(self.config_file.read_bytes().decode())
        except (Damaged, UnicodeDecodeError):
            return True

    def _gap(self, round: int) -> DamagedFile:
        return DamagedFile(
            f"'{self.rounds_file}' is damaged: there is a checkpoint of round {round}, but not a "
            "record of every round until then",
            f"Nothing was changed. Put a good copy in its place; or {self._anew}.",
        )

    @property
    def _anew(self) -> str:
        return (
            f"train all rounds again, in a new directory: fedloom run --config {self.config_file} "
            "--out NEW"
        )

    def _edited(self, content: dict[str, Any]) -> str:
        """What in a config that was edited is not as the newest checkpoint has it."""
        known = self.about().get("settings", {})
        for key, value in known.items():
            given = content.get(key)
            if json.dumps(given, sort_keys=True) != json.dumps(value, sort_keys=True):
                return f". It says {key}={given}, and the run was made with {value}"
        return ""

    def _safe_round(self) -> int:
        """The round of the newest checkpoint; one that can't be read at all does not count."""
        return int(self.about().get("round", 0))

    def about(self) -> dict[str, Any]:
        """What is known about the newest checkpoint, without reading its tensors."""
        for _, file in reversed(self._saved()):
            with contextlib.suppress(Damaged):
                return _about(file)
        return {}


def _replace(file: Path, content: bytes, *, synced: bool = False) -> None:
    with atomic_file(file, synced=synced) as part:
        part.write_bytes(content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _about(file: Path) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    try:
        with safetensors.safe_open(file, framework="pt") as f:
            about, has_sum = open_json((f.metadata() or {}).get(_META, ""))
    except (safetensors.SafetensorError, OSError) as e:
        raise Damaged(str(e)) from None
    name = CHECKPOINT.fullmatch(file.name)
    if not has_sum and _OLD_SUM not in about:
        raise Damaged("its checksum is missing")
    if name is None or about.get("round") != int(name[1]):
        raise Damaged("it is of another round than its name says")
    return about


def _state(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    about = _about(file)
    try:
        with safetensors.safe_open(file, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as e:
        raise Damaged(str(e)) from None
    new = _SUM in about
    if about[_SUM if new else _OLD_SUM] != _sum(tensors, names=new):
        raise Damaged("its checksum does not match")
    return tensors, about


def _sum(tensors: dict[str, Tensor], *, names: bool = True) -> str:
    """A checksum of all values, so that a damaged state is never taken for a good one."""
    total = 0
    for name in sorted(name for name, value in tensors.items() if names or value.numel()):
        value = tensors[name]
        if names:
            what = f"{name} {value.dtype} {tuple(value.shape)}"
            total = zlib.crc32(what.encode(), total)
        if value.numel():
            values = value.contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(values.numpy().data, total)
    return f"{total:08x}"


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: such scores become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inside(folder: Path) -> str:
    """What a folder holds that can be named in its place."""
    files = {"runs": "config.yaml", "comparisons": "comparison.yaml", "studies": "study.yaml"}
    found = {
        what: sorted(p.parent.name for p in folder.glob(f"*/{file}"))
        for what, file in files.items()
    }
    names = [name for inside in found.values() for name in inside]
    if not names:
        return "Runs are directories such as runs/NAME."
    words = [f"the {what} {', '.join(inside)}" for what, inside in found.items() if inside]
    return f"It holds {' and '.join(words)}: name one of them, such as {folder / names[0]}."
