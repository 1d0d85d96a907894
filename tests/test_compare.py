"""A comparison scores everybody on the same samples and says "same" only of what is the same."""

import contextlib
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

import fedloom
from fedloom.adapt import AsIs, FineTune
from fedloom.cli import main
from fedloom.errors import FedloomError
from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import make_config
from fedloom.experiment.entry import Entry
from fedloom.experiment.plugins import method_class
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.experiment.study import Ask, Cell, Study, Table, run_study, spread
from fedloom.local import SGD
from fedloom.mix import Average
from fedloom.report import terminal
from fedloom.studies.s1 import S1
from fedloom.tasks import Classification

SMALL = {"clients": 6, "rounds": 2, "eval_every": 2, "test_share": 0.5,
         "model_options": {"hidden": [8]}, "engine": "serial"}  # fmt: skip


def compared(*methods, **settings):
    return fedloom.compare(methods, **{"seeds": 1, **SMALL, **settings})


def samples(result, population="local"):
    table = result.clients
    return table[table["population"] == population]["samples"].tolist()


# -- which part is scored -------------------------------------------------------------------------


def test_methods_that_adapt_and_those_that_do_not_are_scored_on_the_same_samples(in_tmp):
    names = ["fedavg", "fedper", "lg-fedavg", "fedavg-meta", "fedmeta-per-maml"]
    comparison = compared(*names, newcomers=2)
    runs = [results[0] for results in comparison.results.values()]
    assert {r.config["score_on"] for r in runs} == {"query"}
    federation = make_federation(Config(**runs[0].config), load_dataset(Config(**runs[0].config)))
    expected = [federation.size(c, "test-query") for c in range(6)]
    for run in runs:
        assert samples(run) == expected
        assert samples(run, "new") == [federation.size(c, "test-query") for c in (6, 7)]
    assert "Clients are scored on the query part of their test data." in comparison.remarks()


def test_without_a_method_that_adapts_all_test_data_is_scored(in_tmp):
    run = compared("fedavg", "fedper").results["fedavg"][0]
    federation = make_federation(Config(**run.config), load_dataset(Config(**run.config)))
    assert run.config["score_on"] == "test"
    assert samples(run) == [federation.size(c, "test") for c in range(6)]
    asked = compared("fedavg", "fedper", score_on="query").results["fedper"][0]
    assert samples(asked) == [federation.size(c, "test-query") for c in range(6)]


@pytest.mark.parametrize(
    ("method", "given", "part"),
    [("fedavg", "auto", "test"), ("fedavg", "query", "query"), ("fedavg-meta", "auto", "query"),
     ("fedavg-meta", "query", "query"), ("feddom", "auto", "test"), ("feddom", "query", "query")],
)  # fmt: skip
def test_a_config_holds_the_part_that_is_scored(method, given, part):
    assert make_config({"score_on": given}, method_class(method))[0].score_on == part


def test_nobody_is_scored_on_what_it_was_tuned_on(in_tmp):
    with pytest.raises(FedloomError, match="score_on=test can't be"):
        make_config({"score_on": "test"}, method_class("fedmeta-maml"))
    with pytest.raises(FedloomError, match="score_on=test can't be"):
        compared("fedavg", "fedmeta-maml", score_on="test")
    assert not list(in_tmp.iterdir())


def test_beside_a_method_that_validates_all_train_on_the_same_samples(in_tmp):
    """feddom sets a tenth of the training data aside, so nobody trains on it."""
    nodes = {"topology": "ring", "participation": 1.0}
    comparison = compared("local", "wafl", "feddom", **nodes)
    shares = {m: runs[0].config["validation_share"] for m, runs in comparison.results.items()}
    assert shares == dict.fromkeys(("local", "wafl", "feddom"), 0.1)
    sizes = [runs[0].clients["train_samples"].tolist()
             for runs in comparison.results.values()]  # fmt: skip
    assert sizes[0] == sizes[1] == sizes[2]
    assert {"data", "clients"} <= set(comparison.same)
    without = compared("local", "wafl", out="b", **nodes)
    assert without.results["wafl"][0].config["validation_share"] == 0
    more = without.results["wafl"][0].clients["train_samples"]
    assert more.sum() > sum(sizes[0])
    asked = compared("wafl", "feddom", validation_share=0.3, out="c", **nodes)
    assert {r[0].config["validation_share"] for r in asked.results.values()} == {0.3}


def test_a_method_is_scored_on_its_own_part_unless_asked():
    assert AsIs().on("auto") == AsIs()
    assert AsIs().on("query").scored == "test-query"
    assert FineTune().on("query") == FineTune()


def test_a_run_is_scored_again_on_the_other_part(in_tmp):
    run = fedloom.run("fedavg", **SMALL)
    query = fedloom.run("fedavg", **SMALL, score_on="query")
    again = run.score(score_on="query")
    assert again.clients.equals(query.clients)
    assert again.scored_on == query.scored_on == "the query part of their test data"
    assert query.score(score_on="test").clients.equals(run.clients)
    assert query.score().clients.equals(query.clients)
    with pytest.raises(FedloomError, match="score_on=test can't be"):
        fedloom.run("fedavg-meta", **SMALL).score(score_on="test")


def test_clients_are_scored_on_what_was_held_back_from_training(in_tmp):
    run = fedloom.run("fedavg", **SMALL, score_on="validation")
    assert run.config["validation_share"] == 0.1
    assert run.scored_on == "their validation data"
    table = run.clients
    plain = fedloom.run("fedavg", **SMALL).clients
    assert (table["samples"] + table["train_samples"] == plain["train_samples"]).all()
    assert table["samples"].sum() > 0
    with pytest.raises(FedloomError, match="validation_share is 0"):
        fedloom.run("fedavg", **SMALL, score_on="validation", validation_share=0)
    with pytest.raises(FedloomError, match="validation_share is 0"):
        fedloom.run("fedavg", **SMALL).score(score_on="validation")


def test_all_cells_of_a_study_with_a_method_that_adapts_are_scored_alike(in_tmp, monkeypatch):
    class Toy(Study):
        name, title, data, presets = "toy", "A toy", ("digits",), ("plain",)

        def cells(self, ask):
            return [Cell("a", "fedavg", SMALL), Cell("b", "fedavg-meta", SMALL)]

        def tables(self, ask, results):
            return [Table("t", [], [])]

    def stop(job, server):
        raise FedloomError("before the first run")

    monkeypatch.setattr("fedloom.experiment.study._start", stop)
    for study, ask in (
        (Toy(), Ask("digits", "plain", only=("a",))),
        (S1(), Ask("mnist", "source")),
    ):
        with pytest.raises(FedloomError, match="before the first run"):
            run_study(study, ask, in_tmp / study.name, 1, lambda *_: None)
        files = list((in_tmp / study.name / "cells").glob("*.yaml"))
        assert len(files) == (1 if ask.only else len(study.cells(ask)))
        parts = {f.stem: yaml.safe_load(f.read_text())["score_on"] for f in files}
        # One learner on all data is split 80/20, which is compared with nobody's samples.
        assert parts.pop("centralised-s0", "test") == "test"
        assert set(parts.values()) == {"query"}


# -- what is the same, and what is not ------------------------------------------------------------


def test_all_is_the_same_where_nothing_differs(in_tmp):
    comparison = compared("fedavg", "fedprox:mu=1", "local", participation=0.5)
    assert comparison.same == ["data", "clients", "initial weights", "participants"]
    assert comparison.differences == {}


def test_swaps_are_compared_at_equal_participation(in_tmp):
    comparison = compared("fedavg", "fedswap", "fedswap:partner=rotating", participation=0.5)
    assert comparison.same == ["data", "clients", "initial weights", "participants"]
    assert comparison.differences == {}
    trained = {m: [r["macs"] for r in runs[0].records] for m, runs in comparison.results.items()}
    assert trained["fedavg"] == trained["fedswap"] == trained["fedswap:partner=rotating"]


def test_a_method_that_trains_everybody_is_named_with_the_numbers(in_tmp):
    comparison = compared("fedavg", "fedswap", "p2p-fedavg", participation=0.5)
    assert comparison.same == ["data", "clients", "initial weights"]
    assert comparison.differences == {
        "p2p-fedavg": ["participation=1, not 0.5 as asked", "6 participants a round (fedavg: 3)"]
    }
    page = comparison.report().read_text()
    assert "<b>p2p-fedavg</b>: participation=1, not 0.5 as asked" in page
    assert "The same in all runs of a seed: data, clients, initial weights." in page


def test_an_option_that_only_a_file_has_is_no_difference(in_tmp):
    Path("calm.py").write_text("""
import fedloom

class Calm(fedloom.MethodOptions):
    name = "calm"
    tau: float = 1.0

    def build(self):
        return fedloom.Method()
""")
    comparison = compared("fedavg", "calm.py", "calm.py@tau=0.02")
    assert comparison.differences == {}
    asked = compared("fedavg", "calm.py", tau=0.5, out="b")
    assert asked.differences == {"calm.py": ["tau=0.5"]}


def test_what_all_override_is_named_too(in_tmp):
    comparison = compared("p2p-fedavg", "wafl", participation=0.5)
    assert "participants" in comparison.same
    assert set(comparison.differences) == {"p2p-fedavg", "wafl"}


def test_a_definition_that_fixes_the_local_work_is_named(in_tmp):
    told = compared("fedavg", "fedsgd", epochs=2).differences["fedsgd"]
    assert told == ["epochs=1, not 2 as asked", "batch=inf (fedavg: 32)"]


def test_sub_models_without_capacities_are_called_what_they_are(in_tmp):
    comparison = compared("fedavg", "fedrolex", "fedprox:mu=0", "fedprox:mu=1", "depthfl")
    told = comparison.notes
    twin = "its results are those of fedavg in every round"
    assert told["fedrolex"] == [
        "all capacities are 1, so every client trains the whole model",
        twin,
    ]
    assert told["fedprox:mu=0"] == [twin]
    assert "fedprox:mu=1" not in told
    assert list(comparison.differences) == ["depthfl"]
    assert comparison.differences["depthfl"][0].startswith("another model (model_options=")
    assert comparison.same == ["data", "clients", "participants"]


def test_one_learner_has_no_participants(in_tmp):
    comparison = compared("centralised", "fedavg", "local")
    assert comparison.same == ["data", "clients", "initial weights"]
    (told,) = comparison.differences.values()
    assert told == ["one learner trains on all clients' data, so there are no participants"]


def test_a_public_share_takes_data_from_the_clients_of_one_method(in_tmp):
    comparison = compared("fedavg", "fedgse-spl")
    assert "clients" not in comparison.same
    told = comparison.differences["fedgse-spl"]
    assert told[:2] == ["public=share:0.01 (fedavg: none)", "so its clients hold other data"]
    both = compared("fedavg", "fedgse-spl", public="share:0.01")
    assert "clients" in both.same
    assert both.notes["fedavg"] == ["does not use the public set"]


def test_the_command_line_says_what_was_scored_and_what_differs(in_tmp, monkeypatch, capsys):
    def printed(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        with contextlib.suppress(SystemExit):
            main()
        return " ".join(capsys.readouterr().out.split())

    small = ("--clients", "4", "--rounds", "1", "--seeds", "1", "--test-share", "0.5")
    told = printed("compare", "fedavg", "p2p-fedavg", "fedavg-meta", *small, "--out", "c")
    assert "The same in all runs of a seed: data, clients, initial weights." in told
    assert "Clients are scored on the query part of their test data." in told
    assert "Not the same: p2p-fedavg: participation=1 (fedavg: 0.2); 4 participants a round" in told
    assert "scored on the query part of their test data." in printed("show", "c/fedavg-s0")
    again = printed("score", "c/fedavg-s0", "--set", "score_on=test")
    assert "on all of their test data, and were on the query part" in again


# -- numbers in tables ----------------------------------------------------------------------------


class Ran:
    """A result with these scores."""

    scored_on = None
    task, measures = "classification", Classification.measures

    def __init__(self, **summary):
        self.summary = summary


def test_means_spreads_and_gains_of_a_table_by_hand():
    comparison = Comparison({
        "fedper": [Ran(seed=0, macro=0.5, bytes=2e6), Ran(seed=1, macro=0.9, bytes=4e6)],
        "fedavg": [Ran(seed=0, macro=0.4, bytes=0.0), Ran(seed=1, macro=0.2, bytes=0.0)],
    }, None)  # fmt: skip
    row = comparison.table.loc["fedper"]
    assert row["macro"] == pytest.approx(0.7)
    assert row["macro_std"] == pytest.approx(0.2)
    assert row["macro_gain"] == pytest.approx(0.4)  # of 0.1 and 0.7, by seed
    assert row["macro_gain_std"] == pytest.approx(0.3)
    assert row["macro_wins"] == 2
    heads, rows = comparison.cells()
    assert heads == ["method", "client accuracy (%)", "traffic (MB)", "client accuracy vs fedavg"]
    # t = 0.4 / (0.6 / 2) with one degree of freedom: p = 1 - 2 atan(4/3) / pi
    assert row["macro_p"] == pytest.approx(1 - 2 * np.arctan(4 / 3) / np.pi)
    gain = "+40.00 ± 30.00 (2/2 better, p = 0.41)"
    assert rows == [["fedper", "70.00 ± 20.00", "3.00 ± 1.00", gain],
                    ["fedavg", "30.00 ± 10.00", "0.00", "–"]]  # fmt: skip
    assert comparison.latex(["macro", "bytes"]).splitlines()[2:6] == [
        r"method & client accuracy (\%) & traffic (MB) \\", r"\midrule",
        r"fedper & \textbf{70.00 $\pm$ 20.00} & 3.00 $\pm$ 1.00 \\",
        r"fedavg & 30.00 $\pm$ 10.00 & \textbf{0.00} \\",
    ]  # fmt: skip
    with pytest.raises(FedloomError, match="Did you mean 'macro'"):
        comparison.latex(["macr"])


def test_what_prints_like_the_best_is_bold_everywhere():
    """Three means print the same, one has no rival as printed, and time is not ranked."""
    scores = {"a": (0.3, 0.3333), "b": (0.3333, 0.3), "c": (0.3, 0.33334), "d": (0.1, 0.2),
              "e": (0.1, 0.5)}  # fmt: skip
    comparison = Comparison({
        name: [Ran(seed=i, macro=v, bytes=12_000 + len(found) + i, seconds=ord(name))
               for i, v in enumerate(found)]
        for name, found in scores.items()
    }, None)  # fmt: skip
    heads, rows = comparison.marked()
    assert heads[1:4] == ["client accuracy (%)", "traffic (MB)", "time (s)"]
    assert rows[0][1].text == "31.66 ± 1.66"
    assert [row[1].best for row in rows] == [False, False, True, False, False]
    comparison = Comparison({name: comparison.results[name] for name in "abde"}, None)
    rows = comparison.marked()[1]
    assert [row[1].best for row in rows] == [True, True, False, False]
    assert [row[1].tie for row in rows] == [False, False, True, True]
    assert not any(cell.best or cell.tie for row in rows for cell in row[2:])
    tex = comparison.latex(["macro", "bytes", "seconds"])
    assert [line.count("textbf") for line in tex.splitlines()[4:8]] == [1, 1, 0, 0]
    (says,) = comparison.marks()
    assert "≈: not significantly different from the best (paired t-test over seeds, p ≥ 0." in says
    screen = Console(force_terminal=True, width=120)
    with screen.capture() as shown:
        screen.print(terminal._table(*comparison.marked()))
    assert re.findall(r"\x1b\[1m +([\d.]+ ± .*?)\x1b", shown.get()) == ["31.66 ± 1.66"] * 2
    assert "30.00 ± 20.00 ≈" in shown.get()
    alike = Comparison({name: comparison.results[name] for name in "ab"}, None)
    assert alike.marks() == []
    assert "textbf" not in alike.latex()


def test_a_table_says_that_its_spread_is_that_of_the_population():
    runs = [Ran(seed=0, macro=0.5), Ran(seed=1, macro=0.9)]
    assert "(population: divided by n)" in Comparison({"fedavg": runs}, None).remarks()[0]
    assert "population" not in Comparison({"fedavg": runs[:1]}, None).remarks()[0]
    assert spread([1.0, 3.0]) == "2.00 ± 1.00"
    assert Ask("", "", seeds=2).over == "mean ± population std over 2 seeds"


@pytest.mark.parametrize(("gains", "p"), [((0.0, 0.0), 1.0), ((0.1, 0.1), 0.0)])
def test_gains_that_are_all_equal_leave_no_doubt(gains, p):
    base = [Ran(seed=i, macro=0.5) for i in range(2)]
    other = [Ran(seed=i, macro=0.5 + gain) for i, gain in enumerate(gains)]
    assert Comparison({"fedavg": base, "other": other}, None).table["macro_p"]["other"] == p


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_mean_with_a_seed_that_has_no_number_is_a_dash(value):
    comparison = Comparison({
        "fedavg": [Ran(seed=0, macro=value), Ran(seed=1, macro=0.5)],
        "local": [Ran(seed=0, macro=0.5), Ran(seed=1, macro=0.5)],
    }, None)  # fmt: skip
    assert comparison.cells()[1] == [["fedavg", "–", "–"], ["local", "50.00", "–"]]


# -- settings of one method, and comparisons on disk ----------------------------------------------


def test_a_method_has_settings_of_its_own(in_tmp):
    comparison = compared(
        "fedavg", "fedavg@lr=0.5", "fedrolex@capacities=1:0.5,0.5:0.5",
        ("wafl", {"topology": "ring"}), lr=0.1, participation=1.0,
    )  # fmt: skip
    runs = {label: results[0].config for label, results in comparison.results.items()}
    assert list(runs) == ["fedavg", "fedavg@lr=0.5", "fedrolex@capacities=1:0.5,0.5:0.5",
                          "wafl@topology=ring"]  # fmt: skip
    assert [config["lr"] for config in runs.values()] == [0.1, 0.5, 0.1, 0.1]
    assert runs["fedrolex@capacities=1:0.5,0.5:0.5"]["capacities"] == "1:0.5,0.5:0.5"
    assert runs["wafl@topology=ring"]["topology"] == "ring"
    assert runs["fedavg"]["topology"] is None
    assert comparison.differences["fedavg@lr=0.5"] == ["lr=0.5 (fedavg: 0.1)"]
    assert comparison.baseline == "fedavg"


@pytest.mark.parametrize(
    ("given", "own"),
    [("wafl@topology=waypoint,area=500", {"topology": "waypoint,area=500"}),
     ("wafl@topology=waypoint,area=500,lr=0.1", {"topology": "waypoint,area=500", "lr": 0.1}),
     ("fedprox:mu=1@lr=1e-3@batch=4", {"lr": 1e-3, "batch": 4}),
     ("fedavg@model_options.hidden=[8]", {"model_options": {"hidden": [8]}}),
     ("fedprox@mu=0.1,lr=1", {"mu": 0.1, "lr": 1})],
)  # fmt: skip
def test_settings_behind_an_at_sign(given, own):
    assert Entry.of(given).own == own
    assert Entry.of(given).label == given


def test_what_does_nothing_for_one_method_is_noted(in_tmp):
    comparison = compared("fedavg@capacities=high-quality", "fedrolex")
    label = "fedavg@capacities=high-quality"
    assert comparison.results[label][0].config["capacities"] == "1"
    assert comparison.notes[label] == [
        "capacities does nothing here: every client trains the whole model"
    ]


@pytest.mark.parametrize(
    ("methods", "said"),
    [(["fedavg@lrr=1"], "fedavg@lrr=1: Unknown setting 'lrr'. Did you mean 'lr'?"),
     (["fedavg@seed=1"], "the same for all methods"), (["fedavg@lr=0.1", "fedavg:lr=0.1"], "twice"),
     ([("fedavg", "lr")], "is not a method")],
)  # fmt: skip
def test_wrong_settings_of_one_method_get_a_sentence(methods, said, in_tmp):
    with pytest.raises(FedloomError, match=re.escape(said)):
        compared(*methods)
    assert not list(in_tmp.iterdir())


def test_what_a_method_lacks_is_said_before_the_first_one_runs(in_tmp):
    with pytest.raises(FedloomError, match=r"fedswap:partner=min: .*--public"):
        compared("fedavg", "fedswap:partner=min")
    assert not list(in_tmp.iterdir())


def test_a_run_has_no_settings_behind_an_at_sign(in_tmp):
    with pytest.raises(FedloomError, match=r"--set lr=0\.1"):
        fedloom.run("fedavg@lr=0.1")


def test_a_comparison_is_opened_again_with_all_that_it_said(in_tmp):
    made = compared("fedavg", "fedprox:mu=1", "fedswap@participation=0.5", seeds=2, out="c")
    opened = fedloom.load("c")
    assert opened.table.equals(made.table)
    assert (opened.remarks(), opened.differences, opened.notes) == (
        made.remarks(), made.differences, made.notes
    )  # fmt: skip
    assert "fedswap" in repr(opened)
    assert "<span>fedprox:mu=1</span>" in opened._repr_html_()
    opened.to_csv("table.csv")
    assert "fedprox:mu=1" in Path("table.csv").read_text()


def test_only_what_is_the_same_is_called_so_of_methods_with_their_own_settings(in_tmp):
    longer = compared("fedavg", "fedavg@rounds=4", participation=0.5)
    assert longer.differences["fedavg@rounds=4"] == ["rounds=4 (fedavg: 2)"]
    other = compared("fedavg", "fedavg@test_share=0.3", out="b")
    assert "clients" not in other.same


def test_a_comparison_is_extended_by_a_method(in_tmp):
    compared("fedavg", "fedprox", seeds=2, out="whole", lr=0.2)
    compared("fedavg", seeds=2, out="grown", lr=0.2)
    grown = fedloom.compare(["fedprox"], extend="grown")
    whole, again = fedloom.load("whole"), fedloom.load("grown")
    scores = [n for n in whole.table if "seconds" not in n]
    assert grown.table[scores].equals(whole.table[scores])
    assert again.table[scores].equals(whole.table[scores])
    for words, said in ((["fedprox"], "has fedprox already"), (["fedmeta-maml"], "score_on=query")):
        with pytest.raises(FedloomError, match=said):
            fedloom.compare(words, extend="grown")
    with pytest.raises(FedloomError, match=r"lr can't be given.*NAME@SETTING=VALUE"):
        fedloom.compare(["scaffold"], extend="grown", lr=0.1)
    with pytest.raises(FedloomError, match="no comparison"):
        fedloom.compare(["scaffold"], extend="nowhere")


def test_a_comparison_on_arrays_is_extended_with_the_same_arrays(in_tmp):
    rng = np.random.default_rng(0)
    data = rng.random((90, 4)).astype(np.float32), np.arange(90) % 3
    compared("fedavg", data=data, out="c")
    with pytest.raises(FedloomError, match=r"data=\.\.\."):
        fedloom.compare(["fedprox"], extend="c")
    assert list(fedloom.compare(["fedprox"], extend="c", data=data).results) == [
        "fedavg",
        "fedprox",
    ]


def test_a_comparison_that_was_stopped_says_so(in_tmp):
    compared("fedavg", "fedprox", out="my c")
    shutil.rmtree("my c/fedprox-s0")
    said = "fedprox with seed 0 is missing. Continue with: fedloom compare --resume --out 'my c'"
    with pytest.raises(FedloomError, match=said):
        fedloom.load("my c")


def test_a_comparison_is_resumed_from_what_its_folder_says(call):
    whole = compared("fedprox:mu=0.1", "fedavg@lr=0.2", seeds=2, seed=1, batch=8, out="c")
    record = Path("c/comparison.yaml").read_bytes()
    scores = whole.table.drop(columns=[n for n in whole.table if "seconds" in n])
    shutil.rmtree("c/fedavg-lr=0.2-s2")
    code, said = call("compare", "--resume", "--out", "c", "--lr", "0.3")
    assert (code, "lr can't be given. Only its length" in said) == (2, True)
    assert call("compare", "--resume", "--out", "c", "--seeds", "3")[0] == 2
    code, said = call("compare", "--resume", "--out", "c")
    assert (code, "fedavg@lr=0.2" in said) == (0, True)
    assert Path("c/comparison.yaml").read_bytes() == record
    assert fedloom.load("c").table[scores.columns].equals(scores)
    longer = fedloom.compare(resume=True, out="c", rounds=3)
    assert {run.summary["rounds"] for runs in longer.results.values() for run in runs} == {3}
    assert fedloom.load("c").record.asked["rounds"] == 3


def test_what_can_not_be_resumed_by_itself_gets_a_sentence(call):
    code, said = call("compare", "--rounds", "2")
    assert (code, "Name the methods to compare" in said) == (2, True)
    assert "holds no comparison" in call("compare", "--resume", "--out", "nowhere")[1]
    fedloom.compare([fedloom.Method(local=SGD(), mix=Average())], seeds=1, out="own", **SMALL)
    with pytest.raises(FedloomError, match="given as Python objects are not stored"):
        fedloom.compare(resume=True, out="own")
    with pytest.raises(FedloomError, match=r"compare\(resume=True, out="):
        fedloom.compare()
    data = np.zeros((90, 4), np.float32), np.arange(90) % 3
    compared("fedavg", data=data, out="arrays")
    with pytest.raises(FedloomError, match=r"resume=True, out=\.\.\., data=\.\.\."):
        fedloom.compare(resume=True, out="arrays")
    assert list(fedloom.compare(resume=True, out="arrays", data=data).results) == ["fedavg"]


def test_finished_runs_are_compared(in_tmp):
    for seed in (0, 1):
        for lr in (0.1, 0.5):
            fedloom.run("fedavg", **SMALL, seed=seed, lr=lr, out=f"avg-{lr}-{seed}")
        fedloom.run("fedper", **SMALL, seed=seed, out=f"per-{seed}")
    together = Comparison.of(sorted(p for p in in_tmp.iterdir() if p.is_dir()))
    assert list(together.results) == ["fedavg@lr=0.1", "fedavg@lr=0.5", "fedper"]
    assert together.results["fedper"][1].config["seed"] == 1
    assert "data" in together.same
    with pytest.raises(FedloomError, match="fedper has seeds 0, 1, fedavg has seed 0"):
        Comparison.of(["per-0", "per-1", "avg-0.1-0"])
    with pytest.raises(FedloomError, match="same settings and seed"):
        Comparison.of(["per-0", "per-0"])


def test_the_command_line_shows_comparisons_and_runs_together(in_tmp, monkeypatch, capsys):
    compared("fedavg", "fedprox", out="c")
    words = [["show", "c"], ["show", "c/fedavg-s0", "c/fedprox-s0", "--plot", "both.png"]]
    for line in words:
        monkeypatch.setattr(sys, "argv", ["fedloom", *line])
        with contextlib.suppress(SystemExit):
            main()
        assert "methods are paired by seed" in " ".join(capsys.readouterr().out.split())
    assert (in_tmp / "both.png").exists()
    monkeypatch.setattr(sys, "argv", ["fedloom", "show", "c/fedavg-s0"])
    with contextlib.suppress(SystemExit):
        main()
    assert "model mlp" in capsys.readouterr().out  # what `auto` stood for
    with pytest.raises(FedloomError, match="It holds the comparisons c: name one of them"):
        fedloom.load(in_tmp)
    with pytest.raises(FedloomError, match="It holds the runs fedavg-s0, fedprox-s0: name"):
        fedloom.experiment.result.Result("c")
