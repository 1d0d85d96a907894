"""What a round records and hands on, where clients differ in size and models have buffers."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.data.catalog import load
from fedloom.engine.base import Done, Trained
from fedloom.layout import Layout
from fedloom.models import build

UNEVEN = {"partition": "dirichlet:0.3", "participation": 1.0, "rounds": 1}


def normed(shape, classes):
    """A small net with batch norm: three kinds of buffers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
    )


def pixels():
    """All digits as a model sees them, and their labels."""
    data = load("digits")
    x = torch.from_numpy(np.asarray(data.x[np.arange(len(data.y))])).float()
    scale = 255.0 if data.x.dtype == np.uint8 else 1.0
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
    return (x / scale - mean) / std, torch.from_numpy(np.array(data.y))


# -- the training loss ----------------------------------------------------------------------------


def test_the_training_loss_of_a_round_is_the_mean_over_all_samples_trained_on(quick):
    """One full batch each, of uneven sets: the loss of the first model on all data."""
    result = quick(**UNEVEN, batch="inf", test_share=0.0)
    x, y = pixels()
    with torch.no_grad():
        module = build("mlp", (1, 8, 8), 10, 0, {"hidden": [16]})
        expected = nn.functional.cross_entropy(module(x), y)
    assert result.records[0]["train_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_what_came_back_lies_side_by_side_in_the_order_of_the_clients():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    trained = Trained.of(
        [
            Done(rows[0], None, 0.5, 10, 2, 100, 1000, {"train": 1.0}, None),
            Done(
                rows[1], torch.tensor([1, 3]), 0.25, 20, 3, 200, 500, {"train": 2.0}, (0.125, 0.5)
            ),
        ]
    )
    assert [row.tolist() for row in trained.rows] == rows.tolist()
    assert trained.indexes[0] is None
    assert trained.indexes[1].tolist() == [1, 3]
    assert trained.loss.tolist() == [0.5, 0.25]
    assert trained.samples.tolist() == [10, 20]
    assert trained.steps.tolist() == [2, 3]
    assert trained.macs.tolist() == [100, 200]
    assert trained.memory.tolist() == [1000, 500]
    assert trained.seconds == {"train": 3.0}
    assert trained.gaps == ((0.125, 0.5),)


# -- FedSGD ---------------------------------------------------------------------------------------


def test_fedsgd_with_a_schedule_is_fedavg_with_one_full_batch(quick, row):
    settings = {**UNEVEN, "rounds": 4, "lr": 0.5, "lr_schedule": "exp:0.5"}
    sgd, avg = quick("fedsgd", **settings), quick("fedavg", **settings, batch="inf")
    assert [r["lr"] for r in sgd.records] == [0.5, 0.25, 0.125, 0.0625]
    assert torch.allclose(row(sgd), row(avg), atol=1e-6)


def test_fedsgd_averages_the_statistics_of_batch_norm_like_fedavg(quick, row):
    settings = {**UNEVEN, "rounds": 2, "lr": 0.5, "model": normed}
    sgd, avg = row(quick("fedsgd", **settings)), row(quick("fedavg", **settings, batch="inf"))
    layout = Layout.of(normed((1, 8, 8), 10))
    assert layout.views(sgd, ("buffer",))["2.num_batches_tracked"] == 2
    assert layout.views(sgd, ("buffer",))["2.running_mean"].abs().min() > 0
    assert torch.allclose(sgd, avg, atol=1e-5)


# -- similarity -----------------------------------------------------------------------------------


def test_the_similarity_of_models_is_that_of_how_their_weights_moved_not_of_buffers(quick):
    result = quick("local", **UNEVEN, model=normed)
    state = result.store.checkpoint()[0]
    moved = (state["kept/rows"] - state["shared"]).double()  # nobody averages: where all began
    weights = moved[:, : Layout.of(normed((1, 8, 8), 10)).trainable]
    pairs = itertools.combinations(weights, 2)
    cosines = [float(nn.functional.cosine_similarity(a, b, dim=0)) for a, b in pairs]
    assert result.records[-1]["similarity"] == pytest.approx(np.mean(cosines), rel=1e-6)


def test_divergence_is_the_distance_of_trained_models_from_their_weighted_mean(quick):
    result = quick("local", **UNEVEN, model=normed)
    state = result.store.checkpoint()[0]
    weights = state["kept/rows"].double()[:, : Layout.of(normed((1, 8, 8), 10)).trainable]
    shares = state["kept/weights"] / state["kept/weights"].sum()
    assert len(set(shares.tolist())) > 1
    apart = (weights - (shares[:, None] * weights).sum(0)).norm(dim=1)
    assert result.records[-1]["divergence"] == pytest.approx(float(apart.mean()), rel=1e-6)
    assert "divergence" in result.rounds


def test_divergence_is_taken_of_what_was_trained_whatever_becomes_of_it(quick):
    """In the first round all start from one model, and only the mix differs."""
    settings = {"participation": 1.0, "rounds": 1, "partition": "classes:2"}
    found = [quick(m, **settings).records[0]["divergence"] for m in ("fedavg", "local", "fedswap")]
    assert found[0] == found[1] == found[2] > 0
    one_step = quick("fedavg", **settings, batch="inf").records[0]["divergence"]
    gradients = quick("fedsgd", **settings).records[0]["divergence"]
    assert gradients == pytest.approx(one_step, rel=1e-4)


def test_one_model_alone_has_no_divergence(quick):
    assert "divergence" not in quick("centralised", rounds=1).records[0]
    assert "divergence" not in quick("fedavg", participation=1 / 6, rounds=1).records[0]
