"""The process engine: a pool of single-thread workers over shared memory.

Workers are forked, so they share the data and everything else that was there before without a copy;
rows go in and out through two shared matrices, and only a few words per client are sent. The jobs
of a round are written where all workers can read them, who take them one after the other, the
longest first, from a queue that they share, so that nobody waits for the parent, which would need a
core to answer. A worker that dies is replaced and what it had is done again. What a job is does not
depend on the number of workers, so that results do not either. For convolutions on CPUs this beats
threads: a small network's step has little to share out.
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
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
_NUMBER = 4  # bytes of a number in the queue of jobs
_QUEUED = 2**12 // _NUMBER  # numbers in it at most: the smallest pipe has a page of memory
_IDLE = -1  # in place of a job, for workers that die without one
_LEAST_SLOTS = 64  # rows that fit the shared matrices, at least; pages not used cost nothing


@dataclass
class _Member:
    place: int  # in the pool
    process: BaseProcess
    pipe: Connection
    busy: bool = False


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
        self._queue, self._board = _Queue(), _Board()
        self._doing = np.frombuffer(mmap.mmap(-1, 8 * workers), dtype=np.int64)  # 1 + a job, or 0
        self._members: list[_Member] = []
        for place in range(workers):
            self._members.append(self._hire(place))

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
            hands = training_jobs(self._inner, self.setting, order, some)
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
            hands = scoring_jobs(self._inner, self.setting, placed, some)
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

    def _run(self, jobs: list[tuple[Any, ...]], sizes: Sequence[float]) -> list[Any]:
        """Do all jobs, longest first; answers in the order of the jobs."""
        answers: dict[int, Any] = {}
        tries: Counter[int] = Counter()
        while len(answers) < len(jobs):
            todo = [i for i in range(len(jobs)) if i not in answers]
            todo.sort(key=lambda i: -sizes[i])
            # Where a worker has died, each does one job at a time, so that no more is lost.
            most = 1 if tries else len(todo)
            parts = self._queue.put(len(todo))
            words = _words((self._board.put([jobs[i] for i in todo]), parts, most))
            self._doing[:] = 0
            for member in self._members[:parts]:
                member.busy = True
                with contextlib.suppress(OSError):  # it died while idle: receiving will tell
                    member.pipe.send_bytes(words)
            while busy := {m.pipe: m for m in self._members if m.busy}:
                for pipe in wait(list(busy)):
                    member = busy[pipe]  # type: ignore[index]
                    member.busy = False
                    try:
                        kind, answer = _received(member.pipe)
                    except (EOFError, OSError):
                        doing = int(self._doing[member.place]) - 1
                        job = _IDLE if doing < 0 else todo[doing]
                        tries[job] += 1
                        self._replace(member, None if doing < 0 else jobs[job], tries[job])
                        continue
                    if kind == "error":
                        self._settle()
                        raise answer
                    answers.update((todo[k], found) for k, found in answer.items())
            self._queue.clear()  # where some have died
        return [answers[i] for i in range(len(jobs))]

    def _replace(self, member: _Member, job: tuple[Any, ...] | None, tries: int) -> None:
        """A new worker for one that died on a job, or without one: idle, or at its start."""
        member.process.join(1)
        code = member.process.exitcode
        if tries >= (_TRIES if job else _TRIES * len(self._members)):
            self._settle()
            what = f"{tries} times on the same job ({_name(job)})" if job else f"{tries} times"
            raise FedloomError(
                f"A worker died {what}: {_ending(code, _oom_kills() > self._oom_kills)}. Finished "
                "rounds are kept: continue with --resume."
            )
        member.pipe.close()
        fresh = self._hire(member.place)
        member.process, member.pipe = fresh.process, fresh.pipe

    def _settle(self) -> None:
        """Wait for jobs under way, so that the pool is clean after an error."""
        self._queue.clear()
        for member in self._members:
            if member.busy:
                with contextlib.suppress(EOFError, OSError):
                    member.pipe.recv_bytes()
            member.busy = False

    def _hire(self, place: int) -> _Member:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        others = [m.pipe for m in self._members if m.place != place]
        process = context.Process(
            target=self._serve,
            args=(place, theirs, [ours, *others]),
            daemon=True,
            name="fedloom-worker",
        )
        self._doing[place] = 0
        with _undisturbed():
            process.start()
        theirs.close()
        return _Member(place, process, ours)

    # -- in the worker -----------------------------------------------------------------------------

    def _serve(self, place: int, pipe: Connection, foreign: list[Connection]) -> None:
        """Answer jobs until the pipe closes, as it does when the parent ends, however it ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also amid a long job
        # A worker that wakes must not take the core from the parent, which has others to wake.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        for other in foreign:
            other.close()
        if self.setting.threads == 1:
            self._answer(place, pipe)
        # OpenMP gives each thread that asks helpers of its own, and those of the thread that forked
        # stayed with the parent: a step of several threads would wait for them for ever.
        thread = threading.Thread(target=self._answer, args=(place, pipe))
        thread.start()
        thread.join()

    def _answer(self, place: int, pipe: Connection) -> NoReturn:
        torch.set_num_threads(self.setting.threads)
        inner: OneProcess | None = None
        while True:
            try:
                board, parts, most = _received(pipe)
            except (EOFError, OSError):
                os._exit(0)
            answer: tuple[str, Any]
            try:
                inner = inner or self._inner(self.setting)
                mine = self._mine(place, len(board) - 1, parts, most)
                answer = "done", {k: self._do(inner, self._board.read(board, k)) for k in mine}
            except FedloomError as e:
                answer = "error", _portable(e)
            except Exception:
                answer = "error", RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            try:
                pipe.send_bytes(_words(answer))
            except OSError:  # the parent is gone
                os._exit(0)

    def _mine(self, place: int, jobs: int, parts: int, most: int) -> Iterator[int]:
        """The jobs that are left, one at a time, as this worker gets to them, but at most so many
        (those of a part are done together)."""
        done = 0
        while done < most and (part := self._queue.take()) is not None:
            for k in range(jobs * part // parts, jobs * (part + 1) // parts):
                self._doing[place] = 1 + k
                yield k
                done += 1

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


class _Queue:
    """Numbers from 0, each of which one process takes. The kernel keeps order in a pipe, whoever
    reads from it or dies."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        weakref.finalize(self, _close, self._out, self._in)

    def put(self, count: int) -> int:
        """Numbers for `count` things; returns how many parts these come in."""
        parts = min(count, _QUEUED)
        os.write(self._in, np.arange(parts, dtype=np.int32).tobytes())
        return parts

    def take(self) -> int | None:
        """The next one, if there is one left."""
        try:
            return int.from_bytes(os.read(self._out, _NUMBER), sys.byteorder)
        except BlockingIOError:
            return None

    def clear(self) -> None:
        while self.take() is not None:
            pass


class _Board:
    """Where the parent writes down jobs, and a worker reads those that it does: memory that they
    share, as a file."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedloom-jobs")
        weakref.finalize(self, _close, self._file)

    def put(self, jobs: Sequence[tuple[Any, ...]]) -> list[int]:
        """Write these in place of those before; returns where each starts and the last one ends."""
        os.ftruncate(self._file, 0)
        words = [_words(job) for job in jobs]
        ends = list(accumulate(map(len, words), initial=0))
        for start, each in zip(ends, words, strict=False):
            _write(self._file, each, start)
        return ends

    def read(self, ends: Sequence[int], k: int) -> tuple[Any, ...]:
        found, at = bytearray(), ends[k]
        while at < ends[k + 1] and (some := os.pread(self._file, ends[k + 1] - at, at)):
            found += some
            at += len(some)
        return pickle.loads(found)


def _write(file: int, words: bytes, at: int) -> None:
    """All of it: the system may write a part."""
    left = memoryview(words)
    while left:
        done = os.pwrite(file, left, at)
        left, at = left[done:], at + done


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits: amid a fork, Python would lose it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _portable(error: FedloomError) -> FedloomError:
    """An error that the parent can read: as it is, or its text, if it can't be pickled."""
    try:
        pickle.loads(_words(error))
    except Exception:
        return FedloomError(str(error))
    return error


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


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
    """Hardly a tensor is in messages, so plain pickle will do: `Connection.send` looks through
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
