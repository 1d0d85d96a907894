"""Run several methods over seeds, each with the shared settings and its own, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.data.catalog import built_in_task, is_by_class
from fedloom.data.partition import by_column
from fedloom.engine import Diverged
from fedloom.errors import FedloomError, unknown
from fedloom.experiment.api import check_flags, numbered, planned, run, settle, showing
from fedloom.experiment.concern import idle
from fedloom.experiment.config import agreed, merge, normal
from fedloom.experiment.entry import Entry, MethodLike, named
from fedloom.experiment.fitting import check_task, same_task
from fedloom.experiment.pairing import unused
from fedloom.experiment.plugins import check_files, trust
from fedloom.experiment.runner import Watcher
from fedloom.experiment.settings import RESUMABLE, Config
from fedloom.experiment.setup import checked, load_dataset
from fedloom.experiment.store import RunStore
from fedloom.files import is_temporary, slug
from fedloom.tasks import AUTO, Task

if TYPE_CHECKING:
    from fedloom.experiment.compare import Comparison, Record
    from fedloom.experiment.result import Result

SEEDS, _MOST_SEEDS = 3, 10_000
_OBJECTS = ("data", "model", "partition", "init", "loss")  # may be objects, which no file keeps


@dataclass
class _Line:
    """A method of a comparison, with all settings that it gets."""

    entry: Entry
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        return self.entry.label

    def plan(self) -> tuple[Config, Any]:
        """The checked config and the method."""
        try:
            plan = planned(self.entry.method, self.settings, lenient=True)
        except FedloomError as e:
            raise FedloomError(f"{self.label}: {e}" if self.entry.own else str(e)) from None
        return plan.config, plan.options.build()


def compare(
    methods: Sequence[MethodLike | tuple[MethodLike, Mapping[str, Any]]] | None = None,
    *more: MethodLike,
    seeds: int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    extend: str | Path | None = None,
    watchers: Iterable[Watcher] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Run several methods with the same settings.

    Each of `seeds` seeds (`seed`, `seed + 1`, ...; three from 0 on) gives one run per method;
    methods are paired by seed. Settings go to all methods, and each takes what concerns it;
    `"wafl@topology=ring"` or `("wafl", {"topology": "ring"})` has a setting of its own. What is the
    same in all runs (data, clients, initial weights, participants) is in `same`, what a method's
    definition or its own settings change in `differences`, further remarks in `notes`. A method
    that diverges is left out and named in `diverged`; the others go on. `extend` adds methods to
    the comparison in that directory, with its settings and seeds. `resume` goes on with what is in
    `out`; without `methods`, with those, the settings and the seeds it was started with.
    `watchers` are told of every round of every run; `progress` shows a bar: unless given, in
    notebooks.
    """
    from fedloom.experiment.compare import Comparison, Record, run_name

    before = None if extend is None else Comparison.load(extend)
    known: Record | None = None
    given = {"seeds": seeds, "seed": seed, **settings}
    if methods is None and not more and before is None:
        if out is None or not resume:
            raise FedloomError(
                "Name the methods to compare, or the comparison to resume: "
                "compare(resume=True, out=...)."
            )
        known, out = Record.read(Path(out)), Path(out)
        _check_given(known, out, given, "resumed")
        entries = _stored(known, out)
    elif more or not isinstance(methods, Iterable) or isinstance(methods, str):
        words = ", ".join(map(repr, (methods, *more))) if more else f"{methods!r}, ..."
        raise FedloomError(f"Give the methods as a list: compare([{words}]).")
    else:
        if before is not None:
            if out is not None or overwrite:
                raise FedloomError(
                    f"New methods are added to '{before.path}' itself: leave out --out and "
                    "--overwrite."
                )
            known, out = before.record, before.path
            _check_given(known, out, given, "extended")
        entries = [Entry.of(method) for method in methods]
    if known is not None:
        seeds, seed, settings = known.seeds, known.seed, {**known.asked, **settings}
    seeds = SEEDS if seeds is None else seeds
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= _MOST_SEEDS:
        raise FedloomError(f"seeds={seeds!r}: give their number, from 1 to {_MOST_SEEDS:,}.")
    seed = normal("seed", 0 if seed is None else seed)
    _check_names(entries, before)
    if isinstance(settings.get("model"), str | Path):
        trust(settings["model"])
    lines = _lines(entries, settings)
    dropped = _drop_idle(lines, alone=before is not None)
    without_use = _on_the_same(lines, before)
    for line in lines:
        without_use[line.label] += [
            f"{key} does nothing here: {why}"
            for key, why in dropped[line.label].items()
            if key in line.entry.own
        ]
    check_flags(out, resume, overwrite)
    taken, free = numbered(Path("runs") / "compare")
    folder = Path(out) if out is not None else taken[-1] if resume and taken else free
    _check_folder(folder)
    todo = [
        (line, seed + i, folder / run_name(line.label, seed + i))
        for i in range(seeds)
        for line in lines
    ]
    for *_, path in todo:
        settle(RunStore(path))
        if RunStore(path).exists and not resume and not overwrite:
            raise FedloomError(
                f"'{folder}' already holds runs. Continue them with --resume, choose another "
                "--out, or replace them with --overwrite."
            )
    own = {line.label: _kept(line.entry.own) for line in lines}
    record = Record(seeds, seed, _kept(settings), own, without_use, dropped)
    if before is None:
        record.write(folder)  # so that what a stop leaves can be told for a comparison
    else:
        record = before.record.with_more(record)
    results: dict[str, list[Result]] = {line.label: [] for line in lines}
    watchers = [*watchers, *showing(progress, len(todo))]
    for line, number, path in todo:
        if line.label in record.diverged:
            continue
        again = resume and RunStore(path).exists
        try:
            result = run(
                line.entry.method, **line.settings, seed=number, out=path, resume=again,
                overwrite=overwrite and not again, watchers=watchers, lenient=True, progress=False,
            )  # fmt: skip
        except Diverged as e:
            record.diverged[line.label] = f"{line.label} with seed {number}: {e}"
            del results[line.label]
            continue
        except FedloomError as e:
            raise FedloomError(f"{line.label}: {e}") from None
        results[line.label].append(result)
    results = {**({} if before is None else before.results), **results}
    if not results:
        raise Diverged(next(iter(record.diverged.values())))
    record.write(folder)
    return Comparison(results, folder, record)


def settings_of_each(methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Method → those of the settings that concern it, such that all train and are scored on the
    same samples."""
    lines = _lines([Entry.of(method) for method in methods], settings)
    _drop_idle(lines, alone=False)
    _on_the_same(lines, None)
    return {
        line.label: {
            key: value
            for key, value in line.settings.items()
            if key not in named(line.entry.method)[0].fixed
        }
        for line in lines
    }


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file can keep them; of an object, only that there was one."""
    out = {}
    for key, value in settings.items():
        if isinstance(value, Path) or (key not in _OBJECTS and isinstance(value, tuple)):
            out[key] = str(value) if isinstance(value, Path) else list(value)
        elif value is not None:
            out[key] = value if isinstance(value, str) or key not in _OBJECTS else "custom"
    return out


def _check_names(entries: Sequence[Entry], before: Comparison | None) -> None:
    labels = [entry.label for entry in entries]
    if not labels:
        raise FedloomError("Name at least one method to compare.")
    if len({slug(label) for label in labels}) < len(labels):
        raise FedloomError(
            "The same method is named twice; write variants as NAME:option=value or "
            "NAME@setting=value."
        )
    there = () if before is None else before.record.own
    if again := sorted({slug(label) for label in labels} & {slug(label) for label in there}):
        raise FedloomError(f"'{before.path}' has {again[0]} already.")  # type: ignore[union-attr]


def _check_given(record: Record, path: Path, settings: Mapping[str, Any], doing: str) -> None:
    """Refuse settings that a comparison has already, the lack of those that no file keeps, and
    files that only its record names."""
    asked, resumed = record.asked, doing == "resumed"
    given = [key for key, value in settings.items() if value is not None]
    stored = [key for key in given if not (key in _OBJECTS and asked.get(key) == "custom")]
    again = [key for key in stored if not (resumed and key in RESUMABLE)]
    if again:
        rest = (
            "Only its length, speed and scoring may change."
            if resumed
            else "A single method may have its own settings: NAME@SETTING=VALUE."
        )
        raise FedloomError(
            f"A comparison is {doing} with the settings and seeds it was started with, so "
            f"{again[0]} can't be given. {rest}"
        )
    lacks = [key for key in _OBJECTS if asked.get(key) == "custom" and key not in given]
    if lacks:
        how = "resume=True, out=..." if resumed else "extend=..."
        raise FedloomError(
            f"'{path}' was given its {lacks[0]} as a Python object, which is not stored: "
            f"pass it again, compare(..., {how}, {lacks[0]}=...)."
        )
    check_files(asked)


def _stored(record: Record, path: Path) -> list[Entry]:
    """The methods of a comparison that is resumed."""
    entries = [Entry.stored(label, own) for label, own in record.own.items()]
    for entry in entries:
        try:
            named(entry.method)
        except FedloomError as e:
            raise FedloomError(
                f"'{path}' can't be resumed by itself: {e} Methods that were given as Python "
                "objects are not stored: pass all of them again, compare([...], resume=True, "
                "out=...)."
            ) from None
    return entries


def _lines(entries: Sequence[Entry], settings: Mapping[str, Any]) -> list[_Line]:
    """Each method with what it takes of the shared settings, and its own over them."""
    lines = []
    for entry in entries:
        known = {"data", "model", *Config.model_fields, *named(entry.method)[0].model_fields}
        shared = {key: value for key, value in settings.items() if key in known}
        lines.append(_Line(entry, merge(shared, entry.own)))
    for key in settings:
        if not any(key in line.settings for line in lines):
            raise unknown("setting", key, Config.model_fields)
    return lines


def _drop_idle(lines: Sequence[_Line], *, alone: bool) -> dict[str, dict[str, str]]:
    """Take from each method the settings that would do nothing there. Where a shared one does
    nothing for any (unless there are others that are not here: `alone`), running refuses it.
    Returns what was taken from whom, and why."""
    found = {line.label: idle(*line.plan()) for line in lines}
    dropped: dict[str, dict[str, str]] = {}
    for line in lines:
        dropped[line.label] = {
            key: why
            for key, why in found[line.label].items()
            if alone or key in line.entry.own or not all(key in f for f in found.values())
        }
        for key in dropped[line.label]:
            line.settings.pop(key, None)
    return dropped


def _on_the_same(lines: Sequence[_Line], before: Comparison | None) -> dict[str, list[str]]:
    """Check every method before the first one runs, and have all train and be scored on the same
    samples, where one of them asks for it. Returns what each makes no use of, in words."""
    out, configs = {}, []
    for line in lines:
        config, method = line.plan()
        configs.append(config)
        out[line.label] = unused(config, method)
        try:
            checked(config, method)
        except FedloomError as e:
            raise FedloomError(f"{line.label}: {e}") from None
    check_tasks([(*line.plan(), line.settings.get("data")) for line in lines])
    there = {} if before is None else before.agreed()
    for key, value in {**there, **agreed(configs)}.items():
        if before is not None and there.get(key) != value:
            raise FedloomError(
                f"The new methods need {key}={value} for all, and those in '{before.path}' ran "
                f"with {key}={there.get(key)}. Run all of them in one comparison."
            )
        for line in lines:
            if line.settings.get(key) in (None, "auto"):
                line.settings[key] = value
    return out


def check_tasks(plans: Sequence[tuple[Config, Any, Any]]) -> None:
    """Refuse methods that can't learn the task of their data, and data of different tasks. A plan
    is a config, a method and the data if it is an object. Data is loaded where its task can't be
    told from its name."""
    keys = [repr((c.data, c.data_options, c.task, by_column(c.partition))) for c, *_ in plans]
    tasks: dict[str, Task] = {}
    for key, (config, method, data) in zip(keys, plans, strict=True):
        if len(set(keys)) == 1 and is_by_class(config.data):
            return
        if key not in tasks:
            own = data if config.data == "custom" else None
            tasks[key] = load_dataset(config, own).task
        check_task(config.method, method, tasks[key])
    same_task(task.name for task in tasks.values())


def task_of(method: str, settings: Mapping[str, Any]) -> str:
    """The name of the task that a run learns; data is loaded where its name does not tell."""
    plan = planned(method, settings, lenient=True)
    known = built_in_task(plan.config.data) if plan.config.task == AUTO else plan.config.task
    return known or load_dataset(plan.config, plan.objects.get("data")).task.name


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is something else than a comparison."""
    if RunStore(folder).exists:
        raise FedloomError(f"'{folder}' is a single run. Choose another --out for the comparison.")
    if folder.exists() and not folder.is_dir():
        raise FedloomError(f"'{folder}' is a file; --out names a directory.")
    if folder.exists() and not all(_may_be_there(f) for f in folder.iterdir()):
        raise FedloomError(
            f"'{folder}' is a directory with other files in it. Choose another --out."
        )


def _may_be_there(file: Path) -> bool:
    """Whether a comparison may have left this in its folder."""
    from fedloom.experiment.compare import Comparison

    store = RunStore(file)
    ours = store.exists or store.interrupted or (file.is_dir() and store.untouched)
    return file.name in Comparison.FILES or ours or is_temporary(file)
