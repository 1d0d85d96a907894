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


def test_what_to_change_is_said():
    with pytest.raises(FedloomError, match=r"layer 'cells'.*proj_size.*padded tensors"):
        Channels.of(Projected(SHAPE, 5), SHAPE)


def test_capacities_that_a_model_can_not_tell_apart_are_named(quick):
    with pytest.warns(UserWarning, match=r"Capacities 0\.25 and 0\.125 give the same.*'hidden\.0'"):
        quick("heterofl", capacities="0.5,0.25,0.125", rounds=1, model_options={"hidden": [4]})


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
