"""Run one method, and read back what a run or a comparison left on disk."""

from __future__ import annotations

import errno
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedloom.data.catalog import SITES, is_by_class, natural
from fedloom.data.dataset import Dataset
from fedloom.data.partition import Partition, by_column
from fedloom.data.split import named_clients
from fedloom.engine import Diverged
from fedloom.errors import FedloomError, OutOfMemory
from fedloom.experiment.config import make_config, merge
from fedloom.experiment.entry import MethodLike, named
from fedloom.experiment.fork import Origin
from fedloom.experiment.identity import check_settings, check_sources
from fedloom.experiment.interrupts import StopRequested
from fedloom.experiment.plugins import trust
from fedloom.experiment.runner import Runner, Watcher
from fedloom.experiment.settings import RESUMABLE, Config
from fedloom.experiment.setup import Experiment, load_dataset, prepare
from fedloom.experiment.store import RunStore
from fedloom.experiment.track import check as check_tracker
from fedloom.experiment.track import trackers
from fedloom.files import slug
from fedloom.methods.registry import MethodOptions
from fedloom.models import Factory
from fedloom.options import quoted

if TYPE_CHECKING:
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.result import Result
    from fedloom.experiment.swept import Swept

_MOST_CLIENTS = 10**9


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
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run one federated experiment and return its result.

    `method` is a name (`"fedprox"`, `"fedprox:mu=0.1"`), a `Method`, or a class of options of your
    own (default: FedAvg, or that of the run to resume or fork); `data` a name, a path, arrays
    `(x, y)` or `(x, y, x_test, y_test)`, a DataFrame or another object that holds data; `model` a
    name or a factory `(shape, classes) -> nn.Module`; `partition` a recipe, the client of every row
    or the rows of every client; all other settings are those of `fedloom.Config`.
    The run is written to `out` (default: a new directory under `runs/`); with `resume` it goes on
    from its last whole round, as the same experiment. `fork` (a run's directory, or
    `"DIRECTORY@ROUND"`) starts a new run from the checkpoint of another, with its settings and
    those given. `init` is what weights start from: a state_dict, a module, a run or a file; `loss`
    is minimised in place of the task's: a function of outputs and labels that returns the mean.
    `lenient` lets a method pass over settings that its definition fixes. `watchers` are told of
    every round; `progress` shows a bar: unless given, in notebooks.
    """
    watchers = [*watchers, *showing(progress)]
    check_flags(out, resume, overwrite)
    for given in (method, model, settings.get("loss")):
        if isinstance(given, str | Path):
            trust(given)
    asked = {**settings, "data": data, "model": model}
    if resume and out is not None:
        store = _to_resume(Path(out))
        check_sources(store.path, store.about(), store.config())
        method = method or str(store.config()["method"])
    origin = None if fork is None or resume else Origin.find(str(fork))
    if origin is not None:
        plan = _plan_fork(origin, method, asked, lenient=lenient)
    else:
        if fork is not None:
            asked["fork"] = str(fork)
        plan = planned(method or "fedavg", asked, lenient=lenient)
    store = RunStore(Path(out) if out is not None else _default_out(plan.config, resume))
    if origin is not None and store.path.resolve() == origin.store.path.resolve():
        raise FedloomError(f"A fork of '{store.path}' can't replace it: choose another --out.")
    if resume:
        _to_resume(store.path)
        with store.held():
            return _resume(plan, store, watchers)
    settle(store)
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
            Runner(experiment, store, [*watchers, *trackers(plan.config, store)]).run(done)
    return _opened(store)


def showing(progress: bool | None, runs: int = 1) -> list[Watcher]:
    """A progress bar for this many runs, if one is wanted: in a notebook, or on a terminal."""
    if not (progress or (progress is None and "IPython" in sys.modules)):
        return []
    from fedloom.report import notebook  # with rich, which training does without
    from fedloom.report.terminal import Progress

    if notebook.here():
        return [notebook.NotebookProgress(runs)]
    return [Progress(runs)] if progress else []


def _opened(store: RunStore) -> Result:
    from fedloom.experiment.result import Result  # with pandas, which training does without

    return Result(store.path)


def load(path: str | Path) -> Result | Comparison | Swept:
    """A run, a comparison or a sweep that is on disk already."""
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.result import Result
    from fedloom.experiment.study import is_study
    from fedloom.experiment.swept import Swept

    if is_study(Path(path)):
        return Swept.load(path)
    return Comparison.load(path) if Comparison.is_in(path) else Result(path)


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run, or a request to stop it, which it did after round `after`; what was
    finished is in `path`, or the run that was there before is."""

    def __init__(self, path: Path, *, old_is_back: bool = False, after: int | None = None) -> None:
        super().__init__(str(path))
        self.path = path
        self.old_is_back = old_is_back
        self.after = after


def check_flags(out: str | Path | None, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise FedloomError("--resume continues a run and --overwrite drops it: give only one.")
    if overwrite and out is None:
        raise FedloomError("--overwrite would do nothing: without --out, runs get a new directory.")


def settle(store: RunStore) -> None:
    """Finish or undo what a process that was killed in --overwrite has left."""
    if store.interrupted:
        with store.held():
            store.recover()


def _to_resume(path: Path) -> RunStore:
    """The run to continue, after cleaning up what a killed process may have left."""
    store = RunStore(path)
    settle(store)
    if not store.exists and store.untouched:
        what = "is empty" if path.exists() else "does not exist"
        raise FedloomError(
            f"'{path}' {what}: no run was started there. Leave out --resume, or give the "
            "directory of a run."
        )
    return RunStore.open(path)


def _default_out(config: Config, resume: bool) -> Path:
    """A new directory under runs/; to resume, the newest that was started with these settings."""
    method = Path(config.method.partition(":")[0]).stem
    data = Path(config.data).stem
    taken, free = numbered(Path("runs") / slug(f"{method}-{data}-s{config.seed}"))
    if not resume:
        return free
    wanted = config.model_dump(exclude=set(RESUMABLE))
    for path in reversed(taken):
        store = RunStore(path)
        if store.exists and wanted.items() <= store.config().items():
            return path
    there = f"{', '.join(str(p) for p in taken[-3:])} had others" if taken else "there is none yet"
    raise FedloomError(
        f"No run under runs/ was started with these settings ({there}). Name the one to "
        "continue: --resume --out runs/NAME."
    )


def numbered(base: Path) -> tuple[list[Path], Path]:
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


@dataclass(frozen=True)
class _Plan:
    """What was asked for: checked settings, and the objects that no config can hold."""

    config: Config
    options: MethodOptions
    given: frozenset[str]
    objects: dict[str, Any]  # data, model, partition, init, loss


def _resume(plan: _Plan, store: RunStore, watchers: Iterable[Watcher]) -> Result:
    """Go on with a run if it is the same experiment; until that is known, nothing is changed."""
    before, _ = make_config(store.config(), type(plan.options))
    config, options = make_config(_continued(store, plan, before), type(plan.options))
    begun = store.check_begun(_first_checkpoint(before))
    tensors, about = store.last_whole() if store.has_checkpoint() else (None, {})
    done = int(about.get("round", 0))
    check_tracker(config.track)
    check_settings(store.path, about, config)
    _check_rounds(store, done, before, config)
    if tensors is None and config.fork is not None:
        return _restart(plan, store, config, options, watchers)
    if tensors is None and begun:
        warnings.warn(
            f"'{store.path}' was stopped before its first checkpoint: training starts again from "
            "round 1.",
            stacklevel=3,
        )
    if done < config.rounds:
        experiment = _prepare(plan, config, options, about if tensors is not None else None)
        if tensors is not None:
            experiment.restore(store.path, tensors, about)
    _reopen(store, config, done)
    with _told(store):
        if done < config.rounds:
            Runner(experiment, store, [*watchers, *trackers(config, store)]).run(done)
        else:
            store.finish()  # a process may have been killed right before
            for watcher in (*watchers, *trackers(config, store)):  # which may lack some rounds
                watcher.start(store.path.name, config.rounds, done)
                watcher.end()
    return _opened(store)


def _first_checkpoint(config: Config) -> int:
    """The round after which a run has a checkpoint; a fork has the one that it starts from."""
    if config.fork is not None:
        return int(config.fork.rpartition("@")[2])
    return min(config.checkpoint_every, config.rounds)


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
        done = origin.start(store, experiment)
        Runner(experiment, store, [*watchers, *trackers(config, store)]).run(done)
    return _opened(store)


def _reopen(store: RunStore, config: Config, done: int) -> None:
    """Cut a run to its last whole round, and write down what may change."""
    store.cut(done)
    store.warn_of_lost_tables()
    if not store.is_sealed() or store.config() != yaml.safe_load(config.dump()):
        store.reconfigure(config.dump())


def _continued(store: RunStore, plan: _Plan, before: Config) -> dict[str, Any]:
    """The run's settings, overridden by the given ones that may change."""
    old, new = before.model_dump(), plan.config.model_dump()
    if old["fork"] is not None and old["fork"].rpartition("@")[0] == new["fork"]:
        new["fork"] = old["fork"]  # the same run, named without its round
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
    """Report what stopped a run, what is left of it and how to continue.

    A run that was being replaced is restored if the new one has no checkpoint yet; a new one that
    was refused leaves nothing behind, so that the corrected command finds its directory free.
    """
    try:
        yield
    except BaseException as e:
        back = store.recover()
        refused = isinstance(e, FedloomError) and not isinstance(e, Diverged)  # that is a result
        if fresh and refused and not back:
            store.drop_if_empty()
        if isinstance(e, KeyboardInterrupt):
            after = e.round if isinstance(e, StopRequested) else None
            raise Stopped(store.path, old_is_back=back, after=after) from None
        if isinstance(e, OutOfMemory) and not back and store.has_checkpoint():
            raise OutOfMemory(
                f"{e} Finished rounds are not lost: with more memory, continue with --resume "
                f"--out {store.path}."
            ) from e
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise FedloomError(_full(store, back)) from e
        raise


def _full(store: RunStore, back: bool) -> str:
    if back:
        return (
            f"The disk is full; '{store.path}' holds the run that was there before. Free some "
            "space and run the same command again."
        )
    if not store.exists:
        return "The disk is full; nothing was written. Free some space and run the command again."
    return (
        f"The disk is full; finished rounds are safe in '{store.path}'. Free some space and "
        f"continue with --resume --out {store.path}."
    )


def _prepare(
    plan: _Plan, config: Config, options: MethodOptions, before: Mapping[str, Any] | None = None
) -> Experiment:
    return prepare(config, options.build(), **plan.objects, options=options, before=before)


def _plan_fork(
    origin: Origin, method: MethodLike | None, settings: Mapping[str, Any], *, lenient: bool
) -> _Plan:
    """The settings of the forked run, overridden by those asked for."""
    if settings.get("init") is not None:
        raise FedloomError(
            "A fork starts from the weights of the run that it forks, so init would do nothing. "
            "Leave one of them out."
        )
    if settings.get("preset") is not None:
        raise FedloomError(
            "A fork has all settings of the run that it starts from, so a preset would do nothing. "
            "Give the settings themselves."
        )
    base = dict(origin.config)
    before = str(base.pop("method"))
    cls, words = named(before if method is None else method)
    if words["method"] != before:
        base = {k: v for k, v in base.items() if k not in ("params", "preset")}
    base = {key: value for key, value in base.items() if key not in cls.fixed}
    given = {key: value for key, value in settings.items() if value is not None}
    plan = planned(
        before if method is None else method,
        {**merge(base, given), "fork": origin.name},
        lenient=lenient,
    )
    origin.check_length(plan.config)
    return plan


def _deal_by_nature(given: dict[str, Any], objects: Mapping[str, Any]) -> None:
    """Data that comes with its clients is dealt to them unless asked otherwise; `sites:DIR` may be
    written as the data or as the partition."""
    spec = given.get("partition")
    if isinstance(spec, str) and spec.startswith(SITES):
        if given.get("data") not in (None, spec, spec.removeprefix(SITES)):
            raise FedloomError(
                f"partition={spec} is data and its partition at once, so data={given['data']} "
                "can't be given with it. Leave one of them out."
            )
        given |= {"data": spec, "partition": None}
    if given.get("partition") is None:
        given.pop("partition", None)
        data = objects.get("data", given.get("data"))
        column = None if data is None else natural(data)
        given |= {} if column is None else {"partition": f"by:{column}"}


def _deal_without_classes(
    given: dict[str, Any], method: type[MethodOptions], objects: dict[str, Any], lenient: bool
) -> None:
    """Data whose samples have no class is dealt evenly unless asked otherwise."""
    data = objects.get("data", given.get("data"))
    if data is None or (isinstance(data, str) and is_by_class(data)):
        return
    _, dataset = _loaded(given, method, objects, lenient)
    if not dataset.task.by_class:
        given["partition"] = "iid"


def _loaded(
    given: Mapping[str, Any], method: type[MethodOptions], objects: dict[str, Any], lenient: bool
) -> tuple[Config, Dataset]:
    """The data, loaded before it is known how many clients there are and how they can be drawn, and
    kept for the run."""
    asked = {**given, "clients": _MOST_CLIENTS, "draw": "uniform"}  # with any participation
    config = make_config(asked, method, lenient=lenient)[0].model_copy(update={"clients": 1})
    dataset = load_dataset(config, objects.get("data"))
    if config.data != "custom":
        objects["data"] = dataset
    return config, dataset


def _named_clients(
    given: Mapping[str, Any], method: type[MethodOptions], objects: dict[str, Any], lenient: bool
) -> int | None:
    """How many clients there are by the partition, where it says so; data that is loaded to count
    them is kept."""
    spec = objects.get("partition", given.get("partition"))
    if spec in (None, "custom") or by_column(spec) is None:
        return None if spec in (None, "custom") else named_clients(None, spec)
    config, dataset = _loaded(given, method, objects, lenient)
    return named_clients(dataset, spec, config.pool)


def planned(method: MethodLike, settings: Mapping[str, Any], *, lenient: bool) -> _Plan:
    given = {k: v for k, v in settings.items() if k not in ("data", "model") or v is not None}
    objects = {}
    for key in ("data", "model", "partition", "init", "loss", "fork"):
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
    if "loss" in objects and not callable(objects["loss"]):
        raise FedloomError(
            f"loss={quoted(objects['loss'])} is not valid: give a function of outputs and labels "
            "that returns the mean loss of a batch, or FILE.py:FUNCTION."
        )
    if "partition" in objects:
        objects["partition"] = Partition.of_object(objects["partition"])
    cls, words = named(method)
    given = merge(given, words)
    _deal_by_nature(given, objects)
    if "partition" not in given:
        _deal_without_classes(given, cls, objects, lenient)
    if given.get("clients") is None:
        given.pop("clients", None)
        count = _named_clients(given, cls, objects, lenient)
        given |= {} if count is None else {"clients": count}
    config, options = make_config(given, cls, lenient=lenient)
    check_tracker(config.track)
    keys = frozenset(given) | ({"params"} if set(given) & set(cls.model_fields) else set())
    return _Plan(config, options, keys, objects)
