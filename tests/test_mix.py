import numpy as np
import pytest
import torch
from torch import nn

from fedloom.layout import Layout
from fedloom.mix import Average, Coverage, Gathering, GradientStep, Keep, weighted_mean
from fedloom.native import rows as rows_module
from fedloom.streams import stream
from fedloom.topology import Contacts


def gather(rows, weights, shared, module=None, **more):
    rows = torch.tensor(rows)
    module = module or nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))  # four columns
    clients = np.arange(len(rows))
    return Gathering(
        round=1, layout=Layout.of(module), contacts=Contacts(clients), clients=clients,
        shared=torch.tensor(shared), weights=np.array(weights, dtype=float), rows=rows, lr=0.5,
        stream=lambda *names: stream(0, *names), **more,
    )  # fmt: skip


def test_average_by_hand():
    g = gather([[1.0, 2, 3, 4], [5.0, 6, 7, 8]], [1, 3], [0.0, 0, 0, 0])
    assert Average().combine(g).shared.tolist() == [4, 5, 6, 7]


def test_coverage_average_by_hand():
    """Element 0: both; 1: the second only; 2: the first only; 3: nobody, so the old value."""
    indexes = (torch.tensor([0, 2]), torch.tensor([0, 1]))
    g = gather([[1.0, 0, 3, 0], [4.0, 5, 0, 0]], [2, 1], [7.0, 7, 7, 7], indexes=indexes)
    assert Average().combine(g).shared.tolist() == [2, 5, 3, 7]


def test_full_coverage_is_the_plain_average_to_the_bit():
    rows, weights, old = torch.randn(5, 99), np.array([3.0, 1, 4, 1, 5]), torch.zeros(99)
    everything = tuple(torch.arange(99) for _ in range(5))
    assert torch.equal(
        weighted_mean(rows, weights, old), weighted_mean(rows, weights, old, everything)
    )


def test_nobody_with_data_changes_nothing():
    g = gather([[1.0, 2, 3, 4]], [0], [9.0, 9, 9, 9])
    assert Average().combine(g).shared.tolist() == [9, 9, 9, 9]
    assert GradientStep().combine(g).shared is None


def test_clients_without_data_have_no_say_where_all_others_count_the_same():
    g = gather([[1.0] * 4, [3.0] * 4, [100.0] * 4], [9, 1, 0], [0.0] * 4)
    assert Coverage(weigh="equal").combine(g).shared.tolist() == [2, 2, 2, 2]
    assert Coverage().combine(g).shared.tolist() == pytest.approx([1.2] * 4)


def test_coverage_of_whole_and_partial_models_by_hand():
    """A whole model of weight 3 beside two parts: element 0 has all three, 1 and 2 two, 3 one."""
    indexes = (None, torch.tensor([0, 1]), torch.tensor([0, 2]))
    rows = [[2.0, 4, 6, 8], [6.0, 8, 99, 99], [10.0, 99, 2, 99]]
    g = gather(rows, [3, 1, 0], [7.0] * 4, indexes=indexes)
    assert Average().combine(g).shared.tolist() == [3, 5, 6, 8]
    g = gather(rows[1:], [1, 0], [7.0] * 4, indexes=indexes[1:])
    assert Average().combine(g).shared.tolist() == [6, 8, 7, 7]


def test_averages_run_in_double_precision():
    rows = torch.tensor([[1.0], [1e-8], [-1.0]])
    assert weighted_mean(rows, np.ones(3), torch.zeros(1)).item() == pytest.approx(1e-8 / 3)
    part = (torch.tensor([0]),) * 3
    assert weighted_mean(rows, np.ones(3), torch.zeros(1), part).item() == pytest.approx(1e-8 / 3)


@pytest.mark.parametrize("mix", [Average(), Average("body"), Coverage(old_votes=True)], ids=str)
def test_a_mix_leaves_what_it_was_given_alone(mix):
    g = gather([[1.0, 2, 3, 4]], [1], [9.0, 9, 9, 9])
    mix.combine(g)
    assert g.shared.tolist() == [9, 9, 9, 9]
    assert g.rows.tolist() == [[1, 2, 3, 4]]


def test_gradient_step_by_hand():
    g = gather([[1.0, 0, 2, 0], [5.0, 0, 2, 4]], [3, 1], [10.0, 10, 10, 10])
    assert GradientStep().combine(g).shared.tolist() == [9, 10, 9, 9.5]


@pytest.mark.parametrize(("mix", "kept"), [(Average(), 0), (Average("body"), 2), (Keep(), 4)])
def test_what_is_kept_follows_from_the_declaration(mix, kept):
    assert len(mix.kept(gather([[0.0] * 4], [1], [0.0] * 4).layout)) == kept


@pytest.mark.parametrize("native", [True, False])
def test_rows_are_summed_alike_by_the_kernels_and_by_torch(monkeypatch, native):
    if not native:
        monkeypatch.setattr(rows_module, "instructions", lambda: None)
    rng = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(5, 1003, generator=rng), np.array([3.0, 1.0, 0.0, 7.0, 2.0])
    wide = torch.zeros(5, 1100)
    wide[:, :1003] = rows
    old = torch.randn(1003, generator=rng)
    wanted = (torch.from_numpy(weights)[:, None] * rows.double()).sum(0) / weights.sum()
    for given in (rows, wide[:, :1003]):
        assert torch.allclose(weighted_mean(given, weights, old).double(), wanted, atol=1e-6)
    some = (None, torch.arange(0, 1000, 3), None, torch.arange(500), torch.tensor([1, 1002]))
    share = torch.zeros(5, 1003, dtype=torch.float64)
    for k, index in enumerate(some):
        share[k, slice(None) if index is None else index] = weights[k]
    wanted = (share * rows).sum(0) / share.sum(0)
    found = weighted_mean(wide[:, :1003], weights, old, some)
    assert torch.allclose(found.double(), wanted, atol=1e-6)
    nobody = weighted_mean(rows[:1], weights[:1], old, (torch.tensor([4]),))
    assert torch.equal(nobody[5:], old[5:])
    assert nobody[4] == rows[0, 4]
    with pytest.raises(IndexError):
        weighted_mean(rows[:1], weights[:1], old, (torch.tensor([2, 1003]),))
