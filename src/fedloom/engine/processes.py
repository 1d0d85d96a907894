"""The process engine: a pool of single-thread workers over shared memory.

Workers are forked, so they share the data and everything else that was there before without a copy;
rows go in and out through two shared matrices, and only a few words per client are sent. The
longest job starts first. A worker that dies is replaced and its client trained again. What a job is
does not depend on the number of workers, so that results do not either. For
convolutions on CPUs this beats threads: a small network's step has little to share out.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.base import (
    Block,
    Done,
    Engine,
    Lasts,
    OneProcess,
    Order,
    Scored,
    Setting,
    same_row,
    scoring_jobs,
    training_jobs,
    work,
)
from fedloom.errors import FedloomError
from fedloom.select import Last, Select

#: where a worker finds what a client last sent: slot, size, packed columns
Recalled = tuple[int, int, np.ndarray | None] | None

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_TRIES = 3  # of one client's job, when its worker dies
_AHEAD = 2**15  # bytes of a job that is sent to a worker that still has one: they fit into its pipe
_LEAST_SLOTS = 64  # rows that fit the shared matrices, at least; pages not used cost nothing


@dataclass
class _Member:
    process: BaseProcess
    pipe: Connection
    jobs: deque[int] = field(default_factory=deque)  # under way: the first, and the next


class Processes(Engine):
    """A pool of forked workers, each with an engine of its own: serial, or stacked.

    `parts` are the method's own objects, which are never pickled.
    """

    def __init__(
        self,
        setting: Setting,
        inner: type[OneProcess],
        workers: int,
        participants: int,
        parts: Sequence[object] = (),
    ) -> None:
        super().__init__(setting)
        if not can_fork():
            raise FedloomError(
                "The process engine forks its workers, which is not safe on this system. Use "
                "--engine serial or --engine stacked."
            )
        if setting.device.type != "cpu":
            raise FedloomError(
                f"The process engine is for CPUs, not for {setting.device}. Use --engine serial "
                "or --engine stacked."
            )
        self._inner, self.stacks = inner, inner.stacks
        self._parts = tuple(parts)
        slots = max(participants, _LEAST_SLOTS)
        self._inbox = _shared_rows(slots, setting)
        self._outbox = _shared_rows(slots, setting)
        recalls = any(isinstance(part, Select) and "last" in part.needs for part in parts)
        self._recalled = _shared_rows(slots if recalls else 1, setting)
        self._oom_kills = _oom_kills()
        self._known: tuple[bytes, Order] | None = None  # to a worker: the last order, unpacked
        self._members: list[_Member] = []
        for _ in range(workers):
            self._members.append(self._hire())

    def train_each(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        words = self._pack(order)
        slots, same = len(self._inbox), same_row(rows)
        done: dict[int, Done] = {}
        for at in range(0, len(clients), slots):
            some = clients[at : at + slots]
            self._place(rows[:1] if same else rows[at : at + slots])
            sizes = [work(self.setting, order, int(c)) for c in some]
            hands = self._together(training_jobs(self._inner, self.setting, order, some), sizes)
            known = self._recall(lasts[at : at + slots]) if lasts else [None] * len(some)
            jobs = [
                ("train", words, some[h], [0] * len(h) if same else h, h, [known[i] for i in h])
                for h in hands
            ]
            answers = self._run(jobs, [sum(sizes[i] for i in h) for h in hands])
            for hand, answer in zip(hands, answers, strict=True):
                for i, (size, index, facts) in zip(hand, answer, strict=True):
                    row = self._outbox[i, :size]
                    # a later wave will need the shared rows
                    row = row.clone() if len(clients) > slots else row
                    done[at + i] = Done(row=row, index=_unpacked(index), **facts)
        return [done[i] for i in range(len(clients))]

    def run_blocks(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        slots, same = len(self._inbox), same_row(rows)
        out: list[Scored] = []
        for at in range(0, 1 if same else len(rows), slots):
            placed = rows[:1] if same else rows[at : at + slots]
            self._place(placed)
            some = [replace(b, row=b.row - at) for b in blocks if same or at <= b.row < at + slots]
            sizes = [len(b.indices) for b in some]
            hands = self._together(scoring_jobs(self._inner, self.setting, placed, some), sizes)
            jobs = [("score", [some[i] for i in hand], len(placed)) for hand in hands]
            answers = self._run(jobs, [sum(sizes[i] for i in h) for h in hands])
            found = {
                i: scored
                for hand, answer in zip(hands, answers, strict=True)
                for i, scored in zip(hand, answer, strict=True)
            }
            out += [found[i] for i in range(len(some))]
        return out

    def close(self) -> None:
        for member in self._members:
            member.pipe.close()
            member.process.kill()
        for member in self._members:
            member.process.join()
        self._members = []

    def _place(self, rows: Tensor) -> None:
        """Write rows where workers can read them."""
        self._inbox[: len(rows), : rows.shape[1]].copy_(rows)

    def _recall(self, lasts: Sequence[Last | None]) -> list[Recalled]:
        """Write what clients last sent where workers can read it; returns where to find it."""
        out: list[Recalled] = []
        for i, last in enumerate(lasts):
            if last is not None:
                self._recalled[i, : last.row.numel()].copy_(last.row)
            words = None if last is None else (i, last.row.numel(), _packed(last.index))
            out.append(words)
        return out

    def _together(self, hands: list[list[int]], sizes: Sequence[float]) -> list[list[int]]:
        """Fewer, larger jobs, where grouping does not change results (in a stack, padding would):
        half of what is left is split among all workers, again and again, so that the last jobs are
        short and no worker waits long for the others."""
        if self.stacks:
            return hands
        total = [sum(sizes[i] for i in hand) for hand in hands]
        waiting = deque(sorted(range(len(hands)), key=lambda k: -total[k]))
        out: list[list[int]] = []
        while waiting:
            share = sum(total[k] for k in waiting) / (2 * len(self._members))
            for _ in range(min(len(self._members), len(waiting))):
                job: list[int] = []
                size = 0.0
                while waiting and (not job or size < share):
                    k = waiting.popleft()
                    job += hands[k]
                    size += total[k]
                out += [job] if job else []
        return out

    def _run(self, jobs: list[tuple[Any, ...]], sizes: Sequence[float]) -> list[Any]:
        """Do all jobs, longest first; answers in the order of the jobs."""
        waiting = deque(sorted(range(len(jobs)), key=lambda i: -sizes[i]))
        answers: dict[int, Any] = {}
        tries = [0] * len(jobs)
        words = [_words(job) for job in jobs]
        while len(answers) < len(jobs):
            self._hand_out(words, sizes, waiting)
            ready = wait([m.pipe for m in self._members if m.jobs])
            for member in [m for m in self._members if m.pipe in ready]:
                job = member.jobs[0]
                try:
                    kind, answer = _received(member.pipe)
                except (EOFError, OSError):
                    tries[job] += 1
                    waiting.extendleft(reversed(member.jobs))
                    self._replace(member, jobs[job], tries[job])
                    continue
                member.jobs.popleft()
                if kind == "error":
                    self._settle()
                    raise answer
                answers[job] = answer
        return [answers[i] for i in range(len(jobs))]

    def _hand_out(
        self, words: Sequence[bytes], sizes: Sequence[float], waiting: deque[int]
    ) -> None:
        """A job for every idle worker; then a second one for those that will finish first, so that
        jobs follow one another without a round trip. What might not fit into a pipe is not sent
        ahead: both sides could wait for each other to read."""
        for member in [m for m in self._members if not m.jobs]:
            if waiting:
                self._give(member, words, waiting.popleft())
        for member in [m for m in self._members if len(m.jobs) == 1]:
            if not waiting or len(words[waiting[0]]) > _AHEAD:
                return
            todo = sum(sizes[i] for i in (*waiting, *(j for m in self._members for j in m.jobs)))
            if sizes[member.jobs[0]] + sizes[waiting[0]] < todo / len(self._members):
                self._give(member, words, waiting.popleft())

    def _give(self, member: _Member, words: Sequence[bytes], job: int) -> None:
        member.jobs.append(job)
        with contextlib.suppress(OSError):  # it died while idle: receiving will tell
            member.pipe.send_bytes(words[job])

    def _replace(self, member: _Member, job: tuple[Any, ...], tries: int) -> None:
        member.process.join(1)
        code = member.process.exitcode
        if tries >= _TRIES:
            raise FedloomError(
                f"A worker died {tries} times on the same job ({_name(job)}): "
                f"{_ending(code, _oom_kills() > self._oom_kills)}. Finished rounds are kept: "
                "continue with --resume."
            )
        member.pipe.close()
        fresh = self._hire(instead_of=member)
        member.process, member.pipe, member.jobs = fresh.process, fresh.pipe, deque()

    def _settle(self) -> None:
        """Wait for jobs under way, so that the pool is clean after an error."""
        for member in self._members:
            with contextlib.suppress(EOFError, OSError):
                for _ in member.jobs:
                    member.pipe.recv_bytes()
            member.jobs.clear()

    def _hire(self, instead_of: _Member | None = None) -> _Member:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        others = [m.pipe for m in self._members if m is not instead_of]
        process = context.Process(
            target=self._serve, args=(theirs, [ours, *others]), daemon=True, name="fedloom-worker"
        )
        process.start()
        theirs.close()
        return _Member(process, ours)

    # -- in the worker -----------------------------------------------------------------------------

    def _serve(self, pipe: Connection, foreign: list[Connection]) -> None:
        """Answer jobs until the pipe closes, as it does when the parent ends, however it ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also amid a long job
        for other in foreign:
            other.close()
        if self.setting.threads == 1:
            self._answer(pipe)
        # OpenMP gives each thread that asks helpers of its own, and those of the thread that forked
        # stayed with the parent: a step of several threads would wait for them for ever.
        thread = threading.Thread(target=self._answer, args=(pipe,))
        thread.start()
        thread.join()

    def _answer(self, pipe: Connection) -> NoReturn:
        torch.set_num_threads(self.setting.threads)
        inner: OneProcess | None = None
        while True:
            try:
                job = _received(pipe)
            except (EOFError, OSError):
                os._exit(0)
            answer: tuple[str, Any]
            try:
                inner = inner or self._inner(self.setting)
                answer = "done", self._do(inner, job)
            except FedloomError as e:
                answer = "error", e
            except Exception:
                answer = "error", RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            try:
                pipe.send_bytes(_words(answer))
            except OSError:  # the parent is gone
                os._exit(0)

    def _do(self, inner: OneProcess, job: tuple[Any, ...]) -> Any:
        if job[0] == "score":
            return inner.score_job(self._inbox[: job[2], : self.setting.layout.size], job[1])
        _, words, clients, slots, places, known = job
        order = self._unpack(words)
        width = self.setting.layout.size if order.sections is None else order.sections.width
        inbox = self._inbox[:, :width]
        starts = inbox[slots[0]].expand(len(slots), -1) if len(set(slots)) == 1 else inbox[slots]
        lasts = [
            None if k is None else Last(self._recalled[k[0], : k[1]].clone(), _unpacked(k[2]))
            for k in known
        ]
        results = inner.train_job(order, clients, starts, lasts)
        answer = []
        for result, place in zip(results, places, strict=True):
            facts = vars(result).copy()
            row, index = facts.pop("row"), facts.pop("index")
            self._outbox[place, : row.numel()].copy_(row)
            answer.append((row.numel(), _packed(index), facts))
        return answer

    # -- packing orders ----------------------------------------------------------------------------

    def _pack(self, order: Order) -> bytes:
        words = io.BytesIO()
        _Packer(words, self._parts).dump(order)
        return words.getvalue()

    def _unpack(self, words: bytes) -> Order:
        if self._known is None or self._known[0] != words:  # most jobs of a round are of one order
            order = _Unpacker(io.BytesIO(words), self._parts).load()
            assert isinstance(order, Order)
            self._known = words, order
        return self._known[1]


class _Packer(pickle.Pickler):
    """Names the method's parts by number: both sides have them, and they may be unpicklable."""

    def __init__(self, file: io.BytesIO, parts: Sequence[object]) -> None:
        super().__init__(file)
        self._numbers = {id(part): i for i, part in enumerate(parts)}

    def persistent_id(self, value: object) -> int | None:
        return self._numbers.get(id(value))


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Sequence[object]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, number: int) -> object:
        return self._parts[number]


def _words(message: Any) -> bytes:
    """There are no tensors in messages, so plain pickle will do: `Connection.send` looks through
    everything for memory that it could share."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _packed(index: Tensor | None) -> np.ndarray | None:
    """Ascending columns as one bit each: a pipe has less to carry."""
    if index is None:
        return None
    there = np.zeros(int(index[-1]) + 1, dtype=bool)
    there[index.numpy()] = True
    return np.packbits(there)


def _unpacked(bits: np.ndarray | None) -> Tensor | None:
    if bits is None:
        return None
    # As truth values, which numpy finds six times as fast as numbers that are not 0.
    return torch.from_numpy(np.flatnonzero(np.unpackbits(bits).view(bool)))


def _name(job: tuple[Any, ...]) -> str:
    return f"training client {job[2][0]}" if job[0] == "train" else "scoring"


def _ending(code: int | None, starved: bool) -> str:
    """How a worker ended, as far as its exit code and the system's count of killings tell."""
    if code is None or code >= 0:
        return f"it ended with exit code {code}; --engine serial may show the reason"
    name = signal.Signals(-code).name
    if code != -signal.SIGKILL:
        return f"it crashed ({name}) in compiled code; --engine serial may show where"
    fewer = "Use fewer --workers, a smaller model or a smaller --batch"
    if starved:
        return f"the system killed it because memory ran out. {fewer}"
    return f"it was killed ({name}), which happens when memory runs out. {fewer}"


def _oom_kills() -> int:
    """How many processes this system has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def can_fork() -> bool:
    """Linux only: forking a process that has loaded Apple's frameworks is not safe."""
    return sys.platform.startswith("linux")


def _shared_rows(slots: int, setting: Setting) -> Tensor:
    """A matrix in memory that forked processes share; it is gone when the last of them ends."""
    layout, width = setting.layout, setting.row_width
    memory = mmap.mmap(-1, max(slots * width * layout.bytes, 1))
    return torch.frombuffer(memory, dtype=layout.dtype).view(slots, width)
