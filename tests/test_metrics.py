import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.experiment.study import Ask
from fedloom.metrics.scores import client_scores, move_foreign_errors, summarise
from fedloom.models import build
from fedloom.models.counts import second_macs, training_macs
from fedloom.native import rows as native_rows
from fedloom.studies.s1 import S1, at_equal_work


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


def test_scores_are_means_over_the_classes_that_occur_not_over_those_held():
    """Class 2 is held but has no scored sample: it is guessed once, and has no recall."""
    table = client_scores(confusion([0, 0, 1, 1], [0, 1, 1, 2]), np.array([2.0]), holding(0, 1, 2))
    row = table.iloc[0]
    assert row.precision == pytest.approx((1 + 1 / 2) / 2)
    assert row.recall == pytest.approx(1 / 2)
    assert row.f1 == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert (row.accuracy, row.loss) == (0.5, 0.5)


def test_foreign_errors_go_to_the_held_classes_after_the_true_one_in_turn():
    """Held 2, 5, 7: errors on 5 go to 7 and 2, on 7 to 2 and 5, on 2 to 5 and 7, by the guess."""
    y = [5, 5, 5, 7, 7, 2, 2, 5, 7]
    p = [0, 1, 3, 0, 9, 8, 9, 7, 7]
    moved = move_foreign_errors(confusion(y, p), holding(2, 5, 7))
    assert np.array_equal(moved, confusion(y, [7, 2, 2, 2, 5, 5, 7, 7, 7]))


def test_a_client_of_one_class_keeps_its_errors_where_they_are():
    before = confusion([3, 3, 3], [3, 0, 8])
    assert np.array_equal(move_foreign_errors(before, holding(3)), before)
    row = client_scores(before, np.zeros(1), holding(3)).iloc[0]
    assert (row.precision, row.recall) == (1.0, pytest.approx(1 / 3))


def test_a_class_that_is_never_guessed_has_precision_and_f1_zero():
    row = client_scores(confusion([0, 1], [0, 0]), np.zeros(1), holding(0, 1)).iloc[0]
    assert row.precision == pytest.approx((1 / 2 + 0) / 2)
    assert row.f1 == pytest.approx((2 / 3 + 0) / 2)


def test_scores_of_a_capacity_group_by_hand():
    """Accuracies 1 and 1/2 on 1 and 4 samples; the spread is that of all clients, not a guess."""
    guesses = [([0], [0]), ([0, 1, 0, 1], [0, 1, 1, 0]), ([0, 1], [0, 1])]
    matrices = np.concatenate([confusion(y, p) for y, p in guesses])
    table = client_scores(matrices, np.zeros(3), np.ones((3, 10), bool))
    table["capacity"] = [0.5, 0.5, 1.0]
    group = summarise(table)["groups"]["0.5"]
    assert group == {"clients": 2, "micro": 3 / 5, "macro": 0.75, "std": 0.25}
    assert summarise(table)["groups"]["1"]["std"] == 0.0


def test_spreads_over_clients_are_of_all_clients():
    table = pd.DataFrame({"samples": [1, 3], "correct": [1, 0], "accuracy": [1.0, 0.0]})
    for name, values in {
        "loss": [1, 3],
        "precision": [1, 0],
        "recall": [1, 0],
        "f1": [4, 8],
    }.items():
        table[name] = np.array(values, float)
    out = summarise(table)
    assert (out["micro"], out["macro"], out["std"]) == (0.25, 0.5, 0.5)
    assert (out["loss"], out["loss_std"], out["f1"], out["f1_std"]) == (2, 1, 6, 2)


class Ran:
    def __init__(self, rounds=None, **summary):
        self.summary, self.rounds = summary, rounds


def scored(macs, accuracies):
    """A run that was scored in every second round."""
    seen = pd.Series(accuracies)
    rounds = pd.DataFrame({"macs": macs, "micro": seen, "eval_seconds": seen.notna().map(
        {True: 0.1, False: np.nan})})  # fmt: skip
    return Ran(rounds, macs=rounds["macs"].sum())


def test_at_equal_work_the_costlier_method_is_taken_where_it_has_done_the_others_work():
    cheap = scored(10, [np.nan, 0.5, np.nan, 0.6])
    costly = scored(15, [np.nan, 0.7, np.nan, 0.9])  # 40 is a third of the way from 30 to 60
    then = 0.7 + 0.2 / 3
    assert at_equal_work(costly, cheap, "micro") == pytest.approx(then - 0.6)
    assert at_equal_work(cheap, costly, "micro") == pytest.approx(0.6 - then)
    late = scored(30, [np.nan, 0.7, np.nan, 0.9])
    assert np.isnan(at_equal_work(late, cheap, "micro"))


def test_a_row_of_s1s_tables_by_hand():
    """Means over seeds, in %, of a score and of its spread over clients; newcomers below."""
    names = ("micro", "macro", "std", "precision", "precision_std", "recall", "recall_std", "f1",
             "f1_std")  # fmt: skip
    seeds = [np.arange(1, 10) / 100, np.arange(3, 12) / 100]
    runs = [
        Ran(majority=0.5, new_majority=0.6,
            **{f"before_{n}": x for n, x in zip(names, v, strict=True)},
            **{f"new_before_{n}": x / 2 for n, x in zip(names, v, strict=True)},
            **dict.fromkeys(names, 0.9), **{f"new_{n}": 0.9 for n in names})
        for v in seeds
    ]  # fmt: skip
    ask = Ask("mnist", "source", seeds=2)
    reference, local, new = S1().tables(ask, {"fedavg-meta": runs})
    assert local.rows[0][:3] == ["majority class", "", "50.00 ± 0.00"]
    assert new.rows[0][2] == "60.00 ± 0.00"
    assert local.rows[1][:8] == ["FedAvg", "lr=1e-05", "2.00 ± 1.00", "-83.03", "3.00±4.00",
                                 "5.00±6.00", "7.00±8.00", "9.00±10.00"]  # fmt: skip
    assert new.rows[1][:5] == ["FedAvg", "lr=1e-05", "1.00 ± 0.50", "-82.92", "1.50±2.00"]
    assert local.rows[1][8].startswith("85.03, 82.14±14.76")
    assert local.rows[2][2:4] == ["90.00 ± 0.00", "+5.16"]
    assert local.rows[-1][2:8] == ["–"] * 6
    assert reference.rows[2] == ["FedAvg, two classes a client", "2.00 ± 1.00", "85.03"]


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


def test_macs_of_second_derivatives_by_hand():
    """A hidden layer's weights go twice into a gradient's gradient, forward and back; those of the
    first layer do not go into its input, which takes none."""
    module = build("mlp", (1, 28, 28), 10)
    assert second_macs(module, (1, 28, 28)) == 2 * 784 * 100 + 6 * 100 * 10


def test_counting_macs_leaves_the_weights_alone():
    module = build("mlp", (1, 8, 8), 10)
    before = [p.clone() for p in module.parameters()]
    training_macs(module, (1, 8, 8))
    second_macs(module, (1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_distances_from_the_mean_are_the_same_with_and_without_kernels(monkeypatch):
    torch.manual_seed(0)
    rows = 5 + torch.randn(7, 1003)[:, :1001]
    shares = torch.linspace(1, 3, 7, dtype=torch.float64) / 14
    exact = (rows.double() - shares @ rows.double()).square().sum(1)
    torch.testing.assert_close(native_rows.squared_distances(rows, shares), exact)
    monkeypatch.setattr(native_rows, "instructions", lambda: None)
    torch.testing.assert_close(native_rows.squared_distances(rows, shares), exact)
