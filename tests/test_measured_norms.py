"""Norm statistics that sub-models tracked together fit none of them: where clients train
sub-models they are measured on training data before anything is looked at or scored."""

import math

import numpy as np
import pytest
import torch
from native_nets import needs_kernels
from torch import nn

from fedloom.data.dataset import from_arrays
from fedloom.data.public import PublicSet
from fedloom.engine.base import Held
from fedloom.engine.batches import Source
from fedloom.engine.worker import Worker
from fedloom.experiment.config import make_config
from fedloom.experiment.setup import prepare
from fedloom.layout import Layout
from fedloom.methods.registry import find
from fedloom.models import build
from fedloom.models.counts import forward_macs
from fedloom.models.norm import has_measured_norm, norm2d, settle
from fedloom.select import Ask, ByGradient, Channels, Last, Ordered
from fedloom.select.scores import activations
from fedloom.streams import stream

SMALL = {"channels": [4, 4, 8, 8]}


def images(n=40, shape=(3, 6, 6)):
    return 2 * torch.randn(n, *shape, generator=torch.Generator().manual_seed(3)) + 1


class OwnNorm(nn.BatchNorm2d):
    """A user's subclass."""


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, OwnNorm, nn.SyncBatchNorm])
def test_any_class_of_tracked_norm_is_measured(kind):
    norm, x = kind(3), images()
    norm.running_mean.fill_(9.0)
    settle(norm, x.split(20), every=True)
    halves = torch.stack([part.mean((0, 2, 3)) for part in x.split(20)])
    spread = torch.stack([part.var((0, 2, 3)) for part in x.split(20)])
    torch.testing.assert_close(norm.running_mean, halves.mean(0))
    torch.testing.assert_close(norm.running_var, spread.mean(0))
    assert (norm.momentum, norm.training) == (0.1, False)


def test_norms_of_vectors_and_of_single_images_are_measured_too():
    flat, x = nn.BatchNorm1d(3), images(40, (3,))
    settle(flat, [x], every=True)
    torch.testing.assert_close(flat.running_mean, x.mean(0))
    each, x = nn.InstanceNorm2d(3, track_running_stats=True), images()
    settle(each, x.split(20), every=True)  # it takes no momentum=None
    torch.testing.assert_close(each.running_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(each.running_var, x.var((2, 3)).mean(0))


def test_without_sub_models_only_static_norms_are_measured():
    norm = nn.BatchNorm2d(3)
    settle(norm, [images()])
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert not has_measured_norm(norm, every=False)
    assert not has_measured_norm(nn.BatchNorm2d(3, track_running_stats=False), every=True)


def test_a_norm_that_is_used_twice_counts_both_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(x), self.norm(x + 10)

    net, x = Twice(), images()
    settle(net, [x], every=True)
    torch.testing.assert_close(net.norm.running_mean, x.mean((0, 2, 3)) + 5)


def test_measuring_is_without_dropout_and_leaves_frozen_norms_alone():
    class Net(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[2].eval()  # as users freeze a norm
            return self

    net, x = Net(nn.Dropout(0.5), nn.BatchNorm2d(3), nn.BatchNorm2d(3)), images()
    settle(net, [x], every=True)
    torch.testing.assert_close(net[1].running_mean, x.mean((0, 2, 3)))
    assert torch.equal(net[2].running_mean, torch.zeros(3))


def test_an_image_that_is_left_over_is_measured_with_the_batch_before():
    norm, x = nn.BatchNorm1d(3), images(5, (3,))
    settle(norm, x.split(4), every=True)  # alone, it would have no variance
    torch.testing.assert_close(norm.running_mean, x.mean(0))


def test_one_image_alone_is_measured_as_two_of_it(quick):
    """A client may have no more, and FedGSE may find no more that is like its data."""
    (x,), norm = images(1, (3,)), nn.BatchNorm1d(3)
    settle(norm, [x.unsqueeze(0)], every=True)
    assert torch.equal(norm.running_mean, x)
    assert torch.equal(norm.running_var, torch.zeros(3))
    result = quick("feddse", model=WithNorm, capacities="0.5", samples=1, rounds=1)
    assert np.isfinite(result.summary["loss"])


def test_without_images_the_statistics_stay():
    norm = nn.BatchNorm2d(3)
    norm.running_mean.fill_(2.0)
    settle(norm, [], every=True)
    assert torch.equal(norm.running_mean, torch.full((3,), 2.0))


@pytest.mark.parametrize("name", ["heterofl", "feddse", "fedgse-spl", "fjord", "depthfl"])
def test_plain_batch_norm_does_as_well_as_static_norm(quick, name):
    """Training is the same, so scores are if statistics are measured; and choices are if they are
    where selectors look."""
    more = {"public": "share:0.1"} if name == "fedgse-spl" else {}
    plain, static = (
        quick(name, model="conv4", capacities="1:0.5,0.5:0.5", rounds=2, eval_every=2, steps=3,
              lr=0.1, model_options={**SMALL, "norm": norm}, **more)
        for norm in ("batch", "static")
    )  # fmt: skip
    for measure in ("test_loss", "loss", "micro", "macs"):
        assert plain.summary[measure] == static.summary[measure], measure
    for key, value in static.model().state_dict().items():
        torch.testing.assert_close(plain.model().state_dict()[key], value)
    assert plain.measured


def bright_and_dark():
    """Two clients, whose images differ in brightness alone."""
    noise = np.random.default_rng(0).normal(size=(30, 1, 4, 4)).astype(np.float32)
    return from_arrays(np.concatenate([noise + 5, noise - 5]), np.repeat([0, 1], 30))


class TwoSigns(nn.Module):
    """A channel for what is bright and one for what is dark."""

    def __init__(self, shape, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 1, bias=False), norm2d("static", 2)
        self.out = nn.Linear(2, classes)
        self.conv.weight.data.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
        self.norm.weight.data.copy_(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def looked(kernels, **options):
    """A model, and what clients choose at capacity ½ of one."""
    settings = {"clients": 2, "partition": "classes:1", "capacities": "0.5", "engine": "serial",
                "kernels": kernels, "test_share": 0.0, **options}  # fmt: skip
    config, made = make_config({**settings, "method": "feddse"}, find("feddse"))
    x = prepare(config, made.build(), data=bright_and_dark(), model=TwoSigns)
    setting = x.engine.setting

    def chosen(row, client):
        together = (0, 1) if setting.shares_norms else ()
        found = x.engine.worker._chosen(Held(client, 1, x.method.select), row, together)
        return setting.channels.kept(setting.layout, found.index)[0].tolist()

    return x.state.server.shared, chosen


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_kernels)])
def test_a_shared_model_is_looked_at_with_norms_of_all_participants_data(kernels):
    """With those of its own data, a norm takes away what sets a client apart."""
    row, chosen = looked(kernels)
    assert sorted([chosen(row, 0), chosen(row, 1)]) == [[0], [1]]
    row, chosen = looked(kernels, norms="own")
    assert chosen(row, 0) == chosen(row, 1) == [1]  # the larger weight of the norm


def test_who_takes_part_measures_the_norms_and_pays_for_it(quick):
    """Statistics of 4 + 4 + 8 + 8 channels travel both ways; whoever has all of the model does not
    look, and measures its norms all the same."""
    settings = {"model": "conv4", "capacities": "1:0.5,0.5:0.5", "rounds": 2, "clients": 4,
                "eval_every": 2, "participation": 1.0}  # fmt: skip
    model = {**SMALL, "norm": "static"}
    shared, own = (quick("feddse", norms=norms, model_options=model, **settings)
                   for norms in ("shared", "own"))  # fmt: skip
    for ours, theirs in zip(shared.records, own.records, strict=True):
        for way in ("bytes_up", "bytes_down"):
            assert ours[way] - theirs[way] == 4 * 2 * 24 * 4
        strong, before = ours["devices"]["1"], theirs["devices"]["1"]
        each = forward_macs(build("conv4", (1, 8, 8), 10, options=model), (1, 8, 8))
        samples = math.ceil(shared.clients["train_samples"].sum() / 4)
        assert strong["macs"] - before["macs"] == samples * each
    told = [line["name"] for line in shared.store.manifest()["leaves a client, each round"]]
    assert "norms" in told
    for more in ({"capacities": "1"}, {"model_options": {**SMALL, "norm": "group"}},
                 {"norms": "own"}, {"private": "head"}):  # fmt: skip
        found = quick("feddse", **{**settings, "model_options": model, **more}).store.manifest()
        assert "norms" not in [line["name"] for line in found["leaves a client, each round"]]


@needs_kernels
def test_norms_are_measured_again_when_the_model_has_changed():
    row, chosen = looked("native")
    before = chosen(row, 0)
    other = row.clone()
    other[:2] *= -1  # the channels change places
    assert chosen(other, 0) != before
    assert chosen(row, 0) == before


class WithNorm(nn.Module):
    """A user's model with another norm than fedloom's own."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(shape[0] * shape[1] * shape[2], 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.first(x.flatten(1)))))


def test_a_users_model_is_measured_on_training_data_alone(quick, monkeypatch):
    read = []
    measure = Worker._measure
    monkeypatch.setattr(
        Worker,
        "_measure",
        lambda self, net, some: read.append(some.tolist()) or measure(self, net, some),
    )
    result = quick("heterofl", model=WithNorm, capacities="0.5", rounds=1, newcomers=2)
    from fedloom.experiment.config import make_config
    from fedloom.experiment.setup import load_dataset, make_federation
    from fedloom.methods.registry import find

    config, _ = make_config(result.config, find("heterofl"))
    federation = make_federation(config, load_dataset(config))
    known = np.concatenate([federation.indices(c, "train") for c in range(6)])
    own = [federation.indices(c, "train").tolist() for c in range(6)]
    # The common test set, clients, each one's sub-model, newcomers.
    assert read == [known.tolist(), known.tolist(), *own, known.tolist()]
    model = result.model(factory=WithNorm)
    data = federation.dataset
    source = Source(data.x, data.y, data.mean, data.std, torch.device("cpu"))
    with torch.no_grad():
        hidden = model.first(source.batch(known).x.flatten(1))
    assert (model.norm.running_mean - hidden.mean(0)).abs().max() < 0.05  # a mean over batches
    assert (model.norm.running_var / hidden.var(0) - 1).abs().max() < 0.1


def test_at_full_capacity_nothing_is_measured(quick, row):
    result = quick("heterofl", model=WithNorm, rounds=1)
    plain = quick("fedavg", model=WithNorm, rounds=1)
    assert not result.measured
    assert torch.equal(row(result), row(plain))
    assert result.summary["test_loss"] == plain.summary["test_loss"]
    model = result.model(factory=WithNorm)
    layout = Layout.of(model)
    assert torch.equal(layout.flatten(model), row(result))  # statistics are those that were tracked


def test_show_says_that_statistics_were_measured(quick, capsys):
    from fedloom.report.terminal import print_result

    print_result(quick("heterofl", model=WithNorm, capacities="0.5", rounds=1))
    assert "Norm statistics were measured on training data" in capsys.readouterr().out
    print_result(quick("heterofl", model=WithNorm, rounds=1))
    assert "Norm statistics" not in capsys.readouterr().out


def test_somebody_new_gets_statistics_of_its_own_images(quick):
    result = quick("heterofl", model=WithNorm, capacities="0.5", rounds=1)
    x = np.random.default_rng(0).uniform(0, 255, (30, 1, 8, 8)).astype(np.uint8)
    model = result.newcomer_model(x, np.arange(30) % 10, factory=WithNorm)
    with torch.no_grad():
        hidden = model.first(result.normalise(x).flatten(1))
    torch.testing.assert_close(model.norm.running_mean, hidden.mean(0), atol=1e-4, rtol=1e-4)


def ask_for(module, public=None, last=None):
    layout = Layout.of(module)
    return Ask(
        round=1, client=0, capacity=0.5, layout=layout, row=layout.flatten(module), module=module,
        stream=lambda *names: stream(0, *names, 1, 0), channels=Channels.of(module, (1, 4, 4)),
        public=public, last=last,
    )  # fmt: skip


def test_selectors_look_at_models_whose_statistics_were_measured():
    torch.manual_seed(0)
    module, x = WithNorm((1, 4, 4), 3), images(512, (1, 4, 4))
    wrong = torch.full((8,), 50.0)  # with these, no unit would be active
    module.norm.running_mean.copy_(wrong)
    (found,) = activations(module, Channels.of(module, (1, 4, 4)), x)
    assert found.min() > 0.1
    mean = module.first(x.flatten(1)).mean(0).detach()
    torch.testing.assert_close(module.norm.running_mean, mean, atol=1e-5, rtol=1e-4)
    # The last sub-model, whose predictions label public samples.
    module.norm.running_mean.copy_(wrong)
    ask = ask_for(module)
    chosen = Ordered().choose(ask)
    ask = ask_for(module, PublicSet(x, None, "test"), Last(ask.row[chosen.index], chosen.index))
    labels = ByGradient(labels="csl", samples=512).similar(ask, ask.channels).y
    assert len(labels.unique()) > 1
