"""The Ray engine on a local cluster: the bits of serial."""

import sys

import pytest
import torch
from engine_cases import run, states
from test_contract import method
from test_engines import Dies

import fedloom
from fedloom.cli import main
from fedloom.errors import FedloomError
from fedloom.experiment.runner import Runner

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")  # they share a cluster


@pytest.fixture(scope="module")
def cluster():
    settings = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", logging_level="error", **settings)
    yield
    ray.shutdown()


#: one of each family
NAMES = ["fedavg", "local", "fedrolex", "fedmeta-per-metasgd", "fedswap min", "feddom"]


@pytest.mark.parametrize("name", NAMES)
def test_ray_gives_the_bits_of_serial(serial_run, in_tmp, cluster, name):
    serial, pool = serial_run(name), run(name, "pool", engine="ray", workers=2)
    for key, value in states(serial).items():
        assert torch.equal(value, states(pool)[key]), key
    assert serial.clients.equals(pool.clients)


def test_the_command_line_runs_on_the_cluster(in_tmp, cluster, monkeypatch):
    words = ["run", "fedavg", "--engine", "ray", "--clients", "4", "--rounds", "1", "--out", "run"]
    monkeypatch.setattr(sys, "argv", ["fedloom", *words])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert len(fedloom.load("run").clients) == 4


def test_a_crashed_ray_worker_is_restarted(quick, cluster, in_tmp):
    plain = quick(participation=1.0)
    crashed = quick(method(local=Dies(str(in_tmp / "flag"))), engine="ray", participation=1.0,
                    workers=2)  # fmt: skip
    assert (in_tmp / "flag").exists()
    assert torch.equal(states(plain)["shared"], states(crashed)["shared"])


def test_divergence_on_the_cluster_is_told_like_in_serial(quick, cluster):
    with pytest.raises(FedloomError, match="Lower --lr"):
        quick(lr=1e30, engine="ray", workers=2)


def test_an_unreachable_cluster_gets_a_sentence(quick, monkeypatch):
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(FedloomError, match="can't be reached"):
        quick(engine="ray", ray_address="127.0.0.1:1")
    assert fedloom


@pytest.fixture
def nodes():
    """A cluster of several nodes on this machine; the first one runs no workers."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_nodes_may_come_and_go_and_without_any_the_run_can_be_resumed(quick, nodes, monkeypatch):
    """Round 2 loses a node, round 3 gets one and loses the other, round 4 loses the last."""
    given = {"rounds": 5, "participation": 1.0, "partition": "dirichlet:0.3"}
    serial = quick(**given)
    first, second = (nodes.add_node(num_cpus=1) for _ in range(2))
    added = []

    def change(t):
        if t == 2:
            nodes.remove_node(first)
        elif t == 3:
            added.append(nodes.add_node(num_cpus=1))
            nodes.remove_node(second)
        elif t == 4 and len(added) == 1:
            nodes.remove_node(added[0])

    plain = Runner.round
    monkeypatch.setattr(Runner, "round", lambda self, t: change(t) or plain(self, t))
    with pytest.raises(FedloomError, match="no node left"):
        quick(engine="ray", workers=2, out="lost", **given)
    assert len(fedloom.load("lost").rounds) == 3
    added.append(nodes.add_node(num_cpus=1))
    resumed = quick(engine="ray", workers=2, out="lost", resume=True, **given)
    assert torch.equal(states(serial)["shared"], states(resumed)["shared"])
    assert serial.clients.equals(resumed.clients)
