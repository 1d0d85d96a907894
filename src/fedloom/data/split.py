"""What a client's data is used for: train, validation and test, support and query, and newcomers.

Which samples are in which part follows from (seed, client) alone and is worked out when asked
for, so a million clients store nothing. Support and query are the two halves of a meta-learning
step; newcomers are clients that only appear after training, with combinations of classes that no
training client has (S1 §4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset, stratified
from fedloom.data.images import empty_like
from fedloom.data.partition import Partition, by_class, names_rows, parse, partition
from fedloom.data.partition.classes import reserved
from fedloom.data.partition.deal import ClassSets
from fedloom.data.partition.table import distinct
from fedloom.data.public import Wish, set_aside
from fedloom.errors import FedloomError, unknown
from fedloom.streams import stream

IntArray = npt.NDArray[np.int64]

_MEASURED_BY = 1000  # most clients whose data measure the norms of a shared model
PARTS = ("all", "train", "validation", "test", "train-support", "train-query", "test-support",
         "test-query")  # fmt: skip


class Federation:
    """A data set, who holds what of it, and the parts of everyone's data.

    Clients 0..n_clients-1 take part in training; `newcomer_ids` follow them, and their samples
    are the training clients' test data, dealt anew. `by_class` cuts the test part off class by
    class. `dealt` is the partition as it was before the server set a public share aside.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        *,
        seed: int,
        test_share: float = 0.2,
        support_share: float = 0.2,
        validation_share: float = 0.0,
        newcomers: int = 0,
        newcomer_classes: int = 2,
        newcomer_partition: str | None = None,
        by_class: bool = False,
        dealt: Partition | None = None,
    ) -> None:
        if not 0 <= test_share < 1:
            raise FedloomError(f"test_share is {test_share}; it must be at least 0 and below 1.")
        if not 0 < support_share < 1:
            raise FedloomError(f"support_share is {support_share}; it must be between 0 and 1.")
        if not 0 <= validation_share < 1:
            raise FedloomError(
                f"validation_share is {validation_share}; it must be at least 0 and below 1."
            )
        self.dataset, self.partition, self.seed = dataset, partition, seed
        self.validation_share = validation_share
        self.test_share, self.support_share = test_share, support_share
        self.dealt = partition if dealt is None else dealt
        self.by_class = by_class
        self._cuts: dict[tuple[int, int, str], tuple[int, int]] = {}  # of as many samples
        self.n_clients = len(partition)
        self.newcomer_ids = range(self.n_clients, self.n_clients + newcomers)
        self._strata = dataset.strata
        spec = newcomer_partition or (
            f"classes:{newcomer_classes}" if dataset.task.by_class else "iid"
        )
        if newcomers and not dataset.task.by_class:
            refuse_by_class(spec, dataset)
        if by_class and not dataset.task.by_class:
            raise FedloomError(
                f"test_cut=by-class needs classes, and the task is {dataset.task.name}. Leave it "
                "out: a client's test data is cut off from all of its data mixed."
            )
        self.newcomers = self._deal_newcomers(newcomers, spec)

    def indices(self, client: int, part: str = "all") -> IntArray:
        """The samples of this part of the client's data, as indices into `dataset.x`."""
        held = self._held(client)
        start, stop = self._cut(client, part)
        if start == 0 and stop == len(held):
            return held
        order = stream(self.seed, "split", client).permutation(len(held))
        if self.by_class and client < self.n_clients:
            order = self._test_first(held, order)
        return held[order[start:stop]]

    def some_clients(self, purpose: str, most: int) -> IntArray:
        """All training clients, or a fixed random choice of them."""
        if self.n_clients <= most:
            return np.arange(self.n_clients)
        drawn = stream(self.seed, purpose).choice(self.n_clients, size=most, replace=False)
        return np.sort(drawn)

    @property
    def everybody(self) -> IntArray:
        """Those whose data represents all data when norms are measured."""
        return self.some_clients("static-clients", _MEASURED_BY)

    def calibration(self, clients: Iterable[int], most: int | None) -> IntArray:
        """Training data of these clients (of newcomers: support), or `most` samples of it, to
        measure static norms by; None: all of it."""
        parts = [
            self.indices(int(c), "train" if c < self.n_clients else "test-support") for c in clients
        ]
        pooled = np.concatenate(parts)
        if most is not None and len(pooled) > most:
            pooled = stream(self.seed, "static-norm").permutation(pooled)[:most]
        return pooled

    def size(self, client: int, part: str = "all") -> int:
        """The number of samples in the part, without drawing it."""
        start, stop = self._cut(client, part)
        return stop - start

    def sizes(self, part: str = "all") -> IntArray:
        """`size` of every training client."""
        start, stop = self._bounds(self.partition.sizes, self._test_sizes, part)
        return stop - start

    def classes_of(self, client: int) -> npt.NDArray[np.bool_]:
        """A mask of the classes that the client holds."""
        return self.label_counts(client) > 0

    def name(self, client: int) -> str:
        """What the client is called: by its name in the data, or by its number."""
        if client >= self.n_clients:
            return f"newcomer {client - self.n_clients}" if self.partition.names else str(client)
        return self.partition.names[client] if self.partition.names else str(client)

    def label_counts(self, client: int) -> IntArray:
        """How many samples of each class the client holds."""
        labels = self._strata[self._held(client)]
        return np.bincount(labels, minlength=self.dataset.n_strata)

    def global_test(self) -> IntArray:
        """The common test set, as indices into `dataset.x_test`.

        Of a data set without a test part it is what was held out of it or, where nothing was, the
        test samples of all clients, as indices into `dataset.x`.
        """
        if len(self.dataset.x_test):
            return np.arange(len(self.dataset.x_test))
        if len(self.dataset.held_out):
            return self.dataset.held_out
        return self._everyones_test

    @cached_property
    def _everyones_test(self) -> IntArray:
        return np.concatenate([self.indices(client, "test") for client in range(self.n_clients)])

    def _held(self, client: int) -> IntArray:
        if client >= self.n_clients:
            return self.newcomers[client - self.n_clients]
        return self.partition[client]

    @cached_property
    def _test_sizes(self) -> IntArray:
        """The number of test samples of every training client."""
        if not self.by_class:
            return _share(self.partition.sizes, self.test_share)
        held = self.partition.label_counts(self._strata, self.dataset.n_strata)
        return _share(held, self.test_share).sum(axis=1)

    def _test_first(self, held: IntArray, order: IntArray) -> IntArray:
        """The order with so many of each class in front as are test samples."""
        labels = self._strata[held[order]]
        test = np.zeros(len(order), bool)
        for label in np.unique(labels):
            mine = np.flatnonzero(labels == label)
            test[mine[: int(_share(np.asarray(len(mine)), self.test_share))]] = True
        return np.concatenate([order[test], order[~test]])

    def _cut(self, client: int, part: str) -> tuple[int, int]:
        """`_bounds` of one client; asked for several times a round by each, so it is kept."""
        n = len(self._held(client))
        test = n if client >= self.n_clients else int(self._test_sizes[client])
        found = self._cuts.get((n, test, part))
        if found is None:
            start, stop = self._bounds(n, test, part)
            found = self._cuts[n, test, part] = int(start), int(stop)
        return found

    def _bounds(
        self, n: int | IntArray, test: int | IntArray, part: str
    ) -> tuple[IntArray, IntArray]:
        """Where the part starts and stops among n shuffled samples, of one client or of many, with
        so many test samples.

        The order is test-support, test-query, train-support, train-query, validation.
        """
        if part not in PARTS:
            raise unknown("part of a client's data", part, PARTS)
        everything, test = np.asarray(n, np.int64), np.asarray(test, np.int64)
        trained = everything - _some(everything - test, self.validation_share)
        start, stop = {
            "all": (np.zeros_like(test), everything),
            "test": (np.zeros_like(test), test),
            "train": (test, trained),
            "validation": (trained, everything),
        }[part.split("-")[0]]
        support = _some(stop - start, self.support_share)
        if part.endswith("support"):
            stop = start + support
        elif part.endswith("query"):
            start = start + support
        return start, stop

    def _deal_newcomers(self, count: int, spec: str) -> Partition:
        """Deal the clients' test data to newcomers; those who get K classes each (`classes:K`,
        `ring:K`) get combinations that no client has."""
        if count == 0:
            return Partition.of_lists([])
        if names_rows(spec):
            raise FedloomError(
                f"newcomer_partition={spec} names rows, but newcomers get the clients' test "
                "data. Give a recipe, such as classes:2 or dirichlet:0.5."
            )
        name, parsed = parse(spec)
        k = parsed.integer("K", parsed.argument, low=1) if name in ("classes", "ring") else None
        pool = self._everyones_test
        if len(pool) == 0:
            raise FedloomError(
                "Newcomers get the clients' test data, and there is none. Set test_share above 0."
            )
        y, n_classes = self._strata, self.dataset.n_strata
        taken = frozenset[frozenset[int]]()
        if k is not None:
            taken = self._taken(pool, k)
        try:
            dealt = partition(
                spec, y[pool], count, self.seed, n_classes=n_classes, reserve=taken,
                purpose="newcomers",
            )  # fmt: skip
        except FedloomError as error:
            raise FedloomError(
                f"The clients' test data cannot be split among the newcomers. {error}"
            ) from None
        return Partition(pool[dealt.indices], dealt.offsets, dealt.note)

    def _taken(self, pool: IntArray, k: int) -> ClassSets:
        """The clients' combinations of classes, if they leave one of k classes to newcomers."""
        y, n_classes = self._strata, self.dataset.n_strata
        taken = self.partition.class_sets(y, n_classes)
        present = frozenset(np.unique(y[pool]).tolist())
        if k > len(present):
            raise FedloomError(
                f"newcomer_classes is {k}, but the clients' test data has {len(present)} classes."
            )
        if sum(len(held) == k and held <= present for held in taken) == comb(len(present), k):
            raise FedloomError(
                f"Newcomers need a combination of {k} classes that no client has, but the "
                f"clients have all {comb(len(present), k)}. Use fewer clients, or another number "
                "of classes for newcomers."
            )
        return taken


def deal(
    dataset: Dataset,
    spec: str | Partition,
    clients: int,
    seed: int,
    reserve: ClassSets = frozenset(),
    share: float = 1.0,
) -> tuple[Dataset, Partition]:
    """The data set as it is dealt, and who holds which of its rows; of less than all, the same
    `share` of every class.

    A partition that names rows means those of the user's file: of data without a test part,
    nothing is held out then.
    """
    if names_rows(spec) and len(dataset.held_out):
        dataset = dataset.pooled()
    if isinstance(spec, Partition):
        return dataset, spec.fitting("The partition", clients, len(dataset.y))
    refuse_by_class(spec, dataset)
    rows = dataset.training_rows
    if share < 1:
        rows = rows[stratified(dataset.strata[rows], share, seed, "data-share")]
    labels, n_classes = dataset.strata[rows], dataset.n_strata
    dealt = partition(spec, labels, clients, seed, n_classes=n_classes, reserve=reserve,
                      columns=dataset.columns)  # fmt: skip
    return dataset, replace(dealt, indices=rows[dealt.indices])


def refuse_by_class(spec: str | Partition, dataset: Dataset) -> None:
    """Refuse a recipe that deals by class where samples have none."""
    if isinstance(spec, Partition) or dataset.task.by_class or not by_class(spec):
        return
    raise FedloomError(
        f"partition={spec} deals by class, and the samples of '{dataset.name}' have none: the task "
        f"is {dataset.task.name}. Deal them as iid, quantity:lognormal, quantity:zipf, by:COLUMN "
        "or file:PATH."
    )


def named_clients(dataset: Dataset | None, spec: str | Partition, pool: bool = False) -> int | None:
    """How many clients a partition is for, where it says so itself or the data does."""
    if isinstance(spec, Partition):
        return len(spec)
    name, parsed = parse(spec)
    if name == "file":
        return len(Partition.load(parsed.argument))
    if name != "by" or dataset is None or parsed.argument not in dataset.columns:
        return None
    rows = len(dataset.y) + (len(dataset.y_test) if pool else 0)
    return len(distinct(dataset.columns[parsed.argument][:rows])[0])


def check_options(spec: str | Partition, options: Mapping[str, Any]) -> None:
    """Refuse options of a data set that a partition leaves nothing to do for."""
    if options.get("test_share") and names_rows(spec):
        raise FedloomError(
            f"data_options.test_share={options['test_share']} would do nothing: this partition "
            "assigns rows to clients, so none are held out for a common test set. Leave it out, "
            "or give the data a test part (x_test and y_test)."
        )


def federate(
    dataset: Dataset,
    spec: str | Partition,
    clients: int,
    seed: int,
    *,
    pool: bool = False,
    test_share: float = 0.2,
    support_share: float = 0.2,
    validation_share: float = 0.0,
    newcomers: int = 0,
    newcomer_classes: int = 2,
    newcomer_partition: str | None = None,
    by_class: bool = False,
    normalise: str = "standard",
    public: str = "none",
    tune_share: float = 0.0,
    data_share: float = 1.0,
) -> Federation:
    """Deal a data set to clients by the recipe `spec`, or as a partition says, pooling its parts
    first if asked to and putting its images on another scale; what is `public` of it goes to the
    server. With a `tune_share` there is no test data at all: that share of everybody's training
    data stands in for it."""
    if newcomers < 0 or newcomer_classes < 1:
        raise FedloomError("newcomers must be at least 0, and newcomer_classes at least 1.")
    if pool:
        dataset = dataset.pooled()
    dataset = dataset.normalised(normalise)
    reserve = _reserve(spec, dataset, seed, newcomers, newcomer_partition, newcomer_classes)
    if data_share < 1 and names_rows(spec):
        raise FedloomError(
            f"data_share={data_share:g} would do nothing: this partition assigns rows to "
            "clients. Leave it out."
        )
    dataset, dealt = deal(dataset, spec, clients, seed, reserve, data_share)
    share = Wish.parse(public).share
    held = set_aside(dealt, dataset.strata, share, seed) if share else dealt
    if tune_share:
        cut = Federation(dataset, held, seed=seed, test_share=test_share, by_class=by_class)
        dataset, held, dealt = _without_test(cut, dealt)
        test_share = tune_share
    return Federation(
        dataset,
        held,
        seed=seed,
        test_share=test_share,
        support_share=support_share,
        validation_share=validation_share,
        newcomers=newcomers,
        newcomer_classes=newcomer_classes,
        newcomer_partition=newcomer_partition,
        by_class=by_class,
        dealt=dealt,
    )


def _reserve(
    spec: str | Partition, dataset: Dataset, seed: int, newcomers: int, new: str | None, k: int
) -> ClassSets:
    """Combinations of k classes to hold back for newcomers, where clients would take them all."""
    if isinstance(spec, Partition) or newcomers == 0:
        return frozenset()
    if new is not None:
        wanted, given = parse(new)
        if wanted != "classes":
            return frozenset()
        k = given.integer("K", given.argument, low=1)
    name, parsed = parse(spec)
    if name != "classes" or parsed.integer("K", parsed.argument, low=1) != k:
        return frozenset()
    return reserved(np.unique(dataset.strata), k, newcomers, stream(seed, "reserve"))


def _without_test(cut: Federation, dealt: Partition) -> tuple[Dataset, Partition, Partition]:
    """A data set without a common test part, and the clients' training data alone: what they hold,
    and what they were dealt before some of it was made public."""
    nobody = np.empty(0, np.int64)
    data = replace(
        cut.dataset, x_test=empty_like(cut.dataset.x), y_test=cut.dataset.y[:0], held_out=nobody
    )
    held, before = [], []
    for client in range(cut.n_clients):
        train = cut.indices(client, "train")
        held.append(train.tolist())
        public = np.setdiff1d(dealt[client], cut.partition[client])
        before.append(np.concatenate([train, public]).tolist())
    return data, Partition.of_lists(held, dealt.note), Partition.of_lists(before, dealt.note)


def _some(n: IntArray, share: float) -> IntArray:
    """The share of n, and at least one where that leaves one."""
    if share == 0:
        return np.zeros_like(n)
    return np.where(n >= 2, np.maximum(_share(n, share), 1), 0)


def _share(n: IntArray, share: float) -> IntArray:
    """The share of n, rounded down; a hair is added so that 0.29 of 100 is 29 and not 28."""
    rounded: IntArray = np.floor(share * n + 1e-9).astype(np.int64)
    return rounded
