"""The client side: all that happens where the data is.

In simulation this is one object for all clients: it holds what each keeps (private columns of the
model and named state), composes the model that a client trains or is scored with, lets the engine
train, and makes the message that leaves. Nothing but `Sent` goes from here to the server; nothing
but `Told`, and what a mix delivers, comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import Engine, Lasts, Order, Trained
from fedloom.method import Method
from fedloom.newcomer import MeanPart
from fedloom.population import Population
from fedloom.round.messages import Sent, Told
from fedloom.round.plan import OWN, Plan
from fedloom.round.screen import unsound


@dataclass(frozen=True)
class Round:
    """What the clients of a round made: their rows at its start and end, and what it took."""

    clients: np.ndarray
    starts: Tensor
    rows: Tensor
    trained: Trained
    failed: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # diverged
    given: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # a first part


class Clients:
    """The clients' side of the line. `weigh` gives the weights n_k of clients' data."""

    def __init__(
        self,
        method: Method,
        plan: Plan,
        initial: Tensor,
        engine: Engine | None,
        weigh: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self.plan = plan
        self._engine = engine
        self.weigh = weigh
        self._own, self._beside = method.own, plan.own_sections(method)
        self._validates = method.mix.validates
        self._first = method.first
        self._initial = initial  # a whole row of initial values
        self.kept = Population(plan.sections.columns(plan.private, plan.keeps), initial.dtype)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "these clients can't train: they have no engine"
        return self._engine

    def rows(self, clients: np.ndarray, told: Told) -> Tensor:
        """Each client's row: what it was told, and over that what it keeps."""
        return self.kept.compose(clients, self.base(told))

    def base(self, told: Told) -> Tensor:
        """The row of a client that keeps nothing yet."""
        row = self._initial.clone()
        self.plan.columns.put(row, told.model)
        for name in self.plan.told:
            self.plan.sections[name].view(row).copy_(told.values[name])
        return row

    def models(self, clients: np.ndarray, told: Told) -> Tensor:
        """The model that each client is scored with."""
        rows = self.rows(clients, told)
        models = self.plan.sections.model(rows)
        if OWN not in self.plan.keeps:
            return models
        there = [i for i, client in enumerate(clients) if int(client) in self.kept]
        models = models.clone()
        models[there] = self.plan.sections[OWN].view(rows)[there]
        return models

    def train(self, order: Order, clients: np.ndarray, told: Told, lasts: Lasts = None) -> Round:
        """Let these clients train, and keep what they keep."""
        new = self._given(clients)
        starts = self._starts(clients, told, new)
        trained = self.engine.train(order, clients, starts, lasts)
        rows = _scattered(starts, trained)
        if self._own is not None:
            beside = self._train_own(replace(order, rule=self._own), clients, starts)
            models = torch.stack(beside.rows)[:, : self.plan.sections.layout.size]
            self.plan.sections[OWN].view(rows).copy_(models)
            trained = trained.with_more(beside)
        bad = unsound(rows)
        rows[bad], failed = starts[bad], clients[bad]  # they go on from where they were
        if len(self.kept.columns):
            self._keep(clients, rows, failed)
        return Round(clients, starts, rows, trained, failed, clients[new])

    def _given(self, clients: np.ndarray) -> list[int]:
        """The positions of those who start from the average of all private parts."""
        if self._first == "initial" or not len(self.kept) or not len(self.plan.private):
            return []
        return [i for i, client in enumerate(clients) if int(client) not in self.kept]

    def _starts(self, clients: np.ndarray, told: Told, new: list[int]) -> Tensor:
        """The rows that these clients start a round from."""
        rows = self.rows(clients, told)
        if not new:
            return rows
        weights = self.weigh(self.kept.clients)
        mean = MeanPart().candidates(self.base(told), self.kept, weights)[0]
        some = rows[new]
        self.plan.private.put(some, self.plan.private.take(mean))
        rows = rows.clone()
        rows[new] = some
        return rows

    def _keep(self, clients: np.ndarray, rows: Tensor, failed: np.ndarray) -> None:
        """What clients keep of their rows; one whose training diverged keeps what it had."""
        well = ~np.isin(clients, failed)
        self.kept.put(clients[well], rows if well.all() else rows[torch.from_numpy(well)])

    def message(self, done: Round, senders: np.ndarray) -> Sent:
        """What leaves the senders: a copy where it is a part, so that nothing else can be reached
        through it."""
        plan, rows = self.plan, done.rows
        model = plan.sections.model(rows)
        if plan.sections or not plan.columns.everything:
            model = plan.columns.take(model).clone()
        sent = Sent(
            clients=done.clients,
            model=model,
            indexes=plan.inside(done.trained.indexes),
            values={name: plan.sections[name].view(rows).clone() for name in plan.sends},
            weights=self.weigh(done.clients),
            steps=done.trained.steps,
            accuracy=self._accuracy(done),
        )
        return sent.only(np.searchsorted(done.clients, senders))

    def starts(self, done: Round, senders: np.ndarray) -> Tensor:
        """The columns that travel, as the senders had them when the round began."""
        at = torch.from_numpy(np.searchsorted(done.clients, senders))
        return self.plan.columns.take(self.plan.sections.model(done.starts)[at])

    def deliver(self, clients: np.ndarray, model: Tensor, told: Told) -> None:
        """These clients get columns of the model in place of those that they hold."""
        if len(clients):
            rows = self.rows(clients, told).clone()
            self.plan.columns.put(rows, model)
            self.kept.put(clients, rows)

    def reset(self, told: Told) -> None:
        """All that hold columns of the shared model go on from what is shared now."""
        if self.plan.columns.everything and not self.plan.keeps:
            self.kept.clear()
        else:
            everybody = self.kept.clients
            self.deliver(everybody, told.model.expand(len(everybody), -1), told)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of this side."""
        if not len(self.kept.columns):
            return {}
        out = {f"kept/{name}": value for name, value in self.kept.tensors().items()}
        # A newcomer may be given the average of private parts.
        return out | {"kept/weights": torch.from_numpy(self.weigh(self.kept.clients))}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._initial[: self.plan.sections.layout.size] = tensors["shared"]
        if len(self.kept.columns) and "kept/clients" in tensors:
            self.kept.restore({name: tensors[f"kept/{name}"] for name in ("clients", "rows")})

    def _train_own(self, order: Order, clients: np.ndarray, starts: Tensor) -> Trained:
        """The second model, by its own rule, which may look at the shared one as it was told."""
        layout = self.plan.sections.layout
        rows = self.plan.sections[OWN].view(starts)
        if self._beside:
            rows = torch.cat([rows, starts[:, : layout.trainable]], 1)
        return self.engine.train(replace(order, sections=self._beside), clients, rows)

    def _accuracy(self, done: Round) -> np.ndarray | None:
        if self._validates is None:
            return None
        models = self.plan.sections.model(done.rows)
        scored, task = self.engine.score(done.clients, models, self._validates), self.engine.task
        return task.scores(scored.sums, scored.kept)[task.primary.name]


def _scattered(starts: Tensor, trained: Trained) -> Tensor:
    """Whole rows: what was trained, over what the client started from."""
    if trained.rows and all(index is None for index in trained.indexes):
        return torch.stack(trained.rows)
    out = torch.empty((len(trained.rows), starts.shape[1]), dtype=starts.dtype)
    for i, (row, index) in enumerate(zip(trained.rows, trained.indexes, strict=True)):
        if index is None:
            out[i] = row
        else:
            out[i] = starts[i]
            out[i, index] = row
    return out
