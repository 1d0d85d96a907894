"""The doctor finds what is wrong; completion knows what there is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedloom import doctor, names

ROOT = Path(__file__).parent.parent


def test_all_is_well_here_and_every_part_is_looked_at(call):
    code, said = call("doctor")
    assert code == 0, said
    for word in ("python", "torch 2", "[watch]", "cpu", "kernels", "digits", "GB free", "FedAvg"):
        assert word in said
    assert "Everything that should work does." in said


def test_a_run_with_a_wrong_result_is_noticed(call, monkeypatch):
    monkeypatch.setitem(doctor._SELF_TEST, "lr", 1e-9)
    monkeypatch.setitem(doctor._SELF_TEST, "rounds", 1)
    monkeypatch.setitem(doctor._SELF_TEST, "eval_every", 1)
    code, said = call("doctor")
    assert code == 1
    assert "expected about 82 %" in said
    assert "see the 1 line with ✗" in said


def test_a_look_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise ValueError("no such thing")
        yield

    for name in ("_devices", "_data", "_self_test"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "_compiler", broken)
    found = list(doctor.examine())
    wrong = [f for f in found if f.state == "wrong"]
    assert [(f.what, f.says) for f in wrong] == [("broken", "ValueError: no such thing")]
    assert found[-1].what.startswith("disk")


def test_the_extras_are_those_of_the_package():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = asked["optional-dependencies"]
    for extra, (packages, _) in doctor.EXTRAS.items():
        assert [line.partition(">")[0] for line in extras[extra]] == list(packages)
    assert set(extras) - set(doctor.EXTRAS) == {"bench", "dev", "docs"}


def test_the_names_that_are_completed_are_those_that_there_are():
    from fedloom.data.catalog import names as data
    from fedloom.data.partition import partitioners
    from fedloom.engine.choose import ENGINES
    from fedloom.methods.registry import methods
    from fedloom.models import MODELS
    from fedloom.studies import STUDIES
    from fedloom.topology import NETWORKS

    assert names.ENGINES == ENGINES
    assert {p.partition(":")[0] for p in names.PARTITIONS} == {p[0] for p in partitioners()}
    assert set(names.METHODS) == set(methods())
    assert set(names.DATA) == set(data())
    assert set(names.MODELS) == set(MODELS)
    assert set(names.STUDIES) == set(STUDIES)
    assert {name.rstrip(":") for name in names.NETWORKS} == set(NETWORKS)


@pytest.mark.parametrize(
    ("words", "offered"),
    [("fedloom run fedmeta-per", ["fedmeta-per-maml", "fedmeta-per-metasgd"]),
     ("fedloom study s1", ["s1", "s1-when"]),
     ("fedloom run fedavg --topology way", ["waypoint"]),
     ("fedloom data fetch cifar", ["cifar10", "cifar100"]),
     ("fedloom run fedavg --optimiser-state k", ["kept"])],
)  # fmt: skip
def test_a_shell_completes_names_without_torch(words, offered):
    code = (
        "import os, sys; sys.argv = ['fedloom']\n"
        f"os.environ |= {{'_FEDLOOM_COMPLETE': 'complete_bash', 'COMP_WORDS': {words!r}, "
        f"'COMP_CWORD': {str(len(words.split()) - 1)!r}}}\n"
        "from fedloom.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == offered, done.stderr
