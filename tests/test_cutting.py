"""A sub-model computes what the whole model does without the other channels: tried with numbers
once, in evaluation and in training, and refused by the layer's name where it does not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.errors import FedloomError
from fedloom.models import build
from fedloom.models.exits import Exits
from fedloom.select import Channels
from fedloom.select.verify import verify

SHAPE = (3, 16, 16)
BUILT_IN = [
    *[("mlp", {"hidden": [12, 8]}), ("lenet", {})],
    *[("conv4", {"channels": [8, 8, 16, 16], "norm": n}) for n in ("batch", "static", "none")],
    *[("resnet18", {"width": 16, "norm": n}) for n in ("batch", "static", "group")],
]


class Net(nn.Module):
    """Two blocks; cases put something between them."""

    def __init__(self, shape=SHAPE, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.between = nn.Identity()
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, classes)
        self.aux = nn.Linear(8, classes)

    def forward(self, x):
        x = self.middle(F.relu(self.norm(self.stem(x))))
        return self.out(F.relu(self.last(self.between(x))).mean((2, 3)))

    def middle(self, x):
        return x


def tried(module, shape=SHAPE):
    channels = Channels.of(module, shape)
    verify(channels, shape)
    return channels


def net(middle=None, between=None):
    made = type("Own", (Net,), {} if middle is None else {"middle": middle})()
    if between is not None:
        made.between = between
    return made


@pytest.mark.parametrize(("name", "options"), BUILT_IN)
def test_built_in_models_are_cut_right(name, options):
    tried(build(name, SHAPE, 5, options=options))


PERMUTED = torch.tensor([7, 2, 1, 0, 3, 4, 6, 5])
RIGHT = {
    "flipped images": lambda self, x: x.flip(3),
    "rolled images": lambda self, x: x.roll((1, 2), (2, 3)),
    "a pixel": lambda self, x: x + x[:, :, 0, 0][:, :, None, None],
    "gates": lambda self, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "shuffled groups": lambda self, x: x.view(len(x), 2, -1, 16, 16).transpose(1, 2).reshape(
        x.shape
    ),
    "dropout of maps": lambda self, x: F.dropout2d(x, 0.5, self.training),
    "noise": lambda self, x: x + torch.randn_like(x) if self.training else x,
    "mixed images": lambda self, x: x + x[torch.randperm(len(x))] if self.training else x,
    "dropped paths": lambda self, x: x * (torch.rand(len(x), 1, 1, 1) > 0.5),
}  # fmt: skip


@pytest.mark.parametrize("middle", RIGHT.values(), ids=RIGHT)
def test_what_leaves_channels_where_they_are_is_cut(middle):
    channels = tried(net(middle))
    assert [(g.name, g.size) for g in channels.groups][-1] == ("last", 8)


WRONG = {
    "flip": lambda self, x: x.flip(1),
    "roll": lambda self, x: x.roll(1, 1),
    "index": lambda self, x: x[:, PERMUTED],
    "index_select": lambda self, x: x.index_select(1, PERMUTED),
    "select": lambda self, x: x + x[:, 0].unsqueeze(1),
    "mul": lambda self, x: x * x.shape[1],  # only the numbers tell
}


@pytest.mark.parametrize("when", ["always", "training", "evaluation"])
@pytest.mark.parametrize("name", WRONG)
def test_what_moves_channels_is_refused_in_either_mode_by_name(name, when):
    def middle(self, x):
        there = when == "always" or self.training == (when == "training")
        return WRONG[name](self, x) if there else x

    mode = " in training" if when == "training" else ""
    message = rf"Own can't be cut.*forward\(\) after layer 'norm'{mode}, its operation '{name}'"
    with pytest.raises(FedloomError, match=message):
        tried(net(middle))


def test_the_layer_in_which_values_part_is_named():
    class Scale(nn.Module):
        def forward(self, x):
            return x / x.shape[1] ** 0.5

    with pytest.raises(FedloomError, match=r"in layer 'between', its operation 'div' gives other"):
        tried(net(between=Scale()))


def test_sizes_that_forward_has_as_numbers_are_refused():
    with pytest.raises(FedloomError, match=r"with half of its channels it fails.*x\.flatten"):
        tried(net(lambda self, x: x.view(-1, 8, 16, 16)))


def test_a_channel_that_is_cut_to_the_wrong_place_is_noticed(monkeypatch):
    """A trace that is wrong about one tensor."""
    channels = Channels.of(net(), SHAPE)
    dims = dict(channels.dims)
    stem, last = dims["stem.bias"], dims["last.bias"]
    dims["stem.bias"], dims["last.bias"] = last, stem
    object.__setattr__(channels, "dims", dims)
    with pytest.raises(FedloomError, match=r"in layer 'stem', its operation 'convolution'"):
        verify(channels, SHAPE)


def test_group_norm_chooses_the_same_channels_of_every_group():
    channels = tried(net(between=nn.GroupNorm(2, 8)))
    assert [(g.name, g.size) for g in channels.groups] == [("stem", 4), ("last", 8)]


def test_models_stay_as_they_were():
    module = net()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    state = torch.random.get_rng_state()
    tried(module.eval())
    assert not module.training
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


# -- branches for training ------------------------------------------------------------------------


class Helped(Net):
    """A second classifier that only helps in training."""

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        logits = self.out(F.relu(self.last(x)).mean((2, 3)))
        return logits + 0.3 * self.aux(x.mean((2, 3))) if self.training else logits


class Two(Helped):
    def forward(self, x):
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


def test_layers_of_a_branch_for_training_are_cut(quick):
    small = tried(Helped()).build((4, 4))
    assert small.aux.weight.shape == (5, 4)
    result = quick("heterofl", model=Helped, capacities="0.5", rounds=1, steps=2)
    assert result.summary["rounds"] == 1
    before = build(Helped, (1, 8, 8), 10).aux.weight
    after = result.model(factory=Helped).aux.weight
    assert not torch.equal(before[:, :4], after[:, :4])
    assert torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("method", ["fedavg", "heterofl"])
def test_a_model_that_returns_more_in_training_is_refused(quick, method):
    with pytest.raises(FedloomError, match=r"one logit per class.*returned tuple in training"):
        quick(method, model=Two)
    with pytest.raises(FedloomError, match="in training it returns tuple"):
        Channels.of(Two(), SHAPE)


def test_a_branch_for_training_that_fails_is_told(quick):
    class Fails(Net):
        def middle(self, x):
            return self.stem(x) if self.training else x

    with pytest.raises(FedloomError, match=r"can't take images of shape \(1, 8, 8\) in training"):
        quick("fedavg", model=Fails)


# -- exits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exits", ["3x4", 0, 4, 2.5, [1]])
def test_exits_are_there_or_not(quick, exits):
    with pytest.raises(FedloomError, match=r"exits=.* is not valid: give true"):
        build("conv4", SHAPE, 5, options={"exits": exits})
    assert isinstance(build("conv4", SHAPE, 5, options={"exits": True}), Exits)


def test_exits_are_for_depthfl(quick):
    with pytest.raises(FedloomError, match="exits=False would do nothing: depthfl"):
        quick("depthfl", model="conv4", model_options={"exits": False})
    with pytest.raises(FedloomError, match="Leave exits out"):
        quick("fedavg", model="conv4", model_options={"exits": True})
