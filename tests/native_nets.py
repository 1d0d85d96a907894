"""Random networks of every kind of layer that the kernels know."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.native.library import library

needs_kernels = pytest.mark.skipif(
    library() is None, reason="fedloom was installed without a compiler"
)

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU,
               lambda: nn.GELU(approximate="tanh"))  # fmt: skip


class Residual(nn.Module):
    """A branch of two convolutions, functional activations, and an addition."""

    def __init__(self, channels, norm, groups, last=F.relu):
        super().__init__()
        self.last = last
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.norm = norm(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.last(self.second(F.silu(self.norm(self.first(x)))) + x)


def norms(rng):
    return rng.choice([nn.BatchNorm2d, lambda c: nn.BatchNorm2d(c, affine=False),
                       lambda c: nn.GroupNorm(1 if c % 2 else 2, c),
                       lambda c: nn.Identity()])  # fmt: skip


def convolution(rng, c, h, w):
    k, p, s = rng.choice([1, 2, 3, 5]), rng.choice([0, 1, 2]), rng.choice([1, 1, 2, 3])
    kw, d = rng.choice([k, k, 3]), rng.choice([1, 1, 1, 2])
    out, groups = rng.choice([1, 2, 3, 4, 5, 8, 11, 18, 33]), 1
    if rng.random() < 0.3:
        out, groups = c * rng.choice([1, 2]), c  # depthwise
    elif c % 2 == 0 and out % 2 == 0 and rng.random() < 0.3:
        groups = 2
    oh, ow = (h + 2 * p - d * (k - 1) - 1) // s + 1, (w + 2 * p - d * (kw - 1) - 1) // s + 1
    if min(oh, ow) < 2:
        return None, c, h, w
    layer = nn.Conv2d(c, out, (k, kw), s, p, d, groups, bias=rng.random() < 0.8)
    return layer, out, oh, ow


def network(seed):
    """A network, the shape of its images and a batch size."""
    rng = random.Random(seed)
    shape = c, h, w = rng.choice([1, 2, 3, 4, 17]), rng.randint(7, 22), rng.randint(7, 22)
    layers = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(rng.randint(1, 3)):
            layer, c, h, w = convolution(rng, c, h, w)
            if layer is None:
                continue
            layers += [layer, norms(rng)(c)]
            kind = rng.random()
            if kind < 0.3:
                pair = [nn.MaxPool2d(2), nn.ReLU()]
                rng.shuffle(pair)
                layers, h, w = layers + pair, h // 2, w // 2
            elif kind < 0.4:
                layers += [nn.MaxPool2d(3, 2, 1), rng.choice(ACTIVATIONS)()]
                h, w = (h - 1) // 2 + 1, (w - 1) // 2 + 1
            elif kind < 0.5:
                layers, h, w = [*layers, nn.AvgPool2d(2)], h // 2, w // 2
            else:
                layers.append(rng.choice(ACTIVATIONS)())
            if rng.random() < 0.3:
                layers.append(Residual(c, norms(rng), c if rng.random() < 0.5 else 1))
            if min(h, w) < 3:
                break
        if rng.random() < 0.3:
            layers, h, w = [*layers, nn.AdaptiveAvgPool2d(1)], 1, 1
        layers.append(nn.Flatten())
        features = c * h * w
        for _ in range(rng.randint(0, 2)):
            width = rng.choice([7, 20, 33, 84])
            layers.append(nn.Linear(features, width, bias=rng.random() < 0.8))
            features = width
            norm = rng.choice([nn.LayerNorm, nn.BatchNorm1d, lambda f: nn.Identity()])
            layers += [norm(width), rng.choice(ACTIVATIONS)()]
        layers.append(nn.Linear(features, rng.choice([2, 10, 62])))
    net = nn.Sequential(*layers)
    batch = rng.choice([1, 2, 3, 8, 13, 32, 70])
    coupled = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    return net, shape, max(batch, 8) if coupled else batch


def wide_network(seed):
    """The same of convolutions of 3×3 that are computed with fewer products. They round more
    coarsely, so activations are smooth: a ReLU at 0 would make a jump of that."""
    rng = random.Random(seed)
    shape = c, h, w = rng.choice([3, 16, 21]), rng.randint(5, 17), rng.randint(5, 17)
    layers = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(rng.randint(1, 3)):
            out, p = rng.choice([16, 17, 31, 48, 70]), rng.choice([0, 1, 1, 2])
            layers.append(nn.Conv2d(c, out, 3, padding=p, bias=rng.random() < 0.8))
            c, h, w = out, h + 2 * p - 2, w + 2 * p - 2
            if rng.random() < 0.3:
                layers, h, w = [*layers, nn.MaxPool2d(2)], h // 2, w // 2
            layers += [rng.choice([nn.BatchNorm2d, nn.Identity])(c), rng.choice(ACTIVATIONS[1:5])()]
            if rng.random() < 0.3:
                layers.append(Residual(c, lambda c: nn.Identity(), 1, F.silu))
            if min(h, w) < 3:
                break
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(c * h * w, 10))
    return net, shape, rng.choice([2, 3, 8, 13, 32])
