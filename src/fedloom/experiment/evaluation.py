"""The scores of a run: the common test set, every client's own, and newcomers.

Each client is scored on its own data with its own model (composed from the state, then adapted); a
client without private state, by the method's newcomer rule. Adapting and trying are implemented
here once, for runs and for newcomers that come later (`personal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedloom.adapt import Adapt
from fedloom.engine import Engine, Order, Scored, Trained
from fedloom.engine.base import Held, same_row
from fedloom.experiment.setup import Experiment
from fedloom.local import Budget, LocalRule, Optimiser
from fedloom.metrics.alike import mean_similarity
from fedloom.metrics.scores import client_scores, kept_before, summarise
from fedloom.select import Whole
from fedloom.streams import stream
from fedloom.tasks import Classification, Task

_SCORED_AT_ONCE = 64  # personal models composed in memory at a time


@dataclass(frozen=True)
class Adapting:
    """How clients adapt a model to some of their data; `optimiser` is the run's own."""

    adapt: Adapt
    budget: Budget
    optimiser: Optimiser
    round: int
    learns: str

    def rows(self, engine: Engine, clients: np.ndarray, rows: Tensor) -> Tensor:
        """Each client's row after its adaptation, or as it was where nothing is adapted."""
        if self.adapt.rule is None:
            return rows
        return torch.stack(self._trained(engine, clients, rows, self.adapt.rule).rows)

    def _trained(
        self, engine: Engine, clients: np.ndarray, rows: Tensor, rule: LocalRule
    ) -> Trained:
        optimiser = self.optimiser if self.adapt.lr is None else Optimiser(self.adapt.lr)
        budget = replace(self.budget, epochs=self.adapt.epochs, steps=None, support_first=False)
        data = dict.fromkeys(rule.parts, self.learns)
        order = Order(rule, budget, optimiser, self.round, data=data)
        return engine.train(order, clients, rows)

    def best(self, engine: Engine, clients: np.ndarray, tried: Tensor) -> np.ndarray:
        """For each client, which of the rows adapts best to its data: the one whose mean loss is
        lowest while it adapts (S1), or as it is, where nothing is adapted."""
        lowest = np.full(len(clients), np.inf)
        chosen = np.zeros(len(clients), dtype=np.int64)
        for k, row in enumerate(tried):
            rows = row.expand(len(clients), -1)
            if self.adapt.rule is not None:
                loss = self._trained(engine, clients, rows, self.adapt.rule).loss
            else:
                loss = engine.score(clients, rows, self.learns).loss
            better = loss < lowest
            chosen[better], lowest[better] = k, loss[better]
        return chosen


class Evaluation:
    """Scores the state of an experiment."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def score(self, t: int) -> tuple[dict[str, Any], pd.DataFrame | None]:
        """Score the common test set and every client's own: a record and the per-client table."""
        record: dict[str, Any] = {}
        if self._task.name != Classification.name:
            record["task"] = self._task.name
        if self.experiment.engine.setting.static:
            record["norms"] = {"measured": True}
        clients = self._scored_clients
        common = self._score_common(clients)
        if common is not None:
            record["test"] = {
                m.name: float(common[f"test_{m.name}"].mean()) for m in self._task.tested
            }
        if self.experiment.method.mix.home == "node":
            record["similarity"] = mean_similarity(self._trainable(clients), self._start)
        tables = []
        for population, members in (("local", clients), ("new", self._newcomers)):
            if not len(members):
                continue
            table = self._score_clients(t, members)
            if population == "local" and self.experiment.state.personal and common is not None:
                table = table.merge(common, on="client", how="left")
            table.insert(0, "round", t)
            table.insert(1, "population", population)
            tables.append(table)
            summary = summarise(table, self._task)
            if summary:
                record["clients" if population == "local" else "newcomers"] = summary
        return record, pd.concat(tables, ignore_index=True) if tables else None

    @property
    def _task(self) -> Task:
        return self.experiment.dataset.task

    @cached_property
    def _scored_clients(self) -> np.ndarray:
        x = self.experiment
        return x.federation.some_clients("scored-clients", x.config.eval_clients)

    @cached_property
    def _newcomers(self) -> np.ndarray:
        return np.array(self.experiment.federation.newcomer_ids, dtype=np.int64)

    @cached_property
    def _start(self) -> Tensor:
        """The weights that all models began with."""
        x = self.experiment
        return x.layout.flatten(x.engine.setting.build(), x.method.local.extras)[
            : x.layout.trainable
        ]

    def _trainable(self, clients: np.ndarray) -> Iterable[Tensor]:
        x = self.experiment
        return (x.state.models(some)[:, : x.layout.trainable] for some in _chunks(clients))

    def _score_common(self, clients: np.ndarray) -> pd.DataFrame | None:
        """The common test set: by the shared model, or by each of the clients' own. Clients without
        one are scored by the newcomer rule if it names a single model, else left out."""
        x = self.experiment
        if not len(x.federation.global_test()):
            return None
        if not x.state.personal:
            # Norms of a shared model are measured on data of everybody.
            everybody = x.federation.everybody
            scored = x.engine.score_global(x.state.models(everybody[:1]), everybody)
            return self._common(everybody[:1], scored)
        who = clients
        if len(who) > x.config.eval_common:
            drawn = stream(x.config.seed, "common-clients").permutation(who)
            who = np.sort(drawn[: x.config.eval_common])
        if not len(who):
            return None
        known = self._has_model(who)
        models = [(some, x.state.models(some)) for some in _chunks(who[known])]
        others = who[~known]
        if len(others) and x.method.newcomer.choice == "only":
            tried = self._candidates()
            models += [(some, tried.expand(len(some), -1)) for some in _chunks(others)]
        tables = [self._common(some, x.engine.score_global(rows, some)) for some, rows in models]
        if not tables:
            return None
        return pd.concat(tables, ignore_index=True).sort_values("client", ignore_index=True)

    def _has_model(self, clients: np.ndarray) -> np.ndarray:
        """Who is scored with its own model or the shared one, not by the newcomer rule."""
        return np.array([self.experiment.state.knows(int(c)) for c in clients], dtype=bool)

    def _candidates(self) -> Tensor:
        """The models that a client without one of its own may try."""
        state = self.experiment.state
        weights = state.clients.weigh(state.kept.clients)
        return state.candidates(self.experiment.method.newcomer, weights)

    def _score_clients(self, t: int, clients: np.ndarray) -> pd.DataFrame:
        """Everyone with its own model or the shared one; the others by the newcomer rule."""
        state, newcomer = self.experiment.state, self.experiment.method.newcomer
        known = self._has_model(clients)
        tables = [self._score_rows(t, some, state.models(some)) for some in _chunks(clients[known])]
        others = clients[~known]
        if len(others):
            owners, tried = state.kept.clients, self._candidates()
            if newcomer.choice == "only":
                tables += [
                    self._score_rows(t, some, tried.expand(len(some), -1))
                    for some in _chunks(others)
                ]
            elif newcomer.choice == "vote":
                tables += [self._score_votes(some, tried) for some in _chunks(others)]
            else:
                tables += [self._score_best(t, some, tried, owners) for some in _chunks(others)]
        return pd.concat(tables, ignore_index=True).sort_values("client", ignore_index=True)

    def _score_rows(self, t: int, clients: np.ndarray, rows: Tensor) -> pd.DataFrame:
        """Each client with its row, adapted first if the method says so."""
        x, adapt = self.experiment, self.experiment.method.adapt
        shared = not x.state.personal
        table = self._table(clients, x.engine.score(clients, rows, adapt.scored, shared))
        if adapt.rule is not None:
            before = table[kept_before(self._task)].add_suffix("_before")
            rows = self._adapting(t).rows(x.engine, clients, rows)
            table = self._table(clients, x.engine.score(clients, rows, adapt.scored))
            table = table.join(before)
        else:
            self._score_held(t, table, clients, rows)
        return table

    def _score_held(self, t: int, table: pd.DataFrame, clients: np.ndarray, rows: Tensor) -> None:
        """Beside its score, that of the sub-model which a weak client can hold."""
        x = self.experiment
        weak = np.flatnonzero(x.capacities[clients] < 1)
        if isinstance(x.method.select, Whole) or not len(weak):
            return
        lasts = x.state.server.lasts(clients[weak]) or [None] * len(weak)
        held = [Held(int(c), t, x.method.select, last)
                for c, last in zip(clients[weak], lasts, strict=True)]  # fmt: skip
        some = rows if same_row(rows) else rows[torch.from_numpy(weak)]
        scored, first = x.engine.score_held(some, held, x.method.adapt.scored), self._task.primary
        found = table[first.name].to_numpy(copy=True)
        found[weak] = self._task.scores(scored.sums, scored.kept)[first.name]
        table[f"capacity_{first.name}"] = found

    def _score_best(
        self, t: int, clients: np.ndarray, tried: Tensor, owners: np.ndarray
    ) -> pd.DataFrame:
        """Each client with the row that adapts best to its support part; `part_of` is whose."""
        chosen = self._adapting(t).best(self.experiment.engine, clients, tried)
        table = self._score_rows(t, clients, tried[torch.from_numpy(chosen)])
        table["part_of"] = owners[chosen] if len(owners) else -1
        return table

    def _score_votes(self, clients: np.ndarray, tried: Tensor) -> pd.DataFrame:
        x = self.experiment
        return self._table(clients, x.engine.vote(clients, tried, x.method.adapt.scored))

    def _table(self, clients: np.ndarray, scored: Scored) -> pd.DataFrame:
        x = self.experiment
        held = np.stack([x.federation.label_counts(int(c)) for c in clients])
        scores = self._task.scores(scored.sums, scored.kept)
        table = pd.DataFrame(scores)
        if self._task.by_class:
            table = client_scores(scored.confusion, scored.loss, held > 0)
            for name in (name for name in scores if name not in table):
                table[name] = scores[name]
        table.insert(0, "client", clients)
        table.insert(1, "capacity", x.capacities[clients])
        sizes = [x.federation.size(int(c), "train") for c in clients]
        table.insert(2, "train_samples", sizes)
        if self._task.by_class:
            main = held.argmax(1)
            table.insert(3, "main_class", main)
            hits = scored.confusion[np.arange(len(clients)), main].sum(-1)
            with np.errstate(invalid="ignore"):
                table["majority"] = hits / scored.confusion.sum((1, 2))
        if x.federation.partition.names:
            table.insert(1, "name", [x.federation.name(int(c)) for c in clients])
        return table

    def _adapting(self, t: int) -> Adapting:
        x = self.experiment
        adapt = x.method.adapt
        return Adapting(adapt, x.budget, x.config.optimiser_at(t), t, adapt.learns)

    def _common(self, clients: np.ndarray, scored: Scored) -> pd.DataFrame:
        """Scores of these clients' models on the common test set, where they are one model too."""
        scores = self._task.scores(scored.sums, scored.kept)
        each = {
            f"test_{m.name}": np.broadcast_to(scores[m.name], len(clients))
            for m in self._task.tested
        }
        return pd.DataFrame({"client": clients, **each})


def _chunks(clients: np.ndarray) -> Iterable[np.ndarray]:
    return (clients[at : at + _SCORED_AT_ONCE] for at in range(0, len(clients), _SCORED_AT_ONCE))
