"""The same results from every engine, for every method."""

import fcntl
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_cases import METHODS, REGISTERED, dropout, federation, run, states
from test_contract import method
from torch import nn

import fedloom
from fedloom.engine.choose import pick
from fedloom.engine.processes import _ending, _Queue
from fedloom.errors import FedloomError, OutOfMemory
from fedloom.local import SGD
from fedloom.mix import Average
from fedloom.models import build
from fedloom.models.nets import Conv4
from fedloom.tasks import CLASSES

pytestmark = pytest.mark.xdist_group("engines")  # they share the serial runs


def same_scores(a, b):
    return (
        a.clients.equals(b.clients) and a.records[-1]["train_loss"] == b.records[-1]["train_loss"]
    )


def same_bits(a, b):
    return {key: torch.equal(value, states(b)[key]) for key, value in states(a).items()}


def test_the_clients_that_engines_are_tried_on_differ(serial_run):
    dealt = federation(serial_run("fedavg"))
    sizes = [dealt.size(c, "train") for c in range(7)]
    classes = {tuple(dealt.classes_of(c)) for c in range(7)}
    assert max(sizes) > 2 * min(sizes) > 0
    assert len({size % 8 for size in sizes}) > 2  # their last batches differ
    assert len(classes) > 4
    assert not any(all(held) for held in classes)


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("name", METHODS)
def test_processes_give_the_bits_of_serial_for_any_number_of_workers(serial_run, in_tmp, name):
    serial = serial_run(name)
    for workers in (1, 2, 3) if name in REGISTERED else (3,):
        pool = run(name, f"{workers}", engine="processes", workers=workers)
        assert all(same_bits(serial, pool).values()), same_bits(serial, pool)
        assert same_scores(serial, pool)


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("name", METHODS)
def test_stacked_is_serial_up_to_rounding_with_the_same_bits_for_any_number_of_workers(
    serial_run, in_tmp, name
):
    serial, stacked = serial_run(name), run(name, "one", engine="stacked", workers=1)
    for key, value in states(serial).items():
        assert torch.allclose(value, states(stacked)[key], atol=2e-5), key
    a, b = serial.clients, stacked.clients
    assert a[["client", "samples"]].equals(b[["client", "samples"]])
    assert np.allclose(a["loss"], b["loss"], atol=1e-4)
    assert a["accuracy"].sub(b["accuracy"]).abs().max() < 0.1
    assert np.allclose(serial.rounds["train_loss"], stacked.rounds["train_loss"], atol=1e-5)
    for column in ("steps", "macs", "bytes_up", "bytes_down"):
        assert serial.rounds[column].equals(stacked.rounds[column])
    several = run(name, "two", engine="stacked", workers=2)
    assert all(same_bits(stacked, several).values()), same_bits(stacked, several)
    assert same_scores(stacked, several)


@pytest.mark.parametrize("encode", ["fp16", "int8", "topk:0.1"])
def test_encoded_runs_are_the_same_on_all_engines_but_for_steps_of_the_encoding(in_tmp, encode):
    """Encodings have steps: rounding on which stacked differs may put a value on the other side of
    one. Workers change nothing, and neither do other bytes."""
    serial = run("fedavg", "serial", engine="serial", encode=encode, rounds=6)
    pool = run("fedavg", "pool", engine="processes", workers=2, encode=encode, rounds=6)
    assert all(same_bits(serial, pool).values())
    one, two = (run("fedavg", f"{n}", engine="stacked", workers=n, encode=encode, rounds=6)
                for n in (1, 2))  # fmt: skip
    assert all(same_bits(one, two).values())
    apart = (states(serial)["shared"] - states(one)["shared"]).abs()
    assert (apart > 2e-5).double().mean() < 0.01
    assert np.allclose(serial.rounds["train_loss"], one.rounds["train_loss"], atol=1e-3)
    assert serial.rounds["bytes_up"].equals(one.rounds["bytes_up"])


def test_dropout_gives_the_bits_of_serial_in_processes(in_tmp):
    more = {"model": dropout, "model_options": {}}
    serial = run("fedavg", "serial", engine="serial", **more)
    pool = run("fedavg", "pool", engine="processes", workers=2, **more)
    assert all(same_bits(serial, pool).values())


def test_fedprox_with_mu_zero_is_fedavg_to_the_bit_when_stacked(quick, row):
    more = {"engine": "stacked", "workers": 2, "partition": "dirichlet:0.3"}
    assert torch.equal(row(quick("fedavg", **more)), row(quick("fedprox", mu=0.0, **more)))


@pytest.mark.parametrize("engine", ["serial", "stacked", "processes"])
def test_the_training_loss_is_the_mean_over_all_samples(in_tmp, engine):
    """At a rate of next to nothing it is the initial model's, whatever the sizes of batches."""
    more = {"lr": 1e-12, "momentum": 0.0, "clip": None, "weight_decay": 0.0, "participation": 1.0}
    result = run("fedavg", "run", engine=engine, workers=2, newcomers=0, rounds=1, **more)
    dealt = federation(result)
    train, data = np.concatenate([dealt.indices(c, "train") for c in range(7)]), dealt.dataset
    module = build("mlp", data.shape, 10, 0, {"hidden": [16]})
    images = result.normalise(np.asarray(data.x[train]))
    labels = torch.from_numpy(np.asarray(data.y[train], dtype=np.int64))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(module(images).double(), labels)
    assert result.records[0]["train_loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_a_masked_loss_leaves_the_classes_alone_that_a_client_lacks(in_tmp, engine):
    """One client with two classes: nothing else in the last layer's biases may move."""
    start = build("mlp", (1, 8, 8), 10, 0, {"hidden": [16]}).out.bias.detach()
    moved, rows = {}, {}
    for mask in ("none", "zero", "inf"):
        more = {"partition": "classes:2", "participation": 0.2, "rounds": 1, "weight_decay": 0.0}
        more |= {"clients": 5, "newcomers": 0, "engine": engine, "capacities": "1:1"}
        result = run("heterofl", mask, mask=mask, **more)
        (client,) = result.records[0]["participants"]
        held = federation(result).classes_of(client)
        assert held.sum() == 2
        moved[mask] = (result.model().out.bias.detach() != start).numpy()
        rows[mask] = states(result)["shared"]
    assert moved["none"].all()
    assert (moved["zero"] == held).all()
    assert (moved["inf"] == held).all()
    assert not torch.equal(rows["zero"], rows["inf"])


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_workers_may_have_several_threads(in_tmp, quick, start_process, engine):
    one = quick(clients=4, participation=1.0, batch=200, out="one")
    words = ["--config", "one/config.yaml", "--threads", "2", "--workers", "2", "--out", "two"]
    command = [sys.executable, "-m", "fedloom", "run", *words, "--engine", engine]
    assert start_process(command).wait(300) == 0  # it could wait for ever
    two = states(fedloom.load(in_tmp / "two"))["shared"]
    assert torch.allclose(states(one)["shared"], two, atol=1e-5)


def test_many_personal_models_on_uneven_data_are_scored_stacked(quick):
    """Some clients have more than one batch to score, others none left in the second."""
    more = {"partition": "quantity:zipf", "test_share": 0.8, "rounds": 1, "participation": 1.0}
    serial, stacked = (quick("local", **more, engine=e) for e in ("serial", "stacked"))
    assert serial.clients["samples"].max() > 256 > serial.clients["samples"].min()
    assert np.allclose(serial.clients["loss"], stacked.clients["loss"], atol=1e-4)


def test_few_personal_models_may_do_for_the_common_test_set(quick):
    every, few = quick("local", participation=1.0), quick("local", participation=1.0, eval_common=2)
    assert every.summary["macro"] == few.summary["macro"]
    assert every.summary["test_accuracy"] != few.summary["test_accuracy"]
    assert "test_accuracy" not in quick("local", eval_common=0).summary


@pytest.mark.parametrize("augment", ["none", "crop:1"])
@pytest.mark.parametrize("hidden", [[], [16], [16, 8]])
def test_the_hand_written_mlp_is_vmap_and_autograd(quick, hidden, augment):
    class Own(SGD):
        """Hides the plain objective, so that `vmap` has to do it."""

        def objective(self, net, params, data, me):
            return super().objective(net, params, data, me)

    more = {"model_options": {"hidden": hidden}, "partition": "quantity:zipf", "augment": augment}
    serial = quick(**more)
    by_hand, by_vmap = (
        quick(**more, engine="stacked"),
        quick(method(local=Own()), **more, engine="stacked"),
    )
    for other in (by_hand, by_vmap):
        assert torch.allclose(states(serial)["shared"], states(other)["shared"], atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "none", "batch", "static"])
def test_convolutions_stack(quick, norm):
    def factory(shape, classes):
        return Conv4(shape, classes, channels=(4, 8, 8, 8), norm=norm)

    serial, stacked = (quick(model=factory, rounds=1, engine=e) for e in ("serial", "stacked"))
    assert torch.allclose(states(serial)["shared"], states(stacked)["shared"], atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_lenet_stacks_on_uneven_data(quick, name):
    more = {"data": "synthetic", "data_options": {"shape": "1x28x28", "samples": 120},
            "model": "lenet", "partition": "quantity:zipf", "batch": 7, "rounds": 2}  # fmt: skip
    serial, stacked = (quick(name, **more, engine=e) for e in ("serial", "stacked"))
    assert torch.allclose(states(serial)["shared"], states(stacked)["shared"], atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_batch_statistics_go_through_processes(quick, norm):
    def factory(shape, classes):
        return Conv4(shape, classes, channels=(4, 8, 8, 8), norm=norm)

    serial, pool = (quick(model=factory, rounds=2, engine=e) for e in ("serial", "processes"))
    assert torch.equal(states(serial)["shared"], states(pool)["shared"])
    assert serial.clients.equals(pool.clients)
    assert serial.summary["test_loss"] == pool.summary["test_loss"]


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_between_linear_layers_stacks(quick, tracked):
    def factory(shape, classes):
        norm = nn.BatchNorm1d(8, track_running_stats=tracked)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.Linear(8, classes))

    more = {"model": factory, "partition": "quantity:zipf", "rounds": 2, "batch": 7}
    serial, stacked = (quick(**more, engine=e) for e in ("serial", "stacked"))
    assert torch.allclose(states(serial)["shared"], states(stacked)["shared"], atol=1e-5)


def test_one_model_is_scored_without_a_stack_by_any_number_of_workers(quick, row):
    """A GRU can be trained in a stack, but not scored in one."""

    class Recurrent(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.gru, self.out = nn.GRU(8, 4, batch_first=True), nn.Linear(4, classes)

        def forward(self, x):
            return self.out(self.gru(x[:, 0])[0][:, -1])

    more = {"model": lambda shape, classes: Recurrent(classes), "rounds": 1, "engine": "stacked"}
    one, two = (quick(workers=workers, **more) for workers in (1, 2))
    assert torch.equal(row(one), row(two))
    assert one.clients.equals(two.clients)


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_models_that_flatten_by_view_run_on_torchs_kernels(quick, engine):
    """Behind convolutions whose kernels lie channels last, torch refuses such a view."""

    class Flat(nn.Module):
        def __init__(self, flatten):
            super().__init__()
            self.conv, self.out, self.flatten = nn.Conv2d(1, 4, 3), nn.Linear(144, 10), flatten

        def forward(self, x):
            return self.out(self.flatten(torch.relu(self.conv(x))))

    def factory(flatten):
        def make(shape, classes):
            torch.manual_seed(0)
            return Flat(flatten)

        return make

    viewed, flattened = (
        quick(model=factory(f), rounds=1, engine=engine, kernels="torch")
        for f in (lambda x: x.view(x.shape[0], -1), lambda x: x.flatten(1))
    )
    assert torch.allclose(states(viewed)["shared"], states(flattened)["shared"], atol=1e-6)


def test_models_that_cannot_be_stacked_are_refused_by_layer(quick):
    def factory(shape, classes):
        drop = nn.Dropout(0.5)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), drop, nn.Linear(8, classes))

    with pytest.raises(FedloomError, match=r"'2' \("):
        quick(model=factory, engine="stacked")


@dataclass(frozen=True)
class Dies(SGD):
    """The first time that client 2 trains in round 2, its worker is gone."""

    flag: str = "died"
    always: bool = False

    def plan(self, sizes, budget, rng):
        steps = super().plan(sizes, budget, rng)
        turn = Path(self.flag)
        turn.with_name(turn.name + "-count").open("a").write("x")
        if self.always or (len(steps) and not turn.exists()):
            turn.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return steps


def test_a_crashed_worker_is_replaced_and_its_client_retrained(quick, in_tmp):
    plain = quick(participation=1.0)
    crashed = quick(method(local=Dies(str(in_tmp / "flag"))), engine="processes",
                    participation=1.0, workers=2)  # fmt: skip
    assert (in_tmp / "flag").exists()
    assert torch.equal(states(plain)["shared"], states(crashed)["shared"])


def test_a_client_that_always_kills_its_worker_ends_the_run(quick, in_tmp):
    with pytest.raises(FedloomError, match="died 3 times"):
        quick(method(local=Dies(str(in_tmp / "flag"), always=True)), engine="processes", workers=2)


class Kills(Average):
    """After the first round, kills all workers, who have nothing to do then."""

    killed = 0

    def combine(self, g):
        if g.round == 1:
            for worker in mp.active_children():
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
                Kills.killed += 1
        return super().combine(g)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_that_die_while_idle_are_replaced(quick, workers, monkeypatch):
    monkeypatch.setattr(Kills, "killed", 0)
    plain = quick(participation=1.0)
    killed = quick(method(mix=Kills()), engine="processes", participation=1.0, workers=workers)
    assert Kills.killed == workers
    assert torch.equal(states(plain)["shared"], states(killed)["shared"])


@dataclass(frozen=True)
class Tires(SGD):
    """A worker is gone after every third client, as one is that leaks memory."""

    folder: str = ""

    def plan(self, sizes, budget, rng):
        count = Path(self.folder) / f"{os.getpid()}"
        done = len(count.read_text()) if count.exists() else 0
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        count.write_text("x" * (done + 1))
        return super().plan(sizes, budget, rng)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_whose_workers_do_not_last_gets_on(quick, in_tmp, workers):
    plain = quick(participation=1.0, rounds=2)
    tired = quick(method(local=Tires(str(in_tmp))), engine="processes", participation=1.0,
                  workers=workers, rounds=2)  # fmt: skip
    assert torch.equal(states(plain)["shared"], states(tired)["shared"])


class Odd(FedloomError):
    """Can't be read by another process."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


@dataclass(frozen=True)
class Complains(SGD):
    def plan(self, sizes, budget, rng):
        raise Odd("nothing", "works")


def test_an_error_that_can_not_be_pickled_is_told_by_its_text(quick):
    with pytest.raises(FedloomError, match="nothing: works"):
        quick(method(local=Complains()), engine="processes", workers=2)


def test_the_queue_of_jobs_fits_the_smallest_pipe_and_leaves_none_out():
    for count in (1, 7, 1024, 1025, 5000):
        queue = _Queue()
        fcntl.fcntl(queue._in, fcntl.F_SETPIPE_SZ, 4096)
        parts = queue.put(count)
        taken = [queue.take() for _ in range(parts)]
        assert queue.take() is None
        assert taken == list(range(parts))
        jobs = [k for p in taken for k in range(count * p // parts, count * (p + 1) // parts)]
        assert jobs == list(range(count))


@dataclass(frozen=True)
class Starves(SGD):
    """Asks for more memory than there can be in round 2, until the flag is there."""

    flag: str = "enough"

    def at(self, round):
        if round == 2 and not Path(self.flag).exists():
            torch.empty(2**60)
        return self


@pytest.mark.parametrize("engine", ["serial", "stacked", "processes"])
def test_running_out_of_memory_gets_a_sentence_and_the_run_can_go_on(quick, in_tmp, engine):
    plain = quick(engine=engine)
    rule = method(local=Starves(str(in_tmp / "flag")))
    more = {"engine": engine, "workers": 2, "out": "short"}
    with pytest.raises(OutOfMemory, match=r"not enough memory for training .* \(4,611,.* GB more"):
        quick(rule, **more)
    assert len(fedloom.load("short").rounds) == 1
    (in_tmp / "flag").touch()
    resumed = quick(rule, resume=True, **more)
    assert torch.allclose(states(plain)["shared"], states(resumed)["shared"], atol=1e-6)


@pytest.mark.parametrize(
    ("code", "starved", "word"),
    [(-9, True, "because memory ran out"), (-9, False, "it was killed"),
     (-11, True, "SIGSEGV"), (3, True, "exit code 3")],
)  # fmt: skip
def test_how_a_worker_ended_is_told_as_far_as_it_is_known(code, starved, word):
    assert word in _ending(code, starved)


def test_divergence_in_a_worker_is_told_like_in_serial(quick):
    with pytest.raises(FedloomError, match="Lower --lr"):
        quick(lr=1e30, engine="processes", workers=2)


LONG = [sys.executable, "-m", "fedloom", "run", "fedavg", "--rounds", "100000", "--clients", "4",
        "--participation", "1", "--engine", "processes", "--workers", "2", "--out"]  # fmt: skip


def alive(pid):
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()[:40]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_run(in_tmp, end, start_process):
    process = start_process([*LONG, "long"], stderr=subprocess.DEVNULL)
    lines = in_tmp / "long" / "rounds.jsonl"
    while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") > 2):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.send_signal(end)
    process.wait(30)
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)
    assert len(fedloom.load(in_tmp / "long").rounds) > 2


def test_auto_goes_by_model_and_device_only():
    def auto(name, shape, workers=2, participants=10, device="cpu", native=False, **options):
        setting = SimpleNamespace(device=torch.device(device), task=CLASSES)
        model = build(name, shape, 10, options=options)
        return pick(model, setting, native, workers, participants)

    assert auto("mlp", (1, 28, 28)) == "stacked"
    assert auto("mlp", (1, 28, 28), native=True) == "processes"
    assert auto("mlp", (1, 28, 28), participants=1) == "serial"
    assert auto("lenet", (3, 32, 32)) == "processes"
    assert auto("lenet", (3, 32, 32), workers=1) == "serial"
    assert auto("conv4", (1, 28, 28)) == "processes"
    assert auto("conv4", (1, 28, 28), channels=[4, 4, 8, 8]) == "processes"


def test_on_a_gpu_auto_stacks_small_models_and_runs_large_ones_alone():
    def auto(model, participants=10):
        setting = SimpleNamespace(device=torch.device("cuda"), task=CLASSES)
        return pick(model, setting, False, 2, participants)

    def conv4(**options):
        return build("conv4", (1, 28, 28), 10, options=options)

    narrow = {"channels": [4, 4, 8, 8]}
    assert auto(build("mlp", (1, 28, 28), 10, options={"hidden": [4000]})) == "stacked"
    assert auto(build("lenet", (3, 32, 32), 10)) == "stacked"
    assert auto(build("lenet", (3, 32, 32), 10), participants=1) == "serial"
    assert {auto(conv4(**narrow, norm=norm)) for norm in ("group", "static", "none")} == {"stacked"}
    assert auto(conv4(**narrow, norm="batch")) == "serial"  # not with every rule
    assert auto(conv4()) == "serial"  # 1.5 million parameters
    assert auto(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(784, 10))) == "serial"
    assert auto(nn.GRU(28, 4)) == "serial"


@pytest.mark.filterwarnings("ignore:This CPU has no bf16")
def test_bf16_learns_and_keeps_fp32_weights(quick):
    results = {p: quick(precision=p, rounds=10, lr=0.2) for p in ("fp32", "bf16")}
    assert states(results["bf16"])["shared"].dtype == torch.float32
    assert not torch.equal(*(states(r)["shared"] for r in results.values()))
    assert results["bf16"].summary["test_accuracy"] > 0.7
    stacked = quick(precision="bf16", rounds=10, lr=0.2, engine="stacked")
    assert stacked.summary["test_accuracy"] > 0.7


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_engines_resume_bit_for_bit(quick, engine):
    more = {"engine": engine, "workers": 2, "momentum": 0.9, "eval_every": 2}
    whole = quick("local", rounds=4, **more)
    quick("local", rounds=2, out="half", **more)
    half = quick("local", rounds=4, out="half", resume=True, **more)
    for key, value in states(whole).items():
        assert torch.equal(value, states(half)[key])


def test_an_unknown_engine_is_refused(quick):
    with pytest.raises(FedloomError, match="Did you mean 'stacked'"):
        quick(engine="stack")
