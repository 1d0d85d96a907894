"""A comparison scores everybody on the same samples and says "same" only of what is the same."""

import contextlib
import sys

import numpy as np
import pytest
import yaml

import fedloom
from fedloom.adapt import AsIs, FineTune
from fedloom.cli import main
from fedloom.errors import FedloomError
from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.experiment.study import Ask, Cell, Study, Table, run_study
from fedloom.studies.s1 import S1

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


def test_all_cells_of_a_study_with_a_method_that_adapts_are_scored_alike(in_tmp, monkeypatch):
    class Toy(Study):
        name, title, data, presets = "toy", "A toy", ("digits",), ("plain",)

        def cells(self, ask):
            return [Cell("a", "fedavg", SMALL), Cell("b", "fedavg-meta", SMALL)]

        def tables(self, ask, results):
            return [Table("t", [], [])]

    def stop(job):
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


def test_a_method_that_trains_everybody_is_named_with_the_numbers(in_tmp):
    comparison = compared("fedavg", "fedswap", "p2p-fedavg", participation=0.5)
    assert comparison.same == ["data", "clients", "initial weights"]
    for method in ("fedswap", "p2p-fedavg"):
        assert comparison.differences[method] == [
            "participation=1, not 0.5 as asked", "6 participants a round (fedavg: 3)",
        ]  # fmt: skip
    assert "fedavg" not in comparison.differences
    page = comparison.report().read_text()
    assert "<b>fedswap</b>: participation=1, not 0.5 as asked" in page
    assert "The same in all runs of a seed: data, clients, initial weights." in page


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
    assert told == ["one learner trains on the data of all clients, so there are no participants"]


def test_a_public_share_takes_data_from_the_clients_of_one_method(in_tmp):
    comparison = compared("fedavg", "fedgse-spl")
    assert "clients" not in comparison.same
    told = comparison.differences["fedgse-spl"]
    assert told[:2] == ["public=share:0.01 (fedavg: none)", "so its clients hold other data"]
    both = compared("fedavg", "fedgse-spl", public="share:0.01")
    assert "clients" in both.same
    assert both.notes["fedavg"] == ["makes no use of the public set"]


def test_the_command_line_says_what_was_scored_and_what_differs(in_tmp, monkeypatch, capsys):
    def printed(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        with contextlib.suppress(SystemExit):
            main()
        return " ".join(capsys.readouterr().out.split())

    small = ("--clients", "4", "--rounds", "1", "--seeds", "1", "--test-share", "0.5")
    told = printed("compare", "fedavg", "fedswap", "fedavg-meta", *small, "--out", "c")
    assert "The same in all runs of a seed: data, clients, initial weights." in told
    assert "Clients are scored on the query part of their test data." in told
    assert "Not the same: fedswap: participation=1 (fedavg: 0.2); 4 participants a round" in told
    assert "scored on the query part of their test data." in printed("show", "c/fedavg-s0")
    again = printed("score", "c/fedavg-s0", "--set", "score_on=test")
    assert "on all of their test data, and were on the query part" in again


# -- numbers in tables ----------------------------------------------------------------------------


class Ran:
    """A result with these scores."""

    scored_on = None

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
    assert rows == [["fedper", "70.00 ± 20.00", "3.00 ± 1.00", "+40.00 ± 30.00 (2/2 better)"],
                    ["fedavg", "30.00 ± 10.00", "0.00", "–"]]  # fmt: skip


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_mean_with_a_seed_that_has_no_number_is_a_dash(value):
    comparison = Comparison({
        "fedavg": [Ran(seed=0, macro=value), Ran(seed=1, macro=0.5)],
        "local": [Ran(seed=0, macro=0.5), Ran(seed=1, macro=0.5)],
    }, None)  # fmt: skip
    assert comparison.cells()[1] == [["fedavg", "–", "–"], ["local", "50.00", "–"]]
