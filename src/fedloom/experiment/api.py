"""The two calls that do the work: `run` one method, `compare` several over seeds."""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedloom.data.partition import Partition
from fedloom.engine import Diverged
from fedloom.errors import FedloomError, OutOfMemory, unknown
from fedloom.experiment.concern import idle
from fedloom.experiment.config import agreed, make_config, merge, normal, parse_settings
from fedloom.experiment.fork import Origin
from fedloom.experiment.identity import check_settings, check_sources
from fedloom.experiment.pairing import unused
from fedloom.experiment.plugins import is_file, method_class, trust
from fedloom.experiment.runner import Runner, Watcher
from fedloom.experiment.settings import RESUMABLE, Config
from fedloom.experiment.setup import Experiment, prepare
from fedloom.experiment.store import RunStore
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions
from fedloom.models import Factory
from fedloom.options import quoted

if TYPE_CHECKING:
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.result import Result

_MOST_SEEDS = 10_000

MethodLike = str | Method | MethodOptions | type[MethodOptions]


def run(
    method: MethodLike | None = None,
    *,
    data: Any = None,
    model: str | Factory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    fork: str | Path | None = None,
    watchers: Iterable[Watcher] = (),
    lenient: bool = False,
    **settings: Any,
) -> Result:
    """Run one federated experiment and return its result.

    `method` is a name (`"fedprox"`, `"fedprox:mu=0.1"`), a `Method`, or a class of options of your
    own (default: FedAvg, or that of the run to resume or fork); `data` a name, a path, arrays
    `(x, y)` or `(x, y, x_test, y_test)`; `model` a name or a factory
    `(shape, classes) -> nn.Module`; `partition` a recipe, the client of every row or the rows of
    every client; all other settings are those of `fedloom.Config`.
    The run is written to `out` (default: a new directory under `runs/`); with `resume` it goes on
    from its last whole round, as the same experiment. `fork` (a run's directory, or
    `"DIRECTORY@ROUND"`) starts a new run from the checkpoint of another, with its settings and
    those given. `lenient` lets a method pass over settings that its definition fixes.
    """
    _check_flags(out, resume, overwrite)
    for named in (method, model):
        if isinstance(named, str | Path):
            trust(named)
    given = {**settings, "data": data, "model": model}
    if resume and out is not None:
        store = _to_resume(Path(out))
        check_sources(store.path, store.about(), store.config())
        method = method or str(store.config()["method"])
    origin = None if fork is None or resume else Origin.find(str(fork))
    if origin is not None:
        plan = _plan_fork(origin, method, given, lenient=lenient)
    else:
        if fork is not None:
            given["fork"] = str(fork)
        plan = _plan(method or "fedavg", given, lenient=lenient)
    store = RunStore(Path(out) if out is not None else _default_out(plan.config, resume))
    if origin is not None and store.path.resolve() == origin.store.path.resolve():
        raise FedloomError(f"A fork of '{store.path}' can't replace it: choose another --out.")
    if resume:
        _to_resume(store.path)
        with store.held():
            return _resume(plan, store, watchers)
    _settle(store)
    store.check_free(overwrite=overwrite)
    before = None if origin is None else origin.about
    experiment = _prepare(plan, plan.config, plan.options, before)
    if origin is not None:
        experiment.adopt(origin.store.path, origin.tensors, origin.about)
    with store.held():
        store.check_free(overwrite=overwrite)  # again: preparing took its time
        with _told(store, fresh=True):
            store.create(plan.config.dump(), overwrite=overwrite)
            done = 0 if origin is None else origin.start(store, experiment)
            Runner(experiment, store, watchers).run(done)
    return load(store.path)


def compare(
    methods: Sequence[MethodLike],
    *more: MethodLike,
    seeds: int = 3,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watchers: Iterable[Watcher] = (),
    **settings: Any,
) -> Comparison:
    """Run several methods with the same settings.

    Each of `seeds` seeds (`seed`, `seed + 1`, ...) gives one run per method; methods are paired
    by seed. Settings go to all methods; each takes what concerns it. What is the same in all runs
    (data, clients, initial weights, participants) is in `same`, what a method's definition changes
    in `differences`, further remarks in `notes`. A method that diverges is left out and named in
    `diverged`; the others go on.
    """
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= _MOST_SEEDS:
        raise FedloomError(f"seeds={seeds!r}: give their number, from 1 to {_MOST_SEEDS:,}.")
    if more or not isinstance(methods, Iterable) or isinstance(methods, str):
        words = ", ".join(map(repr, (methods, *more))) if more else f"{methods!r}, ..."
        raise FedloomError(f"Give the methods as a list: compare([{words}]).")
    methods, seed = list(methods), normal("seed", seed)
    labels = [_label(m) for m in methods]
    if len(set(labels)) < len(labels):
        raise FedloomError("The same method is named twice; give variants as NAME:option=value.")
    if not labels:
        raise FedloomError("Name at least one method to compare.")
    for named in (*methods, settings.get("model")):
        if isinstance(named, str | Path):
            trust(named)
    plans, dropped, without_use = _shared_out(methods, labels, settings)
    _check_flags(out, resume, overwrite)
    taken, free = _numbered(Path("runs") / "compare")
    folder = Path(out) if out is not None else taken[-1] if resume and taken else free
    _check_folder(folder)
    todo = [
        (method, label, own, seed + i, folder / _slug(f"{label}-s{seed + i}"))
        for i in range(seeds)
        for method, label, own in plans
    ]
    for *_, path in todo:
        _settle(RunStore(path))
        if RunStore(path).exists and not resume and not overwrite:
            raise FedloomError(
                f"'{folder}' holds runs already. Continue them with --resume, choose another "
                "--out, or replace them with --overwrite."
            )
    results: dict[str, list[Result]] = {label: [] for label in labels}
    diverged: dict[str, str] = {}
    for method, label, own, number, path in todo:
        if label in diverged:
            continue
        again = resume and RunStore(path).exists
        try:
            result = run(
                method, **own, seed=number, out=path, resume=again,
                overwrite=overwrite and not again, watchers=watchers, lenient=True,
            )  # fmt: skip
        except Diverged as e:
            diverged[label] = f"{label} with seed {number}: {e}"
            del results[label]
            continue
        except FedloomError as e:
            raise FedloomError(f"{label}: {e}") from None
        results[label].append(result)
    if not results:
        raise Diverged(next(iter(diverged.values())))
    from fedloom.experiment.compare import Comparison

    return Comparison(
        results, folder, diverged, asked=settings, unused=without_use, dropped=dropped
    )


def settings_of_each(methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Method → those of the settings that concern it, such that all train and are scored on the
    same samples."""
    plans, _, _ = _shared_out(methods, methods, settings)
    fixed = {method: _named(method)[0].fixed for method in methods}
    return {m: {k: v for k, v in own.items() if k not in fixed[m]} for m, _, own in plans}


def _shared_out(
    methods: Sequence[Any], labels: Sequence[str], settings: Mapping[str, Any]
) -> tuple[list[tuple[Any, str, dict[str, Any]]], dict[str, dict[str, str]], dict[str, list[str]]]:
    """Each method with its label and those of the settings that concern it; which were taken from
    whom, and why; and what each makes no use of."""
    plans = []
    for method, label in zip(methods, labels, strict=True):
        known = {"data", "model", *Config.model_fields, *_named(method)[0].model_fields}
        own = {key: value for key, value in settings.items() if key in known}
        plans.append((method, label, own))
    for key in settings:
        if not any(key in own for _, _, own in plans):
            raise unknown("setting", key, Config.model_fields)
    dropped = _drop_idle(plans)
    return plans, dropped, _on_the_same(plans)


def _drop_idle(
    plans: Sequence[tuple[MethodLike, str, dict[str, Any]]],
) -> dict[str, dict[str, str]]:
    """Take from each method the settings that would do nothing there, unless they do nothing for
    any: then running refuses them. Returns what was taken from whom, and why."""
    found = {}
    for method, label, own in plans:
        plan = _plan(method, own, lenient=True)
        found[label] = idle(plan.config, plan.options.build())
    dropped: dict[str, dict[str, str]] = {}
    for _, label, own in plans:
        some = {
            k: why for k, why in found[label].items() if not all(k in f for f in found.values())
        }
        for key in some:
            own.pop(key, None)
        dropped[label] = some
    return dropped


def _on_the_same(
    plans: Sequence[tuple[MethodLike, str, dict[str, Any]]],
) -> dict[str, list[str]]:
    """Check every method before the first one runs, and have all train and be scored on the same
    samples, where one of them asks for it. Returns what each makes no use of, in words."""
    out, configs = {}, []
    for method, label, own in plans:
        plan = _plan(method, own, lenient=True)
        configs.append(plan.config)
        out[label] = unused(plan.config, plan.options.build())
    for key, value in agreed(configs).items():
        for _, _, own in plans:
            if own.get(key) in (None, "auto"):
                own[key] = value
    return out


def load(path: str | Path) -> Result:
    """A run that is on disk already."""
    from fedloom.experiment.result import Result  # with pandas, which training does without

    return Result(path)


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; what was finished is in `path`, or the run that was there before is."""

    def __init__(self, path: Path, *, old_is_back: bool = False) -> None:
        super().__init__(str(path))
        self.path = path
        self.old_is_back = old_is_back


def _check_flags(out: str | Path | None, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise FedloomError(
            "--resume goes on with a run and --overwrite drops it: give one of them."
        )
    if overwrite and out is None:
        raise FedloomError("--overwrite would do nothing: without --out, runs get a new directory.")


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
    return file.name in Comparison.FILES or ours


def _settle(store: RunStore) -> None:
    """Finish or undo what a process that was killed in --overwrite has left."""
    if store.interrupted:
        with store.held():
            store.recover()


def _to_resume(path: Path) -> RunStore:
    """The run to go on with, after what a killed process may have left was settled."""
    store = RunStore(path)
    _settle(store)
    if not store.exists and store.untouched:
        what = "is empty" if path.exists() else "does not exist"
        raise FedloomError(
            f"'{path}' {what}: no run was begun there. Run it again without --resume, or name the "
            "directory of a run."
        )
    return RunStore.open(path)


def _default_out(config: Config, resume: bool) -> Path:
    """A new directory under runs/; to resume, the newest that was started with these settings."""
    method = Path(config.method.partition(":")[0]).stem
    data = Path(config.data).stem
    taken, free = _numbered(Path("runs") / _slug(f"{method}-{data}-s{config.seed}"))
    if not resume:
        return free
    wanted = config.model_dump(exclude=set(RESUMABLE))
    for path in reversed(taken):
        store = RunStore(path)
        if store.exists and wanted.items() <= store.config().items():
            return path
    there = f"{', '.join(str(p) for p in taken[-3:])} had others" if taken else "there is none yet"
    raise FedloomError(
        f"No run under runs/ was started with these settings ({there}). Say which one goes on: "
        "--resume --out runs/NAME."
    )


def _numbered(base: Path) -> tuple[list[Path], Path]:
    """`base` and the same with numbers behind it: those that are there, and the first free one."""
    taken: list[Path] = []
    names = itertools.chain(
        [base], (base.with_name(f"{base.name}-{i}") for i in itertools.count(2))
    )
    for name in names:
        if not name.exists():
            return taken, name
        taken.append(name)
    raise AssertionError


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", text)


def _label(method: MethodLike) -> str:
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        return "custom"
    _options_class(method)
    if isinstance(method, type):
        return method.name
    chosen = method.model_dump(exclude_defaults=True)
    return method.name + "".join(f":{k}={v}" for k, v in chosen.items())


@dataclass(frozen=True)
class _Plan:
    """What was asked for: checked settings, and the objects that no config can hold."""

    config: Config
    options: MethodOptions
    given: frozenset[str]
    objects: dict[str, Any]  # data, model, partition


def _resume(plan: _Plan, store: RunStore, watchers: Iterable[Watcher]) -> Result:
    """Go on with a run if it is the same experiment; until that is known, nothing is changed."""
    before, _ = make_config(store.config(), type(plan.options))
    config, options = make_config(_continued(store, plan, before), type(plan.options))
    tensors, about = store.last_whole() if store.has_checkpoint() else (None, {})
    done = int(about.get("round", 0))
    check_settings(store.path, about, config)
    _check_rounds(store, done, before, config)
    if tensors is None and config.fork is not None:
        return _restart(plan, store, config, options, watchers)
    if done < config.rounds:
        experiment = _prepare(plan, config, options, about if tensors is not None else None)
        if tensors is not None:
            experiment.restore(store.path, tensors, about)
    _reopen(store, config, done)
    with _told(store):
        if done < config.rounds:
            Runner(experiment, store, watchers).run(done)
        else:
            store.finish()  # a process may have been killed right before
    return load(store.path)


def _restart(
    plan: _Plan,
    store: RunStore,
    config: Config,
    options: MethodOptions,
    watchers: Iterable[Watcher],
) -> Result:
    """A fork that was killed before it had a checkpoint of its own."""
    assert config.fork is not None
    origin = Origin.find(config.fork)
    experiment = _prepare(plan, config, options, origin.about)
    experiment.adopt(origin.store.path, origin.tensors, origin.about)
    _reopen(store, config, 0)
    with _told(store):
        Runner(experiment, store, watchers).run(origin.start(store, experiment))
    return load(store.path)


def _reopen(store: RunStore, config: Config, done: int) -> None:
    """Cut a run to its last whole round, and write down what may change."""
    store.cut(done)
    store.warn_of_lost_tables()
    if not store.is_sealed() or store.config() != yaml.safe_load(config.dump()):
        store.reconfigure(config.dump())


def _continued(store: RunStore, plan: _Plan, before: Config) -> dict[str, Any]:
    """The run's settings with those given over them that may change."""
    old, new = before.model_dump(), plan.config.model_dump()
    if old["fork"] is not None and old["fork"].rpartition("@")[0] == new["fork"]:
        new["fork"] = old["fork"]  # the same run, without the round that it had come to
    for key in sorted(plan.given & set(new) - RESUMABLE):
        if old[key] != new[key]:
            raise FedloomError(
                f"'{store.path}' was started with {key}={old[key]}, not {new[key]}. Resume it "
                f"without {key}; or start a new run from its last checkpoint with other settings: "
                f"fedloom run --fork {store.path} --out NEW."
            )
    return {**old, **{key: new[key] for key in plan.given & RESUMABLE}}


def _check_rounds(store: RunStore, done: int, before: Config, after: Config) -> None:
    if before.rounds == after.rounds:
        return
    if after.rounds < done:
        raise FedloomError(
            f"'{store.path}' has {done} rounds already and can't go back to {after.rounds}. Start "
            "a new run."
        )
    if before.lr_schedule.startswith("cosine"):
        raise FedloomError(
            "A cosine schedule depends on the number of rounds, so a run can't be changed from "
            f"{before.rounds} to {after.rounds} rounds and still be the same run. Start a new one "
            f"from its last checkpoint: fedloom run --fork {store.path} --out NEW."
        )


@contextmanager
def _told(store: RunStore, *, fresh: bool = False) -> Iterator[None]:
    """What stops a run is told with what is left of it and how to go on.

    A run that is to be replaced comes back if the new one has no checkpoint yet; of a new one that
    was refused, nothing is left, so that the same command, mended, finds its directory free.
    """
    try:
        yield
    except BaseException as e:
        back = store.recover()
        refused = isinstance(e, FedloomError) and not isinstance(e, Diverged)  # that is a result
        if fresh and refused and not back:
            store.drop_if_empty()
        if isinstance(e, KeyboardInterrupt):
            raise Stopped(store.path, old_is_back=back) from None
        if isinstance(e, OutOfMemory) and not back and store.has_checkpoint():
            raise OutOfMemory(
                f"{e} Rounds that were finished are not lost: where there is more memory, --resume "
                f"--out {store.path} goes on."
            ) from e
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise FedloomError(_full(store, back)) from e
        raise


def _full(store: RunStore, back: bool) -> str:
    if back:
        return (
            f"The disk is full; '{store.path}' holds the run that was there before. Make room and "
            "give the same command again."
        )
    if not store.exists:
        return "The disk is full; nothing was written. Make room and give the same command again."
    return (
        f"The disk is full; what was done until then is safe in '{store.path}'. Make room and "
        f"continue with --resume --out {store.path}."
    )


def _prepare(
    plan: _Plan, config: Config, options: MethodOptions, before: Mapping[str, Any] | None = None
) -> Experiment:
    return prepare(config, options.build(), **plan.objects, options=options, before=before)


def _plan_fork(
    origin: Origin, method: MethodLike | None, settings: Mapping[str, Any], *, lenient: bool
) -> _Plan:
    """What was asked for over the settings of the run that is forked."""
    if settings.get("preset") is not None:
        raise FedloomError(
            "A fork has all settings of the run that it starts from, so a preset would do nothing. "
            "Give the settings themselves."
        )
    base = dict(origin.config)
    before = str(base.pop("method"))
    cls, named = _named(before if method is None else method)
    if named["method"] != before:
        base = {k: v for k, v in base.items() if k not in ("params", "preset")}
    base = {key: value for key, value in base.items() if key not in cls.fixed}
    given = {key: value for key, value in settings.items() if value is not None}
    plan = _plan(
        before if method is None else method,
        {**merge(base, given), "fork": origin.name},
        lenient=lenient,
    )
    origin.check_length(plan.config)
    return plan


def _plan(method: MethodLike, settings: Mapping[str, Any], *, lenient: bool) -> _Plan:
    given = {k: v for k, v in settings.items() if k not in ("data", "model") or v is not None}
    objects = {}
    for key in ("data", "model", "partition", "fork"):
        value = given.get(key)
        if isinstance(value, Path):
            given[key] = f"file:{value}" if key == "partition" else str(value)
        elif value is not None and not isinstance(value, str):
            objects[key], given[key] = value, "custom"
    if "model" in objects and not callable(objects["model"]):
        raise FedloomError(
            f"model={quoted(objects['model'])} is not valid: give a model's name, "
            "FILE.py:FACTORY, or in Python a factory (shape, classes) -> nn.Module."
        )
    if "partition" in objects:
        objects["partition"] = Partition.of_object(objects["partition"])
    cls, named = _named(method)
    given = merge(given, named)
    config, options = make_config(given, cls, lenient=lenient)
    keys = frozenset(given) | ({"params"} if set(given) & set(cls.model_fields) else set())
    return _Plan(config, options, keys, objects)


def _options_class(method: MethodOptions | type[MethodOptions]) -> type[MethodOptions]:
    cls = method if isinstance(method, type) else type(method)
    if not issubclass(cls, MethodOptions):
        raise FedloomError(
            f"{method!r} is not a method: give a name, with options as 'NAME:option=value', or a "
            "MethodOptions class."
        )
    return cls


def _wrapped(method: Method) -> type[MethodOptions]:
    """A bare declaration as a method without options."""

    class Given(MethodOptions):
        """A method that was given as a declaration, in Python."""

        name, family, source = "custom", "own", "given in Python"

        def build(self) -> Method:
            return method

    return Given


def _named(method: MethodLike) -> tuple[type[MethodOptions], dict[str, Any]]:
    """The method's class, and the settings that name it and its options."""
    if isinstance(method, str):
        name, _, words = (method, "", "") if is_file(method) else method.partition(":")
        params = parse_settings(words.split(",")) if words else {}
        cls = method_class(name)
    else:
        method = _wrapped(method) if isinstance(method, Method) else method
        cls = _options_class(method)
        name = cls.name
        params = {} if isinstance(method, type) else method.model_dump()
    return cls, {"method": name, "params": params} if params else {"method": name}
