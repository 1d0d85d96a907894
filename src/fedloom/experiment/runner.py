"""The loop of a run, the same for every method.

A round is messages: the topology says who is there, the server tells the participants what they
need, the clients compose their models, train, keep and send, the post carries and checks what was
sent, and the server lets the mix combine it into its state; every `eval_every` rounds clients are
scored (`evaluation.py`). Nothing here may depend on which method it is.
"""

from __future__ import annotations

import platform
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom import __version__
from fedloom.engine import Diverged, Order, Trained, diverged
from fedloom.engine.kernels import kernels_for
from fedloom.errors import FedloomError, telling_memory
from fedloom.experiment.ending import Ending
from fedloom.experiment.interrupts import StopRequested, heeding_interrupts
from fedloom.experiment.setup import Experiment
from fedloom.experiment.store import RunStore
from fedloom.kinds import Declared
from fedloom.metrics.alike import divergence
from fedloom.metrics.cost import peak_memory, reset_peak_memory
from fedloom.mix import Mixed
from fedloom.mix.networks import Networks
from fedloom.native.net import Native
from fedloom.returned import returned
from fedloom.round.client import Round
from fedloom.round.messages import Sent, Told
from fedloom.round.post import Arrived
from fedloom.round.server import Opening
from fedloom.streams import streams_of
from fedloom.topology import Contacts
from fedloom.topology.report import meetings

if TYPE_CHECKING:
    from fedloom.experiment.evaluation import Evaluation


_SHOWN = 200  # clients whose classes are written down for reports


class Watcher(Protocol):
    """Gets notified as a run progresses: progress bars, live pages."""

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
        self._warned = False  # that nothing was left of a round

    def run(self, done: int = 0) -> None:
        """Run from the round after `done` to the last. The first evaluation is of round 0."""
        x, config = self.experiment, self.experiment.config
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        reset_peak_memory()
        begun: list[Watcher] = []
        t = min(done + 1, config.rounds)
        try:
            self.store.begin()
            self.store.add_manifest(x.manifest)
            if x.federation.partition.names:
                self.store.add_names(x.federation.partition.names)
            self.store.add_facts(self._made_of())
            for watcher in self.watchers:
                watcher.start(self.store.path.name, config.rounds, done)
                begun.append(watcher)
            with heeding_interrupts() as heed:
                for t in range(done + 1, config.rounds + 1):
                    heed()
                    with telling_memory(f"round {t}"):
                        self._step(t)
                    if t < config.rounds and self.store.stop_asked:
                        self._stop(t)
            self.store.finish()
        except KeyboardInterrupt:
            self.store.end()
            raise
        except FedloomError as e:
            e.args = (self._called(str(e)),)
            self.store.end(Ending.of(str(e), t, diverged=isinstance(e, Diverged)))
            raise
        except BaseException as e:
            self.store.end(Ending.of(f"{type(e).__name__}: {e}", t))
            raise
        finally:
            torch.set_num_threads(threads)
            x.engine.close()
            for watcher in begun:
                watcher.end()

    def _made_of(self) -> dict[str, Any]:
        """Versions, and the samples of each class that the first clients hold."""
        x = self.experiment
        count = min(x.config.clients, _SHOWN) if x.dataset.task.by_class else 0
        held = [x.federation.label_counts(c).tolist() for c in range(count)]
        return {
            "versions": {"fedloom": __version__, "python": platform.python_version(),
                         "torch": str(torch.__version__), "numpy": np.__version__},
            "partition": {
                "classes": list(x.dataset.classes) if x.dataset.task.by_class else ["samples"],
                "held": held,
            },
        }  # fmt: skip

    def _called(self, text: str) -> str:
        """A text that says `client 3`, with the name that client has in the data."""
        names = self.experiment.federation.partition.names

        def name(found: re.Match[str]) -> str:
            number = int(found[2])
            return f"{found[1]} {names[number]}" if number < len(names) else found[0]

        return re.sub(r"\b([Cc]lient) (\d+)\b", name, text) if names else text

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

    def _stop(self, t: int) -> None:
        """End after round `t`, such that a resumed run loses nothing of it."""
        if t % self.experiment.config.checkpoint_every:
            self.store.add_checkpoint(t, self.experiment.state.tensors(), self.experiment.about)
        self.store.sync()
        raise StopRequested(t)

    def round(self, t: int) -> dict[str, Any]:
        """One round of training; returns its record."""
        started = time.perf_counter()
        x, config = self.experiment, self.experiment.config
        opening = self._open(t)
        state, clients = x.state, opening.contacts.participants
        state.kept.forget(opening.contacts.forgotten)
        told = state.post.told(state.server.tell())
        shares_norms = x.engine.setting.shares_norms
        order = Order(x.method.local, x.budget, opening.optimiser, t, x.method.select,
                    sections=state.plan.sections or None,
                    screened=config.on_bad == "skip",
                    together=tuple(clients.tolist() if shares_norms else ()))  # fmt: skip
        done = state.clients.train(order, clients, told, state.server.lasts(clients))
        senders = x.method.mix.senders(t, clients, opening.stream)
        senders = returned(x.method.mix, "senders", senders, np.ndarray)
        sent = state.clients.message(done, senders)
        measured = time.perf_counter()
        mixed, arrived = self._exchange(opening, order, done, sent, told)
        up, down = self._traffic(mixed, arrived, done, told, senders)
        to_others = self._to_others(mixed, clients, opening.total)
        samples = np.where(np.isin(clients, done.failed), 0, done.trained.samples)
        loss = np.where(samples > 0, done.trained.loss, 0.0)
        ended = time.perf_counter()
        record = {
            "round": t,
            "participants": clients.tolist(),
            "lr": opening.optimiser.lr,
            "train_loss": float((loss * samples).sum() / max(int(samples.sum()), 1)),
            "bytes_up": int(up.sum()),
            "bytes_down": int(down.sum()) + to_others,
            "macs": int(done.trained.macs.sum()),
            "steps": int(done.trained.steps.sum()),
            "seconds": time.perf_counter() - started,
            **meetings(opening.contacts),
            **mixed.metrics,
            "profile": {**done.trained.seconds, "mix": ended - measured},
            "kernels": x.path,
        }
        if arrived.refused:
            record["skipped"] = {str(r.client): r.reason for r in arrived.refused}
            record["messages"] = {"skipped": arrived.skipped, "left": arrived.left}
        spread = self._divergence(done, opening.optimiser.lr)
        if spread is not None:
            record["divergence"] = spread
        if done.trained.gaps:
            gaps = np.mean(done.trained.gaps, axis=0)
            record |= {"gradient_gap": float(gaps[0]), "update_gap": float(gaps[1])}
        if not (x.capacities == 1).all():
            record["devices"] = self._devices(clients, done.trained, up, down)
        if x.method.topology.pools:  # the data moves once, the model never
            record |= {"bytes_up": self._pooled_bytes() if t == 1 else 0, "bytes_down": 0}
        return {**record, "mix": dict(mixed.notes)} if mixed.notes else record

    def _open(self, t: int) -> Opening:
        x, config = self.experiment, self.experiment.config
        names, topology = streams_of(config.seed, t), x.method.topology
        where = (t, config.clients, config.participants, names)
        if topology.needs:
            facts = Declared(x.facts(topology.needs), type(topology).__name__, "needs")
            contacts = topology.contacts(*where, facts)
        else:
            contacts = topology.contacts(*where)
        contacts = returned(topology, "contacts", contacts, Contacts)
        place = "as participants of its Contacts"
        returned(topology, "contacts", contacts.participants, np.ndarray, place)
        return Opening(t, contacts, config.optimiser_at(t), names, config.clients)

    def _exchange(
        self, opening: Opening, order: Order, done: Round, sent: Sent, told: Told
    ) -> tuple[Mixed, Arrived]:
        """Carry what was sent to where it is combined, and adopt the result."""
        x, state, t = self.experiment, self.experiment.state, opening.round
        meets = x.method.mix.meets
        starts = partial(state.clients.starts, done, sent.clients)
        arrived = state.post.up(sent, starts, t)
        if meets:
            arrived, contacts = state.post.let_through(arrived, sent.model, starts,
                                                       opening.contacts)  # fmt: skip
            opening = replace(opening, contacts=contacts)
        else:
            arrived = state.post.let_in(arrived, state.server.origin(sent.clients))
        arrived = arrived.without(done.failed, drop=not meets)
        self._mind(arrived, order)
        heard = arrived.sent
        own = sent.model if meets else None
        mixed = state.server.combine(opening, heard, self._facts(heard), own)
        self._check_finite(mixed, heard, opening)
        state.server.remember(heard)
        now = state.server.tell()
        if mixed.reset:
            state.clients.reset(now)
        if mixed.clients is not None and mixed.rows is not None:
            state.clients.deliver(mixed.clients, mixed.rows, now)
        return mixed, arrived

    def _mind(self, arrived: Arrived, order: Order) -> None:
        """Stop at a message that was refused, unless the run goes on without it."""
        if not arrived.refused:
            return
        first = arrived.refused[0]
        if self.experiment.config.on_bad == "skip":
            if not arrived.left and not self._warned:
                warnings.warn(
                    f"All messages of round {order.round} were left out, so nothing was combined "
                    f"in it ({self._called(f'client {first.client}')}: {first.reason}). Lower "
                    "--lr, or loosen --screen; fedloom show tells if that happens again.",
                    stacklevel=2,
                )
                self._warned = True
            return
        if "NaN" in first.reason:
            raise diverged(first.client, order)
        raise Diverged(
            f"The message of client {first.client} in round {order.round} was refused: "
            f"{first.reason}. Loosen --screen, or continue without such messages: --on-bad skip."
        )

    def _check_finite(self, mixed: Mixed, sent: Sent, opening: Opening) -> None:
        """A huge finite value may overflow only here: name the client that sent it."""
        made = [v for v in (mixed.shared, mixed.rows, *mixed.state.values()) if v is not None]
        if all(torch.isfinite(v.sum()) or torch.isfinite(v).all() for v in made):
            return
        largest = sent.model.abs().amax(1) if sent.model.numel() else torch.zeros(len(sent.clients))
        worst = int(largest.argmax())
        raise Diverged(
            f"{type(self.experiment.method.mix).__name__} made NaN or infinite values of what was "
            f"sent in round {opening.round}. The largest values, up to {float(largest[worst]):.3g}"
            f", are from client {int(sent.clients[worst])}. Lower --lr, or bound what is let in: "
            "--screen norm:10x --on-bad skip."
        )

    def _traffic(
        self, mixed: Mixed, arrived: Arrived, done: Round, told: Told, senders: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each participant sent and got in this round."""
        x, state = self.experiment, self.experiment.state
        clients, mix = done.clients, x.method.mix
        if mix.meets:
            assert mixed.traffic is not None
            return state.post.exchanged(mixed.traffic, arrived)
        up = np.zeros(len(clients), dtype=np.int64)
        up[np.searchsorted(clients, senders)] = arrived.bytes
        chosen_there = "data" in x.method.select.needs
        whole: tuple[Any, ...] = (None,) * len(clients)
        indexes = whole if chosen_there else state.plan.inside(done.trained.indexes)
        if mix.home == "server":
            down = state.post.down(told, indexes)
            if x.engine.setting.shares_norms:  # each sends those of its data, and gets those of all
                up += x.layout.norm_bytes
                down += x.layout.norm_bytes
            if x.method.first == "mean":  # private parts travel as well, for the average of them
                up[np.searchsorted(clients, senders)] += state.post.private
                down[np.searchsorted(clients, done.given)] += state.post.private
            return up, down
        # Models live on the nodes: they get what is delivered to them at the end of the round.
        down = state.post.down(replace(told, model=told.model[:0]), whole)
        delivered = state.post.down(replace(told, values={}), whole)
        if mixed.reset:
            down += delivered
        elif mixed.clients is not None:
            at = np.searchsorted(clients, mixed.clients)
            down[at] += delivered[at]
        return up, down

    def _to_others(self, mixed: Mixed, clients: np.ndarray, total: int) -> int:
        """The bytes of a model that goes to everybody, for those who took no part in the round."""
        if not mixed.reset:
            return 0
        state = self.experiment.state
        whole = replace(state.server.tell(), values={})
        return (total - len(clients)) * int(state.post.down(whole, (None,))[0])

    def _divergence(self, done: Round, lr: float) -> float | None:
        """How far apart the trained models are; of gradients, those that one step along each
        makes."""
        x, state = self.experiment, self.experiment.state
        well = ~np.isin(done.clients, done.failed)
        rows = state.plan.sections.model(done.rows)[:, : x.layout.trainable]
        if not well.all():
            rows = rows[torch.from_numpy(well)]
        spread = divergence(rows, state.clients.weigh(done.clients[well]))
        gradients = x.method.local.hands_back == "gradients"
        return spread if spread is None or not gradients else lr * spread

    def _devices(
        self, clients: np.ndarray, trained: Trained, up: np.ndarray, down: np.ndarray
    ) -> dict[str, dict[str, float]]:
        """What devices of each capacity paid in this round, in the mean."""
        columns = {
            "parameters": np.array([self._parameters(index) for index in trained.indexes]),
            "macs": trained.macs,
            "memory": trained.memory,
            "bytes_up": up,
            "bytes_down": down,
        }
        mine, out = self.experiment.capacities[clients], {}
        for capacity in np.unique(mine)[::-1]:
            there = mine == capacity
            means = {name: float(values[there].mean()) for name, values in columns.items()}
            out[f"{capacity:g}"] = {"clients": int(there.sum()), **means}
        return out

    def _parameters(self, index: Tensor | None) -> int:
        """The values of the model that a client trained."""
        size = self.experiment.layout.size
        return size if index is None else int((index < size).sum())

    def evaluate(self, t: int) -> dict[str, Any]:
        """The scores after a round, with the per-client table stored."""
        started = time.perf_counter()
        record, table = self.evaluation.score(t)
        if table is not None:
            self.store.add_clients(t, table)
        return {**record, "eval_seconds": time.perf_counter() - started}

    @cached_property
    def evaluation(self) -> Evaluation:
        from fedloom.experiment.evaluation import (
            Evaluation,
        )  # with pandas, which training does without

        return Evaluation(self.experiment)

    def _facts(self, sent: Sent) -> dict[str, Any]:
        """What the mix needs to know of the senders, and the public set."""
        x, needs = self.experiment, self.experiment.method.mix.needs
        out: dict[str, Any] = {}
        if "classes" in needs:
            assert x.class_of is not None
            holds = np.stack([x.federation.classes_of(int(c)) for c in sent.clients])
            out["classes"] = holds, x.state.plan.columns.take(x.class_of)
        if "public" in needs:
            out["public"], out["public networks"] = x.public, self._networks
        if "accuracy" in needs:
            out["accuracy"] = sent.accuracy
        return out

    @cached_property
    def _networks(self) -> Networks:
        x, setting = self.experiment, self.experiment.engine.setting
        module, layout = setting.build(), x.state.server.layout
        native = kernels_for(setting.kernels, module, layout, x.dataset.shape, setting.tokens)
        found = native if isinstance(native, Native) else None
        return Networks(module.to(x.device), layout, found)

    def _pooled_bytes(self) -> int:
        x = self.experiment
        data = x.dataset
        image = int(np.prod(data.shape)) * np.dtype(data.x.dtype).itemsize
        label = np.min_scalar_type(max(data.n_classes - 1, 1)).itemsize
        return int(x.federation.sizes("train").sum()) * (image + label)
