import torch

from fedloom.layout import Columns
from fedloom.population import Population


def test_only_the_kept_columns_are_stored():
    kept = Population(Columns(((0, 1), (3, 5)), width=1000))
    kept.put([5, 2], torch.arange(2000.0).reshape(2, 1000))
    assert kept.tensors()["rows"].tolist() == [[1000, 1003, 1004], [0, 3, 4]]
    assert kept.tensors()["clients"].tolist() == [2, 5]
    assert len(kept) == 2
    assert 5 in kept
    assert 3 not in kept


def test_a_client_never_seen_gets_the_base_row():
    kept = Population(Columns(((0, 2),), width=3))
    base = torch.tensor([7.0, 8.0, 9.0])
    assert kept.compose([0, 1], base).stride(0) == 0  # one row, not copies
    kept.put([1], torch.zeros(1, 3))
    assert kept.compose([0, 1], base).tolist() == [[7, 8, 9], [0, 0, 9]]
    assert base.tolist() == [7, 8, 9]


def test_rows_are_replaced_grown_and_restored():
    kept = Population(Columns(((0, 1),), width=1))
    for client in range(20):
        kept.put([client], torch.full((1, 1), float(client)))
    kept.put([3], torch.tensor([[-1.0]]))
    other = Population(kept.columns)
    other.restore(kept.tensors())
    rows = other.compose(range(20), torch.zeros(1)).flatten().tolist()
    assert rows == [0, 1, 2, -1, *range(4, 20)]
    other.clear()
    assert len(other) == 0
    other.put([9], torch.tensor([[5.0]]))
    assert other.compose([9, 3], torch.zeros(1)).flatten().tolist() == [5, 0]
