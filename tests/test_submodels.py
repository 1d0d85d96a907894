"""Sub-models: what belongs together is chosen together, smaller nets are really smaller, and with
everyone at full capacity nothing is left of it all."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedloom
from fedloom.data.dataset import from_arrays
from fedloom.data.public import PublicSet
from fedloom.engine.resident import Resident
from fedloom.errors import FedloomError
from fedloom.experiment.blueprint import blueprint
from fedloom.experiment.capacities import Capacities
from fedloom.layout import Layout
from fedloom.local import Batch, MaskedSGD, OrderedDropout, SelfDistillation
from fedloom.local.distil import divergence
from fedloom.method import Method
from fedloom.methods.registry import find
from fedloom.mix import Coverage, Gathering, PeerAverage, Pull
from fedloom.models import build
from fedloom.models.counts import forward_macs, saved_bytes
from fedloom.models.exits import Exits
from fedloom.models.norm import settle
from fedloom.round.attack import Attack
from fedloom.select import (
    Ask,
    ByActivation,
    ByGradient,
    Channels,
    Last,
    Ordered,
    Prefix,
    Random,
    Rolling,
    Whole,
)
from fedloom.select.scores import activations, gradients
from fedloom.select.verify import verify
from fedloom.select.width import draw
from fedloom.streams import stream
from fedloom.topology import Contacts, Peers, network

SHAPE = (3, 16, 16)
MODELS = {
    "mlp": {"hidden": [12, 8]},
    "lenet": {},
    "conv4": {"channels": [8, 8, 16, 16]},
    "resnet18": {"width": 8},
}
WIDTH_METHODS = ("heterofl", "federated-dropout", "fedrolex", "feddse", "fedgse-spl", "fedgse-csl")


def a_model(name, **more):
    return build(name, SHAPE, 5, options={**MODELS[name], **more})


def ask_for(module, capacity, *, t=1, client=0, x=None, public=None, last=None):
    layout = Layout.of(module)
    batch = None if x is None else Batch(x, torch.zeros(len(x), dtype=torch.int64))
    return Ask(
        round=t, client=client, capacity=capacity, layout=layout, row=layout.flatten(module),
        module=module, stream=lambda *names: stream(0, *names, t, client),
        data=None if batch is None else lambda part: batch,
        channels=Channels.of(module, SHAPE), public=public, last=last,
    )  # fmt: skip


def some_choices(module, capacity=0.5):
    """One selection of every width selector."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, *SHAPE, generator=g)
    y = torch.randint(0, 5, (12,), generator=g)
    public = PublicSet(x, y, "test")
    for select in (Ordered(), Random(), Rolling(), ByActivation(), ByActivation(temperature=1.0),
                   ByGradient(labels="spl"), ByGradient(labels="csl")):  # fmt: skip
        yield select, select.choose(ask_for(module, capacity, t=5, x=x, public=public))


# -- channel groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_sub_model_is_the_full_model_with_the_other_channels_zeroed(name):
    module = a_model(name)
    layout = Layout.of(module)
    row = layout.flatten(module)
    x = torch.randn(6, *SHAPE)
    for _select, chosen in some_choices(module):
        zeroed = torch.zeros_like(row)
        zeroed[chosen.index] = row[chosen.index]
        for e in layout.entries:  # a channel of zeros stays one behind its norm
            if e.name.endswith("running_var"):
                e.view(zeroed).fill_(1.0)
        full = layout.load(a_model(name), zeroed).eval()
        small = chosen.build()
        Layout.of(small).load(small, row[chosen.index]).eval()
        torch.testing.assert_close(small.eval()(x), full(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_scatter_of_a_gather_is_the_identity(name):
    module = a_model(name)
    layout = Layout.of(module)
    row = layout.flatten(module)
    for select, chosen in some_choices(module):
        assert (chosen.index.diff() > 0).all(), select
        back = row.clone()
        back[chosen.index] = row[chosen.index]
        assert torch.equal(back, row)
        small = chosen.build()
        sub = Layout.of(small)
        assert sub.size == len(chosen.index)
        for whole, part in zip(layout.entries, sub.entries, strict=True):
            assert whole.name == part.name
            values = set(whole.view(row).flatten().tolist())
            assert set(part.view(row[chosen.index]).flatten().tolist()) <= values


def test_the_channels_of_a_sub_model_can_be_read_off_its_columns():
    module = a_model("resnet18")
    channels, layout = Channels.of(module, SHAPE), Layout.of(module)
    rng = np.random.default_rng(0)
    keep = [np.sort(rng.choice(m, 3, replace=False)) for m in channels.sizes]
    for mine, read in zip(keep, channels.kept(layout, channels.index(layout, keep)), strict=True):
        assert mine.tolist() == read.tolist()


def test_residual_additions_tie_the_channels_of_a_stage():
    names = {g.name: g.readers for g in Channels.of(a_model("resnet18"), SHAPE).groups}
    assert set(names["conv"]) >= {"layer1.0.conv1", "layer1.1.conv1", "layer2.0.shortcut.0"}
    assert "layer1.0.conv2" not in names  # it makes the stem's channels, no new ones
    assert names["layer1.0.conv1"] == ("layer1.0.conv2",)


class Own(nn.Module):
    """Depthwise, grouped and plain convolutions, group and layer norm, reshapes: a user's model."""

    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.point = nn.Conv2d(16, 8, 1)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 12)
        self.fc = nn.Linear(12 * 4, 10)
        self.last = nn.LayerNorm(10)
        self.out = nn.Linear(10, classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + self.point(F.gelu(self.depthwise(x)))
        x = F.silu(self.norm(self.grouped(x)))
        x = F.adaptive_avg_pool2d(x, 2)
        return self.out(self.last(F.relu(self.fc(x.reshape(x.size(0), -1)))))


def test_depthwise_and_grouped_convolutions_of_a_users_model_are_cut():
    module = Own(SHAPE, 5)
    channels = Channels.of(module, SHAPE)
    sizes = {g.name: g.size for g in channels.groups}
    assert sizes == {"stem": 4, "grouped": 6, "fc": 10}  # both halves of the groups alike
    small = channels.build(channels.counts(0.5))
    assert small.stem.weight.shape[0] == small.depthwise.groups == 4
    assert small.depthwise.weight.shape == (8, 1, 3, 3)
    assert small.grouped.weight.shape == (6, 2, 3, 3)
    assert small.grouped.groups == 2
    assert small.fc.in_features == 6 * 4
    assert small.last.normalized_shape == (5,)
    layout, index = Layout.of(module), channels.index(Layout.of(module), [
        np.array([1, 3]), np.array([0, 2, 5]), np.arange(5)])  # fmt: skip
    Layout.of(small).load(small, layout.flatten(module)[index])
    assert torch.equal(small.stem.weight, module.stem.weight[[1, 3, 5, 7]])
    assert torch.equal(small.depthwise.weight[:2], module.depthwise.weight[2:4])
    assert small(torch.zeros(2, *SHAPE)).shape == (2, 5)


class Mixed(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Conv2d(shape[0], 4, 3), nn.Conv2d(shape[0], 4, 3)
        self.join = nn.Identity()
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.join(torch.cat([self.a(x), self.b(x)], 1)).softmax(1).mean((2, 3)))


class Fixed(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        self.out = nn.Linear(4 * 16 * 16, classes)

    def forward(self, x):
        return self.out(F.relu(self.conv(x)).view(-1, 4 * 16 * 16))


class Attention(nn.Module):
    def __init__(self, shape, classes, **more):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 8, 8, 8)
        self.look = nn.MultiheadAttention(8, 2, batch_first=True, **more)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        return self.out(self.look(x, x, x, need_weights=False)[0].mean(1))


def test_what_can_not_be_cut_is_refused_by_the_layers_name():
    with pytest.raises(
        FedloomError,
        match=r"Mixed can't be cut.*forward.*after layer 'join'.*'_softmax'.*not over channels",
    ):
        Channels.of(Mixed(SHAPE, 5), SHAPE)
    with pytest.raises(FedloomError, match=r"Attention can't be cut"):
        verify(Channels.of(Attention(SHAPE, 5, add_zero_attn=True), SHAPE), SHAPE)
    with pytest.raises(FedloomError, match=r"x\.flatten"):
        Ordered().check(Fixed(SHAPE, 5), SHAPE, 0.5)
    with pytest.raises(FedloomError, match="no hidden channels"):
        Channels.of(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), SHAPE)


class Tied(nn.Module):
    """A layer that is used twice, a weight that two layers share, and one that no layer owns."""

    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 6, 3, padding=1)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.same = nn.Conv2d(6, 6, 3, padding=1)
        self.same.weight = self.twice.weight
        self.shift = nn.Parameter(torch.zeros(1, 6, 1, 1))
        self.product = nn.Parameter(torch.randn(6, 10))
        self.out = nn.Linear(10, classes)

    def forward(self, x):
        x = F.relu(self.stem(x)) + self.shift
        x = F.relu(self.twice(F.relu(self.twice(x))))
        return self.out(input=F.relu(self.same(x).mean((2, 3)) @ self.product))


def test_shared_layers_shared_weights_and_loose_parameters_are_cut():
    module = Tied(SHAPE, 5)
    channels = Channels.of(module, SHAPE)
    assert [(g.name, g.size) for g in channels.groups] == [("stem", 6), ("product", 10)]
    small = channels.build((3, 5))
    assert small.same.weight is small.twice.weight
    assert small.shift.shape == (1, 3, 1, 1)
    assert small.product.shape == (3, 5)
    assert small(torch.zeros(2, *SHAPE)).shape == (2, 5)
    with pytest.raises(FedloomError, match="scaler=false"):
        channels.build((3, 5), scale=2.0)
    x = torch.randn(4, *SHAPE)
    last = F.relu(module.same(F.relu(module.twice(F.relu(module.twice(
        F.relu(module.stem(x)) + module.shift))))).mean((2, 3)) @ module.product)  # fmt: skip
    found = activations(module, channels, x)[1]
    np.testing.assert_allclose(found, last.mean(0).detach(), rtol=1e-4)


class Viewed(nn.Module):
    """It flattens by `view`, which torch refuses where channels lie last."""

    def __init__(self, shape, classes):
        super().__init__()
        self.stem, self.out = nn.Conv2d(shape[0], 4, 1), nn.Linear(4 * 64, classes)

    def forward(self, x):
        return self.out(F.relu(self.stem(x)).view(len(x), -1))


@pytest.mark.parametrize("colours", [1, 3])
def test_scores_of_a_model_that_flattens_by_view(colours):
    module, x = Viewed((colours, 8, 8), 5), torch.randn(7, colours, 8, 8)
    channels = Channels.of(module, (colours, 8, 8))
    wanted = F.relu(module.stem(x)).mean((0, 2, 3)).detach()
    np.testing.assert_allclose(activations(module, channels, x)[0], wanted, rtol=1e-4)
    batch = Batch(x, torch.arange(7) % 5)
    h = F.relu(module.stem(x)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(module.out(h.flatten(1)), batch.y), h)
    found = gradients(module, channels, batch)[0]
    np.testing.assert_allclose(found, grad.sum(0).abs().sum((1, 2)), rtol=1e-4)


class Twice(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem, self.mid = nn.Conv2d(shape[0], 4, 1), nn.Conv2d(4, 4, 1)
        self.out = nn.Linear(4, classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.mid(F.relu(self.mid(x))))
        return self.out(input=x.mean((2, 3)))


def test_a_layer_that_is_used_twice_reads_twice():
    module, x = Twice(SHAPE, 5), torch.randn(7, *SHAPE)
    (found,) = activations(module, Channels.of(module, SHAPE), x)
    one = F.relu(module.stem(x))
    two = F.relu(module.mid(one))
    three = F.relu(module.mid(two))
    mean = torch.stack([h.mean((0, 2, 3)) for h in (one, two, three)]).mean(0)
    np.testing.assert_allclose(found, mean.detach(), rtol=1e-4)


def test_a_model_that_can_not_be_cut_is_refused_before_any_work(quick):
    with pytest.raises(FedloomError, match="can't be cut"):
        quick("heterofl", model=Mixed, capacities="0.5", data="synthetic")


def test_rounding_is_up_or_down_and_keeps_one():
    channels = Channels.of(a_model("conv4", channels=[5, 10, 7, 3]), SHAPE)
    assert channels.counts(0.5) == (3, 5, 4, 2)
    assert channels.counts(0.5, "floor") == (2, 5, 3, 1)
    assert channels.counts(0.01, "floor") == (1, 1, 1, 1)
    assert channels.counts(0.2) == (1, 2, 2, 1)  # 0.2 · 5 is 1, not 1.0000000000000002
    assert channels.counts(0.99) == (4, 9, 6, 2)  # below 1, every layer gives one up
    assert channels.counts(1.0) == (5, 10, 7, 3)
    assert Channels.of(a_model("mlp", hidden=[2]), SHAPE).counts(0.99) == (1,)


# -- selectors ------------------------------------------------------------------------------------


def kept(select, module, capacity, **more):
    ask = ask_for(module, capacity, **more)
    return ask.channels.kept(ask.layout, select.choose(ask).index)


def test_ordered_rolling_and_random_choices():
    module = a_model("mlp")
    assert [k.tolist() for k in kept(Ordered(), module, 0.25)] == [[0, 1, 2], [0, 1]]
    assert [k.tolist() for k in kept(Rolling(), module, 0.25, t=1)] == [[0, 1, 2], [0, 1]]
    assert [k.tolist() for k in kept(Rolling(), module, 0.25, t=12)] == [[0, 1, 11], [3, 4]]
    one, two = (kept(Random(), module, 0.25, t=3, client=c) for c in (0, 1))
    again = kept(Random(), module, 0.25, t=3, client=0)
    assert [k.tolist() for k in one] == [k.tolist() for k in again]
    assert any(a.tolist() != b.tolist() for a, b in zip(one, two, strict=True))


def test_fedrolex_covers_every_channel_equally_over_a_cycle():
    module = a_model("mlp", hidden=[12, 6])
    seen = [np.zeros(12), np.zeros(6)]
    for t in range(1, 13):  # a multiple of both sizes
        for count, chosen in zip(seen, kept(Rolling(), module, 0.25, t=t), strict=True):
            count[chosen] += 1
    assert (seen[0] == 3).all()
    assert (seen[1] == 4).all()


def test_activations_are_means_over_samples_and_positions_before_pooling():
    """What S2 calls the activation of a layer: LeNet takes the maximum first, for speed."""
    module = a_model("lenet").eval()
    channels = Channels.of(module, SHAPE)
    x = torch.randn(300, *SHAPE)
    found = activations(module, channels, x)
    first = F.relu(module.conv1(x))
    second = F.relu(module.conv2(F.max_pool2d(first, 2)))
    np.testing.assert_allclose(found[0], first.mean((0, 2, 3)).detach(), rtol=1e-4)
    np.testing.assert_allclose(found[1], second.mean((0, 2, 3)).detach(), rtol=1e-4)
    hidden = F.relu(module.fc1(F.max_pool2d(second, 2).flatten(1)))
    np.testing.assert_allclose(found[2], hidden.mean(0).detach(), rtol=1e-4)


class Pools(nn.Module):
    """A pooling and a non-linearity, in either order, by functions, layers or in place."""

    def __init__(self, way):
        super().__init__()
        self.way, self.conv, self.out = way, nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.conv(x)
        if self.way == "before":
            x = F.relu(F.max_pool2d(x, 2))
        elif self.way == "layers":
            x = self.relu(self.pool(x))
        elif self.way == "after":
            x = F.max_pool2d(F.relu(x), 2)
        else:  # something else reads the pooled map, too
            x = F.max_pool2d(x, 2)
            x = F.relu(x) + x
        return self.out(x.mean((2, 3)))


def test_where_a_model_pools_makes_no_difference_to_scores():
    x, y = torch.randn(8, *SHAPE), torch.randint(0, 5, (8,))
    torch.manual_seed(0)
    modules = {way: Pools(way) for way in ("after", "before", "layers", "both")}
    found = {}
    for way, module in modules.items():
        module.load_state_dict(modules["after"].state_dict())
        channels = Channels.of(module, SHAPE)
        found[way] = (
            activations(module, channels, x)[0],
            gradients(module, channels, Batch(x, y))[0],
        )
    h = F.relu(modules["after"].conv(x))
    np.testing.assert_allclose(found["after"][0], h.mean((0, 2, 3)).detach(), rtol=1e-4)
    for way in ("before", "layers"):
        for mine, other in zip(found[way], found["after"], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4)
    pooled = F.relu(F.max_pool2d(modules["both"].conv(x), 2))
    np.testing.assert_allclose(found["both"][0], pooled.mean((0, 2, 3)).detach(), rtol=1e-4)


def test_a_forward_that_goes_another_way_with_other_samples_is_refused():
    class Forks(Straight):
        def forward(self, x):
            x = F.relu(self.first(x.flatten(1) * 1 if x.abs().sum() else x.flatten(1)))
            return self.out(x)

    module = Forks(SHAPE, 5)
    with pytest.raises(FedloomError, match="a different path through forward"):
        activations(module, Channels.of(module, SHAPE), torch.randn(4, *SHAPE))


class Straight(nn.Module):
    """No non-linearity: activations may be below 0."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(shape[0] * shape[1] * shape[2], 4)
        self.out = nn.Linear(4, classes)

    def forward(self, x):
        return self.out(self.first(x.flatten(1)))


def test_without_a_relu_the_largest_activations_count_on_either_side_of_zero():
    module = Straight(SHAPE, 5)
    with torch.no_grad():
        module.first.weight.zero_()
        module.first.bias.copy_(torch.tensor([-5.0, 1.0, 3.0, 0.5]))
    assert kept(ByActivation(), module, 0.5, x=torch.rand(4, *SHAPE))[0].tolist() == [0, 2]


def test_gaps_are_those_of_real_gradients_and_updates(quick):
    """One client at half the width, one step of the whole batch: the update is the gradient times
    the rate, and both can be had from the model that the run began with."""
    settings = {"capacities": "0.5", "clients": 1, "participation": 1.0, "rounds": 1, "lr": 0.1,
                "batch": "inf", "test_share": 0.0, "partition": "iid"}  # fmt: skip
    result = quick("heterofl", measure_gap=True, scaler=True, **settings)
    module = build("mlp", (1, 8, 8), 10, options={"hidden": [16]})
    data = fedloom.data.catalog.load("digits")
    x, y = torch.as_tensor(result.normalise(data.x)), torch.as_tensor(data.y)
    F.cross_entropy(module(x), y).backward()
    whole = [p.grad.clone() for p in module.parameters()]
    w1, b1, w2, b2 = (p.detach() for p in module.parameters())
    part = [t.clone().requires_grad_() for t in (w1[:8], b1[:8], w2[:, :8], b2)]
    hidden = F.relu(2 * F.linear(x.flatten(1), part[0], part[1]))  # the scaler
    F.cross_entropy(F.linear(hidden, part[2], part[3]), y).backward()
    whole[0][:8] -= part[0].grad
    whole[1][:8] -= part[1].grad
    whole[2][:, :8] -= part[2].grad
    whole[3] -= part[3].grad
    gap = float(torch.cat([g.flatten() for g in whole]).norm())
    record = result.records[0]
    assert record["gradient_gap"] == pytest.approx(gap, rel=1e-4)
    assert record["update_gap"] == pytest.approx(0.1 * gap, rel=1e-4)
    assert "gradient_gap" not in quick("heterofl", **settings).records[0]


@pytest.mark.parametrize("method", ["fjord", "heterofl+fedmeta-maml"])
def test_gaps_of_rules_with_narrower_nets_or_inner_steps_are_measured(quick, row, method):
    settings = {"capacities": "0.5", "clients": 2, "participation": 1.0, "rounds": 1,
                "partition": "iid", "engine": "serial"}  # fmt: skip
    plain, watched = (quick(method, measure_gap=m, **settings) for m in (False, True))
    assert torch.equal(row(plain), row(watched))
    assert all(watched.records[0][gap] > 0 for gap in ("gradient_gap", "update_gap"))


def test_the_gap_of_maml_without_inner_steps_is_that_of_its_query_part(quick):
    """With alpha = 0 the objective is the loss on the query part, so a step of all of it moves by
    the gradient times the rate."""
    result = quick("heterofl+fedmeta-maml", measure_gap=True, alpha=0.0, capacities="0.5",
                   clients=1, participation=1.0, rounds=1, lr=0.1, batch="inf",
                   partition="iid")  # fmt: skip
    record = result.records[0]
    assert record["update_gap"] == pytest.approx(0.1 * record["gradient_gap"], rel=1e-4)


def test_measuring_gaps_changes_nothing_else(quick, row):
    settings = {"capacities": "1:0.5,0.5:0.5", "participation": 1.0, "clients": 4, "rounds": 2,
                "mask": "inf", "model": "conv4", "momentum": 0.9,
                "model_options": {"channels": [4, 4, 8, 8], "norm": "static"}}  # fmt: skip
    plain, watched = (quick("fedrolex", measure_gap=m, **settings) for m in (False, True))
    assert torch.equal(row(plain), row(watched))
    pool = quick("fedrolex", measure_gap=True, **{**settings, "engine": "processes", "workers": 2})
    stacked = quick("fedrolex", measure_gap=True, **{**settings, "engine": "stacked"})
    for name in ("gradient_gap", "update_gap"):
        mine = [r[name] for r in watched.records]
        assert mine == [r[name] for r in pool.records]
        assert mine == pytest.approx([r[name] for r in stacked.records], rel=1e-3)


def test_without_temperature_the_most_active_channels_are_taken():
    module = a_model("mlp")
    x = torch.rand(20, *SHAPE)
    h = activations(module, Channels.of(module, SHAPE), x)
    chosen = kept(ByActivation(), module, 0.5, x=x)
    for scores, mine in zip(h, chosen, strict=True):
        assert set(mine) == set(np.argsort(-np.abs(scores))[: len(mine)])


def test_a_high_temperature_is_uniform_and_a_low_one_takes_the_largest():
    scores, rng = np.array([3.0, 2.0, 1.0, 0.0]), np.random.default_rng(0)
    draws = [draw(scores / 1e9, 2, rng) for _ in range(4000)]
    counts = np.bincount(np.concatenate(draws), minlength=4)
    assert np.abs(counts / 8000 - 0.25).max() < 0.02
    assert {tuple(sorted(draw(scores / 1e-3, 2, rng))) for _ in range(100)} == {(0, 1)}
    first = np.bincount([draw(scores, 1, rng)[0] for _ in range(20000)], minlength=4) / 20000
    np.testing.assert_allclose(first, np.exp(scores) / np.exp(scores).sum(), atol=0.015)


def test_a_temperature_divides_activations():
    """h = (-5, 1, 3, 0.5): at T = 0.01 the two largest for certain, at T = 1000 any two."""
    module = Straight(SHAPE, 5)
    with torch.no_grad():
        module.first.weight.zero_()
        module.first.bias.copy_(torch.tensor([-5.0, 1.0, 3.0, 0.5]))
    x = torch.rand(4, *SHAPE)
    cold = {tuple(kept(ByActivation(temperature=0.01), module, 0.5, x=x, t=t)[0]) for t in range(9)}
    warm = {tuple(kept(ByActivation(temperature=1e3), module, 0.5, x=x, t=t)[0]) for t in range(60)}
    assert cold == {(1, 2)}
    assert len(warm) == 6


def test_gradients_of_channels_by_hand():
    """Σ over positions of |Σ over samples|: signs cancel over samples, not over positions."""
    module = a_model("lenet").eval()
    channels = Channels.of(module, SHAPE)
    x, y = torch.randn(9, *SHAPE), torch.randint(0, 5, (9,))
    found = gradients(module, channels, Batch(x, y))
    h = F.relu(module.conv1(x)).detach().requires_grad_()
    z = F.relu(F.max_pool2d(module.conv2(F.max_pool2d(h, 2)), 2))
    z = F.relu(module.fc2(F.relu(module.fc1(z.flatten(1)))))
    F.cross_entropy(module.out(z), y).backward()
    np.testing.assert_allclose(found[0], h.grad.sum(0).abs().sum((1, 2)), rtol=1e-4)


def test_gradients_of_more_samples_than_fit_at_once():
    """Samples 0 to 255 and the rest pull in opposite directions: signs cancel over all of them."""
    module = Straight(SHAPE, 2)
    with torch.no_grad():
        module.first.weight.zero_()
        module.first.bias.zero_()
        module.out.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]]))
        module.out.bias.zero_()
    y = (torch.arange(300) >= 256).long()  # p = ½: −½ for 256 of them, +½ for 44
    (found,) = gradients(module, Channels.of(module, SHAPE), Batch(torch.rand(300, *SHAPE), y))
    np.testing.assert_allclose(found, np.array([1, 2, 3, 4]) * (256 - 44) / 2 / 300, rtol=1e-5)


def test_public_samples_beyond_the_first_256_are_labelled_too():
    module = a_model("mlp")
    x = torch.randn(300, *SHAPE)
    ask = ask_for(module, 0.5, public=PublicSet(x, None, "test"))
    labelled = ByGradient(labels="csl", samples=300).similar(ask, ask.channels)
    assert len(labelled.y) == 300
    assert torch.equal(labelled.y, module(labelled.x).argmax(1))


def test_similar_samples_are_those_that_the_last_sub_model_gets_right():
    module = a_model("mlp")
    x, y = torch.randn(60, *SHAPE), torch.randint(0, 5, (60,))
    ask = ask_for(module, 0.5, public=PublicSet(x, y, "test"))
    spl, csl = ByGradient(labels="spl", samples=8), ByGradient(labels="csl", samples=8)
    right = module(x).argmax(1) == y
    taken = spl.similar(ask, ask.channels)
    assert len(taken.y) == min(8, int(right.sum()))
    assert (module(taken.x).argmax(1) == taken.y).all()  # no model yet: the global one stands in
    labelled = csl.similar(ask, ask.channels)
    assert torch.equal(labelled.y, module(labelled.x).argmax(1))
    chosen = Ordered().choose(ask)
    other = torch.randn(len(chosen.index))
    last = Last(other, chosen.index)
    small = chosen.build()
    Layout.of(small).load(small, other)
    again = csl.similar(
        ask_for(module, 0.5, public=PublicSet(x, y, "test"), last=last), ask.channels
    )
    assert torch.equal(again.y, small.eval()(again.x).argmax(1))


def test_the_last_sub_model_is_asked_with_its_scaler():
    """Without norms, an unscaled sub-model answers otherwise than the one that was trained."""
    torch.manual_seed(3)
    module = a_model("mlp")
    x = torch.randn(200, *SHAPE)
    scaled, plain = (ByGradient(scaler=s, labels="csl", samples=None) for s in (True, False))
    chosen = Ordered().choose(ask_for(module, 0.25))
    row = 0.1 * torch.randn(len(chosen.index))
    row[-5:] = torch.linspace(-0.1, 0.1, 5)  # what the classifier adds is not scaled
    last = Last(row, chosen.index)
    ask = ask_for(module, 0.25, public=PublicSet(x, None, "test"), last=last)
    small = ask.channels.build(ask.channels.counts(0.25), 4.0)
    Layout.of(small).load(small, ask.last.row)
    labelled = scaled.similar(ask, ask.channels)
    assert len(labelled.y) == 200  # all that there are
    assert torch.equal(labelled.y, small.train()(labelled.x).argmax(1))  # as in training
    assert not torch.equal(labelled.y, plain.similar(ask, ask.channels).y)


def test_static_norms_are_measured_before_a_selector_looks():
    module = a_model("conv4", norm="static")
    x = torch.randn(64, *SHAPE)
    found = settle(module, [x])(x)
    torch.testing.assert_close(found, module.train()(x), atol=0.1, rtol=0.1)  # n, not n − 1
    assert not torch.allclose(found, a_model("conv4", norm="static").eval()(x), atol=0.1, rtol=0.1)


# -- rules ----------------------------------------------------------------------------------------


class Logits:
    """A net that gives logits made by hand."""

    def __init__(self, wide, narrow=None):
        self.wide, self.thin, self.narrower = wide, narrow, narrow is not None

    def __call__(self, params, x):
        return self.wide

    def narrow(self, params, x):
        return self.thin


def test_masked_cross_entropy_on_hand_made_logits():
    logits, y = torch.log(torch.tensor([[1.0, 2.0, 5.0]])), torch.tensor([1])
    held = torch.tensor([True, True, False])
    data = {"train": Batch(torch.zeros(1), y, held=held)}

    def loss(mask):
        return float(MaskedSGD(mask).objective(Logits(logits), {}, data, None))

    assert loss("none") == pytest.approx(-np.log(2 / 8))
    assert loss("inf") == pytest.approx(-np.log(2 / 3))
    assert loss("zero") == pytest.approx(-np.log(2 / 4))  # e⁰ = 1 for the class that is not held


def test_fjords_loss_on_hand_made_logits():
    wide, narrow = torch.log(torch.tensor([[3.0, 1.0]])), torch.log(torch.tensor([[1.0, 1.0]]))
    data = {"train": Batch(torch.zeros(1), torch.tensor([0]))}
    rule = OrderedDropout(distil=0.25)
    alone = float(rule.objective(Logits(wide), {}, data, None))
    assert alone == pytest.approx(-np.log(0.75))
    kl = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    expected = -np.log(0.75) + 0.75 * -np.log(0.5) + 0.25 * kl
    assert float(rule.objective(Logits(wide, narrow), {}, data, None)) == pytest.approx(expected)


def test_the_widest_net_is_taught_by_labels_only():
    wide, narrow = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    batch = Batch(torch.zeros(4), torch.tensor([0, 1, 2, 0]))
    OrderedDropout(distil=1.0).objective(
        Logits(wide, narrow), {}, {"train": batch}, None
    ).backward()
    (alone,) = torch.autograd.grad(F.cross_entropy(wide, batch.y), wide)
    assert torch.allclose(wide.grad, alone)
    # The narrow one from the widest, whose mean over the batch it moves towards.
    assert torch.allclose(narrow.grad, (narrow.softmax(1) - wide.softmax(1)).detach() / 4)


def test_distillation_at_a_temperature_is_scaled_by_its_square():
    """Logits halved: odds of 9 : 1 become 3 : 1, of 4 : 1 become 2 : 1."""
    wide, narrow = torch.log(torch.tensor([[9.0, 1.0]])), torch.log(torch.tensor([[4.0, 1.0]]))
    data = {"train": Batch(torch.zeros(1), torch.tensor([0]))}
    kl = 3 / 4 * np.log(3 / 4 * 3 / 2) + 1 / 4 * np.log(1 / 4 * 3)
    rule = OrderedDropout(distil=1.0, temperature=2.0)
    loss = float(rule.objective(Logits(wide, narrow), {}, data, None))
    assert loss == pytest.approx(-np.log(0.9) + 4 * kl, rel=1e-4)
    counted = Batch(torch.zeros(1), torch.tensor([0]), weight=torch.ones(1))
    assert float(divergence(wide, narrow, counted, 2.0)) == pytest.approx(4 * kl, rel=1e-4)


def test_fjord_draws_widths_up_to_its_own():
    rng = np.random.default_rng(0)
    drawn = OrderedDropout().widths(500, 0.5, rng)
    assert set(drawn) == {0.2, 0.4, 0.5}
    assert set(OrderedDropout().widths(5, 0.1, rng)) == {0.1}


def test_fjord_draws_all_widths_alike():
    drawn = OrderedDropout().widths(6000, 0.5, np.random.default_rng(1))
    shares = [drawn.count(p) / 6000 for p in (0.2, 0.4, 0.5)]
    np.testing.assert_allclose(shares, 1 / 3, atol=0.02)
    whole = OrderedDropout().widths(5000, 1.0, np.random.default_rng(2))
    shares = [whole.count(p) / 5000 for p in (0.2, 0.4, 0.6, 0.8, 1.0)]
    np.testing.assert_allclose(shares, 1 / 5, atol=0.02)


def test_fjord_with_all_defaults_draws_widths_at_full_capacity(quick, row):
    result = quick("fjord", rounds=1)
    plain = quick("fedavg", rounds=1)
    assert result.summary["macs"] > plain.summary["macs"]
    assert not torch.equal(row(result), row(plain))
    assert result.devices.empty  # nobody is weak


def test_depthfls_loss_on_hand_made_logits():
    exits = torch.log(torch.tensor([[[3.0, 1.0]], [[1.0, 1.0]], [[1.0, 3.0]]]))
    data = {"train": Batch(torch.zeros(1), torch.tensor([0]))}
    p = np.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    ce = -np.log(p[:, 0]).sum()
    kl = sum((p[j] * np.log(p[j] / p[i])).sum() for i in range(3) for j in range(3) if i != j)
    rule = SelfDistillation(weight=2.0, ramp=300)
    for t, share in ((30, 0.1), (300, 1.0), (800, 1.0)):
        loss = float(rule.at(t).objective(Logits(exits), {}, data, None))
        assert loss == pytest.approx(ce + 2 * share / 2 * kl, rel=1e-5)
    one = rule.at(300).objective(Logits(exits[:1]), {}, data, None)
    assert float(one) == pytest.approx(-np.log(0.75))


def test_exits_teach_without_learning_from_their_pupils():
    """∂L/∂z_i = (p_i − y) + w/(n − 1) · Σ_j (p_i − p_j), and nothing as a target."""
    p = torch.tensor([[[0.75, 0.25]], [[0.5, 0.5]], [[0.1, 0.9]]])
    exits = p.log().requires_grad_()
    data = {"train": Batch(torch.zeros(1), torch.tensor([0]))}
    SelfDistillation(weight=3.0, ramp=0).at(1).objective(Logits(exits), {}, data, None).backward()
    pulls = 3 * p - p.sum(0)
    expected = p - torch.tensor([1.0, 0.0]) + 3.0 / 2 * pulls
    torch.testing.assert_close(exits.grad, expected)


def test_distillation_under_a_mask_has_finite_gradients():
    logits = torch.randn(4, 3, requires_grad=True)
    held = torch.tensor([True, False, True])
    masked = torch.where(held, logits, -torch.inf)
    batch = Batch(torch.zeros(4), torch.tensor([0, 2, 0, 2]))
    divergence(torch.where(held, torch.randn(4, 3), -torch.inf), masked, batch).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 1] == 0).all()


# -- prefixes of blocks ---------------------------------------------------------------------------


def test_exits_answer_together_and_prefixes_are_models():
    module = a_model("conv4", exits=True)
    assert isinstance(module, Exits)
    x = torch.randn(4, *SHAPE)
    module.train()(x)  # moves the norms' statistics
    every = torch.stack([e(b) for e, b in zip(module.eval().exits, _walk(module, x), strict=True)])
    torch.testing.assert_close(module(x), every.mean(0))
    two = module.prefix(2)
    torch.testing.assert_close(two.eval()(x), every[:2].mean(0))
    assert module.train()(x).shape == (4, 4, 5)
    names = {n for n, _ in two.named_parameters()}
    assert names < {n for n, _ in module.named_parameters()}


def _walk(module, x):
    for block in module.blocks:
        x = block(x)
        yield x


def test_depth_goes_by_what_a_client_can_pay():
    module = build("conv4", (1, 28, 28), 10, options={"exits": True})
    sizes = [sum(p.numel() for p in module.prefix(d).parameters()) for d in range(1, 5)]
    assert [Prefix().depth(module, r) for r in (1, 0.7, 0.6, 0.125)] == [4, 3, 2, 1]
    assert sizes[2] <= 0.7**2 * sizes[3] < sizes[3]
    assert [Prefix("blocks").depth(module, r) for r in (1, 0.5, 0.3, 0.25, 0.1)] == [4, 2, 2, 1, 1]


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("capacities", ["low-quality", "0.5", "0.5:0.5,0.1:0.5"])
def test_somebody_trains_the_last_block_in_every_population(quick, capacities):
    options = {"channels": [4, 4, 4, 16]}
    result = quick("depthfl", model="conv4", capacities=capacities, rounds=1, participation=1.0,
                   model_options=options, clients=5)  # fmt: skip
    start = build("conv4", (1, 8, 8), 10, options={**options, "exits": True})
    before, after = start.blocks[3].conv.weight, result.model().blocks[3].conv.weight
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "macs"),
    [("resnet18", 100, 4.48, 378.7), ("resnet34", 200, 8.54, 745.37)],
)
def test_a_quarter_at_each_depth_costs_what_s2_says(name, classes, parameters, macs):
    """S2's table 4.2, of 32×32 pixels, within 4 %: published heads have gates beside."""
    shape = (3, 32, 32)
    whole = build(name, shape, classes, options={"exits": True})
    prefixes = [whole.prefix(d) for d in (1, 2, 3, 4)]
    mean = np.mean([sum(p.numel() for p in m.parameters()) for m in prefixes])
    assert mean / 1e6 == pytest.approx(parameters, rel=0.04)
    spent = np.mean([forward_macs(m, shape) for m in prefixes])
    assert spent / 1e6 == pytest.approx(macs, rel=0.04)


def test_exits_bring_a_map_to_the_last_ones_width_and_resolution():
    module = build("conv4", (1, 32, 32), 10, options={"exits": True, "norm": "static"}).eval()
    x, seen = torch.randn(2, 1, 32, 32), []
    for block, leave in zip(module.blocks, module.exits, strict=True):
        x = block(x)
        seen.append(tuple(leave.down(x).shape))
    assert seen == [(2, 512, 2, 2)] * 4
    steps = [len(leave.down) for leave in module.exits]
    assert steps == [3, 2, 1, 0]
    assert all(type(m).__name__ != "BatchNorm2d" for m in module.modules())  # static, as the rest


def test_what_a_pass_keeps_is_less_for_fewer_blocks():
    module = a_model("conv4", exits=True)
    resident = Resident(module, Layout.of(module), torch.device("cpu"))
    kept = [saved_bytes(resident.module.prefix(d), SHAPE) for d in (1, 2, 3, 4)]
    assert all(more > less for less, more in pairwise(kept))


def test_what_a_pass_keeps_by_hand():
    """Linear 4-3-2 with a ReLU between, of one sample: 4 inputs, 3 that the ReLU gave (kept once,
    for itself and the layer that reads it)."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert saved_bytes(module, (1, 2, 2)) == (4 + 3) * 4


def test_depthfl_without_distillation_at_full_capacity_sums_the_exits(quick):
    """One client, one step on all its images: plain SGD on the sum of the exits' losses."""
    images = np.random.default_rng(0).normal(size=(30, 1, 8, 8)).astype(np.float32)
    labels = np.arange(30) % 10
    options = {"channels": [4, 4, 4, 4], "norm": "none"}
    result = quick("depthfl", data=from_arrays(images, labels, images, labels), model="conv4",
                   distil=0.0, rounds=1, clients=1, participation=1.0, steps=1, batch="inf", lr=0.1,
                   test_share=0.0, model_options=options)  # fmt: skip
    module = build("conv4", (1, 8, 8), 10, options={**options, "exits": True}).train()
    exits = module(result.normalise(images))
    assert exits.shape == (4, 30, 10)
    torch.stack([F.cross_entropy(e, torch.from_numpy(labels)) for e in exits]).sum().backward()
    for (name, start), trained in zip(
        module.named_parameters(), result.model().parameters(), strict=True
    ):
        torch.testing.assert_close(trained, start - 0.1 * start.grad, msg=name)


# -- mixing ---------------------------------------------------------------------------------------


def gathering(rows, weights, indexes, old, **more):
    layout = Layout.of(nn.Linear(2, 2))
    return Gathering(
        round=1, layout=layout, contacts=None, shared=old, clients=np.arange(len(rows)),
        weights=np.array(weights, float), rows=rows, lr=0.1, stream=None, indexes=indexes, **more,
    )  # fmt: skip


def test_coverage_by_hand():
    """Three clients on six columns: n = 1, 3 and 4; column 5 is trained by nobody."""
    old = torch.arange(6.0)
    rows = torch.stack([torch.full((6,), 10.0), torch.full((6,), 20.0), torch.full((6,), 40.0)])
    indexes = (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.tensor([2, 4]))
    g = gathering(rows, [1, 3, 4], indexes, old)
    by_samples = Coverage().combine(g).shared
    assert by_samples.tolist() == [10, 17.5, (10 + 60 + 160) / 8, 20, 40, 5]
    equal = Coverage(weigh="equal").combine(g).shared
    assert equal.tolist() == [10, 15, pytest.approx(70 / 3), 20, 40, 5]
    voted = Coverage(weigh="equal", old_votes=True).combine(g).shared
    assert voted.tolist() == [5, pytest.approx(31 / 3), 18, 11.5, 22, 5]


def test_classifier_rows_count_only_from_those_who_hold_the_class():
    old = torch.zeros(6)
    rows = torch.stack([torch.full((6,), 10.0), torch.full((6,), 20.0)])
    class_of = torch.tensor([0, 0, 1, 1, -1, -1])
    holds = np.array([[True, False], [True, False]])
    g = gathering(
        rows, [1, 1], (None, torch.tensor([0, 2, 4])), old, facts={"classes": (holds, class_of)}
    )
    assert Coverage(by_class=True).combine(g).shared.tolist() == [15, 10, 0, 0, 15, 10]


def test_all_classifiers_of_a_model_with_exits_are_counted_by_class(quick):
    """Nobody holds class 9, so its rows stay as they were, in every exit."""
    images = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32)
    labels = np.arange(60) % 9
    data = from_arrays(images, labels, images[:20], np.append(labels[:19], 9))
    options = {"channels": [4, 4, 4, 4]}
    result = quick("depthfl", data=data, model="conv4", by_class=True, mask="inf", rounds=1,
                   clients=3, partition="iid", model_options=options)  # fmt: skip
    start = build("conv4", (1, 8, 8), 10, options={**options, "exits": True})
    for before, after in zip(start.exits, result.model().exits, strict=True):
        assert torch.equal(before.out.weight[9], after.out.weight[9])
        assert not torch.equal(before.out.weight[0], after.out.weight[0])


def test_an_element_trained_by_nobody_keeps_its_value(quick, row):
    result = quick("heterofl", capacities="0.25", rounds=2)
    start = fedloom.models.build("mlp", (1, 8, 8), 10, options={"hidden": [16]})
    before, after = start.hidden[0].weight, result.model().hidden[0].weight
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])


def test_what_a_node_does_not_train_stays_as_it_was(quick):
    """Without a server too: neither set to 0 nor averaged."""
    result = quick("heterofl", topology="ring", capacities="0.25", rounds=2, clients=4,
                   participation=1.0)  # fmt: skip
    start = fedloom.models.build("mlp", (1, 8, 8), 10, options={"hidden": [16]})
    for node in range(4):
        before, after = start.hidden[0].weight, result.model(client=node).hidden[0].weight
        assert torch.equal(before[4:], after[4:])
        assert not torch.equal(before[:4], after[:4])


def test_nodes_average_what_some_trained_and_keep_what_nobody_did():
    """Two nodes that meet, n = 1 and 3: column 0 of both, 1 of the first only, 2 of nobody."""
    rows = torch.tensor([[10.0, 10.0, 5.0], [20.0, 7.0, 6.0]])
    meet = Contacts(np.arange(2), np.array([[0, 1]]))
    g = Gathering(
        round=1, layout=Layout.of(nn.Linear(2, 1)), contacts=meet, shared=torch.zeros(3),
        clients=np.arange(2), weights=np.array([1.0, 3.0]), rows=rows, lr=0.1, stream=None,
        indexes=(torch.tensor([0, 1]), torch.tensor([0])), memory={"mail": {}},
    )  # fmt: skip
    assert PeerAverage().combine(g).rows.tolist() == [[17.5, 10.0, 5.0], [17.5, 10.0, 6.0]]


# -- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WIDTH_METHODS, "fjord"])
def test_at_capacity_one_every_width_method_is_fedavg_to_the_bit(quick, row, name):
    settings = {"engine": "serial", "rounds": 3, "public": "share:0.05"}
    more = {"levels": [1.0]} if name == "fjord" else {}
    plain = quick("fedavg", **settings)
    assert torch.equal(row(quick(name, **settings, **more)), row(plain))


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("name", [*WIDTH_METHODS, "fjord", "depthfl"])
def test_all_engines_give_the_same(quick, row, name):
    """Few steps: over many, a rounding on the other side of a ReLU grows a thousandfold."""
    settings = {"rounds": 3, "steps": 2, "capacities": "1,0.5,0.25", "mask": "inf",
                "participation": 0.5, "model": "conv4", "clients": 8, "momentum": 0.9,
                "by_class": True,
                "model_options": {"channels": [4, 4, 8, 8], "norm": "static"}}  # fmt: skip
    if name.startswith("fedgse"):
        settings["public"] = "share:0.1"
    if name == "depthfl":  # its heads norm single pixels, which roundings are large for
        settings["model_options"] = {"channels": [4, 4, 8, 8], "norm": "none"}
    serial = quick(name, engine="serial", **settings)
    pool = quick(name, engine="processes", workers=2, **settings)
    assert torch.equal(row(serial), row(pool))
    stacked = quick(name, engine="stacked", workers=1, **settings)
    torch.testing.assert_close(row(stacked), row(serial), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("name", [*WIDTH_METHODS, "fjord", "depthfl"])
def test_a_resumed_run_is_the_uninterrupted_one(quick, row, name, tmp_path):
    settings = {"capacities": "1,0.5,0.25", "clients": 6}
    if name.startswith("fedgse"):
        settings["public"] = "share:0.1"
    whole = quick(name, rounds=4, **settings)
    quick(name, rounds=2, out=tmp_path / "run", **settings)
    resumed = quick(name, rounds=4, out=tmp_path / "run", resume=True, **settings)
    assert torch.equal(row(resumed), row(whole))


def test_devices_pay_for_what_they_train(quick):
    result = quick("feddse", capacities="1,0.5,0.25", clients=6, participation=1.0, rounds=2)
    table = result.devices
    assert table.index.tolist() == [1.0, 0.5, 0.25]
    assert table["took_part"].sum() == 12
    assert table["parameters"].is_monotonic_decreasing
    assert table["bytes_down"].nunique() == 1  # the whole model, to choose from
    assert table["bytes_up"].is_monotonic_decreasing
    dropped = quick("federated-dropout", capacities="1,0.5,0.25", clients=6, participation=1.0,
                    rounds=2).devices  # fmt: skip
    assert (dropped["bytes_down"] == dropped["bytes_up"]).all()
    assert dropped["memory"].is_monotonic_decreasing
    for cost in ("macs", "memory"):  # a look at the whole model is not free
        assert dropped[cost].iloc[-1] < table[cost].iloc[-1]


#: of one sample and 64-16-10, 64-8-10: a pass, and training (both products again for the weights,
#: the second for its input)
PASS, HALF_PASS = 64 * 16 + 16 * 10, 64 * 8 + 8 * 10
TRAIN, HALF_TRAIN = 2 * PASS + 16 * 10, 2 * HALF_PASS + 8 * 10


def one_round(quick, method, **more):
    """Everyone at half the width, all images once: the record, and how many images there are."""
    settings = {"capacities": "0.5", "clients": 3, "participation": 1.0, "rounds": 1, "batch": 16}
    result = quick(method, **{**settings, **more})
    return result.records[0], int(result.clients["train_samples"].sum())


def test_training_and_inference_cost_what_they_multiply(quick):
    record, n = one_round(quick, "heterofl")
    assert record["macs"] == n * HALF_TRAIN
    record, n = one_round(quick, "feddse")
    assert record["macs"] == n * (HALF_TRAIN + PASS)  # the whole model looks at all images
    record, n = one_round(quick, "feddse", samples=20)
    assert record["macs"] == n * HALF_TRAIN + 3 * 20 * PASS
    record, n = one_round(quick, "heterofl", capacities="1")
    assert record["macs"] == n * TRAIN


@pytest.mark.parametrize("norms", ["shared", "own"])
@pytest.mark.parametrize("norm", ["none", "batch", "static"])
def test_measuring_norms_costs_another_pass(quick, norm, norms):
    """Over one's own data, or over one's share of the samples of all."""
    options = {"channels": [4, 4, 4, 4], "norm": norm}
    settings = {"model": "conv4", "model_options": options}
    plain, n = one_round(quick, "heterofl", **settings)
    chosen, _ = one_round(quick, "feddse", norms=norms, **settings)
    each = forward_macs(build("conv4", (1, 8, 8), 10, options=options), (1, 8, 8))
    measured = 0 if norm == "none" else n if norms == "own" else 3 * math.ceil(n / 3)
    assert chosen["macs"] - plain["macs"] == (n + measured) * each


def test_narrower_nets_cost_their_share_of_the_steps(quick):
    """16 images a step, all steps full: widths ½ and 1 are drawn."""
    settings = {"capacities": "1", "levels": [0.5], "steps": 6, "clients": 2}
    record, _ = one_round(quick, "fjord", **settings)
    drawn = [
        OrderedDropout(levels=(0.5,)).widths(6, 1.0, stream(0, "widths", 1, c)) for c in (0, 1)
    ]
    halves = sum(widths.count(0.5) for widths in drawn)
    assert 0 < halves < 12
    assert record["macs"] == 12 * 16 * TRAIN + halves * 16 * HALF_TRAIN


def test_memory_is_weights_gradients_momentum_and_what_a_batch_keeps(quick):
    """64-8-10: 610 weights; a sample's 64 inputs and 8 activations."""
    record, _ = one_round(quick, "heterofl")
    assert record["devices"]["0.5"]["memory"] == 4 * (2 * 610 + 16 * (64 + 8))
    record, _ = one_round(quick, "heterofl", momentum=0.9)
    assert record["devices"]["0.5"]["memory"] == 4 * (3 * 610 + 16 * (64 + 8))
    # The whole model to choose from, and 256 images at once between its first layers; or a step.
    record, _ = one_round(quick, "feddse")
    assert record["devices"]["0.5"]["memory"] == 4 * (1210 + 256 * (64 + 16))
    record, _ = one_round(quick, "feddse", samples=20)
    assert record["devices"]["0.5"]["memory"] == 4 * (1210 + 2 * 610 + 16 * (64 + 8))


def test_devices_are_scored_where_all_are_alike_too(quick):
    result = quick("heterofl", capacities="0.5", rounds=1)
    assert result.devices["micro"].tolist() == [result.summary["micro"]]


def test_costs_follow_the_square_of_the_capacity():
    whole, half = (blueprint("conv4", (1, 28, 28), 10, r) for r in (1.0, 0.5))
    assert whole.part.parameters == whole.whole.parameters == 1_556_874
    assert half.part.parameters == 391_370
    assert 0.24 < half.part.training / half.whole.training < 0.27
    assert sum(layer.parameters for layer in half.layers) == half.part.parameters
    assert sum(layer.macs for layer in half.layers) == half.part.forward


def test_the_scaler_multiplies_in_training_only():
    module = a_model("mlp", hidden=[8])
    channels = Channels.of(module, SHAPE)
    plain, scaled = channels.build((4,)), channels.build((4,), scale=4.0)
    row = torch.randn(Layout.of(plain).size)
    for net in (plain, scaled):
        Layout.of(net).load(net, row)
    x = torch.randn(3, *SHAPE)
    assert torch.equal(plain.eval()(x), scaled.eval()(x))
    hidden = F.relu(4 * plain.hidden[0](x.flatten(1)))
    torch.testing.assert_close(scaled.train()(x), plain.out(hidden))  # not the classifier


@pytest.mark.parametrize("name", [*WIDTH_METHODS, "fjord"])
def test_width_methods_scale_by_default_and_fjord_does_not(name):
    select = find(name)().build().select
    assert select.narrowed(Channels.of(a_model("mlp"), SHAPE), 0.25)[1] == (
        1 if name == "fjord" else 4
    )


def test_a_client_with_a_quarter_of_the_channels_scales_them_fourfold():
    module = a_model("mlp", hidden=[8])
    ask = ask_for(module, 0.25)
    small = Ordered(scaler=True).choose(ask).build()
    Layout.of(small).load(small, torch.randn(Layout.of(small).size))
    x = torch.randn(3, *SHAPE)
    hidden = F.relu(4 * small.hidden[0].train(False)(x.flatten(1)))
    torch.testing.assert_close(small.train()(x), small.out(hidden))
    assert Ordered(scaler=True).narrowed(ask.channels, 0.25) == ((2,), 4.0)
    assert Ordered().narrowed(ask.channels, 0.25) == ((2,), 1.0)


def test_a_public_set_that_is_too_small_is_told(quick):
    with pytest.warns(UserWarning, match="fewer than the 128"):
        quick("fedgse-csl", capacities="0.5", rounds=1)


def test_a_public_set_needs_a_server_to_hold_it(quick):
    for name in ("fedgse-spl", "fedgse-csl"):
        with pytest.raises(FedloomError, match=r"ByGradient needs a public set.*server"):
            quick(name, topology="ring", capacities="0.5", public="share:0.1")


def test_a_server_remembers_what_arrived_and_was_let_in(quick):
    """Not what clients trained, which they may send otherwise."""
    settings = {"capacities": "1,0.5,0.25", "clients": 6, "participation": 1.0, "rounds": 1,
                "public": "share:0.1", "samples": 32}  # fmt: skip
    honest = quick("fedgse-csl", **settings).store.checkpoint()[0]
    spoilt = quick("fedgse-csl", **settings, attack="scale:-2,share=0.5").store.checkpoint()[0]
    lost = quick("fedgse-csl", **settings, attack="nan,share=0.5", on_bad="skip")
    lost = lost.store.checkpoint()[0]
    bad = set(Attack.parse("nan,share=0.5").bad(6, 0).tolist())
    for client in range(6):
        key = f"memory/last/{client}/row"
        assert torch.equal(honest[key], spoilt[key]) == (client not in bad)
        assert (key in lost) == (client not in bad)
    encoded = quick("fedgse-csl", **settings, encode="int8").store.checkpoint()[0]
    assert not torch.equal(encoded["memory/last/0/row"], honest["memory/last/0/row"])


def test_a_server_does_not_look_at_private_parts(quick):
    for name in ("fedgse-spl", "fedgse-csl"):
        with pytest.raises(FedloomError, match=r"only 'not head' is sent.*feddse"):
            quick(name, private="head", capacities="0.5", public="share:0.1")
    with pytest.raises(FedloomError, match="ByGradient runs clients' models at the server"):
        quick("fedgse-csl+fedper", capacities="0.5", public="share:0.1")


def test_nonsense_is_refused(quick):
    with pytest.raises(FedloomError, match="trains narrower nets"):
        Method(local=OrderedDropout(), select=Whole())
    with pytest.raises(FedloomError, match="combines whole models"):
        Method(mix=Pull(), select=Ordered(), topology=Peers(network("ring")))
    with pytest.raises(FedloomError, match="needs public images"):
        quick("fedgse-spl", public="none", capacities="0.5")
    with pytest.raises(FedloomError, match="public set with labels"):
        quick("fedgse-spl", public="noise:64", capacities="0.5")
    with pytest.raises(FedloomError, match="exit_blocks"):
        quick("depthfl", model=Mixed, capacities="0.5", data="synthetic")
    with pytest.raises(FedloomError, match="has no presets"):
        quick("fedavg", preset="source")
    with pytest.raises(FedloomError, match="Did you mean 'source'"):
        quick("feddse", preset="sorce")


def test_capacities_from_a_file_a_mix_or_a_name(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("client,capacity\n1,0.5\n0,1\n2,0.25\n")
    assert Capacities.parse(str(file)).assign(3, 0).tolist() == [1, 0.5, 0.25]
    with pytest.raises(FedloomError, match="3 clients, the run 4"):
        Capacities.parse(str(file)).assign(4, 0)
    file.write_text("client,capacity\n0,1\n0,0.5\n1,0.5\n")
    with pytest.raises(FedloomError, match="one line for each client"):
        Capacities.parse(str(file))
    file.write_text("client,capacity\n0,2\n")
    with pytest.raises(FedloomError, match="client 0 a capacity of 2"):
        Capacities.parse(str(file))
    assert sorted(Capacities.parse("rho:0.3,1,0.0625").assign(10, 0)) == [0.0625] * 7 + [1] * 3
    assert Capacities.parse("rho:1,1,0.0625").whole
    assert Capacities.parse("low-quality").values == (0.99, 0.5, 0.25, 0.125, 0.0625)
    for wrong in ("rho:2,1,0.5", "rho:0.5,1", "lowquality", "none.csv"):
        with pytest.raises(FedloomError):
            Capacities.parse(wrong)


def test_a_preset_gives_what_the_run_does_not():
    from fedloom.experiment.config import make_config

    config, options = make_config({"method": "feddse", "preset": "source", "lr": 0.5},
                                  find("feddse"))  # fmt: skip
    assert (config.lr, config.momentum, config.capacities) == (0.5, 0.9, "low-quality")
    assert config.model_options == {"norm": "static"}
    assert options.mask == "inf"
    again, _ = make_config(config.model_dump(), find("feddse"))
    assert again == config


@pytest.mark.parametrize("name", [*WIDTH_METHODS, "fjord", "depthfl"])
def test_the_sources_preset_is_s2s_experiment_by_itself(name):
    from fedloom.experiment.config import make_config

    config, _ = make_config({"method": name, "preset": "source"}, find(name))
    assert (config.data, config.data_options, config.model) == ("mnist", {"size": 32}, "conv4")
    assert (config.clients, config.participants, config.rounds) == (100, 10, 800)
    assert (config.partition, config.draw, config.test_share) == ("classes:2", "capacity", 0.0)
    assert (config.lr, config.epochs, config.static_samples) == (0.001, 2, None)
    populations = {"depthfl": "1,0.75,0.5,0.25", "fedgse-spl": "high-quality",
                   "fedgse-csl": "high-quality"}  # fmt: skip
    assert config.capacities == populations.get(name, "low-quality")
    alike, _ = make_config({"method": name, "preset": "source", "capacities": "0.5"}, find(name))
    assert alike.draw == "uniform"  # there are no groups to draw by


def test_clients_of_every_capacity_are_in_every_round_of_a_preset(quick):
    result = quick("heterofl", preset="tuned", clients=20, participation=0.5, rounds=3, steps=1,
                   capacities="1,0.5,0.25,0.125", model="conv4", data="digits", augment="none",
                   model_options={"channels": [8, 8, 8, 8]}, eval_clients=0)  # fmt: skip
    for record in result.records:
        counts = [group["clients"] for group in record["devices"].values()]
        assert sorted(counts) in ([2, 2, 3, 3], [2, 3, 2, 3])


def test_an_option_of_the_run_goes_over_the_preset_however_it_is_written():
    from fedloom.experiment.config import make_config

    for given in ({"mask": "zero"}, {"params": {"mask": "zero"}}):
        config, options = make_config({"preset": "source", **given}, find("feddse"))
        assert (options.mask, options.by_class) == ("zero", True)
        assert make_config(config.model_dump(), find("feddse")) == (config, options)
