"""Measure: contestants take turns round by round, every one in a process of its own.

    python -m benchmarks [--repeats 2] [--only mlp,growth] [--against CHECKOUT] [--kernels torch]
                         [--out runs/bench]

Prints seconds per round with the ratio to the best peer (or, without peers, to the bare loop),
GFLOP/s against what the cores could do, start-up and memory; checks that all trained to the same
weights; writes results.json and bench.png. With `pip install -e ".[bench]"` pfl and Flower take
part. With --against, so does the fedloom of another checkout, and the ratio to it is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import devices, peak, relay, similarity
from benchmarks.workloads import FOLDER, dataset, workload_named
from fedloom.engine.choose import cores
from fedloom.experiment.setup import has_bf16

OURS = {
    "mlp": ["fedloom:serial", "fedloom:processes"],
    "lenet": ["fedloom:serial", "fedloom:processes"],
    "lenet-28": ["fedloom:serial", "fedloom:processes"],
    "conv4": ["fedloom:serial", "fedloom:processes", "fedloom:processes:0:bf16"],
    "fedmeta-per": ["fedloom:serial", "fedloom:processes"],
    "fedrolex": ["fedloom:serial", "fedloom:processes"],
    "feddse": ["fedloom:serial", "fedloom:processes"],
    "fedswap": ["fedloom:serial", "fedloom:processes"],
    "feddom": ["fedloom:serial", "fedloom:processes"],
}
OURSELVES, BEFORE = "fedloom:", "before:"  # this checkout and the one of --against
PEERS_IN = ("mlp", "lenet", "lenet-28", "conv4")  # what pfl and Flower can do out of the box
SAME = 1e-3  # relative distance
SLOWER = 0.03  # than the other checkout, that is worth a word
#: workload → turns, and rounds in a turn: about a second of fedloom
TURNS = {"mlp": (5, 25), "lenet": (5, 4), "lenet-28": (5, 7), "conv4": (3, 1),
         "fedmeta-per": (5, 6), "fedrolex": (3, 1), "feddse": (3, 1), "fedswap": (3, 3),
         "feddom": (3, 2)}  # fmt: skip
GROWTH = {
    "registered clients": [("small", {"clients": 10**k}) for k in range(2, 7)],
    "participants": [("small", {"participants": n}) for n in (10, 20, 40, 80)],
    "hidden units": [(f"mlp-{width}", {}) for width in (50, 200, 800, 3200)],
    "nodes (feddom)": [
        ("feddom", {"clients": n, "participants": n}) for n in (25, 50, 100, 200, 1000)
    ],
}

ROOT = Path(__file__).resolve().parents[1]

Run = dict[str, Any]


class Contest:
    """A contestant in a process of its own, which waits for its turn after every round.
    One that is called `before:...` is fedloom's in the checkout `against`."""

    def __init__(
        self, name: str, workload: str, rounds: int, against: Path | None = None, **sizes: int
    ) -> None:
        self._name, self._folder = f"{name} on {workload}", tempfile.TemporaryDirectory()
        self._weights, self._log = (Path(self._folder.name) / n for n in ("weights.npy", "log"))
        self._source, where = None, dict(os.environ)
        where.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages keep theirs in any case
        contestant = name.replace(BEFORE, OURSELVES)
        if against is not None and name.startswith(BEFORE):
            self._source = against / "src"
            where["PYTHONPATH"] = os.pathsep.join([str(self._source), str(ROOT)])
        words = [sys.executable, "-m", "benchmarks.contest", contestant, workload, "--turns"]
        words += ["--rounds", str(rounds + 1), "--weights", str(self._weights)]
        for name, value in sizes.items():
            words += [f"--{name}", str(value)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                words, env=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip
        self._line()  # the end of round 1: from now on it waits

    def turn(self) -> str:
        """One more round; returns what the contestant says after it."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._line()

    def end(self, last: str) -> tuple[Run, np.ndarray]:
        self._process.wait()
        weights = np.load(self._weights)
        self._folder.cleanup()
        run = json.loads(last)
        if self._source is not None and Path(run["source"]).parent != self._source:
            raise SystemExit(f"{self._name} ran {run['source']}, not the one in {self._source}.")
        return run, weights

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} failed:\n{self._log.read_text()[-2000:]}")
        return line


def contest(contestant: str, workload: str, rounds: int, **sizes: int) -> tuple[Run, np.ndarray]:
    """One contestant alone."""
    alone = Contest(contestant, workload, rounds, **sizes)
    for _ in range(rounds):
        last = alone.turn()
    return alone.end(last)


def peers() -> list[str]:
    found = []
    if importlib.util.find_spec("pfl"):
        found += ["pfl-1", "pfl-2"]
    if importlib.util.find_spec("flwr"):
        found.append("flower")
    return found


def measure(
    workload: str,
    repeats: int,
    against: Path | None = None,
    kernels: str | None = None,
    **sizes: int,
) -> dict[str, list[Run]]:
    """All contestants on a workload, a few rounds each in turn, so that whatever else slows the
    machine down for a while slows all of them down."""
    ours = [n for n in OURS[workload] if "bf16" not in n or has_bf16(torch.device("cpu"))]
    before = [] if against is None else [counterpart(n) for n in ours]
    ours += [] if kernels is None else [f"{OURSELVES}serial:0:fp32:{kernels}"]
    names = ["bare-1", "bare-2", *(peers() if workload in PEERS_IN else []), *ours, *before]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(repeats):
        print(f"  {workload}, {turn + 1} of {repeats}: starting", file=sys.stderr)
        turns, rounds = TURNS[workload]
        contests = {
            name: Contest(name, workload, turns * rounds, against, **sizes) for name in names
        }
        last: dict[str, str] = {}
        for _ in range(turns):
            for name in names:
                for _ in range(rounds):
                    last[name] = contests[name].turn()
        moved = workload_named(workload).trainable  # batch statistics are each one's own affair
        reference: np.ndarray | None = None
        allowed = SAME
        for name in names:
            run, weights = contests[name].end(last[name])
            print(f"    {name}: {seconds(run):.4f} s", file=sys.stderr)
            runs[name].append(run)
            reference = weights if reference is None else reference
            run["off"] = off = distance(weights[:moved], reference[:moved])
            if name == "bare-2":  # sums in another order drift apart: this shows how far
                allowed = max(SAME, 10 * off)
            elif name != "bare-1" and _must_agree(name) and off > allowed:
                raise SystemExit(f"{name} ended {off:.2g} away from the bare loop's weights.")
    return runs


def _must_agree(name: str) -> bool:
    """The other checkout may have meant something else; the table shows how far off it is."""
    return "bf16" not in name and not name.startswith(BEFORE)


def distance(weights: np.ndarray, reference: np.ndarray) -> float:
    """Of two models, relative to their length."""
    return float(np.linalg.norm(weights - reference) / np.linalg.norm(reference))


def seconds(run: Run) -> float:
    return statistics.median(run["rounds"])


def counterpart(name: str) -> str:
    """The same contestant in the other checkout, which may have one kind of kernels only."""
    *given, kernels = name.split(":")
    return ":".join(given[:2] if len(given) == 4 else [*given, kernels]).replace(OURSELVES, BEFORE)


def cores_of(name: str) -> int:
    """How many cores a contestant may use."""
    family, _, rest = name.partition(":")
    engine, _, workers = rest.partition(":")
    alone = family == "bare-1" or engine == "serial" or workers.partition(":")[0] == "1"
    return 1 if alone else cores()


def table(runs: dict[str, list[Run]], rounds: int, peak: float) -> list[dict[str, Any]]:
    """Medians over turns; a ratio is of two contestants in the same turn of some rounds. All do the
    multiply-accumulates that fedloom counts, two operations each; `peak` is of one core."""
    times = {
        name: np.median(_seconds(mine).reshape(-1, rounds), axis=1) for name, mine in runs.items()
    }
    peer_names = [n for n in runs if n in ("pfl-1", "pfl-2", "flower")] or ["bare-1", "bare-2"]
    best = min(peer_names, key=lambda n: float(np.median(times[n])))
    counted = next(mine for name, mine in runs.items() if name.startswith(OURSELVES))
    macs = np.concatenate([r["macs"] for r in counted])
    rows = []
    for name, mine in runs.items():
        low, middle, high = np.quantile(times[best] / times[name], [0.25, 0.5, 0.75])
        row = {
            "contestant": name,
            "seconds": float(np.median(times[name])),
            "speed": float(middle),
            "speed_range": (float(low), float(high)),
            "bare": float(np.median(times[name] / times["bare-1"])),
            "gflops": (each := 2e-9 * float(np.median(macs / _seconds(mine)))),
            "of_peak": each / (peak * cores_of(name)),
            "startup": statistics.median(r["startup"] for r in mine),
            "memory": max(r["peak_memory"] for r in mine),
            "off": max(r["off"] for r in mine),
        }
        if "flower" in times:
            row["flower"] = float(np.median(times["flower"] / times[name]))
        before = counterpart(name)
        if before != name and before in times:
            row["before"] = np.quantile(times[before] / times[name], [0.25, 0.5, 0.75]).tolist()
        rows.append(row)
    return rows


def _seconds(runs: list[Run]) -> np.ndarray:
    return np.concatenate([run["rounds"] for run in runs])


def show(workload: str, rows: list[dict[str, Any]]) -> None:
    against = "best peer" if any(r["contestant"] == "flower" for r in rows) else "best bare loop"
    print(f"\n{workload}: speed against the {against}, with quartiles over turns")
    print(
        f"{'':<26}{'s/round':>9} {'speed':>7} {'':<15}{'/bare-1':>8}{'GFLOP/s':>9}{'of peak':>9}"
        f"{'start':>8}{'MB':>7}{'off':>9}"
    )
    for r in rows:
        low, high = r["speed_range"]
        print(
            f"{r['contestant']:<26}{r['seconds']:>9.4f} {r['speed']:>6.2f}× "
            f"({low:.2f} – {high:.2f}) {r['bare']:>7.2f}{r['gflops']:>9.1f}{r['of_peak']:>9.0%}"
            f"{r['startup']:>7.1f}s{r['memory'] / 1e6:>7.0f}{r['off']:>9.1e}"
        )
    for r in (r for r in rows if "before" in r):
        low, middle, high = r["before"]
        slower = ": slower" if middle < 1 - SLOWER else ""
        print(
            f"{r['contestant']} against the other checkout: {middle:.3f}× as fast "
            f"({low:.3f} – {high:.3f}){slower}"
        )


def growth() -> dict[str, list[dict[str, Any]]]:
    """Seconds and memory per round against sizes, with the engine that `auto` picks."""
    out: dict[str, list[dict[str, Any]]] = {}
    for title, cases in GROWTH.items():
        print(f"\n{title:<20}{'s/round':>9}{'MB':>7}")
        out[title] = []
        for workload, sizes in cases:
            run, _ = contest("fedloom:auto", workload, 20 if workload == "small" else 5, **sizes)
            size = next(iter(sizes.values()), None) or int(workload.split("-")[1])
            out[title].append({"size": size, "seconds": seconds(run), "memory": run["peak_memory"]})
            print(f"{size:<20,}{seconds(run):>9.4f}{run['peak_memory'] / 1e6:>7.0f}")
    print(f"\n{'workers (lenet)':<20}{'s/round':>9}{'MB':>7}")
    out["workers"] = []
    for workers in (1, 2):
        run, _ = contest(f"fedloom:processes:{workers}", "lenet", 4)
        out["workers"].append(
            {"size": workers, "seconds": seconds(run), "memory": run["peak_memory"]}
        )
        print(f"{workers:<20}{seconds(run):>9.4f}{run['peak_memory'] / 1e6:>7.0f}")
    return out


def plot(tables: dict[str, list[dict[str, Any]]], file: Path) -> None:
    from fedloom.report.plots import COLOURS, new_figure, save

    figure = new_figure(4.5 * len(tables), 3.6)
    for axis, (workload, rows) in zip(
        figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True
    ):
        rows = rows[::-1]
        ours = [COLOURS[0] if r["contestant"].startswith("fedloom") else "#999999" for r in rows]
        axis.barh([r["contestant"] for r in rows], [r["seconds"] for r in rows], color=ours)
        axis.set(title=workload, xlabel="seconds per round")
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    everything = ",".join([*OURS, "devices", "similarity", "relay", "growth"])
    parser.add_argument("--only", default=everything)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--against", type=Path, help="another checkout, run in the same turns")
    parser.add_argument("--kernels", help="such as torch: one more serial fedloom, with these")
    parser.add_argument("--samples", type=int, help="of a client, in place of the workloads' own")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if wrong := sorted(set(chosen) - set(everything.split(","))):
        raise SystemExit(f"There is no {', '.join(wrong)} to measure. Choose from {everything}.")
    against = None if args.against is None else args.against.resolve()
    if against is not None and not (against / "src" / "fedloom").is_dir():
        raise SystemExit(f"'{against}' is not a checkout of fedloom: it has no src/fedloom.")
    sizes = {} if args.samples is None else {"samples": args.samples}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        run(args.repeats, chosen, args.out, against, args.kernels, sizes)


def run(
    repeats: int,
    chosen: list[str],
    out: Path,
    against: Path | None,
    kernels: str | None,
    sizes: dict[str, int],
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    tables = {}
    for workload in (w for w in OURS if w in chosen):
        dataset(replace(workload_named(workload), **sizes))
        best = peak.measure()
        results[workload] = measure(workload, repeats, against, kernels, **sizes)
        best = max(best, peak.measure(), key=lambda found: found.gflops)  # before and after
        results.setdefault("peak", {})[workload] = asdict(best)
        tables[workload] = table(results[workload], TURNS[workload][1], best.gflops)
        show(workload, tables[workload])
        print(f"Peak of one core: {best.gflops:.0f} GFLOP/s, by {best.how}")
    if "devices" in chosen:
        results["devices"] = devices.measure()
        devices.show(results["devices"])
    if "similarity" in chosen:
        results["similarity"] = similarity.measure()
        similarity.show(results["similarity"])
    if "relay" in chosen:
        results["relay"] = relay.measure()
        relay.show(results["relay"])
    if "growth" in chosen:
        results["growth"] = growth()
    (out / "results.json").write_text(json.dumps({**results, "tables": tables}, indent=1))
    if tables:
        plot(tables, out / "bench.png")
    print(f"\nWritten to {out}")


if __name__ == "__main__":
    main()
