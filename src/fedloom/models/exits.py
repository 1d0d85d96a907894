"""A model with an exit behind each of its blocks (DepthFL): every prefix of it is a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError
from fedloom.models.inputs import blank
from fedloom.models.norm import norm2d, norm_of


def with_exits(module: nn.Module, shape: tuple[int, int, int], classes: int) -> Exits:
    """A model's blocks with a classifier behind each, in place of the model's own."""
    if isinstance(module, Exits):
        return module
    blocks = getattr(module, "exit_blocks", None)
    if blocks is None:
        raise FedloomError(
            f"{type(module).__name__} does not say after which blocks classifiers could be put. "
            "Give it a method exit_blocks() that returns them in order, as a list of modules, "
            "or use mlp, lenet, conv4, resnet18 or resnet34."
        )
    return Exits(blocks(), shape, classes)


class Separable(nn.Sequential):
    """A stage at little cost, as published DepthFL networks have it: twice a depthwise 3×3 and a
    pointwise convolution, norm and ReLU; the first has the stride, the second the new width."""

    def __init__(self, c_in: int, c_out: int, stride: int, norm: str) -> None:
        super().__init__(*_half(c_in, c_in, stride, norm), *_half(c_in, c_out, 1, norm))


def _half(c_in: int, c_out: int, stride: int, norm: str) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(c_in, c_in, 3, stride, 1, groups=c_in, bias=False),
        nn.Conv2d(c_in, c_out, 1, bias=norm == "none"),
        norm2d(norm, c_out),
        nn.ReLU(),
    )


class Exit(nn.Module):
    """A classifier on a feature map: separable convolutions that bring it to the width and the
    resolution of the last map, one for each stage that is missing; then the mean over positions and
    one linear layer. `maps` are channels and side of this map and of those behind it; features that
    are no map go straight to the linear layer."""

    def __init__(self, maps: Sequence[tuple[int, int]], features: int, classes: int, norm: str):
        super().__init__()
        self.maps = bool(maps)
        self.down = nn.Sequential(
            *(
                Separable(c_in, c_out, 2 if after < before else 1, norm)
                for (c_in, before), (c_out, after) in pairwise(maps)
            )
        )
        self.out = nn.Linear(maps[-1][0] if maps else features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(x).mean((2, 3)) if self.maps else x)


class Exits(nn.Module):
    """Blocks in a row with a classifier behind each.

    In training it returns the logits of all of them, (exits, batch, classes); otherwise their mean,
    (batch, classes).
    """

    def __init__(
        self, blocks: Sequence[nn.Module], shape: tuple[int, int, int], classes: int
    ) -> None:
        super().__init__()
        self.shape, self.classes = shape, classes
        self.blocks = nn.ModuleList(blocks)
        x = blank(self.blocks[0], shape, 2)
        given, training = [], self.training
        with torch.no_grad():
            for block in self.eval().blocks:
                x = block(x)
                given.append(tuple(x.shape[1:]))
        self.train(training)
        maps = [(c[0], max(c[1:])) for c in given if len(c) == 3]
        norm = norm_of(self.blocks)
        self.exits = nn.ModuleList(
            Exit(maps[i:] if len(c) == 3 else (), c[0], classes, norm) for i, c in enumerate(given)
        )

    @property
    def depths(self) -> int:
        return len(self.blocks)

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The layers that make logits."""
        return tuple(f"exits.{i}.out" for i in range(self.depths))

    def prefix(self, depth: int) -> Exits:
        """The model of the first blocks; its tensors have the names that they have here."""
        if not 1 <= depth <= self.depths:
            raise FedloomError(f"This model has 1 to {self.depths} blocks, not {depth}.")
        blocks, exits = self.blocks, self.exits
        try:
            self.blocks, self.exits = blocks[:depth], exits[:depth]
            smaller = copy.deepcopy(self)
        finally:
            self.blocks, self.exits = blocks, exits
        for layer in smaller.modules():  # a copy of a view is one of all that it is a view of
            for name, buffer in layer._buffers.items():
                layer._buffers[name] = None if buffer is None else buffer.clone()
        return smaller

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            logits.append(leave(x))
        every = torch.stack(logits)
        return every if self.training else every.mean(0)
