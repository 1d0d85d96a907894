"""The Ray engine: the pool of workers on a cluster, for those who outgrow one machine.

The setting, with its data, is put into Ray's object store once and read by the workers of each
node without another copy; rows travel once per round to every node that needs them. A worker that
dies is restarted and its client trained again. Ray is an extra: `pip install fedloom[cluster]`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import Block, Done, Engine, Lasts, Scored, Setting, Task, same_row
from fedloom.engine.worker import Worker
from fedloom.errors import FedloomError
from fedloom.select import Last

_TRIES = 3


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
        _send_by_value(ray, [*(type(part) for part in parts), *getattr(setting.build, "args", ())])
        self._ours = not ray.is_initialized()
        if self._ours:
            _start(ray, address, workers)
        self._shared = ray.put(setting)  # held here, or a restarted worker would not find it
        actor = ray.remote(num_cpus=1, max_restarts=_TRIES)(_Actor)
        self._actors: list[Any] = [actor.remote(self._shared) for _ in range(workers)]

    def train_each(
        self, task: Task, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        same = same_row(rows)
        shared = self._ray.put(rows[0].numpy()) if same else None
        words = self._ray.put(task)

        def start(actor: Any, i: int) -> Any:
            row = shared if same else rows[i].numpy()
            return actor.train.remote(words, int(clients[i]), row, lasts[i] if lasts else None)

        federation = self.setting.federation
        sizes = [1 if self.setting.pools else federation.size(int(c), "all") for c in clients]
        return self._run(start, len(clients), sizes)

    def run_blocks(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        same = same_row(rows)
        shared = self._ray.put(rows[0].numpy()) if same else None

        def start(actor: Any, i: int) -> Any:
            row = shared if same else rows[blocks[i].row].numpy()
            return actor.score.remote(row, blocks[i])

        return self._run(start, len(blocks), [len(b.indices) for b in blocks])

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._ours:
            self._ray.shutdown()

    def _run(self, start: Callable[[Any, int], Any], count: int, sizes: Sequence[int]) -> list[Any]:
        """Do all jobs, longest first; answers in order."""
        ray = self._ray
        waiting = deque(sorted(range(count), key=lambda i: -sizes[i]))
        idle, busy = deque(self._actors), {}
        answers: dict[int, Any] = {}
        tries = [0] * count
        while len(answers) < count:
            while idle and waiting:
                actor, job = idle.popleft(), waiting.popleft()
                busy[start(actor, job)] = (actor, job)
            (ready, *_), _ = ray.wait(list(busy), num_returns=1)
            actor, job = busy.pop(ready)
            idle.append(actor)
            try:
                answers[job] = ray.get(ready)
            except ray.exceptions.RayActorError as e:
                tries[job] += 1
                if tries[job] >= _TRIES:
                    raise FedloomError(
                        f"A Ray worker died {_TRIES} times on the same job: {e}"
                    ) from None
                waiting.appendleft(job)
            except ray.exceptions.RayTaskError as e:
                raise (e.cause if isinstance(e.cause, FedloomError) else e) from None
        return [answers[i] for i in range(count)]


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
        self._worker = Worker(setting)

    def train(self, task: Task, client: int, row: np.ndarray, last: Last | None) -> Done:
        return self._worker.train(task, client, torch.from_numpy(row.copy()), last)

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
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False,
                     logging_level="error")  # fmt: skip
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as e:
        raise FedloomError(f"The Ray cluster '{address}' can't be reached: {e}") from None
