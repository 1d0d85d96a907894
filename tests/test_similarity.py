"""The similarity library: hand-worked numbers, invariances, all pairs as one product."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.errors import FedloomError
from fedloom.mix.swap import greedy_pairs
from fedloom.models.nets import MLP, LeNet
from fedloom.similarity import (
    CCA,
    CKA,
    DCKA,
    HSIC,
    MEASURES,
    RBF,
    Cosine,
    InnerProduct,
    Linear,
    Pearson,
    Polynomial,
    activations,
    deconfounded,
    kernel_named,
    layers_of,
    measure_named,
    networks,
    similarity,
    similarity_matrix,
    weight_matrix,
)
from fedloom.similarity.measures import gram
from fedloom.streams import stream

KERNELS = (Linear(), Polynomial(2), Polynomial(), RBF(), RBF(0.5))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size):
    return torch.linalg.qr(random(size, size, seed=9))[0]


def close(a, b, atol=1e-9):
    return a == pytest.approx(b, abs=atol)


# -- by hand --------------------------------------------------------------------------------------

X = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
Y = torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64)


def test_hsic_and_cka_of_a_three_by_three_case_by_hand():
    """Centred: x = (−1, 0, 1), y = (0, −1, 1). Then xᵀy = 1, xᵀx = yᵀy = 2, so with linear kernels
    tr(KHLH) = 1, HSIC = 1/4, HSIC(K, K) = HSIC(L, L) = 4/4 and CKA = 1/4."""
    assert close(HSIC().between(X, Y), 1 / 4)
    assert close(HSIC().between(X, X), 1)
    assert close(CKA().between(X, Y), 1 / 4)


def test_hsic_is_its_trace_formula():
    x, y = random(7, 3), random(7, 5, seed=1)
    h = torch.eye(7, dtype=torch.float64) - 1 / 7
    for kernel in KERNELS:
        k, m = kernel(gram(x)), kernel(gram(y))
        assert close(HSIC(kernel).between(x, y), float((k @ h @ m @ h).trace()) / 36)


def test_linear_hsic_is_the_covariance_form():
    x, y = random(9, 4), random(9, 2, seed=1)
    cov = (x - x.mean(0)).T @ (y - y.mean(0)) / 8
    assert close(HSIC().between(x, y), float((cov**2).sum()))


def test_the_debiased_estimator_is_its_formula():
    """Song et al. 2012: [tr(K̃L̃) + 1ᵀK̃1·1ᵀL̃1/(n−1)(n−2) − 2/(n−2)·1ᵀK̃L̃1] / n(n−3)."""
    x, y = random(6, 3), random(6, 2, seed=1)
    k, m = (g - torch.diag(g.diagonal()) for g in (gram(x), gram(y)))
    n, one = 6, torch.ones(6, dtype=torch.float64)
    value = (k @ m).trace() + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    value = (value - 2 / (n - 2) * one @ k @ m @ one) / (n * (n - 3))
    assert close(HSIC(debiased=True).between(x, y), float(value))


def test_the_debiased_estimate_of_independence_is_zero_in_the_mean():
    pairs = [(random(8, 6, seed=2 * s), random(8, 6, seed=2 * s + 1)) for s in range(400)]
    plain = np.mean([CKA().between(x, y) for x, y in pairs])
    debiased = np.mean([HSIC(debiased=True).between(x, y) for x, y in pairs])
    assert plain > 0.3
    assert abs(debiased) < 0.1 * np.mean([HSIC().between(x, y) for x, y in pairs])


def test_inner_product_by_hand():
    assert close(InnerProduct().between(X, Y), 49)  # (1·1 + 2·0 + 3·2)²
    x, y = random(5, 3), random(5, 4, seed=1)
    assert close(InnerProduct().between(x, y), float(((y.T @ x) ** 2).sum()))


def test_cca_by_hand():
    """One feature each: the squared correlation, 1/4 for the case above."""
    assert close(CCA().between(X, Y), 1 / 4)
    x, y = random(20, 3), random(20, 5, seed=1)
    qs = [torch.linalg.qr(v - v.mean(0))[0] for v in (x, y)]
    assert close(CCA().between(x, y), float(((qs[1].T @ qs[0]) ** 2).sum()) / 3)


def test_polynomial_and_rbf_kernels_by_hand():
    points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)  # distances 1, 2, 3
    assert Polynomial(2, 1.0)(gram(points))[1].tolist() == [1, 4, 16]
    k = RBF(0.5)(gram(points))  # σ is half of the median 2
    assert k[0].tolist() == pytest.approx([1, np.exp(-1 / 2), np.exp(-9 / 2)])


def test_alpha_is_the_least_squares_solution():
    k, k0 = gram(random(6, 3)), gram(random(6, 4, seed=1))
    solved = torch.linalg.lstsq(k0.reshape(-1, 1), k.reshape(-1, 1)).solution.item()
    assert torch.allclose(deconfounded(k, k0), k - solved * k0)
    assert close(float((deconfounded(k, k0) * k0).sum()), 0, 1e-8)  # nothing of K⁰ is left


def test_dcka_takes_out_what_the_inputs_have_in_common():
    inputs = random(30, 4)
    a, b = (torch.cat([3 * inputs, random(30, 2, seed=s)], 1) for s in (1, 2))
    assert CKA().between(a, b) > 0.9
    assert abs(DCKA().between(a, b, inputs)) < 0.3
    assert close(DCKA().between(a, a, inputs), 1)
    signs = [DCKA().between(random(6, 2, seed=s), random(6, 2, seed=s + 50), random(6, 3, seed=99))
             for s in range(20)]  # fmt: skip
    assert min(signs) < 0


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_dcka_takes_the_inputs_by_the_same_kernel(kernel):
    x, y, z = (kernel(gram(random(9, p, seed=p))) for p in (3, 4, 5))
    h = torch.eye(9, dtype=torch.float64) - 1 / 9
    a, b = (h @ (k - (k * z).sum() / (z * z).sum() * z) @ h for k in (x, y))
    found = DCKA(kernel).between(*(random(9, p, seed=p) for p in (3, 4, 5)))
    assert close(found, float((a * b).sum() / (a.norm() * b.norm())))


def test_an_rbf_kernel_of_mostly_one_point_goes_by_the_largest_distance():
    points = torch.tensor([[0.0], [0.0], [0.0], [0.0], [2.0]], dtype=torch.float64)
    k = RBF()(gram(points))
    assert k[0].tolist() == pytest.approx([1, 1, 1, 1, np.exp(-1 / 2)])


def test_cosine_and_pearson_by_hand():
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-2.0, 0.0]])
    root = 0.5**0.5
    expected = [[1, root, -1], [root, 1, -root], [-1, -root, 1]]
    assert np.allclose(weight_matrix(rows, "cosine"), expected)
    rows = torch.tensor(random(4, 9).numpy())
    assert np.allclose(weight_matrix(rows, "pearson"), np.corrcoef(rows.numpy()))


# -- invariances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [HSIC(k) for k in KERNELS] + [CKA(k) for k in KERNELS]
                         + [CKA(debiased=True), InnerProduct(), CCA()], ids=str)  # fmt: skip
def test_rotations_change_nothing(measure):
    x, y = random(12, 5), random(12, 4, seed=1)
    assert close(measure.between(x @ orthogonal(5), y @ orthogonal(4)), measure.between(x, y), 1e-7)


@pytest.mark.parametrize("measure", [CKA(), CKA(RBF(0.7)), CKA(debiased=True), CCA(), DCKA()])
def test_isotropic_scaling_changes_nothing(measure):
    x, y, z = random(12, 5), random(12, 4, seed=1), random(12, 6, seed=2)
    assert close(measure.between(3 * x, 0.1 * y, z), measure.between(x, y, z))
    assert not close(HSIC().between(3 * x, y), HSIC().between(x, y))


def test_cca_is_the_same_under_every_invertible_map_and_cka_is_not():
    x, y, a = random(20, 4), random(20, 4, seed=1), random(4, 4, seed=3)
    assert close(CCA().between(x @ a, y), CCA().between(x, y))
    assert not close(CKA().between(x @ a, y), CKA().between(x, y), 1e-3)


@pytest.mark.parametrize("measure", [CKA(k, d) for k in KERNELS for d in (False, True)] + [CCA()],
                         ids=str)  # fmt: skip
def test_a_representation_is_wholly_like_itself_and_shifts_change_nothing(measure):
    x = random(12, 5)
    assert close(measure.between(x, x), 1)
    if getattr(measure, "kernel", Linear()) in (Linear(), RBF(), RBF(0.5)):
        assert close(measure.between(x, x + 7), 1)


def test_cca_counts_a_repeated_feature_once():
    x, y = random(20, 3), random(20, 5, seed=1)
    assert close(CCA().between(torch.cat([x, x], 1), y), CCA().between(x, y))
    assert close(CCA().between(random(10, 40), random(10, 3, seed=1)), 1)  # it explains anything
    few, wide = random(10, 2), random(2, 40, seed=2)
    assert close(CCA().between(few @ wide, y[:10]), CCA().between(few, y[:10]))


def test_a_constant_representation_is_like_nothing():
    for measure in (CKA(), CKA(RBF()), CCA(), CKA(debiased=True)):
        assert measure.between(torch.ones(6, 2), random(6, 2)) == pytest.approx(0, abs=1e-9)


# -- networks -------------------------------------------------------------------------------------


def nets(count, make=lambda: MLP((1, 6, 6), 4, (12, 8))):
    out = []
    for seed in range(count):
        torch.manual_seed(seed)
        out.append(make())
    return out


IMAGES = random(40, 1, 6, 6).float()


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("batch", [256, 20])
def test_all_pairs_are_what_the_pairs_are_one_by_one(name, batch):
    models = nets(5)
    matrix = similarity_matrix(models, IMAGES, name, batch=batch)
    assert torch.equal(matrix, matrix.T)
    for i, j in itertools.product(range(5), repeat=2):
        pair = similarity(models[i], models[j], IMAGES, name, batch=batch)
        assert pair == pytest.approx(float(matrix[i, j]), rel=1e-9)


def test_a_network_is_the_mean_over_its_layers():
    a, b = nets(2)
    layers = ("hidden.0", "hidden.1", "out")
    assert layers_of(a) == layers
    x, y = activations(a, IMAGES), activations(b, IMAGES)
    alone = [CKA().between(x[name], y[name]) for name in layers]
    assert similarity(a, b, IMAGES) == pytest.approx(np.mean(alone))
    assert similarity(a, b, IMAGES, layers=["out"]) == pytest.approx(alone[2])


@pytest.mark.parametrize("name", ["cka", "dcka", "cca", "hsic", "inner"])
def test_one_statistic_over_all_inputs_however_many_go_through_at_a_time(name):
    a, b = nets(2)
    inputs = random(257, 1, 6, 6, seed=5).float()
    x, y = activations(a, inputs), activations(b, inputs)
    measure = measure_named(name)
    wanted = np.mean([measure.between(x[k], y[k], inputs) for k in x])
    for batch in (256, 257, 100, 1):
        assert similarity(a, b, inputs, name, batch=batch) == pytest.approx(wanted, rel=1e-6)
    # One input more changes little: it is not the mean of two batches.
    fewer = similarity(a, b, inputs[:256], name)
    assert fewer == pytest.approx(wanted, rel=0.02, abs=2e-3)


def test_networks_of_different_make_are_compared_by_named_layers():
    small, large = MLP((1, 6, 6), 4, (12,)), MLP((1, 6, 6), 4, (12, 8))
    with pytest.raises(FedloomError, match="which correspond"):
        similarity(small, large, IMAGES)
    found = similarity(small, large, IMAGES, layers=["hidden.0"], layers_b=["hidden.1"])
    x, y = activations(small, IMAGES)["hidden.0"], activations(large, IMAGES)["hidden.1"]
    assert found == pytest.approx(CKA().between(x, y))
    with pytest.raises(FedloomError, match="different shapes"):
        similarity(small, large, measure="cosine")
    with pytest.raises(FedloomError, match="different shapes"):  # as many, but of other layers
        similarity(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False), measure="cosine")


@pytest.mark.parametrize("measure", ["cosine", "pearson"])
def test_weights_of_chosen_layers(measure):
    a, b = MLP((1, 6, 6), 4, (12,)), MLP((1, 6, 6), 4, (12,))
    with torch.no_grad():
        for p, q in zip(b.out.parameters(), a.out.parameters(), strict=True):
            p.copy_(q)
    assert similarity(a, b, measure=measure, layers=["out"]) == pytest.approx(1)
    assert similarity(a, b, measure=measure) < 0.9
    with pytest.raises(FedloomError, match="Unknown layer 'oat'"):
        similarity(a, b, measure=measure, layers=["oat"])


@pytest.mark.parametrize(
    "measure",
    [CKA(), CKA(debiased=True), CKA("poly"), CKA("rbf"), CCA(), DCKA(), DCKA("rbf", True)],
    ids=str,
)
@pytest.mark.parametrize("value", [0.1, 123.456, 0.0])
def test_what_is_the_same_for_all_samples_is_like_nothing(measure, value):
    same, other = torch.full((64, 10), value), torch.full((64, 7), value * 1.3)
    live = torch.randn(64, 5)
    inputs = torch.randn(64, 9)
    for y in (same, other, live):
        assert measure.between(same, y, inputs) == 0


def test_a_network_that_answers_nan_spoils_only_its_own_comparisons():
    nets = [MLP((1, 6, 6), 4, (12,)) for _ in range(3)]
    nets[1].out.weight.data[0] = torch.nan
    for measure in ("cka", "cca", "inner"):
        found = similarity_matrix(nets, IMAGES, measure)
        assert found[0, 2].isfinite()
        assert found[0, 1].isnan()


def test_layers_that_never_answer_are_left_out_unless_named():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(16, 3, 8)
    assert similarity(net, net, x) == pytest.approx(1)
    with pytest.raises(FedloomError, match="took no part"):
        similarity(net, net, x, layers=["self_attn.out_proj"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch": 0}, "whole number"),
        ({"batch": 2.5}, "whole number"),
        ({"inputs": [[0.0]]}, "as a tensor"),
        ({"inputs": torch.zeros(8, 5)}, "can't take inputs"),
        ({"layers": "out"}, "list of names"),
    ],
)
def test_wrong_questions_are_answered_in_a_sentence(options, why):
    net = MLP((1, 6, 6), 4, (12,))
    with pytest.raises(FedloomError, match=why):
        similarity(net, net, **{"inputs": IMAGES, **options})


def test_nothing_can_not_be_compared():
    for measure in ("cka", "cosine"):
        with pytest.raises(FedloomError, match="at least one network"):
            similarity_matrix([], IMAGES, measure)
    with pytest.raises(FedloomError, match="give a number"):
        Polynomial(2, float("nan"))


def test_convolutions_are_flattened_and_layers_used_twice_lie_side_by_side():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(1, 3, 3), nn.Dropout(0.5)
            self.rest = nn.Linear(3 * 16, 3 * 16)

        def forward(self, x):
            return self.rest(self.drop(self.rest(self.conv(x).flatten(1))))

    net = Twice().train()
    found = activations(net, IMAGES)
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "conv": (40, 3 * 16), "rest": (40, 2 * 3 * 16)}  # fmt: skip
    assert torch.equal(found["rest"], activations(net, IMAGES)["rest"])  # no dropout
    assert net.training
    assert not net.conv._forward_hooks


class Block(nn.Module):
    """Functional and in-place non-linearities, a norm, pooling, a residual sum, views."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(1, 3, 1),
        )
        self.norm, self.fc1, self.out = nn.BatchNorm2d(3), nn.Linear(27, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu_(self.norm(self.a(x)))
        y = self.b(y)
        y += self.c(x)
        y = nn.functional.max_pool2d(y.clamp(min=0), 2)
        return self.out(self.fc1(y.view(len(y), -1)).tanh())


def test_activations_are_what_the_non_linearity_behind_a_layer_gives():
    net = Block().eval()
    with torch.no_grad():
        y = torch.relu(net.norm(net.a(IMAGES)))
        end = torch.relu(net.b(y) + net.c(IMAGES))
        fc1 = torch.tanh(net.fc1(nn.functional.max_pool2d(end, 2).flatten(1)))
        wanted = {"a": y, "b": end, "fc1": fc1, "out": net.out(fc1)}
    found = activations(net, IMAGES)
    assert list(found) == list(wanted)  # b and c end in the same one, which counts once
    for name, value in wanted.items():
        assert torch.equal(found[name], value.flatten(1)), name
    assert torch.equal(activations(net, IMAGES, ["c"])["c"], end.flatten(1))


def test_functional_and_module_non_linearities_are_the_same():
    class Functional(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu() if isinstance(layer, nn.Linear) else layer(x)
            return x

    layers = [nn.Flatten(), nn.Linear(36, 9), nn.ReLU(inplace=True), nn.Linear(9, 5), nn.ReLU()]
    module = nn.Sequential(*layers)
    functional = Functional(nn.ModuleList([m for m in layers if not isinstance(m, nn.ReLU)]))
    x, y = (list(activations(net, IMAGES).values()) for net in (module, functional))
    assert all(torch.equal(a, b) and a.min() == 0 for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("behind", [
    nn.CELU(), nn.ELU(), nn.GELU(), nn.GLU(), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardswish(),
    nn.Hardtanh(), nn.LeakyReLU(), nn.LogSigmoid(), nn.Mish(), nn.PReLU(), nn.RReLU(), nn.ReLU6(),
    nn.SELU(), nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.Softshrink(), nn.Softsign(), nn.Tanh(),
    nn.Tanhshrink(), nn.Threshold(0.1, 0.2)], ids=lambda m: type(m).__name__)  # fmt: skip
@pytest.mark.parametrize("between", [
    nn.AdaptiveAvgPool1d(4), nn.MaxPool1d(2), nn.LPPool1d(2, 2), nn.LayerNorm(8), nn.BatchNorm1d(3),
    nn.GroupNorm(3, 3), nn.InstanceNorm1d(3), nn.RMSNorm(8), nn.Dropout(0.5), nn.Flatten()],
    ids=lambda m: type(m).__name__)  # fmt: skip
def test_torchs_non_linearities_are_found_behind_norms_pooling_and_views(between, behind):
    net = nn.Sequential(nn.Linear(6, 8), between, behind).eval()
    x = random(5, 3, 6).float()
    assert torch.equal(activations(net, x)["0"], net(x).detach().flatten(1))


def test_what_is_behind_a_non_linearity_already_is_taken_as_it_is():
    """A block that ends in a ReLU has its activation: it is not the next non-linearity's."""
    net = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Dropout(0.5)),
                        nn.Sigmoid(), nn.Linear(9, 4)).eval()  # fmt: skip
    found = activations(net, IMAGES, ["0", "0.1", "0.2", "2"])
    assert torch.equal(found["0"], net[0](IMAGES))
    assert torch.equal(found["0.1"], found["0"])
    assert torch.equal(found["0.2"], found["0"])


def test_wide_random_layers_are_not_alike_behind_their_relu():
    """Before it, CCA of two random layers of 200 units is 1: the inputs are a linear map away."""
    models = nets(2, lambda: MLP((1, 6, 6), 4, (200,)))
    inputs = random(400, 1, 6, 6, seed=3).float()
    assert similarity(*models, inputs, "cca", layers=["hidden.0"]) < 0.8
    plain = [nn.Sequential(nn.Flatten(), m.hidden[0]) for m in models]
    assert similarity(*plain, inputs, "cca") == pytest.approx(1, abs=1e-6)


def test_batch_statistics_are_not_touched():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)).train()
    before = net[2].running_mean.clone()
    similarity(net, net, IMAGES, layers=["2"])
    assert torch.equal(net[2].running_mean, before)


@pytest.mark.parametrize("held", [1, 2, 3])
def test_what_does_not_fit_into_memory_is_compared_in_parts(monkeypatch, held):
    models = nets(5)
    wanted = similarity_matrix(models, IMAGES)
    looked = []
    monkeypatch.setattr(networks, "MEMORY", held * 3 * 40**2 * 8)  # three layers
    monkeypatch.setattr(networks, "activations",
                        lambda *given: looked.append(1) or activations(*given))  # fmt: skip
    found = similarity_matrix(models, IMAGES, layers=layers_of(models[0]))
    assert torch.allclose(found, wanted, atol=1e-12)
    assert len(looked) == sum(range(5, 0, -held))


def test_lenet_compares():
    models = nets(3, lambda: LeNet((3, 32, 32), 10))
    matrix = similarity_matrix(models, random(8, 3, 32, 32).float())
    assert torch.allclose(matrix.diagonal(), torch.ones(3, dtype=torch.float64))
    assert matrix[0, 1] < 0.999


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda a: similarity(a, a), "give a batch"),
        (lambda a: similarity(a, a, IMAGES, "cak"), "Did you mean 'cka'"),
        (lambda a: similarity(a, a, IMAGES, layers=["hiden.0"]), "Unknown layer"),
        (lambda a: similarity(a, a, IMAGES[:1]), "2 samples or more"),
        (lambda a: similarity(a, a, IMAGES[:3], CKA(debiased=True)), "4 samples or more"),
        (lambda a: weight_matrix(torch.ones(2, 2), "cka"), "similarity_matrix"),
        (lambda a: CKA().between(IMAGES, IMAGES[:5]), "same inputs"),
        (lambda a: DCKA().between(IMAGES, IMAGES), "raw inputs"),
        (lambda a: measure_named("cca", RBF()), "does not take a kernel"),
        (lambda a: measure_named("cosine", debiased=True), "debiased"),
        (lambda a: kernel_named("rfb"), "Did you mean 'rbf'"),
        (lambda a: RBF(0), "more than 0"),
        (lambda a: Polynomial(0), "1 or more"),
        (lambda a: layers_of(nn.ReLU()), "no layer"),
        (lambda a: similarity_matrix([], IMAGES), "at least one network"),
    ],
)
def test_mistakes_are_told(call, why):
    with pytest.raises(FedloomError, match=why):
        call(nets(1)[0])


def test_names_give_measures():
    assert measure_named("dcka", RBF(0.5), True) == DCKA(RBF(0.5), True)
    assert measure_named("cosine") == Cosine()
    assert measure_named("pearson", Linear()) == Pearson()
    assert kernel_named("poly:2") == Polynomial(2)


def test_the_client_that_chooses_first_is_drawn():
    matrix = np.ones((6, 6))
    first = {greedy_pairs(6, 1, stream(seed, "swap"), lambda a, rest: matrix[a, rest])[0][0]
             for seed in range(12)}  # fmt: skip
    assert len(first) > 3
