"""A process killed, or a disk full, at every single operation on files: nothing is lost or stuck.

The rounds of these runs are made up, so that a whole run costs milliseconds; all files are real.
"""

import errno
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment import api
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.identity import settings_of
from fedloom.experiment.runner import Runner
from fedloom.experiment.store import RunStore
from fedloom.tasks import CLASSES

TIMES = ["seconds", "eval_seconds", "peak_memory"]


class State:
    def __init__(self, seed):
        self.shared = torch.full((3,), float(seed))

    def tensors(self):
        return {"shared": self.shared}


class MadeUp(SimpleNamespace):
    def restore(self, path, tensors, about, free=()):
        self.state.shared = tensors["shared"].clone()

    def adopt(self, path, tensors, about):
        self.restore(path, tensors, about)


def prepared(config, method, **given):
    return MadeUp(
        config=config, state=State(config.seed), about={"settings": settings_of(config)},
        engine=SimpleNamespace(close=lambda: None), device=torch.device("cpu"), manifest={},
        federation=SimpleNamespace(
            partition=SimpleNamespace(names=()), label_counts=lambda client: np.array([1, 2])
        ),
        dataset=SimpleNamespace(classes=("a", "b"), task=CLASSES),
    )  # fmt: skip


def made_up_round(self, t):
    state = self.experiment.state
    state.shared = state.shared * 0.5 + t
    return {"round": t, "participants": [0], "seconds": 0.0, "train_loss": float(state.shared[0]),
            "bytes_up": 1, "bytes_down": 1, "macs": 1, "profile": {"mix": 0.0}}  # fmt: skip


def made_up_score(self, t):
    loss = float(self.experiment.state.shared[0])
    table = pd.DataFrame({"round": [t], "population": "local", "client": [0], "loss": [loss]})
    return {"test": {"loss": loss}}, table


@pytest.fixture
def hollow(in_tmp, monkeypatch):
    """`hollow("here", seed=2)`: a run of two rounds that trains nothing."""
    monkeypatch.setattr(api, "prepare", prepared)
    monkeypatch.setattr(Runner, "round", made_up_round)
    monkeypatch.setattr(Evaluation, "score", made_up_score)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # which takes most of the time

    def run(out, **settings):
        return fedloom.run(out=out, **{"rounds": 2, "eval_every": 1, **settings})

    return run


class Kill(BaseException):
    """The end of a process: nothing that stands after it may change the disk."""


class Disk:
    """Counts the operations on files, and from the one numbered `at` on lets none happen.

    A kill stops everything, in the middle of a write; a full disk refuses only what needs space.
    """

    SPACE = ("mkdir", "open", "write", "save")

    def __init__(self, at, *, full=False):
        self.at, self.full, self.done, self.patch = at, full, 0, pytest.MonkeyPatch()

    def __enter__(self):
        for name in ("replace", "mkdir", "unlink", "rmdir", "fsync", "chmod"):
            self.patch.setattr(os, name, self.guarded(name, getattr(os, name)))
        plain, save = io.open, safetensors.torch.save_file

        def opened(file, mode="r", *args, **kwargs):
            if not set(mode) & set("wa+x"):
                return plain(file, mode, *args, **kwargs)
            self.step("open")
            return Half(plain(file, mode, *args, **kwargs), self)

        def saved(tensors, file, metadata):
            save(tensors, file, metadata=metadata)
            whole = Path(file).read_bytes()
            os.truncate(file, len(whole) // 2)
            try:
                self.step("save")
            except OSError as e:
                raise safetensors.SafetensorError(f"No space left (os error {e.errno})") from None
            with plain(file, "wb") as f:
                f.write(whole)

        self.patch.setattr(io, "open", opened)
        self.patch.setattr(safetensors.torch, "save_file", saved)
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def guarded(self, name, original):
        def call(*args, **kwargs):
            self.step(name)
            return original(*args, **kwargs)

        return call

    def step(self, name):
        if self.full and name not in self.SPACE:
            return
        self.done += 1
        if self.done > self.at:
            raise OSError(errno.ENOSPC, "No space left on device") if self.full else Kill


class Half:
    """A file whose last write before the end is half done."""

    def __init__(self, file, disk):
        self.file, self.disk = file, disk

    def write(self, content):
        try:
            self.disk.step("write")
        except BaseException:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            raise
        return self.file.write(content)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def outcome(path):
    """All that a run came to."""
    result = fedloom.load(path)
    rounds = result.rounds.drop(columns=TIMES).to_json()
    state = tuple(result.store.checkpoint()[0]["shared"].tolist())
    return result.config["seed"], rounds, result.clients.to_json(), state


def ending(command):
    """What a command ends with, if not well."""
    try:
        command()
    except (Kill, FedloomError, OSError) as e:
        return e
    return None


def at_every_point(command, full, before=lambda: None):
    """Run `command` again and again, stopped at one point after the other; yields whenever it has
    left other files than at all points before."""
    seen = set()
    for at in range(500):
        shutil.rmtree("here", ignore_errors=True)
        before()
        with Disk(at, full=full) as disk:
            stopped = ending(command)
        if disk.done <= at:
            assert stopped is None
            break
        if not full:
            assert isinstance(stopped, Kill)
        elif stopped is not None:
            assert "full" in str(stopped) or stopped.errno == errno.ENOSPC
        left = tuple(sorted((f.as_posix(), f.stat().st_size) for f in Path("here").rglob("*.*")))
        if left not in seen:
            yield at
        seen.add(left)
    assert at > (20 if full else 40), "hardly anything was tried"


def copied(command):
    """The outcome of a command on a copy of the folder; what it refuses is None."""
    shutil.rmtree("copy", ignore_errors=True)
    if Path("here").exists():
        shutil.copytree("here", "copy")
    try:
        command()
    except FedloomError:
        return None
    names = {file.name for file in Path("copy").rglob("*")}
    assert "clients.parquet" in names
    assert not {
        name for name in names if name.endswith(".tmp") or name in (".replaced", ".dropped")
    }
    return outcome("copy")


@pytest.mark.parametrize("full", [False, True], ids=["killed", "full disk"])
def test_a_run_stopped_at_any_point_goes_on_to_the_same_end(hollow, full):
    whole = outcome(hollow("whole", seed=1).path)
    for at in at_every_point(lambda: hollow("here", seed=1), full):
        again = copied(lambda: hollow("copy", seed=1))
        resumed = copied(lambda: fedloom.run(out="copy", resume=True))
        assert {again, resumed} <= {None, whole}, at
        assert again or resumed, at
        assert copied(lambda: hollow("copy", seed=1, overwrite=True)) == whole, at


@pytest.mark.parametrize("full", [False, True], ids=["killed", "full disk"])
def test_a_run_is_kept_until_the_one_that_replaces_it_has_a_checkpoint(hollow, full):
    old = outcome(hollow("old", seed=1).path)
    new = outcome(hollow("new", seed=2).path)

    def replace(out="here"):
        return hollow(out, seed=2, overwrite=True)

    def finished_run_there():
        shutil.copytree("old", "here")

    for at in at_every_point(replace, full, finished_run_there):
        resumed = copied(lambda: fedloom.run(out="copy", resume=True))
        if resumed != old:
            assert resumed == new, at
            assert RunStore(Path("here")).has_checkpoint(), at
        assert copied(lambda: replace("copy")) == new, at


def test_an_overwrite_that_fails_before_its_first_checkpoint_gives_the_old_run_back(
    hollow, monkeypatch
):
    old = outcome(hollow("here", seed=1).path)

    def refuse(self, t):
        raise FedloomError("no")

    def interrupt(self, t):
        raise KeyboardInterrupt

    for stop in (refuse, interrupt):
        monkeypatch.setattr(Runner, "round", stop)
        with pytest.raises((FedloomError, api.Stopped)):
            hollow("here", seed=2, overwrite=True)
        assert outcome("here") == old


def test_parts_of_a_run_without_a_config_can_be_overwritten(hollow):
    whole = outcome(hollow("here", seed=1).path)
    Path("here/config.yaml").unlink()
    with pytest.raises(FedloomError, match=r"without its config.yaml.*--overwrite"):
        hollow("here", seed=1)
    hollow("here", seed=1, overwrite=True)
    assert outcome("here") == whole


def test_a_comparison_goes_on_where_one_of_its_runs_was_killed_at_its_start(hollow):
    for at in range(7):
        shutil.rmtree("both", ignore_errors=True)
        with Disk(at + 3), pytest.raises(Kill):
            fedloom.compare(["fedavg", "local"], seeds=1, out="both", rounds=2)
        done = fedloom.compare(["fedavg", "local"], seeds=1, out="both", rounds=2, resume=True)
        assert {name: len(runs) for name, runs in done.results.items()} == {"fedavg": 1, "local": 1}


def test_a_checkpoint_is_on_the_disk_before_a_run_counts_on_it(hollow, monkeypatch):
    """With rounds longer than the shortest time between two syncs."""
    monkeypatch.setattr("fedloom.experiment.store._SYNC_EVERY", 0)
    synced, steps = [], []
    replace = os.replace

    def syncing(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    def replacing(source, target):
        if Path(target).suffix == ".safetensors":
            assert Path(source).name in synced
            assert {"rounds.jsonl", "here"} & set(synced)
            steps.append(synced.copy())
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    hollow("here")
    assert [("rounds.jsonl" in s, f"round-00000{t}.parquet" in s) for t, s in enumerate(steps, 1)] \
        == [(True, True)] * 2  # fmt: skip
    assert "checkpoints" in synced
