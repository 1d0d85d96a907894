"""The two sides between two rounds: what is kept, what is shared and what is remembered."""

import numpy as np
import torch
from torch import nn

from fedloom.engine import Trained
from fedloom.experiment.state import State
from fedloom.kinds import Sizes
from fedloom.layout import Layout
from fedloom.local import Controlled
from fedloom.method import Method
from fedloom.mix import Average, ControlledAverage, Mixed, RandomPairs, Swap
from fedloom.round.client import Round
from fedloom.round.messages import Sent
from fedloom.select import ByGradient, Whole

LAYOUT = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))  # body: 0, 1; head: 2, 3
CLIENTS = np.array([1, 3])
ROWS = torch.tensor([[10.0, 11, 12, 13], [30.0, 31, 32, 33]])
SIZES = Sizes(LAYOUT, classes=2)


def state(mix=None, row=None, **parts):
    method = Method(mix=mix or Average("body"), **parts)
    row = torch.zeros(4) if row is None else row
    return State.of(method, SIZES, row, lambda clients: clients * 10.0)


def trained(rows, indexes=(None, None)):
    numbers = np.array([2, 3])
    return Trained(list(rows), indexes, *[numbers] * 5, {})


def told(now, model):
    now.server.model = torch.tensor(model)


def test_clients_keep_what_is_not_combined_and_share_the_rest():
    now = state()
    now.kept.put(CLIENTS, ROWS)
    told(now, [7.0, 8.0])
    assert now.models(np.array([1, 2, 3])).tolist() == [
        [7, 8, 12, 13],
        [7, 8, 0, 0],
        [7, 8, 32, 33],
    ]
    assert now.shared.tolist() == [7, 8, 0, 0]


def test_a_message_holds_the_columns_that_travel_and_no_way_to_the_others():
    now = state()
    sent = now.clients.message(Round(CLIENTS, ROWS, ROWS.clone(), trained(ROWS)), CLIENTS)
    assert sent.model.tolist() == [[10, 11], [30, 31]]
    assert sent.model._base is None
    assert sent.model.untyped_storage().nbytes() == 4 * 4
    assert sent.weights.tolist() == [10, 30]
    assert sent.steps.tolist() == [2, 3]
    few = now.clients.message(Round(CLIENTS, ROWS, ROWS, trained(ROWS)), np.array([3]))
    assert (few.clients.tolist(), few.model.tolist()) == ([3], [[30, 31]])


def test_columns_of_a_sub_model_are_named_among_those_that_travel():
    now = state(Average("head"))
    indexes = (torch.tensor([0, 2, 3]), None)
    sent = now.clients.message(Round(CLIENTS, ROWS, ROWS, trained(ROWS, indexes)), CLIENTS)
    assert [None if i is None else i.tolist() for i in sent.indexes] == [[0, 1], None]


def test_what_is_delivered_replaces_the_columns_that_travel_and_no_others():
    now = state(Swap(RandomPairs(), part="body"))
    now.kept.put(CLIENTS, ROWS)
    now.clients.deliver(np.array([3]), torch.tensor([[5.0, 6]]), now.server.tell())
    assert now.models(CLIENTS).tolist() == [[10, 11, 12, 13], [5, 6, 32, 33]]
    told(now, [1.0, 2.0])
    now.clients.reset(now.server.tell())
    assert now.models(CLIENTS).tolist() == [[1, 2, 12, 13], [1, 2, 32, 33]]


def test_state_that_is_no_model_makes_none_personal_and_survives_a_checkpoint():
    now = state(ControlledAverage(), local=Controlled(), row=torch.tensor([1.0, 2, 3, 4]))
    assert now.plan.sections.width == 4 * 4
    assert not now.personal
    rows = torch.cat([ROWS, torch.arange(24.0).view(2, 12)], 1)  # c, ci, dc
    now.kept.put(CLIENTS, rows)
    now.server.state["c"] = torch.tensor([9.0, 9, 9, 9])
    other = state(ControlledAverage(), local=Controlled())
    other.restore(now.tensors())
    for each in (now, other):
        row = each.clients.rows(np.array([1]), each.server.tell())[0]
        assert row[:4].tolist() == [1, 2, 3, 4]  # of the model, what is shared
        assert row[4:8].tolist() == [9, 9, 9, 9]  # c, as it was told
        assert row[8:12].tolist() == [4, 5, 6, 7]  # ci, as it was kept
        assert each.models(CLIENTS).tolist() == [[1, 2, 3, 4]] * 2


def message(rows, indexes):
    return Sent(CLIENTS, rows, indexes, {}, np.ones(2), np.ones(2, dtype=int))


def test_what_a_client_last_sent_is_its_own_copy_and_survives_a_checkpoint():
    select = ByGradient()
    now = state(Average(), select=select)
    rows = torch.tensor([[3.0, 4, 5, 6], [1.0, 9, 2, 9]])
    now.server.remember(message(rows, (None, torch.tensor([0, 2]))))
    rows.zero_()  # the memory of messages is used again
    other = state(Average(), select=select)
    other.restore(now.tensors())
    for each in (now, other):
        whole, none, part = each.server.lasts(np.array([1, 2, 3]))
        assert none is None
        assert (part.row.tolist(), part.index.tolist()) == ([1, 2], [0, 2])
        assert (whole.row.tolist(), whole.index) == ([3, 4, 5, 6], None)


def test_nobody_remembers_what_nobody_asks_for():
    now = state(Average(), select=Whole())
    now.server.remember(message(ROWS, (None, None)))
    assert now.server.lasts(CLIENTS) is None
    assert list(now.tensors()) == ["shared"]
    assert Mixed().state == {}
