"""Partition: which client holds which samples, by one of a few well-known recipes.

A recipe is written `name[:argument][,key=value...]`, such as `dirichlet:0.5,min=10`. The same
recipe, labels, clients and seed give the same partition, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedloom.data.partition import (
    by,
    classes,
    dirichlet,
    file,
    iid,
    quantity,
    ring,
    shards,
    skew,
)
from fedloom.data.partition.deal import ClassSets, Dealing, Spec
from fedloom.data.partition.table import Partition
from fedloom.errors import FedloomError, unknown
from fedloom.streams import stream

__all__ = ["Partition", "by_class", "by_column", "names_rows", "parse", "partition", "partitioners"]

_PARTITIONERS = {
    each.name: each
    for each in (
        iid.PARTITIONER,
        dirichlet.PARTITIONER,
        classes.PARTITIONER,
        ring.PARTITIONER,
        shards.PARTITIONER,
        quantity.PARTITIONER,
        skew.PARTITIONER,
        by.PARTITIONER,
        file.PARTITIONER,
    )
}


_WITHOUT_CLASSES = ("iid", "quantity", "by", "file")


def partitioners() -> list[tuple[str, str, str]]:
    """Name, grammar and one line for every recipe."""
    return [(p.name, p.grammar, p.about) for p in _PARTITIONERS.values()]


def partition(
    spec: str,
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    n_classes: int | None = None,
    reserve: ClassSets = frozenset(),
    purpose: str | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
) -> Partition:
    """Deal the samples with labels `y` to the clients.

    `reserve` are combinations of classes that `classes:K` and `ring:K` give to no client, `columns`
    what the data says of every sample besides its label, for `by:COLUMN`.

    >>> [p.tolist() for p in partition("shards:1", np.array([0, 0, 1, 1]), 2, seed=0)]
    [[0, 1], [2, 3]]
    """
    name, parsed = parse(spec)
    labels = np.asarray(y)
    if clients < 1:
        raise FedloomError(f"There must be at least 1 client, not {clients}.")
    if clients > len(labels):
        raise FedloomError(
            f"{clients} clients cannot share {len(labels)} samples. Use at most {len(labels)} "
            "clients, or more data."
        )
    n_classes = int(labels.max()) + 1 if n_classes is None else n_classes
    rng = stream(seed, "partition", name) if purpose is None else stream(seed, purpose)
    dealing = Dealing(labels, clients, n_classes, rng, reserve, columns or {})
    with np.errstate(over="ignore", invalid="ignore"):  # `counts` refuses what overflows
        return _PARTITIONERS[name].deal(parsed, dealing)


def by_class(spec: str) -> bool:
    """Whether a recipe looks at the classes of samples."""
    return parse(spec)[0] not in _WITHOUT_CLASSES


def names_rows(spec: str | Partition) -> bool:
    """Whether a partition itself assigns rows to clients."""
    return isinstance(spec, Partition) or _PARTITIONERS[parse(spec)[0]].names_rows


def by_column(spec: str | Partition) -> str | None:
    """The column that a partition deals by, if it does."""
    if not isinstance(spec, str) or not spec.strip().startswith("by:"):
        return None
    return parse(spec)[1].argument


def parse(text: str) -> tuple[str, Spec]:
    """The name of the recipe and what was given to it."""
    name, colon, rest = text.strip().partition(":")
    if not colon:
        name, comma, rest = name.partition(",")
        rest = comma + rest
    if name not in _PARTITIONERS:
        raise unknown("partition", name, _PARTITIONERS)
    partitioner = _PARTITIONERS[name]
    # A path may contain commas, and so may the name of a column.
    argument, *pairs = [rest] if name in ("file", "by") else rest.split(",")
    options = dict(pair.strip().partition("=")[::2] for pair in pairs)
    spec = Spec(text, partitioner.grammar, argument.strip(), options)
    if partitioner.argument is None and argument:
        raise spec.wrong(f"{name} takes no argument.")
    if partitioner.argument is not None and not argument:
        raise spec.wrong(f"{partitioner.argument} is missing.")
    for option in options:
        if option not in partitioner.options:
            raise unknown(f"option of partition '{name}'", option, partitioner.options)
    return name, spec
