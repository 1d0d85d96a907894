import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.metrics.scores import client_scores, move_foreign_errors, summarise
from fedloom.models import build
from fedloom.models.counts import training_macs


def confusion(y, p, classes=10):
    matrix = np.zeros((1, classes, classes), dtype=int)
    np.add.at(matrix[0], (y, p), 1)
    return matrix


def holding(*classes, of=10):
    return np.isin(np.arange(of), classes)[None]


S1_LABELS, S1_GUESSES = [7, 7, 7, 7, 8, 8, 8, 8], [7, 7, 7, 0, 8, 8, 8, 1]


def test_s1s_example_of_moved_errors():
    """Labels 7777 8888, predictions 7770 8881 → 7778 8887."""
    moved = move_foreign_errors(confusion(S1_LABELS, S1_GUESSES), holding(7, 8))
    expected = confusion(S1_LABELS, [7, 7, 7, 8, 8, 8, 8, 7])
    assert np.array_equal(moved, expected)


def test_scores_of_s1s_example():
    table = client_scores(confusion(S1_LABELS, S1_GUESSES), np.array([4.0]), holding(7, 8))
    row = table.iloc[0]
    assert (row.samples, row.correct, row.loss) == (8, 6, 0.5)
    for measure in ("accuracy", "precision", "recall", "f1"):
        assert row[measure] == pytest.approx(0.75)


def test_moving_never_changes_the_number_of_errors_nor_makes_one_right():
    rng = np.random.default_rng(0)
    for _ in range(50):
        held = rng.choice(10, size=rng.integers(1, 6), replace=False)
        y, p = rng.choice(held, 40), rng.integers(0, 10, 40)
        before = confusion(y, p)
        after = move_foreign_errors(before, holding(*held))
        assert np.array_equal(np.diagonal(before[0]), np.diagonal(after[0]))
        assert np.array_equal(before.sum(2), after.sum(2))
        if len(held) > 1:
            assert after[0][:, np.setdiff1d(np.arange(10), held)].sum() == 0


def test_scores_agree_with_scikit_learn_where_no_error_is_foreign():
    from sklearn.metrics import precision_recall_fscore_support

    rng = np.random.default_rng(1)
    y, p = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    row = client_scores(confusion(y, p, 4), np.zeros(1), holding(0, 1, 2, 3, of=4)).iloc[0]
    expected = precision_recall_fscore_support(y, p, average="macro", zero_division=0)[:3]
    assert (row.precision, row.recall, row.f1) == pytest.approx(expected)


def test_a_client_without_test_data_is_left_out_of_the_summary():
    matrix = np.concatenate([confusion([0, 1], [0, 1]), np.zeros((1, 10, 10), int)])
    table = client_scores(matrix, np.zeros(2), np.ones((2, 10), bool))
    assert np.isnan(table["accuracy"][1])
    assert summarise(table)["clients"] == 1
    assert summarise(table.iloc[1:]) == {}


def test_micro_macro_and_tails_by_hand():
    accuracy = np.array([0.0, 0.5, 1.0] + [0.8] * 8)
    samples = np.array([10, 10, 20] + [10] * 8)
    table = pd.DataFrame({"samples": samples, "accuracy": accuracy})
    table["correct"] = table["accuracy"] * table["samples"]
    for name in ("loss", "precision", "recall", "f1"):
        table[name] = table["accuracy"]
    out = summarise(table)
    assert out["micro"] == pytest.approx((5 + 20 + 64) / 120)
    assert out["macro"] == pytest.approx(7.9 / 11)
    assert out["std"] == pytest.approx(accuracy.std())
    assert out["worst10"] == pytest.approx(0.25)  # ⌈11/10⌉ = 2 clients
    assert out["best10"] == pytest.approx(0.9)
    assert "groups" not in out


def test_capacity_groups():
    table = client_scores(
        np.concatenate([confusion([0, 1], [0, 1]), confusion([0, 1], [0, 0])]),
        np.zeros(2), np.ones((2, 10), bool),
    )  # fmt: skip
    table["capacity"] = [1.0, 0.25]
    groups = summarise(table)["groups"]
    assert groups["1"]["macro"] == 1.0
    assert groups["0.25"]["micro"] == 0.5


def test_macs_of_an_mlp_by_hand():
    """Forward a·b + b·c; backward the gradients of weights and hidden layer, not the input's."""
    module = build("mlp", (1, 28, 28), 10)
    assert training_macs(module, (1, 28, 28)) == 2 * 784 * 100 + 3 * 100 * 10


def test_macs_are_those_of_torchs_counter():
    from torch.utils.flop_counter import FlopCounterMode

    module = build("resnet18", (3, 32, 32), 10, options={"width": 8})
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert training_macs(module, (3, 32, 32)) == counter.get_total_flops() // 4


def test_counting_macs_leaves_the_weights_alone():
    module = build("mlp", (1, 8, 8), 10)
    before = [p.clone() for p in module.parameters()]
    training_macs(module, (1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
