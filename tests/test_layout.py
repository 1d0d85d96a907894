import pytest
import torch
from torch import nn

from fedloom.engine.resident import Resident
from fedloom.errors import FedloomError
from fedloom.layout import Columns, Layout
from fedloom.models import MODELS, build


class Odd(nn.Module):
    """Buffers of several kinds, a frozen parameter and a tied one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


NORMED = [name for name in MODELS if name not in ("mlp", "lenet", "gru")]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("lenet", {}),
        *[(n, {"norm": norm}) for n in NORMED for norm in ("batch", "static", "group", "none")],
    ],
)
def test_round_trip_is_exact_for_every_model(name, options):
    options = dict(options)
    if name.startswith("resnet"):
        options["width"] = 8
    if name == "conv4":
        options["channels"] = (8, 16, 8, 8)
    module = build(name, (3, 32, 32), 10, seed=1, options=options)
    module.train()(torch.randn(4, 3, 32, 32))  # moves the batch statistics
    layout = Layout.of(module)
    row = layout.flatten(module)
    other = layout.load(build(name, (3, 32, 32), 10, seed=2, options=options), row)
    for key, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    assert torch.equal(layout.flatten(other), row)


def test_trainable_columns_come_first_then_frozen_then_buffers():
    layout = Layout.of(Odd())
    kinds = [e.kind for e in layout.entries]
    assert kinds == sorted(kinds, key=["param", "extra", "frozen", "buffer"].index)
    # the tied weight stands once: 16 + 4 + 4 + 4 (norm) + 4
    assert layout.trainable == 16 + 4 + 4 + 4 + 4
    # + frozen 3, running mean and variance, the counter of batches; no scratch buffer
    assert layout.size == layout.trainable + 3 + 4 + 4 + 1


def test_integer_buffers_survive_the_row():
    module = Odd().train()
    for _ in range(3):
        module(torch.randn(5, 4))
    layout = Layout.of(module)
    back = layout.load(Odd(), layout.flatten(module))
    assert back.norm.num_batches_tracked == 3
    assert back.norm.num_batches_tracked.dtype == torch.int64


def test_an_averaged_counter_is_rounded_not_truncated():
    """Counters of 2, 3 and 3 batches average to 2.67: three."""
    layout = Layout.of(Odd())
    row = layout.flatten(Odd())
    layout.views(row, ("buffer",))["norm.num_batches_tracked"].fill_(8 / 3)
    assert layout.load(Odd(), row).norm.num_batches_tracked == 3
    resident = Resident(Odd(), layout, torch.device("cpu"))
    resident.load(row)
    assert resident.module.norm.num_batches_tracked == 3


def test_a_resident_module_reads_back_what_training_moved():
    layout = Layout.of(Odd())
    resident = Resident(Odd(), layout, torch.device("cpu"))
    resident.load(layout.flatten(Odd()))
    resident.module.train()(torch.randn(5, 4) + 3)
    read = layout.views(resident.read(), ("buffer",))
    assert read["norm.num_batches_tracked"] == 1
    assert torch.equal(read["norm.running_mean"], resident.module.norm.running_mean)
    assert read["norm.running_mean"].abs().min() > 0


def test_extra_columns_stand_with_the_layer_of_their_weight():
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    layout = Layout.of(module, ["alpha"])
    assert layout.trainable == 2 * 13
    assert len(layout.columns("head")) == 8  # four weights and their four rates
    row = layout.flatten(module, {"alpha": 0.25})
    views = layout.views(row, ("extra",))
    assert torch.equal(views["alpha/2.weight"], torch.full((1, 3), 0.25))


def test_parts():
    layout = Layout.of(build("lenet", (3, 32, 32), 10))
    size = {part: len(layout.columns(part)) for part in ("all", "none", "head", "head:2", "conv1")}
    assert size == {"all": 62006, "none": 0, "head": 850, "head:2": 850 + 84 * 121, "conv1": 456}
    assert len(layout.columns("body")) == 62006 - 850
    assert layout.columns("body").others() == layout.columns("head")
    assert len(layout.columns("conv1+out")) == 456 + 850
    assert len(layout.columns("fc1.weight")) == 400 * 120
    assert layout.columns("all").everything


def test_a_name_is_that_of_one_layer_not_of_all_that_begin_with_it():
    module = nn.Sequential()
    for name in ("fc1", "fc10", "fc1b"):
        module.add_module(name, nn.Linear(1, 1))
    layout = Layout.of(module)
    assert layout.columns("fc1").ranges == ((0, 2),)
    assert layout.columns("fc10").ranges == ((2, 4),)
    assert layout.columns("fc1.bias").ranges == ((1, 2),)
    assert layout.columns("not fc1").ranges == ((2, 6),)


def test_frozen_layers_and_statistics_stand_with_their_part():
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1), nn.Linear(1, 1))
    module[0].requires_grad_(False)
    layout = Layout.of(module)
    # trainable: norm 0..1, third 2..3, last 4..5; frozen: first 6..7; statistics of the norm 8..10
    assert layout.layers == ("1", "2", "3", "0")
    assert layout.columns("0").ranges == ((6, 8),)
    assert layout.columns("1").ranges == ((0, 2), (8, 11))
    assert layout.columns("head:3").ranges == ((2, 8),)
    assert layout.columns("body:3").ranges == ((0, 2), (8, 11))


def test_pieces_of_the_trainable_columns_are_their_views():
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
    layout = Layout.of(module, ["alpha"])
    row = torch.arange(float(layout.size))
    pieces, views = layout.tensors(row[: layout.trainable]), layout.views(row, ("param", "extra"))
    assert list(pieces) == list(views)
    assert all(torch.equal(pieces[name], view) for name, view in views.items())
    assert torch.equal(pieces["alpha/0.weight"] - pieces["0.weight"], torch.full((3, 2, 2, 2), 33))


def test_columns_know_which_output_of_their_layer_they_work_for():
    layout = Layout.of(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3)))
    assert layout.outputs(["1"]).tolist() == [-1] * 4 + [0, 0, 1, 1, 2, 2] + [0, 1, 2]


@pytest.mark.parametrize("part", ["heads", "head:9", "head:x", "conv9"])
def test_unknown_parts_are_refused(part):
    with pytest.raises(FedloomError):
        Layout.of(build("lenet", (3, 32, 32), 10)).columns(part)


def test_columns_take_and_put():
    rows = torch.arange(12.0).reshape(2, 6)
    columns = Columns.union([(4, 6), (0, 1), (5, 6)], 6)
    assert columns.ranges == ((0, 1), (4, 6))
    assert columns.take(rows).tolist() == [[0, 4, 5], [6, 10, 11]]
    columns.put(rows, torch.tensor([[-1.0, -2, -3], [-4, -5, -6]]))
    assert rows.tolist() == [[-1, 1, 2, 3, -2, -3], [-4, 7, 8, 9, -5, -6]]
    assert columns.others().ranges == ((1, 4),)


def test_columns_merge_and_know_where_they_stand_in_the_row():
    columns = Columns.union([(6, 8), (1, 5), (2, 3), (5, 6), (9, 9)], 12)
    assert columns.ranges == ((1, 8),)
    columns = Columns.union([(8, 10), (2, 4)], 12)
    assert columns.index.tolist() == [2, 3, 8, 9]
    assert columns.within(torch.tensor([9, 0, 2, 4, 8])).tolist() == [3, 0, 2]
    assert columns.others().ranges == ((0, 2), (4, 8), (10, 12))
    assert len(columns) == 4
    assert not columns.everything
    assert not Columns.union([(0, 11)], 12).everything
    assert Columns.union([(0, 5), (5, 12)], 12).everything


def test_models_that_cannot_be_flat_are_refused():
    with pytest.raises(FedloomError, match="nothing to learn"):
        Layout.of(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(FedloomError, match="one floating type"):
        Layout.of(mixed)
    with pytest.raises(FedloomError, match="values"):
        Layout.of(nn.Linear(1, 1)).load(nn.Linear(1, 1), torch.zeros(5))


def test_a_buffer_of_large_integers_is_refused_not_rounded():
    module = nn.Linear(1, 1)
    module.register_buffer("big", torch.tensor([2**24 + 1]))
    with pytest.raises(FedloomError, match="big"):
        Layout.of(module).flatten(module)
