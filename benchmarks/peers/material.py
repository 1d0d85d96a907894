"""What every peer trains: the data, participants, batches and initial model that fedloom would use.

Only the draws are fedloom's. Images are normalised once, before the first round, so that a peer
spends its rounds on training.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload, federation
from fedloom.local import Budget
from fedloom.models import build
from fedloom.streams import stream
from fedloom.topology import Star

RATE = 0.05
CLASSES = 10


def clients(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of every client."""
    held_by = federation(workload)
    data = held_by.dataset
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    held = [held_by.indices(client, "train") for client in range(workload.clients)]
    return [
        (
            torch.from_numpy(data.x[at]).float().div_(255).sub_(mean).div_(std),
            torch.from_numpy(data.y[at].astype(np.int64)),
        )
        for at in held
    ]


def model(workload: Workload) -> nn.Module:
    """The network with its initial weights."""
    channels, height, width = map(int, workload.shape.split("x"))
    return build(workload.model, (channels, height, width), CLASSES)


def participants(workload: Workload, t: int) -> list[int]:
    """Who takes part in round t."""
    draw = Star().contacts(
        t, workload.clients, workload.participants, lambda name: stream(0, name, t)
    )
    return [int(client) for client in draw.participants]


def batches(samples: int, t: int, client: int) -> list[Tensor]:
    """The positions of each batch of a client in round t."""
    drawn = Budget().batches(samples, stream(0, "batches", t, client))
    return [torch.from_numpy(at) for at in drawn]
