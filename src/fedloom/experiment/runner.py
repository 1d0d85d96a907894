"""The walk of a run, the same for every method.

Topology says who is there, select gives each one its indices, rows are gathered, the engine runs
the local rule on them, mix combines what came back into the declared state; every `eval_every`
rounds each client's own model (state composed, then adapted) is scored. Nothing here may depend on
which method it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedloom.engine import Scored, Task, Trained
from fedloom.errors import telling_memory
from fedloom.experiment.interrupts import heeding_interrupts
from fedloom.experiment.setup import Experiment
from fedloom.experiment.store import RunStore
from fedloom.local import LocalRule, Optimiser
from fedloom.metrics.alike import mean_similarity
from fedloom.metrics.cost import peak_memory, reset_peak_memory
from fedloom.metrics.scores import client_scores, summarise
from fedloom.mix import Gathering, Probe, Traffic
from fedloom.streams import stream, streams_of
from fedloom.topology.report import meetings

_SCORED_AT_ONCE = 64  # personal models composed in memory at a time


class Watcher(Protocol):
    """Something that wants to know how a run goes: progress bars, live pages."""

    def start(self, name: str, rounds: int, done: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


class Runner:
    """Walks the rounds of one experiment and writes them to its store."""

    def __init__(
        self, experiment: Experiment, store: RunStore, watchers: Iterable[Watcher] = ()
    ) -> None:
        self.experiment = experiment
        self.store = store
        self.watchers = tuple(watchers)
        self._stored = 0.0  # seconds that writing the round before took

    def run(self, done: int = 0) -> None:
        """Run from the round after `done` to the last. The first evaluation is of round 0."""
        x, config = self.experiment, self.experiment.config
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        reset_peak_memory()
        for watcher in self.watchers:
            watcher.start(self.store.path.name, config.rounds, done)
        try:
            with heeding_interrupts() as heed:
                for t in range(done + 1, config.rounds + 1):
                    heed()
                    with telling_memory(f"round {t}"):
                        self._step(t)
            self.store.finish()
        finally:
            torch.set_num_threads(threads)
            x.engine.close()
            for watcher in self.watchers:
                watcher.end()

    def _step(self, t: int) -> None:
        """One round, from training to what is stored and told of it."""
        x, config = self.experiment, self.experiment.config
        record = self.round(t)
        if t % config.eval_every == 0 or t == config.rounds:
            record |= self.evaluate(t)
        record["peak_memory"] = peak_memory(x.device)
        record["profile"]["store"] = self._stored
        started = time.perf_counter()
        # The checkpoint last: a round counts once its state is safe.
        self.store.add_round(record)
        if t % config.checkpoint_every == 0 or t == config.rounds:
            self.store.add_checkpoint(t, x.state.tensors(), x.about)
        self._stored = time.perf_counter() - started
        for watcher in self.watchers:
            watcher.round(record)

    def round(self, t: int) -> dict[str, Any]:
        """One round of training; returns its record."""
        started = time.perf_counter()
        x, config, method = self.experiment, self.experiment.config, self.experiment.method
        state, layout = x.state, x.layout
        names = streams_of(config.seed, t)
        contacts = method.topology.contacts(t, config.clients, config.participants, names)
        clients = contacts.participants
        state.kept.forget(contacts.forgotten)
        starts = state.rows(clients)
        optimiser = config.optimiser(t)
        task = Task(method.local, x.budget, optimiser, t, method.select)
        trained = x.engine.train(task, clients, starts, state.lasts(clients))
        returned = time.perf_counter()
        rows = _scatter(starts, trained)
        validating = time.perf_counter()
        accuracy = self._validate(clients, rows)
        validated = time.perf_counter() - validating
        gathering = Gathering(
            round=t,
            layout=layout,
            contacts=contacts,
            shared=state.shared,
            clients=clients,
            weights=self._weights(clients),
            rows=rows,
            lr=optimiser.lr,
            stream=names,
            indexes=trained.indexes,
            whole_down=method.select.sees_data,
            memory=state.memory,
            probe=self._probe,
            accuracy=accuracy,
            **self._class_facts(clients),
        )
        mixed = method.mix.combine(gathering)
        state.recall(clients, trained.rows, trained.indexes)
        state.apply(mixed, clients, rows)
        traffic = mixed.traffic or method.mix.traffic(gathering)
        up, down = self._bytes(traffic, t)
        seen = max(int(trained.samples.sum()), 1)
        ended = time.perf_counter()
        record = {
            "round": t,
            "participants": clients.tolist(),
            "lr": optimiser.lr,
            "train_loss": float((trained.loss * trained.samples).sum() / seen),
            "bytes_up": up,
            "bytes_down": down,
            "macs": int(trained.macs.sum()),
            "steps": int(trained.steps.sum()),
            "seconds": time.perf_counter() - started,
            **meetings(contacts),
            **mixed.record,
            "profile": {**trained.seconds, "mix": ended - returned - validated},
        }
        if trained.gaps:
            record["gap"] = float(np.mean(trained.gaps))
        if not (x.capacities == 1).all():
            record["devices"] = self._devices(clients, trained, traffic)
        return {**record, "mix": dict(mixed.report)} if mixed.report else record

    def _devices(
        self, clients: np.ndarray, trained: Trained, traffic: Traffic
    ) -> dict[str, dict[str, float]]:
        """What devices of each capacity paid in this round, in the mean."""
        each = self.experiment.layout.bytes
        columns = {
            "parameters": np.array([row.numel() for row in trained.rows]),
            "macs": trained.macs,
            "memory": trained.memory,
            "bytes_up": np.asarray(traffic.up) * each,
            "bytes_down": np.asarray(traffic.down) * each,
        }
        mine, out = self.experiment.capacities[clients], {}
        for capacity in np.unique(mine)[::-1]:
            there = mine == capacity
            means = {name: float(values[there].mean()) for name, values in columns.items()}
            out[f"{capacity:g}"] = {"clients": int(there.sum()), **means}
        return out

    def evaluate(self, t: int) -> dict[str, Any]:
        """The scores after a round, with the per-client table stored."""
        started = time.perf_counter()
        record, table = self.score(t)
        if table is not None:
            self.store.add_clients(t, table)
        return {**record, "eval_seconds": time.perf_counter() - started}

    def score(self, t: int) -> tuple[dict[str, Any], pd.DataFrame | None]:
        """Score the common test set and every client's own: a record and the per-client table."""
        record: dict[str, Any] = {}
        if self.experiment.engine.setting.static:
            record["norms"] = {"measured": True}
        clients = self._scored_clients
        common = self._score_common(clients)
        if common is not None:
            names = {"test_accuracy": "accuracy", "test_loss": "loss"}
            record["test"] = {name: float(common[c].mean()) for c, name in names.items()}
        if self.experiment.method.mix.home == "node":
            record["similarity"] = mean_similarity(self._trainable(clients))
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
            summary = summarise(table)
            if summary:
                record["clients" if population == "local" else "newcomers"] = summary
        return record, pd.concat(tables, ignore_index=True) if tables else None

    def _class_facts(self, clients: np.ndarray) -> dict[str, Any]:
        """Who holds which classes, and the class that a column works for, for mixes that ask."""
        x = self.experiment
        if not x.method.mix.sees_classes:
            return {}
        holds = np.stack([x.federation.classes_of(int(c)) for c in clients])
        return {"holds": holds, "class_of": x.class_of}

    def _validate(self, clients: np.ndarray, rows: Tensor) -> np.ndarray | None:
        part = self.experiment.method.mix.validates
        if part is None:
            return None
        confusion = self.experiment.engine.score(clients, rows, part).confusion
        with np.errstate(invalid="ignore"):
            return np.trace(confusion, axis1=1, axis2=2) / confusion.sum((1, 2))

    def _weights(self, clients: np.ndarray) -> np.ndarray:
        x = self.experiment
        part = x.method.local.weighs
        if x.method.topology.pools:
            return np.array([x.federation.sizes(part).sum()], dtype=np.float64)
        assert x.state.weigh is not None
        return x.state.weigh(clients)

    def _bytes(self, traffic: Traffic, t: int) -> tuple[int, int]:
        x = self.experiment
        if x.method.topology.pools:  # the data moves once, the model never
            data = x.dataset
            image = int(np.prod(data.shape)) * np.dtype(data.x.dtype).itemsize
            label = np.min_scalar_type(max(data.n_classes - 1, 1)).itemsize
            return (int(x.federation.sizes("train").sum()) * (image + label) if t == 1 else 0), 0
        each = x.layout.bytes
        return int(traffic.up.sum()) * each, int(traffic.down.sum()) * each

    @cached_property
    def _probe(self) -> Probe | None:
        """The public set, for a mix that said that it looks at it."""
        x = self.experiment
        if x.public is None or not x.method.mix.sees_public:
            return None
        labels = None if x.public.y is None else torch.from_numpy(x.public.y)
        module = x.engine.setting.build().to(x.device)
        return Probe(torch.from_numpy(x.public.x), labels, module, x.layout)

    @cached_property
    def _scored_clients(self) -> np.ndarray:
        x = self.experiment
        return x.federation.some_clients("scored-clients", x.config.eval_clients)

    @cached_property
    def _newcomers(self) -> np.ndarray:
        return np.array(self.experiment.federation.newcomer_ids, dtype=np.int64)

    def _trainable(self, clients: np.ndarray) -> Iterable[Tensor]:
        x = self.experiment
        return (x.state.rows(some)[:, : x.layout.trainable] for some in _chunks(clients))

    def _score_common(self, clients: np.ndarray) -> pd.DataFrame | None:
        """The common test set: by the shared model, or by each of the clients' own. Clients without
        one are scored by the newcomer rule if it names a single model, else left out."""
        x = self.experiment
        if not len(x.federation.global_test()):
            return None
        if not x.state.personal:
            # Norms of a shared model are measured on data of everybody.
            everybody = x.federation.everybody
            scored = x.engine.score_global(x.state.rows(everybody[:1]), everybody)
            return _common(everybody[:1], scored)
        who = clients
        if len(who) > x.config.eval_common:
            drawn = stream(x.config.seed, "common-clients").permutation(who)
            who = np.sort(drawn[: x.config.eval_common])
        if not len(who):
            return None
        known = self._has_model(who)
        models = [(some, x.state.rows(some)) for some in _chunks(who[known])]
        others = who[~known]
        if len(others) and x.method.newcomer.choice == "only":
            tried = self._candidates()
            models += [(some, tried.expand(len(some), -1)) for some in _chunks(others)]
        tables = [_common(some, x.engine.score_global(rows, some)) for some, rows in models]
        if not tables:
            return None
        return pd.concat(tables, ignore_index=True).sort_values("client", ignore_index=True)

    def _has_model(self, clients: np.ndarray) -> np.ndarray:
        """Who is scored with its own model or the shared one, not by the newcomer rule."""
        state = self.experiment.state
        known = [not state.personal or int(c) in state.kept for c in clients]
        return np.array(known, dtype=bool)

    def _candidates(self) -> Tensor:
        """The models that a client without one of its own may try."""
        state, newcomer = self.experiment.state, self.experiment.method.newcomer
        return newcomer.candidates(state.shared, state.kept, self._weights(state.kept.clients))

    def _score_clients(self, t: int, clients: np.ndarray) -> pd.DataFrame:
        """Everyone with its own model or the shared one; the others by the newcomer rule."""
        state, newcomer = self.experiment.state, self.experiment.method.newcomer
        known = self._has_model(clients)
        tables = [self._score_rows(t, some, state.rows(some)) for some in _chunks(clients[known])]
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
            before = table["accuracy"]
            rows = self._adapted(t, adapt.rule, clients, rows)
            table = self._table(clients, x.engine.score(clients, rows, adapt.scored))
            table["accuracy_before"] = before
        return table

    def _score_best(
        self, t: int, clients: np.ndarray, tried: Tensor, owners: np.ndarray
    ) -> pd.DataFrame:
        """Each client with the row that adapts best to its support part; `part_of` is whose."""
        x, adapt = self.experiment, self.experiment.method.adapt
        assert adapt.rule is not None
        lowest = np.full(len(clients), np.inf)
        chosen = np.zeros(len(clients), dtype=np.int64)
        for k, row in enumerate(tried):
            rows = self._adapted(t, adapt.rule, clients, row.expand(len(clients), -1))
            loss = x.engine.score(clients, rows, adapt.learns).loss
            better = loss < lowest
            chosen[better], lowest[better] = k, loss[better]
        table = self._score_rows(t, clients, tried[torch.from_numpy(chosen)])
        table["part_of"] = owners[chosen] if len(owners) else -1
        return table

    def _score_votes(self, clients: np.ndarray, tried: Tensor) -> pd.DataFrame:
        x = self.experiment
        return self._table(clients, x.engine.vote(clients, tried, x.method.adapt.scored))

    def _table(self, clients: np.ndarray, scored: Scored) -> pd.DataFrame:
        x = self.experiment
        held = np.stack([x.federation.label_counts(int(c)) for c in clients])
        table = client_scores(scored.confusion, scored.loss, held > 0)
        table.insert(0, "client", clients)
        table.insert(1, "capacity", x.capacities[clients])
        sizes = [x.federation.size(int(c), "train") for c in clients]
        table.insert(2, "train_samples", sizes)
        table.insert(3, "main_class", held.argmax(1))
        return table

    def _adapted(self, t: int, rule: LocalRule, clients: np.ndarray, rows: Tensor) -> Tensor:
        x = self.experiment
        adapt, optimiser = x.method.adapt, x.config.optimiser(t)
        if adapt.lr is not None:
            optimiser = Optimiser(adapt.lr)
        data = dict.fromkeys(rule.parts, adapt.learns)
        budget = replace(x.budget, epochs=adapt.epochs, steps=None)
        task = Task(rule, budget, optimiser, t, data=data)
        return torch.stack(x.engine.train(task, clients, rows).rows)


def _scatter(starts: Tensor, trained: Trained) -> Tensor:
    """Whole rows: what was trained, over what the client started from."""
    out = torch.empty((len(trained.rows), starts.shape[1]), dtype=starts.dtype)
    for i, (row, index) in enumerate(zip(trained.rows, trained.indexes, strict=True)):
        if index is None:
            out[i] = row
        else:
            out[i] = starts[i]
            out[i, index] = row
    return out


def _common(clients: np.ndarray, scored: Scored) -> pd.DataFrame:
    """Accuracy and loss of these clients' models on the common test set, where they are one model
    too."""
    total = scored.confusion.sum((1, 2))
    accuracy = np.trace(scored.confusion, axis1=1, axis2=2) / total
    values = {"test_accuracy": accuracy, "test_loss": scored.loss / total}
    each = {name: np.broadcast_to(v, len(clients)) for name, v in values.items()}
    return pd.DataFrame({"client": clients, **each})


def _chunks(clients: np.ndarray) -> Iterable[np.ndarray]:
    return (clients[at : at + _SCORED_AT_ONCE] for at in range(0, len(clients), _SCORED_AT_ONCE))
