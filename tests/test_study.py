"""Studies: cells run once, in parallel, go on after a stop, and become tables and figures."""

import itertools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.config import make_config
from fedloom.experiment.forkserver import ForkServer
from fedloom.experiment.plugins import method_class
from fedloom.experiment.setup import placed
from fedloom.experiment.study import (
    Ask,
    Cell,
    Picture,
    Study,
    Table,
    run_study,
    together,
    write_report,
)
from fedloom.studies import STUDIES
from fedloom.studies.s0_swap import S0Swap, verdict
from fedloom.studies.s1 import LABELS, S1, SOURCE
from fedloom.studies.s1_when import best
from fedloom.studies.s4 import S4Why

pytestmark = pytest.mark.xdist_group("studies")  # they start processes, and share a finished study


class Toy(Study):
    name, title, data, presets = "toy", "A toy", ("digits",), ("plain", "wild")

    def cells(self, ask):
        common = {"clients": 4, "partition": "iid", "rounds": 2, "eval_every": 1}
        rate = 1e30 if ask.preset == "wild" else 0.1
        return [Cell("a", "fedavg", common), Cell("b", "local", {**common, "lr": rate})]

    def tables(self, ask, results):
        rows = [[n, f"{runs[0].summary['macro']:.3f}"] for n, runs in results.items()]
        return [Table("Accuracies", ["cell", "macro"], rows)]

    def pictures(self, ask, results):
        curves = {name: [r.evaluations for r in runs] for name, runs in results.items()}
        return [Picture("curves", "Curves", {"macro": "clients"}, curves)]


LONG = ["run", "fedavg", "--rounds", "100000", "--out", "long"]


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The toy study, run once for all who start from there."""
    out = tmp_path_factory.mktemp("toy") / "s"
    run_study(Toy(), Ask("digits", "plain"), out, 2, quiet)
    return out


def ran(study, ask):
    """A study's cells, one after the other in this process: for tests of what is made of them."""
    return {
        cell.name: [fedloom.run(cell.method, out=Path("s") / cell.name, **cell.settings)]
        for cell in study.cells(ask)
    }


def test_a_study_runs_its_cells_once_and_writes_what_it_found(in_tmp):
    ask, out = Ask("digits", "plain", seeds=2), Path("s")
    results = run_study(Toy(), ask, out, 2, quiet)
    assert {name: len(runs) for name, runs in results.items()} == {"a": 2, "b": 2}
    written = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    assert len(written) == 8  # the last two of each run
    again = run_study(Toy(), ask, out, 2, quiet)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")} == written
    assert again["a"][0].summary == results["a"][0].summary
    (table,) = write_report(Toy(), ask, results, out)
    assert table.markdown() in Path("s/tables.md").read_text()
    assert "scored on all of their test data." in Path("s/tables.md").read_text()
    assert Path("s/curves.png").stat().st_size > 5000
    alone = fedloom.run("fedavg", **Toy().cells(ask)[0].settings, workers=1)
    assert alone.clients.equals(results["a"][0].clients)


def test_a_cell_that_diverges_is_left_out_and_not_tried_again(in_tmp):
    ask = Ask("digits", "wild")
    assert set(run_study(Toy(), ask, Path("s"), 2, quiet)) == {"a"}
    file = Path("s/cells/b-s0.diverged")
    assert "Training diverged" in file.read_text()
    before = file.stat().st_mtime_ns
    assert set(run_study(Toy(), ask, Path("s"), 2, quiet)) == {"a"}
    assert file.stat().st_mtime_ns == before
    last = write_report(Toy(), ask, {}, Path("s"))[-1]
    assert last.title == "Runs that diverged"
    assert last.rows[0][0] == "b-s0"


def test_a_study_runs_the_cells_that_are_asked_for(in_tmp):
    results = run_study(Toy(), Ask("digits", "plain", only=("b*",)), Path("s"), 2, quiet)
    assert set(results) == {"b"}
    assert not Path("s/a-s0").exists()
    with pytest.raises(FedloomError, match="Unknown cell of this study 'c'"):
        run_study(Toy(), Ask("digits", "plain", only=("c",)), Path("s"), 2, quiet)
    # Those that were run before stay in the tables.
    results = run_study(Toy(), Ask("digits", "plain", only=("a",)), Path("s"), 2, quiet)
    assert list(results) == ["a", "b"]


def test_a_study_does_not_take_a_file_for_its_directory(in_tmp):
    Path("s").write_text("mine")
    with pytest.raises(FedloomError, match="'s' is a file"):
        run_study(Toy(), Ask("digits", "plain"), Path("s"), 2, quiet)
    assert Path("s").read_text() == "mine"


def test_cells_of_another_study_are_not_taken_for_ones_own(in_tmp, finished):
    shutil.copytree(finished, "s")

    class Other(Toy):
        def cells(self, ask):
            return [Cell("a", "fedavg", {"clients": 5, "partition": "iid", "rounds": 2})]

    with pytest.raises(FedloomError, match="clients=4, not 5"):
        run_study(Other(), Ask("digits", "plain"), Path("s"), 2, quiet)


@pytest.mark.parametrize(
    ("ask", "word"),
    [(Ask("mnits", "plain"), "data set"), (Ask("digits", "plan"), "Did you mean 'plain'"),
     (Ask("digits", "plain", "big"), "scale"), (Ask("digits", "plain", seeds=0), "seed")],
)  # fmt: skip
def test_wrong_wishes_are_refused(in_tmp, ask, word):
    with pytest.raises(FedloomError, match=word):
        run_study(Toy(), ask, Path("s"), 1, quiet)


def test_ctrl_c_ends_a_study_with_its_runs_and_the_same_command_goes_on(in_tmp, start_process):
    words = [sys.executable, "-m", "fedloom", "study", "s0-swap", "--data", "digits", "--out", "s"]
    process = start_process(words)
    while process.poll() is None and not list(Path("s").glob("*/rounds.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    done = {p: p.read_bytes() for p in Path("s").glob("*/rounds.jsonl")}
    time.sleep(0.3)
    assert {p: p.read_bytes() for p in Path("s").glob("*/rounds.jsonl")} == done


def test_runs_of_a_study_are_those_of_fedloom_run(in_tmp, finished):
    """They are forked from a process that has imported everything; nothing else may differ."""
    for name, (alone,) in ran(Toy(), Ask("digits", "plain")).items():
        forked = fedloom.load(finished / f"{name}-s0")
        before, after = (run.store.checkpoint()[0] for run in (alone, forked))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert forked.summary["macs"] == alone.summary["macs"]


def test_the_server_tells_how_its_processes_end(in_tmp):
    with ForkServer() as server:
        fails = server.start(["run", "no-such-method"], in_tmp / "fails.log")
        goes = server.start(
            ["run", "fedavg", "--rounds", "100000", "--out", "long"], in_tmp / "log"
        )
        assert fails.wait() == 2
        assert "no-such-method" in (in_tmp / "fails.log").read_text()
        while not Path("long/rounds.jsonl").exists():
            assert goes.poll() is None
            time.sleep(0.02)
        goes.terminate()
        assert goes.wait() == -signal.SIGTERM


def test_a_run_may_end_before_its_start_is_heard_of(in_tmp):
    class Late(ForkServer):
        def listen(self, wait=False):
            if wait:  # until the run that is waited for is over
                while "no-such" not in (in_tmp / "log").read_text():
                    time.sleep(0.02)
                time.sleep(0.5)
            return super().listen(wait)

    (in_tmp / "log").touch()
    with Late() as server:
        assert server.start(["run", "no-such-method"], in_tmp / "log").wait() == 2


def test_runs_end_with_who_asked_for_them(in_tmp):
    with ForkServer() as server:
        goes = server.start(
            ["run", "fedavg", "--rounds", "100000", "--out", "long"], in_tmp / "log"
        )
        while not Path("long/rounds.jsonl").exists():
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(goes.pid, 0)


def test_without_its_server_a_study_starts_runs_itself(in_tmp, monkeypatch):
    class Gone(ForkServer):
        def __init__(self):
            super().__init__()
            self._process.kill()
            self._process.wait()

    monkeypatch.setattr("fedloom.experiment.study.ForkServer", Gone)
    found = run_study(Toy(), Ask("digits", "plain"), in_tmp / "s", 2, quiet)
    assert len(found) == len(Toy().cells(Ask("digits", "plain")))


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_cell_of_every_study_is_a_valid_config(study):
    from fedloom.experiment.config import make_config
    from fedloom.experiment.plugins import method_class

    for data in study.data:
        for preset in study.presets:
            for scale in study.scales:
                try:
                    study.check(Ask(data, preset, scale))
                except FedloomError:
                    continue
                cells = study.cells(Ask(data, preset, scale))
                assert len({c.name for c in cells}) == len(cells)
                for cell in cells:
                    settings = {"method": cell.method, **cell.settings}
                    make_config(settings, method_class(cell.method))


def test_s2_ablations_are_shorter_below_full_scale():
    """And scored once, at the end, as only the final accuracy is shown."""
    for scale, rounds in (("quick", (200, 100)), ("medium", (200, 100)), ("full", (800, 800))):
        for name, expected in zip(("s2-low", "s2-rho"), rounds, strict=True):
            for cell in STUDIES[name].cells(Ask("mnist", "tuned", scale)):
                assert cell.settings["rounds"] == expected
                if name == "s2-rho":
                    assert cell.settings["eval_every"] == expected


def test_s2_at_medium_scale_has_the_source_network_and_images():
    of = {
        scale: STUDIES["s2-low"].cells(Ask("mnist", "tuned", scale))[0].settings
        for scale in ("quick", "medium", "full")
    }
    assert of["medium"]["model_options"] == of["full"]["model_options"] == {"norm": "static"}
    assert of["medium"]["data_options"] == of["full"]["data_options"] == {"size": 32}
    assert of["medium"]["steps"] == of["quick"]["steps"] == 20
    assert "steps" not in of["full"]
    with pytest.raises(FedloomError, match="digits"):
        STUDIES["s2-low"].check(Ask("digits", "tuned", "medium"))


def test_all_samples_have_a_place_in_the_picture_of_s2_samples():
    study, ask = STUDIES["s2-samples"], Ask("mnist", "tuned")
    places = [study.place(ask, value) for value in study.VALUES]
    assert places == sorted(set(places)) == [64, 128, 256, 512, 600]


def test_a_source_has_no_constants_for_other_data():
    with pytest.raises(FedloomError, match="--preset tuned"):
        S1().check(Ask("digits", "source"))


def test_the_source_numbers_stand_in_the_tables_of_s1():
    for data in ("mnist", "cifar10"):
        _, local, new = S1().tables(Ask(data, "source"), {})
        for table, population in ((local, "local"), (new, "new")):
            assert table.rows[0][0] == "majority class"
            shown = {row[0]: row[-1] for row in table.rows[1:]}
            for method, text in SOURCE[data, population].items():
                note = " (scored without the private heads)" if "fedper" in method else ""
                assert shown[LABELS[method]] == text.replace(" | ", ", ") + note
    lengths = {m: len(text.split(" | ")) for rows in SOURCE.values() for m, text in rows.items()}
    assert {m for m, n in lengths.items() if n != 5} == {"fedper", "fedper-meta"}


def test_s1_trains_alike_methods_once_and_has_rates_by_population():
    """Local and new clients are of separate runs where the source's rates differ."""
    cells = {c.name: c for c in S1().cells(Ask("mnist", "source", "full"))}
    assert set(cells) == {
        "fedavg-meta", "fedper-meta", "fedmeta-maml", "fedmeta-metasgd", "fedmeta-per-maml-local",
        "fedmeta-per-maml-new", "fedmeta-per-metasgd-local", "fedmeta-per-metasgd-new",
        "fedavg-iid", "centralised",
    }  # fmt: skip
    rates = {n: (c.settings["lr"], c.settings.get("alpha")) for n, c in cells.items()}
    assert rates["fedavg-meta"] == (1e-5, None)
    assert rates["fedmeta-metasgd"] == (2e-4, 1e-3)
    assert rates["fedmeta-per-maml-local"] == (1e-3, 1e-3)
    assert rates["fedmeta-per-maml-new"] == (3e-4, 1e-3)
    for name, cell in cells.items():
        assert cell.settings["optimiser"] == "adam"
        assert cell.settings["normalise"] == "pixel"
        assert (cell.settings["newcomers"] == 50) == (
            name not in ("fedavg-iid", "centralised") and not name.endswith("-local")
        )
    assert "fedmeta-metasgd-new" in {c.name for c in S1().cells(Ask("cifar10", "source"))}


def test_s1_shows_rows_of_both_kinds_and_where_the_source_ended(in_tmp):
    class Short(S1):
        def cells(self, ask):
            few = {"data": "digits", "clients": 10, "newcomers": 10, "rounds": 2, "eval_every": 1}
            return [
                Cell(c.name, c.method, {**c.settings, **few})
                for c in super().cells(ask)
                if c.name in ("fedavg-meta", "fedmeta-per-maml-new")
            ]

    ask = Ask("mnist", "source", "quick")
    results = ran(Short(), ask)
    reference, local, new = write_report(Short(), ask, results, Path("s"))
    plain = results["fedavg-meta"][0].summary
    rows = {row[0]: row for row in local.rows}
    assert rows["FedAvg"][2] == f"{100 * plain['before_micro']:.2f}"
    assert rows["FedAvg"][3] == f"{100 * plain['before_micro'] - 85.03:+.2f}"
    assert rows["FedAvgMeta"][2] == f"{100 * plain['micro']:.2f}"
    assert rows["majority class"][2] == f"{100 * plain['majority']:.2f}"
    assert rows["FedMeta-Per(MAML)"][2] == "–"  # its cell for local clients is another
    rows = {row[0]: row for row in new.rows}
    found = results["fedmeta-per-maml-new"][0].summary
    assert rows["FedMeta-Per(MAML)"][2] == f"{100 * found['new_micro']:.2f}"
    assert reference.rows[2][1] == f"{100 * plain['before_micro']:.2f}"
    first = S1().pictures(ask, results)[0]
    assert set(first.curves) == {"FedAvg", "FedAvgMeta"}
    assert first.marks["FedAvg"] == pytest.approx({"micro": 0.8503, "new_micro": 0.8392})
    assert first.curves["FedAvg"][0]["new_micro"].notna().all()
    assert Path("s/figure-5.1.png").stat().st_size > 5000


def test_the_best_methods_of_a_square_are_those_within_a_point():
    from types import SimpleNamespace as Run

    def runs(*scores):
        return [Run(summary={"micro": s, "new_micro": s, "majority": 0.5}) for s in scores]

    results = {
        "fedper-classes2-1": runs(0.9, 0.92), "ditto-classes2-1": runs(0.905, 0.905),
        "fedavg-classes2-1": runs(0.7, 0.8), "local-classes2-1": runs(0.99, 0.99),
    }  # fmt: skip
    ask = Ask("digits", "tuned")
    local, new = (best(ask, results, p, "classes:2", 1.0) for p in ("local", "new"))
    assert [name for name, _ in local] == ["local training"]
    assert [name for name, _ in new] == ["FedPer", "Ditto"]  # nobody has it to give
    assert best(ask, results, "new", "iid", 1.0) == []


def short_swaps(*kept):
    class Short(S0Swap):
        def cells(self, ask):
            return [
                Cell(c.name, c.method, {**c.settings, "rounds": 10, "clients": 4})
                for c in super().cells(ask)
                if c.name in kept
            ]

    return Short()


def test_the_swap_study_scores_averages_only():
    for data, preset in itertools.product(S0Swap.data, S0Swap.presets):
        for cell in S0Swap().cells(Ask(data, preset, "full")):
            every = cell.settings.get("average_every", 1)
            assert cell.settings["eval_every"] % every == cell.settings["rounds"] % every == 0


def test_the_swap_study_takes_the_claims_one_by_one(in_tmp):
    study = short_swaps("full-fedavg", "full-none", "full-random", "full-min-cka", "local")
    ask = Ask("digits", "classes", "quick")
    results = ran(study, ask)
    full, fifth, claims, _, beside = write_report(study, ask, results, Path("s"))
    shown = {row[0]: row[1:] for row in full.rows}
    runs = {name: found[0] for name, found in results.items()}
    assert shown["FedProx"] == ["–"] * 9  # it was left out
    assert all(row[1:] == ["–"] * 9 for row in fifth.rows)
    score = {name: 100 * run.summary["test_accuracy"] for name, run in runs.items()}
    assert shown["FedAvg"][:3] == ["0.05", f"{score['full-fedavg']:.2f}", ""]
    gain = score["full-random"] - score["full-fedavg"]
    assert shown["FedSwap random"][2] == f"{gain:+.2f}"
    last = runs["full-random"].rounds["divergence"].iloc[-1]
    assert shown["FedSwap random"][3] == f"{last:.3f}"
    target = 0.98 * runs["full-fedavg"].summary["test_accuracy"]
    scored = runs["full-fedavg"].evaluations
    first = scored[scored["test_accuracy"] >= target]["round"].iloc[0]
    assert shown["FedAvg"][4] == f"{first}"
    found = {tuple(row[:2]): row[2:] for row in claims.rows}
    pair = "FedSwap random against FedAvg"
    assert found["no more computation (on clients)", pair] == ["+0.00 GMAC", "+0.00", "holds"]
    assert found["no more traffic", pair] == ["+0.00 MB", "+0.00", "holds"]
    without = runs["full-none"].rounds["divergence"].iloc[-1]
    less = found["less divergence", "FedSwap random against FedSwap without swaps"]
    assert less[0] == f"{without - last:+.2f}"
    assert found["better at the end", pair][0] == f"{gain:+.2f} points"
    assert found["better at the end", "FedSwap rotating against FedAvg"][-1] == "not run"
    assert beside.rows[0][:2] == ["local training only", f"{score['local']:.2f}"]
    pictures = {file.name for file in Path("s").glob("full-*.png")}
    drawn = ("rounds", "traffic", "divergence", "swaps-random", "swaps-min-cka")
    assert pictures == {f"full-{name}.png" for name in drawn}


def test_rates_of_the_swap_study_are_chosen_on_validation_data_and_read_again(in_tmp, monkeypatch):
    cells = [f"classes-full-{name}-lr{lr}" for name in ("fedavg", "random") for lr in (0.05, 0.1)]
    study, ask = short_swaps(*cells), Ask("digits", "rates", "quick")
    results = ran(study, ask)
    assert {r.scored_on for runs in results.values() for r in runs} == {"their validation data"}
    (table,) = write_report(study, ask, results, Path("s"))
    chosen = yaml.safe_load(Path("s/rates.yaml").read_text())
    micro = {name: runs[0].summary["micro"] for name, runs in results.items()}
    for name in ("fedavg", "random"):
        best = max((0.05, 0.1), key=lambda lr: micro[f"classes-full-{name}-lr{lr}"])
        assert chosen["digits"]["classes"]["full"][name] == best
    assert sum(text.startswith("**") for row in table.rows for text in row) == 2
    (panel,) = study.pictures(ask, results)[0].figure().axes  # only what was run
    assert {line.get_label() for line in panel.lines} == {"FedAvg", "FedSwap random"}
    monkeypatch.setattr("fedloom.studies.s0_swap.chosen_rates", lambda ask: {
        "classes": {"full": {"fedavg": 0.3, "random": 0.7, "min-cka": 0.9}}
    })  # fmt: skip
    rates = {c.name: c.settings["lr"] for c in S0Swap().cells(Ask("digits", "classes"))}
    assert rates["full-fedavg"] == rates["local"] == 0.3
    assert rates["full-random"] == rates["full-rotating"] == rates["full-none"] == 0.7
    assert rates["full-greedy-dcka"] == rates["full-min-cka"] == 0.9
    assert rates["fifth-fedavg"] == rates["iid-full-random"] == 0.05  # none was chosen


def test_the_swap_study_takes_rates_from_a_file(in_tmp):
    def cells(text, preset="h2"):
        Path("rates.yaml").write_text(text)
        return S0Swap().cells(Ask("digits", preset, values=Path("rates.yaml")))

    each = "{fedavg: 0.3, random: 0.7, min-cka: 0.9}"
    rates = {
        c.name: c.settings for c in cells(f"digits: {{classes: {{full: {each}, fifth: {each}}}}}")
    }
    assert rates["full-fedavg"]["lr"] == 0.3
    assert rates["fifth-min-cka-h10"]["lr"] == 0.9
    # A swap is no average: scores are those of averages, as many as there are.
    assert rates["full-fedavg"]["eval_every"] == rates["full-random-h2"]["eval_every"] == 2
    assert rates["full-random-h20"]["eval_every"] == 20
    for text, why in (
        ("mnist: {}", "no rates for digits.*--preset rates"),
        (f"digits: {{classes: {{full: {each}}}}}", "no rate of FedAvg for digits, classes, fifth"),
        ("digits: 3", "no rate"),
        (f"digits: {{classes: {{full: {each.replace('0.7', '-1')}}}}}", "-1 as the rate"),
    ):
        with pytest.raises(FedloomError, match=why):
            cells(text)
    with pytest.raises(FedloomError, match="would do nothing"):
        S0Swap().check(Ask("digits", "rates", values=Path("rates.yaml")))


@pytest.mark.parametrize(
    ("margins", "said"),
    [([np.inf, 5.0], "holds"), ([-np.inf, -5.0], "does not hold"), ([-np.inf, 5.0], "depends"),
     ([np.nan, 5.0], "reached by neither")],
)  # fmt: skip
def test_who_alone_reaches_the_target_is_ahead(margins, said):
    assert verdict(margins).startswith(said)


def test_a_run_from_before_a_setting_was_there_still_counts_as_done(in_tmp, finished):
    ask = Ask("digits", "plain")
    shutil.copytree(finished, "s")
    file = Path("s/a-s0/config.yaml")
    lines = file.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(("public:", "#"))]
    file.write_text("".join(older))
    before = file.stat().st_mtime_ns
    assert set(run_study(Toy(), ask, Path("s"), 2, quiet)) == {"a", "b"}
    assert file.stat().st_mtime_ns == before


def test_s4_tells_what_nodes_know_and_combine(in_tmp):
    class Short(S4Why):
        def cells(self, ask):
            short = {"rounds": 3, "eval_every": 3, "clients": 8, "topology": "complete"}
            return [
                Cell(c.name, c.method, {**c.settings, **short})
                for c in super().cells(ask)
                if c.name.startswith(("p2p-relay-", "feddom-", "all-", "delta-"))
            ]

    ask = Ask("digits", "area-500", "quick")
    results = ran(Short(), ask)
    assert len(results) == 4
    (table,) = write_report(Short(), ask, results, Path("s"))
    shown = {row[0]: row[1:] for row in table.rows}
    assert shown["WAFL, relay"][0] == "–"  # it was left out
    assert shown["P2P FedAvg, relay"][2:5] == ["8.0", "–", "–"]
    assert shown["feddom"][1:5] == ["+0.000", "8.0", shown["feddom, δ=1"][3], "0.0"]
    assert shown["feddom, all that was heard"][2:5] == ["8.0", "8.0", "0.0"]
    assert Path("s/why.png").stat().st_size > 5000


def test_s4_compares_all_with_the_same_relay_on_the_same_samples():
    study = STUDIES["s4-table"]
    (table,) = study.tables(Ask("mnist", "area-1000"), {})
    assert [row[3] for row in table.rows] == [
        "–", "0.950", "0.936", "0.964", "–", "–", "–",
        "–", "0.930", "0.911", "0.952", "–", "–", "–",
    ]  # fmt: skip
    cells = study.cells(Ask("mnist", "mlp-1000"))
    for cell in cells:
        assert "eval_common" not in cell.settings
        relay = cell.settings.get("relay", False)
        assert relay == ("relay" in cell.name)
        assert ("topology" in cell.settings) == (cell.method not in ("local", "fedavg"))
    assert {c.settings["validation_share"] for c in together(cells)} == {0.1}


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("s4-")])
def test_every_cell_of_s4_can_be_run(name):
    study = STUDIES[name]
    for data, preset in itertools.product(study.data, study.presets):
        cells = study.cells(Ask(data, preset))
        assert len({cell.name for cell in cells}) == len(cells)
        for cell in cells:
            config, options = make_config({**cell.settings, "method": cell.method},
                                          method_class(cell.method))  # fmt: skip
            placed(config, options.build())
    tables = study.tables(Ask(study.data[0], study.presets[0]), {})
    assert all(len(row) == len(table.heads) for table in tables for row in table.rows)


def test_mobility_goes_from_a_crowd_to_hardly_anybody():
    where = {c.settings["topology"] for c in STUDIES["s4-mobility"].cells(Ask("mnist", "mlp"))}
    assert where == {f"waypoint,area={side}" for side in (250, 500, 1000, 2000)}
