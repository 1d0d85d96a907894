"""Do kernels that the tests may not have run on compute the right thing on this CPU?"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F


def passes(number: int) -> bool:
    """A net with every kind of operation, forward, back and along a direction, against torch in
    double precision."""
    from fedloom.layout import Layout
    from fedloom.native.net import Native

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(16, 17, 3, padding=1), nn.Tanh(),
            nn.Conv2d(17, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.SiLU(),
            nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.GroupNorm(2, 6), nn.GELU(),
            nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 4),
        )  # fmt: skip
        x, y = torch.randn(19, 2, 13, 11, dtype=torch.float64), torch.randint(0, 4, (19,))
        direction = torch.randn(sum(p.numel() for p in net.parameters()))
    exact = copy.deepcopy(net).double()
    tensors = dict(exact.named_parameters())
    wanted = torch.autograd.grad(
        F.cross_entropy(exact(x), y), list(tensors.values()), create_graph=True
    )
    layout = Layout.of(net)
    row = layout.flatten(net)

    def flat(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        named = dict(zip(tensors, values, strict=True))
        kept = [named[e.name] for e in layout.entries if e.kind == "param"]
        # Kernels of convolutions lie in a row channels last.
        return torch.cat([(t.movedim(1, -1) if t.dim() == 4 else t).reshape(-1) for t in kept])

    first = flat(wanted)
    second = flat(torch.autograd.grad(first @ direction.double(), list(tensors.values())))
    native = Native(net, layout, (2, 13, 11), number)
    weights = row[: layout.trainable].clone().requires_grad_()
    loss = F.cross_entropy(native(weights, row[layout.trainable :].clone(), x.float()), y)
    (grad,) = torch.autograd.grad(loss, weights, create_graph=True)
    (along,) = torch.autograd.grad(grad @ direction, weights)
    return all(
        bool((got.double() - want.detach()).abs().max() < 1e-4 * want.abs().max())
        for got, want in ((grad.detach(), first), (along, second))
    )
