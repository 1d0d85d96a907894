"""The two calls that do the work: `run` one method, `compare` several over seeds."""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.data.partition import Partition
from fedloom.engine import Diverged
from fedloom.errors import FedloomError, unknown
from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import make_config, merge, normal, parse_settings
from fedloom.experiment.pairing import unused
from fedloom.experiment.plugins import is_file, method_class
from fedloom.experiment.result import Result
from fedloom.experiment.runner import Runner, Watcher
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import Experiment, prepare
from fedloom.experiment.store import RunStore
from fedloom.methods.registry import MethodOptions
from fedloom.models import Factory

_MOST_SEEDS = 10_000

MethodLike = str | MethodOptions | type[MethodOptions]


def run(
    method: MethodLike = "fedavg",
    *,
    data: Any = None,
    model: str | Factory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watchers: Iterable[Watcher] = (),
    lenient: bool = False,
    **settings: Any,
) -> Result:
    """Run one federated experiment and return its result.

    `method` is a name (`"fedprox"`, `"fedprox:mu=0.1"`), or a method of your own; `data` a name, a
    path, arrays `(x, y)` or `(x, y, x_test, y_test)`; `model` a name or a factory
    `(shape, classes) -> nn.Module`; `partition` a recipe, the client of every row or the rows of
    every client; all other settings are those of `fedloom.Config`.
    The run is written to `out` (default: a new directory under `runs/`); with `resume` it goes on
    from its last whole round. `lenient` lets a method pass over settings that its definition fixes.
    """
    plan = _plan(method, {**settings, "data": data, "model": model}, lenient=lenient)
    _check_flags(out, resume, overwrite)
    store = RunStore(Path(out) if out is not None else _default_out(plan.config, resume))
    if resume:
        RunStore.open(store.path)
        with store.held():
            return _resume(plan, store, watchers)
    store.check_free(overwrite=overwrite)
    experiment = prepare(plan.config, plan.options.build(), **plan.objects)
    with store.held():
        store.create(plan.config.dump(), overwrite=overwrite)
        try:
            return _walk(experiment, store, watchers)
        except Diverged:
            raise  # that is a result
        except FedloomError:
            store.drop_if_empty()  # the same command, mended, finds its directory free
            raise


def compare(
    methods: Sequence[MethodLike],
    *,
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
    in `differences`. A method that diverges is left out and named in `diverged`; the others go on.
    """
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= _MOST_SEEDS:
        raise FedloomError(f"seeds={seeds!r}: give their number, from 1 to {_MOST_SEEDS:,}.")
    if not isinstance(methods, Iterable) or isinstance(methods, str):
        raise FedloomError(f"Give the methods as a list: compare([{methods!r}, ...]).")
    methods, seed = list(methods), normal("seed", seed)
    labels = [_label(m) for m in methods]
    if len(set(labels)) < len(labels):
        raise FedloomError("The same method is named twice; give variants as NAME:option=value.")
    if not labels:
        raise FedloomError("Name at least one method to compare.")
    plans = []
    for method, label in zip(methods, labels, strict=True):
        known = {"data", "model", *Config.model_fields, *_named(method)[0].model_fields}
        own = {key: value for key, value in settings.items() if key in known}
        plans.append((method, label, own))
    for key in settings:
        if not any(key in own for _, _, own in plans):
            raise unknown("setting", key, Config.model_fields)
    notes = _scored_alike(plans)
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
    return Comparison(results, folder, diverged, asked=settings, notes=notes)


def _scored_alike(plans: Sequence[tuple[MethodLike, str, dict[str, Any]]]) -> dict[str, list[str]]:
    """Check every method before the first one runs. Where one adapts to the support part, all are
    scored without it, so that their scores are of the same samples. Returns what each makes no use
    of."""
    notes, adapts = {}, False
    for method, label, own in plans:
        plan = _plan(method, own, lenient=True)
        adapts |= plan.config.score_on == "query"
        notes[label] = unused(plan.config, plan.options.build())
    for _, _, own in plans:
        if adapts and own.get("score_on", "auto") == "auto":
            own["score_on"] = "query"
    return notes


def load(path: str | Path) -> Result:
    """A run that is on disk already."""
    return Result(path)


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; what was finished is in `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


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
    if folder.exists() and any(
        f.name not in Comparison.FILES and not RunStore(f).exists for f in folder.iterdir()
    ):
        raise FedloomError(
            f"'{folder}' is a directory with other files in it. Choose another --out."
        )


def _default_out(config: Config, resume: bool) -> Path:
    """A new directory under runs/; to resume, the newest that was started with these settings."""
    method = Path(config.method.partition(":")[0]).stem
    data = Path(config.data).stem
    taken, free = _numbered(Path("runs") / _slug(f"{method}-{data}-s{config.seed}"))
    if not resume:
        return free
    wanted = config.model_dump(exclude={"rounds"})
    for path in reversed(taken):
        store = RunStore(path)
        if store.exists and {**store.config(), "rounds": 0} == {**wanted, "rounds": 0}:
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
    done = _reopen(store, plan)
    config, options = make_config(store.config(), type(plan.options))
    if done >= config.rounds:
        return Result(store.path)
    experiment = prepare(config, options.build(), **plan.objects)
    if done:
        experiment.restore(store)
    return _walk(experiment, store, watchers, done)


def _walk(
    experiment: Experiment, store: RunStore, watchers: Iterable[Watcher], done: int = 0
) -> Result:
    try:
        Runner(experiment, store, watchers).run(done)
    except KeyboardInterrupt:
        raise Stopped(store.path) from None
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise FedloomError(
            f"The disk is full; what was done until then is safe in '{store.path}'. Make room and "
            f"continue with --resume --out {store.path}."
        ) from e
    return Result(store.path)


def _plan(method: MethodLike, settings: Mapping[str, Any], *, lenient: bool) -> _Plan:
    given = {k: v for k, v in settings.items() if k not in ("data", "model") or v is not None}
    objects = {}
    for key in ("data", "model", "partition"):
        value = given.get(key)
        if isinstance(value, Path):
            given[key] = f"file:{value}" if key == "partition" else str(value)
        elif value is not None and not isinstance(value, str):
            objects[key], given[key] = value, "custom"
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


def _named(method: MethodLike) -> tuple[type[MethodOptions], dict[str, Any]]:
    """The method's class, and the settings that name it and its options."""
    if isinstance(method, str):
        name, _, words = (method, "", "") if is_file(method) else method.partition(":")
        params = parse_settings(words.split(",")) if words else {}
        cls = method_class(name)
    else:
        cls = _options_class(method)
        name = cls.name
        params = {} if isinstance(method, type) else method.model_dump()
    return cls, {"method": name, "params": params} if params else {"method": name}


def _reopen(store: RunStore, plan: _Plan) -> int:
    """Check that a run may go on as asked, cut it to its last whole round, and count its rounds."""
    before = store.config()
    make_config(before, type(plan.options))  # it must still be a valid config
    after = plan.config.model_dump()
    for key in sorted(plan.given & set(after)):
        if before.get(key) != after[key] and key != "rounds":
            raise FedloomError(
                f"'{store.path}' was started with {key}={before.get(key)}, not {after[key]}. "
                f"Resume it without {key}, or start a new run."
            )
    done = int(store.checkpoint()[1]["round"]) if store.has_checkpoint() else 0
    if "rounds" in plan.given and after["rounds"] != before["rounds"]:
        if after["rounds"] < done:
            raise FedloomError(
                f"'{store.path}' has {done} rounds already and can't go back to "
                f"{after['rounds']}. Start a new run."
            )
        if before["lr_schedule"].startswith("cosine"):
            raise FedloomError(
                "A cosine schedule depends on the number of rounds, so a run can't be changed "
                f"from {before['rounds']} to {after['rounds']} rounds and still be the same run."
            )
        store.reconfigure(Config(**{**before, "rounds": after["rounds"]}).dump())
    store.cut(done)
    return done
