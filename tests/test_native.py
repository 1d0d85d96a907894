"""The kernels compute what torch computes, on any network that they take."""

import copy
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import states
from native_nets import needs_kernels, network, wide_network
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fedloom
from fedloom.engine import kernels as engine_kernels
from fedloom.engine.batches import Augment
from fedloom.engine.kernels import kernels_for, resolve, update_of
from fedloom.engine.looking import Looker
from fedloom.engine.resident import Resident, flat
from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.local import MAML, Batch, MetaSGD, Optimiser
from fedloom.local.meta import QUERY, SUPPORT
from fedloom.mix import Networks
from fedloom.models import build
from fedloom.models.norm import pieces, settle
from fedloom.native import library as native_library
from fedloom.native import net as native_net
from fedloom.native import plan as native_plan
from fedloom.native.library import SETS, library
from fedloom.native.net import Held, Native, Pictures
from fedloom.native.plan import Unplanned, plan
from fedloom.select import Ask, Channels, scores
from fedloom.similarity import activations, similarity_matrix

BUILT = library() is not None
HERE = [k for k in SETS if BUILT and library().fl_supported() & 1 << k]
NETS = 40


def plain(images):
    return Pictures(images.numpy(), np.arange(len(images)))


def rows_of(layout, tensors):
    """Tensors by name as the trainable part of a row, in double precision."""
    out = torch.zeros(layout.trainable, dtype=torch.float64)
    for e in layout.entries:
        if e.kind == "param" and tensors[e.name] is not None:
            e.view(out).copy_(tensors[e.name])
    return out


def apart(layout, got, want):
    """The largest difference of a tensor's values, relative to its layer's largest; where they
    should vanish (a bias in front of a batch norm), or nearly, only rounding is left, which is
    taken relative to the largest of all."""
    worst, most = 0.0, float(want.abs().max())
    for e in (e for e in layout.entries if e.kind == "param"):
        of_layer = [o for o in layout.entries if o.layer == e.layer and o.kind == "param"]
        scale = max(float(o.view(want).abs().max()) for o in of_layer)
        if float(e.view(want).abs().max()) < 1e-6 * most or scale < 1e-2 * most:
            scale = most
        found = float((e.view(got).double() - e.view(want)).abs().max())
        worst = max(worst, found / max(scale, 1e-12))
    return worst


class Case:
    def __init__(self, seed, number, make=network):
        self.net, self.shape, n = make(seed)
        self.layout = Layout.of(self.net)
        self.row = self.layout.flatten(self.net)
        self.native = Native(self.net, self.layout, self.shape, number)
        rng = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, *self.shape, generator=rng)
        self.y = torch.randint(0, self.net[-1].out_features, (n,), generator=rng)
        self.direction = torch.randn(self.layout.trainable, generator=rng)
        self.exact = copy.deepcopy(self.net).double().train()


@needs_kernels
@pytest.mark.parametrize(("make", "nets"), [(network, NETS), (wide_network, 16)])
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
def test_random_networks_agree_with_double_precision(number, make, nets):
    for seed in range(nets):
        case = Case(seed, number, make)
        layout, cut = case.layout, case.layout.trainable
        row, grad = case.row.clone(), torch.zeros(cut)
        loss = case.native.gradient(row, grad, plain(case.x), case.y)
        wanted = F.cross_entropy(case.exact(case.x.double()), case.y)
        wanted.backward()
        assert loss == pytest.approx(wanted.item(), rel=1e-5), seed
        tensors = {name: p.grad for name, p in case.exact.named_parameters()}
        assert apart(layout, grad, rows_of(layout, tensors)) < 1e-4, seed
        for name, value in case.exact.named_buffers():
            if "running" in name:  # they moved once
                found = next(e for e in layout.entries if e.name == name).view(row)
                torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-5)
        looking = copy.deepcopy(layout.load(case.net, row)).double().eval()
        torch.testing.assert_close(
            case.native.logits(row, plain(case.x)).double(), looking(case.x.double()),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


@needs_kernels
def test_convolutions_are_computed_with_fewer_products_where_these_are_half_as_many():
    def tiles(net, shape):
        kinds = plan(net, Layout.of(net), shape).ops
        return [op.tile for op in kinds if op.kind == 0]

    assert tiles(build("conv4", (1, 28, 28), 10), (1, 28, 28)) == [0, 4, 4, 3]
    for size, wanted in ((2, 0), (3, 3), (4, 4), (5, 3), (7, 4)):
        net = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(), nn.LazyLinear(2))
        net(torch.zeros(1, 16, size, size))
        assert tiles(net, (16, size, size)) == [wanted]
    for more in ({"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": (1, 0)}):
        net = nn.Sequential(nn.Conv2d(32, 32, 3, **more), nn.Flatten(), nn.LazyLinear(2))
        net(torch.zeros(1, 32, 12, 12))
        assert tiles(net, (32, 12, 12)) == [0]


@needs_kernels
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
def test_random_networks_have_the_activations_that_torch_has(number):
    several = 0
    for seed in range(NETS):
        case = Case(seed, number)
        x = case.x.repeat(5, 1, 1, 1)[:69]
        found, wanted = case.native.activations(case.row, x), activations(case.net, x)
        assert list(found) == list(wanted), seed
        several += len(found) > 3
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
        last = list(wanted)[-1:]
        assert torch.equal(case.native.activations(case.row, x, last)[last[0]], found[last[0]])
    assert several > 10


@needs_kernels
@pytest.mark.parametrize("order", ["pool", "relu", "none"])
def test_activations_in_front_of_and_behind_pooling(order):
    """What is pooled while it is computed is not in memory: where it counts, pooling is apart."""
    middle = {"pool": [nn.MaxPool2d(2), nn.ReLU()], "relu": [nn.ReLU(), nn.MaxPool2d(2)],
              "none": [nn.MaxPool2d(2)]}[order]  # fmt: skip
    net = nn.Sequential(nn.Conv2d(1, 4, 3), *middle, nn.Flatten(), nn.Linear(36, 3))
    layout, x = Layout.of(net), torch.randn(9, 1, 8, 8)
    found = Native(net, layout, (1, 8, 8)).activations(layout.flatten(net), x)
    wanted = activations(net, x)
    assert found["0"].shape[1] == (36 if order == "pool" else 144)
    assert all(torch.allclose(found[k], wanted[k], atol=1e-5) for k in wanted)


class Pooled(nn.Module):
    """A non-linearity behind a max pooling, of a layer alone or of a sum."""

    def __init__(self, act, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), norm(6)
        self.rest = nn.Sequential(
            nn.MaxPool2d(2), act(), nn.Conv2d(6, 4, 3), nn.MaxPool2d(2), act(),
            nn.Flatten(), nn.Linear(16, 5), act(), nn.Linear(5, 3),
        )  # fmt: skip

    def forward(self, x):
        x = self.conv(x)
        return self.rest(self.norm(x) + x)


LOOKED_AT = {
    "mlp": lambda: build("mlp", (2, 12, 12), 3, options={"hidden": [12, 8]}),
    "conv4": lambda: build("conv4", (2, 12, 12), 3, options={"channels": [4, 8, 8, 17]}),
    "static": lambda: build("conv4", (2, 12, 12), 3,
                            options={"channels": [16, 20, 8, 8], "norm": "static"}),
    "resnet": lambda: build("resnet18", (2, 12, 12), 3, options={"width": 4}),
    "relu": lambda: Pooled(nn.ReLU),
    "tanh": lambda: Pooled(nn.Tanh),
    "silu": lambda: Pooled(nn.SiLU, nn.Identity),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_channels_are_worth_what_they_are_in_double_precision(name, number):
    torch.manual_seed(1)
    net, shape = LOOKED_AT[name](), (2, 12, 12)
    channels, layout = Channels.of(net, shape), Layout.of(net)
    looker = Looker.of(Native(net, layout, shape, number), channels)
    assert looker is not None
    row = layout.flatten(net)
    exact = layout.load(copy.deepcopy(channels.module), row).double()
    for n in (1, 2, 69, 300):
        x, y = torch.randn(n, *shape), torch.randint(0, 3, (n,))
        wanted = scores.activations(exact, channels, x.double())
        wanted += scores.gradients(exact, channels, Batch(x.double(), y))
        found = looker.activations(row, x) + looker.gradients(row, Batch(x, y))
        for a, b in zip(found, wanted, strict=True):
            assert np.abs(a - b).max() < 1e-3 * np.abs(b).max() + 1e-7, (name, n)
    assert torch.equal(row, layout.flatten(net))  # statistics are measured in a copy


class Unheeded(nn.Module):
    """Its first non-linearity takes no part in what it answers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.a(x.flatten(1))
        torch.tanh(x)
        return self.b(F.relu(x))


@needs_kernels
def test_channels_that_the_kernels_do_not_see_are_left_to_torch(monkeypatch):
    """An order of calls that is not the plan's, a norm that is used twice, and other numbers."""
    for net, shape in ((Unheeded(), (1, 2, 2)), (TwiceNormed(), (2, 12, 12))):
        native = Native(net, Layout.of(net), shape)
        assert Looker.of(native, Channels.of(net, shape)) is None
    net, shape = LOOKED_AT["conv4"](), (2, 12, 12)
    native, channels = Native(net, Layout.of(net), shape), Channels.of(net, shape)
    assert Looker.of(native, channels) is not None
    means = Native.channel_means
    monkeypatch.setattr(
        Native, "channel_means", lambda *a: [m[::-1].copy() for m in means(*a)]
    )  # fmt: skip
    assert Looker.of(native, channels) is None


class TwiceNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.a(x)))
        return self.out(F.relu(self.norm(self.b(x))).mean((2, 3)))


@needs_kernels
def test_a_norm_that_is_used_twice_counts_twice():
    net = TwiceNormed()
    layout = Layout.of(net)
    native = Native(net, layout, (2, 6, 6))
    resident = Resident(net, layout, torch.device("cpu"), native)
    resident.load(layout.flatten(net))
    resident.count(3)
    assert layout.views(resident.read(), ("buffer",))["norm.num_batches_tracked"] == 6


@needs_kernels
@pytest.mark.parametrize("slope", [0.3, -0.3])
def test_only_what_never_falls_goes_before_a_pooling(slope):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.LeakyReLU(slope), nn.Flatten(),
                        nn.Linear(27, 4))  # fmt: skip
    made = plan(net, Layout.of(net), (1, 8, 8), watching=True, before_pools=True)
    kinds = [native_plan.KINDS[op.kind] for op in made.ops]
    assert (kinds.index("act") < kinds.index("maxpool")) == (slope > 0)


@needs_kernels
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("name", ["conv4", "static", "resnet", "tanh", "mixed"])
def test_norms_are_measured_as_torch_measures_them(name, every):
    torch.manual_seed(2)
    shape = (2, 12, 12)
    net = LOOKED_AT["static" if name == "mixed" else name]()
    if name == "mixed":  # two kinds of norm, and one that is frozen
        net.blocks[1].norm = nn.BatchNorm2d(20)
        net.blocks[2].norm.train = lambda mode=True: net.blocks[2].norm
        net.blocks[2].norm.training = False
    layout = Layout.of(net)
    native = Native(net, layout, shape)
    begun = layout.flatten(net)
    assert native.measures(every, 7)
    for n in (0, 1, 2, 7, 8, 9, 31):
        x = torch.randn(n, *shape) * 3 + 1
        layout.load(net, begun)
        wanted = layout.flatten(settle(net, x.split(7) if n else [], every))
        row = begun.clone()
        native.measure(row, plain(x), every, 7)
        counted = [e for e in layout.entries if "num_batches" in e.name]
        for e in counted:
            e.view(row).copy_(e.view(wanted))
        torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-5)
    moves = every or name in ("static", "mixed")
    assert (row - begun).abs().max() > 0.1 if moves else torch.equal(row, wanted)


def test_images_are_measured_in_pieces_without_a_single_one():
    for n in range(20):
        found = pieces(n, 4)
        assert [i for p in found for i in p] == ([0, 0] if n == 1 else list(range(n)))
        assert all(1 < len(p) <= 5 for p in found)


@needs_kernels
def test_a_pass_without_a_way_back_takes_little_memory():
    net = build("resnet18", (3, 32, 32), 10, options={"width": 8})
    native = Native(net, Layout.of(net), (3, 32, 32))
    assert native.measures(True, 255)
    made, each = native._measuring[True]
    passing, whole = native_net._measurer(made, 256, native._number), native.program(256, True)
    assert 256 * each <= passing.bytes < whole.bytes / 2
    assert not native.measures(True, 2**13)  # more than such a pass may take
    for _ in range(3):  # sub-models of many shapes take turns
        other = Native(net, native.layout, (3, 32, 32))
        assert other.measures(True, 7)
        other.measure(layout_row(net), plain(torch.randn(9, 3, 32, 32)), True, 7)
    assert native_net._measurer.cache_info().currsize <= 2


def layout_row(net):
    return Layout.of(net).flatten(net)


@needs_kernels
def test_nets_without_a_norm_to_measure_take_no_memory_for_it():
    net = build("conv4", (3, 32, 32), 10, options={"norm": "group"})
    native = Native(net, Layout.of(net), (3, 32, 32))
    before = native_net._measurer.cache_info()
    assert native.measures(True, 2**20)
    row = layout_row(net)
    native.measure(row, plain(torch.randn(3, 3, 32, 32)), True, 2**20)
    assert native_net._measurer.cache_info() == before
    assert torch.equal(row, layout_row(net))


@needs_kernels
def test_samples_that_the_kernels_can_not_take_are_torchs_to_refuse():
    """Labels out of range would be places out of range."""
    net, shape = LOOKED_AT["conv4"](), (2, 12, 12)
    layout, channels = Layout.of(net), Channels.of(net, shape)
    looker = Looker.of(Native(net, layout, shape), channels)
    ask = Ask(1, 0, 0.5, layout, layout.flatten(net), net, lambda *_: None, channels=channels,
              scores=looker)  # fmt: skip
    x, y = torch.randn(6, *shape), torch.tensor([0, 1, 2, 0, 1, 2])
    assert looker.takes(x, y)
    plainly = replace(ask, scores=None).gradients(Batch(x, y))
    assert all(np.allclose(a, b, rtol=1e-3, atol=1e-6)
               for a, b in zip(ask.gradients(Batch(x, y)), plainly, strict=True))  # fmt: skip
    for labels in (y + 1, y - 1, y.int(), y[:4], y.float()):
        assert not looker.takes(x, labels)
    for images in (x.double(), x[:0], x[:, :, 1:], x[0]):
        assert not looker.takes(images)
    with pytest.raises((IndexError, RuntimeError)):
        ask.gradients(Batch(x, y + 1))


@needs_kernels
def test_sub_models_of_norms_without_weights_run_by_the_kernels():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(),
                        nn.Flatten(), nn.Linear(144, 3))  # fmt: skip
    part = Channels.of(net, (1, 8, 8)).build([2])
    Native(part, Layout.of(part), (1, 8, 8))  # is planned


@needs_kernels
def test_how_many_samples_are_looked_at_together_changes_nothing(monkeypatch):
    shape, found = (1, 28, 28), []
    net = build("conv4", shape, 10, options={"channels": [16, 32, 32, 32]})
    layout, x = Layout.of(net), torch.randn(70, *shape)
    for fewer in (8, 12, 16):
        monkeypatch.setattr(native_net, "_FEWER", fewer)
        native = Native(net, layout, shape)
        assert native_net.at_once(native.plan(training=False)) == fewer
        found.append(native.answers(layout.flatten(net), x))
    assert all(torch.equal(f, found[0]) for f in found)
    small = build("lenet", shape, 10)
    assert native_net.at_once(Native(small, Layout.of(small), shape).plan(False)) == 64


@needs_kernels
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
@pytest.mark.parametrize("as_zero", [True, False])
def test_a_loss_that_sees_some_classes_agrees_with_double_precision(as_zero, number):
    instead = 0.0 if as_zero else -torch.inf
    for seed in range(12):
        case = Case(seed, number)
        classes = case.net[-1].out_features
        held = torch.zeros(classes, dtype=torch.bool)
        held[case.y[0]] = held[-1] = True
        y = torch.where(held[case.y], case.y, classes - 1)
        grad = torch.zeros(case.layout.trainable)
        seen = Held(held.numpy(), as_zero)
        row = case.row.clone()
        loss = case.native.gradient(row, grad, plain(case.x), y, seen)
        logits = torch.where(held, case.exact(case.x.double()), instead)
        wanted = F.cross_entropy(logits, y)
        assert loss == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
        named = {n: p for n, p in case.exact.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(wanted, list(named.values()), allow_unused=True)
        exact = rows_of(case.layout, dict(zip(named, grads, strict=True)))
        if float(exact.abs().max()) > 1e-6:
            assert apart(case.layout, grad, exact) < 1e-3, seed
        again = case.native.gradient(case.row.clone(), grad, plain(case.x), y)
        case.exact.load_state_dict(case.net.state_dict())
        plainly = F.cross_entropy(case.exact(case.x.double()), y)
        assert again == pytest.approx(plainly.item(), rel=1e-4)  # all classes count again


@needs_kernels
@pytest.mark.parametrize("norm", ["batch", "static", "group"])
def test_rows_are_compared_alike_by_the_kernels_and_by_torch(norm):
    shape, options = (1, 8, 8), {"channels": [4, 8, 8, 8], "norm": norm}
    nets = [build("conv4", shape, 3, seed, options=options) for seed in range(4)]
    layout, x = Layout.of(nets[0]), torch.randn(70, *shape)
    rows = torch.stack([layout.flatten(net) for net in nets])
    native = Native(nets[0], layout, shape)
    ours, torchs = (Networks(nets[0], layout, n).of(rows, x) for n in (native, None))
    assert ours.native is native
    for layers in (None, ["blocks.1.conv"], ["blocks.1"]):  # the last one's by torch
        found, wanted = (similarity_matrix(m, x, layers=layers) for m in (ours, torchs))
        assert torch.allclose(found, wanted, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_probes_run_by_the_kernels_of_the_run(in_tmp, monkeypatch, kernels):
    seen = []
    inner = Native.activations
    monkeypatch.setattr(Native, "activations", lambda *given: seen.append(1) or inner(*given))
    fedloom.run("fedswap:partner=min", clients=3, rounds=1, steps=1, public="noise:20",
                kernels=kernels)  # fmt: skip
    assert bool(seen) == (kernels == "native")


@needs_kernels
@pytest.mark.parametrize(("make", "nets"), [(network, NETS), (wide_network, 8)])
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
def test_second_derivatives_agree_with_double_precision(number, make, nets):
    for seed in range(nets):
        case = Case(seed, number, make)
        layout, cut = case.layout, case.layout.trainable
        weights = case.row[:cut].clone().requires_grad_()
        out = case.native(weights, case.row[cut:].clone(), case.x)
        (grad,) = torch.autograd.grad(F.cross_entropy(out, case.y), weights, create_graph=True)
        (along,) = torch.autograd.grad(grad @ case.direction, weights)
        tensors = {n: p.detach().clone().requires_grad_() for n, p in case.exact.named_parameters()}
        buffers = {n: b.clone() for n, b in case.exact.named_buffers()}
        wanted = functional_call(case.exact, {**tensors, **buffers}, (case.x.double(),))
        torch.testing.assert_close(out.detach().double(), wanted.detach(), rtol=1e-4, atol=1e-4)
        firsts = torch.autograd.grad(
            F.cross_entropy(wanted, case.y), list(tensors.values()), create_graph=True
        )
        product = sum(
            (g * e.view(case.direction).double()).sum()
            for g, e in zip(firsts, (e for e in layout.entries if e.kind == "param"), strict=True)
        )
        twice = torch.autograd.grad(product, list(tensors.values()), materialize_grads=True,
                                    allow_unused=True)  # fmt: skip
        wanted_along = rows_of(layout, dict(zip(tensors, twice, strict=True)))
        assert apart(layout, along, wanted_along) < 3e-4, seed


@needs_kernels
def test_second_derivatives_agree_with_finite_differences():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5))
    layout = Layout.of(net)
    row = layout.flatten(net)
    native = Native(net, layout, (1, 6, 6))
    x, y = torch.randn(9, 1, 6, 6), torch.randint(0, 5, (9,))
    direction = torch.randn(layout.trainable)
    direction /= direction.norm()

    def gradient(at):
        grad = torch.zeros(layout.trainable)
        native.gradient(at.clone(), grad, plain(x), y)
        return grad

    step = 0.02
    differences = (gradient(row + step * direction) - gradient(row - step * direction)) / (2 * step)
    weights = row.clone().requires_grad_()
    loss = F.cross_entropy(native(weights, row[:0], x), y)
    (grad,) = torch.autograd.grad(loss, weights, create_graph=True)
    (along,) = torch.autograd.grad(grad @ direction, weights)
    torch.testing.assert_close(along, differences, rtol=2e-2, atol=2e-4)


@needs_kernels
@pytest.mark.parametrize(
    "rule",
    [MAML(0.3), MAML(0.3, first_order=True), MetaSGD(0.3)],
    ids=["maml", "fomaml", "metasgd"],
)
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
def test_a_step_of_meta_learning_agrees_with_double_precision(number, rule):
    """Two or three inner steps; query batches that go together, and a smaller one."""
    tried = 0
    for seed in range(2 * NETS):
        case, rng = Case(seed, number), torch.Generator().manual_seed(seed)
        if not case.native.can_meta():
            continue
        tried += 1
        layout = Layout.of(case.net, rule.extras)
        native = Native(case.net, layout, case.shape, number)
        row = layout.flatten(case.net, rule.extras)
        row[case.layout.trainable : layout.trainable].uniform_(-0.1, 0.3, generator=rng)
        x = torch.randn(100, *case.shape, generator=rng)
        y = torch.randint(0, case.net[-1].out_features, (100,), generator=rng)
        cuts = np.array([0, 9, 20] if seed % 2 else [0, 9, 17, 20])
        support = (Pictures(x.numpy(), np.arange(20)), y[:20], cuts)
        query = (Pictures(x.numpy(), np.arange(20, 100)), y[20:], np.array([0, 30, 60, 80]))
        grad = torch.full((layout.trainable,), 7.0)  # what is there before is of no account
        loss = native.meta(row, grad, support, query, rule.rate, not rule.first_order)

        exact = case.exact
        buffers = dict(exact.named_buffers())
        start = row[: layout.trainable].double().requires_grad_()

        def net(params, images, exact=exact, buffers=buffers):
            return functional_call(exact, {**params, **buffers}, (images,))

        data = {
            part: Batch(x[pictures.at].double(), labels, lengths=tuple(np.diff(cuts).tolist()))
            for part, (pictures, labels, cuts) in ((SUPPORT, support), (QUERY, query))
        }
        wanted = rule.objective(net, layout.tensors(start), data, None)
        (wanted_grad,) = torch.autograd.grad(wanted, start)
        assert loss == pytest.approx(wanted.item(), rel=1e-4)
        cut = case.layout.trainable
        assert apart(case.layout, grad[:cut], wanted_grad[:cut]) < 3e-4, seed
        if rule.rate is None:
            assert apart(case.layout, grad[cut:], wanted_grad[cut:]) < 3e-4, seed
    assert tried >= NETS // 4


@needs_kernels
@pytest.mark.parametrize("name", ["fedmeta-maml", "fedmeta-per-metasgd"])
@pytest.mark.parametrize("model", ["mlp", "lenet", "conv4"])
def test_whole_steps_of_meta_learning_are_those_through_autograd(quick, monkeypatch, name, model):
    more = {"engine": "serial", "model": model, "rounds": 2, "clients": 3, "batch": 8,
            "data": "synthetic", "data_options": {"shape": "1x16x16", "samples": 90},
            "augment": "flip", "model_options": {}}  # fmt: skip
    if model == "conv4":
        more["model_options"] = {"channels": [4, 4, 4, 4]}
    whole = quick(name, **more)
    assert ("whole steps" in whole.kernels) == (model != "conv4")  # which has batch norms
    monkeypatch.setattr(Native, "can_meta", lambda self, steps=1: False)
    through = quick(name, out="through", **more)
    assert "through autograd" in through.kernels
    for key, value in states(through).items():
        assert torch.allclose(value, states(whole)[key], atol=1e-6), key


@needs_kernels
def test_a_step_by_hand():
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    layout = Layout.of(net)
    row = torch.zeros(layout.size)
    native = Native(net, layout, (2, 1, 1))
    x = torch.tensor([[[[1.0]], [[2.0]]]])
    update = update_of(Optimiser(lr=0.5), {})
    loss = native.steps(row, torch.zeros(6), plain(x), torch.tensor([0]), np.array([0, 1]), update)
    # Equal logits: p = (½, ½), loss ln 2, ∂/∂z = (−½, ½), ∂/∂w = (−½)(1, 2) and (½)(1, 2).
    assert loss == pytest.approx(np.log(2), rel=1e-6)
    assert row.tolist() == [0.25, 0.5, -0.25, -0.5, 0.25, -0.25]


OPTIMISERS = [
    Optimiser(0.05),
    Optimiser(0.05, weight_decay=1e-2),
    Optimiser(0.05, momentum=0.9),
    Optimiser(0.05, momentum=0.9, weight_decay=1e-2, clip=0.3),
    Optimiser(0.01, kind="adam", clip=5.0),
    Optimiser(0.01, kind="adamw", weight_decay=0.1, beta1=0.4),
    Optimiser(0.02, kind="adagrad", weight_decay=1e-2),
]


@needs_kernels
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_whole_steps_are_the_optimisers(optimiser, number):
    """In one call, step by step, and with torch's optimiser: the last layers are tied, so weights
    that move as soon as their gradient is known are beside some that must wait."""
    torch.manual_seed(3)
    tied = nn.Linear(7, 7)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 7, bias=False), nn.ReLU(), tied,
        nn.Tanh(), tied, nn.Linear(7, 3),
    )  # fmt: skip
    layout = Layout.of(net)
    native = Native(net, layout, (1, 6, 6), number)
    x, y = torch.randn(50, 1, 6, 6), torch.randint(0, 3, (50,))
    cuts = np.array([0, 11, 22, 33, 44, 50])
    begun, lines = layout.flatten(net), []
    for way in ("together", "one by one", "torch"):
        row, memory = begun.clone(), optimiser.memory(begun[: layout.trainable])
        grad, update = torch.zeros(layout.trainable), update_of(optimiser, memory)
        if way == "together":
            native.steps(row, grad, plain(x), y, cuts, update)
        else:
            for a, b in pairwise(cuts):
                some = Pictures(x.numpy(), np.arange(a, b))
                native.gradient(row, grad, some, y[a:b])
                if way == "torch":
                    optimiser.step(row[: layout.trainable], grad, memory)
                else:
                    native.update(row[: layout.trainable], grad, update)
        lines.append(torch.cat([row, grad, *memory.values()]))
    assert torch.equal(lines[0], lines[1])
    torch.testing.assert_close(lines[1], lines[2], rtol=1e-4, atol=2e-6)
    assert (lines[0][: layout.size] - begun).norm() > 0.01


@needs_kernels
def test_a_convolution_with_pooling_by_hand():
    net = nn.Sequential(nn.Conv2d(1, 1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                        nn.Linear(1, 2))  # fmt: skip
    layout = Layout.of(net)
    row = torch.tensor([1.0, 0.0, 0.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0])
    native = Native(net, layout, (1, 3, 3))
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    # Windows give (0+4, 1+5, 3+7, 4+8) − 1, the largest is 11, and logits are (11, 0).
    assert native.logits(row, plain(image)).tolist() == [[11.0, 0.0]]
    grad = torch.zeros(9)
    native.gradient(row.clone(), grad, plain(image), torch.tensor([1]))
    p = float(torch.softmax(torch.tensor([11.0, 0.0]), 0)[0])
    # Back through the largest window only, which saw 4, 5, 7, 8.
    assert grad.tolist() == pytest.approx([p * v for v in (4, 5, 7, 8, 1, 11)] + [-11 * p, p, -p])


@needs_kernels
def test_nan_is_not_lost_on_the_way():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                        nn.Linear(12, 3))  # fmt: skip
    layout = Layout.of(net)
    row = layout.flatten(net)
    row[4] = torch.nan
    grad = torch.zeros(layout.trainable)
    x, y = torch.randn(5, 1, 6, 6), torch.zeros(5, dtype=torch.int64)
    assert np.isnan(Native(net, layout, (1, 6, 6)).gradient(row, grad, plain(x), y))
    assert torch.isnan(grad).any()


@needs_kernels
def test_all_samples_at_once_are_taken_in_pieces():
    net = build("lenet", (1, 16, 16), 10)
    layout = Layout.of(net)
    native, row = Native(net, layout, (1, 16, 16)), layout.flatten(net)
    x, y = torch.randn(150, 1, 16, 16), torch.randint(0, 10, (150,))
    grad = torch.zeros(layout.trainable)
    loss = native.gradient(row, grad, plain(x), y)
    assert native.program(1, True).batch < 150
    exact = copy.deepcopy(net).double()
    wanted = F.cross_entropy(exact(x.double()), y)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    tensors = {n: p.grad for n, p in exact.named_parameters()}
    assert apart(layout, grad, rows_of(layout, tensors)) < 1e-5


class Odd(nn.Module):
    """Weights used twice, a sum of a value with itself, a map that is flattened and convolved, a
    frozen layer, an unused one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.frozen = nn.Conv2d(2, 2, 1)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.side, self.out = nn.Linear(2 * 36, 4), nn.Linear(2 * 36, 4)

    def forward(self, x):
        x = torch.tanh(self.frozen(self.conv(x)))
        side = self.side(x.view(x.size(0), -1))
        x = self.conv(x)
        return self.out(torch.flatten(x + x, 1)) + side


@needs_kernels
def test_weights_and_values_that_are_used_twice():
    torch.manual_seed(3)
    net = Odd()
    layout = Layout.of(net)
    row, native = layout.flatten(net), Native(net, layout, (2, 6, 6))
    x, y = torch.randn(11, 2, 6, 6), torch.randint(0, 4, (11,))
    grad = torch.zeros(layout.trainable)
    native.gradient(row, grad, plain(x), y)
    exact = copy.deepcopy(net).double()
    F.cross_entropy(exact(x.double()), y).backward()
    tensors = {n: p.grad for n, p in exact.named_parameters()}
    assert apart(layout, grad, rows_of(layout, tensors)) < 1e-5
    assert torch.equal(row, layout.flatten(net))


@needs_kernels
@pytest.mark.parametrize("memory", [0, 2**28])
def test_passes_that_lie_between_do_not_disturb_going_back(memory, monkeypatch):
    monkeypatch.setattr(native_net, "_MEMORY", memory)  # of 0: all passes share one
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    layout = Layout.of(net)
    native = Native(net, layout, (1, 2, 2))
    weights = layout.flatten(net).requires_grad_()
    rest = weights.detach()[:0]
    small, large = torch.randn(3, 1, 2, 2), torch.randn(40, 1, 2, 2)
    alone = torch.autograd.grad(native(weights, rest, small).square().sum(), weights)[0]
    first = native(weights, rest, small)
    second = native(weights, rest, large)  # other memory, for more samples
    (found,) = torch.autograd.grad(first.square().sum() + 0 * second.sum(), weights)
    torch.testing.assert_close(found, alone)


@needs_kernels
def test_dropout_draws_what_torch_draws():
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 30), nn.ReLU(), nn.Dropout(0.4),
                        nn.Linear(30, 3))  # fmt: skip
    layout = Layout.of(net)
    native, row = Native(net, layout, (1, 3, 3)), layout.flatten(net)
    x, y = torch.randn(20, 1, 3, 3), torch.randint(0, 3, (20,))
    torch.manual_seed(1)
    grad = torch.zeros(layout.trainable)
    native.gradient(row, grad, plain(x), y)
    torch.manual_seed(1)
    F.cross_entropy(net.train()(x), y).backward()
    tensors = {n: p.grad for n, p in net.named_parameters()}
    assert apart(layout, grad, rows_of(layout, tensors)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("spec", ["flip", "crop:2", "flip+crop:3"])
def test_augmented_images_are_those_of_the_torch_path(spec):
    images = np.random.default_rng(0).integers(0, 256, (12, 2, 6, 5), dtype=np.uint8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(60, 60, bias=False))
    layout = Layout.of(net)
    row = torch.eye(60).reshape(-1)  # logits are the pixels
    augment, rng = Augment.parse(spec), np.random.default_rng(7)
    flip, offset = augment.draw(12, rng)
    at = np.arange(12)[::-1].copy()
    pictures = Pictures(
        images, at, None, None,
        None if flip is None else flip.astype(np.uint8),
        None if offset is None else offset.T.astype(np.int32, order="C"), augment.crop,
    )  # fmt: skip
    got = Native(net, layout, (2, 6, 5)).logits(row, pictures)
    wanted = augment.apply(torch.from_numpy(images[at]), np.random.default_rng(7))
    assert torch.equal(got, wanted.flatten(1).float())


class Outputs(nn.Module):
    """Two outputs, stacked."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(30, 3), nn.Linear(30, 3)

    def forward(self, x):
        x = x.flatten(1)
        return torch.stack([self.a(x), self.b(x)])


@needs_kernels
@pytest.mark.parametrize("net", [nn.Sequential(nn.Flatten(), nn.Linear(30, 3)), Outputs()])
def test_any_number_of_samples_is_looked_at_as_torch_does(net):
    layout = Layout.of(net)
    row, native = layout.flatten(net), Native(net, layout, (1, 6, 5))
    images = np.random.default_rng(0).integers(0, 256, (200, 1, 6, 5), dtype=np.uint8)
    scale, shift = torch.full((30,), 1 / 255), torch.zeros(30)
    for n in (0, 1, 7, 63, 64, 65, 130):
        at = np.arange(200)[::-1][:n].copy()
        got = native.logits(row, Pictures(images, at, scale, shift))
        wanted = net(torch.from_numpy(images[at]).float() / 255)
        assert got.shape == wanted.shape
        assert torch.allclose(got, wanted, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_images_of_any_type_of_numbers_are_read_right(in_tmp, kind):
    rng = np.random.default_rng(0)
    data = (rng.integers(0, 9, (60, 1, 4, 4)).astype(kind), rng.integers(0, 3, 60))
    native, exact = both(in_tmp, "fedavg", data=data)
    assert float((native - exact).norm() / exact.norm()) < 2e-6


@needs_kernels
def test_batch_norm_refuses_a_single_value():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    layout = Layout.of(net)
    native = Native(net, layout, (1, 2, 2))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        native.gradient(layout.flatten(net), torch.zeros(layout.trainable),
                        plain(torch.randn(1, 1, 2, 2)), torch.tensor([0]))  # fmt: skip


class Concatenates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = x.flatten(1)
        return torch.cat([self.a(x), self.b(x)], 1)


class Branches(Concatenates):
    def forward(self, x):
        return self.a(x.flatten(1)) if x.sum() > 0 else self.b(x.flatten(1))


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Concatenates(), "it uses 'cat'"),
        (Branches(), "torch.fx can't trace it"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3)), "PReLU"),
        (nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 3)), "Transpose"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), "float64"),
        (nn.Sequential(nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"), nn.Flatten(),
                       nn.Linear(18, 3)), "mode 'circular'"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_know_is_named(net, reason):
    with pytest.raises(Unplanned, match=reason):
        plan(net, Layout.of(net), (1, 2, 2))


@needs_kernels
def test_a_net_whose_scores_depend_on_the_batch_is_left_to_torch():
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), norm, nn.Linear(6, 3))
    with pytest.raises(Unplanned, match="scored together"):
        Native(net, Layout.of(net), (1, 2, 2))


def test_a_hook_is_not_passed_over():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net[1].register_forward_hook(lambda *_: None)
    with pytest.raises(Unplanned, match="hook"):
        plan(net, Layout.of(net), (1, 2, 2))


def test_a_forward_pass_with_chance_or_memory_is_not_traced():
    class Skips(Concatenates):
        def forward(self, x):
            return self.a(x.flatten(1)) if random.random() < 0.5 else self.b(x.flatten(1))

    class Counts(Concatenates):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.a(x.flatten(1))

    for net in (Skips(), Counts()):
        with pytest.raises(Unplanned, match="random numbers, or changes its own"):
            plan(net, Layout.of(net), (1, 2, 2))


class Sees(nn.Module):
    """A network whose trace is not the whole truth, in one way each."""

    def __init__(self, way):
        super().__init__()
        self.way, self._calls = way, 0
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        if way == "patched":
            whole = self.a.forward
            self.a.forward = lambda x: 2 * whole(x)
        if way == "backward hook":
            self.b.register_full_backward_hook(lambda m, i, o: (2 * i[0],))
        if way == "weight hook":
            self.a.weight.register_hook(lambda g: 0 * g)

    def forward(self, x):
        x = x.flatten(1)
        if self.way == "no_grad":
            with torch.no_grad():
                x = self.a(x)
            return self.b(x)
        x = self.a(x)
        if self.way == "in place":
            y = F.silu(x, inplace=True)
            return self.b(x + y)
        if self.way == "means":
            return self.b(x.unsqueeze(2).mean(-1))
        return self.b(F.dropout(x, 0.5) if self.way == "always drops" else x)


@needs_kernels
@pytest.mark.parametrize("way", ["patched", "backward hook", "weight hook", "no_grad", "in place",
                                 "means", "always drops"])  # fmt: skip
def test_what_a_trace_does_not_see_is_left_to_torch(way):
    torch.manual_seed(0)
    net = Sees(way)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    assert isinstance(kernels_for("avx2", net, Layout.of(net), (1, 2, 2), False), str)
    plain_net = Sees("")
    found = kernels_for("avx2", plain_net, Layout.of(plain_net), (1, 2, 2), False)
    assert isinstance(found, Native)
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())


def test_a_change_in_place_of_a_shared_value_is_not_taken():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            x = self.a(x.flatten(1))
            y = F.relu_(x)
            return self.b(x + y)

    net = Shares()
    with pytest.raises(Unplanned, match="in place"):
        plan(net, Layout.of(net), (1, 2, 2))


def both(in_tmp, method, **settings):
    """The last states of a run by our kernels and of one by torch's."""
    base = {"clients": 4, "rounds": 1, "engine": "serial"}
    base |= {} if method == "fedsgd" else {"steps": 3, "batch": 16}
    base |= settings
    runs = [fedloom.run(method, kernels=k, out=in_tmp / k, **base) for k in ("native", "torch")]
    return [run.store.checkpoint()[0]["shared"].double() for run in runs]


SMALL = {"model": "conv4", "model_options": {"channels": [4, 8, 8, 16]}}
MIXED = {
    "model": "conv4", "model_options": {"channels": [4, 8, 8, 16], "norm": "static"},
    "capacities": "1:0.5,0.5:0.5",
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", {**SMALL, "momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}),
        ("fedavg", {**SMALL, "augment": "flip+crop:1"}),
        ("fedprox:mu=0.1", SMALL),
        ("fedprox:mu=0.1", {"rounds": 2, "momentum": 0.9, "clip": 0.5}),
        ("scaffold", {**SMALL, "rounds": 3}),
        ("ditto:lam=0.5", {"rounds": 2}),
        ("fedsgd", {}),
        ("fedrolex", {**SMALL, "capacities": "1:0.5,0.25:0.5"}),
        ("heterofl:mask=inf", {**MIXED, "partition": "classes:3", "augment": "crop:1"}),
        ("heterofl:mask=zero,mu=0.1", {**MIXED, "partition": "classes:3", "rounds": 2}),
        (
            "heterofl:mask=inf",
            {"partition": "classes:3", "model": lambda s, c: Drops(s, c), "capacities": "0.5"},
        ),
        ("feddse", {**MIXED, "rounds": 2}),
        ("fedgse-spl:scaler=true", {**MIXED, "rounds": 2, "public": "share:0.1"}),
        ("fedgse-csl", {**MIXED, "rounds": 2, "public": "share:0.1"}),
        ("fjord", {**SMALL, "capacities": "1:0.5,0.5:0.5"}),
        ("depthfl", {**SMALL, "capacities": "1:0.5,0.25:0.5"}),
        ("pfedme", SMALL),
        ("fedmeta-maml", {**SMALL, "test_share": 0.4}),
        ("fedmeta-metasgd", {"test_share": 0.4}),
        ("fedavg", {"model": lambda shape, classes: Drops(shape, classes)}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_rules_end_where_torch_ends(in_tmp, method, settings):
    native, exact = both(in_tmp, method, **settings)
    assert float((native - exact).norm() / exact.norm()) < 2e-6


@needs_kernels
def test_a_run_says_which_kernels_computed_it_and_why(in_tmp):
    plain_run = fedloom.run("fedavg", clients=3, rounds=1, out=in_tmp / "a")
    assert plain_run.kernels.endswith("whole steps")
    masked = fedloom.run("heterofl", mask="inf", clients=3, rounds=1, out=in_tmp / "e")
    assert masked.kernels.endswith("whole steps")
    meta = fedloom.run("fedmeta-maml", clients=3, rounds=1, test_share=0.4, out=in_tmp / "b")
    assert meta.kernels.endswith("whole steps")
    pfedme = fedloom.run("pfedme", clients=3, rounds=1, out=in_tmp / "d")
    assert "through autograd: MoreauEnvelope takes derivatives itself" in pfedme.kernels
    other = fedloom.run("fedavg", clients=3, rounds=1, model=lambda s, c: Many(s, c),
                        out=in_tmp / "c")  # fmt: skip
    assert other.kernels == "torch: it uses 'cat'"


class Drops(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), 8), nn.ReLU(),
                         nn.Dropout(0.3), nn.Linear(8, classes))  # fmt: skip


class Many(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Linear(int(np.prod(shape)), 5), nn.Linear(int(np.prod(shape)), 5)
        self.out = nn.Linear(10, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(torch.cat([self.a(x), self.b(x)], 1))


@needs_kernels
@pytest.mark.filterwarnings("ignore:This CPU has no bf16")
def test_native_kernels_that_can_not_be_had_are_refused_in_a_sentence(in_tmp):
    with pytest.raises(FedloomError, match=r"it uses 'cat'.*Leave it out"):
        fedloom.run("fedavg", clients=3, rounds=1, model=lambda s, c: Many(s, c), kernels="native")
    with pytest.raises(FedloomError, match="fp32, not in bf16"):
        fedloom.run("fedavg", clients=3, rounds=1, precision="bf16", kernels="native")
    with pytest.raises(FedloomError, match="auto"):
        fedloom.run("fedavg", clients=3, rounds=1, kernels="nativ")


@needs_kernels
def test_a_resumed_run_keeps_its_kernels(in_tmp):
    fedloom.run("fedavg", clients=3, rounds=1, kernels="torch", out=in_tmp / "a")
    first = fedloom.run(resume=True, rounds=2, out=in_tmp / "a")
    assert first.kernels.startswith("torch")
    with pytest.raises(FedloomError, match="started with kernels=torch, not auto"):
        fedloom.run(resume=True, rounds=3, kernels="auto", out=in_tmp / "a")
    whole = fedloom.run("fedavg", clients=3, rounds=3, out=in_tmp / "b")
    fedloom.run("fedavg", clients=3, rounds=1, out=in_tmp / "c")
    again = fedloom.run(resume=True, rounds=3, out=in_tmp / "c")
    states = [r.store.checkpoint()[0]["shared"] for r in (whole, again)]
    assert torch.equal(*states)


@needs_kernels
@pytest.mark.parametrize("asked", ["auto", "native"])
def test_a_resumed_run_keeps_its_instruction_set(asked, monkeypatch):
    """Also where the CPU has a better one, or it was begun by a version that took another."""
    cpu, last, first = torch.device("cpu"), SETS[HERE[-1]][0], SETS[HERE[0]][0]
    monkeypatch.setattr(engine_kernels, "instructions", lambda: HERE[-1])
    monkeypatch.setattr(engine_kernels, "right", lambda number: True)
    assert resolve(asked, cpu, "fp32", first) == first
    assert resolve("native", cpu, "fp32", f"{first}+torch") == first
    assert resolve("native", cpu, "fp32", "torch") == last
    monkeypatch.setattr(engine_kernels, "right", lambda number: number != HERE[0])
    with pytest.raises(FedloomError, match=f"kernels for {first}, which can't.*--kernels {last}"):
        resolve(asked, cpu, "fp32", f"{first}+torch")
    with pytest.raises(FedloomError, match=f"--kernels {last}"):
        resolve(first, cpu, "fp32", first)
    assert resolve(last, cpu, "fp32", first) == last  # a fork, as the sentence says


@needs_kernels
def test_a_run_is_not_resumed_with_other_kernels_unasked(in_tmp, monkeypatch):
    fedloom.run("fedavg", clients=3, rounds=1, out=in_tmp / "a")
    monkeypatch.setattr(engine_kernels, "right", lambda number: False)
    with pytest.raises(FedloomError, match=r"was computed by.*--kernels \w+"):
        fedloom.run(resume=True, rounds=2, out=in_tmp / "a")
    went_on = fedloom.run(fork=in_tmp / "a", rounds=2, kernels="torch", out=in_tmp / "b")
    assert went_on.kernels.startswith("torch")


def test_without_a_compiler_torch_computes_everything(in_tmp, monkeypatch):
    monkeypatch.setattr(native_library, "library", lambda: None)
    monkeypatch.setattr(engine_kernels, "library", lambda: None)
    native_library.instructions.cache_clear()
    try:
        assert resolve("auto", torch.device("cpu"), "fp32", None) == "torch"
        with pytest.raises(FedloomError, match=r"without a C\+\+ compiler"):
            resolve("native", torch.device("cpu"), "fp32", None)
        assert fedloom.run("fedavg", clients=3, rounds=1).kernels.startswith("torch")
    finally:
        native_library.instructions.cache_clear()


@needs_kernels
@pytest.mark.parametrize(("has", "width", "kernel", "ours"), [
    (True, 64, 5, False), (True, 64, 3, True), (True, 32, 5, True), (False, 64, 5, True),
])  # fmt: skip
def test_wide_networks_are_left_to_torch_where_it_has_avx512(monkeypatch, has, width, kernel, ours):
    """Unless ours have fewer products to compute."""
    monkeypatch.setattr(engine_kernels, "torch_has_avx512", lambda: has)
    wide = nn.Conv2d(width, width, kernel, padding=kernel // 2)
    net = nn.Sequential(nn.Conv2d(1, width, 1), wide, nn.Flatten(), nn.Linear(width * 36, 10))
    layout = Layout.of(net)
    name = resolve("auto", torch.device("cpu"), "fp32", None)
    found = kernels_for(name, net, layout, (1, 6, 6), False)
    assert isinstance(found, Native) == ours
    asked = resolve("native", torch.device("cpu"), "fp32", None)
    assert isinstance(kernels_for(asked, net, layout, (1, 6, 6), False), Native)


def test_kernels_are_for_cpus():
    assert resolve("auto", torch.device("cuda"), "fp32", None) == "torch"


@needs_kernels
@pytest.mark.parametrize("number", HERE, ids=[SETS[k][0] for k in HERE])
def test_the_self_test_passes_and_notices_an_error(number, monkeypatch):
    from fedloom.native import selftest

    assert selftest.passes(number)
    whole = Native.__call__
    monkeypatch.setattr(Native, "__call__", lambda *a, **k: whole(*a, **k) * 1.001)
    assert not selftest.passes(number)


@needs_kernels
@pytest.mark.parametrize(("has", "wide", "passes", "found"), [
    (7, 1, True, "avx512"), (7, 0, True, "avx2"), (7, 1, False, "avx2"), (3, 0, True, "avx2"),
])  # fmt: skip
def test_avx512_is_used_where_its_units_are_wide_and_it_computes_the_right_thing(
    monkeypatch, has, wide, passes, found
):
    class Compiled:
        def fl_supported(self):
            return has

        def fl_wide(self):
            return wide

    monkeypatch.setattr(native_library, "library", Compiled)
    monkeypatch.setattr(native_library, "right", lambda number: passes)
    assert SETS[native_library.instructions.__wrapped__()][0] == found


@needs_kernels
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what a CPU has")
def test_units_are_wide_since_ice_lake_and_zen_5():
    said = [line.split(":")[-1].split() for line in Path("/proc/cpuinfo").read_text().splitlines()]
    flags = set(next((words for words in said if "avx2" in words), ()))
    since = {"GenuineIntel": "avx512_vbmi2", "AuthenticAMD": "avx512_vp2intersect"}
    wide = [has for maker, has in since.items() if [maker] in said and {"avx512f", has} <= flags]
    assert bool(native_library.library().fl_wide()) == bool(wide)


@needs_kernels
def test_kernels_are_tried_once_and_those_that_failed_again(in_tmp, monkeypatch):
    from fedloom.native import selftest

    monkeypatch.setenv("FEDLOOM_STATE", str(in_tmp / "state"))
    number, right = HERE[0], native_library.right.__wrapped__
    monkeypatch.setattr(native_library, "AVX2", None)  # whichever is here has to be tried
    tried = []

    def passes(number, verdict):
        tried.append(number)
        return verdict

    monkeypatch.setattr(selftest, "passes", lambda number: passes(number, False))
    assert not right(number)
    assert not right(number)
    assert len(tried) == 2
    monkeypatch.setattr(selftest, "passes", lambda number: passes(number, True))
    assert right(number)
    assert right(number)
    assert len(tried) == 3
    monkeypatch.setattr(native_library, "_fingerprint", lambda number: "of another CPU")
    assert right(number)
    assert len(tried) == 4
    (in_tmp / "state" / "kernels").write_bytes(b"\xff\xfe\n")  # a damaged list is no list
    assert right(number)
    assert right(number)
    assert len(tried) == 5
    monkeypatch.setattr(native_library, "state_folder", nowhere)
    assert right(number)  # a place that can't be written costs another try, no more
    assert len(tried) == 6


def nowhere():
    raise RuntimeError("Could not determine home directory.")


@needs_kernels
@pytest.mark.parametrize("name", ["mlp", "lenet", "conv4", "resnet18", "resnet34"])
def test_all_built_in_models_are_known(name):
    options = {"width": 8} if name.startswith("resnet") else {}
    net = build(name, (3, 32, 32), 10, options=options)
    for norm in ("batch", "static", "group", "none") if name in ("conv4", "resnet18") else (None,):
        if norm:
            net = build(name, (3, 32, 32), 10, options={**options, "norm": norm})
        assert isinstance(
            kernels_for(SETS[HERE[0]][0], net, Layout.of(net), (3, 32, 32), False), Native
        )


def test_flat_rows_carry_gradients_to_every_tensor():
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    layout = Layout.of(net)
    tensors = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    row = flat(layout, tensors)
    assert torch.equal(row, layout.flatten(net))
    (row * torch.arange(len(row))).sum().backward()
    wanted = layout.views(torch.arange(len(row), dtype=torch.float32))
    assert all(torch.equal(tensors[n].grad, wanted[n]) for n in tensors)


@needs_kernels
def test_the_stacked_engine_does_not_take_the_kernels_silently(in_tmp):
    given = {"clients": 3, "rounds": 1, "steps": 1}
    for kernels in ("native", SETS[HERE[-1]][0]):
        with pytest.raises(FedloomError, match="stacked engine trains many as one"):
            fedloom.run("fedavg", **given, engine="stacked", kernels=kernels)
    stacked = fedloom.run("fedavg", **given, engine="stacked")
    assert "stacked engine" in stacked.kernels
    assert stacked.store.checkpoint()[1]["kernels"] == "torch"
    fedloom.run("fedavg", **given, engine="serial", out="run")
    with pytest.raises(FedloomError, match="Resume with another engine"):
        fedloom.run("fedavg", **given | {"rounds": 2}, engine="stacked", out="run", resume=True)


@needs_kernels
@pytest.mark.parametrize("method", ["heterofl", "fjord"])
def test_narrow_parts_of_a_wide_network_read_the_same_images(in_tmp, monkeypatch, row, method):
    """With AVX-512 torch runs a whole network of wide convolutions (but for those that take fewer
    products), on images that lie colour by colour of each pixel, and our kernels run a weak
    client's part of it."""
    monkeypatch.setattr(engine_kernels, "torch_has_avx512", lambda: True)
    monkeypatch.setattr(native_plan, "_tile", lambda step: 0)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (60, 3, 12, 12), dtype=np.uint8), np.arange(60) % 3
    settings = {"model": "conv4", "model_options": {"channels": [64] * 4}, "clients": 3,
                "capacities": "1:0.4,0.25:0.6", "rounds": 1, "participation": 1.0, "batch": 8,
                "engine": "serial"}  # fmt: skip
    both = [
        fedloom.run(method, data=data, kernels=kernels, out=in_tmp / kernels, **settings)
        for kernels in ("auto", "torch")
    ]
    assert "torch" in both[0].kernels
    assert torch.allclose(row(both[0]), row(both[1]), atol=1e-4)
