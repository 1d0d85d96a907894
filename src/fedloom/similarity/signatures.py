"""Signatures taken once, to compare only some pairs of networks.

`similarity_matrix` compares all pairs. Where one network after the other is compared with some of
the others, each needs its signatures once, and a row is their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError
from fedloom.similarity.measures import Measure
from fedloom.similarity.networks import BATCH, Models, answers, corresponding


@dataclass(frozen=True)
class Signatures:
    """What networks are compared by: for each layer a vector of every network.

    >>> from fedloom.similarity import Cosine
    >>> some = Signatures.of_rows(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), Cosine())
    >>> some.row(0, [2, 1])
    tensor([0.0000, 0.7071], dtype=torch.float64)
    """

    measure: Measure
    layers: tuple[Tensor, ...]  # networks × values

    @staticmethod
    def of(
        models: Models | Sequence[nn.Module],
        inputs: Tensor,
        measure: Measure,
        layers: Sequence[str] | None = None,
    ) -> Signatures:
        """By what their layers answer to these inputs. All of them are in memory: networks × layers
        × inputs² values."""
        if len(inputs) < measure.least:
            raise FedloomError(
                f"{type(measure).__name__} needs {measure.least} samples or more; there are "
                f"{len(inputs)} inputs."
            )
        names = corresponding(models, [layers] * len(models), inputs[: measure.least])
        known, out = measure.confounder(inputs), list[Tensor]()
        for i, model in enumerate(models):
            found = answers(model, inputs, names[i], BATCH)
            for k, name in enumerate(names[i]):
                vector = measure.signature(found[name].to(inputs.device), known)
                if i == 0:
                    out.append(vector.new_empty((len(names), len(vector))))
                out[k][i] = vector
        return Signatures(measure, tuple(out))

    @staticmethod
    def of_rows(rows: Tensor, measure: Measure) -> Signatures:
        """By the weights of flat models, one in each row."""
        return Signatures(measure, (torch.stack([measure.signature(row) for row in rows]),))

    def __len__(self) -> int:
        return len(self.layers[0])

    def row(self, base: int, others: Sequence[int]) -> Tensor:
        """The similarities of `base` to these others: no other pair is compared."""
        found = []
        for vectors, own in zip(self.layers, self._own, strict=True):
            products = torch.stack([vectors[i] @ vectors[base] for i in others])
            scaled = self.measure.scaled(products[None], own[[base]], own[list(others)])
            found.append(scaled[0].cpu())
        return torch.stack(found).mean(0)

    @cached_property
    def _own(self) -> tuple[Tensor, ...]:
        """The product of each signature with itself."""
        return tuple(torch.stack([v @ v for v in vectors]) for vectors in self.layers)
