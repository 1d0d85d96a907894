"""The Ray engine on a local cluster: the bits of serial."""

import pytest
import torch
from test_contract import method
from test_engines import Dies, run, states

import fedloom
from fedloom.errors import FedloomError

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "local",
        "fine-tuned",
        "sub-models",
        "lg-fedavg",
        "fedmeta-per-metasgd",
        "fedswap min",
        "dominating",
    ],
)
def test_ray_gives_the_bits_of_serial(quick, cluster, name):
    serial, pool = run(quick, name), run(quick, name, engine="ray", workers=2)
    for key, value in states(serial).items():
        assert torch.equal(value, states(pool)[key]), key
    assert serial.clients.equals(pool.clients)


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
