"""Runs on disk: whole after a kill, resumed bit for bit, read back."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

import fedloom
from fedloom.data.catalog import load
from fedloom.data.partition import partition
from fedloom.engine import Diverged
from fedloom.errors import FedloomError
from fedloom.experiment.config import read_config
from fedloom.experiment.ending import KILLED, Ending
from fedloom.experiment.store import RunStore
from fedloom.local import SGD
from fedloom.mix import Average
from fedloom.report.terminal import print_result

TIMES = ["seconds", "eval_seconds", "peak_memory"]


def same_runs(a, b):
    """Equal states, records and tables, except for times and memory."""
    first, second = a.store.checkpoint()[0], b.store.checkpoint()[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    pd.testing.assert_frame_equal(a.rounds.drop(columns=TIMES), b.rounds.drop(columns=TIMES))
    pd.testing.assert_frame_equal(a.clients, b.clients)


class SwallowsCtrlC:
    """A watcher in whose callback Ctrl-C is pressed and dropped, as compiled code may do."""

    def start(self, name, rounds, done): ...

    def round(self, record):
        if record["round"] == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    def end(self): ...


def test_ctrl_c_is_heeded_even_if_a_library_drops_it(quick, in_tmp):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            quick(rounds=9, out="stopped", watchers=[SwallowsCtrlC()])
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(fedloom.load("stopped").rounds) == 2


def test_what_a_run_leaves_behind(quick):
    result = quick(rounds=4, eval_every=3)
    names = sorted(p.relative_to(result.path).as_posix() for p in result.path.rglob("*"))
    assert names == [
        ".lock", "about.json", "checkpoints", "checkpoints/round-000003.safetensors",
        "checkpoints/round-000004.safetensors", "clients",
        "clients.parquet", "config.yaml", "manifest.yaml", "rounds.jsonl",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (result.path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert ["test" in line for line in lines] == [False, False, True, True]
    table = pd.read_parquet(result.path / "clients.parquet")
    assert sorted(table["round"].unique()) == [3, 4]
    assert len(table) == 12
    for column in ("client", "capacity", "train_samples", "samples", "accuracy", "loss",
                   "precision", "recall", "f1"):  # fmt: skip
        assert column in table
    last = table[table["round"] == 4]
    assert result.summary["macro"] == pytest.approx(last["accuracy"].mean())
    assert result.summary["micro"] == pytest.approx(last["correct"].sum() / last["samples"].sum())


class StopsAfter:
    """A watcher that presses Ctrl-C after a round."""

    def __init__(self, last):
        self.last = last

    def start(self, name, rounds, done): ...

    def round(self, record):
        if record["round"] == self.last:
            raise KeyboardInterrupt

    def end(self): ...


@pytest.mark.parametrize("method", ["fedavg", "local", "fedsgd", "centralised"])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(quick, method, stop):
    common = {"augment": "crop:1", "eval_every": 2, "rounds": 5}
    if method != "fedsgd":
        common["momentum"] = 0.9
    whole = quick(method, **common)
    with pytest.raises(KeyboardInterrupt):
        quick(method, out="half", watchers=[StopsAfter(stop)], **common)
    assert len(fedloom.load("half").rounds) == stop
    same_runs(whole, quick(method, out="half", resume=True, **common))


def test_a_lengthened_run_is_the_long_one_but_for_the_score_at_its_old_end(quick):
    whole = quick(rounds=5, eval_every=2)
    quick(rounds=3, eval_every=2, out="short")
    longer = quick(rounds=5, eval_every=2, out="short", resume=True)
    assert torch.equal(*(r.store.checkpoint()[0]["shared"] for r in (whole, longer)))
    assert whole.evaluations["round"].tolist() == [2, 4, 5]
    assert longer.evaluations["round"].tolist() == [2, 3, 4, 5]
    kept = longer.clients[longer.clients["round"] != 3].reset_index(drop=True)
    pd.testing.assert_frame_equal(whole.clients, kept)


RUN = """
import fedloom, os, signal, sys
from fedloom.experiment import store

kill_at, moment = int(sys.argv[1]), sys.argv[2]
writes = {{"n": 0}}
original = getattr(store.RunStore, moment)

def dying(self, *args, **kwargs):
    writes["n"] += 1
    if writes["n"] == kill_at:
        {when}
    return original(self, *args, **kwargs)

setattr(store.RunStore, moment, dying)
fedloom.run("local", clients=6, partition="iid", rounds=6, participation=0.5, eval_every=1,
            model_options={{"hidden": [16]}}, engine="serial", out="killed")
"""
BEFORE = "os.kill(os.getpid(), signal.SIGKILL)"
AFTER = "original(self, *args, **kwargs); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("moment", ["add_checkpoint"])  # test_kills.py has all the others
@pytest.mark.parametrize("when", [BEFORE, AFTER], ids=["before", "after"])
def test_a_kill_loses_at_most_the_current_round(quick, in_tmp, moment, when):
    whole = quick("local", rounds=6)
    done = subprocess.run([sys.executable, "-c", RUN.format(when=when), "4", moment], check=False)
    assert done.returncode == -signal.SIGKILL
    kept = RunStore(Path("killed")).checkpoint()[1]["round"]
    assert kept >= 3
    same_runs(whole, quick("local", rounds=6, out="killed", resume=True))


def test_a_killed_run_ended_without_a_word_until_it_goes_on(quick, call):
    words = [sys.executable, "-c", RUN.format(when=BEFORE), "3", "add_checkpoint"]
    subprocess.run(words, check=False)
    assert RunStore(Path("killed")).ending.kind == KILLED
    code, said = call("show", "killed")
    assert (code, "rounds done; ended without a word (killed?); continue" in said) == (0, True)
    with pytest.raises(FedloomError, match="was started with"):
        quick("local", rounds=6, lr=0.5, out="killed", resume=True)
    assert RunStore(Path("killed")).ending.kind == KILLED  # nothing went on
    done = quick("local", rounds=6, out="killed", resume=True)
    assert done.store.ending is None
    assert not (done.path / ".running").exists()


class Failing(Average):
    """Fails in round 3, as long as it is told to."""

    error: ClassVar[BaseException | None] = None

    def combine(self, gathering):
        if gathering.round == 3 and self.error is not None:
            raise self.error
        return super().combine(gathering)


@pytest.fixture
def failing(quick, monkeypatch):
    """`failing(error)`: a run of five rounds whose mix raises this in round 3."""

    def run(error, **settings):
        monkeypatch.setattr(Failing, "error", error)
        method = fedloom.Method(local=SGD(), mix=Failing())
        return quick(method, rounds=5, **{"out": "r", **settings})

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("oops\n  [bold]twice"), "failed in round 3: ValueError: oops [bold]twice"),
        (FedloomError("Not like this."), "failed in round 3: Not like this"),
        (Diverged("Training diverged: it is NaN. Lower --lr."), "diverged in round 3: it is NaN."),
    ],
)
def test_what_ended_a_run_is_in_its_folder_until_it_goes_on(failing, call, error, said):
    with pytest.raises(type(error)):
        failing(error)
    kept = json.loads(Path("r/error.json").read_text())
    assert (kept["kind"], kept["round"]) == (said.split()[0], 3)
    assert kept["message"] == RunStore(Path("r")).ending.message
    code, shown = call("show", "r")
    assert (code, f"2 of 5 rounds done; {said}" in shown) == (0, True)
    again = "continue with: fedloom run --resume --out r"
    assert (again in " ".join(shown.split())) == (not isinstance(error, Diverged))
    same_runs(failing(None, resume=True), failing(None, out="whole"))
    assert not Path("r/error.json").exists()
    assert fedloom.load("r").store.ending is None


def test_a_run_that_is_replaced_in_vain_keeps_what_ended_it(failing):
    with pytest.raises(ValueError, match="first"):
        failing(ValueError("first"))
    with pytest.raises(ValueError, match="second"):
        failing(ValueError("second"), overwrite=True, checkpoint_every=5)
    assert RunStore(Path("r")).ending.text == "failed in round 3: ValueError: first"


def test_an_error_that_can_not_be_written_down_is_still_raised(failing, monkeypatch):
    def full(self, file):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(Ending, "write", full)
    with pytest.raises(ValueError, match="oops"):
        failing(ValueError("oops"))
    assert RunStore(Path("r")).ending.text == "ended without a word (killed?)"


def test_a_damaged_error_is_named_and_not_shown(failing):
    with pytest.raises(ValueError, match="oops"):
        failing(ValueError("oops"))
    file = Path("r/error.json")
    file.write_text(file.read_text().replace("oops", "fine"))
    said = RunStore(Path("r")).ending.text
    assert said.startswith("failed: why is not known, error.json is damaged")
    assert "fine" not in said


def test_torn_files_are_passed_over(quick):
    whole = quick(rounds=4)
    torn = quick(rounds=3, out="torn")
    with (torn.path / "rounds.jsonl").open("a") as f:
        f.write('{"round": 4, "trai')
    (torn.path / "checkpoints" / "round-000009.safetensors").write_bytes(b"half")
    (torn.path / "checkpoints" / ".round-000004.safetensors.1.tmp").write_bytes(b"half")
    assert len(fedloom.load("torn").rounds) == 3
    with pytest.warns(UserWarning, match="Going on from round 3"):
        same_runs(whole, quick(rounds=4, out="torn", resume=True))


def test_checkpoint_every_spares_writes_and_still_resumes(quick):
    whole = quick(rounds=5)
    part = quick(rounds=5, checkpoint_every=2, out="rare")
    assert part.store.checkpoint()[1]["round"] == 5
    saved = sorted((part.path / "checkpoints").iterdir())
    assert [f.stem for f in saved] == ["round-000004", "round-000005"]
    saved[-1].unlink()
    again = quick(rounds=5, checkpoint_every=2, out="rare", resume=True)
    assert torch.equal(whole.store.checkpoint()[0]["shared"], again.store.checkpoint()[0]["shared"])


def test_the_resolved_config_reruns_the_run_exactly(quick, in_tmp):
    first = quick("fedprox", mu=0.3, seed=4, momentum=0.5, partition="dirichlet:0.4")
    settings = yaml.safe_load((first.path / "config.yaml").read_text())
    assert settings["params"] == {"mu": 0.3}
    second = fedloom.run(settings.pop("method"), **settings)
    same_runs(first, second)


def test_the_model_comes_back_as_a_plain_module(quick, row):
    result = quick()
    module = result.model()
    assert isinstance(module, nn.Module)
    assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), row(result))
    data = fedloom.experiment.setup.load_dataset(fedloom.Config())
    x = torch.from_numpy(np.asarray(data.x_test[np.arange(len(data.y_test))])).float()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
    right = module((x / 255 - mean) / std).argmax(1).numpy() == data.y_test
    assert right.mean() == pytest.approx(result.summary["test_accuracy"])


def test_personal_models_come_back_for_their_client(quick):
    result = quick("local", participation=1.0)
    assert not torch.equal(result.model(client=0).out.bias, result.model(client=1).out.bias)
    with pytest.raises(FedloomError, match="name one"):
        result.model()
    with pytest.raises(FedloomError, match="0 to 5"):
        result.model(client=6)


def test_a_model_of_ones_own_needs_its_factory_again(quick):
    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    result = quick(model=factory)
    assert isinstance(result.model(factory=factory), nn.Sequential)
    with pytest.raises(FedloomError, match="factory"):
        result.model()


def test_data_of_ones_own(in_tmp):
    rng = np.random.default_rng(0)
    x, y = rng.random((120, 5)).astype(np.float32), np.array(["cat", "dog", "fox"] * 40)
    x[:, 0] += 2 * (y == "cat")
    x[:, 1] += 2 * (y == "dog")
    result = fedloom.run("fedavg", data=(x, y), clients=4, partition="iid", rounds=20, lr=0.5)
    assert result.summary["test_accuracy"] > 0.9
    assert result.model()(torch.zeros(1, 1, 1, 5)).shape == (1, 3)
    with pytest.raises(FedloomError, match="Python object"):
        fedloom.run("fedavg", out=result.path, resume=True, rounds=30)


def test_existing_runs_are_not_overwritten_unless_asked(quick):
    quick(out="here")
    with pytest.raises(FedloomError, match="--resume"):
        quick(out="here")
    quick(out="here", overwrite=True, seed=3)
    assert fedloom.load("here").config["seed"] == 3
    Path("other").mkdir()
    Path("other/precious.txt").write_text("mine")
    with pytest.raises(FedloomError, match="other files"):
        quick(out="other", overwrite=True)
    assert Path("other/precious.txt").exists()


def test_a_run_has_one_writer(quick):
    first = quick(out="here", rounds=1)
    with first.store.held(), pytest.raises(FedloomError, match="Another process"):
        quick(out="here", resume=True, rounds=2)
    quick(out="here", resume=True, rounds=2)


def test_a_failed_start_leaves_nothing_behind(quick):
    with pytest.raises(FedloomError):
        quick(out="never", partition="classes:99")
    assert not Path("never").exists()


def test_default_names_never_collide(quick):
    paths = [quick(rounds=1).path.name for _ in range(3)]
    assert paths == ["fedavg-digits-s0", "fedavg-digits-s0-2", "fedavg-digits-s0-3"]


@pytest.mark.parametrize("change", [{"lr": 0.1}, {"seed": 1}, {"clients": 7}])
def test_a_run_is_not_resumed_as_another(quick, change):
    quick(out="here")
    with pytest.raises(FedloomError, match="was started with"):
        quick(out="here", resume=True, rounds=5, **change)


def test_a_cosine_run_cannot_be_lengthened(quick):
    quick(out="here", lr_schedule="cosine")
    with pytest.raises(FedloomError, match="cosine"):
        quick(out="here", resume=True, rounds=9, lr_schedule="cosine")


def test_resuming_a_finished_run_does_nothing(quick):
    first = quick(out="here")
    stamp = os.stat(first.path / "rounds.jsonl").st_mtime_ns
    quick(out="here", resume=True)
    assert os.stat(first.path / "rounds.jsonl").st_mtime_ns == stamp


def test_divergence_stops_with_a_sentence_and_keeps_what_was_done(quick):
    with pytest.raises(FedloomError, match=r"client \d+ in round 1 holds NaN"):
        quick(lr=1e30, rounds=5, out="hot")
    assert fedloom.load("hot").config["lr"] == 1e30


def test_scores_that_are_not_finite_are_stored_as_missing(quick):
    class Loud(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)) * (1 if self.training else float("inf"))

    result = quick(model=lambda shape, classes: Loud(64, classes), rounds=1)
    assert result.records[0]["test"]["loss"] is None
    text = (result.path / "rounds.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["clients"]["loss"] is None
    assert result.summary["test_accuracy"] >= 0
    print_result(result, details=True)


def test_a_full_disk_loses_nothing(quick, monkeypatch):
    original = safetensors.torch.save_file
    calls = {"n": 0}

    def full(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == 3:
            raise safetensors.SafetensorError("I/O error: No space left (os error 28)")
        return original(*args, **kwargs)

    whole = quick(rounds=5)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(FedloomError, match="disk is full"):
        quick(rounds=5, out="full")
    same_runs(whole, quick(rounds=5, out="full", resume=True))


def test_a_million_registered_clients_cost_their_index_only(in_tmp):
    result = fedloom.run(
        "fedavg", data="synthetic", clients=1_000_000, participation=5, partition="iid", rounds=2,
        data_options={"samples": 2_000_000}, eval_clients=10, eval_every=2, test_share=0.5,
    )  # fmt: skip
    assert result.rounds["participants"].tolist() == [5, 5]
    assert len(result.clients) == 10


def test_plots(quick):
    result = quick(newcomers=2)
    figure = result.plot("run.png")
    assert Path("run.png").stat().st_size > 10_000
    assert len(figure.axes) == 2
    with pytest.raises(FedloomError, match="picture"):
        result.plot("run.xyz")


@pytest.mark.parametrize("name", ["config.yaml", "clients.parquet"])
@pytest.mark.parametrize("content", [b"", b"PAR1 half", b"\xff\xfe: [", b"a: " + b"[" * 2000])
def test_damaged_files_of_a_run_are_named(quick, name, content):
    result = quick()
    (result.path / name).write_bytes(content)
    with pytest.raises(FedloomError, match=rf"{name}' is damaged"):
        print_result(fedloom.load(result.path), details=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:1], b'{"round": 2, "par\n', *lines[2:]],
        lambda lines: [*lines[:1], b"\xff\xfe\n", *lines[2:]],
        lambda lines: [*lines[:1], b"7\n", *lines[2:]],
        lambda lines: [*lines[:1], *lines[2:]],
        lambda lines: [],
        lambda lines: [*lines[:2], lines[2].replace(b"0", b"1", 1), lines[3]],
        lambda lines: [*lines[:2], lines[2][:-30] + b"\n", b'{"round": 4'],
    ],
    ids=["torn", "no text", "no record", "gap", "empty", "a digit", "the last two"],
)
def test_damaged_records_are_never_thrown_away(quick, damage):
    result = quick(rounds=4)
    file = result.path / "rounds.jsonl"
    damaged = b"".join(damage(file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(damaged)
    with pytest.raises(FedloomError, match=r"rounds.jsonl' is damaged"):
        quick(rounds=6, out=result.path, resume=True)
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("damage", [lambda line: line[:-9] + b"\n", lambda line: b"7\n"])
def test_a_damaged_last_record_is_refused_and_made_again_by_resuming(quick, damage):
    whole = quick(rounds=4)
    result = quick(rounds=4, out="hurt")
    file = result.path / "rounds.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], damage(lines[3])]))
    with pytest.raises(FedloomError, match="line 4 is not the record"):
        _ = fedloom.load("hurt").rounds
    with pytest.warns(UserWarning, match="Going on from round 3"):
        same_runs(whole, quick(rounds=4, out="hurt", resume=True))


def spoil(file, at=-1):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("every", "back"), [(1, 4), (2, 4), (3, 3)])
def test_a_damaged_checkpoint_is_not_taken_for_a_good_one(quick, every, back):
    settings = {"rounds": 5, "eval_every": 2, "checkpoint_every": every}
    result = quick(out="hurt", **settings)
    *_, last = sorted((result.path / "checkpoints").iterdir())
    spoil(last)
    with pytest.raises(FedloomError, match=rf"000005.safetensors' is damaged.* of round {back}"):
        result.model()
    with pytest.warns(UserWarning, match=f"Going on from round {back}"):
        same_runs(quick(**settings), quick(out="hurt", resume=True, **settings))


def test_a_run_with_damaged_checkpoints_only_is_refused(quick):
    result = quick(rounds=3)
    for file in (result.path / "checkpoints").iterdir():
        spoil(file)
    for use in (result.model, lambda: quick(rounds=4, out=result.path, resume=True)):
        with pytest.raises(FedloomError, match=r"round-000003.safetensors' is damaged"):
            use()
    for file in (result.path / "checkpoints").iterdir():
        file.unlink()
    (result.path / "checkpoints").rmdir()
    before = {f: f.read_bytes() for f in result.path.iterdir() if f.is_file()}
    with pytest.raises(FedloomError, match="records of 3 rounds, but its checkpoints are gone"):
        quick(rounds=4, out=result.path, resume=True)
    assert before == {f: f.read_bytes() for f in result.path.iterdir() if f.is_file()}
    config = result.path / "config.yaml"  # as the message says
    again = fedloom.run(**read_config(config), out=result.path, overwrite=True)
    same_runs(quick(rounds=3), again)


def test_a_run_stopped_before_its_first_checkpoint_starts_again_and_says_so(quick, monkeypatch):
    settings = {"rounds": 5, "checkpoint_every": 4}
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "add_checkpoint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quick(out="short", **settings)
    assert len(fedloom.load("short").rounds) == 4
    with pytest.warns(UserWarning, match="before its first checkpoint: training starts again"):
        same_runs(quick(**settings), quick(out="short", resume=True, **settings))


def test_a_run_does_not_go_on_with_other_data(quick):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 1, 4, 4)), np.arange(80) % 4
    first = quick(data=(x, y), rounds=2)
    with pytest.raises(FedloomError, match="other data"):
        quick(data=(x + 1, y), rounds=3, out=first.path, resume=True)
    assert len(quick(data=(x, y), rounds=3, out=first.path, resume=True).rounds) == 3


def test_normalised_images_score_as_in_the_run(quick):
    result = quick(rounds=5, lr=0.2)
    data = fedloom.data.catalog.load("digits")
    images = np.asarray(data.x_test[np.arange(len(data.x_test))])
    right = result.model()(result.normalise(images)).argmax(1).numpy() == data.y_test
    assert right.mean() == pytest.approx(result.summary["test_accuracy"])
    with pytest.raises(FedloomError, match="shape"):
        result.normalise(images[:, :, 1:])


def test_static_norms_of_a_shared_model_are_measured_on_everybodys_data(quick):
    """Scored with the statistics of one client's two classes, it would be much worse."""
    result = quick(
        "fedavg", model="conv4", model_options={"channels": [4, 4, 8, 8], "norm": "static"},
        partition="classes:2", clients=10, rounds=2, participation=1.0, lr=0.1,
    )  # fmt: skip
    digits = load("digits")
    model = result.model()
    with torch.no_grad():
        right = model(result.normalise(digits.x_test)).argmax(1).numpy() == digits.y_test
    assert right.mean() == pytest.approx(result.summary["test_accuracy"], abs=1e-9)
    everybody = model.state_dict()
    one = result.model(client=0).state_dict()
    moved = [k for k in one if not torch.equal(one[k], everybody[k])]
    assert moved
    assert all("running" in k or "tracked" in k for k in moved)
    fewer = quick(
        "fedavg", model="conv4", model_options={"channels": [4, 4, 8, 8], "norm": "static"},
        partition="classes:2", clients=10, rounds=2, participation=1.0, lr=0.1, eval_clients=2,
    ).clients  # fmt: skip
    same = result.clients[result.clients["client"].isin(fewer["client"])].reset_index(drop=True)
    assert fewer["accuracy"].tolist() == same["accuracy"].tolist()


@pytest.mark.parametrize("method", ["fedper", "fedmeta-per-maml"])
def test_the_stored_weights_of_private_parts_are_the_sizes_of_their_clients_data(quick, method):
    """n_k counted here from the partition, which is uneven; meta-learning weighs by query data."""
    spec = "quantity:lognormal,sigma=0.7"
    result = quick(method, partition=spec, participation=1.0, rounds=1)
    sizes = partition(spec, load("digits").y, 6, 0, n_classes=10).sizes
    train = [n - int(0.2 * n + 1e-9) for n in sizes]
    query = [n - max(int(0.2 * n + 1e-9), 1) for n in train]
    state = result.store.checkpoint()[0]
    assert len(set(train)) > 3
    assert state["kept/clients"].tolist() == list(range(6))
    assert state["kept/weights"].tolist() == (train if method == "fedper" else query)
