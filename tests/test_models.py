import pytest
import torch
from torch import nn

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.models import MODELS, build, choose
from fedloom.models.norm import StaticBatchNorm2d, measuring
from fedloom.models.strided import tame_strides


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (1, 28, 28), 784 * 100 + 100 + 1010),
        ("lenet", (3, 32, 32), 62_006),
        ("conv4", (1, 28, 28), 9 * (64 + 64 * 128 + 128 * 256 + 256 * 512) + 3 * 960 + 5130),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet34", (3, 64, 64), 21_282_122),
    ],
)
def test_sizes_are_the_published_ones(name, shape, parameters):
    assert Layout.of(build(name, shape, 10)).trainable == parameters


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gru", "unet")])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_model_takes_grey_and_colour_images(name, shape):
    options = {"width": 8} if name.startswith("resnet") else {}
    assert build(name, shape, 7, options=options)(torch.zeros(2, *shape)).shape == (2, 7)


def test_weights_come_from_the_seed_and_leave_torchs_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (build("mlp", (1, 8, 8), 10, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.out.weight, same.out.weight)
    assert not torch.equal(first.out.weight, other.out.weight)


def test_auto_takes_no_table_for_a_large_image():
    assert choose((1, 1, 40)) == "mlp"


def test_auto_goes_by_the_images():
    assert [choose(s) for s in [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)]] == [
        "mlp", "mlp", "lenet", "resnet18",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("lenett", (3, 32, 32), 10), "Did you mean 'lenet'"),
        (lambda: build("lenet", (1, 8, 8), 10), "16×16"),
        (lambda: build("conv4", (1, 4, 4), 10), "8×8"),
        (lambda: build("mlp", (1, 8, 8), 10, options={"hiden": 3}), "Did you mean 'hidden'"),
        (lambda: build("conv4", (1, 8, 8), 10, options={"norm": "bach"}), "Did you mean 'batch'"),
        (lambda: build(lambda: None, (1, 8, 8), 10), "factory"),
        (lambda: build(lambda s, c: 3, (1, 8, 8), 10), "not a torch.nn.Module"),
    ],
)
def test_wrong_models_are_refused(call, message):
    with pytest.raises(FedloomError, match=message):
        call()


def test_static_norm_ignores_training_and_measures_on_demand():
    norm = StaticBatchNorm2d(2, momentum=None)
    x = torch.randn(64, 2, 3, 3) * 3 + 1
    out = norm.train()(x)
    assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    with measuring(norm), torch.no_grad():
        norm(x[:32])
        norm(x[32:])
    halves = (x[:32].mean((0, 2, 3)) + x[32:].mean((0, 2, 3))) / 2
    assert torch.allclose(norm.running_mean, halves, atol=1e-6)
    assert torch.allclose(norm.eval()(x).mean((0, 2, 3)), torch.zeros(2), atol=1e-2)


def test_tamed_strides_compute_the_same():
    conv = nn.Conv2d(3, 5, 1, (2, 3))
    x = torch.randn(2, 3, 7, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    plain = conv(x.contiguous())
    tamed = tame_strides(nn.Sequential(conv))(x)
    assert torch.allclose(plain, tamed, atol=1e-6)
    tamed.sum().backward()
    assert x.grad.abs().sum() > 0
    assert (x.grad[:, :, 1] == 0).all()  # rows that were passed over


@pytest.mark.parametrize("method", ["heterofl", "fjord"])
def test_narrow_resnets_train_in_any_order_of_memory(quick, method):
    """A sub-model of 2 to 6 channels: its gradients once wrote beyond their memory."""
    result = quick(
        method, model="resnet18", capacities="0.5:0.5,0.25:0.5", rounds=2, steps=3,
        model_options={"width": 8}, eval_clients=0,
    )  # fmt: skip
    assert len(result.rounds) == 2
