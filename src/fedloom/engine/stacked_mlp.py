"""The gradient of a stack of multi-layer perceptrons, by hand: batched matrix products only.

The same numbers as `vmap` over autograd, several times faster: no graph is built, and every product
runs for all clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.layout import Layout
from fedloom.local.rule import LocalRule
from fedloom.models.nets import MLP

Stack = Mapping[str, tuple[Tensor, Tensor, Tensor | None]]


def gradient(
    module: nn.Module, layout: Layout, rule: LocalRule
) -> Callable[[Tensor, Tensor, Stack], tuple[Tensor, Tensor]] | None:
    """The stacked gradient, if this is an MLP and the rule minimises plain cross-entropy."""
    plain = type(rule).objective is LocalRule.objective and not rule.extras
    if type(module) is not MLP or not plain or layout.trainable != layout.size:
        return None
    entries = {e.name: e for e in layout.entries}
    names = [f"hidden.{i}" for i in range(len(module.hidden))] + ["out"]
    layers = [(entries[f"{n}.weight"], entries[f"{n}.bias"]) for n in names]

    def compute(weights: Tensor, rows: Tensor, data: Stack) -> tuple[Tensor, Tensor]:
        x, y, weight = data["train"]
        acts = [x.flatten(2)]
        for i, (w, b) in enumerate(layers):
            z = torch.baddbmm(b.view(weights).unsqueeze(1), acts[-1], w.view(weights).mT)
            acts.append(z.relu_() if i < len(layers) - 1 else z)
        # ∂loss/∂logits = (softmax − one-hot) · weight / Σ weight
        log_p = F.log_softmax(acts.pop().float(), dim=-1)
        share = torch.full_like(log_p[..., 0], 1 / y.shape[1])
        if weight is not None:
            share = weight / weight.sum(1, keepdim=True)
        picked = log_p.gather(-1, y.unsqueeze(-1))
        loss = -(picked.squeeze(-1) * share).sum(1)
        delta = log_p.exp_()
        delta.scatter_add_(-1, y.unsqueeze(-1), torch.full_like(picked, -1.0))
        delta.mul_(share.unsqueeze(-1))
        grad = torch.empty_like(weights)
        for i in reversed(range(len(layers))):
            w, b = layers[i]
            w.view(grad).copy_(torch.bmm(delta.mT, acts[i]))
            b.view(grad).copy_(delta.sum(1))
            if i:
                delta = torch.bmm(delta, w.view(weights)) * (acts[i] > 0)
        return grad, loss

    return compute
