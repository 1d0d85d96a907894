"""An ensemble that votes: several models, one answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Voting(nn.Module):
    """Scores whose largest is the class that most members predict; ties go to the likelier one."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.stack([member(x).softmax(-1) for member in self.members])
        votes = F.one_hot(probabilities.argmax(-1), probabilities.shape[-1]).sum(0)
        return votes + probabilities.mean(0) / 2
