"""What every recipe promises about who holds what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedloom.data.partition import Partition, partition, partitioners
from fedloom.data.partition.classes import hands, reserved
from fedloom.data.partition.deal import counts, keep_minimum
from fedloom.errors import FedloomError
from fedloom.streams import stream

COMPLETE = [  # recipes that deal every sample
    "iid",
    "dirichlet:0.3,min=1",
    "shards:1",
    "quantity:lognormal",
    "quantity:lognormal,sigma=3",
    "quantity:zipf",
    "quantity:zipf,a=2.5",
    "skew:0.9",
    "skew:0",
    "skew:1",
]


def labels(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(n) % classes)


def held(p: Partition) -> list[list[int]]:
    return [p[client].tolist() for client in range(len(p))]


@settings(deadline=None)
@given(
    st.sampled_from(COMPLETE),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(),
)
def test_all_samples_are_dealt_once_and_nobody_is_left_out(
    spec: str, n: int, clients: int, classes: int, seed: int
) -> None:
    assume(clients <= n)
    y = np.random.default_rng(n).integers(0, classes, n)
    p = partition(spec, y, clients, seed, n_classes=classes)
    assert len(p) == clients
    assert sorted(p.indices) == list(range(n))
    assert p.sizes.min() >= 1
    assert held(p) == held(partition(spec, y, clients, seed, n_classes=classes))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "classes:2", "shards:2", "skew:0.9"])
def test_another_seed_deals_otherwise(spec: str) -> None:
    y = labels(200, 10)
    assert held(partition(spec, y, 10, seed=0)) != held(partition(spec, y, 10, seed=1))


@pytest.mark.parametrize(
    "spec",
    [
        "iid",
        "dirichlet:5",
        "classes:1",
        "shards:1",
        "quantity:lognormal",
        "quantity:zipf",
        "skew:1",
    ],
)
def test_which_samples_of_a_class_a_client_gets_is_random(spec: str) -> None:
    first, second = (
        set(partition(spec, np.zeros(400, int), 2, seed, n_classes=1)[0].tolist())
        for seed in (0, 1)
    )
    for mine in (first, second):
        halves = [sum(index < 200 for index in mine), sum(index >= 200 for index in mine)]
        assert min(halves) > 0.3 * len(mine)  # of the first and of the last samples
    assert first != second


def test_low_numbers_are_not_preferred() -> None:
    """What can't be dealt evenly, and who is large, goes by lot."""
    y = labels(53, 1)
    for spec in ("quantity:zipf", "skew:1"):
        sizes = [tuple(partition(spec, y, 5, seed).sizes) for seed in range(8)]
        assert len(set(sizes)) > 1, spec
    first = {tuple(sorted(hands(5, np.arange(10), 2, stream(s, "test"))[0])) for s in range(8)}
    assert len(first) > 4


@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_sigma_is_the_standard_deviation_of_the_logarithm_of_shares(sigma: float) -> None:
    y = np.zeros(500_000, int)
    for spec in (f"quantity:lognormal,sigma={sigma}", f"classes:1,uneven={sigma}"):
        logs = np.log(partition(spec, y, 400, seed=0).sizes)
        assert logs.std() == pytest.approx(sigma, rel=0.15)


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(partition("iid", labels(23, 3), 5, seed=0).sizes) == [4, 4, 5, 5, 5]


@settings(deadline=None)
@given(
    st.floats(1e-4, 1e4),
    st.integers(1, 20),
    st.integers(0, 6),
    st.integers(20, 200),
    st.integers(0, 9),
)
def test_dirichlet_keeps_the_minimum_and_says_what_it_moved(
    alpha: float, clients: int, least: int, n: int, seed: int
) -> None:
    assume(clients * least <= n)
    y = labels(n, 5)
    p = partition(f"dirichlet:{alpha},min={least}", y, clients, seed)
    free = partition(f"dirichlet:{alpha},min=0", y, clients, seed)
    assert sorted(p.indices) == list(range(n))
    assert p.sizes.min() >= least
    lacking = int(np.maximum(least - free.sizes, 0).sum())
    assert (f"{lacking} samples moved" in "".join(p.note)) == (lacking > 0)
    owner, before = np.empty(n, int), np.empty(n, int)
    owner[p.indices], before[free.indices] = p.owners, free.owners
    assert np.count_nonzero(owner != before) == lacking  # nothing else was touched


def test_dirichlet_is_skewed_at_small_alpha_and_even_at_large() -> None:
    y = labels(10_000, 10)
    distance = {
        alpha: partition(f"dirichlet:{alpha}", y, 20, seed=0).summary(y, 10)["label_distance"]
        for alpha in (0.05, 0.5, 100)
    }
    assert distance[0.05] > 0.7 > distance[0.5] > 0.3 > 0.1 > distance[100]  # type: ignore[operator]


def test_dirichlet_shares_have_the_mean_and_variance_of_the_law() -> None:
    y = np.zeros(10_000, int)
    alpha, clients = 0.5, 4
    shares = np.array(
        [partition(f"dirichlet:{alpha},min=0", y, clients, seed).sizes for seed in range(400)]
    ) / len(y)
    np.testing.assert_allclose(shares.mean(axis=0), 1 / clients, atol=0.05)
    expected = (1 / clients) * (1 - 1 / clients) / (alpha * clients + 1)
    np.testing.assert_allclose(shares.var(axis=0), expected, rtol=0.2)


def test_a_minimum_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(FedloomError, match="need 60 samples; there are 50"):
        partition("dirichlet:1,min=6", labels(50, 5), 10, seed=0)


def test_the_largest_clients_give_what_others_lack() -> None:
    owner = np.repeat([0, 1, 2], [9, 7, 2])
    mended, note = keep_minimum(owner, 5, 2, stream(0, "test"))
    assert np.bincount(mended).tolist() == [6, 6, 2, 2, 2]
    assert note == ("4 samples moved so that every client holds at least 2",)


def test_what_large_clients_give_up_is_drawn_from_all_of_it_and_dealt_at_random() -> None:
    owner = np.repeat([0, 1], 100)
    mended, _ = keep_minimum(owner, 4, 40, stream(0, "test"))
    for giver in (mended[:100], mended[100:]):
        given = np.flatnonzero(giver >= 2)
        assert len(given) == 40
        assert given.min() < 20
        assert given.max() >= 80
        assert set(giver[given]) == {2, 3}  # both have something of both


@settings(deadline=None)
@given(
    st.lists(st.floats(0.001, 1000), min_size=1, max_size=20),
    st.integers(0, 3),
    st.integers(0, 500),
)
def test_counts_are_exact_in_sum_and_close_in_proportion(
    shares: list[float], least: int, extra: int
) -> None:
    total = least * len(shares) + extra
    dealt = counts(np.array(shares), total, least)
    assert dealt.sum() == total
    exact = least + extra * np.array(shares) / sum(shares)
    assert np.abs(dealt - exact).max() <= 1 + 1e-6


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 40), st.integers(0, 99), st.booleans())
def test_classes_gives_exactly_k_classes_and_loses_nothing(
    classes: int, k: int, clients: int, seed: int, uneven: bool
) -> None:
    assume(k <= classes)
    y = labels(classes * 50, classes)
    p = partition(f"classes:{k}{',uneven=1.5' if uneven else ''}", y, clients, seed)
    table = p.label_counts(y, classes)
    assert ((table > 0).sum(axis=1) == k).all()
    holders = (table > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    assert len(np.unique(p.indices)) == len(p.indices) == 50 * np.count_nonzero(holders)
    for label in range(classes):
        dealt = table[table[:, label] > 0, label]
        if not uneven and len(dealt):
            assert dealt.max() - dealt.min() <= 1


def test_classes_that_nobody_holds_are_noted() -> None:
    p = partition("classes:1", labels(100, 10), 4, seed=0)
    assert p.note == ("60 samples are held by no client",)


def test_classes_refuses_what_cannot_be() -> None:
    with pytest.raises(FedloomError, match="cannot hold 4 classes: the data has 3"):
        partition("classes:4", labels(30, 3), 5, seed=0)
    with pytest.raises(FedloomError, match="must hold class 1, which has 2 samples"):
        partition("classes:2", np.array([0] * 50 + [1] * 2), 10, seed=0)


@pytest.mark.parametrize(
    ("alias", "n", "used", "low", "std", "high"),
    [
        ("s1-mnist", 70_000, 69_909, (60, 260), (900, 1500), (3500, 8000)),
        ("s1-cifar10", 60_000, 52_497, (450, 700), (180, 320), (1400, 2100)),
    ],
)
def test_the_uneven_pairs_of_s1_have_about_the_reported_sizes(
    alias: str,
    n: int,
    used: int,
    low: tuple[int, int],
    std: tuple[int, int],
    high: tuple[int, int],
) -> None:
    y = labels(n, 10)
    sizes = np.array(
        [partition(f"classes:2,uneven={alias}", y, 50, seed).sizes for seed in range(5)]
    )
    assert np.abs(sizes.sum(axis=1) - used).max() <= 10
    for numbers, (least, most) in (
        (np.median(sizes.min(axis=1)), low),
        (np.median(sizes.std(axis=1)), std),
        (np.median(sizes.max(axis=1)), high),
    ):
        assert least < numbers < most


@settings(deadline=None)
@given(st.integers(3, 8), st.integers(2, 4), st.integers(1, 60), st.integers(0, 99))
def test_reserved_combinations_are_given_to_no_client(
    classes: int, k: int, clients: int, seed: int
) -> None:
    assume(k < classes)
    kept = reserved(np.arange(classes), k, 50, stream(seed, "test"))
    assert kept
    y = labels(classes * 200, classes)
    p = partition(f"classes:{k}", y, clients, seed, reserve=kept)
    assert not kept & p.class_sets(y, classes)


def test_reserved_combinations_cover_every_class() -> None:
    kept = reserved(np.arange(10), 2, 50, stream(0, "test"))
    assert len(kept) == 15
    assert [sum(label in pair for pair in kept) for label in range(10)] == [3] * 10
    assert len(reserved(np.arange(200), 2, 10, stream(0, "test"))) == 100


def test_hands_stay_balanced_around_reserved_ones() -> None:
    kept = reserved(np.arange(10), 2, 50, stream(0, "test"))
    dealt = hands(500, np.arange(10), 2, stream(1, "test"), kept)
    assert np.ptp(np.bincount(dealt.ravel())) <= 3


def test_shards_are_runs_of_the_sorted_labels() -> None:
    y = labels(100, 10)
    p = partition("shards:2", y, 10, seed=0)
    assert p.sizes.tolist() == [10] * 10
    assert (p.label_counts(y, 10) > 0).sum(axis=1).max() <= 2
    with pytest.raises(FedloomError, match="are 110; there are only 100"):
        partition("shards:11", y, 10, seed=0)


def test_zipf_sizes_fall_as_the_rank() -> None:
    sizes = np.sort(partition("quantity:zipf,a=1", np.zeros(10_000, int), 10, 0).sizes)[::-1]
    np.testing.assert_allclose(sizes / sizes[0], 1 / np.arange(1, 11), rtol=0.02)


def test_quantity_skew_leaves_labels_alone() -> None:
    y = labels(50_000, 5)
    summary = partition("quantity:lognormal", y, 20, seed=0).summary(y, 5)
    assert summary["label_distance"] < 0.05  # type: ignore[operator]
    assert summary["size_max"] > 4 * summary["size_min"]  # type: ignore[operator]
    even = partition("quantity:lognormal,sigma=0", y, 20, seed=0)
    assert np.ptp(even.sizes) <= 1


def test_skew_gives_the_main_label_its_share() -> None:
    y = labels(1000, 10)
    table = partition("skew:0.9", y, 20, seed=0).label_counts(y, 10)
    for client in range(20):
        assert table[client, client % 10] == 45  # 90 of 100, for two clients
    assert (table.sum(axis=0) == 100).all()
    rest = table[np.arange(20)[:, None] % 10 != np.arange(10)]
    assert set(rest) <= {0, 1}  # 10 of 100, over 18 clients


def test_skew_with_fewer_clients_than_labels_deals_the_others_to_all() -> None:
    y = labels(400, 4)
    table = partition("skew:1", y, 2, seed=0).label_counts(y, 4)
    assert table.tolist() == [[100, 0, 50, 50], [0, 100, 50, 50]]


def test_counts_sets_and_summary_by_hand() -> None:
    y = np.array([0, 0, 1, 1, 2, 2])
    p = Partition.of_lists([[0, 1], [2, 4, 5], []], note=("a note",))
    assert p.label_counts(y, 3).tolist() == [[2, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert p.class_sets(y, 3) == {frozenset({0}), frozenset({1, 2}), frozenset()}
    assert p.summary(y, 3) == {
        "clients": 3,
        "samples_used": 5,
        "samples_total": 6,
        "size_min": 0,
        "size_mean": pytest.approx(5 / 3),
        "size_std": pytest.approx(np.std([2, 3, 0])),
        "size_max": 3,
        "classes_min": 0,
        "classes_mean": 1.0,
        "classes_max": 2,
        "label_distance": pytest.approx((2 / 3 + 1 / 3) / 2),
        "notes": ["a note"],
    }
    with pytest.raises(IndexError):
        p[3]


def test_a_hundred_thousand_clients_are_dealt_to_without_a_loop() -> None:
    y = labels(400_000, 10)
    for spec in ("iid", "dirichlet:0.3"):
        p = partition(spec, y, 100_000, seed=0)
        assert p.sizes.sum() == 400_000
        assert p.sizes.min() >= 2


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_saved_partition_is_read_back(tmp_path: Path, suffix: str) -> None:
    y = labels(50, 5)
    made = partition("dirichlet:0.5", y, 7, seed=0)
    path = tmp_path / f"who,holds=what.{suffix}"
    made.save(path)
    assert held(partition(f"file:{path}", y, 7, seed=9)) == held(made)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0, 1], [2]]", "is for 2 clients, not 3"),
        ("[[0], [1], [9]]", "has index 9, but the data has 4"),
        ("[[0], [1], [1]]", "deals sample 1 more than once"),
        ("[[0], [1], [-1]]", "negative index -1"),
        ("[[0], [1], [2.0]]", "client 2 has 2.0 where an index"),
        ("[[0], [1], [true]]", "client 2 has True"),
        ("[0, 1, 2]", "list of sample indices for every client"),
        ('{"a": 1}', "list of sample indices"),
        ("[[0], [1", "Cannot read the partition"),
    ],
)
def test_a_partition_file_is_checked(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(FedloomError, match=message):
        partition(f"file:{tmp_path / 'p.json'}", np.array([0, 1, 0, 1]), 3, seed=0)


@pytest.mark.parametrize("offsets", [[0, 1], [1, 2], [0, 2, 1, 2], []])
def test_offsets_of_a_file_are_checked(tmp_path: Path, offsets: list[int]) -> None:
    np.savez(tmp_path / "p.npz", indices=np.array([0, 1]), offsets=np.array(offsets, int))
    with pytest.raises(FedloomError, match="offsets"):
        Partition.load(tmp_path / "p.npz")


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match=r"ends in .json, .csv or .npz"):
        Partition.of_lists([[0]]).save(tmp_path / "p.txt")
    with pytest.raises(FedloomError, match="Cannot read the partition"):
        Partition.load(tmp_path / "absent.json")
    (tmp_path / "empty.json").write_text(json.dumps([[], []]))
    assert len(Partition.load(tmp_path / "empty.json")) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("idd", "Did you mean 'iid'"),
        ("iid:2", "takes no argument. It is written iid."),
        ("iid,min=2", "option of partition 'iid'"),
        ("dirichlet", r"ALPHA is missing. It is written dirichlet:ALPHA\[,min=N\]"),
        ("dirichlet:0", "ALPHA must be a number above 0, not '0'"),
        ("dirichlet:nan", "ALPHA must be"),
        ("dirichlet:1,mim=2", "Did you mean 'min'"),
        ("dirichlet:1,min=2.5", "min must be a whole number"),
        ("classes:two", "K must be a number of at least 1"),
        ("classes:2,uneven", "uneven must be"),
        ("shards:0", "K must be"),
        ("quantity:normal", "there is no law 'normal'"),
        ("quantity:zipf,sigma=1", "zipf has the parameter a, not sigma"),
        ("skew:1.1", "at most 1"),
        ("file:", "PATH is missing"),
    ],
)
def test_a_recipe_written_wrong_is_answered_with_its_grammar(spec: str, message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        partition(spec, labels(100, 10), 5, seed=0)


@pytest.mark.parametrize("clients", [0, -1, 101])
def test_too_few_and_too_many_clients_are_refused(clients: int) -> None:
    with pytest.raises(FedloomError, match=r"at least 1 client|cannot share 100 samples"):
        partition("iid", labels(100, 10), clients, seed=0)


def test_every_recipe_is_listed_with_its_grammar() -> None:
    listed = partitioners()
    assert [name for name, _, _ in listed] == [
        "iid", "dirichlet", "classes", "ring", "shards", "quantity", "skew", "by", "file",
    ]  # fmt: skip
    assert all(grammar.startswith(name) and about for name, grammar, about in listed)


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [
        (np.array([1, 0, -1, 1]), [[1], [0, 3]]),
        ([1, 0, -1, 1], [[1], [0, 3]]),
        ([[3, 0], [1]], [[3, 0], [1]]),
        ([np.array([2]), ()], [[2], []]),
        (np.array([[0, 1], [2, 3]]), [[0, 1], [2, 3]]),
        (Partition.of_lists([[2], [0]]), [[2], [0]]),
    ],
)
def test_a_partition_may_be_a_python_object(given_as: object, expected: list[list[int]]) -> None:
    assert held(Partition.of_object(given_as)) == expected


@pytest.mark.parametrize(
    ("given_as", "message"),
    [
        (np.zeros(4), "this ndarray is none of them"),
        (3, "this int is none of them"),
        ({}, "this dict is none of them"),
        ([[0, [1]], [2]], "this list is none of them"),
        ([[0.5], [1]], "this list is none of them"),
        (np.array([0, -2]), "has the client -2"),
        ([[0, 1], [1]], "deals sample 1 more than once"),
        ([[0], [-1]], "negative index -1"),
        (Partition.of_lists([[0], [0]]), "deals sample 0 more than once"),
    ],
)
def test_a_python_object_that_is_no_partition_is_refused(given_as: object, message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        Partition.of_object(given_as)


def test_the_client_of_every_row_is_given_for_every_row() -> None:
    given_as = Partition.of_object([0, 1, 0])
    assert held(given_as.fitting("It", 2, 3)) == [[0, 2], [1]]
    with pytest.raises(FedloomError, match="each of 3 rows, but the data has 4"):
        given_as.fitting("It", 2, 4)
    with pytest.raises(FedloomError, match=r"for 2 clients, not 50\. Set clients to 2"):
        given_as.fitting("It", 50, 3)


def test_a_ring_deals_neighbours_to_all() -> None:
    y = np.repeat(np.arange(5), 40)
    dealt = partition("ring:2", y, 10, seed=0)
    for client in range(10):
        assert set(y[dealt[client]]) == {client % 5, (client + 1) % 5}
    assert dealt.label_counts(y, 5).max() == 10
    assert len(dealt.indices) == len(y)


def test_s1_cifar_recipe_has_the_sources_sizes() -> None:
    y = np.repeat(np.arange(10), 6000)
    sizes = {
        seed: partition("ring:2,shares=lognormal,draws=1", y, 50, seed).sizes for seed in (0, 7)
    }
    assert (sizes[0].sum(), sizes[0].min(), sizes[0].max()) == (52_497, 506, 1_986)
    assert sizes[0].mean() == pytest.approx(1_049.94)
    assert sizes[0].std() == pytest.approx(250, abs=1)
    assert np.array_equal(sizes[0], sizes[7])
    other = partition("ring:2,shares=lognormal", y, 50, seed=0).sizes
    assert not np.array_equal(sizes[0], other)


def test_s1_mnist_recipe_is_near_the_sources_sizes() -> None:
    counts = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)
    y = np.repeat(np.arange(10), counts)
    sizes = partition("ring:2,shares=cuts,draws=1", y, 50, seed=0).sizes
    # S1: 69,909 samples, 135 to 5,201, std 1,424
    assert (sizes.sum(), sizes.min(), sizes.max()) == (70_000, 137, 5_201)
    assert sizes.std() == pytest.approx(1_366, abs=1)


@pytest.mark.parametrize("shares", ["cuts", "lognormal"])
def test_uneven_rings_deal_something_of_every_class_to_its_holders(shares: str) -> None:
    y = np.repeat(np.arange(4), 30)
    dealt = partition(f"ring:3,shares={shares}", y, 8, seed=3)
    assert ((dealt.label_counts(y, 4) > 0).sum(1) == 3).all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ring:2,shares=odd", "Unknown kind of shares"),
        ("ring:2,draws=1", "draws would do nothing"),
        ("ring:9", "cannot hold 9 classes"),
        ("ring:0", "at least 1"),
    ],
)
def test_rings_that_cannot_be_are_refused(spec: str, said: str) -> None:
    with pytest.raises(FedloomError, match=said):
        partition(spec, np.repeat(np.arange(4), 30), 8, seed=0)
