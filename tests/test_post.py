"""The post and the door by hand: what is encoded, what is measured, what is turned away."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.errors import FedloomError
from fedloom.kinds import Scalar, Sizes, Weights
from fedloom.layout import Layout
from fedloom.local import SGD, Back
from fedloom.method import Method
from fedloom.mix import Average, Mixed
from fedloom.report.terminal import print_result
from fedloom.round.encode import encoding
from fedloom.round.messages import Sent, Told
from fedloom.round.plan import Plan
from fedloom.round.post import Post
from fedloom.round.screen import Screen

LAYOUT = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))  # four columns


class Telling(SGD):
    told: ClassVar = {"c": Weights()}


class Keeping(Average):
    keeps: ClassVar = {"c": Weights()}


def post(**more):
    plan = Plan.of(Method(local=Telling(), mix=Keeping()), Sizes(LAYOUT, classes=2))
    return Post(plan, **more)


def messages(model, values=None, indexes=None):
    n = len(model)
    return Sent(
        clients=np.arange(n), model=torch.tensor(model), indexes=indexes or (None,) * n,
        values=values or {}, weights=np.ones(n), steps=np.ones(n, dtype=np.int64),
    )  # fmt: skip


def test_fp16_rounds_what_clients_are_told():
    told = Told(torch.tensor([0.1, 0.2, 0.3, 0.4]), {"c": torch.tensor([1e-3, 2, 3, 4])})
    half = post(encoding=encoding("fp16")).told(told)
    assert torch.equal(half.model, told.model.half().float())
    assert not torch.equal(half.model, told.model)
    assert torch.equal(half.values["c"], told.values["c"].half().float())
    for name in ("fp32", "int8", "topk:0.1"):
        assert post(encoding=encoding(name)).told(told) is told


def test_gradients_are_sent_as_they_are_and_not_as_changes():
    """Whatever the model was: the largest of two gradients arrives, the other one waits."""
    carrier = post(encoding=encoding("topk:0.25"), gradients=True)
    arrived = carrier.up(messages([[1.0, -5, 2, 3]]), lambda: torch.full((1, 4), 100.0), 1)
    assert arrived.sent.model.tolist() == [[0, -5, 0, 0]]
    again = carrier.up(messages([[1.0, 0, 2, 3]]), lambda: torch.full((1, 4), 100.0), 2)
    assert again.sent.model.tolist() == [[0, 0, 0, 6]]


def test_the_norm_of_a_sub_models_change_is_that_of_its_columns():
    sent = messages([[9.0, 1, 9, 9], [1.0, 1, 1, 1]], indexes=(torch.tensor([1]), None))
    found = Screen(bound=3.0).look(sent, torch.zeros(2, 4))
    assert found == []
    assert [r.client for r in Screen(bound=1.5).look(sent, torch.zeros(2, 4))] == [1]


def test_nan_in_a_value_beside_the_model_is_turned_away():
    values = {"v": torch.tensor([[1.0], [torch.nan]])}
    (refusal,) = Screen().look(messages([[0.0] * 4] * 2, values), torch.zeros(2, 4))
    assert refusal.client == 1


def test_some_messages_are_cut_out_with_all_that_belongs_to_them():
    sent = messages([[1.0] * 4, [2.0] * 4, [3.0] * 4], {"v": torch.tensor([[1.0], [2.0], [3.0]])})
    some = sent.only(np.array([0, 2]))
    assert some.clients.tolist() == [0, 2]
    assert some.model[:, 0].tolist() == [1, 3]
    assert some.values["v"].tolist() == [[1], [3]]


def test_a_round_tells_how_many_messages_were_left_out(quick, recwarn):
    """Of a complete graph of six a bad node has five messages, of a server's clients one."""
    bad = {"attack": "nan", "on_bad": "skip", "participation": 1.0, "rounds": 2}
    star = quick(**bad)
    assert star.rounds["skipped"].tolist() == [1, 1]
    assert star.summary["skipped"] == 2
    nodes = quick("p2p-fedavg", topology="complete", **bad)
    assert nodes.rounds["skipped"].tolist() == [5, 5]
    honest = quick()
    assert honest.rounds["skipped"].tolist() == [0, 0, 0]
    assert star.idle_rounds == nodes.idle_rounds == honest.idle_rounds == []
    assert not [w for w in recwarn if "left out" in str(w.message)]


@pytest.mark.parametrize("method", ["fedavg", "p2p-fedavg", "local"])
def test_a_round_of_which_nothing_is_left_is_warned_of_once_and_shown(quick, capsys, method):
    more = {"topology": "ring"} if method == "p2p-fedavg" else {}
    bad = {"lr": 1e20} if method == "local" else {"attack": "nan,share=1"}
    with pytest.warns(UserWarning, match="All messages of round 1 were left out") as found:
        result = quick(method, on_bad="skip", participation=1.0, **bad, **more)
    assert len([w for w in found if "left out" in str(w.message)]) == 1
    assert result.idle_rounds == [1, 2, 3]
    print_result(result)
    assert "Nothing was combined in round 1, 2, 3: all messages were" in capsys.readouterr().out


class Failing(SGD):
    """Training ends in NaN in a client's second round."""

    when = 2
    keeps: ClassVar = {"times": Scalar()}

    def finish(self, me, row, grad):
        times = me.kept["times"] + 1
        wild = row * torch.nan if float(times) == self.when else row
        return Back(wild, keeps={"times": times})


@pytest.mark.filterwarnings("ignore:All messages of round")
def test_a_client_whose_training_diverged_keeps_what_it_had(quick):
    """Everybody's second round fails: nothing moves, and all go on from the first."""
    toy = Method(local=Failing(), mix=Average("body"))
    with pytest.raises(FedloomError, match="diverged"):
        quick(toy, rounds=2, participation=1.0)
    settings = {"participation": 1.0, "on_bad": "skip"}
    one, two = (quick(toy, rounds=r, **settings) for r in (1, 2))
    assert len(two.records[1]["skipped"]) == 6
    before, after = (r.store.checkpoint()[0] for r in (one, two))
    for name in ("shared", "kept/rows"):
        assert torch.equal(before[name], after[name])
    at_once = type("AtOnce", (Failing,), {"when": 1})()
    state = quick(Method(local=at_once, mix=Average("body")), rounds=1, **settings)
    assert len(state.store.checkpoint()[0]["kept/clients"]) == 0  # nobody has a model yet


def test_what_a_mix_delivers_counts_over_its_reset(quick):
    class ToOne(Average):
        home = "node"

        def combine(self, g):
            shared = super().combine(g).shared
            return Mixed(shared=shared, reset=True, clients=g.clients[:1], rows=g.rows[:1] * 0)

    result = quick(Method(mix=ToOne()), rounds=1, participation=1.0)
    state = result.store.checkpoint()[0]
    assert state["kept/clients"].tolist() == [0]
    assert state["kept/rows"].abs().max() == 0


def test_a_mix_can_not_write_into_the_servers_model(quick, row):
    class Vandal(Average):
        def combine(self, g):
            g.shared.zero_()
            return Mixed()

    start = quick(Method(mix=Vandal()), rounds=1)
    assert row(start).abs().max() > 0
