import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A small run in a directory of its own: `quick("fedavg", rounds=2)`."""
    monkeypatch.chdir(tmp_path)

    def run(method="fedavg", **settings):
        defaults = {
            "clients": 6, "partition": "iid", "rounds": 3, "participation": 0.5, "eval_every": 1,
            "model_options": {"hidden": [16]}, "engine": "serial",
        }  # fmt: skip
        if method == "centralised":
            del defaults["participation"]
        defaults.update(settings)
        if not isinstance(defaults.get("model", "mlp"), str) or defaults.get("model") == "lenet":
            defaults.pop("model_options")
        return fedloom.run(method, **defaults)

    return run


@pytest.fixture(scope="session")
def serial_run(tmp_path_factory):
    """The serial run of a method of `engine_cases`, once for all engines to be held against."""
    import engine_cases

    folder = tmp_path_factory.mktemp("serial")
    return functools.cache(lambda name: engine_cases.run(name, folder / name, engine="serial"))


@pytest.fixture
def row():
    """The shared row of a finished run."""

    def read(result):
        return result.store.checkpoint()[0]["shared"]

    return read


@pytest.fixture
def start_process():
    """Start a process that heeds Ctrl-C, even if the tests themselves run in the background."""
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return functools.partial(subprocess.Popen, preexec_fn=heed, text=True)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(in_tmp, monkeypatch, capsys):
    """`fedloom WORDS`: the exit code and what was printed."""

    from fedloom.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run
