"""A partition made elsewhere, read from a file that `Partition.save` or another program wrote."""

from __future__ import annotations

from fedloom.data.partition.deal import Dealing, Partitioner, Spec
from fedloom.data.partition.table import Partition


def deal(spec: Spec, dealing: Dealing) -> Partition:
    what = f"The partition {spec.argument}"
    return Partition.load(spec.argument).fitting(what, dealing.clients, len(dealing.y))


PARTITIONER = Partitioner(
    "file:PATH",
    "read from a file: .json rows of every client, .csv client of every row, .npz",
    deal,
    argument="PATH",
    names_rows=True,
)
