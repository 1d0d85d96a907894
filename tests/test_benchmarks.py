"""The benchmarks measure the same work: loops by hand end with fedloom's weights."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks import devices, peak
from benchmarks.__main__ import OURS, PEERS_IN, TURNS, cores_of, counterpart, distance, main, table
from benchmarks.contest import by_hand
from benchmarks.workloads import WORKLOADS, Fedloom


@pytest.fixture
def one_thread():
    """As engines have it: on a busy machine, threads that wait for each other take long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_the_loop_by_hand_ends_with_the_same_weights(workload, in_tmp, one_thread):
    everybody = workload.participants == workload.clients
    few = replace(workload, samples=8, clients=5, participants=5 if everybody else 3)
    ours, bare = Fedloom(few, "serial", 1, "fp32"), by_hand(few)
    for t in (1, 2, 3):
        ours.round(t)
        bare.round(t)
    moved = few.trainable
    assert distance(ours.weights()[:moved].numpy(), bare.weights()[:moved].numpy()) < 1e-3
    assert len(ours.macs) == 3
    assert min(ours.macs) > 0


def test_every_workload_is_measured():
    names = [workload.name for workload in WORKLOADS]
    assert list(OURS) == list(TURNS) == names
    assert set(PEERS_IN) <= set(names)


def test_gflops_and_ratios_are_worked_out_by_turn(monkeypatch):
    """Turns of two rounds, a billion multiply-accumulates each, on a core of 8 GFLOP/s."""
    monkeypatch.setattr("benchmarks.__main__.cores", lambda: 2)
    rest = {"startup": 1.0, "peak_memory": 1, "off": 0.0}
    runs = {
        "bare-1": [{"rounds": [2.0, 2.0, 4.0, 4.0], **rest}],
        "bare-2": [{"rounds": [4.0, 4.0, 4.0, 4.0], **rest}],
        "fedloom:serial": [{"rounds": [1.0, 1.0, 1.0, 1.0], "macs": [10**9] * 4, **rest}],
        "fedloom:processes": [{"rounds": [0.5] * 4, "macs": [10**9] * 4, **rest}],
        "before:serial": [{"rounds": [1.5, 1.5, 0.5, 0.5], "macs": [10**9] * 4, **rest}],
    }
    bare, _, serial, pool, before = table(runs, 2, peak=8.0)
    assert (serial["gflops"], serial["of_peak"]) == (2.0, 0.25)
    assert (pool["gflops"], pool["of_peak"]) == (4.0, 0.25)  # of two cores
    assert bare["gflops"] == pytest.approx(0.75)  # between 2 GFLOP in 2 s and in 4 s
    assert serial["speed"] == 3.0  # against the better loop: 2 and 4 times
    assert serial["before"] == [0.75, 1.0, 1.25]
    assert "before" not in pool
    assert "before" not in before


@pytest.mark.parametrize(
    ("name", "count"),
    [("bare-1", 1), ("bare-2", 4), ("pfl-1", 4), ("flower", 4), ("fedloom:serial", 1),
     ("fedloom:stacked:1", 1), ("fedloom:stacked", 4), ("fedloom:processes:0:bf16", 4)],
)  # fmt: skip
def test_a_peak_is_of_the_cores_that_a_contestant_may_use(name, count, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.cores", lambda: 4)
    assert cores_of(name) == count


def test_the_peak_is_at_least_that_of_a_product_of_matrices(monkeypatch):
    """A busy machine slows either of them down, so there is a wide margin."""
    monkeypatch.setattr(peak, "TURNS", 3)
    found = peak.measure()
    assert found.gflops > 0.3 * peak._best(peak._product())
    monkeypatch.setattr(peak.shutil, "which", lambda name: None)
    assert "matrices" in peak.measure().how


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--only", "mlp,nonsense"], "There is no nonsense to measure"),
     (["--against", "."], "is not a checkout of fedloom")],
)  # fmt: skip
def test_a_wrong_word_ends_before_anything_is_measured(words, said, in_tmp, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    with pytest.raises(SystemExit, match=said):
        main()


def test_distance_is_relative():
    assert distance(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)


def test_devices_are_measured_by_capacity(monkeypatch):
    monkeypatch.setattr(devices, "TURNS", 1)
    net = ("small", "conv4", {"channels": (8, 8, 16, 16)}, "1x28x28")
    monkeypatch.setattr(devices, "NETS", (net,))
    monkeypatch.setattr(devices, "SAMPLES", 8)
    rows = devices.measure()
    for method, capacities in devices.CAPACITIES.items():
        mine = [r for r in rows if r["method"] == method]
        assert [r["capacity"] for r in mine] == list(capacities)
        assert all(a["parameters"] > b["parameters"] for a, b in pairwise(mine))
        assert all(r["measured"] > 0 for r in mine)
        if method != "feddse":  # whoever has the whole does not look
            assert all(a["macs"] > b["macs"] and a["memory"] > b["memory"]
                       for a, b in pairwise(mine))  # fmt: skip


def test_a_contestant_with_given_kernels_is_set_beside_the_others_engine():
    assert counterpart("fedloom:serial:0:fp32:torch") == "before:serial"
    assert counterpart("fedloom:processes:0:bf16") == "before:processes:0:bf16"
    assert counterpart("bare-1") == "bare-1"
