"""From runs, comparisons and studies to the pages that show them."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.compare import SURE, Comparison
from fedloom.experiment.config import as_words
from fedloom.experiment.result import Result
from fedloom.files import atomic_file
from fedloom.report.cost_plot import Spot
from fedloom.report.html import Dot, Grid, Held, Line, Page, Panel, Picture
from fedloom.tasks import Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedloom.experiment.study import Ask, Study, Table

_AXES = {"round": "round", "MB": "MB sent and received", "s": "seconds of computing"}
_MOST_SKIPPED = 50  # rows of a table of messages left out
_MOST_LINES = 32  # curves that can be told apart
_MOST_DRAWN = 2  # networks, and methods that swap, that have a picture
_MOST_FILM, _MOST_NODES = 200, 1000  # rounds and nodes of a film strip
_LARGEST = 1_500_000  # bytes of a drawing that is kept as lines


def _panels_of(measure: Measure) -> dict[str, tuple[str, str, float]]:
    """Column → title, unit, factor."""
    scored = {
        f"test_{measure.name}": "Common test set",
        "macro": "Clients' own test data",
        "worst10": "Worst 10 % of clients",
        "new_macro": "Newcomers",
    }
    return {
        **{name: (title, measure.axis, measure.factor) for name, title in scored.items()},
        "test_loss": ("Loss on the common test set", "loss", 1.0),
        "train_loss": ("Training loss", "loss", 1.0),
        "divergence": ("How far apart the trained models are", "‖w_k − w̄‖", 1.0),
        "degree": ("Nodes met in a round", "nodes", 1.0),
        "known": ("Nodes whose models a node has", "nodes", 1.0),
        "dominating": ("Size of the dominating sets", "nodes", 1.0),
    }


def run_page(run: Result) -> Page:
    """One run."""
    name, done = str(run.config["method"]), run.summary
    measure = run.measures[0]
    tested = f"test_{measure.name}"
    score = _first(done, "macro", tested)
    reached = f" reaches {_reached(measure, done[score])} {_called(score)}" if score else " ran"
    unfinished = "" if done["rounds"] == done["rounds_asked"] else " so far"
    results = {name: [run]}
    keys = [k for k in (tested, "macro", "worst10", "best10", "new_macro") if k in done]
    others = [m for m in run.measures[1:] if f"test_{m.name}" in done]
    alike = {m.unit for m in (measure, *others)} == {measure.unit} != {""}
    named = "" if alike else f", {measure.axis}"  # else a unit at the head would not hold for all
    rows = [(_SCORE_NAMES.get(k, "common test set") + named, measure.number(done[k])) for k in keys]
    rows += [(f"common test set, {m.axis}", m.number(done[f"test_{m.name}"])) for m in others]
    table = Grid(("score", measure.unit if alike else "value"), rows)
    page = _page(
        f"{name} on {run.config['data']}",
        f"After {done['rounds']} rounds{unfinished}, {name}{reached}, with "
        f"{done.get('bytes', 0) / 1e6:,.1f} MB of traffic.",
        results,
    )
    page.table = table if keys else None
    page.commands = [_again(run)]
    return page


def comparison_page(comparison: Comparison) -> Page:
    """Several methods side by side."""
    config = next(iter(comparison.results.values()))[0].config
    page = _page(
        f"{len(comparison.results)} methods on {config['data']}",
        headline(comparison),
        comparison.results,
    )
    page.table = Grid(*comparison.marked(), marked=True)
    page.remarks = [*comparison.remarks(), *comparison.marks()]
    page.by_method = comparison.remarks_by_method()
    if comparison.diverged:
        lost = [(method, why) for method, why in comparison.diverged.items()]
        page.tables = {"Not in the table": Grid(("method", "why"), lost), **page.tables}
    page.commands = _commands(comparison)
    return page


def study_page(
    study: Study, ask: Ask, tables: Sequence[Table], pictures: Mapping[str, Picture], results: Any
) -> Page:
    """A study: its own tables and figures, and beside them what all reports of runs have."""
    grids = {table.title: Grid(table.heads, [list(row) for row in table.rows]) for table in tables}
    runs = [run for found in results.values() for run in found]
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}; numbers are {ask.over}"
    count += " (divided by n)." if ask.seeds > 1 else "."
    if not runs or len(results) > _MOST_LINES:
        page = Page(study.title, count, study.about(ask), made=_made(runs), folders=_folders(runs))
    else:
        page = _page(study.title, count, results)
        page.about = study.about(ask)
        page.settings = {}
        if len(results) > 1 and _comparable(results):
            comparison = Comparison(dict(results), runs[0].path.parent)
            page.headline = f"{headline(comparison)} {count}"
            page.table = Grid(*comparison.marked(), marked=True)
            page.remarks = [*comparison.remarks(), *comparison.marks()]
    page.tables = {**grids, **page.tables}
    page.pictures = {**pictures, **page.pictures}
    page.commands = [study.command(ask)]
    return page


def _comparable(results: Mapping[str, Sequence[Result]]) -> bool:
    """Whether all runs are on the same data, dealt alike, so that one can be ahead of another."""
    keys = ("data", "data_options", "partition", "clients", "data_share", "test_share", "score_on")
    dealt = {
        str([run.config.get(key) for key in keys]) for runs in results.values() for run in runs
    }
    return len(dealt) == 1


def write_page(page: Page, file: str | Path, figures: str | Path | None = None) -> Path:
    """Write a page, and its figures for print if a folder is named for them."""
    from fedloom.report.html import render

    report = Path(file)
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(report) as part:
        part.write_text(render(page, report.parent), encoding="utf-8")
    if figures is not None:
        from fedloom.report.figures import write_figures

        write_figures(page, Path(figures))
    return report


def headline(comparison: Comparison) -> str:
    """Who leads, by how much, how sure."""
    table = comparison.table
    score = next((s for s in comparison.scores if s in table and table[s].notna().any()), "")
    if not score:
        return "None of these runs has been scored."
    measure = next(iter(comparison.results.values()))[0].measures[0]
    order = table[score].sort_values(ascending=measure.lower, kind="stable").index.tolist()
    best = f"{order[0]} reaches {_reached(measure, table[score][order[0]])} {_called(score)}"
    if len(order) == 1:
        return f"{best}."
    lead = measure.factor * abs(table[score][order[0]] - table[score][order[1]])
    by = f"{lead:.2f} points" if measure.share else f"{lead:.3g}"
    seeds = len(comparison.results[order[0]])
    p = comparison.chance(order[0], order[1], score)
    if not np.isfinite(p):
        sure = "one seed: run more seeds to see how sure that is"
    elif p < SURE:
        sure = f"a clear lead over {seeds} seeds, p = {p:.2g}"
    else:
        sure = f"not a clear lead over {seeds} seeds, p = {p:.2g}"
    return f"{best}, {by} ahead of {order[1]} ({sure})."


def _reached(measure: Measure, value: float) -> str:
    """A score in a sentence: accuracies go without saying."""
    return measure.text(value) if measure.share else f"{measure.called} {measure.text(value)}"


_SCORE_NAMES = {
    "macro": "clients, mean", "worst10": "clients, worst 10 %",
    "best10": "clients, best 10 %", "new_macro": "newcomers, mean",
}  # fmt: skip


def _called(score: str) -> str:
    return "on the clients' own test data" if score == "macro" else "on the common test set"


def _first(found: Mapping[str, Any], *names: str) -> str:
    return next((name for name in names if name in found), "")


def _page(title: str, says: str, results: Mapping[str, Sequence[Result]]) -> Page:
    """What pages of runs have in common."""
    config = next(iter(results.values()))[0].config
    runs = [run for found in results.values() for run in found]
    seeds = len(next(iter(results.values())))
    page = Page(
        title=title,
        headline=says,
        about=f"{config['data']}, {config['clients']} clients, partition {config['partition']}, "
        f"{config['rounds']} rounds, {seeds} seed{'s' if seeds > 1 else ''}",
        methods=list(results),
        axes=_AXES,
        panels=_panels(results),
        band=f"Lines are means over {seeds} seeds, bands the range from the lowest to the highest."
        if seeds > 1
        else "One seed: lines without a band.",
        held=_held(runs[0]),
        pictures=_drawings(results),
        tables={**_capacities(results), **_left_out(results), **_manifests(results)},
        made=_made(runs),
        folders=_folders(runs),
        settings={k: str(v) for k, v in config.items() if k not in ("method", "params", "seed")},
    )
    page.measure = runs[0].measures[0]
    page.dots = {name: dots for name, found in results.items() if (dots := _dots(found[0]))}
    adapts = any(dot.before is not None for dots in page.dots.values() for dot in dots)
    before = "; hollow dots are before adapting" if adapts else ""
    page.dots_note = (
        f"One dot is one client of seed {config['seed']}, with its {page.measure.axis} on its own "
        f"test data{before}. Point at one to see who it is."
    )
    page.costs = {name: spot for name, found in results.items() if (spot := _spot(name, found))}
    page.cost_unit = "MB sent and received, all rounds"
    score = _first(runs[0].summary, "macro", f"test_{page.measure.name}")
    page.cost_score = page.measure.heading("client" if score == "macro" else "test")
    return page


def _panels(results: Mapping[str, Sequence[Result]]) -> list[Panel]:
    out = []
    measure = next(iter(results.values()))[0].measures[0]
    known = _panels_of(measure)
    runs_of = [run for runs in results.values() for run in runs]
    own = dict.fromkeys(name for run in runs_of for name in run.metrics if name not in known)
    known |= {name: (f"{name} (reported by the method)", name, 1.0) for name in own}
    for column, (title, unit, factor) in known.items():
        lines = {}
        for name, runs in results.items():
            frames = [_scored(run, column) for run in runs]
            if any(frame.empty for frame in frames):
                continue
            common = sorted(set.intersection(*(set(f["round"]) for f in frames)))
            at = [f.set_index("round").loc[common] for f in frames]
            values = factor * np.stack([f[column].to_numpy(float) for f in at])
            lines[name] = Line(
                {"round": [float(t) for t in common],
                 **{key: np.mean([f[key] for f in at], axis=0).tolist() for key in ("MB", "s")}},
                values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist(),
            )  # fmt: skip
        if lines:
            out.append(Panel(title, unit, lines))
    return out


def _scored(run: Result, column: str) -> pd.DataFrame:
    """Rounds in which there is this score, with what was spent until then."""
    rounds = run.rounds
    if column not in rounds:
        return rounds.iloc[:0]
    spent = rounds.assign(
        MB=(rounds["bytes_up"] + rounds["bytes_down"]).cumsum() / 1e6, s=rounds["seconds"].cumsum()
    )
    return spent[spent[column].notna()]


def _dots(run: Result) -> list[Dot]:
    table = run.clients
    if not len(table):
        return []
    last = table[(table["round"] == table["round"].max()) & (table["population"] == "local")]
    out, measure = [], run.measures[0]
    classes = (run.store.facts().get("partition") or {}).get("classes") or ()
    scored = last[(last["samples"] > 0) & last[measure.name].notna()]
    for row in scored.to_dict("records"):
        before = row.get(f"{measure.name}_before")
        before = None if before is None or np.isnan(before) else float(before)
        who = run.called(int(row["client"]))
        says = f"client {who}: {_short(measure, row[measure.name])}"
        says += "" if before is None else f" (before adapting {_short(measure, before)})"
        says += f", {row['train_samples']} samples"
        if "main_class" in row:
            main = int(row["main_class"])
            says += f", mostly class {classes[main] if main < len(classes) else main}"
        out.append(Dot(float(row[measure.name]), before, says, who))
    return out


def _short(measure: Measure, value: float) -> str:
    return f"{100 * value:.1f} %" if measure.share else measure.text(value)


def _spot(name: str, runs: Sequence[Result]) -> Spot | None:
    measure = runs[0].measures[0]
    score = _first(runs[0].summary, "macro", f"test_{measure.name}")
    if not score or "bytes" not in runs[0].summary:
        return None
    cost = float(np.mean([run.summary["bytes"] for run in runs])) / 1e6
    value = float(np.mean([run.summary[score] for run in runs]))
    return Spot(cost, value, f"{name}: {measure.text(value)} for {cost:,.1f} MB")


def _capacities(results: Mapping[str, Sequence[Result]]) -> dict[str, Grid]:
    rows, measure = [], next(iter(results.values()))[0].measures[0]
    for name, runs in results.items():
        for capacity, row in runs[0].devices.iterrows():
            scores = [measure.number(row.get(k)) for k in ("macro", f"capacity_{measure.name}")]
            rows.append([name, f"{capacity:g}", f"{row['parameters']:,.0f}",
                         f"{row['macs'] / 1e6:,.1f}", *scores])  # fmt: skip
    heads = ("method", "capacity", "parameters", "MMAC a round", measure.heading("shared model:"),
             measure.heading("sub-model:"))  # fmt: skip
    return {"Weak and strong devices": Grid(heads, rows)} if rows else {}


def _left_out(results: Mapping[str, Sequence[Result]]) -> dict[str, Grid]:
    """Who sent what was not used, how often, and why the first time."""
    rows = []
    for name, runs in results.items():
        for run in runs:
            for client, found in run.skipped.groupby("client"):
                rows.append([name, str(run.config["seed"]), run.called(int(str(client))),
                             str(len(found)), str(found.iloc[0]["reason"])])  # fmt: skip
    heads = ("method", "seed", "client", "messages", "why, the first time")
    most = rows[:_MOST_SKIPPED]
    more = len(rows) - len(most)
    title = "Messages left out" + (f" (the first {len(most)} of {len(rows)})" if more else "")
    return {title: Grid(heads, most)} if rows else {}


def _held(run: Result) -> Held | None:
    found = run.store.facts().get("partition")
    if not found or not found.get("held"):
        return None
    return Held(found["classes"], found["held"], run.names, int(run.config["clients"]))


def _folders(runs: Sequence[Result]) -> dict[str, Path]:
    return {str(run.path): run.path for run in runs}


def _drawings(results: Mapping[str, Sequence[Result]]) -> dict[str, Picture]:
    """What methods have of their own: swaps and similarity, the network of the nodes."""
    out: dict[str, Picture] = {}
    networks: set[str] = set()
    for name, (run, *_) in results.items():
        whose = f", {name}, seed {run.config['seed']}" if len(results) > 1 else ""
        if len(run.swaps) and sum("swaps" in title for title in out) < _MOST_DRAWN:
            table = run.swaps
            out[f"Similarity and swaps{whose}"] = drawn(
                run.plot_swaps(), list(table.columns), table.to_numpy().tolist()
            )
        where = str([run.config.get(k) for k in ("topology", "faults", "clients", "seed")])
        chooses = "dominating" in run.rounds
        shown = sum("network" in title for title in out) >= _MOST_DRAWN
        if "contacts" in run.rounds and not shown and (chooses or where not in networks):
            networks.add(where)
            picture = _network(run)
            out |= {} if picture is None else {f"The network{whose}": picture}
    return out


def _network(run: Result) -> Picture | None:
    """A film strip of the nodes, with rings around those in dominating sets."""
    from fedloom.experiment.contacts import contacts_of, peers_of
    from fedloom.report.topology_plot import film_strip
    from fedloom.topology.report import ContactReport

    nodes, rounds = int(run.config["clients"]), min(len(run.records), _MOST_FILM)
    if nodes > _MOST_NODES or not rounds:
        return None
    peers = peers_of(run.config)
    try:
        met = [contacts_of(peers, run.config, t) for t in range(1, rounds + 1)]
    except FedloomError:  # a file of contacts that is not here
        return None
    found = ContactReport(nodes, met)
    chosen = {
        r["round"]: sorted({m for _, members in r["mix"]["dominating"] for m in members})
        for r in run.records[:rounds]
        if "dominating" in r.get("mix", {})
    }
    title = f"rounds 1 to {rounds}" + (", ringed: in a dominating set" if chosen else "")
    table = found.table
    return drawn(film_strip(found, peers.network, int(run.config["seed"]), title, chosen),
                 list(table.columns), table.to_numpy().tolist())  # fmt: skip


def drawn(
    figure: Figure,
    heads: Sequence[str] = (),
    rows: Sequence[Sequence[Any]] = (),
    *,
    lines: bytes | None = None,
) -> Picture:
    """A figure for a page: as lines (`lines`, if they are drawn already) where they are not too
    many, else as pixels."""
    import io

    def saved(kind: str) -> bytes:
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=110)
        return file.getvalue()

    lines = lines or saved("svg")
    if len(lines) <= _LARGEST:
        return Picture(lines, "svg", figure, heads, rows)
    return Picture(saved("png"), "png", figure, heads, rows)


def _manifests(results: Mapping[str, Sequence[Result]]) -> dict[str, Grid]:
    rows: list[list[str]] = []
    for name, runs in results.items():
        found = runs[0].store.manifest()
        for entry in found.get("leaves a client, each round") or ():
            size = f"{entry['bytes']:,}" if "bytes" in entry else ""
            shown = "" if any(row[0] == name for row in rows) else name  # once, in its first row
            rows.append([shown, f"{entry['name']}: {entry['what']}", size])
    heads = ("method", "what leaves a client", "bytes")
    return {"What leaves a client in a round": Grid(heads, rows)} if rows else {}


def _again(run: Result) -> str:
    """The command that does a run again."""
    return f"fedloom run --config {shlex.quote(str(run.path / 'config.yaml'))}"


def _commands(comparison: Comparison) -> list[str]:
    record = comparison.record
    if not record.own:  # made from runs that were there
        return [_again(run) for runs in comparison.results.values() for run in runs]
    words = ["fedloom compare", *map(shlex.quote, record.own), f"--seeds {record.seeds}"]
    words += [f"--seed {record.seed}"] if record.seed else []
    return [" ".join([*words, *(f"--set {shlex.quote(w)}" for w in as_words(record.asked))])]


def _made(runs: Sequence[Result]) -> dict[str, str]:
    import torch

    times = [
        run.store.rounds_file.stat().st_mtime for run in runs if run.store.rounds_file.exists()
    ]
    ended = f"{datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M}" if times else "–"
    found = {_versions(run.store.facts().get("versions") or {}): None for run in runs}
    now = {"fedloom": fedloom.__version__, "python": platform.python_version(),
           "torch": str(torch.__version__)}  # fmt: skip
    return {
        "runs ended": ended,
        "seeds": ", ".join(map(str, sorted({run.config["seed"] for run in runs}))),
        "run with": "; ".join(text for text in found if text) or "–",
        "report written with": _versions(now),
    }


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
