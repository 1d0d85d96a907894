"""Parts of a client's data, and newcomers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.dataset import Dataset, from_arrays
from fedloom.data.partition import Partition
from fedloom.data.split import PARTS, Federation, federate
from fedloom.errors import FedloomError


def plain(n: int, classes: int = 10) -> Dataset:
    return from_arrays(np.zeros((n, 1), np.uint8), np.arange(n) % classes, test_share=0)


def of_sizes(*sizes: int, **settings: float) -> Federation:
    """Clients with these numbers of samples."""
    ends = np.cumsum(sizes).tolist()
    lists = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return Federation(plain(max(sum(sizes), 1)), Partition.of_lists(lists), seed=0, **settings)  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.floats(0, 0.99),
    st.floats(0.01, 0.99),
)
def test_the_parts_are_disjoint_exhaustive_and_of_the_promised_size(
    sizes: list[int], test_share: float, support_share: float
) -> None:
    f = of_sizes(*sizes, test_share=test_share, support_share=support_share)
    for client, n in enumerate(sizes):
        part = {name: f.indices(client, name).tolist() for name in PARTS}
        assert sorted(part["train"] + part["test"]) == sorted(part["all"])
        assert len(part["all"]) == n
        assert len(part["test"]) == int(test_share * n + 1e-9)
        assert part["train"] or n == 0
        for half in ("train", "test"):
            support, query = part[f"{half}-support"], part[f"{half}-query"]
            assert sorted(support + query) == sorted(part[half])
            m = len(part[half])
            assert len(support) == (max(1, int(support_share * m + 1e-9)) if m >= 2 else 0)
        for name in PARTS:
            assert f.size(client, name) == len(part[name]) == f.sizes(name)[client]


def test_the_split_of_a_client_depends_on_seed_and_client_alone(small: Dataset) -> None:
    def test_part(client: int, seed: int = 0, others: int = 0) -> list[int]:
        """Which of its forty samples a client tests on."""
        lists = [list(range(40)), list(range(40, 80)), *([i + 80] for i in range(others))]
        f = Federation(small, Partition.of_lists(lists), seed=seed)
        return (f.indices(client, "test") - 40 * client).tolist()

    for client in (0, 1):
        assert test_part(client) == test_part(client, others=9)
        assert test_part(client) != test_part(client, seed=1)
        assert sorted(test_part(client)) != list(range(8))  # nor simply the first
    assert sorted(test_part(0)) != sorted(test_part(1))


def test_static_norms_are_measured_on_training_data_and_newcomers_on_support() -> None:
    """Nobody's test data, and of newcomers no query data, may have a say in what is scored."""
    f = federate(plain(600), "classes:2", 6, 0, test_share=0.5, newcomers=4)
    for client in (*range(6), *f.newcomer_ids):
        part = "train" if client < 6 else "test-support"
        scored = f.indices(client, "test-query")
        measured_on = f.calibration([client], 10**6)
        assert sorted(measured_on) == sorted(f.indices(client, part))
        assert len(measured_on)
        assert len(scored)
        assert not set(measured_on) & set(scored)
    every = f.calibration([0, 5, *f.newcomer_ids], 10**6)
    assert len(every) == sum(
        len(f.calibration([client], 10**6)) for client in (0, 5, *f.newcomer_ids)
    )


def test_few_samples_that_measure_norms_are_of_all_clients() -> None:
    f = of_sizes(100, 100, 100, test_share=0.0)
    few = f.calibration(range(3), 60)
    assert len(set(few)) == 60
    assert np.bincount(few // 100, minlength=3).min() >= 10  # 20 of each client, give or take
    assert few.tolist() == f.calibration(range(3), 60).tolist()
    other = federate(f.dataset, "iid", 3, seed=1, test_share=0.0).calibration(range(3), 60)
    assert sorted(other) != sorted(few)


def test_a_partition_that_names_rows_means_those_of_the_file() -> None:
    """Nothing is held out behind its back; the clients' own test data are the common test set."""
    y = np.random.default_rng(0).integers(0, 5, 200)
    data = from_arrays(np.arange(200, dtype=np.uint8)[:, None], y)
    assert len(data.held_out) > 30
    by_user = Partition.of_owners(y, 5)
    for pool in (False, True):
        f = federate(data, by_user, 5, 0, pool=pool)
        for client in range(5):
            rows = f.indices(client)
            assert np.array_equal(rows, np.flatnonzero(y == client))
            assert np.array_equal(f.dataset.x[rows].ravel(), rows)
        everyone = np.concatenate([f.indices(client, "test") for client in range(5)])
        assert np.array_equal(f.global_test(), everyone)


def test_of_data_with_a_test_part_rows_are_those_for_training_and_pooled_ones_follow(
    small: Dataset,
) -> None:
    lists = [[0, 399], [7]]
    f = federate(small, Partition.of_lists(lists), 2, 0)
    assert f.indices(0).tolist() == [0, 399]
    assert len(f.global_test()) == 100
    with pytest.raises(FedloomError, match="index 499, but the data has 400 rows"):
        federate(small, Partition.of_lists([[0], [499]]), 2, 0)
    pooled = federate(small, Partition.of_lists([[0], [499]]), 2, 0, pool=True)
    last = pooled.dataset.x[pooled.indices(1)][0]
    assert np.array_equal(last, small.x_test[np.array([99])][0])


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "classes:2", "shards:2"])
def test_other_partitions_deal_what_is_not_held_out_and_test_on_the_rest(spec: str) -> None:
    data = from_arrays(np.zeros((500, 1), np.uint8), np.arange(500) % 5)
    f = federate(data, spec, 5, 0)
    assert sorted(f.partition.indices) == data.training_rows.tolist()
    assert np.array_equal(f.global_test(), data.held_out)
    assert np.bincount(data.y[f.global_test()]).tolist() == [20] * 5
    pooled = federate(data, spec, 5, 0, pool=True)
    assert sorted(pooled.partition.indices) == list(range(500))


def test_no_test_share_leaves_everything_to_training() -> None:
    f = of_sizes(5, 1, test_share=0.0)
    assert f.indices(0, "train").tolist() == [0, 1, 2, 3, 4]
    assert f.sizes("test").tolist() == [0, 0]


def test_s1_shares_of_a_hundred() -> None:
    f = of_sizes(100, test_share=0.25)
    assert [f.size(0, part) for part in PARTS] == [100, 75, 0, 25, 15, 60, 5, 20]


def test_validation_data_is_taken_from_training_data_and_nothing_else() -> None:
    plain, f = of_sizes(100, 6, 1, test_share=0.25), of_sizes(100, 6, 1, test_share=0.25,
                                                              validation_share=0.2)  # fmt: skip
    assert f.sizes("validation").tolist() == [15, 1, 0]  # one at least, where that leaves one
    assert f.sizes("train").tolist() == [60, 4, 1]
    for client in range(3):
        assert np.array_equal(f.indices(client, "test"), plain.indices(client, "test"))
        both = [*f.indices(client, "train"), *f.indices(client, "validation")]
        assert both == plain.indices(client, "train").tolist()
    support, query = (f.indices(0, f"train-{part}").tolist() for part in ("support", "query"))
    assert support + query == f.indices(0, "train").tolist()
    with pytest.raises(FedloomError, match="validation_share"):
        of_sizes(10, validation_share=1.0)


def test_classes_of_a_client(small: Dataset) -> None:
    f = Federation(small, Partition.of_lists([[0, 10, 3], [1]]), seed=0)
    assert np.flatnonzero(f.classes_of(0)).tolist() == [0, 3]
    assert np.flatnonzero(f.classes_of(1)).tolist() == [1]


def test_the_common_test_set_is_the_published_one_or_that_of_all_clients(small: Dataset) -> None:
    assert np.array_equal(federate(small, "iid", 4, 0).global_test(), np.arange(100))
    pooled = federate(small, "iid", 4, 0, pool=True)
    assert len(pooled.dataset.x) == 500
    everyone = np.concatenate([pooled.indices(client, "test") for client in range(4)])
    assert np.array_equal(pooled.global_test(), everyone)
    assert len(everyone) == 100


@settings(deadline=None)
@given(
    st.sampled_from(["classes:2", "classes:2,uneven=1", "classes:3", "iid", "dirichlet:0.2"]),
    st.integers(2, 30),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_newcomers_have_combinations_that_no_client_has(
    spec: str, clients: int, newcomers: int, seed: int
) -> None:
    f = federate(plain(6000), spec, clients, seed, test_share=0.25, newcomers=newcomers)
    trained_on = {frozenset(np.flatnonzero(f.classes_of(c))) for c in range(clients)}
    assert list(f.newcomer_ids) == list(range(clients, clients + newcomers))
    tested = set(f.global_test()) if not len(f.dataset.x_test) else set()
    seen: list[int] = []
    for newcomer in f.newcomer_ids:
        combination = frozenset(np.flatnonzero(f.classes_of(newcomer)))
        assert len(combination) == 2
        assert combination not in trained_on
        assert len(f.indices(newcomer, "train")) == 0
        assert sorted(f.indices(newcomer, "test")) == sorted(f.indices(newcomer, "all"))
        support, query = (f.indices(newcomer, f"test-{half}") for half in ("support", "query"))
        assert len(support) + len(query) == f.size(newcomer, "test")
        assert len(support) >= 1
        seen += f.indices(newcomer).tolist()
    assert len(seen) == len(set(seen))
    assert set(seen) <= tested


def test_s1_newcomers_cover_every_class() -> None:
    f = federate(
        plain(20_000), "classes:2,uneven=1.3", 50, 0, pool=True, test_share=0.25, newcomers=50
    )
    holders = sum(f.classes_of(newcomer).astype(int) for newcomer in f.newcomer_ids)
    assert (np.asarray(holders) >= 8).all()
    assert len(f.newcomers.indices) == len(f.global_test())


def test_newcomers_that_cannot_be_are_refused() -> None:
    with pytest.raises(FedloomError, match="no client has, but the clients have all 1"):
        federate(plain(100, classes=2), "classes:2", 5, 0, newcomers=3)
    with pytest.raises(FedloomError, match="have all 4"):
        federate(plain(400, classes=4), "classes:1", 8, 0, newcomers=3, newcomer_classes=1)
    with pytest.raises(FedloomError, match="Set test_share above 0"):
        federate(plain(100), "iid", 5, 0, test_share=0, newcomers=3)
    with pytest.raises(FedloomError, match=r"cannot be split among the newcomers\. .*must hold"):
        federate(plain(100), "iid", 5, 0, newcomers=20)
    with pytest.raises(FedloomError, match="newcomers must be at least 0"):
        federate(plain(100), "iid", 5, 0, newcomers=-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_share": 1.0}, "test_share is 1"),
        ({"test_share": -0.1}, "test_share is -0.1"),
        ({"support_share": 0.0}, "support_share is 0"),
        ({"support_share": 1.0}, "support_share is 1"),
    ],
)
def test_shares_outside_their_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        of_sizes(10, **settings)


def test_an_unknown_part_or_client_is_refused() -> None:
    with pytest.raises(FedloomError, match="Did you mean 'train-query'"):
        of_sizes(10).indices(0, "train-qery")
    with pytest.raises(IndexError):
        of_sizes(10).indices(1)


def test_a_federation_can_be_sent_to_another_process() -> None:
    f = federate(plain(1000), "classes:2", 10, 0, newcomers=5)
    copy = pickle.loads(pickle.dumps(f))
    for client in range(15):
        assert np.array_equal(copy.indices(client, "test-query"), f.indices(client, "test-query"))


@pytest.mark.parametrize("shares", ["even", "cuts", "lognormal"])
def test_newcomers_of_a_ring_share_no_pair_with_clients(shares: str) -> None:
    spec = f"ring:2,shares={shares}"
    f = federate(plain(6_000), spec, 20, 3, test_share=0.25, newcomers=20, newcomer_partition=spec)
    pairs = [
        {frozenset(np.flatnonzero(f.classes_of(c)).tolist()) for c in who}
        for who in (range(20), f.newcomer_ids)
    ]
    assert len(pairs[0]) == len(pairs[1]) == 10
    assert all(len(pair) == 2 for pair in pairs[0] | pairs[1])
    assert not pairs[0] & pairs[1]
    sizes = f.newcomers.sizes
    assert (sizes.max() > 2 * sizes.min()) == (shares != "even")
    assert set(f.newcomers.indices) <= set(f.global_test())


def test_newcomers_may_be_dealt_by_any_recipe_that_names_no_rows() -> None:
    common = {"test_share": 0.5, "newcomers": 4}
    mixed = federate(plain(2_000), "iid", 4, 0, newcomer_partition="iid", **common)
    assert all(mixed.classes_of(c).all() for c in mixed.newcomer_ids)
    with pytest.raises(FedloomError, match="names rows"):
        federate(plain(2_000), "iid", 4, 0, newcomer_partition="file:a.json", **common)
    with pytest.raises(FedloomError, match="No ring of 4 classes was found"):
        federate(plain(2_000, classes=4), "ring:2", 4, 0, newcomer_partition="ring:2", **common)


def test_a_test_part_can_be_cut_class_by_class() -> None:
    f = federate(plain(3_000), "dirichlet:0.3", 12, 0, test_share=0.25, by_class=True)
    mixed = federate(plain(3_000), "dirichlet:0.3", 12, 0, test_share=0.25)
    assert np.array_equal(f.sizes("test"), [f.size(c, "test") for c in range(12)])
    differ = False
    for client in range(12):
        test = f.indices(client, "test")
        held = f.label_counts(client)
        found = np.bincount(f.dataset.y[test], minlength=10)
        assert np.array_equal(found, np.floor(0.25 * held))
        parts = [f.indices(client, p) for p in ("test-support", "test-query", "train-support",
                                                "train-query")]  # fmt: skip
        assert sorted(np.concatenate(parts)) == sorted(f.indices(client))
        assert len(parts[0]) == max(int(0.2 * len(test)), min(len(test) - 1, 1), 0)
        other = np.bincount(f.dataset.y[mixed.indices(client, "test")], minlength=10)
        differ |= not np.array_equal(found, other)
    assert differ
