"""What the runs of a comparison have in common, and what they have not.

Nothing is assumed: data, clients, initial weights and participants count as the same only if the
runs' settings, checkpoints and records say so. What a method's definition changes of the settings
that were asked for, or makes no use of, is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.public import Wish
from fedloom.errors import FedloomError
from fedloom.experiment.capacities import Capacities
from fedloom.experiment.config import normal
from fedloom.experiment.plugins import is_file
from fedloom.experiment.settings import Config
from fedloom.method import Method
from fedloom.methods.registry import without_nones
from fedloom.select import Whole

if TYPE_CHECKING:
    from fedloom.experiment.result import Result

#: settings that say which data there is, and who holds what of it
_DATA = ("data", "data_options", "pool", "normalise")
_CLIENTS = ("clients", "partition", "data_share", "test_share", "test_cut", "support_share",
            "validation_share", "tune_share", "newcomers", "newcomer_classes",
            "newcomer_partition")  # fmt: skip
#: of a run alone, or told elsewhere
_OWN = ("method", "params", "preset", "seed", "score_on")
#: what a checkpoint says of how the model began
_MODEL = ("model", "model_options", "shape", "classes", "init", "seed")
_COST = ["seconds", "eval_seconds", "peak_memory", "participants", "macs", "bytes_up", "bytes_down"]
_SAME_RESULT = 1e-6  # relative: engines may round differently

ONE_LEARNER = "one learner trains on all clients' data, so there are no participants"

Runs = Mapping[str, Sequence["Result"]]


def unused(config: Config, method: Method) -> list[str]:
    """What a method makes no use of, though the settings have it."""
    out = []
    if method.topology.pools:
        out.append(ONE_LEARNER)
    if not isinstance(method.select, Whole) and Capacities.parse(config.capacities).whole:
        out.append("all capacities are 1, so every client trains the whole model")
    if config.public != "none" and not method.needs("public"):
        out.append("does not use the public set")
    return out


def in_common(runs: Runs) -> list[str]:
    """What is the same in all runs of a seed, of what methods should be compared on."""
    facts: dict[str, Callable[[Result], Any]] = {
        "data": lambda r: [r.config.get(key) for key in _DATA] + [r.about.get("fingerprint")],
        "clients": lambda r: (
            [r.config.get(key) for key in (*_CLIENTS, *_DATA)] + [_taken(r), r.about.get("dealt")]
        ),
        "initial weights": _beginning,
        "participants": _participants,
    }
    return [
        name
        for name, fact in facts.items()
        if all(_alike([fact(run) for run in paired]) for paired in zip(*runs.values(), strict=True))
    ]


def differences(
    runs: Runs,
    baseline: str,
    asked: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    unused: Mapping[str, Sequence[str]],
    dropped: Mapping[str, Mapping[str, str]],
) -> dict[str, list[str]]:
    """By method, what differs from the baseline or from what was asked for, in words; `own` are
    settings that only it was given, `dropped` those that were taken from it, and why."""
    wanted = _wanted(asked)
    out = {}
    for label, results in runs.items():
        mine, base = unused.get(label, ()), runs[baseline]
        alone = _wanted(own.get(label, {}))
        set_apart = {*alone, *_wanted(own.get(baseline, {}))}  # told against the baseline
        shared = {key: value for key, value in wanted.items() if key not in set_apart}
        taken = {k: why for k, why in dropped.get(label, {}).items() if k not in alone}
        words = _settings(results[0], base[0], baseline, shared, taken)
        words += _overruled(results[0], alone, dropped.get(label, {}))
        words += _options(results[0], base[0], baseline, label, asked)
        words += _model(results[0], base[0])
        if ONE_LEARNER in mine or ONE_LEARNER in unused.get(baseline, ()):
            words = [word for word in words if not word.startswith("participation=")]
        else:
            words += _turnout(results, base, baseline)
        if ONE_LEARNER in mine:
            words.append(ONE_LEARNER)
        if words:
            out[label] = words
    return out


def _wanted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that were asked for, in the form that a config holds."""
    return {
        key: _normal(key, value)
        for key, value in without_nones(Config, asked).items()
        if key in Config.model_fields and key not in (*_OWN, "data", "model")
    }


def _overruled(run: Result, alone: Mapping[str, Any], dropped: Mapping[str, str]) -> list[str]:
    """Settings that a method was given for itself and that its definition fixes otherwise."""
    return [
        f"{key}={_word(run.config[key])}, not {_word(value)} as asked"
        for key, value in alone.items()
        if key in run.config and run.config[key] != value and key not in dropped
    ]


def _options(
    run: Result, base: Result, baseline: str, label: str, asked: Mapping[str, Any]
) -> list[str]:
    """Options of the method that are not its defaults, or not those of the same one beside it,
    unless the label has them."""
    out = []
    same = run.config["method"] == base.config["method"]
    theirs = base.config.get("params") or {}
    for key, value in (run.config.get("params") or {}).items():
        if f"{key}=" in label:
            continue
        if same and theirs.get(key) != value:
            out.append(f"{key}={_word(value)} ({baseline}: {_word(theirs.get(key))})")
        elif not same and key in run.options:
            # What the defaults of a method in a file are, only running that file would tell.
            if not is_file(run.config["method"]):
                out.append(f"{key}={_word(value)}, which is not its default")
            elif key in asked:
                out.append(f"{key}={_word(value)}")
    return out


def _normal(key: str, value: Any) -> Any:
    """A setting in the form that a config holds; one that makes sense only beside others is taken
    as it was given, and was checked with them."""
    try:
        return normal(key, value)
    except FedloomError:
        return value


def notes(runs: Runs, unused: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """By method, what it makes no use of, and whose results are those of another."""
    out = {}
    for label in runs:
        words = [word for word in unused.get(label, ()) if word != ONE_LEARNER]
        twin = _twin(label, runs)
        if twin is not None:
            words.append(f"its results are those of {twin} in every round")
        if words:
            out[label] = words
    return out


def _settings(
    run: Result,
    base: Result,
    baseline: str,
    wanted: Mapping[str, Any],
    dropped: Mapping[str, str],
) -> list[str]:
    out = []
    for key, value in run.config.items():
        if key in _OWN:
            continue
        if key in wanted and value != wanted[key]:
            why = f" ({dropped[key]})" if key in dropped else ""
            out.append(f"{key}={_word(value)}, not {_word(wanted[key])} as asked{why}")
        elif key not in wanted and value != base.config.get(key):
            out.append(f"{key}={_word(value)} ({baseline}: {_word(base.config.get(key))})")
        if key == "public" and _taken(run) != _taken(base):
            out.append("so its clients hold other data")
    return out


def _model(run: Result, base: Result) -> list[str]:
    mine, theirs = _beginning(run), _beginning(base)
    changed = [f"{key}={_word(value)}" for key, value in mine.items() if theirs[key] != value]
    return [f"another model ({', '.join(changed)}), so other initial weights"] if changed else []


def _turnout(results: Sequence[Result], base: Sequence[Result], baseline: str) -> list[str]:
    pairs = list(zip(results, base, strict=True))
    if all(
        a == b
        for one, other in pairs
        for a, b in zip(_participants(one), _participants(other), strict=False)
    ):
        return []  # in the rounds that both have
    mine, theirs = (
        float(np.mean([r.rounds["participants"].mean() for r in side])) for side in (results, base)
    )
    if mine == theirs:
        return ["other participants"]
    return [f"{mine:.4g} participants a round ({baseline}: {theirs:.4g})"]


def _twin(label: str, runs: Runs) -> str | None:
    """An earlier method with the same losses and scores in all rounds of all seeds."""
    for other in runs:
        if other == label:
            return None
        if all(_same_results(*pair) for pair in zip(runs[label], runs[other], strict=True)):
            return other
    return None


def _same_results(one: Result, other: Result) -> bool:
    a, b = (
        run.rounds.drop(columns=_COST, errors="ignore").select_dtypes("number").sort_index(axis=1)
        for run in (one, other)
    )
    return (
        list(a.columns) == list(b.columns)
        and a.shape == b.shape
        and np.allclose(a, b, rtol=_SAME_RESULT, atol=0, equal_nan=True)
    )


def _participants(run: Result) -> list[list[int]]:
    return [record["participants"] for record in run.records]


def _beginning(run: Result) -> dict[str, Any]:
    return {key: run.about.get(key) for key in _MODEL}


def _taken(run: Result) -> float:
    """The share of the clients' data that became public."""
    return Wish.parse(run.config.get("public", "none")).share


def _alike(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
