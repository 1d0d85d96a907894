"""What clients are scored with, worked out again in plain torch: rates, passes, newcomers."""

import numpy as np
import pytest
import torch
from test_contract import method, states
from torch import nn

from fedloom.experiment.settings import Config
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.layout import Columns
from fedloom.local import MAML, SGD, MetaSGD
from fedloom.mix import Average
from fedloom.newcomer import BestPart, MeanPart, Shared, Vote
from fedloom.population import Population

UNEVEN = {"partition": "quantity:zipf", "test_share": 0.5, "batch": "inf", "participation": 1.0,
          "rounds": 2, "eval_every": 2}  # fmt: skip


def federation_of(result):
    config = Config(**result.config)
    return make_federation(config, load_dataset(config))


def data_of(result, federation, client, part):
    at = federation.indices(client, part)
    x, y = federation.dataset.x[at], federation.dataset.y[at]
    return result.normalise(x), torch.from_numpy(np.array(y))


def stepped(model, x, y, lr, decay=0.0, steps=1):
    """Full-batch steps of plain SGD."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def check_losses(result, lr, decay=0.0, steps=1):
    federation = federation_of(result)
    table = result.clients.query("population == 'local'").set_index("client")
    for client in (0, 3, 5):
        model = stepped(
            result.model(), *data_of(result, federation, client, "test-support"), lr, decay, steps
        )
        x, y = data_of(result, federation, client, "test-query")
        expected = nn.functional.cross_entropy(model(x), y).item()
        assert table.loc[client, "loss"] == pytest.approx(expected, rel=1e-4)
        assert table.loc[client, "samples"] == len(y)


# -- fine-tuning ----------------------------------------------------------------------------------


def test_fine_tuning_goes_by_its_own_rate_and_not_by_the_runs(quick):
    result = quick("fedavg-meta", tune_lr=0.7, lr=0.05, weight_decay=0.3, **UNEVEN)
    check_losses(result, lr=0.7)
    check_losses(quick("fedmeta-maml", alpha=0.6, lr=0.05, out="maml", **UNEVEN), lr=0.6)


def test_fine_tuning_without_its_own_rate_goes_by_that_of_the_round(quick):
    more = {"lr": 0.8, "lr_schedule": "exp:0.5", "weight_decay": 0.3}
    check_losses(quick("fedavg-meta", **more, **UNEVEN), lr=0.4, decay=0.3)


def test_fine_tuning_takes_as_many_passes_as_it_says(quick):
    result = quick("fedavg-meta", tune_lr=0.5, tune_epochs=3, epochs=2, **UNEVEN)
    check_losses(result, lr=0.5, steps=3)


@pytest.mark.parametrize(("given", "lr"), [(0.7, 0.7), (None, 0.4)])
def test_a_newcomers_own_model_is_tuned_at_that_rate_too(quick, given, lr):
    result = quick("fedavg-meta", tune_lr=given, lr=0.8, lr_schedule="exp:0.5", **UNEVEN)
    raw = load_dataset(Config(**result.config))
    x, y = raw.x[:9], torch.from_numpy(np.array(raw.y[:9]))
    expected = stepped(result.model(), result.normalise(x), y, lr)
    found = result.newcomer_model(x, y)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


# -- n_k ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "part"), [(SGD(), "train"), (MAML(0.1), "train-query"), (MetaSGD(0.1), "train-query")]
)
def test_clients_count_by_the_part_that_their_step_is_taken_on(quick, rule, part):
    seen = []

    class Spy(Average):
        def combine(self, g):
            seen.append(g.weights.tolist())
            return super().combine(g)

    result = quick(method(local=rule, mix=Spy()), **{**UNEVEN, "rounds": 1})
    federation = federation_of(result)
    sizes = [federation.size(c, part) for c in range(6)]
    assert len(set(sizes)) > 3
    assert seen == [sizes]


@pytest.mark.parametrize(
    ("name", "part"), [("fedper", "train"), ("fedmeta-per-maml", "train-query")]
)
def test_private_parts_are_stored_with_the_weights_of_their_owners(quick, name, part):
    result = quick(name, **UNEVEN)
    federation = federation_of(result)
    sizes = [float(federation.size(c, part)) for c in range(6)]
    assert states(result)["kept/weights"].tolist() == sizes


# -- newcomers ------------------------------------------------------------------------------------


def kept(*rows):
    population = Population(Columns(((1, 2),), width=2))
    if rows:
        population.put(range(len(rows)), torch.tensor(rows))
    return population


def test_the_rules_for_newcomers_by_hand():
    shared, parts = torch.tensor([9.0, 0.0]), kept([0.0, 2.0], [0.0, 6.0])
    weights = np.array([1.0, 3.0])
    assert Shared().candidates(shared, parts, weights).tolist() == [[9, 0]]
    assert MeanPart().candidates(shared, parts, weights).tolist() == [[9, 5]]
    for rule in (BestPart(), Vote()):
        assert rule.candidates(shared, parts, weights).tolist() == [[9, 2], [9, 6]]
    for rule in (Shared(), MeanPart(), BestPart(), Vote()):
        assert rule.candidates(shared, kept(), np.empty(0)).tolist() == [[9, 0]]


def test_newcomers_are_scored_with_the_mean_of_private_parts_by_their_owners_sizes(quick):
    """FedPer on uneven data: Σ (n_i/N) w_P(i), n_i from the data itself."""
    result = quick("fedper", newcomers=2, newcomer_classes=2, lr=0.5, **UNEVEN)
    federation = federation_of(result)
    n = torch.tensor([federation.size(c, "train") for c in range(6)], dtype=torch.float64)
    heads = [result.model(client=c).out for c in range(6)]
    model = result.model(client=0)
    with torch.no_grad():
        for name, value in model.out.named_parameters():
            each = torch.stack([head.get_parameter(name) for head in heads]).double()
            value.copy_((n.view(-1, *[1] * value.dim()) * each).sum(0) / n.sum())
    table = result.clients.query("population == 'new'").set_index("client")
    for client in (6, 7):
        x, y = data_of(result, federation, client, "test")
        expected = nn.functional.cross_entropy(model(x), y).item()
        assert table.loc[client, "loss"] == pytest.approx(expected, rel=1e-4)


def test_private_parts_vote_for_a_newcomer_and_the_likelier_class_wins_a_tie(quick):
    result = quick("lg-fedavg", newcomers=3, lr=0.5, clients=4, **UNEVEN)
    federation = federation_of(result)
    models = [result.model(client=c) for c in range(4)]
    table = result.clients.query("population == 'new'").set_index("client")
    ties = 0
    for client in federation.newcomer_ids:
        x, y = data_of(result, federation, client, "test")
        each = torch.stack([model(x).softmax(1) for model in models])
        votes = nn.functional.one_hot(each.argmax(2), 10).sum(0)
        best = votes.max(1, keepdim=True).values
        ties += int(((votes == best).sum(1) > 1).sum())
        won = torch.where(votes == best, each.mean(0), -1).argmax(1)
        assert table.loc[client, "correct"] == int((won == y).sum())
        mean = each.mean(0)[torch.arange(len(y)), y]
        assert table.loc[client, "loss"] == pytest.approx((-mean.log().mean()).item(), rel=1e-4)
    assert ties > 0
