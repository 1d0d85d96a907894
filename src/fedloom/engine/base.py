"""The contract of an engine: the same local work on many clients, whoever runs it.

An engine gets an `Order` (what all clients do this round), the clients and the rows they start
from, and returns the rows they end with, as the clients are listed. It knows nothing of methods'
names, servers, files or time. Results must not depend on the number of workers: every client's work
is a function of its names, and what is summed is summed in a fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset
from fedloom.data.public import PublicSet
from fedloom.data.split import Federation
from fedloom.engine.batches import SCORE_BATCH, Augment
from fedloom.kinds import Sections
from fedloom.layout import Layout
from fedloom.local import Budget, LocalRule, Optimiser
from fedloom.select import Channels, Last, Select, Whole
from fedloom.tasks import Kept, Sums, Task

#: what each client last sent, for selectors that ask
Lasts = Sequence[Last | None] | None

BLOCK = 4096  # samples of one scoring job, where one model is scored on many


@dataclass(frozen=True)
class Setting:
    """What stays the same for a whole run: the model's shape, the data and where it is computed."""

    build: Callable[[], nn.Module]
    layout: Layout
    dataset: Dataset
    federation: Federation
    device: torch.device
    seed: int
    capacities: np.ndarray
    augment: Augment = field(default_factory=Augment)
    extras: tuple[str, ...] = ()  # columns that the local rule adds
    width: int = 0  # of the widest rows that clients train; 0: the model's
    pools: bool = False  # one learner, number 0, trains on everyone's data
    submodels: bool = False  # some train a part of the model: all its tracked norms are measured
    static: bool = False  # the model has norms whose statistics are measured before scoring
    static_samples: int | None = 5000
    shares_norms: bool = False  # clients measure them together before some look at a shared model
    channels: Channels | None = None  # of the model, where sub-models are made of them
    public: PublicSet | None = None  # for parts that look at it
    tokens: bool = False  # the model looks the data up, so they are not normalised
    precision: str = "fp32"
    kernels: str = "torch"  # or the instruction set that fedloom's own are for
    threads: int = 1

    @property
    def task(self) -> Task:
        return self.dataset.task

    @property
    def row_width(self) -> int:
        return max(self.width, self.layout.size)

    def autocast(self) -> torch.autocast:
        """Where the forward pass runs: in bf16 if asked for."""
        on = self.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)


@dataclass(frozen=True)
class Order:
    """The local work of one round. `data` maps the rule's parts to other parts than their own."""

    rule: LocalRule
    budget: Budget
    optimiser: Optimiser
    round: int
    select: Select = field(default_factory=Whole)
    data: Mapping[str, str] = field(default_factory=dict)
    sections: Sections | None = None  # of the rows, where there is more in them than the model
    screened: bool = False  # what comes back is checked later: do not stop at NaN here
    together: tuple[int, ...] = ()  # who measure the norms of a model that clients look at


@dataclass(frozen=True)
class Done:
    """What one client returns, and what it cost."""

    row: Tensor
    index: Tensor | None  # the columns of a sub-model; None: the whole
    loss: float
    samples: int
    steps: int
    macs: int
    memory: int  # bytes of a training step, and of what had to be there to choose a sub-model
    seconds: Mapping[str, float]  # spent on: select, data, train
    gaps: tuple[float, float] | None = None  # from the whole model's gradient and update


@dataclass(frozen=True)
class Trained:
    """What came back, one entry per client: rows, or sub-rows with their columns.

    The rows may be the engine's own memory: they are valid until its next call.
    """

    rows: list[Tensor]
    indexes: tuple[Tensor | None, ...]
    loss: np.ndarray
    samples: np.ndarray  # trained on, counting repeats
    steps: np.ndarray
    macs: np.ndarray  # multiply-accumulates spent
    memory: np.ndarray  # bytes needed
    seconds: Mapping[str, float]  # summed over clients
    gaps: tuple[tuple[float, float], ...] = ()  # of those who measured them

    @staticmethod
    def of(done: Sequence[Done]) -> Trained:
        names = dict.fromkeys(name for d in done for name in d.seconds)
        return Trained(
            rows=[d.row for d in done],
            indexes=tuple(d.index for d in done),
            loss=np.array([d.loss for d in done]),
            samples=np.array([d.samples for d in done], dtype=np.int64),
            steps=np.array([d.steps for d in done], dtype=np.int64),
            macs=np.array([d.macs for d in done], dtype=np.int64),
            memory=np.array([d.memory for d in done], dtype=np.int64),
            seconds={name: sum(d.seconds.get(name, 0.0) for d in done) for name in names},
            gaps=tuple(d.gaps for d in done if d.gaps is not None),
        )

    def with_more(self, other: Trained) -> Trained:
        """The same clients' rows and losses, with what training a second model took as well."""
        names = dict.fromkeys([*self.seconds, *other.seconds])
        return replace(
            self,
            macs=self.macs + other.macs,
            memory=np.maximum(self.memory, other.memory),
            seconds={n: self.seconds.get(n, 0.0) + other.seconds.get(n, 0.0) for n in names},
        )


@dataclass(frozen=True)
class Scored:
    """Per client (or row), what the task has counted: the summed loss, and what its measures are
    made of (of classes, the confusion matrix, true × predicted)."""

    sums: Sums
    kept: Kept | None = None  # what a measure needs of every sample
    probabilities: np.ndarray | None = None  # per sample, where a block asks for them

    @property
    def loss(self) -> np.ndarray:
        return self.sums["loss"]

    @property
    def confusion(self) -> np.ndarray:
        return self.sums["confusion"]


class Tally:
    """Adds up what a task counts, batch by batch, for the clients of a block."""

    def __init__(self, task: Task, clients: int) -> None:
        self._task, self._clients = task, clients
        self._sums = task.nothing(clients)
        self._kept: list[Kept] = []

    def add(self, outputs: Tensor, y: Tensor, who: np.ndarray) -> None:
        """Outputs for some samples, their labels, and which clients they belong to."""
        for name, values in self._task.count(outputs, y, who, self._clients).items():
            self._sums[name] += values
        kept = self._task.keep(outputs, y)
        if kept is not None:
            self._kept.append(Kept(who, kept))

    def scored(self, probabilities: np.ndarray | None = None) -> Scored:
        return Scored(self._sums, joined(self._kept), probabilities)


def joined(parts: Sequence[Kept]) -> Kept | None:
    """What was kept of samples, concatenated."""
    if not parts:
        return None
    owner, values = ([getattr(part, name) for part in parts] for name in ("owner", "values"))
    return Kept(np.concatenate(owner), np.concatenate(values))


@dataclass(frozen=True)
class Held:
    """The sub-model of a whole one that a client can hold: whose, as of which round."""

    client: int
    round: int
    select: Select
    last: Last | None = None


@dataclass(frozen=True)
class Block:
    """A piece of scoring: one row, or what a client can hold of it, on some samples, which belong
    to the clients `who`."""

    row: int
    common: bool  # of the common test set, not of the clients' own data
    indices: np.ndarray
    owner: np.ndarray  # position in `who`, per sample
    who: np.ndarray
    calibrate: tuple[int, ...]  # whose training data measures norm statistics
    probabilities: bool = False
    held: Held | None = None


class Engine(ABC):
    """Runs local work on clients; one that `stacks` trains many in one call."""

    stacks = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    def task(self) -> Task:
        return self.setting.task

    @abstractmethod
    def train_each(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        """Train each client from its row; rows may be one row expanded."""

    def train(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> Trained:
        """The same, side by side."""
        return Trained.of(self.train_each(order, clients, rows, lasts))

    @abstractmethod
    def run_blocks(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        """Score every block, in their order."""

    def score(self, clients: np.ndarray, rows: Tensor, part: str, shared: bool = False) -> Scored:
        """Score each client's row on its data part; one expanded row is scored in one go. Norm
        statistics are measured on the data of these clients, of a `shared` model on everybody's."""
        federation = self.setting.federation
        groups = [federation.indices(int(c), part) for c in clients]
        whole = tuple(int(c) for c in clients)
        if same_row(rows):
            by = tuple(int(c) for c in federation.everybody) if shared else whole
            blocks = list(self._cut(0, False, groups, np.arange(len(groups)), by))
        else:
            blocks = [
                block
                for i, group in enumerate(groups)
                for block in self._cut(i, False, [group], np.array([i]), whole[i : i + 1])
            ]
        return self._gather(rows, blocks, len(clients))

    def score_held(self, rows: Tensor, held: Sequence[Held], part: str) -> Scored:
        """Score each client with its part of its row, on its own data; norm statistics are measured
        on those as well."""
        one, blocks = same_row(rows), []
        for i, mine in enumerate(held):
            indices = [self.setting.federation.indices(mine.client, part)]
            cut = self._cut(0 if one else i, False, indices, np.array([i]), (mine.client,))
            blocks += [replace(block, held=mine) for block in cut]
        return self._gather(rows, blocks, len(held))

    def score_global(self, rows: Tensor, clients: np.ndarray) -> Scored:
        """Score each row on the common test set; `clients` are whose rows they are."""
        common = [self.setting.federation.global_test()]
        whole = tuple(int(c) for c in clients)
        if same_row(rows):
            blocks = list(self._cut(0, True, common, np.array([0]), whole))
            return self._gather(rows, blocks, 1)
        blocks = [
            block
            for i in range(len(rows))
            for block in self._cut(i, True, common, np.array([i]), whole[i : i + 1])
        ]
        return self._gather(rows, blocks, len(rows))

    def vote(self, clients: np.ndarray, rows: Tensor, part: str) -> Scored:
        """Score clients by what most of the rows predict; ties go to the likelier class, and the
        loss is that of the mean probability."""
        groups = [self.setting.federation.indices(int(c), part) for c in clients]
        whole, who = tuple(int(c) for c in clients), np.arange(len(groups))
        cut = list(self._cut(0, False, groups, who, whole))
        blocks = [replace(b, row=k, probabilities=True) for k in range(len(rows)) for b in cut]
        scored = self.run_blocks(rows, blocks)
        classes = self.setting.dataset.n_classes
        sums = self.task.nothing(len(clients))
        kept: list[Kept] = []
        for i, block in enumerate(cut):
            votes, mean = np.zeros((2, len(block.indices), classes))
            for found in scored[i :: len(cut)]:
                assert found.probabilities is not None
                votes[np.arange(len(votes)), found.probabilities.argmax(1)] += 1
                mean += found.probabilities / len(rows)
            y, owner = self.setting.dataset.y[block.indices], block.who[block.owner]
            np.add.at(sums["confusion"], (owner, y, (votes + mean / 2).argmax(1)), 1)
            chances = np.log(np.maximum(mean, 1e-30))
            np.add.at(sums["loss"], owner, -chances[np.arange(len(y)), y])
            found_each = self.task.keep(torch.from_numpy(chances), torch.from_numpy(y))
            kept += [] if found_each is None else [Kept(owner, found_each)]
        return Scored(sums, joined(kept))

    def close(self) -> None:
        """Release the workers, if there are any."""

    def _cut(
        self,
        row: int,
        common: bool,
        groups: list[np.ndarray],
        who: np.ndarray,
        calibrate: tuple[int, ...],
    ) -> Iterator[Block]:
        """Samples of several clients in blocks of a fixed size, so that sums never depend on who
        computes them. Norm statistics are measured per block, so there they stay together."""
        owner = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
        indices = np.concatenate(groups)
        size = max(len(indices), 1) if self.setting.static else BLOCK
        for at in range(0, len(indices), size):
            some, local = np.unique(owner[at : at + size], return_inverse=True)
            yield Block(row, common, indices[at : at + size], local, who[some], calibrate)

    def _gather(self, rows: Tensor, blocks: list[Block], count: int) -> Scored:
        sums = self.task.nothing(count)
        kept: list[Kept] = []
        for block, scored in zip(blocks, self.run_blocks(rows, blocks), strict=True):
            for name, values in scored.sums.items():
                sums[name][block.who] += values
            if scored.kept is not None:
                kept.append(Kept(block.who[scored.kept.owner], scored.kept.values))
        return Scored(sums, joined(kept))


class OneProcess(Engine):
    """An engine that works in this process, job by job, so that a pool of processes can do the same
    jobs. How work is split into jobs must not depend on who does them: a stack's padding decides
    which kernels run, and so the last bits of all clients in it."""

    @staticmethod
    @abstractmethod
    def cut(setting: Setting, sizes: Sequence[float], samples: float) -> list[list[int]]:
        """Cut work of these sizes into jobs; `samples` is how many a step has."""

    @abstractmethod
    def train_job(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        """Train the clients of one job."""

    @abstractmethod
    def score_job(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        """Score the blocks of one job."""

    def train_each(
        self, order: Order, clients: np.ndarray, rows: Tensor, lasts: Lasts = None
    ) -> list[Done]:
        done: dict[int, Done] = {}
        for job in training_jobs(type(self), self.setting, order, clients):
            some = rows[:1].expand(len(job), -1) if same_row(rows) else rows[job]
            known = [lasts[i] for i in job] if lasts else None
            done.update(zip(job, self.train_job(order, clients[job], some, known), strict=True))
        return [done[i] for i in range(len(clients))]

    def run_blocks(self, rows: Tensor, blocks: Sequence[Block]) -> list[Scored]:
        found: dict[int, Scored] = {}
        for job in scoring_jobs(type(self), self.setting, rows, blocks):
            scored = self.score_job(rows, [blocks[i] for i in job])
            found.update(zip(job, scored, strict=True))
        return [found[i] for i in range(len(blocks))]


def training_jobs(
    kind: type[OneProcess], setting: Setting, order: Order, clients: np.ndarray
) -> list[list[int]]:
    """The positions of the clients that are trained together."""
    if not len(clients):
        return []
    sizes = [work(setting, order, int(c)) for c in clients]
    samples = order.budget.batch or float(np.mean(sizes))
    return kind.cut(setting, sizes, samples)


def scoring_jobs(
    kind: type[OneProcess], setting: Setting, rows: Tensor, blocks: Sequence[Block]
) -> list[list[int]]:
    """The positions of the blocks that are scored together; if all are of one model, each alone."""
    if same_row(rows) or not blocks:
        return [[i] for i in range(len(blocks))]
    sizes = [float(len(block.indices)) for block in blocks]
    return kind.cut(setting, sizes, min(float(np.mean(sizes)), SCORE_BATCH))


def work(setting: Setting, order: Order, client: int) -> float:
    """About how long a client trains: by its samples, and by the model that it can train."""
    if setting.pools:
        return 1.0
    federation = setting.federation
    parts = [part for part in order.rule.parts if part != "public"]  # all have as much of that
    size = sum(federation.size(client, order.data.get(p, p)) for p in parts)
    return size * float(setting.capacities[client]) ** 2


def same_row(rows: Tensor) -> bool:
    """Whether this is one row, expanded: many clients with one model."""
    return len(rows) > 0 and (len(rows) == 1 or rows.stride(0) == 0)
