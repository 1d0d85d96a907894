"""Code runs only if the user named it: a run's config that somebody else made can't run its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fedloom
from fedloom.cli import main
from fedloom.data.catalog import load
from fedloom.errors import FedloomError
from fedloom.experiment import plugins

METHOD = """
from pathlib import Path
import fedloom

Path("MARKER").write_text("was here")


class Evil(fedloom.MethodOptions):
    name = "evil"
    family = source = "test"

    def build(self):
        return fedloom.Method()
"""
MODEL = """
from pathlib import Path
from torch import nn

Path("MARKER").write_text("was here")


def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def foreign(quick, monkeypatch):
    """`foreign("method")`: a run folder that somebody else made, with their code beside it."""

    def make(kind):
        Path("evil.py").write_text(METHOD if kind == "method" else MODEL)
        named = {"method": "evil.py"} if kind == "method" else {"model": "evil.py:net"}
        run = quick(**named, model_options={}, rounds=2, eval_every=1, out="theirs")
        assert Path("MARKER").exists()
        Path("MARKER").unlink()
        forget(monkeypatch)
        return run

    return make


def forget(monkeypatch):
    """Be another user, who never ran anything."""
    monkeypatch.setenv("FEDLOOM_STATE", str(Path("nobody").absolute()))
    monkeypatch.setattr(plugins, "_trusted", set())
    shutil.rmtree("nobody", ignore_errors=True)


def uses(kind):
    result = fedloom.load("theirs")
    images, labels = load("digits").x[:9], [0, 1, 2] * 3
    common = {
        "resume": lambda: fedloom.run(out="theirs", resume=True, rounds=3),
        "fork": lambda: fedloom.run(fork="theirs", out="new", rounds=9),
        "score": result.score,
        "newcomer": lambda: result.newcomer_model(images, labels),
    }
    return common | ({"model": result.model} if kind == "model" else {})


@pytest.mark.parametrize("kind", ["method", "model"])
def test_code_that_only_a_run_names_is_not_run(foreign, kind):
    foreign(kind)
    for use in uses(kind).values():
        with pytest.raises(FedloomError, match=r"'evil.py' is a program that you have not run"):
            use()
        assert not Path("MARKER").exists()
    fedloom.load("theirs").plot("theirs.png")
    assert not Path("MARKER").exists()


@pytest.mark.parametrize("kind", ["method", "model"])
def test_code_that_was_named_once_runs_until_it_changes(foreign, kind, monkeypatch):
    foreign(kind)
    fedloom.trust("evil.py")
    monkeypatch.setattr(plugins, "_trusted", set())  # in another process
    for use in uses(kind).values():
        use()
    Path("evil.py").write_text(Path("evil.py").read_text() + "\n# changed\n")
    with pytest.raises(FedloomError, match="changed since"):
        fedloom.load("theirs").score()


def test_a_file_in_the_run_folder_gains_nothing_by_its_place_or_name(foreign):
    foreign("method")
    shutil.move("evil.py", "theirs/fedavg.py")
    file = Path("theirs/config.yaml")
    config = yaml.safe_load(file.read_text())
    for name in (
        "theirs/fedavg.py",
        str(Path("theirs/fedavg.py").absolute()),
        "./theirs/fedavg.py",
    ):
        file.write_text(yaml.safe_dump({**config, "method": name}))
        with pytest.raises(FedloomError, match="is a program that you have not run"):
            fedloom.run(out="theirs", resume=True, rounds=3)
    assert not Path("MARKER").exists()


def test_compiled_code_beside_a_trusted_file_is_not_run(foreign, in_tmp):
    foreign("method")
    source = Path("evil.py")
    bad = source.read_text()
    harmless = bad.replace('"was here"', '"harmless"')
    assert len(harmless) == len(bad)
    compiled = subprocess.run(
        [sys.executable, "-c", "import py_compile; print(py_compile.compile('evil.py'))"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    stamp = source.stat()
    source.write_text(harmless)
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Path(compiled.strip()).exists()
    fedloom.trust(source)
    fedloom.load("theirs")
    plugins.method_class("evil.py")
    assert Path("MARKER").read_text() == "harmless"


def test_on_the_command_line_a_file_runs_if_it_is_named_there(foreign, monkeypatch, capsys):
    foreign("method")

    def cli(*words):
        monkeypatch.setattr(plugins, "_trusted", set())  # as in a process of its own
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        ran = Path("MARKER").exists()
        Path("MARKER").unlink(missing_ok=True)
        return code, ran

    resume = ("run", "--resume", "--out", "theirs", "--rounds")
    assert cli("run", "--config", "theirs/config.yaml", "--out", "mine") == (2, False)
    assert cli("run", "--fork", "theirs", "--out", "mine", "--rounds", "4") == (2, False)
    assert cli("score", "theirs") == (2, False)
    assert "add --trust evil.py" in capsys.readouterr().err
    assert cli("show", "theirs") == (0, False)
    assert cli(*resume, "3") == (2, False)
    assert cli("run", "evil.py", *resume[1:], "3") == (0, True)
    assert cli("score", "theirs") == (0, True)
    forget(monkeypatch)
    assert cli("score", "theirs", "--trust", "evil.py") == (0, True)
    assert cli(*resume, "4") == (0, True)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("method", {"own": {"evil.py": {}}}),
        ("model", {"own": {"fedavg": {}}, "asked": {"model": "evil.py:net"}}),
        ("loss", {"own": {"fedavg": {}}, "asked": {"loss": "evil.py:net"}}),
        ("model", {"own": {"fedavg@model=evil.py:net": {"model": "evil.py:net"}}}),
    ],
)
def test_code_that_only_a_comparison_names_is_not_run(in_tmp, monkeypatch, kind, record):
    forget(monkeypatch)
    Path("evil.py").write_text(METHOD if kind == "method" else MODEL)
    Path("theirs").mkdir()
    Path("theirs/comparison.yaml").write_text(yaml.safe_dump({"seeds": 1, "seed": 0, **record}))
    with pytest.raises(FedloomError, match=r"'evil.py' is a program that you have not run"):
        fedloom.compare(resume=True, out="theirs")
    assert not Path("MARKER").exists()


@pytest.mark.parametrize(
    ("methods", "axes", "settings"),
    [
        (["evil.py@lr=0.1"], {"batch": ["8"]}, {}),
        (["fedavg"], {"lr": ["0.1"]}, {"model": "evil.py:net"}),
        (["fedavg@model=evil.py:net"], {"lr": ["0.1"]}, {}),
        (["fedavg"], {"model": ["mlp", "evil.py:net"]}, {}),
    ],
)
def test_code_that_only_a_sweep_names_is_not_run(call, monkeypatch, methods, axes, settings):
    forget(monkeypatch)
    Path("evil.py").write_text(METHOD if "evil.py@" in methods[0] else MODEL)
    Path("theirs").mkdir()
    grid = {"methods": methods, "axes": axes, "settings": settings}
    Path("theirs/study.yaml").write_text(yaml.safe_dump({"sweep": grid, "seeds": 1}))
    for words in (["show", "theirs"], ["compare", "--resume", "--out", "theirs"]):
        code, said = call(*words)
        assert (code, "'evil.py' is a program that you have not run" in said) == (2, True)
    assert not Path("MARKER").exists()


def test_a_loss_that_only_a_config_names_is_not_run(call, monkeypatch):
    forget(monkeypatch)
    Path("evil.py").write_text(MODEL)
    Path("theirs.yaml").write_text("loss: evil.py:net\n")
    code, said = call("run", "fedavg", "--config", "theirs.yaml", "--rounds", "1")
    assert (code, "'evil.py' is a program that you have not run" in said) == (2, True)
    assert not Path("MARKER").exists()
