"""What is random in a run is random by client and by round: the names of the streams it asks for.

A stream depends on its names only, so these tests record them and look at no number drawn.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from fedloom import streams
from fedloom.engine.batches import Augment
from fedloom.local import MAML, Budget
from fedloom.local.meta import QUERY, SUPPORT
from fedloom.mix.dominating import _latest

SMALL = {"clients": 4, "rounds": 2, "eval_every": 2}


@pytest.fixture
def asked(monkeypatch):
    """purpose → what else names the streams (and torch's seeds) that were asked for."""
    found, key = defaultdict(set), streams.key

    def recording(seed, purpose, *names):
        found[purpose].add(names)
        return key(seed, purpose, *names)

    monkeypatch.setattr(streams, "key", recording)
    return found


def turns(result):
    """(round, client) of everybody who trained."""
    return {(r["round"], client) for r in result.records for client in r["participants"]}


def test_batches_augmentation_and_dropout_are_random_by_client_and_round(quick, asked):
    expected = turns(quick(augment="crop:1", **SMALL))
    assert len(expected) == 4
    assert asked["batches"] == expected
    assert asked["torch"] == expected  # torch's own generator, which dropout draws from
    assert asked["augment"] == {(*turn, "train") for turn in expected}


def test_dropout_draws_from_the_seed_of_its_client_and_round(quick):
    seeds = []

    class Noting(nn.Dropout):
        def forward(self, x):
            if self.training:
                seeds.append(torch.initial_seed())
            return super().forward(x)

    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), Noting(), nn.Linear(64, classes))

    expected = turns(quick(model=factory, batch="inf", kernels="torch", **SMALL))
    drawn = {streams.torch_seed(0, "torch", *turn) for turn in expected}
    assert drawn <= set(seeds)  # others: where the model is measured before the run


def test_adaptation_is_random_by_client_and_round(quick, asked):
    quick("fedavg-meta", **{**SMALL, "eval_every": 1})
    assert asked["batches"] == {(t, client) for t in (1, 2) for client in range(4)}


def test_participants_are_drawn_by_round_and_data_split_by_client(quick, asked):
    quick(**SMALL)
    assert asked["participants"] == {(1,), (2,)}
    assert asked["split"] == {(0,), (1,), (2,), (3,)}


@pytest.mark.parametrize(
    ("method", "purposes"),
    [
        ("federated-dropout", ["channels"]),
        ("feddse:samples=3,temperature=1", ["inference", "channels"]),
        ("fedgse-csl:samples=8", ["public"]),
        ("fjord", ["widths"]),
    ],
)
def test_selectors_and_widths_draw_by_client_and_round(quick, asked, method, purposes):
    # Nobody is scored: a weak client is with the sub-model that it would choose then.
    result = quick(method, capacities="0.5", public="noise:16", eval_clients=0, **SMALL)
    for purpose in purposes:
        assert asked[purpose] - {()} == turns(result)  # without names: the public set's own noise


def test_swaps_and_their_probes_are_drawn_by_round(quick, asked):
    quick("fedswap:partner=greedy,probes=4", public="noise:16", participation=1.0, **SMALL)
    assert asked["swap"] == asked["probes"] == {(1,), (2,)}


@pytest.mark.parametrize("partner", ["random", "sequential"])
def test_random_pairs_and_turns_are_drawn_by_round(quick, asked, partner):
    quick(f"fedswap:partner={partner}", participation=1.0, **SMALL)
    assert asked["swap"] == {(1,), (2,)}


def test_every_image_is_augmented_for_itself():
    images = torch.arange(16.0).reshape(1, 1, 4, 4).expand(64, -1, -1, -1)
    flipped = Augment(flip=True).apply(images, np.random.default_rng(0))
    assert len(flipped.unique(dim=0)) == 2
    cropped = Augment(crop=1).apply(images, np.random.default_rng(0))
    assert len(cropped.unique(dim=0)) == 9  # three offsets each way


def test_every_pass_is_shuffled_anew():
    first, second = Budget(epochs=2, batch=None).batches(20, np.random.default_rng(0))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first.tolist() != second.tolist()


def test_inner_batches_are_drawn_anew_for_every_meta_step():
    budget, sizes = Budget(batch=5), {SUPPORT: 20, QUERY: 10}
    rule = MAML(0.1, outer="batch")
    first, second = rule.plan(sizes, budget, np.random.default_rng(0))
    assert first[SUPPORT].tolist() != second[SUPPORT].tolist()
    (twice,) = MAML(0.1, inner_steps=8).plan(sizes, budget, np.random.default_rng(0))
    assert sorted(twice[SUPPORT][:4].ravel()) == sorted(twice[SUPPORT][4:].ravel())
    assert twice[SUPPORT][:4].tolist() != twice[SUPPORT][4:].tolist()


def test_lots_are_drawn_among_nodes_met_in_one_round():
    rounds = np.full((200, 4), 3)
    chosen = _latest(rounds, most=1, oldest=0, rng=np.random.default_rng(0)).sum(0)
    assert chosen.sum() == 200
    assert chosen.min() > 25  # 50 each
