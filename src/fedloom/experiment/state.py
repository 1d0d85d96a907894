"""The state of a run between two rounds: all that a checkpoint has to hold, and nothing else.

It is that of the two sides (`round.server`, `round.client`), and of the post between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.engine import Engine
from fedloom.errors import FedloomError
from fedloom.kinds import Sizes, Values
from fedloom.method import Method
from fedloom.newcomer import Newcomer
from fedloom.population import Population
from fedloom.returned import returned
from fedloom.round.client import Clients
from fedloom.round.plan import Plan
from fedloom.round.post import Post
from fedloom.round.server import Server

#: clients → the weights n_k of their data
Weigh = Callable[[np.ndarray], np.ndarray]


@dataclass
class State:
    """Both sides of the line."""

    plan: Plan
    server: Server
    clients: Clients
    post: Post

    @staticmethod
    def of(
        method: Method,
        sizes: Sizes,
        row: Tensor,
        weigh: Weigh,
        engine: Engine | None = None,
        optimiser: Values | None = None,
        plan: Plan | None = None,
        **post: object,
    ) -> State:
        """The state before the first round; `row` is the initial model."""
        plan = plan or Plan.of(method, sizes, optimiser)
        server = Server(
            method.mix, sizes.layout, plan.columns, row, sizes,
            told=plan.told, remembers="last" in method.select.needs,
            screens=bool(post.get("screen")), counts="seen" in method.topology.needs,
        )  # fmt: skip
        clients = Clients(method, plan, plan.initial(sizes, row), engine, weigh)
        nodes = method.mix.home == "node"
        gradients = method.local.hands_back == "gradients"
        return State(
            plan,
            server,
            clients,
            Post(plan, nodes=nodes, gradients=gradients, **post),  # type: ignore[arg-type]
        )

    @property
    def shared(self) -> Tensor:
        """The shared model, with initial values where columns are private."""
        return self.server.shared

    @property
    def kept(self) -> Population:
        return self.clients.kept

    @property
    def personal(self) -> bool:
        return self.plan.personal

    def knows(self, client: int) -> bool:
        """Whether this client has the model that it would be scored with."""
        return not self.personal or client in self.kept

    def models(self, clients: np.ndarray) -> Tensor:
        """The model that each client is scored with."""
        return self.clients.models(clients, self.server.tell())

    def candidates(self, newcomer: Newcomer, weights: np.ndarray) -> Tensor:
        """The models that a client without one of its own may try."""
        base = self.clients.base(self.server.tell())
        kept = self.kept if len(self.plan.private) else Population(self.plan.private, base.dtype)
        rows = returned(newcomer, "candidates", newcomer.candidates(base, kept, weights), Tensor)
        return self.plan.sections.model(rows)

    def tensors(self) -> dict[str, Tensor]:
        out = {**self.server.tensors(), **self.clients.tensors(), **self.post.tensors()}
        return {name: value.contiguous() for name, value in out.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.server.restore(tensors)
        self.clients.restore(tensors)
        self.post.restore(dict(tensors))

    def adopt(
        self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], same_clients: bool
    ) -> None:
        """Take the state of a run with other settings, unless some of it would be lost.

        What only this method keeps or remembers starts empty: its clients have the shared model.
        """
        kept = about["kept"]
        keeps = len(tensors.get("kept/clients", ())) > 0
        names = {path.split("/")[1] for path in tensors if path.startswith(("memory/", "server/"))}
        known = {*self.server.state, *self.server.memories()}
        if keeps and [list(r) for r in kept] != [list(r) for r in self.kept.columns.ranges]:
            raise FedloomError(
                "its clients keep private parts of the model, and this method keeps other ones. "
                "Fork it with a method that keeps the same."
            )
        if names - known:
            raise FedloomError(
                f"its method remembers '{sorted(names - known)[0]}' between rounds, but this one "
                "does not. Fork it with a method that does."
            )
        if (keeps or names) and not same_clients:
            raise FedloomError(
                "it holds per-client state, and clients would have other data here. Leave data, "
                "clients, partition and seed as they were."
            )
        owes = any(name.startswith("lost/") for name in tensors)
        sent = about.get("sent", self.plan.columns.ranges)
        same = same_clients and [list(r) for r in sent] == [
            list(r) for r in self.plan.columns.ranges
        ]
        if owes and not (same and self.post.owes):
            warnings.warn(
                "What the encoding had left out of clients' messages is forgotten: clients, what "
                "they send or the encoding are others than in the run that is forked.",
                stacklevel=2,
            )
            tensors = {name: v for name, v in tensors.items() if not name.startswith("lost/")}
        fresh = {f"server/{name}": value for name, value in self.server.state.items()}
        self.restore({**fresh, **tensors})
