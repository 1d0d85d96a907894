"""The state between two rounds: what is kept, what is shared and what is remembered."""

import numpy as np
import torch
from torch import nn

from fedloom.experiment.state import State
from fedloom.layout import Layout
from fedloom.mix import Average, Mixed

LAYOUT = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))  # body: 0, 1; head: 2, 3
CLIENTS = np.array([3, 1])
ROWS = torch.tensor([[30.0, 31, 32, 33], [10.0, 11, 12, 13]])


def state(part="body", **more):
    return State(LAYOUT, Average(part), torch.zeros(4), **more)


def test_clients_keep_what_is_not_combined_and_share_the_rest():
    now = state()
    now.apply(Mixed(shared=torch.full((4,), 7.0)), CLIENTS, ROWS)
    assert now.rows(np.array([1, 2, 3])).tolist() == [[7, 7, 12, 13], [7, 7, 7, 7], [7, 7, 32, 33]]


def test_what_the_mix_made_of_a_clients_row_goes_over_what_it_trained():
    now = state()
    made = Mixed(clients=np.array([1]), rows=torch.full((1, 4), 5.0))
    now.apply(made, CLIENTS, ROWS)
    assert now.rows(CLIENTS)[:, 2:].tolist() == [[32, 33], [5, 5]]
    now.apply(Mixed(reset=True, clients=np.array([1]), rows=torch.full((1, 4), 6.0)), CLIENTS, ROWS)
    assert now.rows(CLIENTS)[:, 2:].tolist() == [[0, 0], [6, 6]]  # only who got a row has one


def test_what_a_client_last_sent_is_its_own_copy_and_survives_a_checkpoint():
    now = state("all", recalls=True)
    sent = [torch.tensor([1.0, 2]), torch.tensor([3.0, 4, 5, 6])]
    now.recall(CLIENTS, sent, (torch.tensor([0, 2]), None))
    sent[0].zero_()  # the engine's memory is used again
    other = state("all", recalls=True)
    other.restore(now.tensors())
    for each in (now, other):
        whole, none, part = each.lasts(np.array([1, 2, 3]))
        assert none is None
        assert (part.row.tolist(), part.index.tolist()) == ([1, 2], [0, 2])
        assert (whole.row.tolist(), whole.index) == ([3, 4, 5, 6], None)


def test_nobody_remembers_what_nobody_asks_for():
    now = state("all")
    now.recall(CLIENTS, list(ROWS), (None, None))
    assert now.lasts(CLIENTS) is None
    assert list(now.tensors()) == ["shared"]
