"""The Ray engine: the pool of workers on a cluster, for those who outgrow one machine.

The setting, with its data, is put into Ray's object store once and read by the workers of each node
without another copy; rows travel once per round to every node that needs them. A worker that dies
is replaced, wherever there is room, and its client trained by another one. Nodes may come and go;
the run stops only when none is left. Ray is an extra: `pip install fedloom[cluster]`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import Block, Done, Engine, Lasts, Order, Scored, Setting, same_row, work
from fedloom.engine.worker import Worker
from fedloom.errors import FedloomError
from fedloom.select import Last

_TRIES = 3  # of one client's job, when its worker dies
_PATIENCE = 2.0  # seconds between two checks of the cluster while no worker answers


@dataclass(eq=False)
class _Member:
    """A worker that was asked for. It gets jobs once it said where it is."""

    actor: Any
    pending: Any  # its answer under way: to a job, or where it is
    job: int | None = None
    node: str | None = None
    ready: bool = False


class Cluster(Engine):
    """Workers as Ray actors."""

    def __init__(
        self,
        setting: Setting,
        workers: int,
        parts: Sequence[object] = (),
        address: str | None = None,
    ) -> None:
        super().__init__(setting)
        try:
            import ray
        except ImportError:
            raise FedloomError(
                "The ray engine needs Ray, which is not installed. Install it with: "
                "pip install 'fedloom[cluster]'"
            ) from None
        self._ray = ray
        self._gone = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)
        self._failed_starts = 0  # in a row
        _send_by_value(ray, [*(type(part) for part in parts), *getattr(setting.build, "args", ())])
        self._ours = not ray.is_initialized()
        if self._ours:
            _start(ray, address, workers)
        self._shared = ray.put(setting)
        self._kind = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._members = [self._hire() for _ in range(workers)]

    def train_each(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        same = same_row(rows)
        shared = self._ray.put(rows[0].numpy()) if same else None
        words = self._ray.put(order)

        def start(actor: Any, i: int) -> Any:
            row = shared if same else rows[i].numpy()
            return actor.train.remote(words, int(clients[i]), row, lasts[i] if lasts else None)

        sizes = [work(self.setting, order, int(c)) for c in clients]
        return self._run(start, len(clients), sizes)

    def run_blocks(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        same = same_row(rows)
        shared = self._ray.put(rows[0].numpy()) if same else None

        def start(actor: Any, i: int) -> Any:
            row = shared if same else rows[blocks[i].row].numpy()
            return actor.score.remote(row, blocks[i])

        return self._run(start, len(blocks), [len(b.indices) for b in blocks])

    def close(self) -> None:
        for member in self._members:
            self._ray.kill(member.actor)
        self._members = []
        if self._ours:
            self._ray.shutdown()

    def _run(
        self, start: Callable[[Any, int], Any], count: int, sizes: Sequence[float]
    ) -> list[Any]:
        """Do all jobs, longest first; answers in order."""
        waiting = deque(sorted(range(count), key=lambda i: -sizes[i]))
        answers: dict[int, Any] = {}
        died: list[list[str | None]] = [[] for _ in range(count)]  # where workers died on a job
        while len(answers) < count:
            for member in self._members:
                if member.ready and member.pending is None and waiting:
                    member.job = waiting.popleft()
                    member.pending = start(member.actor, member.job)
            for member in self._heard():
                job, pending = member.job, member.pending
                member.job = member.pending = None
                try:
                    answer = self._ray.get(pending)
                except self._gone as e:
                    self._replace(member)
                    if job is None:
                        self._check_start(e)
                    else:
                        died[job].append(member.node)
                        self._check_tries(died[job], e)
                        waiting.appendleft(job)
                except self._ray.exceptions.RayTaskError as e:
                    self._settle_others()
                    raise (e.cause if isinstance(e.cause, FedloomError) else e) from None
                else:
                    if job is None:
                        member.node, member.ready = answer, True
                        self._failed_starts = 0
                    else:
                        answers[job] = answer
        return [answers[i] for i in range(count)]

    def _hire(self) -> _Member:
        """A worker wherever there is room for one: now, or once a node with room is there."""
        actor: Any = self._kind.remote(self._shared)
        return _Member(actor, actor.node.remote())

    def _replace(self, member: _Member) -> None:
        self._ray.kill(member.actor)  # it may only be out of reach
        self._members[self._members.index(member)] = self._hire()

    def _heard(self) -> list[_Member]:
        """The members that have an answer, as soon as there is one."""
        by = {m.pending: m for m in self._members if m.pending is not None}
        while True:
            ready, _ = self._ray.wait(list(by), num_returns=1, timeout=_PATIENCE)
            if ready:
                return [by[ref] for ref in ready]
            if not any(m.ready for m in self._members) and not self._nodes():
                raise FedloomError(
                    "The Ray cluster has no node left to run a worker on. The run is safe up to "
                    "its last checkpoint: start a node, then continue with --resume."
                )

    def _nodes(self) -> set[str]:
        """The nodes that are there and may run workers."""
        known = self._ray.nodes()
        return {n["NodeID"] for n in known if n["Alive"] and n["Resources"].get("CPU", 0) >= 1}

    def _check_tries(self, died: Sequence[str | None], reason: Exception) -> None:
        """A worker that went with its node says nothing about the job that it had."""
        there = self._nodes()
        if sum(node in there for node in died) >= _TRIES:
            raise FedloomError(
                f"A Ray worker died {_TRIES} times on the same job, on nodes that are still up. "
                f"It may need more memory than they have: {_first_line(reason)}"
            ) from None

    def _check_start(self, reason: Exception) -> None:
        """A worker died before its first job: with its node, or because none can start."""
        self._failed_starts += 1
        if self._failed_starts > _TRIES * len(self._members) and self._nodes():
            raise FedloomError(f"Ray workers die while they start: {_first_line(reason)}") from None

    def _settle_others(self) -> None:
        """Wait for jobs under way, so that the pool is clean after an error."""
        busy = [m for m in self._members if m.job is not None]
        if busy:
            self._ray.wait([m.pending for m in busy], num_returns=len(busy))
        for member in busy:
            member.job = member.pending = None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _send_by_value(ray: Any, things: Sequence[object]) -> None:
    """Nodes have fedloom, but not the user's own files: classes and factories of those are sent."""
    for thing in things:
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        if module is not None and module.__name__.partition(".")[0] not in ("fedloom", "builtins"):
            ray.cloudpickle.register_pickle_by_value(module)


class _Actor:
    """A worker on some node."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self._setting = setting

    @cached_property
    def _worker(self) -> Worker:
        return Worker(self._setting)  # made by the first job, which can tell what went wrong

    def node(self) -> str:
        """Where this is: the answer also says that it is there."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def train(self, order: Order, client: int, row: np.ndarray, last: Last | None) -> Done:
        return self._worker.train(order, client, torch.from_numpy(row.copy()), last)

    def score(self, row: np.ndarray, block: Block) -> Scored:
        return self._worker.score(torch.from_numpy(row.copy()), block)


def _start(ray: Any, address: str | None, workers: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    try:
        if address is not None and ":" in address and "//" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray waits for minutes
        if address is None:
            # Its own, even if somebody else's is running on this machine.
            ray.init(address="local", num_cpus=workers, include_dashboard=False,
                     log_to_driver=False, logging_level="error")  # fmt: skip
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as e:
        raise FedloomError(f"The Ray cluster '{address}' can't be reached: {e}") from None
