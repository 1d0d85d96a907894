"""Runs on disk, followed while they are written.

Files are tailed, not read again: a look at a run that did not change costs a few `stat` calls.
Whatever is half written, damaged or gone is a state of the run, never an error of the page.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.experiment.checksums import Damaged, open_json, open_names, open_yaml
from fedloom.experiment.ending import FAILED, KILLED
from fedloom.experiment.folder import COMPARISON, REPORT, RunFolder, resuming
from fedloom.experiment.settings import BadYaml, parse_yaml
from fedloom.files import slug
from fedloom.tasks import TASKS, Classification, Measure

_DEEPEST = 5  # folders below the one that is watched
_BLOCK = 1 << 18  # bytes at the end of a file that tell how a run stands
_MOST_BLOCK = 1 << 23
_RECENT = 60  # records that the time left is worked out from
_LOG = 200  # lines that are kept
_SKIPPED = {"cells", "clients", "checkpoints", "__pycache__"}
#: curve → where in a record it is; `None` is what the task is scored by
SCORES: dict[str, tuple[str | None, ...]] = {
    "test": ("test", None),
    "macro": ("clients", "macro"),
    "worst10": ("clients", "worst10"),
    "new_macro": ("newcomers", "macro"),
    "test_loss": ("test", "loss"),
    "train_loss": ("train_loss",),
    "degree": ("degree",),
    "dominating": ("dominating",),
}
#: what every record has
_WRITTEN: dict[str, type | tuple[type, ...]] = {
    "round": int, "participants": list, "seconds": (int, float), "bytes_up": int, "bytes_down": int,
}  # fmt: skip
_VERSIONS = itertools.count(1)  # never reused, not even for a run that reappears
_ADVICE = "Put a good copy in its place."
_SCORED = ("test", "macro", "worst10", "new_macro")  # in the measure of the task


class Tail:
    """The whole lines that were added to a file since the last look."""

    def __init__(self, file: Path, start: int = 0) -> None:
        self.file = file
        self.offset = start
        self._inode: int | None = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """New lines with where they begin; an incomplete last line is left for later. A file that
        was replaced or cut raises `Replaced`."""
        try:
            with self.file.open("rb") as f:
                stat = os.fstat(f.fileno())
                if self._inode not in (None, stat.st_ino) or stat.st_size < self.offset:
                    raise Replaced
                self._inode = stat.st_ino
                f.seek(self.offset)
                for line in f:
                    if not line.endswith(b"\n"):
                        return
                    at, self.offset = self.offset, self.offset + len(line)
                    yield at, line
        except FileNotFoundError:
            if self.offset:
                raise Replaced from None


class Replaced(Exception):
    """The file is another one now: what was read of it no longer counts."""


@dataclass
class Points:
    """The curves of a run, round by round, and where in the file each round is."""

    tail: Tail
    round: list[int] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scores: dict[str, list[float | None]] = field(default_factory=lambda: {k: [] for k in SCORES})
    at: list[int] = field(default_factory=list)
    took_part: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG))

    def update(self) -> None:
        for at, line in self.tail.read():
            self._add(at, _record(line, self.round[-1] if self.round else 0))

    def _add(self, at: int, record: dict[str, Any]) -> None:
        before = (self.mb[-1], self.seconds[-1]) if self.mb else (0.0, 0.0)
        self.round.append(int(record["round"]))
        self.mb.append(before[0] + (record["bytes_up"] + record["bytes_down"]) / 1e6)
        self.seconds.append(before[1] + record["seconds"])
        self.at.append(at)
        for name in SCORES:
            self.scores[name].append(_score(record, name))
        for client in record["participants"]:
            self.took_part[client] = self.took_part.get(client, 0) + 1
        for client in record.get("skipped", {}):
            self.skipped[client] = self.skipped.get(client, 0) + 1
        self.log.extend(_told(record))

    def since(self, start: int) -> dict[str, Any]:
        """What a page that has `start` rounds lacks."""
        scores = {k: v[start:] for k, v in self.scores.items() if any(x is not None for x in v)}
        return {"start": start, "round": self.round[start:], "MB": self.mb[start:],
                "s": self.seconds[start:], "scores": scores}  # fmt: skip


@dataclass
class Run:
    """One run's folder."""

    id: str
    name: str
    group: str
    folder: RunFolder
    version: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "new"
    wrong: str = ""  # what is damaged, and what can be done
    ended: str = ""  # what ended it before its end, unless somebody asked for it
    last: dict[str, Any] = field(default_factory=dict)  # of the newest record
    scored: dict[str, Any] = field(default_factory=dict)  # of the newest that was scored
    measure: Measure = Classification.measures[0]
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    written: float = 0.0
    diverged: bool = False  # by what its comparison says
    _tail: Tail | None = None
    _points: Points | None = None
    _seen: tuple[Any, ...] = ()
    _config_seen: tuple[Any, ...] = ()
    _saved: tuple[int, int] = (0, 0)  # when checkpoints changed, the round of the newest
    _bad_config: str = ""
    _bad_rounds: str = ""

    @property
    def done(self) -> int:
        return int(self.last.get("round", 0))

    @property
    def rounds(self) -> int:
        return int(self.config.get("rounds", 0))

    def look(self) -> None:
        """See what has changed; `version` grows with every change that a page should know of."""
        before = (self.state, self.done, self.wrong, self.ended, self._config_seen)
        active = self.folder.active
        self._read_config(active)
        self._read_rounds(active)
        self.wrong = self._bad_config or self._bad_rounds or ("" if active else self._cut())
        self.state, self.ended = self._state(active)
        if (self.state, self.done, self.wrong, self.ended, self._config_seen) != before:
            self.version = next(_VERSIONS)

    def _read_config(self, active: bool) -> None:
        file = self.folder.config_file
        try:
            stat = file.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._config_seen:
                return
            self.config, self._bad_config = {}, ""
            self._config_seen = seen
            content = file.read_bytes()
        except OSError as e:
            self._config_seen = ()
            if active:  # a run that is replaced has no config for a moment
                return
            gone = isinstance(e, FileNotFoundError)
            what = "is missing" if gone else f"can't be read ({e.strerror})"
            self.config, self._bad_config = {}, f"config.yaml {what}. {_ADVICE}"
            return
        try:
            self.config = _config(content)
        except Damaged as e:
            self._bad_config = f"config.yaml is damaged: {e}. {_ADVICE}"

    def _read_rounds(self, active: bool) -> None:
        file = self.folder.rounds_file
        try:
            stat = file.stat()
        except OSError:
            self._forget()
            return
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return
        if self._bad_rounds and not active:  # it may have been repaired
            self._forget()
        self._seen, self.written = seen, stat.st_mtime
        try:
            if self._tail is None:
                self._begin(stat.st_size)
            assert self._tail is not None
            before = self.done if self.done or not self._tail.offset else None
            for _, line in self._tail.read():
                record = _record(line, before)
                self._add(record)
                before = record["round"]
        except Replaced:
            self._forget()
        except Damaged as e:
            self._bad_rounds = f"rounds.jsonl is damaged: {e}. {_ADVICE}"
        except OSError as e:
            self._bad_rounds = f"rounds.jsonl can't be read ({e.strerror})."

    def _cut(self) -> str:
        """What is wrong with records that end before the newest checkpoint: it is written after
        them. A line that breaks off behind it is only a process that was killed."""
        with contextlib.suppress(OSError):
            changed = (self.folder.path / "checkpoints").stat().st_mtime_ns
            if changed != self._saved[0]:
                self._saved = changed, self.folder.newest_checkpoint()
        saved = self._saved[1]
        if self.done >= saved:
            return ""
        what = (
            f"rounds.jsonl is cut off: its last whole line is round {self.done}"
            if self.done
            else "rounds.jsonl is empty or missing"
        )
        return f"{what}, but there is a checkpoint of round {saved}. {_ADVICE}"

    def _begin(self, size: int) -> None:
        """Start near the end, but so that a scored round is among what is read, if that is not too
        far."""
        block = _BLOCK
        while True:
            start = max(size - block, 0)
            self._tail = Tail(self.folder.rounds_file, start)
            if start:
                with self.folder.rounds_file.open("rb") as f:
                    f.seek(start)
                    self._tail.offset = start + len(f.readline())
            if not start or block >= _MOST_BLOCK:
                return
            with self.folder.rounds_file.open("rb") as f:
                f.seek(self._tail.offset)
                if b'"eval_seconds"' in f.read():
                    return
            block *= 4

    def _add(self, record: dict[str, Any]) -> None:
        self.last = {"round": record["round"], "participants": len(record["participants"]),
                     "train_loss": record.get("train_loss"),
                     "network": "contacts" in record}  # fmt: skip
        self.measure = _measure(record)
        found = {k: v for k in _SCORED if (v := _score(record, k)) is not None}
        if found:
            self.scored = {"round": record["round"], **found}
        spent = record["seconds"] + record.get("eval_seconds", 0.0)
        self.recent.append(spent + record.get("profile", {}).get("store", 0.0))

    def _forget(self) -> None:
        """The file is gone, or another one: begin anew at the next look."""
        self._tail, self._points, self._seen = None, None, ()
        self.last, self.scored, self._bad_rounds = {}, {}, ""
        self.recent.clear()

    def _state(self, active: bool) -> tuple[str, str]:
        """In a word, and what ended the run before its end."""
        if self.wrong:
            return "damaged", ""
        if active:
            return "stopping" if self.folder.stop_asked else "running", ""
        if self.rounds and self.done >= self.rounds:
            return "finished", ""
        ending = self.folder.ending
        if ending is not None:
            return ending.kind, ending.text
        # A comparison or study of an older version, whose runs did not say so themselves.
        if self.diverged or self._beside(".diverged").exists():
            return "diverged", ""
        return "stopped", ""

    @property
    def resume(self) -> str:
        """The command that goes on with what has ended early; a run that diverged would again."""
        ended = self.state in ("stopped", FAILED, KILLED)
        return resuming(self.folder.path) if ended else ""

    def _beside(self, ending: str) -> Path:
        """What a study writes about a run."""
        return self.folder.path.parent / "cells" / f"{self.folder.path.name}{ending}"

    @property
    def left(self) -> float | None:
        """Seconds until the end, as far as the last rounds tell."""
        if self.state not in ("running", "stopping") or not self.recent:
            return None
        mean = sum(self.recent) / len(self.recent)
        return max((self.rounds - self.done) * mean - (time.time() - self.written), 0.0)

    def summary(self) -> dict[str, Any]:
        config = self.config
        return {
            "id": self.id, "name": self.name, "group": self.group, "version": self.version,
            "path": str(self.folder.path), "state": self.state, "wrong": self.wrong,
            "ended": self.ended, "resume": self.resume,
            "method": config.get("method"), "data": config.get("data"),
            "clients": config.get("clients"), "seed": config.get("seed"),
            "done": self.done, "rounds": self.rounds, "left": self.left,
            "written": self.written, "last": self.last, "scored": self.scored,
            "measure": {"axis": self.measure.axis, "unit": self.measure.unit,
                        "called": self.measure.called},
        }  # fmt: skip

    def points(self) -> Points:
        """All rounds; read from the start at the first call, and on from there at the next."""
        if self._points is None:
            self._points = Points(Tail(self.folder.rounds_file))
        try:
            self._points.update()
        except Replaced:
            self._points = Points(Tail(self.folder.rounds_file))
        except Damaged as e:  # further up than `look` reads
            self._bad_rounds = self._bad_rounds or f"rounds.jsonl is damaged: {e}. {_ADVICE}"
        except OSError as e:
            self._bad_rounds = f"rounds.jsonl can't be read ({e.strerror})."
        return self._points

    def record(self, round: int) -> dict[str, Any]:
        """The whole record of a round."""
        points = self.points()
        try:
            at = points.at[points.round.index(round)]
            with self.folder.rounds_file.open("rb") as f:
                f.seek(at)
                return _record(f.readline())
        except (ValueError, OSError, Damaged):
            return {}

    def details(self, since: int) -> dict[str, Any]:
        """Curves from round `since` on, log, clients: all that a page shows of one run."""
        points = self.points()
        since = since if since <= len(points.round) else 0
        took = [points.took_part.get(c, 0) for c in range(min(self.config.get("clients", 0), 2000))]
        return {**self.summary(), **points.since(since), "log": self._log(points),
                "took_part": took, "skipped": points.skipped, "names": self._names(),
                "settings": {k: str(v) for k, v in self.config.items() if v not in (None, {})},
                }  # fmt: skip

    def _log(self, points: Points) -> list[str]:
        said = []
        for ending in (".log", ".diverged"):  # what a study's run said on its terminal
            with contextlib.suppress(OSError):
                file = self._beside(ending)
                with file.open("rb") as f:
                    f.seek(max(file.stat().st_size - 4096, 0))
                    text = f.read().decode(errors="replace")
                said += [line for line in text.splitlines() if line.strip()][-20:]
        return [*points.log, *dict.fromkeys(said), *filter(None, (self.wrong, self.ended))]

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError, ValueError):
            return list(open_names(self.folder.names_file.read_text(encoding="utf-8")))
        return []

    @property
    def report(self) -> Path | None:
        """The run's report, if there is one that is not older than its last round."""
        file = self.folder.report_file
        with contextlib.suppress(OSError):
            if file.stat().st_mtime >= self.written and self.state == "finished":
                return file
        return None


class Follower:
    """All runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, Run] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self._comparisons: dict[Path, tuple[int, dict[str, Any]]] = {}

    def look(self, *, find: bool = True) -> None:
        """See what has changed; with `find`, also which runs have come and gone."""
        if find:
            self._find()
        for run in list(self.runs.values()):
            run.look()
            if not run.folder.path.exists():
                del self.runs[run.id]

    def _find(self) -> None:
        there = {}
        groups = set()
        for path in _folders(self.root):
            inside = path.relative_to(self.root)
            key = hashlib.sha256(str(inside).encode()).hexdigest()[:12]
            group = str(inside.parent) if inside.parent != Path(".") else ""
            name = inside.name or path.resolve().name
            groups.add(group)
            there[key] = self.runs.get(key) or Run(key, name, group, RunFolder(path))
        self.runs = there
        self.groups = {group: self._group(group) for group in sorted(groups)}
        for run in there.values():
            lost = self.groups[run.group]["diverged"]
            run.diverged = any(run.name.startswith(f"{slug(label)}-s") for label in lost)

    def _group(self, group: str) -> dict[str, Any]:
        """What a folder of runs is, and how many runs it will have."""
        folder = self.root / group
        kind, planned = "folder", None
        compared = self._comparison(folder / COMPARISON)
        if compared:
            kind, planned = "comparison", compared["seeds"] * len(compared["own"])
        elif (folder / "cells").is_dir():
            kind, planned = "study", len(list((folder / "cells").glob("*.yaml")))
        key = hashlib.sha256(f"group {group}".encode()).hexdigest()[:12]
        return {"id": key, "kind": kind, "planned": planned, "path": str(folder),
                "diverged": list(compared.get("diverged") or ()),
                "report": kind != "folder" and (folder / REPORT).is_file()}  # fmt: skip

    def _comparison(self, file: Path) -> dict[str, Any]:
        """What a comparison was asked for; parsed again only if it was written again."""
        try:
            written = file.stat().st_mtime_ns
        except OSError:
            return {}
        if self._comparisons.get(file, (0, {}))[0] != written:
            try:
                found = parse_yaml(file.read_text(encoding="utf-8"))
            except (OSError, BadYaml, UnicodeDecodeError):
                found = None
            right = isinstance(found, dict) and isinstance(found.get("seeds"), int)
            right = right and isinstance(found.get("own"), dict)
            self._comparisons[file] = written, found if right else {}
        return self._comparisons[file][1]

    def group_path(self, key: str) -> Path | None:
        for group, about in self.groups.items():
            if about["id"] == key and about["kind"] != "folder":
                return self.root / group
        return None


def _folders(root: Path) -> Iterator[Path]:
    """The folders of runs, in order; no links are followed, and a run holds no other runs."""
    level = [(root, 0)]
    while level:
        folder, depth = level.pop()
        if any((folder / name).is_file() for name in ("config.yaml", "rounds.jsonl")):
            yield folder  # a run that has lost its config is one as well
            continue
        if depth >= _DEEPEST:
            continue
        try:
            inside = [
                Path(e.path)
                for e in os.scandir(folder)
                if e.is_dir(follow_symlinks=False)
                and not e.name.startswith(".")
                and e.name not in _SKIPPED
            ]
        except OSError:
            continue
        level += [(path, depth + 1) for path in sorted(inside, reverse=True)]


def _config(content: bytes) -> dict[str, Any]:
    try:
        text = content.decode()
        found = parse_yaml(text)
    except (BadYaml, UnicodeDecodeError):
        raise Damaged("it is not valid YAML") from None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), int) for key in ("rounds", "clients", "seed")
    ):
        raise Damaged("it is not a run's config")
    open_yaml(text)
    return found


def _record(line: bytes, before: int | None = None) -> dict[str, Any]:
    """The record in a line that comes after that of round `before`, where this is known."""
    where = "a line" if before is None else f"the line of round {before + 1}"
    try:
        record = open_json(line.decode().removesuffix("\n"))[0]
    except (Damaged, UnicodeDecodeError):
        raise Damaged(f"{where} is cut off or changed") from None
    if not all(isinstance(record.get(key), kind) for key, kind in _WRITTEN.items()):
        raise Damaged(f"{where} is not the record of a round")
    if before is not None and record["round"] != before + 1:
        raise Damaged(f"{where} is missing; round {record['round']} is in its place")
    return record


def _measure(record: dict[str, Any]) -> Measure:
    """What the run's task is scored by; records of older versions are of classes."""
    task = TASKS.get(str(record.get("task")), Classification)
    return task.measures[0]


def _score(record: dict[str, Any], name: str) -> float | None:
    measure = _measure(record)
    value: Any = record
    for key in SCORES[name]:
        value = value.get(key or measure.name) if isinstance(value, dict) else None
    if not isinstance(value, int | float):
        return None
    return (measure.factor if name in _SCORED else 1.0) * float(value)


def _written(record: dict[str, Any], value: float) -> str:
    measure = _measure(record)
    return f"{value:.2f} %" if measure.share else f"{measure.called} {value:.4g}"


def _told(record: dict[str, Any]) -> Iterator[str]:
    """A round as lines of a log."""
    words = [f"round {record['round']}", f"{len(record['participants'])} clients"]
    loss = record.get("train_loss")
    words += [f"training loss {loss:.4f}"] if loss is not None else []
    shown = {"test": "test", "macro": "clients", "new_macro": "newcomers"}
    for name, called in shown.items():
        value = _score(record, name)
        words += [f"{called} {_written(record, value)}"] if value is not None else []
    words.append(f"{record['seconds'] + record.get('eval_seconds', 0.0):.2f} s")
    yield ", ".join(words)
    for client, why in list(record.get("skipped", {}).items())[:5]:
        yield f"round {record['round']}: message of client {client} left out: {why}"
