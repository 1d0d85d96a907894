"""A partition made elsewhere, read from a file that `Partition.save` or another program wrote."""

from __future__ import annotations

from fedloom.data.partition.deal import Partitioner, Spec, Task
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError


def deal(spec: Spec, task: Task) -> Partition:
    path = spec.argument
    loaded = Partition.load(path)
    if not len(loaded):
        raise FedloomError(f"The partition {path} has no clients.")
    if len(loaded) != task.clients:
        raise FedloomError(
            f"The partition {path} is for {len(loaded)} clients, not {task.clients}. "
            f"Set clients to {len(loaded)}."
        )
    if len(loaded.indices) and loaded.indices.max() >= len(task.y):
        raise FedloomError(
            f"The partition {path} has index {loaded.indices.max()}, but the data has "
            f"{len(task.y)} samples. Was it made for other data, or for pooled data?"
        )
    return loaded


PARTITIONER = Partitioner(
    "file:PATH", "read from a .json list of lists of indices, or .npz", deal, argument="PATH"
)
