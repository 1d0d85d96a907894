"""Every method with its default options, from the command line, on every engine."""

import sys

import numpy as np
import pytest
from engine_cases import REGISTERED

import fedloom
from fedloom.cli import main


@pytest.fixture
def call(in_tmp, monkeypatch, capsys):
    """`fedloom WORDS` in this process: its exit code and what it printed as an error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, capsys.readouterr().err

    return run


FEW = ["--clients", "4", "--rounds", "1", "--workers", "2", "--out", "run"]


@pytest.mark.parametrize("engine", ["serial", "stacked", "processes"])
@pytest.mark.parametrize("name", REGISTERED)
def test_every_method_runs_with_its_defaults(call, name, engine):
    code, error = call("run", name, "--engine", engine, *FEW)
    assert code == 0, error
    result = fedloom.load("run")
    (record,) = result.records
    assert 0 < record["train_loss"] < 5
    assert record["steps"] > 0
    assert record["macs"] > 0
    assert len(result.clients) == 4
    assert result.clients["accuracy"].between(0, 1).all()
    assert np.isfinite(result.clients["loss"]).all()


DIFFERENTIATE = [name for name, cls in REGISTERED.items() if cls().build().local.differentiates]


@pytest.mark.parametrize("name", DIFFERENTIATE)
def test_what_can_not_be_stacked_is_refused_in_a_sentence(call, name):
    model = ["--model", "conv4", "--set", "model_options.channels=[2,2,2,2]"]
    model += ["--set", "model_options.norm=batch"]
    code, error = call("run", name, "--engine", "stacked", *FEW, *model)
    assert code == 2
    assert "batch-norm statistics, which can't be stacked. Use --engine serial" in error
    assert "Traceback" not in error
