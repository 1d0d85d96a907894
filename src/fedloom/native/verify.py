"""Does a module compute what its trace says? Tried with numbers once, before the kernels take over.

A trace does not see everything: gradients that are switched off, hooks, a `forward` that was
replaced, tensors that are changed in place, other precisions, counters. So module and kernels run
the same small batch in both modes, from the same seed, and must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedloom.layout import Layout
from fedloom.native.net import Native

_SAMPLES = 5
_NEAR = 2e-3  # relative: single precision, and norms over a few samples


def agrees(native: Native, module: nn.Module, layout: Layout, shape: tuple[int, int, int]) -> bool:
    """Whether logits, gradients and statistics are the module's own."""
    with _restored(module, layout), torch.random.fork_rng(devices=[]), torch.enable_grad():
        _seed()
        row = drawn(layout, layout.flatten(module, dict.fromkeys(layout.extras, 0.0)))
        some = row[: layout.trainable]
        layout.load(module, row)
        x = torch.randn(_SAMPLES, *shape)
        module.train()
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        _seed()
        first = module(x)
        weighed = torch.randn_like(first)
        grads = torch.autograd.grad(
            (first * weighed).sum(), list(named.values()), allow_unused=True
        )
        after = layout.flatten(module, dict.fromkeys(layout.extras, 0.0))
        layout.load(module, row)
        _seed()
        again = module(x)
        _seed()
        weights = some.clone().requires_grad_()
        rest = row[layout.trainable :].clone()
        got = native(weights, rest, x, update=True)
        (grad,) = torch.autograd.grad((got * weighed).sum(), weights)
        wanted = torch.zeros_like(grad)
        for entry in layout.entries:
            if entry.kind == "param":
                value = dict(zip(named, grads, strict=True)).get(entry.name)
                if value is not None:
                    entry.view(wanted).copy_(value)
        moved = [(e.view(torch.cat([some, rest])), e.view(after)) for e in layout.entries
                 if e.kind == "buffer" and e.dtype == layout.dtype]  # fmt: skip
        layout.load(module, row)
        module.eval()
        _seed()
        looked = native.answers(row, x)
        _seed()
        pairs = [(got, first), (again, first), (grad, wanted), (looked, module(x)), *moved]
        return all(near(a.detach(), b.detach()) for a, b in pairs)


def drawn(layout: Layout, row: Tensor) -> Tensor:
    """Values that do not depend on what the module holds now: all workers must find the same."""
    for e in layout.entries:
        noise = torch.randn(e.shape)
        if e.kind == "param" and len(e.shape) > 1:
            e.view(row).copy_(noise / max(e.size // e.shape[0], 1) ** 0.5)
        elif e.kind == "param" or e.name.endswith(("running_mean", "running_var")):
            ones = e.name.endswith(("weight", "running_var"))
            e.view(row).copy_(float(ones) + 0.1 * noise.clamp(-3, 3))
        elif e.name.endswith("num_batches_tracked"):
            e.view(row).zero_()
    return row


def near(got: Tensor, wanted: Tensor) -> bool:
    """Equal but for rounding."""
    if got.shape != wanted.shape:
        return False
    apart = (got.double() - wanted.double()).norm()
    return bool(apart <= _NEAR * wanted.double().norm() + 1e-6)


def _seed() -> None:
    torch.default_generator.manual_seed(0)


@contextmanager
def _restored(module: nn.Module, layout: Layout) -> Iterator[None]:
    """Weights, buffers and modes are afterwards what they were."""
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
        for m, training in modes:
            m.training = training
