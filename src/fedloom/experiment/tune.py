"""Hyper-parameter search with the same budget for every method, and never on test data.

Each trial is a run in which a fraction of every client's training data replaces the test data
(`tune_share`), so the data that results are reported on is never used. Trials are points of a
Halton sequence, named by their number: the k-th value of a setting is the same for all methods, for
any number of workers and after an interruption. Successive halving trains all trials for a few
rounds and continues the best of them by resuming their runs.

This uses no search library: what they add (surrogate models, pruning of running trials) makes the
choice depend on which run happens to finish first, and running, resuming and diverged runs are
already handled by studies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.api import planned
from fedloom.experiment.config import as_words, normal, read_config
from fedloom.experiment.entry import Entry
from fedloom.experiment.plugins import is_file, method_class, trust
from fedloom.experiment.result import Result
from fedloom.experiment.settings import Config, parse_yaml
from fedloom.experiment.store import RunStore
from fedloom.experiment.study import Cell, Job, Say, diverged, finished, make_job, run_jobs
from fedloom.files import atomic_file
from fedloom.methods.registry import MethodOptions
from fedloom.options import quoted
from fedloom.tasks import AUTO, LOSS, TASKS, Measure, kind

RANGES = "LOW..HIGH, log:LOW..HIGH, int:LOW..HIGH, or values as A|B|C"
CHOSEN, TRIES = "chosen.yaml", "tries.csv"
TUNED = "tuned"  # the key of such a file that holds the values by method
SHARE = 0.25  # of the training data, where the score is taken
_NO_SCORES = ("round", "seconds", "eval_seconds", "lr", "train_loss")
_OURS = ("seed", "eval_every", "eval_common", "workers")  # no settings of a search
_NOT_SEARCHED = (*_OURS, "rounds", "tune_share")

Value = float | int | str | bool | None


@dataclass(frozen=True)
class Range:
    """The range in which a setting is searched.

    >>> Range.parse("log:0.001..0.1").at(0.5)
    0.01
    >>> [Range.parse("sgd|adam").at(u) for u in (0.1, 0.9)]
    ['sgd', 'adam']
    """

    kind: Literal["even", "log", "int", "of"]
    low: float = 0.0
    high: float = 0.0
    values: tuple[Value, ...] = ()

    @staticmethod
    def parse(text: str) -> Range:
        if "|" in text:
            return Range("of", values=tuple(_value(word.strip()) for word in text.split("|")))
        kind, colon, ends = text.rpartition(":")
        low, dots, high = ends.partition("..")
        try:
            if not dots or (colon and kind not in ("log", "int")):
                raise ValueError
            bounds = float(low), float(high)
            if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1])) or (
                bounds[0] >= bounds[1] or (kind == "log" and bounds[0] <= 0)
            ):
                raise ValueError
            if kind == "int" and not all(b.is_integer() for b in bounds):
                raise ValueError
        except ValueError:
            raise FedloomError(
                f"'{text}' is not a range to search: it is written {RANGES}, with LOW below HIGH "
                "(and above 0 for log)."
            ) from None
        return Range("log" if kind == "log" else "int" if kind == "int" else "even", *bounds)

    def at(self, u: float) -> Value:
        """The value at a share u of the way, 0 ≤ u < 1."""
        if self.kind == "of":
            return self.values[int(u * len(self.values))]
        if self.kind == "int":
            return int(self.low) + int(u * (int(self.high) - int(self.low) + 1))
        if self.kind == "log":
            return _three_digits(self.low * (self.high / self.low) ** u)
        return _three_digits(self.low + u * (self.high - self.low))


@dataclass(frozen=True)
class Search:
    """What is searched, for which methods, with which budget for each of them."""

    methods: tuple[str, ...]
    space: Mapping[str, Range]  # NAME, or METHOD:NAME for one method alone
    runs: int | None = None  # tries of each method ...
    seconds: float | None = None  # ... or the time that its runs may take together
    halving: int | None = None  # keep one of so many after each rung; None: all get all rounds
    score: str = "macro"  # names in the summary of a run; several, joined by +, are averaged
    seeds: int = 1
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all runs

    def __post_init__(self) -> None:
        if (self.runs is None) == (self.seconds is None):
            raise FedloomError(
                "A search needs a budget per method: give either a number of runs or minutes."
            )
        given = [n for n in (self.runs, self.seconds, self.seeds) if n is not None]
        if not all(0 < n < math.inf for n in given):
            raise FedloomError("Runs, minutes and seeds of a search must be numbers above 0.")
        share = self.settings.get("tune_share", SHARE)
        if not 0 < share < 1:
            raise FedloomError(
                f"A search needs a share of the training data, between 0 and 1, not {share}: "
                "otherwise it would use the test data."
            )
        if self.halving is not None and self.halving < 2:
            raise FedloomError(f"halving={self.halving} would drop no trial: give 2 or more.")
        if not self.methods:
            raise FedloomError("Which methods should be tuned? Name them.")
        if not self.space:
            raise FedloomError(
                "Say what to search: --search NAME=RANGE, such as --search lr=log:1e-3..1. A range "
                f"is written {RANGES}."
            )
        known = known_scores(str(self.settings.get("task", AUTO)))
        for name in self.score.split("+"):
            if not name:
                raise FedloomError(f"score={self.score}: a name is missing beside '+'.")
            if name not in known:
                raise unknown("score", name, known)
        searched = {_name(key) for key in self.space}
        for key in (
            *(k for k in _OURS if k in self.settings),
            *searched.intersection(_NOT_SEARCHED),
        ):
            raise FedloomError(f"A search sets {key} itself: leave it out.")
        if "new_" in self.score and not self.settings.get("newcomers"):
            raise FedloomError(f"score={self.score} needs newcomers, and there are none.")
        if self.halving is not None and (self._schedule != "constant" or "lr_schedule" in searched):
            raise FedloomError(
                "An lr_schedule depends on the number of rounds, which is not the same for all "
                "trials of a halving search. Leave one of them out."
            )
        for key in self.space:
            named, _, name = key.rpartition(":")
            mine = [m for m in self.methods if named in ("", m)]
            if not mine:
                raise FedloomError(
                    f"{key} would be searched for {named}, which is not among the methods to tune: "
                    f"{', '.join(self.methods)}."
                )
            if not concerns(name, mine):
                known = sorted({n for m in mine for n in _options(method_class(m))})
                raise unknown("setting to search", key, known)
        for method in self.methods:
            self.of(method)

    @property
    def _schedule(self) -> str:
        return str(self.settings.get("lr_schedule", "constant"))

    @property
    def rounds(self) -> int:
        default = Config.model_fields["rounds"].default
        return int(normal("rounds", self.settings.get("rounds", default)))

    def of(self, method: str) -> dict[str, tuple[int, Range]]:
        """What is searched for a method: setting → its place in the sequence, and its range."""
        cls, places = method_class(method), list(dict.fromkeys(_name(key) for key in self.space))
        known = {**self.space, **{k.partition(":")[2]: v for k, v in self.space.items()
                                  if k.startswith(f"{method}:")}}  # fmt: skip
        found = {
            name: (places.index(name), values)
            for name, values in known.items()
            if ":" not in name and name in _options(cls) and name not in cls.fixed
        }
        if not found:
            raise FedloomError(
                f"Nothing that is searched is a setting or option of {method}: "
                f"{', '.join(self.space)}."
            )
        return found

    def values(self, method: str, number: int) -> dict[str, Value]:
        """The settings of a try."""
        from scipy.stats import qmc

        mine = self.of(method)
        width = 1 + max(place for place, _ in mine.values())
        sequence = qmc.Halton(width, scramble=True, seed=self.seed)
        point = sequence.fast_forward(number).random(1)[0]
        return {name: values.at(float(point[place])) for name, (place, values) in mine.items()}

    def rungs(self, tries: int) -> list[tuple[int, int]]:
        """How many tries go on, and to which round."""
        out = [(self.rounds, tries)]
        if self.halving is None:
            return out
        steps = int(math.log(tries, self.halving) + 1e-9)
        while steps and self.rounds // self.halving**steps < 1:
            steps -= 1
        return [
            (math.ceil(self.rounds / self.halving ** (steps - k)), max(tries // self.halving**k, 1))
            for k in range(steps + 1)
        ]


@dataclass(frozen=True)
class Tuning:
    """What a search found: the best settings of each method, and every try."""

    path: Path
    chosen: Mapping[str, Mapping[str, Value]]
    tries: pd.DataFrame  # method, try, settings, rounds, score, seconds
    measure: Measure = field(default_factory=lambda: Measure("accuracy"))  # what scores are

    @property
    def file(self) -> Path:
        return self.path / CHOSEN


def run_search(search: Search, out: Path, workers: int, say: Say) -> Tuning:
    """Run what is not finished of a search; the same call goes on after a stop."""
    if out.exists() and not out.is_dir():
        raise FedloomError(f"'{out}' is a file. Choose another --out for the search's directory.")
    for method in search.methods:
        if is_file(method):
            trust(method)
    common = _common(search)
    _check_score(search, common)
    found = {method: _Tries(search, method, out, common[method]) for method in search.methods}
    while waiting := [job for tries in found.values() for job in tries.next()]:
        run_jobs(waiting, workers, say)
    chosen = {method: tries.best() for method, tries in found.items()}
    table = pd.DataFrame([row for tries in found.values() for row in tries.rows()])
    tuning = Tuning(out, chosen, table, next(iter(found.values())).measure)
    with atomic_file(out / TRIES) as file:
        table.to_csv(file, index=False)
    with atomic_file(tuning.file) as file:
        file.write_text(_text(search, chosen, table), encoding="utf-8")
    return tuning


class _Tries:
    """The tries of one method: which run next, and what they scored."""

    def __init__(self, search: Search, method: str, out: Path, common: Mapping[str, Any]) -> None:
        self._search, self._method, self._out, self._common = search, method, out, common
        self._bracket = search.runs or (search.halving or 1) ** (2 if search.halving else 0)
        self._done: dict[int, tuple[int, float, float]] = {}  # try → rounds, score, seconds
        self._left = list(range(self._bracket))  # of this bracket, those still going on
        self._rung = 0
        self.measure = Measure("accuracy")  # what scores are; known once a run is scored

    def next(self) -> list[Job]:
        """The runs to do before anything can be decided; none when the budget is spent."""
        while True:
            rungs = self._search.rungs(self._bracket)
            if self._rung == len(rungs):
                if self._search.runs is not None or self._spent >= (self._search.seconds or 0):
                    return []
                first = max(self._done) + 1
                self._left, self._rung = list(range(first, first + self._bracket)), 0
            rounds, keep = rungs[self._rung]
            ranked = sorted(self._left, key=lambda k: (-self._done.get(k, (0, 0.0, 0.0))[1], k))
            self._left = ranked[:keep] if self._rung else self._left
            todo = [job for number in self._left for job in self._jobs(number, rounds)]
            unfinished = [job for job in todo if not finished(job)]
            if unfinished:
                return unfinished
            for number in self._left:
                self._done[number] = self._scored(number, rounds)
            self._rung += 1

    @property
    def _spent(self) -> float:
        return sum(seconds for _, _, seconds in self._done.values())

    def best(self) -> dict[str, Value]:
        """Of those that were trained longest, the one with the highest score; the first of two."""
        most = max(rounds for rounds, _, _ in self._done.values())
        last = {k: score for k, (rounds, score, _) in self._done.items() if rounds == most}
        number = max(last, key=lambda k: (last[k], -k))
        if last[number] == -math.inf:
            raise FedloomError(
                f"All tries of {self._method} diverged: search smaller learning rates (see "
                f"{TRIES})."
            )
        return self._search.values(self._method, number)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"method": self._method, "try": k, **self._search.values(self._method, k),
             "rounds": rounds, "score": self.measure.sign * score, "seconds": round(seconds, 1)}
            for k, (rounds, score, seconds) in sorted(self._done.items())
        ]  # fmt: skip

    def _jobs(self, number: int, rounds: int) -> list[Job]:
        values = self._search.values(self._method, number)
        settings = {**self._common, **values, "rounds": rounds, "eval_every": self._search.rounds}
        name = re.sub(r"[^\w.-]+", "-", self._method)
        cell = Cell(f"{name}-t{number:03d}", self._method, settings)
        seeds = range(self._search.seed, self._search.seed + self._search.seeds)
        return [make_job(cell, seed, self._out, free=("rounds",)) for seed in seeds]

    def _scored(self, number: int, rounds: int) -> tuple[int, float, float]:
        scores, seconds = [], 0.0
        for job in self._jobs(number, rounds):
            # The run may have gone on since: what counts is what it scored in this round.
            known = Result(job.path).rounds if RunStore(job.path).exists else pd.DataFrame()
            then = known[known["round"] == rounds] if len(known) else known
            if diverged(job) and not len(then):
                scores.append(-math.inf)
                continue
            found, measures = dict(then.iloc[-1].items()), Result(job.path).measures
            scores.append(_score(found, self._search.score, measures))
            self.measure = shown_as(self._search.score, measures)
            until = known[known["round"] <= rounds]
            seconds += float(until["seconds"].sum() + until["eval_seconds"].sum())
        return rounds, float(np.mean(scores)), seconds


def _common(search: Search) -> dict[str, dict[str, Any]]:
    """By method, the settings of all its runs."""
    from fedloom.experiment.comparing import settings_of_each

    given = {"tune_share": SHARE, **search.settings}
    if "test" not in search.score:
        given["eval_common"] = 0
    return settings_of_each(search.methods, given)


def _check_score(search: Search, common: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a score that the task of the data does not have, before the first trial."""
    from fedloom.experiment.comparing import task_of

    scores = search.score.split("+")
    for method, settings in common.items():
        adapts = planned(method, settings, lenient=True).options.build().adapt.rule is not None
        if not adapts and any(name.startswith("before_") for name in scores):
            raise FedloomError(
                f"score={search.score}: {method} does not adapt models before they are scored, so "
                "there is no score before that."
            )
    if {"data", "task", "data_options"} & {key.rpartition(":")[2] for key in search.space}:
        return  # different trials may have different tasks
    task = task_of(search.methods[0], common[search.methods[0]])
    known = known_scores(task)
    for name in scores:
        if name not in known:
            raise FedloomError(f"For {task}: {unknown('score', name, known)}")


def known_scores(task: str = AUTO) -> list[str]:
    """What a search may go by: the scores of a task, or of any. Clients' scores in a task's first
    measure are called by how they are averaged."""
    kinds = TASKS.values() if task == AUTO else [kind(task)]
    others = dict.fromkeys(m.name for one in kinds for m in one.measures[1:])
    first = dict.fromkeys(one.measures[0].name for one in kinds)
    own = ["micro", "macro", "worst10", "best10", LOSS.name]
    own += [name for name in others if name != LOSS.name]
    of_others = [f"{prefix}_{name}" for prefix in ("new", "before") for name in own]
    return [*own, *of_others, *(f"test_{name}" for name in (*first, LOSS.name))]


def _score(record: Mapping[Any, Any], names: str, measures: Sequence[Measure]) -> float:
    """What a try is ranked by: the mean of its scores, negated where less is better."""
    scores = {k: v for k, v in record.items() if isinstance(v, float) and k not in _NO_SCORES}
    for name in names.split("+"):
        if name not in scores:
            raise unknown("score", name, scores)
    found = float(np.mean([scores[name] for name in names.split("+")]))
    found = -found if shown_as(names, measures).lower else found
    return found if math.isfinite(found) else -math.inf


def shown_as(names: str, measures: Sequence[Measure]) -> Measure:
    """What the scores of a search are: how they are written, and whether less is better. Those
    without a measure's name are of the first."""
    known = {measure.name: measure for measure in (*measures, LOSS)}
    found = []
    for name in names.split("+"):
        for prefix in ("new_", "before_", "test_"):
            name = name.removeprefix(prefix)
        measure = known.get(name.removesuffix("_std"), measures[0])
        found.append(replace(measure, lower=True) if name.endswith("std") else measure)
    if len({measure.lower for measure in found}) > 1:
        raise FedloomError(
            f"score={names} adds measures of which more is better to such of which less is: name "
            "one kind."
        )
    return found[0]


def concerns(name: str, methods: Iterable[str]) -> bool:
    """Whether this is a setting, or an option of one of the methods."""
    return any(name in _options(method_class(method)) for method in methods)


def _options(cls: type[MethodOptions]) -> set[str]:
    return {*Config.model_fields, *cls.model_fields} - {"method", "params", "seed"}


def _name(key: str) -> str:
    return key.rpartition(":")[2]


def _value(text: str) -> Value:
    value = parse_yaml(text)
    try:
        return float(value) if isinstance(value, str) and value[:1] in "+-.0123456789" else value
    except ValueError:
        return text


def _three_digits(value: float) -> float:
    """Rates are written with three digits, so that a chosen one can be typed."""
    return float(f"{value:.3g}")


def _text(search: Search, chosen: Mapping[str, Mapping[str, Value]], table: pd.DataFrame) -> str:
    budget = f"{search.runs} runs" if search.runs else f"{search.seconds:g} s"
    halved = f", one of {search.halving} kept at each rung" if search.halving else ""
    share = search.settings.get("tune_share", SHARE)
    spent = [f"{m} {s:.0f} s" for m, s in table.groupby("method")["seconds"].sum().items()]
    head = (
        f"# Chosen by fedloom tune: {budget} a method of {search.rounds} rounds{halved}, "
        f"{search.seeds} seed(s) from {search.seed},\n"
        f"# by {search.score} on {share:g} of the clients' training data; no test data was used.\n"
        f"# Searched: {', '.join(search.space)}. Time: {', '.join(spent)}.\n"
    )
    given = {k: v for k, v in search.settings.items() if k not in ("tune_share", "rounds")}
    data = {} if "data" in search.space else {"data": Config.model_fields["data"].default}
    given = {**data, **given}  # what was chosen on other data is no choice
    asked = replace(search, settings={**data, **search.settings})
    each = {m: {k: own[k] for k in given if k in own} for m, own in _common(asked).items()}
    common = {k: v for k, v in given.items() if all(k in own for own in each.values())}
    known = {
        m: {**{k: v for k, v in each[m].items() if k not in common}, **values}
        for m, values in chosen.items()
    }
    return head + yaml.safe_dump({**common, TUNED: known}, sort_keys=False, allow_unicode=True)


def chosen_for(settings: Mapping[str, Any], method: str | None, file: object) -> dict[str, Any]:
    """The settings of a config file; of one that a search wrote, those that it chose for a
    method."""
    if TUNED not in settings:
        return dict(settings)
    known = settings[TUNED]
    if not isinstance(known, Mapping) or not all(isinstance(v, Mapping) for v in known.values()):
        raise FedloomError(f"'{file}' must hold settings by method under '{TUNED}'.")
    if method is None:
        raise FedloomError(
            f"'{file}' has settings for {', '.join(known)}: say which method to run."
        )
    if method not in known:
        raise FedloomError(
            f"'{file}' has no settings for {quoted(method)}; it has them for {', '.join(known)}."
        )
    rest = {key: value for key, value in settings.items() if key != TUNED}
    return {**rest, **known[method]}


def with_chosen(
    methods: Iterable[str], settings: Mapping[str, Any], over: Mapping[str, Any], file: object
) -> list[str]:
    """Methods of a comparison, each with what a search chose for it; what is given with the method
    or for all of them (`over`) takes precedence."""
    out = []
    for method in methods:
        entry = Entry.of(method)
        named = str(entry.method)
        mine = chosen_for({TUNED: settings[TUNED]}, named, file)
        own = {k: v for k, v in mine.items() if k not in over} | dict(entry.own)
        words = ",".join(as_words(own))
        out.append(f"{named}@{words}" if words else named)
    return out


def read_chosen(file: Path, data: str) -> dict[str, dict[str, Any]]:
    """Method → settings, from a file that a search on this data set wrote."""
    content = read_config(file)
    if TUNED not in content:
        raise FedloomError(
            f"'{file}' is not a file of chosen values: it has no '{TUNED}'. Make one with "
            "fedloom tune."
        )
    known = content[TUNED]
    if not isinstance(known, Mapping) or not known or not all(isinstance(m, str) for m in known):
        raise FedloomError(f"'{file}' must hold settings by method under '{TUNED}'.")
    found = {method: chosen_for(content, method, file) for method in known}
    for method, settings in found.items():
        if settings.get("data") != data:
            where = (
                f"for {settings['data']}" if "data" in settings else "for data that it doesn't name"
            )
            raise FedloomError(f"'{file}' was chosen {where}, not for {data} ({method}).")
    return found
