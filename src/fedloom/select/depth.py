"""DepthFL's selector: a prefix of the model's blocks, each with a classifier of its own behind it.

The model says what its prefixes are (`models.exits.Exits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fedloom.errors import FedloomError
from fedloom.models.counts import training_macs
from fedloom.models.exits import Exits
from fedloom.select.base import Ask, Select, Selection

#: of every prefix of a model, by what is counted
_COSTS: WeakKeyDictionary[nn.Module, dict[str, list[int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Prefix(Select):
    """The deepest prefix that a client of capacity r can afford, and never less than one block.

    A sub-model of width r costs about r² of the whole. By `parameters` (or `macs`) a prefix may
    cost as much; by `blocks` it has ⌈r·B⌉ of the B blocks. Capacities count relative to the
    strongest client's, which trains all blocks: what nobody trains would only disturb the answer.
    """

    budget: Literal["parameters", "macs", "blocks"] = "parameters"

    model_options = MappingProxyType({"exits": True})
    follows = True

    def choose(self, ask: Ask) -> Selection | None:
        module = ask.module
        assert isinstance(module, Exits)
        depth = self.depth(module, ask.capacity / ask.strongest)
        if depth == module.depths:
            return None
        # Tensors are called blocks.N.… and exits.N.…
        there = [e for e in ask.layout.entries if int(e.tensor.split(".")[1]) < depth]
        index = torch.cat([torch.arange(e.start, e.stop) for e in there])
        return Selection(index, depth, partial(module.prefix, depth))

    def depth(self, module: Exits, capacity: float) -> int:
        """The number of blocks, for a capacity relative to the strongest client's."""
        if capacity >= 1:
            return module.depths
        if self.budget == "blocks":
            return max(ceil(capacity * module.depths - 1e-9), 1)
        costs = self._costs(module)
        affordable = [d for d, cost in enumerate(costs, 1) if cost <= capacity**2 * costs[-1]]
        return max(affordable, default=1)

    def _costs(self, module: Exits) -> list[int]:
        known = _COSTS.setdefault(module, {})
        if self.budget not in known:
            prefixes = [module.prefix(d) for d in range(1, module.depths + 1)]
            known[self.budget] = [
                sum(p.numel() for p in m.parameters())
                if self.budget == "parameters"
                else training_macs(m, m.shape)
                for m in prefixes
            ]
        return known[self.budget]

    def check(self, module: nn.Module, shape: tuple[int, int, int], capacity: float) -> None:
        if not isinstance(module, Exits):
            raise FedloomError(
                f"{type(module).__name__} has no classifiers after its blocks, which depthfl "
                "trains. Use --model conv4, resnet18 or resnet34, or your own model made with "
                "fedloom.models.exits.Exits."
            )
