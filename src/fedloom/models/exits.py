"""A model with an exit behind each of its blocks (DepthFL): every prefix of it is a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError
from fedloom.models.inputs import blank


def with_exits(
    module: nn.Module, shape: tuple[int, int, int], classes: int, answers: int | None = None
) -> Exits:
    """A model's blocks with a classifier behind each, in place of the model's own; only the first
    `answers` (None: all) have a say when it is not training."""
    if isinstance(module, Exits):
        return module
    blocks = getattr(module, "exit_blocks", None)
    if blocks is None:
        raise FedloomError(
            f"{type(module).__name__} does not say what its blocks are, behind which classifiers "
            "could be put. Give it a method exit_blocks() that returns them in order, as a list of "
            "modules, or use mlp, lenet, conv4, resnet18 or resnet34."
        )
    made = blocks()
    if answers is not None and answers > len(made):
        raise FedloomError(
            f"exits={answers} is not valid: {type(module).__name__} has {len(made)} blocks, and a "
            "classifier behind each."
        )
    return Exits(made, shape, classes, answers)


class Exit(nn.Module):
    """A classifier on a feature map: the mean over positions, then one linear layer."""

    def __init__(self, channels: int, classes: int, maps: bool) -> None:
        super().__init__()
        self.maps = maps
        self.out = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean((2, 3)) if self.maps else x)


class Exits(nn.Module):
    """Blocks in a row with a classifier behind each.

    In training it returns the logits of all of them, (exits, batch, classes); otherwise the mean
    over the first `answers` of them, (batch, classes).
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        shape: tuple[int, int, int],
        classes: int,
        answers: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.classes, self.answers = shape, classes, answers or len(blocks)
        self.blocks = nn.ModuleList(blocks)
        x = blank(self.blocks[0], shape, 2)
        exits = []
        training = self.training
        with torch.no_grad():
            for block in self.eval().blocks:
                x = block(x)
                exits.append(Exit(x.shape[1], classes, x.dim() == 4))
        self.exits = nn.ModuleList(exits)
        self.train(training)

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
        for i, (block, leave) in enumerate(zip(self.blocks, self.exits, strict=True)):
            if i >= self.answers and not self.training:
                break
            x = block(x)
            logits.append(leave(x))
        every = torch.stack(logits)
        return every if self.training else every.mean(0)
