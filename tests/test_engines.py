"""The same results from every engine, for every method."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from test_contract import Complete, Gossip, Half, Momentum, Swap, ToyMeta, method
from torch import nn

import fedloom
from fedloom.adapt import FineTune
from fedloom.engine.choose import pick
from fedloom.errors import FedloomError
from fedloom.local import SGD, Proximal
from fedloom.mix import Average, DominatingSet, PeerAverage, Step
from fedloom.models import build
from fedloom.models.nets import Conv4
from fedloom.topology import Peers, network

PERSONAL_AND_META = (
    "fedper", "lg-fedavg", "fedmeta-maml", "fedmeta-metasgd", "fedmeta-per-maml",
    "fedmeta-per-metasgd", "fedavg-meta", "fedper-meta",
)  # fmt: skip

METHODS = {
    "fedavg": "fedavg",
    "fedprox": "fedprox:mu=0.5",
    "fedsgd": "fedsgd",
    "local": "local",
    "centralised": "centralised",
    "private heads": method(mix=Average("body")),
    "maml": method(local=ToyMeta(0.2)),
    "meta-sgd": method(local=ToyMeta(0.2, learned=True), mix=Average("body")),
    **{name: name for name in PERSONAL_AND_META},
    "fine-tuned": method(local=Proximal(0.1), adapt=FineTune(lr=0.1)),
    "sub-models": method(select=Half()),
    "swap": method(mix=Swap()),
    "gossip": method(mix=Gossip(), topology=Complete()),
    "momentum": method(mix=Momentum()),
    "fedswap": "fedswap:average_every=2",
    "fedswap sequential": "fedswap:partner=sequential,average_every=2",
    "fedswap greedy": "fedswap:partner=greedy,average_every=3",
    "fedswap min": "fedswap:partner=min,similarity=dcka,kernel=rbf,average_every=3",
    "fedswap cosine": "fedswap:partner=min,similarity=cosine,average_every=2",
    "peers": method(mix=Step(0.7), topology=Peers(network("erdos-renyi:0.4"))),
    "dominating": method(mix=DominatingSet(), topology=Peers(network("waypoint,area=200"))),
    "sub-models by gossip": method(
        mix=PeerAverage(), select=Half(), topology=Peers(network("ring"))
    ),
}


def states(result):
    return result.store.checkpoint()[0]


def settings(name):
    out = {"clients": 7, "partition": "dirichlet:0.3", "newcomers": 2, "batch": 8, "epochs": 2}
    if name.startswith("fedswap"):
        out |= {"participation": 1.0, "public": "share:0.05"}
    return out if name == "fedsgd" else {**out, "momentum": 0.5, "clip": 1.0, "weight_decay": 0.01}


def run(quick, name, **more):
    given = settings(name)
    if name == "fedsgd":
        del given["batch"], given["epochs"]
    return quick(METHODS[name], **given, **more)


@pytest.mark.parametrize("name", METHODS)
def test_processes_give_the_bits_of_serial_for_any_number_of_workers(quick, name):
    serial = run(quick, name)
    for workers in (1, 3):
        pool = run(quick, name, engine="processes", workers=workers)
        for key, value in states(serial).items():
            assert torch.equal(value, states(pool)[key]), key
        assert serial.clients.equals(pool.clients)


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_workers_may_have_several_threads(in_tmp, quick, start_process, engine):
    one = quick(clients=4, participation=1.0, batch=200, out="one")
    words = ["--config", "one/config.yaml", "--threads", "2", "--workers", "2", "--out", "two"]
    command = [sys.executable, "-m", "fedloom", "run", *words, "--engine", engine]
    assert start_process(command).wait(300) == 0  # it could wait for ever
    two = states(fedloom.load(in_tmp / "two"))["shared"]
    assert torch.allclose(states(one)["shared"], two, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_stacked_is_serial_up_to_rounding(quick, name):
    serial, stacked = run(quick, name), run(quick, name, engine="stacked")
    for key, value in states(serial).items():
        assert torch.allclose(value, states(stacked)[key], atol=2e-5), key
    a, b = serial.clients, stacked.clients
    assert a[["client", "samples"]].equals(b[["client", "samples"]])
    assert np.allclose(a["loss"], b["loss"], atol=1e-4)
    assert a["accuracy"].sub(b["accuracy"]).abs().max() < 0.1
    for column in ("steps", "macs", "bytes_up", "bytes_down"):
        assert serial.rounds[column].equals(stacked.rounds[column])


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

        def objective(self, net, params, data):
            return super().objective(net, params, data)

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

    serial, stacked = (quick(model=factory, rounds=2, engine=e) for e in ("serial", "stacked"))
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
    class Setting:
        device = torch.device("cpu")

    def auto(name, shape, workers=2, participants=10, **options):
        return pick(build(name, shape, 10, options=options), Setting(), workers, participants)

    assert auto("mlp", (1, 28, 28)) == "stacked"
    assert auto("mlp", (1, 28, 28), participants=1) == "serial"
    assert auto("lenet", (3, 32, 32)) == "processes"
    assert auto("lenet", (3, 32, 32), workers=1) == "serial"
    assert auto("conv4", (1, 28, 28)) == "processes"


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
