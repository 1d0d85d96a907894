"""FedSwap: permutations, who swaps with whom, its limits and its cost."""

import itertools

import numpy as np
import pytest
import torch
from test_mix import gather
from torch import nn

import fedloom
from fedloom.data.public import PublicSet
from fedloom.errors import FedloomError
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.layout import Layout
from fedloom.method import Method
from fedloom.mix import (
    Alternate,
    Average,
    Greedy,
    InTurn,
    LeastSimilar,
    Networks,
    OnProbes,
    OnWeights,
    Partners,
    RandomPairs,
    Rotating,
    Swap,
)
from fedloom.mix.swap import Exchange, greedy_pairs, least_pairs, swaps
from fedloom.models.nets import Conv4
from fedloom.similarity import CKA, Cosine, Signatures, measure_named, similarity, similarity_matrix
from fedloom.streams import stream, streams_of
from fedloom.topology import Contacts, Topology

ROW = 64 * 16 + 16 + 16 * 10 + 10  # values of the model of a quick run


def probing(images, module, layout):
    """The facts of a mix that runs models on public images."""
    public = PublicSet(images, None, "test")
    return {"public": public, "public networks": Networks(module, layout)}


def states(result):
    return result.store.checkpoint()[0]


def swap_run(quick, options="", **more):
    given = {"participation": 1.0, "partition": "classes:2", "public": "share:0.05", **more}
    return quick(f"fedswap:{options}" if options else "fedswap", **given)


def random_matrix(n, seed=0):
    values = stream(seed, "matrix").random((n, n))
    return (values + values.T) / 2


# -- who swaps with whom --------------------------------------------------------------------------

PARTNERS = [
    RandomPairs(),
    RandomPairs(0.5),
    InTurn(),
    Rotating(),
    Greedy(OnWeights(Cosine())),
    Greedy(OnWeights(Cosine()), 0.4),
    LeastSimilar(OnWeights(Cosine())),
]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("partners", PARTNERS, ids=str)
def test_models_are_permuted_none_is_lost_or_doubled(partners, n):
    rows = stream(n, "rows").normal(size=(n, 4)).tolist()
    g = gather(rows, [1] * n, [0.0] * 4)
    mixed, after = Swap(partners).combine(g), g.rows.clone()
    after[mixed.clients] = mixed.rows
    assert sorted(after.tolist()) == sorted(g.rows.tolist())
    assert (after != g.rows).any(1).nonzero().flatten().tolist() == mixed.clients.tolist()
    assert mixed.shared is None
    assert not mixed.reset


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 20, 21])
def test_on_the_ring_every_model_visits_every_client(n):
    """In n − 1 swaps, for an odd n in 2(n − 1), and not in one less."""

    def seen(swaps):
        at, visits = np.arange(n), [{k} for k in range(n)]  # whose model each client has
        for turn in range(1, swaps + 1):
            order = Rotating().before(turn, n, None).order(n)
            at = at[order]
            for client, model in enumerate(at):
                visits[model].add(client)
        return all(len(found) == n for found in visits)

    enough = n - 1 if n % 2 == 0 else 2 * (n - 1)
    assert seen(enough)
    assert not seen(enough - 1)


def test_the_ring_turns_with_every_swap_not_with_every_round(quick):
    """Averages lie between: rounds 3 and 6 do not count."""
    result = swap_run(quick, "partner=rotating,average_every=3", rounds=7, clients=4,
                      eval_every=7)  # fmt: skip
    pairs = [record["mix"].get("pairs") for record in result.records]
    even, odd = [[0, 1], [2, 3]], [[1, 2], [3, 0]]
    assert pairs == [even, odd, None, even, odd, None, even]


def test_greedy_computes_only_the_rows_that_it_draws(monkeypatch):
    """What is recorded is what was computed: ⌊n²/4⌋ pairs, those of the bases drawn."""
    asked = []
    real = Signatures.row

    def row(self, base, others):
        asked.append((base, tuple(others)))
        return real(self, base, others)

    monkeypatch.setattr(Signatures, "row", row)
    monkeypatch.setattr(OnWeights, "matrix", None)
    rows = stream(3, "rows").normal(size=(7, 4)).tolist()
    g = gather(rows, [1] * 7, [0.0] * 4)
    mixed = Swap(Greedy(OnWeights(Cosine()))).combine(g)
    pairs = {frozenset((base, other)) for base, others in asked for other in others}
    assert [base for base, _ in asked] == [a for a, _ in mixed.notes["pairs"]]
    assert [len(others) for _, others in asked] == [6, 4, 2]
    found = dict(zip(itertools.combinations(range(7), 2), mixed.notes["similarity"], strict=True))
    assert {frozenset(pair) for pair, value in found.items() if value is not None} == pairs
    assert len(pairs) == mixed.notes["comparisons"] == 7 * 7 // 4
    cosine = torch.nn.functional.cosine_similarity
    for (a, b), value in found.items():
        assert value is None or value == pytest.approx(float(cosine(g.rows[a], g.rows[b], 0)))


@pytest.mark.parametrize("name", ["cka", "dcka", "cca", "hsic", "inner"])
def test_rows_of_a_comparison_are_those_of_the_whole_matrix(name):
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            for _ in range(5)]  # fmt: skip
    images = torch.from_numpy(stream(1, "images").normal(size=(24, 1, 2, 2))).float()
    matrix = similarity_matrix(nets, images, name)
    some = Signatures.of(nets, images, measure_named(name))
    for base in range(5):
        others = [i for i in (4, 1, 3, 0, 2) if i != base]
        assert torch.allclose(some.row(base, others), matrix[base, others], rtol=1e-10)


def test_a_model_that_did_not_come_in_is_not_exchanged():
    """Client 2's message was refused: its partner keeps its model, and nobody gets a third's."""
    for partners in (RandomPairs(), InTurn(), Rotating(), Greedy(OnWeights(Cosine())),
                     LeastSimilar(OnWeights(Cosine()))):  # fmt: skip
        for t in range(8):
            rows = stream(t, "rows").normal(size=(6, 4))
            everybody = gather(rows.tolist(), [1] * 6, [0.0] * 4)
            names = {"stream": streams_of(0, t), "round": t + 1}
            everybody = fedloom.mix.Gathering(**{**vars(everybody), **names})
            mix = Swap(partners)
            sent = mix.senders(t + 1, np.arange(6), everybody.stream)
            came = sent[sent != 2]
            g = fedloom.mix.Gathering(**{**vars(everybody), "clients": came,
                                         "weights": np.ones(len(came)),
                                         "rows": everybody.rows[came],
                                         "contacts": Contacts(np.arange(6))})  # fmt: skip
            mixed, after = mix.combine(g), everybody.rows.clone()
            after[mixed.clients] = mixed.rows
            assert sorted(after.tolist()) == sorted(everybody.rows.tolist())
            assert torch.equal(after[2], everybody.rows[2])
            order = Exchange([tuple(pair) for pair in mixed.notes["pairs"]]).order(6)
            assert torch.equal(after, everybody.rows[order])


def test_everybody_swaps_once_and_an_odd_one_keeps_its_model():
    for partners in (RandomPairs(), Greedy(OnWeights(Cosine())), LeastSimilar(OnWeights(Cosine()))):
        for n in (6, 7):
            rows = stream(n, "rows").normal(size=(n, 4)).tolist()
            exchange = partners.choose(gather(rows, [1] * n, [0.0] * 4))
            taken = list(itertools.chain.from_iterable(exchange.pairs))
            assert len(taken) == len(set(taken)) == n // 2 * 2
            assert (exchange.order(n) != np.arange(n)).sum() == n // 2 * 2


def test_the_swap_share_bounds_the_pairs():
    assert [swaps(n, share) for n, share in ((10, 1), (10, 0.5), (11, 0.4), (200, 0.29))] == [
        5, 2, 2, 29]  # fmt: skip
    rows = stream(0, "rows").normal(size=(10, 4)).tolist()
    for partners in (RandomPairs, lambda s: Greedy(OnWeights(Cosine()), s)):
        assert len(partners(0.4).choose(gather(rows, [1] * 10, [0.0] * 4)).pairs) == 2
        assert partners(0.0).choose(gather(rows, [1] * 10, [0.0] * 4)).pairs == []


def test_random_partners_are_equally_likely():
    counts = np.zeros((4, 4))
    for t in range(600):
        g = gather([[0.0] * 4] * 4, [1] * 4, [0.0] * 4)
        g = fedloom.mix.Gathering(**{**vars(g), "stream": lambda *n, t=t: stream(0, *n, t)})
        for a, b in RandomPairs().choose(g).pairs:
            counts[a, b] += 1
            counts[b, a] += 1
    off = counts[~np.eye(4, dtype=bool)]
    assert off.min() > 150  # each of the three partners in a third of 600 rounds
    assert off.max() < 250


def test_in_turn_is_the_listing_of_the_source():
    """w_k ↔ w_r for every k in turn, with r drawn among all."""
    exchange = InTurn().before(1, 5, lambda *names: stream(0, *names))
    assert [k for k, _ in exchange.pairs] == [0, 1, 2, 3, 4]
    models = list(range(5))
    for k, r in exchange.pairs:
        models[k], models[r] = models[r], models[k]
    assert exchange.order(5).tolist() == models


def test_models_move_as_the_exchanges_say_one_after_the_other():
    """0↔1, then 1↔2 turns three models round; the inverse would turn them the other way."""

    class Given(Partners):
        def choose(self, g):
            return Exchange([(0, 1), (1, 2)])

    g = gather([[float(i)] * 4 for i in range(4)], [1] * 4, [0.0] * 4)
    mixed = Swap(Given()).combine(g)
    assert mixed.clients.tolist() == [0, 1, 2]  # the last one keeps its model
    assert mixed.rows[:, 0].tolist() == [1, 2, 0]
    assert mixed.notes["pairs"] == [[0, 1], [1, 2]]


def test_a_report_names_clients_not_their_places():
    g = gather([[0.0] * 4] * 2, [1] * 2, [0.0] * 4)
    clients = np.array([3, 8])
    g = fedloom.mix.Gathering(**{**vars(g), "clients": clients, "contacts": Contacts(clients)})
    assert sorted(Swap(RandomPairs()).combine(g).notes["pairs"][0]) == [3, 8]


def test_models_are_alike_by_their_weights_not_by_their_statistics():
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    rows = torch.tensor([[1.0, 2, 3, 4, 500, 1, 9], [1.0, 2, 3, 4, -500, 1, 9]])
    g = gather([[0.0] * 4] * 2, [1] * 2, [0.0] * 4)
    g = fedloom.mix.Gathering(**{**vars(g), "layout": layout, "rows": rows})
    assert OnWeights(Cosine()).matrix(g)[0, 1] == pytest.approx(1.0)


def test_a_model_that_answers_nan_comes_last():
    matrix = np.array([[9, 3, np.nan, 2], [3, 9, 5, 4], [np.nan, 5, 9, 6], [2, 4, 6, 9.0]])
    assert least_pairs(matrix, 2) == [(0, 3), (1, 2)]

    class First:
        def integers(self, n):
            return 0

    pairs = greedy_pairs(4, 1, First(), lambda base, others: matrix[base, others])
    assert pairs == [(0, 3)]


def test_probes_are_some_of_the_public_images_and_others_in_every_round():
    images = torch.arange(40.0).view(10, 1, 2, 2)
    seen = []

    class Noting(CKA):
        def confounder(self, inputs):
            seen.append(inputs)

    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    layout = Layout.of(module)
    rows = torch.randn(2, layout.size)
    g = gather([[0.0] * 4] * 2, [1] * 2, [0.0] * 4)
    for t in (1, 2):
        new = {"layout": layout, "rows": rows, "facts": probing(images, module, layout),
               "stream": streams_of(0, t)}  # fmt: skip
        OnProbes(Noting(), probes=6).matrix(fedloom.mix.Gathering(**{**vars(g), **new}))
    first, second = ([int(x[0, 0, 0]) // 4 for x in some] for some in seen)
    assert len(set(first)) == len(set(second)) == 6
    assert first != second


@pytest.mark.parametrize("n", [2, 3, 7, 10, 25])
def test_greedy_makes_a_quarter_of_n_squared_comparisons(n):
    calls = []
    matrix = random_matrix(n)

    def compare(base, others):
        calls.extend((base, other) for other in others)
        return matrix[base, others]

    greedy_pairs(n, n // 2, stream(0, "swap"), compare)
    assert len(calls) == n * n // 4


def test_greedy_takes_the_least_similar_of_those_left_by_hand():
    matrix = np.array([[9, 3, 1, 2], [3, 9, 5, 4], [1, 5, 9, 6], [2, 4, 6, 9.0]])

    class First:
        def integers(self, n):
            return 0

    pairs = greedy_pairs(4, 2, First(), lambda base, others: matrix[base, others])
    assert pairs == [(0, 2), (1, 3)]


def test_min_takes_pairs_in_the_order_of_the_matrix():
    matrix = np.array([[9, 3, 1, 2], [3, 9, 5, 4], [1, 5, 9, 6], [2, 4, 6, 9.0]])
    assert least_pairs(matrix, 2) == [(0, 2), (1, 3)]
    matrix = random_matrix(9)
    chosen = least_pairs(matrix, 4)
    left, expected = set(range(9)), []
    ranked = sorted(itertools.combinations(range(9), 2), key=lambda pair: matrix[pair])
    for a, b in ranked:
        if {a, b} <= left:
            expected.append((a, b))
            left -= {a, b}
    assert chosen == expected
    assert least_pairs(matrix, 2) == expected[:2]


def test_min_finds_the_pairs_that_comparing_them_one_by_one_finds():
    """The product of stacked signatures against S0's calls of ModelSimilarity."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    layout = Layout.of(module)
    rows = torch.from_numpy(stream(1, "rows").normal(size=(6, layout.size))).float()
    images = torch.from_numpy(stream(1, "images").normal(size=(12, 1, 2, 2))).float()
    g = gather([[0.0] * 4] * 6, [1] * 6, [0.0] * 4)
    g = fedloom.mix.Gathering(**{**vars(g), "layout": layout, "rows": rows,
                                 "facts": probing(images, module, layout)})  # fmt: skip
    exchange = LeastSimilar(OnProbes(CKA())).choose(g)
    a, b = (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            for _ in range(2))  # fmt: skip
    alone = np.full((6, 6), 1.0)
    for i, j in itertools.combinations(range(6), 2):
        alone[i, j] = similarity(layout.load(a, rows[i]), layout.load(b, rows[j]), images)
    assert exchange.pairs == least_pairs(alone, 3)
    assert exchange.comparisons == 15
    above = np.triu_indices(6, 1)
    assert np.allclose(exchange.similarity[above], alone[above])


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "partner=min", "partner=sequential"])
def test_averaging_every_round_is_fedavg(quick, row, options):
    words = ",".join(filter(None, [options, "average_every=1"]))
    swap = swap_run(quick, words)
    plain = quick("fedavg", participation=1.0, partition="classes:2", public="share:0.05")
    assert torch.equal(row(swap), row(plain))
    assert swap.summary["test_accuracy"] == pytest.approx(plain.summary["test_accuracy"], abs=1e-12)
    assert swap.summary["bytes"] == plain.summary["bytes"]


def test_swaps_of_no_share_until_the_average_are_longer_local_training(quick, row):
    """Nobody swaps: two rounds are two epochs, but for the order of the batches."""
    swap = swap_run(quick, "swap_share=0,average_every=2", rounds=2, batch="inf")
    twice = quick("fedavg", participation=1.0, partition="classes:2", public="share:0.05",
                  rounds=1, epochs=2, batch="inf")  # fmt: skip
    assert torch.allclose(row(swap), row(twice), atol=1e-6)


def test_rounds_swap_and_every_fifth_averages(quick):
    result = swap_run(quick, "partner=min", rounds=6)
    events = [record["mix"]["event"] for record in result.records]
    assert events == ["swap"] * 4 + ["average", "swap"]
    kept = states(swap_run(quick, "partner=min", rounds=5))["kept/rows"]
    assert len(kept) == 0


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_newcomer_gets_the_last_average(quick, rounds):
    from fedloom.data.catalog import load

    result = swap_run(quick, "average_every=2", rounds=rounds)
    digits = load("digits")
    theirs = result.newcomer_model(digits.x_test[:8], digits.y_test[:8])
    average = swap_run(quick, "average_every=2", rounds=2).model()
    assert torch.equal(theirs.out.weight, average.out.weight)


@pytest.mark.parametrize("options", ["partner=random", "partner=greedy", "partner=min"])
def test_a_swap_round_holds_the_models_of_local_training(quick, options):
    swapped = states(swap_run(quick, options, rounds=1))["kept/rows"]
    alone = states(quick("local", participation=1.0, partition="classes:2", public="share:0.05",
                         rounds=1))["kept/rows"]  # fmt: skip
    assert sorted(map(tuple, swapped.tolist())) == sorted(map(tuple, alone.tolist()))
    assert not torch.equal(swapped, alone)


def held(result, clients=6):
    """The model that each client holds after a run."""
    tensors = states(result)
    rows = tensors["shared"].repeat(clients, 1)
    rows[tensors["kept/clients"]] = tensors["kept/rows"]
    return rows


@pytest.mark.parametrize("partner", ["random", "sequential", "rotating", "greedy", "min"])
def test_who_is_not_drawn_keeps_its_model(quick, partner):
    """Three of six: they train what they hold and swap among themselves."""
    options = f"partner={partner}" + (",similarity=cosine" if partner in ("greedy", "min") else "")
    three = {"participation": 0.5, "rounds": 3, "eval_every": 9}
    before = held(swap_run(quick, options, **{**three, "rounds": 2}))
    swapped = swap_run(quick, options, **three)
    after, (*_, last) = held(swapped), swapped.records
    plain = quick("fedavg", partition="classes:2", public="share:0.05", **three)
    drawn = last["participants"]
    assert [r["participants"] for r in swapped.records] == [
        r["participants"] for r in plain.records
    ]
    others = sorted({0, 1, 2, 3, 4, 5} - set(drawn))
    assert torch.equal(after[others], before[others])
    order = Exchange([tuple(pair) for pair in last["mix"]["pairs"]]).order(6)
    assert set(np.flatnonzero(order != np.arange(6))) <= set(drawn)
    # The same round without swaps: what was trained, each with the client that trained it.
    alone = quick("local", fork=f"{swapped.path}@2", rounds=3, partition="classes:2")
    assert torch.equal(held(alone)[order], after)
    assert not torch.equal(held(alone)[drawn], before[drawn])


def test_an_average_of_some_goes_to_everybody_and_is_paid_for(quick, row):
    """Three of six send; all six get it. Who swapped before and was not drawn gets it, too."""
    run = swap_run(quick, "average_every=2", participation=0.5, rounds=2)
    assert len(states(run)["kept/rows"]) == 0
    model = 4 * ROW
    first, second = ((r["bytes_up"], r["bytes_down"]) for r in run.records)
    assert first == (2 * model, 2 * model)  # one pair; the third keeps its model
    assert second == (3 * model, 6 * model)
    half = swap_run(quick, "average_every=2", participation=0.5, rounds=2, encode="fp16")
    assert half.records[1]["bytes_down"] == 6 * model // 2
    # The average is FedAvg's, of what these three trained from what each of them held.
    every = swap_run(quick, "average_every=1", participation=0.5)
    plain = quick("fedavg", participation=0.5, partition="classes:2", public="share:0.05")
    assert torch.equal(row(every), row(plain))
    assert [r["bytes_up"] for r in every.records] == [r["bytes_up"] for r in plain.records]
    assert [r["bytes_down"] for r in every.records] == [6 * model] * 3
    assert [r["bytes_down"] for r in plain.records] == [3 * model] * 3


def test_traffic_is_counted_by_who_must_send_what(quick):
    """Five clients: two pairs. Comparing needs all models; only swapped ones go down again."""
    cost = {}
    for options in ("partner=random", "partner=min,similarity=cosine"):
        run = swap_run(quick, f"{options},average_every=2", clients=5, rounds=2)
        cost[options] = [(r["bytes_up"], r["bytes_down"]) for r in run.records]
    model = 4 * ROW
    assert cost["partner=random"] == [(4 * model, 4 * model), (5 * model, 5 * model)]
    assert cost["partner=min,similarity=cosine"] == [(5 * model, 4 * model), (5 * model, 5 * model)]


def test_server_time_is_counted(quick):
    result = swap_run(quick, "partner=min,average_every=2", rounds=2)
    assert result.profile["mix"].iloc[0] > result.profile["mix"].iloc[1] > 0
    assert result.summary["server_seconds"] == result.profile["mix"].sum()


@pytest.mark.parametrize(
    "options",
    ["partner=min,similarity=cka,kernel=rbf:0.5,debiased=true", "partner=greedy,similarity=dcka",
     "partner=greedy,similarity=cca,layers=out", "partner=min,similarity=hsic",
     "partner=min,similarity=inner", "partner=min,similarity=pearson",
     "partner=greedy,similarity=cosine,swap_share=0.5", "partner=sequential"],
)  # fmt: skip
def test_every_choice_learns_and_resumes_bit_for_bit(quick, options, in_tmp):
    words = f"{options},average_every=3"
    whole = swap_run(quick, words, rounds=6, lr=0.2)
    swap_run(quick, words, rounds=4, lr=0.2, out="half")
    half = swap_run(quick, words, rounds=6, lr=0.2, out="half", resume=True)
    for key, value in states(whole).items():
        assert torch.equal(value, states(half)[key])
    assert [r["mix"] for r in whole.records] == [r["mix"] for r in half.records]
    assert whole.summary["test_accuracy"] > 0.3
    assert whole.model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)  # the average is everyone's


def test_noise_and_other_data_do_for_probes(quick, in_tmp):
    x = np.random.default_rng(0).integers(0, 255, (50, 1, 8, 8)).astype(np.uint8)
    np.savez("own.npz", x=x, y=np.arange(50) % 3)
    runs = [swap_run(quick, "partner=min,probes=20", rounds=1, public=public)
            for public in ("noise:30", "own.npz", "own.npz:40")]  # fmt: skip
    found = [tuple(run.records[0]["mix"]["similarity"]) for run in runs]
    assert len(set(found)) == 3


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_models_with_norms_are_compared(quick, norm):
    def factory(shape, classes):
        return Conv4(shape, classes, channels=(4, 8, 8, 8), norm=norm)

    result = swap_run(quick, "partner=min,probes=16", rounds=2, model=factory, clients=4)
    values = result.records[1]["mix"]["similarity"]
    assert len(values) == 6
    assert all(0 < value < 1 for value in values)


@pytest.mark.parametrize("attack", ["nan", "scale:1e6"])
def test_a_refused_model_is_swapped_with_nobody(quick, attack):
    settings = {"clients": 5, "rounds": 3, "attack": attack, "screen": "norm:10x",
                "on_bad": "skip", "eval_every": 3}  # fmt: skip
    for options in ("partner=random", "partner=sequential", "partner=min,similarity=cosine"):
        result = swap_run(quick, options, **settings)
        assert len(states(result)["kept/rows"]) == 5
        for record in result.records:
            refused = {int(client) for client in record.get("skipped", {})}
            assert not refused & set(itertools.chain(*record["mix"]["pairs"]))
        assert any("skipped" in record for record in result.records)


@pytest.mark.parametrize(
    ("options", "more", "why"),
    [
        ("partner=min", {"public": "none"}, "--public share:0.01"),
        ("similarity=cca", {}, "would do nothing: partner=random"),
        ("partner=sequential,swap_share=0.5", {}, "swap_share=0.5 would do nothing"),
        ("partner=min,similarity=cosine,layers=out", {}, "layers=out would do nothing"),
        ("partner=min,similarity=cca,kernel=rbf", {}, "does not take a kernel"),
        ("partner=min,kernel=rfb", {}, "Unknown kernel"),
        ("partner=min,layers=outt", {}, "Unknown layer"),
        ("partner=best", {}, "Option 'partner'"),
        ("partner=rotating,swap_share=0.5", {}, "swap_share=0.5 would do nothing"),
        ("partner=rotating,probes=8", {}, "probes=8 would do nothing: partner=rotating"),
        ("", {"participation": 1 / 6}, "needs 2 participants in a round or more, and 1 of 6"),
    ],
)
def test_wrong_wishes_are_refused_with_the_reason(quick, options, more, why):
    with pytest.raises(FedloomError, match=why):
        swap_run(quick, options, **more)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(FedloomError, match="alternate"):
        Alternate(Average(), Average(), every=2)

    class Alone(Topology):
        server = False

    with pytest.raises(FedloomError, match="only a server has"):
        Method(mix=Swap(LeastSimilar(OnProbes(CKA()))), topology=Alone(server=False))


# -- what is left behind --------------------------------------------------------------------------


def test_a_result_knows_who_swapped_and_how_alike_they_were(quick):
    result = swap_run(quick, "partner=min,average_every=3", rounds=4)
    assert sorted(result.similarities) == [1, 2, 4]
    matrix = result.similarities[1]
    assert matrix.index.tolist() == list(range(6))
    assert np.isnan(np.diag(matrix)).all()
    assert np.array_equal(matrix, matrix.T, equal_nan=True)
    assert result.swaps["round"].value_counts().to_dict() == {1: 3, 2: 3, 4: 3}
    first = result.swaps.iloc[0]
    assert first["similarity"] == matrix.min().min()
    assert "mix" not in result.rounds
    assert result.records[0]["mix"]["comparisons"] == 15


def test_the_main_class_of_every_client_is_in_its_scores(quick):
    result = quick("fedavg", partition="classes:1", clients=10, rounds=1)
    assert sorted(result.clients["main_class"]) == list(range(10))


@pytest.mark.parametrize("options", ["partner=greedy", "partner=random"])
def test_swaps_can_be_drawn(quick, in_tmp, options):
    result = swap_run(quick, options, rounds=3)
    result.plot_swaps("swaps.png")
    assert (in_tmp / "swaps.png").stat().st_size > 10_000
    titles = [axis.get_title() for axis in result.plot_swaps().axes]
    maps = ["round 1", "round 2", "round 3"] if options == "partner=greedy" else []
    assert [t for t in titles if t.startswith("round")] == maps
    assert "who swapped with whom" in titles


def test_without_swaps_there_is_nothing_to_draw(quick):
    with pytest.raises(FedloomError, match="nothing to plot"):
        quick("fedavg", rounds=1).plot_swaps()


def test_the_command_line_draws_swaps(quick, in_tmp):
    from typer.testing import CliRunner

    from fedloom.cli import app

    swap_run(quick, "partner=min", rounds=1, out="run")
    shown = CliRunner().invoke(app, ["show", "run", "--swaps", "swaps.png"])
    assert shown.exit_code == 0, shown.output
    assert (in_tmp / "swaps.png").exists()


def test_a_run_that_fails_at_once_leaves_its_directory_free(in_tmp):
    settings = {"clients": 4, "partition": "iid", "rounds": 2, "public": "noise:16", "out": "a",
                "participation": 1.0}  # fmt: skip
    with pytest.raises(FedloomError, match="Unknown layer 'foo'"):
        fedloom.run("fedswap:partner=min,layers=foo", **settings)
    assert not (in_tmp / "a").exists()
    assert len(fedloom.run("fedswap:partner=min,layers=out", **settings).rounds) == 2


def test_a_default_draw_is_large_enough_for_a_pair():
    """A fifth of four clients is one; a share that was asked for is refused instead."""
    cls = method_class("fedswap")
    assert make_config({"clients": 4}, cls)[0].participants == 2
    assert make_config({"clients": 20}, cls)[0].participants == 4
    assert make_config({"clients": 4, "participation": 0.25}, cls)[0].participants == 1
