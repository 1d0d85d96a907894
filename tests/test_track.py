"""What a tracking tool reads back is what the run wrote down: every round once, after a stop
too."""

import importlib.util
import json
import struct
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.experiment import track
from fedloom.experiment.runner import Runner

SMALL = {"clients": 4, "rounds": 4, "eval_every": 2, "model_options": {"hidden": [4]},
         "engine": "serial"}  # fmt: skip


@pytest.fixture(autouse=True)
def _event_files_sort_by_age(monkeypatch):
    """TensorBoard reads those of one second by a number of its process, as text: 10 before 9."""
    from tensorboard.summary.writer import event_file_writer as writer

    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


class StopsAfter:
    """Ctrl-C in a round, after the tracker has heard of it."""

    def __init__(self, number):
        self.number = number

    def start(self, name, rounds, done): ...

    def round(self, record):
        if record["round"] == self.number:
            raise KeyboardInterrupt

    def end(self): ...


def board(folder):
    """Scalar → {step: value}, and all steps in the order in which they are shown."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)]
            for name in events.Tags()["scalars"]}  # fmt: skip


def mlflow_history(folder):
    import mlflow

    known = json.loads((folder / "mlflow.json").read_text())
    client = mlflow.MlflowClient(tracking_uri=known["tracking_uri"])
    stored = client.get_run(known["run_id"])
    assert stored.info.status == "FINISHED"
    assert stored.data.params["method"] == "fedavg"
    return {name: [(m.step, m.value) for m in client.get_metric_history(known["run_id"], name)]
            for name in stored.data.metrics}  # fmt: skip


def log_records(file):
    """The records of a .wandb file: LevelDB's log format behind a header of seven bytes."""
    content, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little is left of the block for another one
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if not kind:
            break
        parts.append(content[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb_history(folder):
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # which waits until all is written
    out, ids = {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in log_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                value = (record.history.step.num, json.loads(item.value_json))
                out.setdefault(name, []).append(value)
    assert len(ids) == 1  # a run that goes on is the same run
    return out


READERS = {"tensorboard": board, "mlflow": mlflow_history, "wandb:offline": wandb_history}


@pytest.mark.parametrize("tool", READERS)
def test_a_tracked_run_that_was_stopped_goes_on_without_a_step_missing_or_twice(in_tmp, tool):
    pytest.importorskip(tool.partition(":")[0])
    settings = {**SMALL, "checkpoint_every": 2, "track": tool, "out": "run"}

    class Late(Runner):  # the stop comes after the tracker, not before it
        def __init__(self, experiment, store, watchers=()):
            super().__init__(experiment, store, [*watchers, StopsAfter(3)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.experiment.api.Runner", Late)
        with pytest.raises(KeyboardInterrupt):
            fedloom.run("fedavg", **settings)
    result = fedloom.run(out="run", resume=True)  # from round 2, with the tool that it had
    found = READERS[tool](Path("run/tracking"))
    for name in ("train_loss", "bytes_up", "test_accuracy", "macro"):
        column = result.rounds.set_index("round")[name].dropna()
        assert [step for step, _ in found[name]] == column.index.tolist(), name
        assert [value for _, value in found[name]] == pytest.approx(column.tolist())
    assert len(found["macro"]) == 2


def test_a_run_that_is_finished_can_be_tracked_later_and_a_fork_has_its_rounds(in_tmp):
    fedloom.run("fedavg", **SMALL, out="run")
    fedloom.run(out="run", resume=True, track="tensorboard")
    assert [step for step, _ in board("run/tracking")["train_loss"]] == [1, 2, 3, 4]
    fedloom.run(out="run", resume=True)
    assert [step for step, _ in board("run/tracking")["train_loss"]] == [1, 2, 3, 4]
    fedloom.run(fork="run@3", rounds=5, out="fork")
    assert [step for step, _ in board("fork/tracking")["train_loss"]] == [1, 2, 3, 4, 5]
    fedloom.run("fedavg", **SMALL, lr=0.5, out="run", overwrite=True, track="tensorboard")
    again = board("run/tracking")["train_loss"]
    assert [value for _, value in again] == pytest.approx(
        fedloom.load("run").rounds["train_loss"].tolist()
    )


def test_comparisons_and_sweeps_track_each_run(in_tmp, call):
    few = ("--clients", 4, "--rounds", 2, "--seeds", 1, "--track", "tensorboard")
    assert call("compare", "fedavg", "local", *few, "--out", "c")[0] == 0
    assert call("compare", "fedavg", "--sweep", "lr=0.1,0.2", *few, "--out", "s")[0] == 0
    folders = ["c/fedavg-s0", "c/local-s0", "s/fedavg-lr=0.1-s0", "s/fedavg-lr=0.2-s0"]
    for folder in folders:
        steps = [step for step, _ in board(f"{folder}/tracking")["train_loss"]]
        assert steps == [1, 2], folder


def test_a_tool_that_is_not_installed_is_named_before_any_work(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for words in (
        "run fedavg", "compare fedavg local", "compare fedavg --sweep lr=1,2",
        "tune fedavg --search lr=0.1..1 --runs 2",
    ):  # fmt: skip
        code, said = call(*words.split(), "--track", "mlflow", "--out", "x")
        assert code == 2
        assert said.strip().splitlines() == [
            "Error: --track mlflow needs a package that is not installed: "
            "pip install 'fedloom[mlflow]'."
        ]
        assert not Path("x").exists()


def test_unknown_tools_and_modes_are_refused(call):
    assert "Did you mean 'wandb'?" in call("run", "fedavg", "--track", "wandbb")[1]
    for word in ("tensorboard:offline", "wandb:", "wandb:x"):
        assert f"Unknown tracker '{word}'" in call("run", "fedavg", "--track", word)[1]


def test_a_tool_that_fails_on_the_way_costs_its_curve_and_not_the_run(in_tmp, monkeypatch):
    whole = track.TensorBoard.write

    def fails(self, step, values):
        if step == 2:
            raise OSError("the disk of the server is full")
        whole(self, step, values)

    monkeypatch.setattr(track.TensorBoard, "write", fails)
    with pytest.warns(UserWarning, match=r"stopped in round 2: the disk of the server is full\."):
        result = fedloom.run("fedavg", **SMALL, track="tensorboard", out="run")
    assert len(result.rounds) == 4
    monkeypatch.undo()
    fedloom.run(out=in_tmp / "run", resume=True)  # as the warning says
    assert [step for step, _ in board(in_tmp / "run/tracking")["train_loss"]] == [1, 2, 3, 4]


def test_without_tracking_no_tool_is_imported(quick):
    quick(rounds=1)
    assert not {"mlflow", "wandb"} & set(sys.modules)


def test_a_run_that_is_resumed_twice_is_tracked_without_a_warning(in_tmp, caplog):
    """TensorBoard would warn of the steps that the first resume wrote again."""
    fedloom.run("fedavg", **SMALL, track="tensorboard", out="run")
    for _ in range(2):
        fedloom.run(out="run", resume=True)
    assert not [r for r in caplog.records if r.name == "tensorboard"]
