import numpy as np
import pytest
import torch

from fedloom.errors import FedloomError
from fedloom.experiment.settings import Config
from fedloom.local import (
    SGD,
    Batch,
    Budget,
    Context,
    FullGradient,
    Optimiser,
    Proximal,
    Reptile,
    Schedule,
    cross_entropy,
)
from fedloom.local.optimiser import parse


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("adagrad", torch.optim.Adagrad)],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_other_optimisers_are_torchs_too(kind, theirs, weight_decay):
    rows = torch.linspace(-1, 1, 14).view(2, 7).clone()
    params = [torch.nn.Parameter(row.clone()) for row in rows]
    more = {} if kind == "adagrad" else {"betas": (0.8, 0.9)}
    references = [theirs([p], 0.1, weight_decay=weight_decay, eps=1e-6, **more) for p in params]
    constants = "eps=1e-6" if kind == "adagrad" else "beta1=0.8,beta2=0.9,eps=1e-6"
    optimiser = parse(f"{kind},{constants}", 0.1, weight_decay=weight_decay)
    memory = optimiser.memory(rows)
    for step in range(5):
        grads = torch.sin(torch.arange(14.0) * 3 + step).view(2, 7) * torch.tensor([[1.0], [9]])
        for p, grad, reference in zip(params, grads, references, strict=True):
            p.grad = grad.clone()
            reference.step()
        optimiser.step(rows, grads, memory)
    assert torch.allclose(rows, torch.stack([p.detach() for p in params]), atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_optimiser_is_torchs_sgd(momentum, weight_decay, clip):
    ours = torch.linspace(-1, 1, 7)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.SGD([theirs], 0.1, momentum, weight_decay=weight_decay)
    optimiser = Optimiser(0.1, momentum, weight_decay, clip)
    memory = optimiser.memory(ours)
    for step in range(4):
        grad = torch.sin(torch.arange(7.0) + step)
        theirs.grad = grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        reference.step()
        optimiser.step(ours, grad, memory)
    assert torch.allclose(ours, theirs.detach(), atol=1e-7)


def test_the_optimiser_steps_a_matrix_of_clients_like_each_alone():
    rows, grads = torch.randn(3, 5), torch.randn(3, 5) * torch.tensor([[1.0], [10.0], [0.1]])
    alone = [row.clone() for row in rows]
    optimiser = Optimiser(0.1, 0.9, 0.01, clip=1.0)
    for row, grad in zip(alone, grads, strict=True):
        optimiser.step(row, grad, optimiser.memory(row))
    optimiser.step(rows, grads, optimiser.memory(rows))
    assert torch.allclose(rows, torch.stack(alone))


def test_momentum_survives_a_gradient_that_is_written_anew():
    """Engines keep one gradient buffer, which they clear before every step."""
    weights, grad, optimiser = torch.zeros(1), torch.ones(1), Optimiser(1.0, momentum=0.5)
    memory = optimiser.memory(weights)
    for _ in range(3):
        grad.fill_(1.0)
        optimiser.step(weights, grad, memory)
        grad.zero_()
    assert weights.item() == -(1 + 1.5 + 1.75)


def test_clipping_leaves_short_gradients_alone():
    weights = torch.zeros(2, 2)
    Optimiser(1.0, clip=1.0).step(weights, torch.tensor([[0.3, 0.4], [3.0, 4.0]]), {})
    assert weights[0].tolist() == pytest.approx([-0.3, -0.4])
    assert weights[1].tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_the_rate_of_a_round_is_the_schedules_share_of_the_runs():
    config = Config(lr=0.2, lr_schedule="cosine", rounds=4, momentum=0.9, weight_decay=0.1, clip=2)
    assert config.optimiser_at(3) == Optimiser(pytest.approx(0.1), 0.9, 0.1, 2)


def test_batches_cover_every_sample_once_an_epoch():
    batches = Budget(epochs=2, batch=4).batches(10, np.random.default_rng(0))
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(10))


def test_steps_replace_epochs():
    rng = np.random.default_rng(0)
    assert [len(b) for b in Budget(steps=4, batch=4).batches(10, rng)] == [4, 4, 2, 4]
    assert len(Budget(steps=2, batch=4).batches(100, rng)) == 2


def test_a_rest_of_one_joins_the_batch_before_where_batch_norm_asks_for_it():
    rng = np.random.default_rng(0)
    assert [len(b) for b in Budget(batch=4, least=2, epochs=2).batches(9, rng)] == [4, 5, 4, 5]
    assert [len(b) for b in Budget(batch=4, least=2, steps=3).batches(9, rng)] == [4, 5, 4]
    assert [len(b) for b in Budget(batch=4, least=2).batches(1, rng)] == [1]
    assert [len(b) for b in Budget(batch=4).batches(9, rng)] == [4, 4, 1]


def test_an_infinite_batch_is_the_whole_set_and_no_data_no_step():
    rng = np.random.default_rng(0)
    (batch,) = Budget(batch=None).batches(7, rng)
    assert sorted(batch) == list(range(7))
    assert Budget().batches(0, rng) == []
    assert Budget(steps=3).batches(0, rng) == []


def begun(row):
    return Context(start=row, row=row, lr=0.1, steps=1)


def test_the_proximal_gradient_by_hand():
    grad, weights, me = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), begun(torch.ones(2))
    assert Proximal(0.5).direction(grad, weights, me).tolist() == [2.0, 3.0]
    assert SGD().direction(grad, weights, me) is grad


@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_reptile_goes_its_share_of_the_way(epsilon):
    start, row = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])
    moved = Reptile(epsilon).finish(begun(start), row, torch.zeros(2))
    assert moved.row.tolist() == [1 + 4 * epsilon, 2 - 4 * epsilon]


def test_fedsgd_hands_back_one_gradient_over_all_samples_and_the_statistics_after_it():
    (step,) = FullGradient().plan({"train": 5}, Budget(batch=2), np.random.default_rng(0))
    assert step["train"].tolist() == [0, 1, 2, 3, 4]
    assert FullGradient().plan({"train": 0}, Budget(), np.random.default_rng(0)) == []
    start, row, grad = torch.zeros(4), torch.tensor([1.0, 2, 3, 4]), torch.tensor([7.0, 8])
    assert FullGradient().finish(begun(start), row, grad).row.tolist() == [7, 8, 3, 4]


def test_a_batch_that_is_all_padding_costs_nothing():
    empty = Batch(torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2))
    assert cross_entropy(torch.randn(2, 3), empty) == 0
    half = Batch(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([1.0, 0.0]))
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    assert cross_entropy(logits, half) == pytest.approx(np.log(2))


def test_rows_of_a_batch_carry_their_own_weights_and_the_clients_classes():
    held = torch.tensor([True, False])
    batch = Batch(torch.arange(4.0).view(2, 2), torch.tensor([[0, 1], [1, 0]]),
                  torch.tensor([[1.0, 1], [1, 0]]), held)  # fmt: skip
    first, second = batch.rows()
    assert (first.x.tolist(), first.y.tolist(), first.weight.tolist()) == ([0, 1], [0, 1], [1, 1])
    assert (second.x.tolist(), second.y.tolist(), second.weight.tolist()) == (
        [2, 3],
        [1, 0],
        [1, 0],
    )
    assert first.held is held


def test_a_negative_mu_is_refused():
    with pytest.raises(FedloomError, match="mu"):
        Proximal(-1.0)


def test_padding_does_not_change_the_loss():
    logits, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    padded = Batch(torch.zeros(5), torch.tensor([0, 1, 2, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0]))
    whole = cross_entropy(logits, Batch(torch.zeros(3), y))
    assert torch.isclose(cross_entropy(torch.cat([logits, torch.randn(2, 4)]), padded), whole)


@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("step:2,0.5", [1, 1, 0.5, 0.5]),
        ("exp:0.5", [1, 0.5, 0.25, 0.125]),
        ("cosine", [1, 0.8535534, 0.5, 0.1464466]),
        ("cosine:0.5", [1, 0.9267767, 0.75, 0.5732233]),
    ],
)
def test_schedules(spec, factors):
    schedule = Schedule(spec)
    assert [schedule.factor(t, 4) for t in (1, 2, 3, 4)] == pytest.approx(factors)


@pytest.mark.parametrize("spec", ["linear", "step:2", "step:0,1", "exp:x", "cosine:1,2", ""])
def test_wrong_schedules_are_refused(spec):
    with pytest.raises(FedloomError, match="schedule"):
        Schedule(spec)
