"""A search: the same budget for all methods, the same tries after a stop, never on test data."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment import tune
from fedloom.experiment.store import RunStore
from fedloom.experiment.study import Ask
from fedloom.experiment.tune import Range, Search, chosen_for, read_chosen, run_search
from fedloom.studies import STUDIES

pytestmark = pytest.mark.xdist_group("studies")  # they start processes

SETTINGS = {"data": "digits", "clients": 4, "partition": "iid", "rounds": 4, "batch": 64,
            "engine": "serial"}  # fmt: skip


def quiet(*_):
    pass


def search(*methods, space, **more):
    ranges = {name: Range.parse(text) for name, text in space.items()}
    return Search(methods, ranges, **{"runs": 4, "settings": SETTINGS, **more})


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Of these rates one learns; the others hardly move or are far too small."""
    out = tmp_path_factory.mktemp("tune") / "t"
    asked = search("fedavg", "fedper", space={"lr": "1e-9|1e-8|0.5|1e-7"}, runs=6, halving=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "run_jobs", here)
        return asked, out, run_search(asked, out, 2, quiet)


def here(jobs, *_):
    """Run what is not finished in this process, which takes less time than one for each."""
    for job in jobs:
        again = RunStore(job.path).exists
        config = yaml.safe_load((job.path.parent / "cells" / f"{job.path.name}.yaml").read_text())
        settings = {"rounds": job.rounds} if again else config
        fedloom.run(settings.pop("method", None), out=job.path, resume=again, **settings)


# -- where it looks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "middle", "high"),
    [
        ("0..1", 0.0, 0.5, 1.0),
        ("log:1e-4..1", 1e-4, 0.01, 1.0),
        ("int:1..3", 1, 2, 3),
        ("sgd|adam|adagrad", "sgd", "adam", "adagrad"),
        ("1|0.5|none", 1, 0.5, "none"),
        ("true|null|1e-3", True, None, 1e-3),
    ],
)
def test_ranges(text, low, middle, high):
    found = Range.parse(text)
    assert [found.at(u) for u in (0.0, 0.5, 1 - 1e-9)] == [low, middle, high]


@pytest.mark.parametrize("text", ["", "1", "2..1", "log:0..1", "int:0.5..2", "odd:1..2", "a..b"])
def test_ranges_that_can_not_be_are_refused(text):
    with pytest.raises(FedloomError, match="not a range to search"):
        Range.parse(text)


def test_the_same_rates_are_tried_for_all_methods_and_they_are_spread_out():
    asked = search("fedavg", "fedmeta-maml",
                   space={"lr": "log:1e-4..1", "alpha": "log:1e-3..0.1"})  # fmt: skip
    tries = [[asked.values(m, k) for k in range(8)] for m in asked.methods]
    assert [v["lr"] for v in tries[0]] == [v["lr"] for v in tries[1]]
    assert [set(v) for v in (tries[0][0], tries[1][0])] == [{"lr"}, {"lr", "alpha"}]
    quarters = [math.floor(math.log10(v["lr"]) + 4) for v in tries[0]]
    assert sorted(quarters) == [0, 0, 1, 1, 2, 2, 3, 3]
    other = search("fedavg", space={"lr": "log:1e-4..1"}, seed=5)
    assert other.values("fedavg", 0) != tries[0][0]


def test_a_range_may_be_for_one_method_alone():
    asked = search("fedper", "fedprox", space={"fedprox:lr": "1|2", "lr": "3|4", "mu": "0..1"})
    assert set(asked.values("fedper", 0)) == {"lr"}
    assert asked.values("fedper", 0)["lr"] in (3, 4)
    assert asked.values("fedprox", 0)["lr"] in (1, 2)


def test_rungs_of_halving():
    assert search("fedavg", space={"lr": "0..1"}).rungs(4) == [(4, 4)]
    asked = search("fedavg", space={"lr": "0..1"}, halving=3, settings={"rounds": 300})
    assert asked.rungs(9) == [(34, 9), (100, 3), (300, 1)]
    assert asked.rungs(2) == [(300, 2)]
    short = search("fedavg", space={"lr": "0..1"}, halving=3, settings={"rounds": 3})
    assert short.rungs(9) == [(1, 9), (3, 3)]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"space": {"lrr": "0..1"}}, "Unknown setting to search 'lrr'.*Did you mean 'lr'"),
        ({"space": {"mu": "0..1"}, "methods": ("fedprox", "fedavg")},
         "Nothing that is searched is a setting or option of fedavg"),
        ({"space": {"lr": "0..1"}, "runs": None}, "needs a budget"),
        ({"space": {"lr": "0..1"}, "seconds": 9.0}, "either a number of runs"),
        ({"space": {"lr": "0..1"}, "halving": 1}, "would drop no trial"),
        ({"space": {"lr": "0..1"}, "runs": 0}, "numbers above 0"),
        ({"space": {"lr": "0..1"}, "runs": None, "seconds": float("nan")}, "numbers above 0"),
        ({"space": {"tune_share": "0|0.5"}}, "sets tune_share itself"),
        ({"space": {"rounds": "1|2"}}, "sets rounds itself"),
        ({"space": {"lr": "0..1", "fedavg:eval_every": "1|2"}}, "sets eval_every itself"),
        ({"space": {"lr": "0..1", "fedprox:mu": "0..1"}}, "fedprox, which is not among"),
        ({"space": {"lr": "0..1"}, "score": "f1+"}, "name is missing"),
        ({"space": {"lr_schedule": "cosine|constant"}, "halving": 2}, "depends on the number of"),
        ({"space": {"lr": "0..1"}, "settings": {"tune_share": 0}}, "would use the test data"),
        ({"space": {"lr": "0..1"}, "score": "new_micro"}, "needs newcomers"),
        ({"space": {"lr": "0..1"}, "score": "macro+mse"}, "Unknown score 'mse'"),  # called macro
        ({"space": {"lr": "0..1"}, "settings": {"eval_every": 2}}, "sets eval_every itself"),
        ({"space": {"lr": "0..1"}, "halving": 2, "settings": {"lr_schedule": "cosine"}},
         "depends on the number of rounds"),
    ],
)  # fmt: skip
def test_wrong_searches_are_refused(wish, said):
    with pytest.raises(FedloomError, match=said):
        search(*wish.pop("methods", ("fedavg",)), **wish)


@pytest.mark.parametrize(
    ("data", "score", "said"),
    [
        ("diabetes", "auc", "For regression: Unknown score 'auc'"),
        ("diabetes", "macro+f1", "For regression: Unknown score 'f1'"),
        ("digits", "test_mse", "For classification: Unknown score 'test_mse'"),
        ("digits", "before_macro", "fedavg does not adapt models before they are scored"),
        ("own.csv", "auc", "For regression: Unknown score 'auc'"),
    ],
)
def test_scores_that_the_task_does_not_have_are_refused_before_the_first_trial(
    in_tmp, monkeypatch, data, score, said
):
    Path("own.csv").write_text("a,y\n" + "".join(f"{i},{i / 7}\n" for i in range(80)))
    monkeypatch.setattr(tune, "run_jobs", lambda *_: pytest.fail("a trial was run"))
    asked = search("fedavg", space={"lr": "0..1"}, score=score,
                   settings={**SETTINGS, "data": data})  # fmt: skip
    with pytest.raises(FedloomError, match=said):
        run_search(asked, Path("t"), 2, quiet)
    assert not Path("t").exists()


# -- what it finds --------------------------------------------------------------------------------


def test_a_planted_optimum_is_found_with_the_same_budget_for_all(planted):
    _, out, found = planted
    assert {method: values["lr"] for method, values in found.chosen.items()} == {
        "fedavg": 0.5, "fedper": 0.5,
    }  # fmt: skip
    tries = found.tries.groupby("method")
    assert tries.size().tolist() == [6, 6]
    assert [sorted(t["rounds"]) for _, t in tries] == [[1, 1, 1, 2, 2, 4]] * 2
    assert pd.read_csv(out / "tries.csv")["lr"].tolist() == found.tries["lr"].tolist()


def test_a_search_that_goes_on_runs_nothing_again(planted, monkeypatch):
    asked, out, found = planted
    written = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}

    def started(jobs, *_):
        raise AssertionError(jobs)

    monkeypatch.setattr(tune, "run_jobs", started)
    again = run_search(asked, out, 1, quiet)
    assert again.chosen == found.chosen
    assert again.tries.equals(found.tries)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")} == written


def test_other_settings_are_not_taken_for_the_same_search(planted):
    _, out, _ = planted
    other = search("fedavg", space={"lr": "1e-9|1e-8|0.5|1e-7"}, runs=6, halving=2,
                   settings={**SETTINGS, "batch": 32})  # fmt: skip
    with pytest.raises(FedloomError, match="was run with batch=64, not 32"):
        run_search(other, out, 1, quiet)


def test_what_was_chosen_is_a_config_for_each_method(planted):
    _, _, found = planted
    content = yaml.safe_load(found.file.read_text())
    assert content["tuned"] == {m: dict(v) for m, v in found.chosen.items()}
    assert chosen_for(content, "fedper", "f") == {
        **{k: v for k, v in SETTINGS.items() if k != "rounds"}, "lr": 0.5,
    }  # fmt: skip
    assert set(read_chosen(found.file, "digits")) == {"fedavg", "fedper"}
    with pytest.raises(FedloomError, match="was chosen for digits, not for mnist"):
        read_chosen(found.file, "mnist")
    with pytest.raises(FedloomError, match="no settings for 'ditto'"):
        chosen_for(content, "ditto", "f")
    with pytest.raises(FedloomError, match="say which method"):
        chosen_for(content, None, "f")


def test_a_run_takes_what_was_chosen(planted, in_tmp):
    from typer.testing import CliRunner

    from fedloom.cli import app

    words = ["run", "fedper", "--config", str(planted[2].file), "--rounds", "1", "--out", "r"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert fedloom.load("r").config["lr"] == 0.5
    assert fedloom.load("r").config["tune_share"] == 0


def test_a_time_budget_ends_a_search(in_tmp, monkeypatch):
    """The time that runs took is what counts, so a search that goes on ends where it ended."""
    asked = search("fedavg", space={"lr": "0.1|0.2|0.3|0.4"}, runs=None, seconds=1e-6)
    found = run_search(asked, Path("t"), 2, quiet)
    assert len(found.tries) == 1
    spent = float(found.tries["seconds"].iloc[0])
    assert spent >= 0


def test_rates_that_diverge_are_never_chosen(in_tmp):
    asked = search("fedavg", space={"lr": "1e30|0.1"}, runs=2)
    found = run_search(asked, Path("t"), 2, quiet)
    assert found.chosen["fedavg"]["lr"] == 0.1
    assert -math.inf in found.tries["score"].tolist()


# -- what it looks at -----------------------------------------------------------------------------


def own_data(change_test):
    """Rows of a table, dealt by hand; the test rows of clients and the common ones have other
    labels if asked for."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(3), 80)
    x = rng.normal(size=(240, 4)) + np.eye(3, 4)[y] * 3
    parts = np.arange(240) % 4
    from fedloom.data.dataset import from_arrays
    from fedloom.data.partition import Partition
    from fedloom.data.split import federate

    data = from_arrays(x, y, x, y)
    f = federate(data, Partition.of_object(parts), 4, 0, test_share=0.3)
    if change_test:
        for client in range(4):
            test = f.indices(client, "test")
            y[test] = rng.permutation(y[test])
    return x, y, x, rng.permutation(y) if change_test else y, parts


@pytest.mark.parametrize("name", ["fedavg", "fedmeta-per-maml", "feddom"])
def test_no_label_of_test_data_changes_what_a_search_sees(in_tmp, name):
    tables = []
    for change in (False, True):
        x, y, x_test, y_test, parts = own_data(change)
        result = fedloom.run(
            name, data=(x, y, x_test, y_test), partition=parts, clients=4, rounds=2, batch=16,
            test_share=0.3, tune_share=0.25, newcomers=0, out=f"r{change}",
        )  # fmt: skip
        tables.append(result)
    assert tables[0].clients.equals(tables[1].clients)
    plain = [
        {k: v for k, v in t.summary.items() if k in ("test_accuracy", "micro")} for t in tables
    ]
    assert plain[0] == plain[1]


def test_a_federation_for_tuning_holds_no_test_data():
    from fedloom.data.catalog import load
    from fedloom.data.split import federate

    common = {"test_share": 0.3, "newcomers": 4, "newcomer_classes": 3, "public": "share:0.1"}
    whole = federate(load("digits"), "iid", 4, 0, **common)
    tuning = federate(load("digits"), "iid", 4, 0, tune_share=0.25, **common)
    held_out = {i for c in range(4) for i in whole.indices(c, "test").tolist()}
    trained = {i for c in range(4) for i in whole.indices(c, "train").tolist()}
    for client in (*range(4), *tuning.newcomer_ids):
        mine = set(tuning.indices(client).tolist())
        assert mine <= trained
        assert not mine & held_out
    assert set(tuning.global_test().tolist()) <= trained
    assert not len(tuning.dataset.x_test)
    sizes = np.array([tuning.size(c, "test") for c in range(4)])
    assert np.array_equal(sizes, np.floor(0.25 * whole.sizes("train")))
    # What is public is what was public.
    public = [set(f.dealt.indices) - set(f.partition.indices) for f in (whole, tuning)]
    assert public[0] == public[1]


# -- in studies -----------------------------------------------------------------------------------


def test_s1_takes_what_was_chosen(in_tmp):
    Path("c.yaml").write_text(yaml.safe_dump(
        {"data": "mnist", "tuned": {"ditto": {"lr": 0.1, "lam": 2.0}, "fedavg": {"lr": 0.01}}}
    ))  # fmt: skip
    ask = Ask("mnist", "tuned", values=Path("c.yaml"))
    cells = STUDIES["s1"].cells(ask)
    assert [(c.name, c.settings["lr"]) for c in cells] == [("fedavg", 0.01), ("ditto", 0.1)]
    with pytest.raises(FedloomError, match="was chosen for mnist"):
        STUDIES["s1"].check(Ask("digits", "tuned", values=Path("c.yaml")))
    with pytest.raises(FedloomError, match=r"--values c\.yaml would do nothing"):
        STUDIES["s1"].check(Ask("mnist", "source", values=Path("c.yaml")))
    with pytest.raises(FedloomError, match="fedloom tune --study s1 --data cifar10"):
        STUDIES["s1"].check(Ask("cifar10", "tuned"))
    squares = STUDIES["s1-when"].cells(Ask("mnist", "tuned", values=Path("c.yaml")))
    assert len(squares) == 3 * 3 * 3
    assert {c.settings["lr"] for c in squares if c.method == "local"} == {0.01}


def test_a_search_for_a_study_has_the_settings_of_its_cells():
    study = STUDIES["s1"]
    base = study.to_search(Ask("mnist", "tuned", "full"))
    source = {c.name: c for c in study.cells(Ask("mnist", "source", "full"))}
    cell = source["fedmeta-maml"].settings
    same = set(base) - {"first"}
    assert {k: base[k] for k in same} == {k: cell[k] for k in same}
    Search(study.methods, study.space, runs=1, settings=base)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tuned: {fedavg: {lr: 0.1}}", "data that it doesn't name"),
        ("data: digits\ntuned: {fedavg: {lr: 0.1}, ditto: {data: wine}}", "for wine.*ditto"),
        ("data: digits\ntuned: 3", "must hold settings by method"),
        ("data: digits\ntuned:", "must hold settings by method"),
        ("data: digits\ntuned: {}", "must hold settings by method"),
        ("data: digits\ntuned: {1: {lr: 1}}", "must hold settings by method"),
        ("data: digits\ntuned: {fedavg: 1}", "must hold settings by method"),
        ("data: digits\nclients: 4\ntuned: {fedavg: {lr: 0.1}}", "clients=4.*the study has.*20"),
    ],
)
def test_files_of_chosen_values_that_do_not_fit_a_study(in_tmp, text, said):
    Path("v.yaml").write_text(text)
    with pytest.raises(FedloomError, match=said):
        STUDIES["s1"].check(Ask("digits", "tuned", values=Path("v.yaml")))


def test_a_study_completes_chosen_values_and_names_what_differs(in_tmp):
    Path("v.yaml").write_text("data: digits\ntuned: {fedavg: {lr: 0.1, optimiser: sgd}}")
    ask = Ask("digits", "tuned", values=Path("v.yaml"))
    (cell,) = STUDIES["s1"].cells(ask)
    assert cell.settings["newcomers"] == cell.settings["clients"] == 20
    local, _ = STUDIES["s1"].tables(ask, {})  # without FedMeta-Per there is nothing to pair
    assert local.rows[1][1] == "optimiser=sgd, lr=0.1"


def test_one_method_of_a_study_can_be_tuned_alone(in_tmp, call):
    def tuned(data):
        words = ["--runs", 1, "--rounds", 1, "--set", "clients=5", "--set", "newcomers=4"]
        return call("tune", "fedavg", "--study", "s1", "--data", data, *words, "--out", "t")

    code, said = tuned("wine")
    assert (code, "Unknown data set of this study 'wine'" in said) == (2, True)
    assert tuned("digits")[0] == 0
    assert read_chosen(Path("t/chosen.yaml"), "digits")["fedavg"]["data"] == "digits"
