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


def test_clients_are_composed_in_the_order_asked_for():
    kept = Population(Columns(((0, 1), (2, 3)), width=3))
    kept.put([4, 1], torch.tensor([[40.0, 41, 42], [10.0, 11, 12]]))
    base = torch.tensor([7.0, 8, 9])
    expected = {1: [10, 8, 12], 4: [40, 8, 42], 3: [7, 8, 9]}
    for asked in ([1, 4], [4, 1], [4, 3, 1], [3], [1, 1]):
        assert kept.compose(asked, base).tolist() == [expected[c] for c in asked]


def test_who_is_forgotten_goes_on_from_the_base_and_others_keep_theirs():
    kept = Population(Columns(((0, 1),), width=1))
    kept.put([5, 2, 8], torch.tensor([[50.0], [20], [80]]))
    kept.forget([5, 6])
    assert kept.clients.tolist() == [2, 8]
    assert kept.compose([2, 5, 8], torch.zeros(1)).flatten().tolist() == [20, 0, 80]
    kept.put([5, 9], torch.tensor([[51.0], [90]]))
    assert kept.compose([9, 8, 5, 2], torch.zeros(1)).flatten().tolist() == [90, 80, 51, 20]


def test_a_restored_population_is_its_own():
    kept = Population(Columns(((0, 1),), width=1))
    kept.put([1], torch.tensor([[1.0]]))
    saved = kept.tensors()
    other = Population(kept.columns)
    other.restore(saved)
    other.put([1], torch.tensor([[2.0]]))
    assert saved["rows"].tolist() == [[1.0]]
