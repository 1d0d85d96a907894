"""Sweeps run every combination once, go on where they were stopped, and show what they found."""

import shutil
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.cli import main
from fedloom.errors import FedloomError
from fedloom.experiment.study import Ask, run_study
from fedloom.experiment.sweep import Axis, Sweep
from fedloom.experiment.swept import run_sweep

SMALL = {"clients": 4, "rounds": 1, "model_options": {"hidden": [4]}, "engine": "serial"}


def sweep(*axes, methods=("fedavg",), **settings):
    return Sweep(methods, [Axis.parse(axis) for axis in axes], {**SMALL, **settings})


def test_every_combination_is_run_once_and_methods_take_what_they_know():
    found = sweep("lr=0.1,1", "mu=0.01,1", methods=("fedavg", "fedprox"))
    assert [p.name for p in found.points] == [
        "fedavg-lr=0.1", "fedavg-lr=1", "fedprox-lr=0.1-mu=0.01", "fedprox-lr=0.1-mu=1",
        "fedprox-lr=1-mu=0.01", "fedprox-lr=1-mu=1",
    ]  # fmt: skip
    assert found.points[-1].settings["mu"] == 1


def test_settings_that_do_nothing_for_a_method_are_not_swept_there():
    found = sweep("capacities=1;1:0.5,0.5:0.5", methods=("fedavg", "heterofl"))
    assert [p.name for p in found.points] == [
        "fedavg-capacities=1", "heterofl-capacities=1", "heterofl-capacities=1-0.5-0.5-0.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "said"),
    [(["lr"], "SETTING=VALUE"), (["lr="], "SETTING=VALUE"), (["lrr=1,2"], "Did you mean 'lr'"),
     (["lr=1,1"], "twice"), (["lr=1", "lr=2"], "twice"), (["seed=1,2"], "--seeds"),
     (["lr=fast"], "lr="), (["clients=4,6"], "clients is swept")],
)  # fmt: skip
def test_a_wrong_sweep_gets_a_sentence(axes, said):
    with pytest.raises(FedloomError, match=said):
        sweep(*axes)


def test_what_is_swept_is_not_given_twice():
    with pytest.raises(FedloomError, match=r"fedavg@lr=0\.3 would do nothing"):
        sweep("lr=0.1,0.2", methods=("fedavg@lr=0.3",))


def test_data_of_different_tasks_is_refused_before_any_run(in_tmp):
    asked = Sweep(["fedavg"], [Axis("data", ("digits", "diabetes"))], {"clients": 4})
    with pytest.raises(FedloomError, match="different tasks, classification and regression"):
        run_sweep(asked, 1, "s", 1, lambda *_: pytest.fail("a run was started"))
    assert not Path("s").exists()


def test_the_best_is_found_and_what_is_finished_is_not_run_again(in_tmp):
    found, ask = sweep("lr=0.001,0.5", rounds=8, participation=1.0), Ask("", "", seeds=1)
    results = run_study(found, ask, Path("s"), 2, lambda *_: None)
    best, everything = found.tables(ask, results)
    assert [row[:2] for row in best.rows] == [["fedavg", "0.5"]]
    assert [row[1] for row in everything.rows] == ["0.001", "0.5"]
    alone = fedloom.run("fedavg", **{**SMALL, "rounds": 8}, participation=1.0, lr=0.5)
    assert everything.rows[1][3] == f"{100 * alone.summary['macro']:.2f}"
    before = {p: p.stat().st_mtime_ns for p in Path("s").rglob("rounds.jsonl")}
    run_study(found, ask, Path("s"), 2, lambda *_: None)
    assert {p: p.stat().st_mtime_ns for p in Path("s").rglob("rounds.jsonl")} == before
    (picture,) = found.pictures(ask, results)
    axis = picture.figure().axes[0]
    assert axis.get_xscale() == "log"
    assert axis.lines[0].get_xdata().tolist() == [0.001, 0.5]


def test_the_command_line_sweeps(in_tmp, monkeypatch, capsys):
    words = ["compare", "fedavg", "--sweep", "batch=8,16", "--clients", "4", "--rounds", "1",
             "--seeds", "1", "--out", "s"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["fedloom", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "The best of each method" in capsys.readouterr().out
    assert Path("s/sweep-batch.png").exists()
    monkeypatch.setattr(sys, "argv", ["fedloom", *words, "--overwrite"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    assert "continues what is in its --out" in capsys.readouterr().err


def test_a_sweep_is_resumed_from_what_its_folder_says(call):
    run_sweep(sweep("lr=0.01,0.1"), 1, "s", 1, lambda *_: None)
    kept = Path("s/fedavg-lr=0.01-s0/rounds.jsonl").stat().st_mtime_ns
    shutil.rmtree("s/fedavg-lr=0.1-s0")
    code, said = call("compare", "--resume", "--out", "s", "--batch", "8")
    assert (code, "so batch can't be given" in said) == (2, True)
    code, said = call("compare", "--resume", "--out", "s")
    assert (code, "All runs, one seed" in said) == (0, True), said
    assert Path("s/fedavg-lr=0.1-s0/config.yaml").exists()
    assert Path("s/fedavg-lr=0.01-s0/rounds.jsonl").stat().st_mtime_ns == kept
