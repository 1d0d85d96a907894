"""Limiting cases and equivalences of the classic methods, on whole runs."""

import numpy as np
import pytest
import torch
from native_nets import needs_kernels

import fedloom
from fedloom.data.catalog import load
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.local.meta import MAML, QUERY, SUPPORT
from fedloom.models import build


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"kernels": "native"}, marks=needs_kernels),
        {"kernels": "torch"},
        {"engine": "stacked", "kernels": "torch"},
        {"engine": "processes", "workers": 2},
        {"optimiser": "adam", "lr": 0.01},
        {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5},
    ],
    ids=["native", "torch", "stacked", "processes", "adam", "momentum"],
)
def test_fedprox_with_mu_zero_is_fedavg_to_the_bit(quick, row, how):
    runs = [quick(m, rounds=2, eval_every=2, **how) for m in ("fedavg", "fedprox:mu=0")]
    assert torch.equal(*map(row, runs))
    losses = [[r["train_loss"] for r in run.records] for run in runs]
    assert losses[0] == losses[1]


def test_fedprox_with_a_large_mu_stays_near_the_global_model(quick, row):
    module = build("mlp", (1, 8, 8), 10, 0, {"hidden": [16]})
    start = torch.cat([p.flatten() for p in module.parameters()])
    free = row(quick("fedavg", rounds=1, epochs=5)) - start
    held = row(quick("fedprox", rounds=1, epochs=5, mu=10.0)) - start
    assert 0 < held.norm() < 0.5 * free.norm()


def test_fedsgd_is_fedavg_with_one_full_batch(quick, row):
    sgd = row(quick("fedsgd", rounds=4, lr=0.5))
    avg = row(quick("fedavg", rounds=4, lr=0.5, epochs=1, batch="inf"))
    assert torch.allclose(sgd, avg, atol=1e-6)


def test_fedsgd_of_everybody_is_a_centralised_full_batch_step(quick, row):
    """Σ (n_k/n) g_k over all clients is the gradient over all data, whatever the partition."""
    all_in = {"rounds": 4, "lr": 0.5, "participation": 1.0, "partition": "dirichlet:0.3"}
    sgd = row(quick("fedsgd", **all_in))
    avg = row(quick("fedavg", **all_in, batch="inf"))
    pooled = row(quick("centralised", rounds=4, lr=0.5, partition="dirichlet:0.3", batch="inf"))
    assert torch.allclose(sgd, pooled, atol=1e-5)
    assert torch.allclose(avg, pooled, atol=1e-5)


def test_a_full_batch_step_is_plain_torch(quick, row):
    result = quick("fedsgd", rounds=1, lr=0.5, participation=1.0, test_share=0.0)
    data = load("digits")
    x = torch.from_numpy(np.asarray(data.x[np.arange(len(data.y))])).float()
    scale = 255.0 if data.x.dtype == np.uint8 else 1.0
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
    module = build("mlp", data.shape, 10, 0, {"hidden": [16]})
    logits = module((x / scale - mean) / std)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(np.array(data.y))).backward()
    expected = torch.cat([(p - 0.5 * p.grad).flatten() for p in module.parameters()])
    assert torch.allclose(row(result), expected, atol=1e-5)


def test_one_client_makes_fedavg_local_and_centralised_the_same(quick, row):
    one = {"clients": 1, "participation": 1.0}
    avg = quick("fedavg", **one)
    assert torch.equal(row(avg), row(quick("centralised", **one)))
    local = quick("local", **one).model(client=0)
    for a, b in zip(avg.model().parameters(), local.parameters(), strict=True):
        assert torch.equal(a, b)


def test_local_clients_never_touch_each_other(quick):
    """A client's own model depends on its own data and turns only: others may come or go."""
    every = quick("local", rounds=1, participation=1.0)
    sent = every.rounds[["bytes_up", "bytes_down"]].to_numpy()
    assert not sent.any()
    some = quick("local", rounds=1, participation=0.5)
    (there,) = (record["participants"] for record in some.records)
    assert len(there) == 3
    rows = {run: run.store.checkpoint()[0]["kept/rows"] for run in (every, some)}
    assert torch.equal(rows[some], rows[every][there])
    assert len({tuple(row.tolist()) for row in rows[every]}) == 6


def test_traffic_is_counted_by_hand(quick):
    result = quick("fedavg", rounds=2, participation=0.5)
    values = 64 * 16 + 16 + 16 * 10 + 10
    assert result.rounds["bytes_up"].tolist() == [3 * values * 4] * 2
    assert result.rounds["bytes_down"].tolist() == [3 * values * 4] * 2
    pooled = quick("centralised", rounds=2, test_share=0.0)
    images = len(load("digits").y)
    assert pooled.rounds["bytes_up"].tolist() == [images * (64 + 1), 0]


def test_work_is_counted_by_hand(quick):
    result = quick("fedavg", rounds=1, participation=1.0, epochs=2, test_share=0.0)
    samples = 2 * len(load("digits").y)
    assert result.rounds["macs"].tolist() == [samples * (2 * 64 * 16 + 3 * 16 * 10)]


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_work_of_steps_inside_steps_is_counted_by_hand(quick, engine):
    """MAML differentiates the support part's gradients again; pFedMe has steps inside its steps."""
    asked = {"rounds": 1, "participation": 1.0, "engine": engine}
    once, again = 2 * 64 * 16 + 3 * 16 * 10, 2 * 64 * 16 + 6 * 16 * 10
    second = quick("fedmeta-maml", **asked)
    config = Config(**second.config)
    federation = make_federation(config, load_dataset(config))
    support, query = (sum(federation.size(client, f"train-{part}") for client in range(6))
                      for part in ("support", "query"))  # fmt: skip
    seen = support + query
    assert second.summary["macs"] == seen * once + support * again
    assert quick("fedmeta-metasgd", **asked).summary["macs"] == second.summary["macs"]
    assert quick("pfedme", inner=3, **asked).summary["macs"] == 3 * seen * once


def test_first_order_maml_differentiates_nothing_twice():
    step = {SUPPORT: np.array([[0, 1], [2, -1]]), QUERY: np.array([0, 1])}
    assert MAML().passes(step) == (5, 3)
    assert MAML(first_order=True).passes(step) == (5, 0)


@pytest.mark.parametrize("settings", [
    {"momentum": 0.9}, {"weight_decay": 0.1}, {"clip": 0.1}, {"lr_schedule": "exp:0.5"},
    {"epochs": 2}, {"steps": 1}, {"batch": 8}, {"lr": 0.2}, {"augment": "crop:1"},
    {"augment": "flip"}, {"seed": 1}, {"participation": 4}, {"partition": "dirichlet:0.1"},
    {"test_share": 0.5}, {"pool": True}, {"clients": 5}, {"model_options": {"hidden": [16, 16]}},
])  # fmt: skip
def test_no_setting_does_nothing(quick, row, settings):
    plain, changed = row(quick("fedavg")), row(quick("fedavg", **settings))
    assert plain.shape != changed.shape or not torch.equal(plain, changed)


def test_the_same_seed_gives_the_same_bytes(quick):
    files = [next((quick("fedprox", momentum=0.9, augment="crop:1").path / "checkpoints").iterdir())
             for _ in range(2)]  # fmt: skip
    assert files[0] != files[1]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_methods_of_one_seed_meet_the_same_clients(quick):
    runs = [quick(m, seed=7, rounds=4) for m in ("fedavg", "fedprox", "local")]
    assert len({str([r["participants"] for r in run.records]) for run in runs}) == 1


def test_a_comparison_is_paired_and_averaged(in_tmp):
    comparison = fedloom.compare(
        ["fedavg", "fedprox:mu=0", "local"], seeds=2, clients=4, rounds=2, eval_every=2,
    )  # fmt: skip
    table = comparison.table
    assert table.loc["fedprox:mu=0", "macro_gain"] == 0
    assert table.loc["fedprox:mu=0", "macro_gain_std"] == 0
    runs = comparison.runs
    fedavg = runs[runs["method"] == "fedavg"]
    assert table.loc["fedavg", "test_accuracy"] == pytest.approx(fedavg["test_accuracy"].mean())
    assert table.loc["local", "bytes"] == 0
    assert len(runs) == 6
    assert comparison.markdown().count("\n") == 4
    report = comparison.report()
    assert {f.name for f in in_tmp.glob("runs/compare/*.*")} >= {"report.html", "table.csv"}
    assert "fedprox:mu=0" in report.read_text(encoding="utf-8")
