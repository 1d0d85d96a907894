"""The similarity of whole networks: the mean over their corresponding layers (S0 §4-8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError, unknown
from fedloom.similarity.activations import Network, activations
from fedloom.similarity.measures import Measure, measure_named

BATCH = 256  # inputs that go through a network together
MEMORY = 2**30  # bytes of signatures that are held at a time, if more than one network has
_NOTHING = "Give at least one network, and one layer of it with something to compare."


class Models(Protocol):
    """Networks that can be iterated over repeatedly; each is finished with before the next."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[nn.Module | Network]: ...


def similarity(
    a: nn.Module,
    b: nn.Module,
    inputs: Tensor | None = None,
    measure: str | Measure = "cka",
    layers: Sequence[str] | None = None,
    layers_b: Sequence[str] | None = None,
    batch: int = BATCH,
) -> float:
    """How similar two networks are on these inputs, or by their weights for `cosine` and `pearson`.

    `layers` names the layers of both (all with weights, unless given); networks of different make
    need those of the second too, in the corresponding order. Layers may differ in width, but not
    where weights are compared. At most `batch` inputs go through a network at a time; the measure
    is taken over all of them at once.

    >>> net = nn.Linear(4, 3)
    >>> round(similarity(net, net, torch.randn(8, 4), layers=[""]), 6)
    1.0
    """
    named = [layers, layers if layers_b is None else layers_b]
    found = _matrix([a, b], inputs, measure, named, batch)
    return float(found[0, 1])


def similarity_matrix(
    models: Models | Sequence[nn.Module],
    inputs: Tensor | None = None,
    measure: str | Measure = "cka",
    layers: Sequence[str] | None = None,
    batch: int = BATCH,
) -> Tensor:
    """The similarities of all pairs: one product of stacked signatures for each layer.

    A signature has as many values as there are pairs of inputs. Where those of all networks and
    layers are more than a gigabyte, some networks at a time are compared with all that follow.

    >>> nets = [nn.Linear(4, 3) for _ in range(3)]
    >>> similarity_matrix(nets, torch.randn(8, 4), layers=[""]).shape
    torch.Size([3, 3])
    """
    return _matrix(models, inputs, measure, [layers] * len(models), batch)


def weight_matrix(rows: Tensor, measure: str | Measure = "cosine") -> Tensor:
    """The same for flat models, one in each row, on their weights."""
    chosen = measure_named(measure) if isinstance(measure, str) else measure
    if not len(rows):
        raise FedloomError(_NOTHING)
    if not chosen.on_weights:
        raise FedloomError(
            f"{type(chosen).__name__} compares what networks answer to inputs: use "
            "similarity_matrix, or compare weights by cosine or pearson."
        )
    vectors = torch.stack([chosen.signature(row) for row in rows])
    return _symmetric(chosen.scale(vectors @ vectors.T))


def _matrix(
    models: Models | Sequence[nn.Module],
    inputs: Tensor | None,
    measure: str | Measure,
    layers: Sequence[Sequence[str] | None],
    batch: int,
) -> Tensor:
    chosen = measure_named(measure) if isinstance(measure, str) else measure
    if not len(layers):
        raise FedloomError(_NOTHING)
    if any(isinstance(given, str) for given in layers):
        raise FedloomError("Give layers as a list of names, such as layers=['conv1', 'fc'].")
    if chosen.on_weights:
        return weight_matrix(_all_weights(models, layers, chosen), chosen)
    if not isinstance(inputs, Tensor):
        raise FedloomError(
            f"{type(chosen).__name__} compares what networks answer to inputs: give a batch, as a "
            "tensor."
        )
    if not isinstance(batch, int) or batch < 1:
        raise FedloomError(f"batch={batch} is not valid: give a whole number from 1 up.")
    if len(inputs) < chosen.least:
        raise FedloomError(
            f"{type(chosen).__name__} needs {chosen.least} samples or more; there are "
            f"{len(inputs)} inputs."
        )
    names = corresponding(models, layers, inputs[: chosen.least])
    known = chosen.confounder(inputs)
    products = torch.zeros((len(names[0]), len(names), len(names)), dtype=torch.float64)
    size = max(MEMORY // (8 * len(inputs) ** 2 * len(names[0])), 1)
    for start in range(0, len(names), size):
        held: list[Tensor] = []  # by layer: the signatures of `size` networks from `start` on
        for i, model in enumerate(models):
            if i < start:
                continue
            found = answers(model, inputs, names[i], batch)
            mine = [chosen.signature(found[name].to(inputs.device), known) for name in names[i]]
            if not held:
                held = [v.new_zeros((min(size, len(names) - start), len(v))) for v in mine]
            for k, vector in enumerate(mine):
                if i < start + size:
                    held[k][i - start] = vector
                else:
                    products[k, start : start + size, i] = (held[k] @ vector).cpu()
        for k, vectors in enumerate(held):
            products[k, start : start + size, start : start + size] = (vectors @ vectors.T).cpu()
    above = products.triu(1)
    products = above + above.mT + torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    return _symmetric(torch.stack([chosen.scale(p) for p in products]).mean(0))


def answers(
    model: nn.Module | Network, inputs: Tensor, names: Sequence[str], batch: int
) -> Mapping[str, Tensor]:
    """The activations of a network, some inputs at a time."""
    parts = [activations(model, some, names) for some in inputs.split(batch)]
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def corresponding(
    models: Models | Sequence[nn.Module], layers: Sequence[Sequence[str] | None], inputs: Tensor
) -> list[tuple[str, ...]]:
    """The layers of every network that are compared: those named, or all that answer."""
    names = [
        tuple(activations(model, inputs)) if given is None else tuple(given)
        for model, given in zip(models, layers, strict=True)
    ]
    depths = sorted({len(n) for n in names})
    if depths[0] == 0:
        raise FedloomError(_NOTHING)
    if len(depths) > 1:
        raise FedloomError(
            f"These networks have {depths[0]} and {depths[-1]} layers, so it is not clear which "
            "correspond: name them (layers=..., and layers_b=... for the second of two)."
        )
    return names


def _all_weights(
    models: Models | Sequence[nn.Module],
    layers: Sequence[Sequence[str] | None],
    measure: Measure,
) -> Tensor:
    """The weights of each network, or of the layers named, in a row."""
    rows, shapes = list[Tensor](), set[tuple[torch.Size, ...]]()
    for model, names in zip(models, layers, strict=True):
        assert isinstance(model, nn.Module)
        parts = dict(model.named_modules())
        for name in names or ():
            if name not in parts:
                raise unknown("layer", name, (n for n in parts if n))
        chosen = [model] if names is None else [parts[name] for name in names]
        found = [p.detach() for part in chosen for p in part.parameters()]
        if not found:
            raise FedloomError(_NOTHING)
        shapes.add(tuple(p.shape for p in found))
        rows.append(torch.cat([p.reshape(-1).cpu() for p in found]))
    if len(shapes) > 1:
        raise FedloomError(
            f"{type(measure).__name__} compares weights one by one, and these networks have "
            "weights of different shapes: use a measure on activations, such as cka."
        )
    return torch.stack(rows)


def _symmetric(matrix: Tensor) -> Tensor:
    """The same to the last bit on both sides of the diagonal, whatever order sums ran in."""
    return (matrix + matrix.T) / 2
