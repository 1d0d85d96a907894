"""The state of a run between two rounds: all that a checkpoint has to hold, and nothing else.

One shared row, the columns that clients keep, and what the method's parts declared to remember.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.mix.base import Fields, Mix, Mixed
from fedloom.population import Population
from fedloom.select import Last

#: clients → the weights n_k of their data
Weigh = Callable[[np.ndarray], np.ndarray]


_LAST = "last"  # what a client last sent, kept for selectors that ask


class State:
    """The shared row, the kept rows and the declared memory."""

    def __init__(
        self,
        layout: Layout,
        mix: Mix,
        shared: Tensor,
        weigh: Weigh | None = None,
        recalls: bool = False,
    ) -> None:
        self.shared = shared
        self.weigh = weigh
        self.kept = Population(mix.kept(layout), layout.dtype)
        names = (*mix.memory, _LAST) if recalls else mix.memory
        self.memory: dict[str, dict[int, Fields]] = {name: {} for name in names}
        self.recalls = recalls

    @property
    def personal(self) -> bool:
        """Whether clients keep anything of their own."""
        return len(self.kept.columns) > 0

    def rows(self, clients: np.ndarray) -> Tensor:
        """The model of each client: what it keeps over what is shared."""
        return self.kept.compose(clients, self.shared)

    def apply(self, mixed: Mixed, clients: np.ndarray, rows: Tensor) -> None:
        """Keep what the clients trained, then what the mix made of it."""
        undeclared = set(mixed.memory) - set(self.memory)
        if undeclared:
            raise FedloomError(
                f"The mix remembers '{sorted(undeclared)[0]}' without declaring it: add the name "
                "to its `memory`, so that checkpoints and deployment know of it."
            )
        if self.personal:
            self.kept.put(clients, rows)
        if mixed.reset:
            self.kept.clear()
        if mixed.shared is not None:
            self.shared = mixed.shared
        if mixed.clients is not None and mixed.rows is not None:
            self.kept.put(mixed.clients, mixed.rows)
        for name, entries in mixed.memory.items():
            self.memory[name].update(entries)

    def lasts(self, clients: np.ndarray) -> list[Last | None] | None:
        """What these clients last sent, if anybody wants to know."""
        if not self.recalls:
            return None
        known = [self.memory[_LAST].get(int(client)) for client in clients]
        return [None if k is None else Last(k["row"], k.get("index")) for k in known]

    def recall(
        self, clients: np.ndarray, rows: Sequence[Tensor], indexes: Sequence[Tensor | None]
    ) -> None:
        """Keep what clients sent, if anybody will want to know."""
        if self.recalls:
            for client, row, index in zip(clients, rows, indexes, strict=True):
                where = {} if index is None else {"index": index.to(torch.int32)}
                self.memory[_LAST][int(client)] = {"row": row.clone(), **where}

    def tensors(self) -> dict[str, Tensor]:
        out = {"shared": self.shared}
        if self.personal:
            out |= {f"kept/{name}": value for name, value in self.kept.tensors().items()}
            if self.weigh is not None:  # a newcomer may be given their average
                out["kept/weights"] = torch.from_numpy(self.weigh(self.kept.clients))
        for name, entries in self.memory.items():
            for key, fields in entries.items():
                out |= {f"memory/{name}/{key}/{field}": v for field, v in fields.items()}
        return {name: value.contiguous() for name, value in out.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors["shared"].shape != self.shared.shape:
            raise FedloomError(
                f"The checkpoint holds a model of {tensors['shared'].numel():,} values, this "
                f"config builds one of {self.shared.numel():,}."
            )
        self.shared = tensors["shared"].clone()
        if self.personal and "kept/clients" in tensors:
            self.kept.restore({name: tensors[f"kept/{name}"] for name in ("clients", "rows")})
        for path, value in tensors.items():
            if path.startswith("memory/"):
                _, name, key, field = path.split("/", 3)
                self.memory[name].setdefault(int(key), {})[field] = value.clone()

    def adopt(
        self, tensors: Mapping[str, Tensor], kept: Sequence[Sequence[int]], same_clients: bool
    ) -> None:
        """Take the state of a run with other settings, unless some of it would be lost.

        What only this method keeps or remembers starts empty: its clients have the shared model.
        """
        keeps = len(tensors.get("kept/clients", ())) > 0
        names = {path.split("/")[1] for path in tensors if path.startswith("memory/")}
        if keeps and [list(r) for r in kept] != [list(r) for r in self.kept.columns.ranges]:
            raise FedloomError(
                "its clients keep parts of the model to themselves, and this method would not keep "
                "the same ones. Fork it with a method that does."
            )
        if names - set(self.memory):
            raise FedloomError(
                f"its method remembers '{sorted(names - set(self.memory))[0]}' between rounds, and "
                "this one does not. Fork it with a method that does."
            )
        if (keeps or names) and not same_clients:
            raise FedloomError(
                "it holds what its clients keep or what is remembered of them, and clients would "
                "have other data here. Leave data, clients, partition and seed as they were."
            )
        self.restore(tensors)
