"""Who counts how much where models are averaged, and who is picked where they are compared."""

import numpy as np
import pytest
import torch
from test_mix import gather

from fedloom.mix import Coverage
from fedloom.mix.swap import greedy_pairs, least_pairs


def test_the_old_value_counts_as_one_client_of_mean_weight():
    """n = 1 and 5, so the old value weighs 3: (1·10 + 5·40 + 3·7) / 9; column 3: nobody's."""
    indexes = (torch.tensor([0, 2]), torch.tensor([0, 1]))
    g = gather([[10.0, 0, 10, 0], [40.0, 40, 0, 0]], [1, 5], [7.0, 7, 7, 7], indexes=indexes)
    voted = Coverage(old_votes=True).combine(g).shared
    assert voted.tolist() == pytest.approx([231 / 9, 221 / 8, 31 / 4, 7])


def test_clients_without_data_do_not_count_where_all_count_alike():
    g = gather([[10.0] * 4, [40.0] * 4, [70.0] * 4], [1, 5, 0], [7.0] * 4)
    assert Coverage(weigh="equal").combine(g).shared.tolist() == [25.0] * 4
    voted = Coverage(weigh="equal", old_votes=True).combine(g).shared
    assert voted.tolist() == pytest.approx([(10 + 40 + 7 * 2 / 3) / (2 + 2 / 3)] * 4)


def test_a_model_that_answers_nan_is_picked_last():
    matrix = np.array([[1.0, np.nan, 0.9, 0.5], [np.nan, 1.0, np.nan, np.nan],
                       [0.9, np.nan, 1.0, 0.8], [0.5, np.nan, 0.8, 1.0]])  # fmt: skip
    assert least_pairs(matrix, 2) == [(0, 3), (1, 2)]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        (pair,) = greedy_pairs(4, 1, rng, lambda base, others: matrix[base, others])
        assert pair[1] != 1
