"""Every user a client: the rows with the same value in a column of the data, under that name."""

from __future__ import annotations

from fedloom.data.partition.deal import Dealing, Partitioner, Spec
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError, nearest


def deal(spec: Spec, dealing: Dealing) -> Partition:
    name, columns = spec.argument, dealing.columns
    if name not in columns:
        there = f"It has {', '.join(columns)}." if columns else "It has none that could be used."
        raise FedloomError(
            f"Partition '{spec.text}': the data has no column '{name}' with the client of every "
            f"row. {nearest(name, columns)}{there}"
        )
    dealt = Partition.of_ids(columns[name][: len(dealing.y)])
    return dealt.fitting(f"The partition {spec.text}", dealing.clients, len(dealing.y))


PARTITIONER = Partitioner(
    "by:COLUMN",
    "every value of a column is a client, under that name",
    deal,
    argument="COLUMN",
    names_rows=True,
)
