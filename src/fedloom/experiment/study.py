"""A study: many runs, declared together with the tables and figures that are made of them.

A study says which cells it has (a method with its settings each) and what to show of their results.
Running them is the same for all: cells run in parallel processes, one core each, through the same
command line that a user has; a finished cell is never run again, an interrupted one goes on from
its last whole round.
"""

from __future__ import annotations

import contextlib
import fnmatch
import shlex
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import yaml

from fedloom.engine.processes import can_fork
from fedloom.errors import INTERRUPTED, FedloomError, Interrupted, unknown
from fedloom.experiment.api import planned
from fedloom.experiment.config import agreed, make_config
from fedloom.experiment.entry import Entry
from fedloom.experiment.folder import REPORT, STUDY
from fedloom.experiment.forkserver import ForkServer, Process
from fedloom.experiment.plugins import check_files, method_class
from fedloom.experiment.result import Result
from fedloom.experiment.settings import Config
from fedloom.experiment.store import RunStore
from fedloom.experiment.track import check as check_tracker
from fedloom.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAUSE = 0.5  # seconds between two words on how far the running cells are ...
_LOOK = 0.05  # ... and between two looks whether one has ended
_CELLS, _DIVERGED = "cells", ".diverged"  # where a cell's config is, what tells that it diverged


@dataclass(frozen=True)
class Ask:
    """What the user wants of a study."""

    data: str
    preset: str
    scale: str = "full"
    seeds: int = 1
    only: tuple[str, ...] = ()  # patterns of cell names; none: all cells
    values: Path | None = None  # what `fedloom tune` wrote, for presets that take it

    @property
    def over(self) -> str:
        """What a number in a table is."""
        return "one seed" if self.seeds == 1 else f"mean ± population std over {self.seeds} seeds"


def spread(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Mean ± std (of the population: divided by n), as text; a dash where something is missing."""
    if not values or np.isnan(values).any():
        return "–"
    mean = f"{np.mean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values):.{digits}f}"


@dataclass(frozen=True)
class Cell:
    """One run for every seed; `name` names its directory."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join("| " + " | ".join(r) + " |" for r in lines)


@dataclass(frozen=True)
class Picture:
    """Curves over rounds, a panel for each score: label → one table of rounds per seed."""

    name: str
    title: str
    panels: Mapping[str, str]  # column of `Result.evaluations` → title
    curves: Mapping[str, Sequence[pd.DataFrame]]
    x: str = "round"
    marks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # label → column → end

    def figure(self) -> Figure:
        from fedloom.report.plots import plot_curves

        return plot_curves(self.curves, self.panels, self.x, self.marks)

    def table(self) -> pd.DataFrame:
        """What is drawn: a row for each point of a curve and seed."""
        rows = [
            frame[[c for c in (self.x, *self.panels) if c in frame]].assign(label=label, run=i)
            for label, frames in self.curves.items()
            for i, frame in enumerate(frames)
        ]
        return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


@dataclass(frozen=True)
class Drawn:
    """Any other picture."""

    name: str
    title: str
    figure: Callable[[], Figure]


Figures = Sequence[Picture | Drawn]

#: by cell: one result per seed; cells that diverged or never ran are missing
Results = Mapping[str, Sequence[Result]]


class Study(ABC):
    """Runs, tables and figures as a declaration. Options are words that `Ask` may hold."""

    name: ClassVar[str]
    title: ClassVar[str]
    data: ClassVar[tuple[str, ...]]
    presets: ClassVar[tuple[str, ...]]
    scales: ClassVar[tuple[str, ...]] = ("quick", "full")
    tuned: ClassVar[tuple[str, ...]] = ()  # presets that take values which `fedloom tune` chose
    methods: ClassVar[tuple[str, ...]] = ()  # those that are tuned for them ...
    space: ClassVar[Mapping[str, Any]] = {}  # ... and what is searched

    @abstractmethod
    def cells(self, ask: Ask) -> list[Cell]: ...

    @abstractmethod
    def tables(self, ask: Ask, results: Results) -> list[Table]: ...

    def pictures(self, ask: Ask, results: Results) -> Figures:
        return []

    def files(self, ask: Ask, results: Results) -> Mapping[str, str]:
        """Further files of the report: name → text."""
        return {}

    def about(self, ask: Ask) -> str:
        return f"{ask.data}, preset {ask.preset}, scale {ask.scale}"

    def command(self, ask: Ask) -> str:
        """What runs it again."""
        words = [f"fedloom study {self.name}", f"--data {ask.data}", f"--preset {ask.preset}",
                 f"--scale {ask.scale}", f"--seeds {ask.seeds}"]  # fmt: skip
        return " ".join([*words, *(f"--only {shlex.quote(pattern)}" for pattern in ask.only)])

    def asked(self, ask: Ask) -> dict[str, Any]:
        """What its folder keeps, to open it again."""
        return {"study": self.name, "data": ask.data, "preset": ask.preset, "scale": ask.scale,
                "seeds": ask.seeds, "only": list(ask.only),
                "values": None if ask.values is None else str(ask.values)}  # fmt: skip

    def to_search(self, ask: Ask) -> dict[str, Any]:
        """The settings of all runs of a search for the values of a tuned preset."""
        raise FedloomError(f"The study {self.name} has no values to tune.")

    def check(self, ask: Ask) -> None:
        for kind, given, valid in (
            ("data set of this study", ask.data, self.data),
            ("preset", ask.preset, self.presets),
            ("scale", ask.scale, self.scales),
        ):
            if given not in valid:
                raise unknown(kind, given, valid)
        if ask.values is not None and ask.preset not in self.tuned:
            raise FedloomError(
                f"--values {ask.values} would do nothing: the preset {ask.preset} has its own "
                "constants. Leave it out"
                + (f", or use --preset {self.tuned[0]}." if self.tuned else ".")
            )
        if ask.seeds < 1:
            raise FedloomError(f"seeds={ask.seeds}: at least one seed is needed.")


@dataclass
class Job:
    """A cell with a seed, in its directory."""

    cell: Cell
    seed: int
    path: Path
    rounds: int

    @property
    def done(self) -> int:
        """Rounds that are on disk."""
        with contextlib.suppress(OSError):
            return (self.path / "rounds.jsonl").read_bytes().count(b"\n")
        return 0


@dataclass
class _Running(Job):
    process: Process


#: (job's name, rounds done and asked of all jobs, jobs finished, jobs, those that have just ended,
#: each with the last record of its run) → shown to the user
Say = Callable[[str, int, int, int, int, Mapping[str, Mapping[str, Any]]], None]


def run_study(study: Study, ask: Ask, out: Path, workers: int, say: Say) -> dict[str, list[Result]]:
    """Run what is asked for and not finished yet; returns all finished results by cell."""
    study.check(ask)
    if out.exists() and not out.is_dir():
        raise FedloomError(f"'{out}' is a file. Choose another --out for the study's directory.")
    cells = together(study.cells(ask))
    asked = _asked(cells, ask)
    known = [  # what earlier commands ran stays in the tables
        make_job(cell, seed, out)
        for cell in cells
        for seed in range(ask.seeds)
        if cell.name in asked or RunStore(_path(cell, seed, out)).exists
    ]
    with atomic_file(out / STUDY) as part:
        part.write_text(yaml.safe_dump(study.asked(ask), sort_keys=False), encoding="utf-8")
    run_jobs([job for job in known if job.cell.name in asked], workers, say)
    results: dict[str, list[Result]] = {}
    for each in known:
        if finished(each) and not diverged(each):
            results.setdefault(each.cell.name, []).append(Result(each.path))
    return {name: runs for name, runs in results.items() if len(runs) == ask.seeds}


def run_jobs(jobs: Sequence[Job], workers: int, say: Say) -> None:
    """Run unfinished jobs, `workers` at a time, each in its own process."""
    waiting = deque(job for job in jobs if not finished(job))
    running: list[_Running] = []
    failed: list[str] = []
    stopped: list[str] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ForkServer()) if len(waiting) > 1 and can_fork() else None
        stack.callback(_end, running)
        while running or (waiting and not failed):
            while waiting and not failed and len(running) < workers:
                running.append(_start(waiting.popleft(), server))
            ended: dict[str, Mapping[str, Any]] = {}
            for job in filter(_ended, list(running)):
                running.remove(job)
                words = _log(job).read_text().rpartition("Error: ")[2].strip()
                if job.process.returncode and "Training diverged" in words:
                    _diverged(job).write_text(words)  # a result too: it is not tried again
                elif job.process.returncode == INTERRUPTED and not finished(job):
                    stopped.append(job.path.name)  # somebody asked for it: the others go on
                elif job.process.returncode and not finished(job):
                    # Others would very likely fail as well: no more are started.
                    failed.append(f"{job.path.name}: {words}")
                else:
                    ended[job.path.name] = RunStore(job.path).rounds()[-1]
            everything = sum(j.rounds for j in jobs)
            over = len(jobs) - len(waiting) - len(running) - len(failed) - len(stopped)
            names = ", ".join(j.path.name for j in running)
            say(names, sum(j.done for j in jobs), everything, over, len(jobs), ended)
            until = time.monotonic() + _PAUSE
            while running and time.monotonic() < until and not any(map(_ended, running)):
                time.sleep(_LOOK)
    if failed:
        raise FedloomError(
            f"A run failed; finished runs are safe in '{jobs[0].path.parent}', and the same "
            f"command continues from there. {failed[0]}"
        )
    if stopped:
        raise Interrupted(
            f"{', '.join(stopped)} was stopped before its end. All others are finished; the same "
            "command goes on with it, and then writes the tables."
        )


def _ended(job: _Running) -> bool:
    return job.process.poll() is not None


def _end(running: Sequence[_Running]) -> None:
    for job in running:
        job.process.terminate()
    for job in running:
        job.process.wait()
        RunStore(job.path).end()  # it was not killed: the study ended it


def is_study(folder: Path) -> bool:
    return (folder / STUDY).is_file()


def reopen(folder: Path) -> tuple[Study, Ask, dict[str, list[Result]]]:
    """The study or sweep that a folder holds, and what is finished of it, also while it runs."""
    from fedloom.experiment.config import read_config

    found = read_config(folder / STUDY)
    try:
        asked = Ask(found.get("data", ""), found.get("preset", ""), found.get("scale", "full"),
                    int(found["seeds"]), tuple(found.get("only") or ()),
                    Path(found["values"]) if found.get("values") else None)  # fmt: skip
        if "sweep" in found:
            from fedloom.experiment.sweep import Axis, Sweep

            grid = found["sweep"]
            axes = [Axis(key, tuple(values)) for key, values in grid["axes"].items()]
            for settings in (grid["settings"], *({a.key: v} for a in axes for v in a.values)):
                check_files(settings)
            for method in grid["methods"]:
                Entry.stored(method)
            study: Study = Sweep(grid["methods"], axes, grid["settings"])
        else:
            from fedloom.studies import find

            study = find(str(found["study"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FedloomError(f"'{folder / STUDY}' is not what fedloom wrote.") from None
    results: dict[str, list[Result]] = {}
    for cell in study.cells(asked):
        for seed in range(asked.seeds):
            path = _path(cell, seed, folder)
            if RunStore(path).exists:
                job = Job(cell, seed, path, int(RunStore(path).config()["rounds"]))
                if finished(job) and not diverged(job):
                    results.setdefault(cell.name, []).append(Result(path))
    return study, asked, {name: r for name, r in results.items() if len(r) == asked.seeds}


def write_report(
    study: Study,
    ask: Ask,
    results: Results,
    out: Path,
    file: Path | None = None,
    figures: Path | None = None,
) -> list[Table]:
    """Write tables.md, the figures and report.html (or `file`) into the study's folder; with
    `figures`, those of the page for print into that folder. Returns the tables."""
    from fedloom.experiment.reporting import drawn, study_page, write_page
    from fedloom.report.plots import save

    tables = study.tables(ask, results)
    lost = [
        [path.stem, path.read_text(encoding="utf-8")]
        for path in sorted((out / _CELLS).glob(f"*{_DIVERGED}"))
    ]
    if lost:
        tables.append(Table("Runs that diverged", ["run", "what happened"], lost))
    parts = {run.scored_on for runs in results.values() for run in runs} - {None}
    scored = [f"Clients are scored on {part}." for part in sorted(map(str, parts))]
    text = "\n\n".join([f"# {study.title}", *scored, *(t.markdown() for t in tables)])
    shown = {}
    for picture in study.pictures(ask, results):
        if isinstance(picture, Picture) and not picture.curves:
            continue  # none of its cells ran
        figure = picture.figure()
        for ending in ("png", "svg", "pdf"):
            save(figure, out / f"{picture.name}.{ending}")
        table = picture.table() if isinstance(picture, Picture) else pd.DataFrame()
        if len(table):
            table.to_csv(out / f"{picture.name}.csv", index=False)
        lines = (out / f"{picture.name}.svg").read_bytes()
        shown[picture.title] = drawn(
            figure, list(table.columns), table.to_numpy().tolist(), lines=lines
        )
        text += f"\n\n![{picture.title}]({picture.name}.png)"
    (out / "tables.md").write_text(text + "\n", encoding="utf-8")
    for name, content in study.files(ask, results).items():
        (out / name).write_text(content, encoding="utf-8")
    page = study_page(study, ask, tables, shown, results)
    write_page(page, file or out / REPORT, figures)
    return tables


def together(cells: Sequence[Cell]) -> list[Cell]:
    """Where one cell needs it, all train and are scored on the same samples."""
    common = agreed([_config(cell) for cell in cells])
    return [replace(c, settings={**common, **c.settings}) for c in cells]


def _asked(cells: Sequence[Cell], ask: Ask) -> set[str]:
    """The names of the cells to run."""
    names = [cell.name for cell in cells]
    for pattern in ask.only:
        if not fnmatch.filter(names, pattern):
            raise unknown("cell of this study", pattern, names)
    return {n for n in names if not ask.only or any(fnmatch.fnmatch(n, p) for p in ask.only)}


def _path(cell: Cell, seed: int, out: Path) -> Path:
    return out / f"{cell.name}-s{seed}"


def _config(cell: Cell, **more: Any) -> Config:
    settings = {**cell.settings, "method": cell.method, **more}
    if settings.get("partition") is None:  # it follows from the data
        rest = {key: value for key, value in settings.items() if key != "method"}
        return planned(cell.method, rest, lenient=False).config
    return make_config(settings, method_class(cell.method))[0]


def make_job(cell: Cell, seed: int, out: Path, free: Sequence[str] = ()) -> Job:
    """A cell with a seed, checked before anything runs; `free` are settings in which an existing
    run may differ."""
    path = _path(cell, seed, out)
    config = _config(cell, seed=seed, workers=1)
    check_tracker(config.track)
    store = RunStore(path)
    if store.exists:
        found = store.config()  # settings that are newer than the run have their defaults
        before = make_config(found, method_class(found["method"]))[0].model_dump()
        after = config.model_dump()
        changed = [k for k, v in after.items() if before.get(k) != v and k not in (*free, "track")]
        if changed:
            raise FedloomError(
                f"'{path}' was run with {changed[0]}={before.get(changed[0])}, not "
                f"{after[changed[0]]}. Choose another --out, or remove it."
            )
    file = _config_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    return Job(cell, seed, path, config.rounds)


def _config_file(path: Path) -> Path:
    return path.parent / _CELLS / f"{path.name}.yaml"


def _log(job: Job) -> Path:
    return _config_file(job.path).with_suffix(".log")


def _diverged(job: Job) -> Path:
    return _config_file(job.path).with_suffix(_DIVERGED)


def diverged(job: Job) -> bool:
    return _diverged(job).exists()


def finished(job: Job) -> bool:
    if diverged(job):
        return True
    store = RunStore(job.path)
    return (
        store.exists
        and store.has_checkpoint()
        and store.gathered
        and int(store.last_whole()[1]["round"]) >= job.rounds
    )


def _start(job: Job, server: ForkServer | None) -> _Running:
    words = ["run", "--out", str(job.path)]
    track = job.cell.settings.get("track")
    words += (
        ["--resume", "--rounds", str(job.rounds), *(["--track", track] if track else [])]
        if RunStore(job.path).exists
        else ["--config", str(_config_file(job.path))]
    )
    process: Process | None = None
    if server is not None:
        with contextlib.suppress(OSError):  # it is gone: a run can still start by itself
            process = server.start(words, _log(job))
    if process is None:
        with _log(job).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedloom", *words],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
    return _Running(job.cell, job.seed, job.path, job.rounds, process)
