"""Models that nobody has tried before can be cut: concatenated branches, attention, recurrent
layers, embeddings, shuffles, gates. A sub-model computes what the whole one does without the other
channels, and a federation trains it."""

import numpy as np
import pytest
import torch
from cut_models import GRU, MODELS, DenseNet, Recurrent, Tokens, Transformer, ViT
from torch import nn

from fedloom.data.dataset import from_arrays
from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.local import Batch
from fedloom.select import Channels
from fedloom.select.attention import FreeHeads, with_free_heads
from fedloom.select.axes import Mismatch, cut, fixed, free, leaves, merge, regroup, together
from fedloom.select.channels import places, positions
from fedloom.select.scores import activations, gradients
from fedloom.select.verify import verify

SHAPE = (3, 16, 16)
SIZES = {
    "a ViT": [16, 4, 32, 4, 32], "a transformer of one's own": [16, 4, 24],
    "a DenseNet": [8, 6, 6, 6], "a U-Net": [8, 8, 8], "a ShuffleNet": [4, 8, 8, 4],
    "an Inception": [6, 10, 8], "an LSTM": [10, 12], "a GRU": [10, 12],
}  # fmt: skip


def chosen(channels, seed=0):
    rng = np.random.default_rng(seed)
    return [np.sort(rng.choice(n, -(-n // 2), replace=False)) for n in channels.sizes]


@pytest.mark.parametrize("name", MODELS)
def test_a_sub_model_is_the_users_own_model_that_reads_no_other_channels(name, monkeypatch):
    """Without norms across channels, which are over fewer of them in a sub-model."""
    fast = torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # it has the norms in it
    assert fast is not torch.backends.mha.get_fastpath_enabled()
    torch.manual_seed(0)
    module = MODELS[name](SHAPE, 5).eval()
    channels = Channels.of(module, SHAPE)
    assert list(channels.sizes) == SIZES[name]
    verify(channels, SHAPE)
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.forward = lambda x: x
    layout, keep = Layout.of(module), chosen(channels)
    row, index = layout.flatten(module), channels.index(layout, keep)
    there = torch.zeros(layout.size, dtype=torch.bool)
    there[index] = True
    masked = row.clone()
    for e in layout.entries:
        if e.tensor in channels.weights:
            masked[e.start : e.stop] *= there[e.start : e.stop]
    small = channels.build([len(k) for k in keep]).eval()
    for layer in small.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.forward = lambda x: x
    Layout.of(small).load(small, row[index])
    x = torch.randn(4, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(small(x), layout.load(module, masked)(x), atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * layout.trainable
    for mine, read in zip(keep, channels.kept(layout, index), strict=True):
        assert mine.tolist() == read.tolist()


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "feddse"])
@pytest.mark.parametrize("name", MODELS)
def test_clients_of_half_the_capacity_train_them(quick, row, name, method):
    settings = {"capacities": "1:0.5,0.5:0.5", "clients": 4, "participation": 1.0, "steps": 2,
                "model": _small(MODELS[name])}  # fmt: skip
    before = quick(method, rounds=1, eval_every=2, **settings)
    assert before.devices["parameters"].is_monotonic_decreasing
    assert before.devices["macs"].iloc[1] < before.devices["macs"].iloc[0] or method == "feddse"
    assert np.isfinite(before.summary["test_loss"])


def _small(model):
    """For 8×8 digits."""
    return {ViT: lambda shape, classes: ViT(shape, classes, depth=1)}.get(model, model)


def test_tokens_are_cut_and_trained(quick):
    words = np.random.default_rng(0).integers(0, 200, (80, 1, 4, 4))
    data = from_arrays(words, np.arange(80) % 4, words[:20], np.arange(20) % 4)
    channels = Channels.of(Tokens((1, 4, 4), 4), (1, 4, 4))
    verify(channels, (1, 4, 4))
    assert [(g.name, g.size) for g in channels.groups] == [("words", 12), ("cells", 8)]
    result = quick("feddse", data=data, model=Tokens, capacities="0.5", rounds=1, clients=2)
    before, after = Tokens((1, 4, 4), 4), result.model(factory=Tokens)
    assert before.words.weight.shape == after.words.weight.shape


def test_attention_with_free_heads_is_torchs():
    torch.manual_seed(0)
    for batch_first in (True, False):
        plain = nn.MultiheadAttention(12, 3, batch_first=batch_first).eval()
        mine = with_free_heads(nn.Sequential(nn.MultiheadAttention(12, 3, batch_first=batch_first)))
        assert type(mine[0]) is FreeHeads
        mine[0].load_state_dict(plain.state_dict())
        x, y = torch.randn(4, 5, 12), torch.randn(4, 5, 12)
        hidden = torch.zeros(4, 5, dtype=torch.bool) if batch_first else torch.zeros(5, 4).bool()
        hidden[0, 2:] = True
        mask = torch.full((5, 5), -torch.inf).triu(1) if batch_first else None
        if not batch_first:
            mask = torch.full((4, 4), -torch.inf).triu(1)
        for more in ({}, {"attn_mask": mask}, {"key_padding_mask": hidden},
                     {"attn_mask": mask, "average_attn_weights": False}):  # fmt: skip
            out, weights = mine[0].eval()(x, y, y, **more)
            expected, theirs = plain(x, y, y, **more)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(weights, theirs, atol=1e-5, rtol=1e-4)


def test_a_head_is_left_out_whole():
    """Three blocks of in_proj_weight and the inputs of out_proj lose the same head."""
    module = ViT(SHAPE, 5, depth=1)
    channels = Channels.of(module, SHAPE)
    keep = [np.arange(n) for n in channels.sizes]
    heads = next(i for i, g in enumerate(channels.groups) if g.name.endswith("self_attn"))
    keep[heads] = np.array([0, 2, 3])
    at = {n: [places(d, keep) for d in ds] for n, ds in channels.dims.items()}
    rows = at["blocks.layers.0.self_attn.in_proj_weight"][0]
    left = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]
    assert rows.tolist() == [16 * third + r for third in range(3) for r in left]
    assert at["blocks.layers.0.self_attn.out_proj.weight"][1].tolist() == left


def test_hidden_units_of_an_lstm_are_cut_in_all_gates():
    channels = Channels.of(Recurrent(SHAPE, 5, hidden=4), SHAPE)
    keep = [np.arange(10), np.array([1, 3])]
    dims = channels.dims["cells.weight_hh_l0"]
    assert places(dims[0], keep).tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert places(dims[1], keep).tolist() == [1, 3]
    small = channels.build((10, 2))
    assert (small.cells.hidden_size, small.cells.input_size) == (2, 10)


def test_activations_of_recurrent_layers_and_heads_are_what_they_give():
    torch.manual_seed(0)
    module, x = Recurrent(SHAPE, 5).eval(), torch.randn(6, *SHAPE)
    channels = Channels.of(module, SHAPE)
    outputs, (last, _) = module.cells(torch.relu(module.into(x.transpose(1, 2).flatten(2))))
    expected = (outputs.mean((0, 1)) + last.mean((0, 1))) / 2
    np.testing.assert_allclose(activations(module, channels, x)[1], expected.detach(), rtol=1e-4)
    # Only the last state is read, so all of the gradient is its.
    state = last.detach().requires_grad_()
    y = torch.randint(0, 5, (6,))
    torch.nn.functional.cross_entropy(module.out(state[-1]), y).backward()
    found = gradients(module, channels, Batch(x, y))[1]
    np.testing.assert_allclose(2 * found, state.grad.sum(1).abs().sum(0), rtol=1e-4)


@pytest.mark.parametrize("model", [GRU, DenseNet, Transformer])
def test_scores_are_one_number_for_each_channel(model):
    module, x = model(SHAPE, 5), torch.randn(6, *SHAPE)
    channels = Channels.of(module, SHAPE)
    y = torch.randint(0, 5, (6,))
    for scores in (activations(module, channels, x), gradients(module, channels, Batch(x, y))):
        assert [len(s) for s in scores] == list(channels.sizes)
        assert all(np.isfinite(s).all() and s.std() > 0 for s in scores)


class Projected(Recurrent):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.cells = nn.LSTM(10, 12, batch_first=True, proj_size=6)
        self.out = nn.Linear(6, classes)


class Stated(Recurrent):
    """With an initial state, whose size is that of the layer or a number."""

    def __init__(self, shape, classes, hidden=None):
        super().__init__(shape, classes)
        self.hidden = hidden

    def forward(self, x):
        first = torch.zeros(1, len(x), self.hidden or self.cells.hidden_size)
        x = torch.relu(self.into(x.transpose(1, 2).flatten(2)))
        return self.out(self.cells(x, (first, first))[0][:, -1])


class Layered(nn.Module):
    """A model of some layers; `last` maps them to the logits."""

    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.into = nn.Linear(shape[0] * shape[2], width)
        self.out = nn.Linear(width, classes)
        self.make(width)

    def make(self, width):
        pass

    def inner(self, x):
        raise NotImplementedError

    def forward(self, x):
        x = torch.relu(self.into(x.transpose(1, 2).flatten(2)))
        return self.out(self.inner(x))


class Cell(Layered):
    def make(self, width):
        self.cell = nn.LSTMCell(width, width)

    def inner(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


class Einsum(Layered):
    def make(self, width):
        self.weights = nn.Parameter(torch.randn(width, width) / 4)

    def inner(self, x):
        return torch.einsum("bi,ij->bj", x.mean(1), self.weights)


class Windows(Layered):
    """Attention with a table of relative positions, as Swin has it; `fixed` is a number of heads
    that is written into forward()."""

    def __init__(self, shape, classes, width=16, fixed=-1):
        self.fixed = fixed
        super().__init__(shape, classes, width)

    def make(self, width):
        self.size = 4
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(2 * SHAPE[2] - 1, width // self.size))
        at = torch.arange(SHAPE[2])
        self.register_buffer("apart", at[:, None] - at + SHAPE[2] - 1)

    def inner(self, x):
        n, t, width = x.shape
        size = self.size if self.fixed < 0 else width // self.fixed
        q, k, v = self.qkv(x).reshape(n, t, 3, self.fixed, size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 2
        if self.fixed < 0:
            scores = scores + self.table[self.apart.view(-1)].view(t, t, -1).permute(2, 0, 1)
        mixed = scores.softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(n, t, -1)).mean(1)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(Stated, [10, 12]), (Cell, [16, 16]), (Einsum, [16, 16]), (Windows, [16, 4, 16])],
)
def test_sizes_that_follow_the_tensors_are_cut(model, sizes):
    channels = Channels.of(model(SHAPE, 5), SHAPE)
    assert list(channels.sizes) == sizes
    assert channels.whole == ()
    verify(channels, SHAPE)


class Keyed(Layered):
    def make(self, width):
        self.keys = nn.Linear(width, 8)
        self.heads = nn.MultiheadAttention(width, 2, kdim=8, vdim=8, batch_first=True)

    def inner(self, x):
        return self.heads(x, self.keys(x), self.keys(x))[0].mean(1)


class Scaled(Layered):
    def make(self, width):
        self.norm = nn.RMSNorm(width)

    def inner(self, x):
        return self.norm(x).mean(1)


class Unflat(Layered):
    def make(self, width):
        self.apart = nn.Unflatten(1, (4, width // 4))

    def inner(self, x):
        return self.apart(x.mean(1)).flatten(1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Projected, r"layer 'cells'.*proj_size.*padded tensors"),
        (lambda s, c: Stated(s, c, 12), r"layer 'cells'.*self\.lstm\.hidden_size"),
        (lambda s, c: Windows(s, c, fixed=4), r"'view'.*number: reshape\(n, t, 3, -1"),
        (Keyed, r"layer 'heads'.*Leave out kdim"),
        (Scaled, r"layer 'norm'.*Use nn\.LayerNorm"),
        (Unflat, r"layer 'apart'.*Take sizes in forward"),
    ],
)
def test_what_to_change_is_said(model, said):
    with pytest.raises(FedloomError, match=said):
        verify(Channels.of(model(SHAPE, 5), SHAPE), SHAPE)


class Mixed(Layered):
    """An LSTM, then a layer with a non-linearity that is a function."""

    def make(self, width):
        self.cells, self.more = nn.LSTM(width, 6, batch_first=True), nn.Linear(6, width)

    def inner(self, x):
        return torch.relu(self.more(self.cells(x)[0].mean(1)))


def test_activations_behind_a_recurrent_layer_are_found():
    torch.manual_seed(0)
    module, x = Mixed(SHAPE, 5).eval(), torch.randn(6, *SHAPE)
    channels = Channels.of(module, SHAPE)
    found = dict(
        zip([g.name for g in channels.groups], activations(module, channels, x), strict=True)
    )
    first = torch.relu(module.into(x.transpose(1, 2).flatten(2)))
    expected = torch.relu(module.more(module.cells(first)[0].mean(1))).mean(0)
    np.testing.assert_allclose(found["more"], expected.detach(), rtol=1e-4)


def test_activations_of_a_cell_are_its_states_over_all_steps():
    torch.manual_seed(0)
    module, x = Cell(SHAPE, 5).eval(), torch.randn(6, *SHAPE)
    channels, states, state = Channels.of(module, SHAPE), [], None
    for step in torch.relu(module.into(x.transpose(1, 2).flatten(2))).unbind(1):
        state = module.cell(step, state)
        states.append(state[0].mean(0))
    found = activations(module, channels, x)[1]
    np.testing.assert_allclose(found, torch.stack(states).mean(0).detach(), rtol=1e-4)


class Gated(Layered):
    """A convolution along the channels: all of them stay."""

    def make(self, width):
        self.along = nn.Conv1d(1, 1, 3, padding=1)
        self.more = nn.Linear(width, width)

    def inner(self, x):
        x = x.mean(1)
        return torch.relu(self.more(x * torch.sigmoid(self.along(x.unsqueeze(1)).squeeze(1))))


def test_layers_that_stay_whole_are_named(quick):
    with pytest.warns(UserWarning, match="all outputs stay of 'into': forward"):
        quick("heterofl", model=Gated, capacities="0.5", rounds=1, clients=2)


def test_a_model_without_copies_is_refused(quick):
    class Old(Layered):
        def make(self, width):
            with pytest.warns(FutureWarning):
                self.more = nn.utils.weight_norm(nn.Linear(width, width))

        def inner(self, x):
            return self.more(x.mean(1))

    with pytest.raises(FedloomError, match=r"parametrizations\.weight_norm"):
        quick("fedavg", model=Old, rounds=1)


def test_capacities_that_a_model_can_not_tell_apart_are_named(quick):
    with pytest.warns(UserWarning, match=r"Capacities 0\.25 and 0\.125 give the same.*'hidden\.0'"):
        quick("heterofl", capacities="0.5,0.25,0.125", rounds=1, model_options={"hidden": [4]})
    with pytest.warns(UserWarning, match=r"Capacities 0\.5 and 0\.25 .* \(each trains 1 of 4\)"):
        quick("depthfl", capacities="1,0.5,0.25", rounds=1, model="conv4", clients=4,
              model_options={"channels": [4, 4, 8, 8]})  # fmt: skip


def test_a_share_that_comes_to_nobody_is_said(quick):
    with pytest.warns(UserWarning, match="No client has capacity 1: with 4 clients"):
        quick("heterofl", capacities="1:0.05,0.5:0.95", rounds=1, clients=4)


# -- axes -----------------------------------------------------------------------------------------


def test_sums_of_axes_are_merged_run_by_run():
    """8 + 4 beside 4 + 8: three runs of 4, the middle one of both."""
    a, b, c, d = (free(n, "") for n in (8, 4, 4, 8))
    left, right = together([a, b]), together([c, d])
    merge(left, right)
    runs = [[id(x) for x in leaves(label)] for label in (left, right)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_a_fixed_part_fixes_what_it_meets():
    a, b = free(4, ""), free(4, "")
    merge(together([a, b]), together([fixed(4), free(4, "")]))
    assert [axis.fixed for axis in leaves((*a, *b))] == [True, False]


def test_a_sum_is_split_into_equal_runs_or_not_at_all():
    a, b = free(6, ""), free(6, "")
    outer, inner = regroup(together([a, b]), (2, 6))
    assert [x.fixed for x in leaves(outer)] == [True]
    assert (
        {id(x) for x in leaves(a)} == {id(x) for x in leaves(b)} == {id(x) for x in leaves(inner)}
    )
    with pytest.raises(Mismatch):
        cut((*free(4, ""), *fixed(3)), (4, 8))


def test_positions_of_channels_in_a_concatenation():
    channels = Channels.of(DenseNet(SHAPE, 5), SHAPE)
    dim = channels.dims["convs.1.weight"][1]  # 8 of the stem, 6 of the first layer
    assert positions(dim, 0).tolist() == [[i] for i in range(8)]
    assert positions(dim, 1).tolist() == [[8 + i] for i in range(6)]
