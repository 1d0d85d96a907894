"""Mixes that take the clients' mean change as a direction: exact small cases."""

import numpy as np
import pytest
import torch
from test_mix import gather
from torch import nn

from fedloom.local import Context, Controlled, Tethered
from fedloom.mix import (
    Adaptive,
    Average,
    ControlledAverage,
    NormalisedAverage,
    ServerMomentum,
    ServerStep,
    Sharpened,
)

ROWS, WEIGHTS, SHARED = [[1.0, 2, 3, 4], [5.0, 6, 7, 8]], [1, 3], [2.0, 2, 2, 2]
CHANGE = [2.0, 3, 4, 5]  # their mean is 4, 5, 6, 7


def test_a_server_step_by_hand():
    assert ServerStep(lr=0.5).combine(gather(ROWS, WEIGHTS, SHARED)).shared.tolist() == [
        3.0, 3.5, 4.0, 4.5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mix", "state"),
    [(ServerStep(), {}), (ServerMomentum(beta=0.0), {"velocity": torch.ones(4)})],
)
def test_a_step_of_one_without_memory_is_the_average_to_the_bit(mix, state):
    rows = torch.randn(3, 4) * 1e-3 + 1e3
    g = gather(rows.tolist(), [1, 5, 2], (torch.randn(4) * 1e3).tolist(), state=state)
    assert torch.equal(mix.combine(g).shared, Average().combine(g).shared)


def test_server_momentum_by_hand():
    g = gather(ROWS, WEIGHTS, SHARED, state={"velocity": torch.tensor([1.0, 0, 0, -2])})
    mixed = ServerMomentum(lr=0.5, beta=0.5).combine(g)
    assert mixed.state["velocity"].tolist() == [2.5, 3, 4, 4]
    assert mixed.shared.tolist() == [3.25, 3.5, 4, 4]


@pytest.mark.parametrize(
    ("kind", "squares"),
    [
        ("adagrad", [1 + 4.0, 1 + 9, 1 + 16, 1 + 25]),
        ("adam", [0.75 + 1.0, 0.75 + 2.25, 0.75 + 4, 0.75 + 6.25]),
        ("yogi", [1 + 1.0, 1 + 2.25, 1 + 4, 1 + 6.25]),  # all smaller than Δ²
    ],
)
def test_adaptive_steps_by_hand(kind, squares):
    state = {"mean": torch.tensor([4.0, 4, 4, 4]), "squares": torch.ones(4)}
    mix = Adaptive(lr=0.1, kind=kind, beta1=0.5, beta2=0.75, tau=0.5)
    mixed = mix.combine(gather(ROWS, WEIGHTS, SHARED, state=state))
    mean = [3.0, 3.5, 4, 4.5]
    assert mixed.state["mean"].tolist() == mean
    assert mixed.state["squares"].tolist() == squares
    wanted = [2 + 0.1 * m / (s**0.5 + 0.5) for m, s in zip(mean, squares, strict=True)]
    assert mixed.shared.tolist() == pytest.approx(wanted)


def test_yogi_lets_go_of_large_squares_by_a_bounded_step():
    state = {"mean": torch.zeros(4), "squares": torch.full((4,), 100.0)}
    mixed = Adaptive(kind="yogi", beta2=0.75).combine(gather(ROWS, WEIGHTS, SHARED, state=state))
    assert mixed.state["squares"].tolist() == [99, 97.75, 96, 93.75]


@pytest.mark.parametrize("mix", [ServerMomentum(), ServerStep(lr=3.0)])
def test_buffers_are_averaged_and_never_stepped(mix):
    """A step past the mean of variances would make them negative."""
    module = nn.BatchNorm1d(1)  # weight, bias; mean, variance, count
    g = gather([[1.0, 0, 5, 0.1, 2]], [1], [1.0, 0, 0, 9, 1], module,
               state={"velocity": torch.tensor([0.0, 0])})  # fmt: skip
    assert mix.combine(g).shared[2:].tolist() == pytest.approx([5, 0.1, 2])


def test_the_controlled_average_by_hand():
    sent = {"dc": torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 4]])}
    g = gather(ROWS, WEIGHTS, SHARED, total=8, sent=sent, state={"c": torch.ones(4)})
    mixed = ControlledAverage().combine(g)
    assert mixed.shared.tolist() == [4, 5, 6, 7]
    # c + |S|/N · mean, all participants alike: 1 + 2/8 · 2
    assert mixed.state["c"].tolist() == [1.5, 1, 1, 1.5]


def test_scaffolds_client_by_hand():
    me = Context(
        start=torch.tensor([4.0, 0]), row=torch.tensor([4.0, 0, 7]), lr=0.5, steps=2,
        told={"c": torch.tensor([1.0, 1])}, kept={"ci": torch.tensor([0.5, 3])},
    )  # fmt: skip
    rule = Controlled()
    grad = torch.tensor([10.0, 10])
    assert rule.direction(grad, me.start, me).tolist() == [10.5, 8]
    back = rule.finish(me, torch.tensor([1.0, 2, 7]), grad)
    # c_i − c + (x − y)/(Kη): 0.5 − 1 + 3/1, 3 − 1 − 2/1
    assert back.keeps["ci"].tolist() == [2.5, 0]
    assert back.sends["dc"].tolist() == [2, -3]
    assert back.row.tolist() == [1, 2, 7]


def test_ditto_is_drawn_to_what_it_was_told():
    me = Context(start=torch.zeros(2), row=torch.zeros(2), lr=1.0, steps=1,
                 told={"model": torch.tensor([1.0, -1])})  # fmt: skip
    assert Tethered(0.5).direction(torch.ones(2), torch.tensor([3.0, 3]), me).tolist() == [2, 3]


def nova(steps, **optimiser):
    return gather(ROWS, WEIGHTS, SHARED, steps=np.array(steps), **optimiser)


def test_fednova_with_equal_steps_is_the_average():
    assert NormalisedAverage().combine(nova([7, 7])).shared.tolist() == [4, 5, 6, 7]


def test_fednova_by_hand():
    """a = (1, 4), p = (1/4, 3/4): τ = 13/4; Δ/a = (−1, 0, 1, 2) and (3, 4, 5, 6)/4."""
    tau = 13 / 4
    wanted = [2 + tau * (a / 4 + 3 / 4 * b / 4) for a, b in zip([-1, 0, 1, 2], [3, 4, 5, 6],
              strict=True)]  # fmt: skip
    assert NormalisedAverage().combine(nova([1, 4])).shared.tolist() == pytest.approx(wanted)


def test_fednova_counts_momentum_into_the_length_of_a_walk():
    """With ρ = 0.5, two steps go as far as 1 + 1.5 plain ones, one as far as 1."""
    tau = 1 / 4 + 3 / 4 * 2.5
    wanted = [2 + tau * (a / 4 + 3 / 4 * b / 2.5) for a, b in zip([-1, 0, 1, 2], [3, 4, 5, 6],
              strict=True)]  # fmt: skip
    mixed = NormalisedAverage().combine(nova([1, 2], momentum=0.5))
    assert mixed.shared.tolist() == pytest.approx(wanted)


def test_sharpening_makes_the_mean_surer():
    sent = {"probabilities": torch.tensor([[[0.6, 0.4]], [[1.0, 0.0]]])}
    g = gather(ROWS, WEIGHTS, SHARED, sent=sent, state={"targets": torch.zeros(1, 2)})
    found = Sharpened(0.1).combine(g).state["targets"]
    assert found.tolist() == [pytest.approx([1 / (1 + np.exp(-6)), 1 / (1 + np.exp(6))])]
