"""The contract carries every family: toys of each, on the unchanged runner.

Personal parts, sub-models, meta-learning, swaps and gossip are written here in a few lines each,
as the methods to come will be. None of them may need a word in the runner or in an engine.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.adapt import FineTune
from fedloom.errors import FedloomError
from fedloom.kinds import Weights
from fedloom.local import SGD, Back, FullGradient, LocalRule, Pull, cross_entropy
from fedloom.method import Method
from fedloom.mix import Average, GradientStep, Keep, Mix, Mixed, PeerAverage, ServerStep
from fedloom.models import build
from fedloom.models.nets import MLP
from fedloom.newcomer import Shared
from fedloom.select import Select, Selection
from fedloom.topology import Contacts, Peers, Pooled, Star, Topology
from fedloom.topology.network import Ring


def method(**parts):
    class Toy(fedloom.MethodOptions):
        name, family, source = "toy", "test", "test"

        def build(self):
            return Method(**parts)

    return Toy()


def states(result):
    return result.store.checkpoint()[0]


# -- personal parts (FedPer, LG-FedAvg) -----------------------------------------------------------


def test_private_heads_never_mix_and_cost_their_columns_only(quick):
    result = quick(method(mix=Average(part="body")), rounds=4)
    kept = states(result)["kept/rows"]
    assert kept.shape[1] == 16 * 10 + 10
    assert result.rounds["bytes_up"].tolist() == [3 * (64 * 16 + 16) * 4] * 4
    heads = {tuple(head.tolist()) for head in kept}
    assert len(heads) == len(kept) > 1
    bodies = [result.model(client=c).hidden[0].weight for c in (0, 1)]
    assert torch.equal(*bodies)


def test_a_private_part_of_nothing_is_fedavg(quick, row):
    assert torch.equal(row(quick(method(mix=Average(part="all")))), row(quick("fedavg")))


# -- meta-learning (MAML, Meta-SGD) ---------------------------------------------------------------


@dataclass(frozen=True)
class ToyMeta(LocalRule):
    """One inner step on the support part, the gradient of the query loss through it."""

    alpha: float = 0.1
    learned: bool = False
    parts = ("train-support", "train-query")
    weighs = "train-query"
    differentiates = True

    @property
    def extras(self):
        return {"alpha": self.alpha} if self.learned else {}

    def plan(self, sizes, budget, rng):
        return [{part: np.arange(size) for part, size in sizes.items()}]

    def objective(self, net, params, data, me):
        support, query = data["train-support"], data["train-query"]
        weights = {k: v for k, v in params.items() if "/" not in k}
        grads = torch.func.grad(lambda w: cross_entropy(net(w, support.x), support))(weights)
        rate = {k: params.get(f"alpha/{k}", self.alpha) for k in weights}
        inner = {k: w - rate[k] * grads[k] for k, w in weights.items()}
        return cross_entropy(net(inner, query.x), query)


def test_maml_without_inner_rate_is_sgd_on_the_query_part(quick, row):
    class OnQuery(SGD):
        parts, weighs = ("train-query",), "train-query"

        def plan(self, sizes, budget, rng):
            return [{"train-query": np.arange(sizes["train-query"])}]

        def objective(self, net, params, data, me):
            return cross_entropy(net(params, data["train-query"].x), data["train-query"])

    meta, plain = row(quick(method(local=ToyMeta(0.0)))), row(quick(method(local=OnQuery())))
    assert torch.allclose(meta, plain, atol=1e-6)
    assert not torch.allclose(meta, row(quick(method(local=ToyMeta(0.5)))), atol=1e-4)


def test_learned_rates_are_columns_that_mix_like_their_weights(quick):
    result = quick(method(local=ToyMeta(learned=True), mix=Average(part="body")), rounds=2, lr=1.0)
    body, head = 64 * 16 + 16, 16 * 10 + 10
    assert states(result)["shared"].numel() == 2 * (body + head)
    assert states(result)["kept/rows"].shape[1] == 2 * head
    rates = states(result)["shared"][body + head : 2 * body + head]
    assert not torch.allclose(rates, torch.full_like(rates, 0.1))
    assert result.model(client=0)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_fine_tuning_scores_the_query_part_and_keeps_the_score_before(quick):
    result = quick(method(adapt=FineTune(lr=0.5)), test_share=0.5, newcomers=2, clients=6)
    table = result.clients
    assert (table["accuracy_before"] != table["accuracy"]).any()
    assert set(table["population"]) == {"local", "new"}
    plain = quick("fedavg", test_share=0.5, newcomers=2).clients
    assert table["samples"].sum() < plain["samples"].sum()


# -- sub-models (HeteroFL, FedRolex, ...) ---------------------------------------------------------


@dataclass(frozen=True)
class Half(Select):
    """Every other client trains the first half of the hidden layer: a really smaller MLP."""

    share: float = 0.5
    needs: frozenset = frozenset()

    def choose(self, ask):
        if ask.client % 2 == 0:
            return None
        if "data" in self.needs:
            assert len(ask.data("train").y) > 0
        keep = int(16 * self.share)
        at = {name: torch.arange(e.start, e.stop).view(e.shape) for e in ask.layout.entries
              for name in [e.name]}  # fmt: skip
        index = torch.cat([
            at["hidden.0.weight"][:keep].flatten(), at["hidden.0.bias"][:keep],
            at["out.weight"][:, :keep].flatten(), at["out.bias"],
        ])  # fmt: skip
        return Selection(index, keep, lambda: MLP((1, 8, 8), 10, hidden=(keep,)))


def test_sub_models_are_smaller_cheaper_and_averaged_by_coverage(quick):
    sub = quick(method(select=Half()), participation=1.0, rounds=1)
    full = quick("fedavg", participation=1.0, rounds=1)
    assert sub.summary["macs"] < 0.8 * full.summary["macs"]
    whole, half = 64 * 16 + 16 + 170, 64 * 8 + 8 + 90
    assert sub.summary["bytes_up"] == 4 * 3 * (whole + half)
    # what only the even clients trained is the average of what they train alone
    rows = states(quick("local", participation=1.0, rounds=1))["kept/rows"][::2].double()
    n = sub.clients.set_index("client")["train_samples"].loc[[0, 2, 4]].to_numpy(float)
    evens = (torch.from_numpy(n)[:, None] * rows).sum(0) / n.sum()
    upper = slice(64 * 8, 64 * 16)  # the weights of the hidden units that the odd ones lack
    assert torch.allclose(states(sub)["shared"][upper].double(), evens[upper], atol=1e-7)
    lower = slice(0, 64 * 8)
    assert not torch.allclose(states(sub)["shared"][lower].double(), evens[lower], atol=1e-4)


def test_an_element_trained_by_nobody_keeps_its_value(quick):
    class OnlyHalf(Half):
        def choose(self, ask):
            return super().choose(replace(ask, client=1))

    result = quick(method(select=OnlyHalf()), rounds=2)
    before = build("mlp", (1, 8, 8), 10, 0, {"hidden": [16]}).state_dict()
    after = result.model().state_dict()
    for name in ("hidden.0.weight", "hidden.0.bias"):
        assert torch.equal(after[name][8:], before[name][8:])
        assert not torch.equal(after[name][:8], before[name][:8])
    assert torch.equal(after["out.weight"][:, 8:], before["out.weight"][:, 8:])
    assert not torch.equal(after["out.bias"], before["out.bias"])


def test_full_share_is_fedavg_to_the_bit(quick, row):
    assert torch.equal(row(quick(method(select=Half(share=1.0)))), row(quick("fedavg")))


def test_capacities_reach_the_selector_and_group_the_scores(quick):
    class ByCapacity(Half):
        def choose(self, ask):
            return None if ask.capacity == 1 else super().choose(replace(ask, client=1))

    toy = method(select=ByCapacity())
    result = quick(toy, participation=1.0, capacities="1:0.5,0.5:0.5", rounds=1)
    groups = result.records[-1]["clients"]["groups"]
    assert {name: g["clients"] for name, g in groups.items()} == {"0.5": 3, "1": 3}
    whole, half = 64 * 16 + 16 + 170, 64 * 8 + 8 + 90
    assert result.summary["bytes_up"] == 4 * 3 * (whole + half)
    assert sorted(result.clients["capacity"]) == [0.5] * 3 + [1.0] * 3
    with pytest.raises(FedloomError, match="would do nothing"):
        quick("fedavg", capacities="1:0.5,0.5:0.5")


@pytest.mark.parametrize("spec", ["2", "0:1", "1:0.5,0.5:0.4", "x", "1,1", "1:0.5,0.5", ""])
def test_wrong_capacities_are_refused(quick, spec):
    with pytest.raises(FedloomError, match="capacities"):
        quick(capacities=spec)


def test_a_selector_that_sees_data_downloads_the_whole_model(quick):
    result = quick(method(select=Half(needs=frozenset({"data"}))), participation=1.0, rounds=1)
    assert result.summary["bytes_down"] > result.summary["bytes_up"]


# -- swaps and gossip -----------------------------------------------------------------------------


class Swap(Mix):
    """Neighbours in the list of participants exchange models; every third round all average."""

    home = "node"

    def combine(self, g):
        if g.round % 3 == 0:
            mean = Average().combine(g).shared
            return Mixed(shared=mean, reset=True)
        order = np.arange(len(g.clients))
        paired = order[: len(order) // 2 * 2].reshape(-1, 2)[:, ::-1].ravel()
        order[: len(paired)] = paired
        return Mixed(clients=g.clients, rows=g.rows[order])


def test_a_swap_is_a_permutation_and_an_average_resets_everybody(quick):
    swapped = quick(method(mix=Swap()), rounds=2, participation=1.0)
    kept = quick("local", rounds=1, participation=1.0)
    assert len(states(swapped)["kept/rows"]) == 6
    averaged = quick(method(mix=Swap()), rounds=3, participation=1.0)
    assert len(states(averaged)["kept/rows"]) == 0
    models = [averaged.model(client=c).out.weight for c in (0, 5)]
    assert torch.equal(*models)
    once = quick(method(mix=Swap()), rounds=1, participation=1.0)
    before = sorted(map(tuple, states(kept)["kept/rows"].tolist()))
    after = sorted(map(tuple, states(once)["kept/rows"].tolist()))
    assert before == after
    assert states(once)["kept/rows"].tolist() != states(kept)["kept/rows"].tolist()


@dataclass(frozen=True)
class Complete(Topology):
    """No server; everybody meets everybody."""

    server: bool = False

    def contacts(self, round, clients, participants, stream):
        pairs = np.array([(a, b) for a in range(clients) for b in range(a + 1, clients)])
        return Contacts(np.arange(clients), pairs)


class Gossip(Mix):
    """Synchronous: every node takes the mean of itself and those it meets."""

    home = "node"

    def combine(self, g):
        matrix = torch.eye(len(g.clients))
        for a, b in g.contacts.edges:
            matrix[a, b] = matrix[b, a] = 1
        return Mixed(clients=g.clients, rows=matrix / matrix.sum(1, keepdim=True) @ g.rows)


def test_gossip_on_a_complete_graph_is_an_average(quick):
    result = quick(method(mix=Gossip(), topology=Complete()), partition="iid", rounds=1)
    rows = states(result)["kept/rows"]
    assert torch.allclose(rows, rows[0].expand_as(rows), atol=1e-6)
    alone = states(quick("local", rounds=1, participation=1.0))["kept/rows"]
    assert torch.allclose(rows[0], alone.mean(0), atol=1e-6)


# -- memory, and what is refused ------------------------------------------------------------------


class Momentum(Average):
    """Server momentum: keeps its velocity."""

    keeps: ClassVar = {"velocity": Weights()}

    def combine(self, g):
        velocity = 0.5 * g.state["velocity"] + super().combine(g).shared - g.shared
        return Mixed(shared=g.shared + velocity, state={"velocity": velocity})


def test_declared_memory_is_kept_and_restored(quick):
    whole = quick(method(mix=Momentum()), rounds=4)
    half = quick(method(mix=Momentum()), rounds=2, out="half")
    quick(method(mix=Momentum()), rounds=4, out="half", resume=True)
    assert "server/velocity" in states(whole)
    for name, value in states(whole).items():
        assert torch.equal(value, states(fedloom.load(half.path))[name])


def test_undeclared_memory_fails_at_once(quick):
    class Forgetful(Momentum):
        keeps: ClassVar = {}

        def combine(self, g):
            return Mixed(state={"velocity": torch.zeros(1)})

    with pytest.raises(FedloomError, match="without declaring"):
        quick(method(mix=Forgetful()))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"topology": Complete()}, "needs a server"),
        ({"topology": Pooled(), "mix": Keep()}, "keeps a model on each client"),
        ({"topology": Pooled(), "select": Half()}, "no weaker client"),
        ({"local": FullGradient()}, "hands back gradients"),
        ({"mix": GradientStep()}, "combines gradients"),
    ],
)
def test_nonsense_is_refused_with_the_reason(parts, why):
    with pytest.raises(FedloomError, match=why):
        Method(**parts)


# -- what a part returns --------------------------------------------------------------------------


def slip(base, function, value):
    """A part `Drift` in which one function returns what it should not."""
    return type("Drift", (base,), {function: lambda self, *_, **__: value})()


VECTOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("role", "base", "function", "value", "why"),
    [
        ("local", SGD, "finish", VECTOR, "a Tensor; it must return a Back"),
        ("local", SGD, "finish", None, "None; it must return a Back"),
        ("local", SGD, "finish", Back([1.0]), "a list as row of its Back; it must be a Tensor"),
        ("local", SGD, "finish", Back(VECTOR, sends={"d": 1.0}), "a float as 'd' in `sends`; it"),
        (
            "local",
            SGD,
            "finish",
            Back(VECTOR, keeps=[1]),
            "a list as `keeps`; it must be a Map",
        ),
        ("local", SGD, "objective", 0.5, "a float; it must return a Tensor"),
        ("local", SGD, "objective", VECTOR, r"a Tensor of shape \(2,\); it must return a single"),
        ("local", SGD, "pull", 1, "an int; it must return a Pull"),
        ("local", SGD, "pull", Pull(1, VECTOR), r"a Pull whose `to` has the shape \(2,\)"),
        ("local", SGD, "pull", Pull(push=VECTOR), r"a Pull whose `push` has the shape \(2,\)"),
        ("local", SGD, "passes", 5, "5; it must return two whole numbers"),
        ("local", SGD, "passes", (5, -1), ".*; it must return two whole numbers"),
        ("local", SGD, "passes", (5.0, 0), ".*; it must return two whole numbers"),
        ("local", SGD, "passes", (True, 0), ".*; it must return two whole numbers"),
        ("local", SGD, "passes", (10**30, 0), ".*; it must return two whole numbers"),
        ("local", SGD, "direction", 1, "an int; it must return a Tensor"),
        ("local", SGD, "direction", VECTOR, r"a Tensor of shape \(2,\); it must have the grad"),
        ("local", SGD, "plan", {}, "a dict; it must return a list"),
        ("local", SGD, "plan", [np.arange(2)], "an ndarray as a step; it must be a Mapping"),
        ("local", SGD, "plan", [{"train": [0]}], "a list for 'train' in a step; it must be an nd"),
        ("local", SGD, "at", None, "None; it must return a LocalRule"),
        ("mix", Average, "combine", VECTOR, "a Tensor; it must return a Mixed"),
        ("mix", Average, "combine", Mixed(shared=[1]), "a list as shared of its Mixed; it must be"),
        ("mix", Average, "combine", Mixed(rows=VECTOR), "a Mixed with rows and without clients"),
        ("mix", Average, "combine", Mixed(metrics=3), "an int as metrics of its Mixed; it must be"),
        ("mix", Momentum, "combine", Mixed(state={"velocity": 1}), "an int as 'velocity' in `sta"),
        ("mix", Average, "senders", [0], "a list; it must return an ndarray"),
        ("mix", ServerStep, "step", VECTOR, "a Tensor; it must return a tuple"),
        ("mix", ServerStep, "step", (VECTOR,), "a tuple of 1; it must return a Tensor and a dict"),
        ("mix", ServerStep, "step", (VECTOR, None), "None second in its tuple; it must be a dict"),
        ("select", Half, "choose", VECTOR, "a Tensor; it must return a Selection"),
        ("topology", Star, "contacts", [0], "a list; it must return a Contacts"),
        ("topology", Star, "contacts", Contacts([0]), "a list as participants of its Contacts; it"),
        ("newcomer", Shared, "candidates", 1, "an int; it must return a Tensor"),
    ],
)
def test_a_part_that_returns_the_wrong_type_is_named(quick, role, base, function, value, why):
    parts = {role: slip(base, function, value)}
    if role == "newcomer":
        parts["mix"] = Average("body")
    with pytest.raises(FedloomError, match=rf"^Drift\.{function} returned {why}"):
        quick(method(**parts), rounds=1, model_options={"hidden": [4]})


@pytest.mark.parametrize("engine", ["serial", "stacked"])
@pytest.mark.parametrize(("word", "verb"), [("sends", "sent"), ("keeps", "kept")])
@pytest.mark.parametrize(("bad", "what"), [(np.nan, "NaN"), (np.inf, "infinite values")])
def test_a_bad_value_beside_a_sound_model_is_not_blamed_on_training(
    quick, engine, word, verb, bad, what
):
    class Drift(SGD):
        def finish(self, me, row, grad):
            return Back(row, **{word: {"drift": torch.full_like(me.start, bad)}})

    setattr(Drift, word, {"drift": Weights()})
    mix = type("Takes", (Average,), {"takes": frozenset({"drift"} if word == "sends" else ())})
    why = rf"^Drift\.finish of client \d {verb} 'drift' with {what} in round 1; the trained model"
    with pytest.raises(FedloomError, match=why):
        quick(method(local=Drift(), mix=mix()), rounds=1, engine=engine)
    with pytest.raises(FedloomError, match=r"^Training diverged"):
        quick(method(local=Drift(), mix=mix()), rounds=1, engine=engine, lr=1e30, out="diverged")


@pytest.mark.parametrize("function", ["finish", "objective", "direction"])
def test_the_stacked_engine_names_it_too(quick, function):
    with pytest.raises(FedloomError, match=f"^Drift.{function} returned a str; it must return a "):
        quick(method(local=slip(SGD, function, "x")), rounds=1, engine="stacked")


def test_nodes_that_meet_are_held_to_it_too(quick):
    for parts, why in (
        ({"mix": slip(PeerAverage, "shares", 1.0)}, "shares returned a float"),
        (
            {"mix": PeerAverage(), "topology": Peers(slip(Ring, "edges", [(0, 1)]))},
            "edges returned",
        ),
        ({"mix": PeerAverage(), "topology": Peers(slip(Ring, "meetings", 1))}, "meetings returned"),
    ):
        with pytest.raises(FedloomError, match=f"^Drift.{why}"):
            quick(method(**{"topology": Peers(Ring()), **parts}), rounds=1, participation=1.0)


def test_a_class_in_place_of_a_part_is_refused(quick):
    with pytest.raises(FedloomError, match=r"`local` must be a LocalRule, not the class SGD"):
        Method(local=SGD)
    with pytest.raises(FedloomError, match=r"`adapt` must be an Adapt, not a SGD\."):
        Method(adapt=SGD())

    class Toy(fedloom.MethodOptions):
        name, family, source = "toy", "test", "test"

        def build(self):
            return SGD()

    with pytest.raises(FedloomError, match=r"^Toy\.build returned a SGD; it must return a Method"):
        quick(Toy())


# -- models of every kind -------------------------------------------------------------------------


def small_conv(norm):
    def factory(shape, classes):
        from fedloom.models.nets import Conv4

        return Conv4(shape, classes, channels=(8, 16, 16, 32), norm=norm)

    return factory


@pytest.mark.parametrize("norm", ["batch", "static", "group", "none"])
def test_every_norm_learns(quick, norm):
    result = quick(model=small_conv(norm), rounds=6, lr=0.1, clients=4, participation=1.0,
                   eval_every=6, epochs=2, momentum=0.9)  # fmt: skip
    assert result.summary["test_accuracy"] > 0.5


def test_batch_norm_and_a_single_image(quick):
    """A rest of one image joins the batch before it; a client with one image gets a sentence."""
    quick(model=small_conv("batch"), batch=7, clients=3, rounds=1, test_share=0.0)
    with pytest.raises(FedloomError, match="batch of one image"):
        quick(model=small_conv("batch"), batch=1, rounds=1)


def test_dropout_is_reproducible(quick, row):
    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))

    first, second = quick(model=factory), quick(model=factory)
    assert torch.equal(row(first), row(second))
