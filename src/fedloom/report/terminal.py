"""What the command line prints: live progress, tables, summaries.

On a terminal there is a bar with round, accuracy and time left; elsewhere a plain line now and
then, and tables without colour.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fedloom.data.images import noun
from fedloom.notice import clear
from fedloom.tasks import kind

if TYPE_CHECKING:
    from pathlib import Path

    from fedloom.data.dataset import Dataset
    from fedloom.data.partition import Partition
    from fedloom.doctor import Finding
    from fedloom.experiment.blueprint import Blueprint
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.rescore import Scores
    from fedloom.experiment.result import Result
    from fedloom.experiment.study import Study
    from fedloom.experiment.study import Table as StudyTable
    from fedloom.experiment.tune import Tuning
    from fedloom.method import Method
    from fedloom.methods.registry import MethodOptions
    from fedloom.report.marks import Cell
    from fedloom.round.plan import Manifest
    from fedloom.topology import Network
    from fedloom.topology.report import ContactReport

#: what the outputs of a model are called
_OUTPUTS = {"regression": "values", "multi-label": "labels", "next-token": "tokens"}
_LEAST_WIDTH = 80  # narrower tables are harder to read than lines that a terminal wraps
_WIDE = 120  # columns from which descriptions fit beside other columns
_fits = sys.stdout.isatty() or "COLUMNS" in os.environ
out = Console(width=None if _fits else 140, highlight=False)
out.width = max(out.width, _LEAST_WIDTH)
err = Console(stderr=True, highlight=False)


clear()  # all that a command needs is imported by now, and its output begins


class Progress:
    """A watcher. On a terminal, a live bar with the time left until all runs are done; elsewhere
    about ten plain lines. Of several runs, a line for each that is done: the table so far."""

    def __init__(self, runs: int = 1) -> None:
        self._label, self._runs, self._run = "", runs, 0
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._rounds, self._said, self._started = 0, 0, 0.0
        self._clock = Clock()
        self._score = ""

    def start(self, name: str, rounds: int, done: int) -> None:
        clear()
        self._run += 1
        self._label = name
        self._rounds, self._said, self._started = rounds, done, time.perf_counter()
        self._score = "finished before" if done >= rounds else ""
        self._clock.begin((self._run - 1 + done / rounds) / self._runs)
        if err.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[score]}"), TextColumn("{task.fields[left]}"),
                console=err, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(
                self._name, total=rounds, completed=done, score="waiting for the first score",
                left=self._clock.left(),
            )  # fmt: skip

    def round(self, record: dict[str, Any]) -> None:
        self._score = score_of(record) or self._score
        t = record["round"]
        self._clock.at((self._run - 1 + t / self._rounds) / self._runs)
        if self._bar is not None:
            left = self._clock.left()
            self._bar.update(self._task, completed=t, score=self._score, left=left)
        elif self._runs == 1 and (t - self._said >= self._rounds / 10 or t == self._rounds):
            self._said = t
            seconds = time.perf_counter() - self._started
            score = self._score or f"training loss {_number(record['train_loss'])}"
            left = f", {self._clock.left()}" if t < self._rounds else ""
            print(f"round {t}/{self._rounds}  {score}  {seconds:.1f} s{left}", file=sys.stderr)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._runs > 1:
            seconds = time.perf_counter() - self._started
            self._clock.at(self._run / self._runs)
            left = f", {self._clock.left()}" if self._run < self._runs else ""
            words = f"{self._name:<30}  {self._score}  {seconds:.1f} s{left}"
            print(words, file=sys.stderr, flush=True)

    @property
    def _name(self) -> str:
        return f"{self._run}/{self._runs} {self._label}" if self._runs > 1 else self._label


class Clock:
    """Estimates the time left from the time taken so far.

    >>> clock = Clock(now=iter([0.0, 30.0]).__next__)
    >>> clock.begin(0.5); clock.at(0.75); clock.left()
    'about 30 s left'
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began: tuple[float, float] | None = None  # when, with what share done
        self._left: float | None = None

    def begin(self, share: float) -> None:
        """Start counting, unless that has happened."""
        if self._began is None:
            self._began = self._now(), share

    def at(self, share: float) -> None:
        assert self._began is not None
        started, first = self._began
        done = share - first
        self._left = (self._now() - started) * (1 - share) / done if done > 0 else None

    def left(self) -> str:
        if self._left is None:
            return ""
        seconds = round(self._left)
        if seconds < 100:
            return f"about {seconds} s left"
        minutes = round(seconds / 60)
        return (
            f"about {minutes} min left" if minutes < 100 else f"about {seconds / 3600:.1f} h left"
        )


def score_of(record: Mapping[str, Any]) -> str:
    """The score in a round's record, in words; empty where it was not scored."""
    measure = kind(record.get("task", "classification")).measures[0]
    score = record.get("test", {}).get(measure.name)
    if score is None:
        score = record.get("clients", {}).get("macro")
    if score is None:
        return ""
    return f"{measure.called} {measure.text(score)} (round {record['round']})"


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress callback for downloads: a bar on a terminal, a line per file elsewhere."""
    if not err.is_terminal:
        said: set[str] = set()

        def line(label: str, done: int, total: int | None) -> None:
            if label not in said:
                said.add(label)
                print(label, file=sys.stderr)

        yield line
        return
    tasks: dict[str, TaskID] = {}
    with Bar(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=err,
    ) as bar:  # fmt: skip

        def update(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        yield update


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int = 1, whole: int = 0
) -> Table:
    """A table; the first `left` columns are texts, and the first `whole` are never broken."""
    table = Table(box=None if not out.is_terminal else _box(), pad_edge=False)
    for i, head in enumerate(heads):
        side: Any = "left" if i < left or head == "what" else "right"
        table.add_column(Text(head), justify=side, overflow="fold", no_wrap=i < whole)
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row))
    return table


def _cell(cell: str | Cell) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    return Text(cell.text + " ≈" * cell.tie, "bold" if cell.best else "")


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD


def percent(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.4f}"


def amount(value: float, unit: str = "B") -> str:
    """A number with a decimal prefix.

    >>> amount(1234567), amount(12), amount(3.2e9, "MAC")
    ('1.23 MB', '12 B', '3.20 GMAC')
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            return f"{value:.0f} {unit}" if not prefix else f"{value:.2f} {prefix}{unit}"
        value /= 1000
    raise AssertionError


def print_result(result: Result, details: bool = False) -> None:
    done, config = result.summary, result.config
    options = "".join(f", {k}={v}" for k, v in result.options.items())
    model = config["model"]
    if model == "auto" and result.store.has_checkpoint():
        model = result.about["model"]
    out.print(
        f"{config['method']}{options}: {config['data']}, {config['clients']} clients, "
        f"{config['partition']}, model {model}, seed {config['seed']}"
    )
    if config.get("fork") is not None:
        out.print(f"Forked from {config['fork']}, whose rounds count as its own until then")
    asked = done["rounds_asked"]
    if done["rounds"] < asked:
        out.print(_unfinished(result), markup=False)
    if "eval_seconds" not in done or not any(
        name in done for name in ("macro", f"test_{result.measures[0].name}")
    ):
        ended = done["rounds"] >= asked
        out.print("There is no test data to score on." if ended else "Not scored yet.")
    else:
        out.print(_table(("", "score"), list(_scores(done, result.task)), left=1))
        if "macro" in done and result.scored_on is not None:
            out.print(f"Clients are scored on {result.scored_on}.")
    _print_skipped(result)
    if "bytes" in done:
        out.print(
            f"Cost: {amount(done['bytes_up'])} up, {amount(done['bytes_down'])} down, "
            f"{amount(done['macs'], 'MAC')}, {done['seconds']:.1f} s training "
            f"({done['server_seconds']:.1f} s of it combining models), "
            f"{done['eval_seconds']:.1f} s scoring, peak memory {amount(done['peak_memory'])}"
        )
    _print_devices(result)
    if result.measured:
        out.print("Norm statistics were measured on training data before each evaluation.")
    if config.get("public", "none") != "none" and result.store.has_checkpoint():
        out.print(f"Public set: {result.public}")
    if "degree" in done:
        mean = result.rounds[["degree", "isolated", "contacts"]].mean()
        out.print(
            f"Contacts: {mean['contacts']:.1f} a round, {mean['degree']:.2f} nodes met per node, "
            f"{percent(mean['isolated'])} of nodes isolated"
        )
    if details:
        _print_details(result)
    if result.tracked is not None:
        out.print(f"Tracked by {config['track']}: {result.tracked}")
    out.print(f"Run: {result.path}")


def _unfinished(result: Result) -> str:
    """How far a run came, what ended it and how it goes on; from a divergence it does not."""
    from fedloom.experiment.ending import DIVERGED
    from fedloom.experiment.folder import resuming

    done, ending = result.summary, result.store.ending
    words = [f"{done['rounds']} of {done['rounds_asked']} rounds done"]
    words += [ending.text.removesuffix(".")] if ending is not None else []
    if ending is None or ending.kind != DIVERGED:
        words.append(f"continue with: {resuming(result.path)}")
    return "; ".join(words)


def print_scores(result: Result, scores: Scores) -> None:
    """Scores of a run that was scored again, beside the last that it recorded itself."""
    first, again = (dict(_scores(found, result.task)) for found in (result.summary, scores.summary))
    if not again:
        out.print("Nothing was scored: there is no test data, or eval_clients is 0.")
        return
    rows = [(name, first.get(name, "–"), score) for name, score in again.items()]
    last = result.evaluations["round"].max() if first else "–"
    heads = ("", f"as it ran, round {last}", f"now, round {scores.round}")
    out.print(_table(heads, rows))
    before = result.scored_on
    then = f", and were on {before} as it ran" if before not in (None, scores.scored_on) else ""
    out.print(f"Clients are scored on {scores.scored_on}{then}.")


def _print_devices(result: Result) -> None:
    """Cost and scores of each kind of device."""
    table, measure = result.devices, result.measures[0]
    if table.empty:
        return
    scores = {"own test data": "macro", "its sub-model there": f"capacity_{measure.name}"}
    shown = {head: name for head, name in scores.items() if name in table}
    heads = ("capacity", "took part", "parameters", "MACs a round", "memory", "up", "down", *shown)
    rows = [
        [f"{capacity:g}", f"{row['took_part']:.0f}", f"{row['parameters']:,.0f}",
         amount(row["macs"], "MAC"), amount(row["memory"]), amount(row["bytes_up"]),
         amount(row["bytes_down"]), *(measure.text(row[name]) for name in shown.values())]
        for capacity, row in table.iterrows()
    ]  # fmt: skip
    out.print(_table(heads, rows))
    if len(shown) == 1 and "before_macro" in result.summary:
        out.print("Sub-models have no scores of their own where models are adapted to score them.")


def print_profile(result: Result) -> None:
    """Seconds by phase; those of workers are summed over workers."""
    phases = {
        "data": "data: pick, normalise, augment (workers)",
        "select": "selecting sub-models (workers)",
        "train": "local training (workers)",
        "mix": "mixing",
        "score": "scoring",
        "store": "storing",
    }
    spent = result.profile.sum()
    total = max(float(spent.sum()), 1e-9)
    rows = [
        [what, f"{spent[name]:.3f}", f"{100 * spent[name] / total:.1f} %"]
        for name, what in phases.items()
        if name in spent
    ]
    out.print(_table(("where the time went", "seconds", "share"), rows))
    out.print(f"kernels: {result.kernels}", soft_wrap=True)


def _scores(done: Mapping[str, Any], task: str) -> Iterator[tuple[str, str]]:
    first, *others = kind(task).measures
    named = "" if first.name == "accuracy" else f"{first.called} "
    if f"test_{first.name}" in done:
        told = [m for m in others if f"test_{m.name}" in done]
        rest = "".join(f", {m.called} {m.text(done[f'test_{m.name}'])}" for m in told)
        found = first.text(done[f"test_{first.name}"])
        yield "common test set", f"{named}{found}{rest}, loss {_number(done.get('test_loss'))}"
    for prefix, who in (("", "clients"), ("new_", "newcomers")):
        if f"{prefix}macro" not in done:
            continue
        s = {k: done[prefix + k] for k in ("micro", "macro", "std", "worst10", "best10")}
        yield f"{who}, micro", named + first.text(s["micro"])
        yield f"{who}, macro ± std", f"{named}{first.number(s['macro'])} ± {first.text(s['std'])}"
        tails = f"{first.number(s['worst10'])} / {first.text(s['best10'])}"
        yield f"{who}, worst / best 10 %", named + tails
        mine = [m for m in others if prefix + m.name in done]
        for unit in (True, False):
            some = [m for m in mine if m.share is unit]
            found = " / ".join(m.number(done[prefix + m.name]) for m in some)
            if some:
                yield f"{who}, {' / '.join(m.called for m in some)}", found + " %" * unit


def _print_skipped(result: Result) -> None:
    """Messages that were left out, whose they were, and rounds of which none was left."""
    if not len(result.skipped):
        return
    by = result.skipped["client"].value_counts().sort_index()
    whose = [
        f"client {result.called(int(client))} in {n} round{'s' * (n > 1)}"  # type: ignore[call-overload]
        for client, n in by.items()
    ]
    first = result.skipped.iloc[0]
    out.print(
        f"Left out: {_some(whose)} ({result.summary['skipped']} messages; round {first['round']}, "
        f"client {result.called(int(first['client']))}: {first['reason']})."
    )
    if result.idle_rounds:
        rounds = _some([str(number) for number in result.idle_rounds])
        out.print(f"Nothing was combined in round {rounds}: all messages were left out.")


def _some(words: Sequence[str], most: int = 8) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _print_details(result: Result) -> None:
    scored = result.evaluations
    measure = result.measures[0]
    wanted = (f"test_{measure.name}", "micro", "macro", "worst10", "new_macro")
    names = [n for n in wanted if n in scored]
    if len(scored):
        picked = scored.iloc[:: -max(1, len(scored) // 12)].iloc[::-1]  # the last for sure
        rows = [
            [str(int(r["round"])), *(measure.text(r[n]) for n in names), _number(r["train_loss"])]
            for _, r in picked.iterrows()
        ]
        out.print(_table(("round", *names, "training loss"), rows))
    groups = result.records[-1].get("clients", {}).get("groups") if result.records else None
    if groups:
        rows = [
            [c, str(g["clients"]), measure.text(g["micro"]), measure.text(g["macro"])]
            for c, g in groups.items()
        ]
        out.print(_table(("capacity", "clients", "micro", "macro"), rows))
    table = result.clients
    if len(table):
        last = table[(table["round"] == table["round"].max()) & (table["population"] == "local")]
        scored = last[(last["samples"] > 0) & last[measure.name].notna()]
        worst = scored.sort_values(measure.name, ascending=not measure.lower).head(5)
        text = ", ".join(
            f"{result.called(int(row['client']))} ({measure.text(row[measure.name])})"
            for _, row in worst.iterrows()
        )
        out.print(f"Clients worst off: {text}")


def print_comparison(comparison: Comparison, report: Path | None = None) -> None:
    if out.is_terminal:
        out.print(_table(*comparison.marked()))
        out.print(" ".join([*comparison.remarks(), *comparison.marks()]))
    else:  # for other programs, and where nothing is bold
        out.print(_table(*comparison.cells()))
        out.print(" ".join(comparison.remarks()))
    for heading, found in comparison.remarks_by_method().items():
        out.print(f"{heading}:")
        for method, words in found.items():
            out.print(Text(f"  {method}: {'; '.join(words)}"))
    for why in comparison.diverged.values():
        out.print(f"Not in the table: {why}")
    if report is not None:
        out.print(f"Report: {report}")


class StudyProgress:
    """How far a study is: a live bar on a terminal, a line per finished run elsewhere."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._finished = -1
        self._clock = Clock()

    def __enter__(self) -> StudyProgress:
        clear()
        if err.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), console=err, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("rounds", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, names: str, done: int, rounds: int, finished: int, jobs: int,
                 ended: Mapping[str, Mapping[str, Any]]) -> None:  # fmt: skip
        """`ended`: the runs that have ended since the last call, each with its last record."""
        share = done / max(rounds, 1)
        self._clock.begin(share)
        self._clock.at(share)
        for name, record in ended.items():
            err.print(f"{name:<40}  {score_of(record)}", soft_wrap=True)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=done, total=rounds, description=f"{finished}/{jobs} {names}"
            )
        elif finished > self._finished:
            left = f", {self._clock.left()}" if done < rounds and self._clock.left() else ""
            err.print(f"{finished} of {jobs} runs finished, {done} of {rounds} rounds{left}")
        self._finished = finished


_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]–[/]", "wrong": "[red]✗[/]"}


def print_finding(finding: Finding) -> None:
    """A line of `fedloom doctor`."""
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=13, no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(_MARKS[finding.state], Text(finding.what), Text(finding.says))
    out.print(line)


def print_studies(studies: Mapping[str, Study]) -> None:
    if out.width < _WIDE:
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True)
        lines.add_column()
        for s in studies.values():
            lines.add_row(Text(s.name), Text(s.title))
            for head, words in (("data", s.data), ("presets", s.presets), ("scales", s.scales)):
                lines.add_row("", Text(f"{head}: {', '.join(words)}"))
        out.print(lines)
        return
    rows = [
        [s.name, s.title, ", ".join(s.data), ", ".join(s.presets), ", ".join(s.scales)]
        for s in studies.values()
    ]
    out.print(_table(("study", "what", "data", "presets", "scales"), rows, left=5))


def print_tuning(tuning: Tuning) -> None:
    """What a search chose, with what it scored and took."""
    rows = []
    for method, values in tuning.chosen.items():
        tries = tuning.tries[tuning.tries["method"] == method]
        last = tries[tries["rounds"] == tries["rounds"].max()]
        words = ", ".join(f"{k}={_plain(v)}" for k, v in values.items())
        scores, took = last["score"], f"{tries['seconds'].sum():.0f} s"
        best = scores.min() if tuning.measure.lower else scores.max()
        rows.append([method, words, tuning.measure.text(best), str(len(tries)), took])
    out.print(_table(("method", "chosen", "score", "tries", "time"), rows, left=2))
    out.print(f"Chosen: {tuning.file}")


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_tables(tables: Sequence[StudyTable]) -> None:
    for table in tables:
        out.print(f"\n{table.title}")
        rows = [[cell.replace("**", "") for cell in row] for row in table.rows]
        out.print(_table(table.heads, rows, left=2))


def print_methods(methods: Mapping[str, type[MethodOptions]]) -> None:
    rows = [
        [name, cls.family, cls.source, ", ".join(f"{k}={v.default}" for k, v in _options(cls))]
        for name, cls in sorted(methods.items(), key=lambda item: (item[1].family, item[0]))
    ]
    out.print(_table(("method", "family", "source", "options"), rows, left=4))
    out.print("\nfedloom methods NAME shows one of them.")


def print_method(cls: type[MethodOptions], parts: Method) -> None:
    out.print(f"{cls.name} ({cls.family}; {cls.source})")
    out.print(" ".join((cls.__doc__ or "").split()))
    names = ["topology", "select", "local", "mix", "adapt"] + (["own"] if parts.own else [])
    rows = [[n, repr(getattr(parts, n))] for n in names]
    out.print(_table(("part", "choice"), rows, left=2))
    options = [[k, str(v.default), v.description or ""] for k, v in _options(cls)]
    if options:
        out.print(_table(("option", "default", "meaning"), options, left=3))
    else:
        out.print("No options.")
    if cls.fixed:
        fixed = ", ".join(f"{k}={v}" for k, v in cls.fixed.items())
        out.print(f"Fixed by definition: {fixed}.")


def print_manifest(manifest: Manifest, of: str) -> None:
    """What leaves a client, what stays with it and what the server keeps."""
    rows = []
    for title, lines in manifest.plain().items():
        if not lines:
            rows.append([title, "nothing", "", ""])
        for i, line in enumerate(lines):
            size = amount(float(line["bytes"])) if "bytes" in line else ""
            rows.append(["" if i else title, str(line["name"]), str(line["what"]), size])
    out.print(_table(("", "name", "what", f"bytes ({of})"), rows, left=3))


def _options(cls: type[MethodOptions]) -> list[tuple[str, Any]]:
    return list(cls.model_fields.items())


def print_networks(networks: Mapping[str, type[Network]]) -> None:
    rows = [
        [
            name if cls.argument is None else f"{name}:{cls.argument.upper()}",
            cls.about,
            ", ".join(f"{k}={v.default}" for k, v in cls.model_fields.items() if not _required(v)),
        ]
        for name, cls in networks.items()
    ]
    out.print(_table(("topology", "who is linked", "options"), rows, left=3))
    out.print("\nfedloom topology NAME,option=value simulates one.")


def _required(field: Any) -> bool:
    return bool(field.is_required())


def print_contacts(report: ContactReport, spec: str) -> None:
    """What the mobility did: means over the rounds."""
    table, gaps = report.table, report.gaps
    rows = [
        ("nodes, rounds", f"{report.nodes}, {len(report.rounds)}"),
        ("nodes met per node and round", f"{table['degree'].mean():.2f}"),
        ("isolated nodes", percent(table["isolated"].mean())),
        ("contacts per round", f"{table['contacts'].mean():.1f}"),
        ("groups of linked nodes", f"{table['components'].mean():.1f}"),
        ("pairs that ever met", percent(report.met)),
    ]
    if len(gaps):
        spread = f"mean {gaps.mean():.1f}, median {np.median(gaps):.0f}, longest {gaps.max()}"
        rows.append(("rounds until two meet again", spread))
    out.print(_table((f"topology {spec}", ""), rows))


def print_datasets(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [*(head for head in rows[0] if head != "what"), "what"]  # the widest column last
    table = [[str(row[head]) for head in heads] for row in rows]
    if out.width < _WIDE:
        out.print(_table(heads[:-1], [row[:-1] for row in table], left=2, whole=len(heads) - 1))
        out.print()
        out.print(_table(("name", "what"), [[row[0], row[-1]] for row in table], whole=1))
    else:
        out.print(_table(heads, table, left=2, whole=len(heads) - 1))
    out.print("\nFetch one with: fedloom data fetch NAME")


def _outputs(dataset: Dataset) -> str:
    """What a model returns."""
    word = _OUTPUTS.get(dataset.task.name, "classes")
    return word if dataset.n_classes != 1 else word.removesuffix("s")


def print_partition(dataset: Dataset, parts: Partition, spec: str) -> None:
    training, test = dataset.training_rows, len(dataset.y_test) + len(dataset.held_out)
    s = parts.summary(dataset.strata, dataset.n_strata, training)
    out.print(
        f"{dataset.name}: {len(training)} training and {test} test {noun(dataset.x.shape)} of "
        f"shape {'×'.join(map(str, dataset.shape))}, {dataset.n_classes} "
        f"{_outputs(dataset)}, for {dataset.task.name}"
    )
    rows = [
        ("clients", str(s["clients"])),
        ("samples dealt", f"{s['samples_used']} of {s['samples_total']}"),
        ("per client", _spread(s, "size", ("min", "mean", "std", "max"))),
    ]
    if dataset.task.by_class:
        rows += [
            ("classes per client", _spread(s, "classes", ("min", "mean", "max"))),
            ("label skew (0 none, 1 all)", f"{s['label_distance']:.3f}"),
        ]
    out.print(_table((f"partition {spec}", ""), rows))
    if parts.names:
        held = [f"{n} ({size})" for n, size in zip(parts.names, parts.sizes, strict=True)]
        out.print(f"clients and their samples: {_some(held, most=12)}", soft_wrap=True)
    for note in parts.note:
        out.print(f"note: {note}")


def _spread(summary: Mapping[str, Any], name: str, measures: Sequence[str]) -> str:
    return ", ".join(f"{m} {summary[f'{name}_{m}']:.4g}" for m in measures)


def print_models(known: Mapping[str, str]) -> None:
    out.print(_table(("model", "what"), [[name, what] for name, what in known.items()], left=2))


def print_blueprint(
    name: str, shape: tuple[int, int, int], capacity: float, batch: int, found: Blueprint
) -> None:
    kept = {layer: f"{k} of {n}" for layer, k, n in found.groups}
    rows = [
        [layer.name, layer.kind, kept.get(layer.name, ""), "×".join(map(str, layer.output)),
         f"{layer.parameters:,}", amount(layer.macs, "MAC")]
        for layer in found.layers
    ]  # fmt: skip
    out.print(f"{name} for images of {'×'.join(map(str, shape))}, capacity {capacity:g}")
    heads = ("layer", "kind", "channels kept", "output", "parameters", "forward")
    out.print(_table(heads, rows, left=2))
    whole, part = found.whole, found.part
    totals = [
        ["parameters", f"{part.parameters:,}", f"{whole.parameters:,}",
         _share(part.parameters, whole.parameters)],
        ["MACs of a sample, forward", amount(part.forward, "MAC"), amount(whole.forward, "MAC"),
         _share(part.forward, whole.forward)],
        ["MACs of a sample, training", amount(part.training, "MAC"), amount(whole.training, "MAC"),
         _share(part.training, whole.training)],
        [f"memory of a training step, batch {batch}", amount(part.memory), amount(whole.memory),
         _share(part.memory, whole.memory)],
    ]  # fmt: skip
    out.print(_table(("", "this", "whole model", "share"), totals))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
