"""Learning without a server: gossip, what nodes know, the dominating-set mix."""

import json
from dataclasses import replace
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.local import MAML
from fedloom.method import Method
from fedloom.methods.feddom import FedDom
from fedloom.methods.serverless import WAFL, P2PFedAvg
from fedloom.mix import Average, DominatingSet, Gathering, Keep, PeerAverage, Pull
from fedloom.mix.dominating import PAIRWISE, criteria_weights, greedy_dominating_set, waspas
from fedloom.mix.knowledge import Entries, Knowledge, LocalGraph
from fedloom.streams import stream
from fedloom.topology import LOST, Contacts, Peers, Pooled, Star, network

LAYOUT = Layout.of(nn.Linear(3, 2))
MIXES = {"p2p": PeerAverage(), "wafl": Pull(0.8), "feddom": DominatingSet(theta=0.3)}


def gathering(rows, edges, t=1, weights=None, accuracy=None, memory=None, **contacts):
    n = len(rows)
    clients = contacts.pop("clients", np.arange(n))
    start = contacts.pop("start", torch.zeros(8))
    given = Contacts(clients, np.array(edges, dtype=np.int64).reshape(-1, 2), **contacts)
    names = ("mail", "knowledge")
    return Gathering(
        round=t, layout=LAYOUT, contacts=given, shared=start, clients=clients,
        weights=np.ones(n) if weights is None else np.asarray(weights, float), rows=rows, lr=0.1,
        stream=lambda *names, round=t: stream(0, *names, round),
        memory=memory or {name: {} for name in names},
        facts={"accuracy": np.full(n, 0.5) if accuracy is None else np.asarray(accuracy, float)},
    )  # fmt: skip


def models(n, seed=0):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def remembered(mixed):
    return {"mail": {}, "knowledge": {}, **mixed.memory}


# -- gossip ---------------------------------------------------------------------------------------


def test_wafl_on_a_complete_graph_averages_in_one_step():
    rows = models(5)
    edges = network("complete").edges(1, 5, None)
    out = Pull(1.0).combine(gathering(rows, edges)).rows
    assert torch.allclose(out, rows.mean(0).expand(5, -1), atol=1e-6)


def test_wafl_by_hand():
    rows = torch.arange(3.0)[:, None].expand(3, 8).contiguous()  # 0, 1, 2 on a path
    out = Pull(0.5).combine(gathering(rows, [[0, 1], [1, 2]])).rows[:, 0]
    # 0 + ½(1−0)/2; 1 + ½((0−1)+(2−1))/3; 2 + ½(1−2)/2
    assert out.tolist() == [0.25, 1.0, 1.75]
    assert torch.equal(Pull(0.0).combine(gathering(rows, [[0, 1], [1, 2]])).rows, rows)


def test_peer_to_peer_fedavg_by_hand():
    rows = torch.arange(3.0)[:, None].expand(3, 8).contiguous()
    g = gathering(rows, [[0, 1], [1, 2]], weights=[1, 2, 5])
    out = PeerAverage().combine(g).rows[:, 0]
    assert out.tolist() == pytest.approx([2 / 3, 12 / 8, 12 / 7])


def test_nodes_are_known_by_number_where_some_are_missing():
    rows = torch.arange(3.0)[:, None].expand(3, 8).contiguous()
    there = np.array([1, 4, 7])
    g = gathering(rows, [[1, 4], [4, 7]], weights=[1, 2, 5], clients=there)
    assert PeerAverage().combine(g).rows[:, 0].tolist() == pytest.approx([2 / 3, 12 / 8, 12 / 7])
    assert Pull(0.5).combine(g).rows[:, 0].tolist() == [0.25, 1.0, 1.75]


@pytest.mark.parametrize("mix", [PeerAverage(), Pull(1.0), Pull(0.3)], ids=repr)
def test_rows_of_the_mixing_matrix_sum_to_one(mix):
    rng = np.random.default_rng(0)
    for _ in range(20):
        receiver = np.sort(rng.integers(9, size=rng.integers(30)))
        own, sent = rng.integers(0, 5, 9).astype(float), rng.integers(1, 9, len(receiver))
        share, mine = mix.shares(receiver, sent.astype(float), own)
        assert mine + np.bincount(receiver, share, 9) == pytest.approx(1)
        assert min(share.min(initial=0), mine.min()) >= 0


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_order_of_nodes_does_not_matter(mix):
    rng = np.random.default_rng(1)
    rows, order = models(9), rng.permutation(9)
    weights, accuracy = rng.integers(1, 9, 9), rng.random(9)
    edges = network("erdos-renyi:0.3").edges(1, 9, lambda *_, round: rng)
    one = mix.combine(gathering(rows, edges, weights=weights, accuracy=accuracy)).rows
    back = np.argsort(order)
    two = mix.combine(
        gathering(
            rows[order], np.sort(back[edges]), weights=weights[order], accuracy=accuracy[order]
        )
    ).rows
    assert torch.allclose(one[order], two, atol=1e-6)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_an_isolated_node_keeps_its_model(mix):
    rows = models(4)
    out = mix.combine(gathering(rows, [[0, 1], [1, 2]])).rows
    assert torch.equal(out[3], rows[3])
    assert not torch.equal(out[:3], rows[:3])


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_node_that_was_told_much_keeps_its_model_while_it_is_isolated(mix):
    memory = None
    for t, edges in enumerate(([[0, 1], [1, 2]], [[0, 2]], [[1, 2]], []), 1):
        rows = models(3, seed=t)
        mixed = mix.combine(gathering(rows, edges, t=t, memory=memory))
        memory = remembered(mixed)
        kept = (mixed.rows == rows).all(dim=1)
        met = {node for edge in edges for node in edge}
        assert all(kept[n] for n in {0, 1, 2} - met)
        assert not met or not all(kept[n] for n in met)


def test_an_isolated_node_may_mix_what_it_knows():
    good = {"accuracy": [0.2, 0.9, 0.5]}
    first = DominatingSet().combine(gathering(models(3), [[0, 1], [1, 2]], **good))
    rows = models(3, seed=2)
    g = gathering(rows, [[1, 2]], t=2, memory=remembered(first), **good)
    keeps, moves = (DominatingSet(mix_alone=on).combine(g) for on in (False, True))
    assert torch.equal(keeps.rows[0], rows[0])
    assert not torch.equal(moves.rows[0], rows[0])
    assert torch.equal(keeps.rows[1:], moves.rows[1:])
    lost = gathering(rows, [[0, 1]], t=2, memory=remembered(first), late=np.array([LOST, LOST]))
    assert torch.equal(DominatingSet().combine(lost).rows, rows)  # nothing reached anybody


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_rows_of_the_mixing_matrix_sum_to_one_when_it_is_applied(mix):
    """Six nodes whose weights are the identity: what becomes of them is the mixing matrix. feddom
    compares biases only, so that its choice does not rest on them."""
    if isinstance(mix, DominatingSet):
        mix = replace(mix, layers="bias")
    rng, memory = np.random.default_rng(5), None
    for t in range(1, 9):
        rows = models(6, seed=t)
        rows[:, :6] = torch.eye(6)
        edges = [[0, 1], *np.argwhere(np.triu(rng.random((6, 6)) < 0.3, 1)).tolist()[1:]]
        weights, accuracy = rng.integers(1, 9, 6), rng.random(6)
        g = gathering(rows, edges, t=t, weights=weights, accuracy=accuracy, memory=memory)
        mixed = mix.combine(g)
        memory = remembered(mixed)
        matrix = mixed.rows[:, :6]
        assert torch.allclose(matrix.sum(1), torch.ones(6), atol=1e-6)
        assert (matrix >= 0).all()
        if isinstance(mix, DominatingSet):  # 1 − δ of its own, at least
            assert (matrix.diagonal() >= 0.3 - 1e-6).all()
        assert not torch.equal(matrix, torch.eye(6))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_node_uses_nothing_that_it_was_not_told(mix):
    """Models, sizes and accuracies of strangers may be anything: nothing changes."""
    rng = np.random.default_rng(2)
    edges = np.array([[0, 1], [1, 2], [3, 4], [4, 5]])  # two worlds
    later = np.array([[0, 1], [3, 5]])
    rows, weights, accuracy = models(6), rng.integers(1, 9, 6), rng.random(6)
    for world in (np.arange(3), np.arange(3, 6)):
        strange = rows.clone()
        strange[np.setdiff1d(np.arange(6), world)] = float("nan")
        size, score = weights.copy(), accuracy.copy()
        size[np.setdiff1d(np.arange(6), world)] *= 100
        score[np.setdiff1d(np.arange(6), world)] = 1
        results = []
        for r, w, a in ((rows, weights, accuracy), (strange, size, score)):
            first = mix.combine(gathering(r, edges, weights=w, accuracy=a))
            second = mix.combine(
                gathering(first.rows, later, t=2, weights=w, accuracy=a, memory=remembered(first))
            )
            results.append(second.rows[world])
        assert torch.equal(*results)


def test_a_message_that_is_late_is_combined_as_it_was_sent():
    rows = torch.tensor([[0.0], [1.0]]).expand(2, 8).contiguous()
    late = np.array([0, 2])  # 0 → 1 at once, 1 → 0 two rounds later
    one = Pull().combine(gathering(rows, [[0, 1]], late=late))
    assert one.rows[:, 0].tolist() == [0.0, 0.5]
    moved = one.rows + 10
    two = Pull().combine(gathering(moved, [], t=2, memory=remembered(one)))
    assert torch.equal(two.rows, moved)
    three = Pull().combine(gathering(moved, [], t=3, memory=remembered(two)))
    assert three.rows[:, 0].tolist() == [(10 + 1) / 2, 10.5]
    assert not len(three.memory["mail"][0]["due"])
    assert [int(m.traffic.down[0]) for m in (one, two, three)] == [0, 0, 8]


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_late_message_waits_for_a_receiver_that_rests(mix):
    rows, late = models(3), np.array([0, 1])  # 0 → 1 at once, 1 → 0 a round later
    one = mix.combine(gathering(rows, [[0, 1]], late=late, accuracy=[0.1, 0.9, 0.5]))
    there = np.array([1, 2])
    two = mix.combine(gathering(rows[there], [], t=2, clients=there, memory=remembered(one)))
    assert torch.equal(two.rows, rows[there])
    three = mix.combine(gathering(rows, [], t=3, memory=remembered(two)))
    assert not torch.equal(three.rows[0], rows[0])
    assert [int(m.traffic.down[0]) > 0 for m in (one, three)] == [False, True]
    four = mix.combine(gathering(rows, [], t=4, memory=remembered(three)))
    assert torch.equal(four.rows, rows)  # it has come once


def test_a_lost_message_is_paid_for_and_never_arrives():
    rows = models(2)
    mixed = Pull().combine(gathering(rows, [[0, 1]], late=np.array([0, LOST])))
    assert torch.equal(mixed.rows[0], rows[0])
    assert not torch.equal(mixed.rows[1], rows[1])
    assert mixed.traffic.up.tolist() == [8, 8]
    assert mixed.traffic.down.tolist() == [0, 8]


def shared_part(g, part):
    """A gathering in which nodes share only this part."""
    columns = LAYOUT.columns(part)
    taken = {"rows": columns.take(g.rows), "shared": columns.take(g.shared)}
    return replace(g, layout=LAYOUT.part(columns), **taken)


def test_private_columns_cost_nothing():
    rows = models(3)
    g = shared_part(gathering(rows, [[0, 1], [1, 2]]), "weight")
    mixed = PeerAverage("weight").combine(g)
    assert mixed.rows.shape == (3, 6)
    assert torch.allclose(mixed.rows[1], rows[:, :6].mean(0))
    assert mixed.traffic.up.tolist() == [6, 12, 6]


def test_sub_models_are_combined_by_coverage():
    rows = torch.tensor([[0.0], [2.0], [4.0]]).expand(3, 8).contiguous()
    g = gathering(rows, [[0, 1], [1, 2]])
    g = replace(g, indexes=(None, torch.arange(4), torch.arange(2)))
    mixed = PeerAverage().combine(g)
    assert mixed.rows[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert mixed.rows[1].tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
    assert mixed.rows[2].tolist() == [3, 3, 2, 2, 4, 4, 4, 4]
    assert mixed.traffic.up.tolist() == [8, 8, 2]
    assert mixed.traffic.down.tolist() == [4, 10, 4]


# -- dominating set, scores, AHP and WASPAS -------------------------------------------------------


def linked(edges, nodes):
    out = np.zeros((nodes, nodes), dtype=bool)
    for a, b in edges:
        out[a, b] = out[b, a] = True
    return out


def test_greedy_by_hand():
    # a path 0-1-2-3-4 and a loner 5
    path = linked([(0, 1), (1, 2), (2, 3), (3, 4)], 6)
    score = np.array([0.5, 0.1, 0.9, 0.3, 0.2, 0.4])
    # 2 covers 1 and 3; then 0, then the loner, then 4
    assert greedy_dominating_set(path, score).tolist() == [2, 0, 5, 4]
    assert greedy_dominating_set(path, np.ones(6)).tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.2, 0.6, 1.0])
def test_greedy_covers_every_node_as_networkx_says(chance):
    rng = np.random.default_rng(3)
    for nodes in (1, 2, 15, 40):
        upper = np.triu(rng.random((nodes, nodes)) < chance, 1)
        graph = networkx.from_numpy_array(upper | upper.T)
        taken = greedy_dominating_set(upper | upper.T, rng.random(nodes))
        assert networkx.is_dominating_set(graph, taken.tolist())
        # nothing is taken that was covered: no two members are neighbours
        assert not graph.subgraph(taken.tolist()).edges
        best = greedy_dominating_set(upper | upper.T, upper.sum(0) + upper.sum(1))
        assert len(best) <= max(2 * len(networkx.dominating_set(graph)), 1)


def local_graph(edges, sizes, accuracies, rows):
    n = len(sizes)
    both = linked(edges, n)
    first, second = np.nonzero(both)
    x = rows.double().numpy()
    dots = (x[first] * x[second]).sum(1)
    return LocalGraph(
        0, np.arange(n), np.array(sizes, float), np.array(accuracies), both, first, second, dots,
        (x**2).sum(1), x.sum(1), x.shape[1],
    )  # fmt: skip


def test_node_weights_by_hand():
    graph = local_graph([], [10, 30], [0.2, 0.5], models(2))
    w = np.array([0.25 * 0.5, 0.75 / (1 + np.exp(-0.3))])
    assert DominatingSet(theta=0.2).weights(graph) == pytest.approx(w / w.max())


def test_distances_are_those_of_cosine_and_pearson():
    rows = models(3)
    graph = local_graph([(0, 1), (1, 2)], [1, 1, 1], [0, 0, 0], rows)
    x = rows.double().numpy()
    cosine = [1 - x[a] @ x[b] / np.linalg.norm(x[a]) / np.linalg.norm(x[b])
              for a, b in zip(graph.first, graph.second, strict=True)]  # fmt: skip
    pearson = [1 - np.corrcoef(x[a], x[b])[0, 1]
               for a, b in zip(graph.first, graph.second, strict=True)]  # fmt: skip
    assert graph.distances()[0] == pytest.approx(cosine)
    assert graph.distances()[1] == pytest.approx(pearson)
    d = 0.4 * np.array(cosine) / max(cosine) + 0.6 * np.array(pearson) / max(pearson)
    assert DominatingSet(balance=0.4).distances(graph) == pytest.approx(d)


def test_scores_by_hand():
    """A path 0-1-2 and a loner: the ends are less linked than the middle, all models differ."""
    rows = models(4)
    graph = local_graph([(0, 1), (1, 2)], [10, 20, 30, 40], [0.2, 0.4, 0.6, 0.1], rows)
    mix = DominatingSet(theta=0.2)
    w = mix.weights(graph)
    d = dict(zip(zip(graph.first, graph.second, strict=True), mix.distances(graph), strict=True))
    expected = [
        w[0] * (1 / 2) / (1 + d[0, 1] * w[1]),
        w[1] * 1 / (1 + (d[1, 0] * w[0] + d[1, 2] * w[2]) / 2),
        w[2] * (1 / 2) / (1 + d[2, 1] * w[1]),
        w[3],
    ]
    assert mix.scores(graph) == pytest.approx(expected)


def test_ahp_is_the_source_formula_and_near_the_eigenvector():
    from pymcdm.weights.subjective import AHP

    matrix = np.array(PAIRWISE)
    ours = criteria_weights(PAIRWISE)
    assert ours == pytest.approx([np.mean(matrix[i] / matrix.sum(0)) for i in range(3)])
    assert ours == pytest.approx(AHP(matrix=matrix)(), abs=1e-3)
    consistent = np.outer([4, 2, 1], 1 / np.array([4, 2, 1]))
    assert criteria_weights(consistent) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert criteria_weights(consistent) == pytest.approx(AHP(matrix=consistent)())
    between = np.outer([2.25, 1.5, 1], 1 / np.array([2.25, 1.5, 1]))  # not on Saaty's scale
    assert criteria_weights(between) == pytest.approx(np.array([2.25, 1.5, 1]) / 4.75)


def test_a_run_does_not_go_on_with_other_contacts(quick):
    settings = {"topology": "edges:e.csv", "out": "a", "participation": 1.0}
    Path("e.csv").write_text("0,1\n2,3\n")
    quick("wafl", rounds=1, **settings)
    quick("wafl", rounds=2, resume=True, **settings)
    Path("e.csv").write_text("0,1\n2,4\n")
    with pytest.raises(FedloomError, match="other contacts"):
        quick("wafl", rounds=3, resume=True, **settings)


def test_among_nodes_everybody_takes_part_unless_told_otherwise(in_tmp):
    settings = {"clients": 6, "partition": "iid", "rounds": 1, "topology": "ring"}
    assert fedloom.run("fedprox", **settings).records[0]["participants"] == list(range(6))
    fewer = fedloom.run("fedprox", **settings, participation=0.5)
    assert len(fewer.records[0]["participants"]) == 3


def test_nodes_that_tell_nothing_are_refused_and_leave_nothing_behind(in_tmp):
    settings = {"clients": 6, "partition": "iid", "rounds": 1, "topology": "ring", "out": "a"}
    with pytest.raises(FedloomError, match="nothing to tell"):
        fedloom.run("wafl:private=all", **settings)
    Path("e.csv").write_text("0,99\n")
    with pytest.raises(FedloomError, match="node 99"):
        fedloom.run("wafl", **{**settings, "topology": "edges:e.csv"})
    assert not Path("a").exists()
    with pytest.warns(UserWarning, match="test_share=0"):
        fedloom.run("feddom:neighbours=none", **settings, test_share=0)


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (((1, 9, 1 / 9), (1 / 9, 1, 9), (9, 1 / 9, 1)), "contradicts itself"),
        (((1, 2), (0.5, 1)), "3×3"),
        (((1, 2, 3), (0.5, 1)), "3×3"),
        (((1, 2, 3), (2, 1, 2), (3, 2, 1)), "across the diagonal"),
        (((1, -2, 3), (-0.5, 1, 2), (1 / 3, 0.5, 1)), "above 0"),
    ],
)
def test_a_wrong_pairwise_matrix_is_refused(matrix, why):
    with pytest.raises(FedloomError, match=why):
        DominatingSet(pairwise=matrix)


def test_waspas_is_the_source_formula():
    x = np.array([[0.9, 100, 0.2], [0.6, 300, 0.4], [0.3, 50, 0.8]])
    w = criteria_weights(PAIRWISE)
    scaled = x / x.max(0)
    q = 0.5 * (scaled * w).sum(1) + 0.5 * (scaled**w).prod(1)
    assert waspas(x, w) == pytest.approx(q / q.sum())
    assert waspas(x[:1], w) == pytest.approx([1.0])


def test_the_shares_of_a_dominating_set_by_hand():
    """Two loners: both are taken, the score is the weight, and accuracy outweighs data size."""
    graph = local_graph([], [10, 40], [0.9, 0.3], models(2))
    weight = np.array([10, 40]) / (1 + np.exp(0.2 - np.array([0.9, 0.3])))
    x = np.array([[0.9, 10, weight[0]], [0.3, 40, weight[1]]])
    x = x / x.max(0)
    w = np.array([np.mean([row[j] / sum(r[j] for r in PAIRWISE) for j in range(3)])
                  for row in PAIRWISE])  # fmt: skip
    q = ((x * w).sum(1) + (x**w).prod(1)) / 2
    members, shares = DominatingSet(theta=0.2).choose(graph)
    assert members.tolist() == [1, 0]
    assert shares == pytest.approx((q / q.sum())[members])


def test_a_criterion_that_nobody_meets_counts_for_nobody():
    x = np.array([[0.0, 100, 0.2], [0.0, 300, 0.4]])
    w = criteria_weights(PAIRWISE)
    assert waspas(x, w) == pytest.approx(waspas(np.array([[1, 100, 0.2], [1, 300, 0.4]]), w))
    some = waspas(np.array([[0.0, 100, 0.2], [0.5, 100, 0.2]]), w)
    assert 0 < some[0] < some[1]


# -- what nodes know ------------------------------------------------------------------------------


class Slow:
    """feddom as a story: every node a dict of what it was told. Written apart from the mix."""

    def __init__(self, mix):
        self.mix, self.graphs, self.mail = mix, {}, []

    def step(self, g):
        met = {int(c): self.graphs.get(int(c), {}) for c in g.clients}
        for node in g.contacts.forgotten:
            self.graphs.pop(int(node), None)
            met[int(node)] = {}
        sender, receiver, late = (x.tolist() for x in g.contacts.messages())
        now = [(s, r) for s, r, d in zip(sender, receiver, late, strict=True) if d == 0]
        arrived = [m for m in self.mail if m[0] <= g.round and m[1] in met]
        self.mail = [m for m in self.mail if m[0] > g.round or m[1] not in met]
        heard = {n: {} for n in met}
        for s, r in now:
            heard[r][s] = g.round
        for _, r, s, _ in arrived:
            heard[r][s] = g.round
        mine = {}
        for i, n in enumerate(g.clients.tolist()):
            before = met[n].get(n, {"met": {}})
            mine[n] = {**met[n], n: {
                "round": g.round, "row": g.rows[i].double().numpy(), "size": g.weights[i],
                "accuracy": g.accuracy[i], "met": before["met"] | heard[n],
            }}  # fmt: skip
        after = {n: dict(graph) for n, graph in mine.items()}

        def merge(n, told):
            for i, entry in told.items():
                if i not in after[n] or entry["round"] > after[n][i]["round"]:
                    after[n][i] = entry

        for s, r in now:
            merge(r, mine[s])
        for _, r, _, told in arrived:
            merge(r, told)
        for s, r, d in zip(sender, receiver, late, strict=True):
            if d > 0:
                self.mail.append((g.round + d, r, s, mine[s]))
        self.graphs |= after
        moves = {n for n in after if heard[n] or self.mix.mix_alone}
        rows = [self.mixed(after[n], n, g.round) if n in moves else after[n][n]["row"]
                for n in after]  # fmt: skip
        return torch.from_numpy(np.stack(rows)).float()

    def mixed(self, known, me, t):
        ids = sorted(known)
        since = 0 if self.mix.links is None else max(t - self.mix.links + 1, 0)
        edges = [(a, b) for a in ids for b in ids
                 if a < b and (known[a]["met"].get(b, -1) >= since
                               or known[b]["met"].get(a, -1) >= since)]  # fmt: skip
        at = {n: i for i, n in enumerate(ids)}
        graph = local_graph(
            [(at[a], at[b]) for a, b in edges], [known[n]["size"] for n in ids],
            [known[n]["accuracy"] for n in ids],
            torch.from_numpy(np.stack([known[n]["row"] for n in ids])),
        )  # fmt: skip
        members, shares = self.mix.choose(graph)
        mean = sum(q * known[ids[m]]["row"] for m, q in zip(members, shares, strict=True))
        return self.mix.delta * mean + (1 - self.mix.delta) * known[me]["row"]


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"mix_alone": True}, {"links": 1}, {"links": 3, "mix_alone": True}], ids=str
)
def test_what_nodes_know_comes_from_meetings_and_merges(faults, options):
    rng = np.random.default_rng(4)
    mix, nodes = DominatingSet(theta=0.3, **options), 12
    slow, memory = Slow(mix), None
    rows = models(nodes).double().float()
    weights = rng.integers(1, 50, nodes)
    for t in range(1, 15):
        there = np.arange(nodes)
        gone = np.empty(0, dtype=np.int64)
        if faults:
            there = np.sort(rng.choice(nodes, 10, replace=False))
            gone = there[:1] if t % 4 == 0 else gone
        upper = np.argwhere(np.triu(rng.random((nodes, nodes)) < 0.12, 1))
        edges = upper[np.isin(upper, there).all(axis=1)]
        late = rng.integers(-1, 3, 2 * len(edges)) if faults else None
        g = gathering(
            rows[there] + 0.3 * models(len(there), seed=t), edges, t=t, clients=there, late=late,
            weights=weights[there], accuracy=rng.random(len(there)), memory=memory, forgotten=gone,
        )  # fmt: skip
        mixed, story = mix.combine(g), slow.step(g)
        assert torch.allclose(mixed.rows, story, atol=1e-5)
        memory = remembered(mixed)
        rows = rows.clone()
        rows[there] = mixed.rows
        known = Knowledge.of(mixed.memory["knowledge"][0]).known
        for n, graph in slow.graphs.items():
            assert set(np.flatnonzero(known[n] >= 0)) == set(graph)


def test_a_node_that_asks_for_what_it_was_never_told_fails():
    class Curious(DominatingSet):
        def choose(self, graph):
            graph.position(3)
            return super().choose(graph)

    chain = [[0, 1], [1, 2], [2, 3]]
    with pytest.raises(FedloomError, match="Node 0 asks for node 3, of which it was never told"):
        Curious().combine(gathering(models(4), chain))
    # after three rounds of merging the news has come round
    mix, memory = DominatingSet(), None
    for t in (1, 2):
        memory = remembered(mix.combine(gathering(models(4), chain, t=t, memory=memory)))
    assert Curious().combine(gathering(models(4), chain, t=3, memory=memory)).rows is not None


def test_a_model_that_many_know_is_stored_once():
    mix, memory = DominatingSet(), None
    edges = network("complete").edges(1, 100, None)
    for t in (1, 2, 3):
        mixed = mix.combine(gathering(models(100, t), edges, t=t, memory=memory))
        memory = remembered(mixed)
    fields = mixed.memory["knowledge"][0]
    assert (fields["node.known"] >= 0).all()  # 100 × 100 known models
    assert fields["rows"].shape == (100, 8)  # those of the round


def test_only_what_changed_is_compared(monkeypatch):
    mix = DominatingSet()
    first = mix.combine(gathering(models(6), [[0, 1], [2, 3], [4, 5]]))
    seen = []
    plain = torch.Tensor.__matmul__

    def counted(a, b):
        seen.append((a.shape[0], b.shape[1]))
        return plain(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    there = np.array([0, 2])
    second = mix.combine(
        gathering(models(2, 9), [[0, 2]], t=2, clients=there, memory=remembered(first))
    )
    # the two new models with the four or more that are still known, and with each other
    assert [new for new, _ in seen] == [2, 2]
    entries = Knowledge.of(second.memory["knowledge"][0]).entries
    x = entries.rows.numpy()
    assert np.allclose(entries.dots, x @ x.T, atol=1e-5)


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("layers", ["all", "weight", "bias"])
def test_distances_are_those_of_the_models_whatever_they_started_from(layers, scale):
    """Entries of several rounds, some of them dropped, against the models that were told."""
    graphs = []

    class Noting(DominatingSet):
        def choose(self, graph):
            graphs.append(graph)
            return super().choose(graph)

    start = (models(1, seed=30)[0] + 0.5) * scale
    mix, memory, told = Noting(layers=layers, mix_alone=True), None, {}
    for t, edges in enumerate(([[0, 1], [1, 2], [3, 4]], [[2, 3]], [[0, 4], [1, 3]]), 1):
        rows = start + 0.1 * models(5, seed=t)
        told |= {(node, t): row.double().numpy() for node, row in enumerate(rows)}
        memory = remembered(mix.combine(gathering(rows, edges, t=t, memory=memory, start=start)))
    known = Knowledge.of(memory["knowledge"][0])
    there = LAYOUT.columns(layers).index.numpy()
    assert len(set(known.entries.round)) == 3
    for node, graph in enumerate(graphs[-5:]):
        when = known.entries.round[known.known[node, graph.ids]]
        x = np.stack([told[key][there] for key in zip(graph.ids, when, strict=True)])
        for ours, v in zip(graph.distances(), (x, x - x.mean(1, keepdims=True)), strict=True):
            a, b = v[graph.first], v[graph.second]
            cosine = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
            assert ours == pytest.approx(1 - cosine, rel=0.01, abs=1e-7 / scale)


def test_layers_bound_what_is_compared():
    rows = models(3)
    same = rows.clone()
    same[:, :6] = models(3, seed=8)[:, :6]
    g = [gathering(r, [[0, 1], [1, 2]]) for r in (rows, same)]
    dots = [
        Knowledge.of(DominatingSet(layers="bias").combine(x).memory["knowledge"][0]).entries.dots
        for x in g
    ]
    assert np.array_equal(*dots)
    with pytest.raises(FedloomError, match="'bias' stays with the clients"):
        DominatingSet(part="weight", layers="bias").combine(shared_part(g[0], "weight"))


def run_known(mix, rounds):
    memory = None
    for t, edges in enumerate(rounds, 1):
        mixed = mix.combine(gathering(models(5, t), edges, t=t, memory=memory))
        memory = remembered(mixed)
    return Knowledge.of(memory["knowledge"][0])


def test_options_reach_the_mix():
    given = {
        "theta": 0.3, "balance": 0.1, "delta": 0.6, "layers": "head", "neighbours": 3, "most": 7,
        "forget": 5, "links": 2, "mix_alone": True,
    }  # fmt: skip
    pairwise = [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    options = FedDom(**given, pairwise=pairwise, validation="test-support", private="body")
    mix = options.build().mix
    assert {name: getattr(mix, name) for name in given} == given
    assert mix.pairwise == tuple(map(tuple, pairwise))
    assert (mix.validates, mix.part) == ("test-support", "not body")
    assert WAFL(rate=0.4, private="head").build().mix == Pull(0.4, "not head")
    assert P2PFedAvg(private="head").build().mix == PeerAverage("not head")
    where = WAFL(self_training=2, alone=False).build().topology
    assert (where.self_training, where.alone) == (2, False)


def test_what_is_old_or_too_much_is_dropped():
    rounds = [[[0, 1]], [[0, 2]], [[0, 3]], []]
    everything = run_known(DominatingSet(), rounds)
    assert np.flatnonzero(everything.known[0] >= 0).tolist() == [0, 1, 2, 3]
    recent = run_known(DominatingSet(forget=2), rounds)
    assert np.flatnonzero(recent.known[0] >= 0).tolist() == [0, 2, 3]
    few = run_known(DominatingSet(most=2), rounds)
    assert np.flatnonzero(few.known[0] >= 0).tolist() == [0, 3]
    # entries that nobody has any more are gone
    assert len(few.entries) < len(everything.entries)


def test_a_bounded_graph_holds_the_node_itself_and_others_by_lot():
    """All are met in the same round: who stays is drawn, so nobody is known by nobody."""
    edges = network("complete").edges(1, 12, None)
    mixed = DominatingSet(most=4, neighbours=4).combine(gathering(models(12), edges))
    knowledge = Knowledge.of(mixed.memory["knowledge"][0])
    known = knowledge.known >= 0
    assert known.diagonal().all()
    assert known.sum(1).tolist() == [4] * 12
    assert (known.sum(0) > 1).all()
    told = knowledge.entries.met >= 0
    assert told.sum(1).tolist() == [4] * 12
    assert told.any(0).all()


def test_a_node_with_nothing_to_validate_on_has_shown_no_accuracy():
    g = gathering(models(3), [[0, 1], [1, 2]], accuracy=[0.5, np.nan, 0.7])
    told = Knowledge.of(DominatingSet().combine(g).memory["knowledge"][0]).entries
    assert told.accuracy[np.argsort(told.owner)].tolist() == [0.5, 0, 0.7]


def test_neighbours_are_bounded_to_the_last_met():
    rounds = [[[0, 1]], [[0, 2]], [[0, 3]], [[0, 1], [0, 4]]]
    met = run_known(DominatingSet(neighbours=2), rounds)
    own = met.known[0, 0]
    assert np.flatnonzero(met.entries.met[own] >= 0).tolist() == [1, 4]
    every = run_known(DominatingSet(), rounds)
    assert np.flatnonzero(every.entries.met[every.known[0, 0]] >= 0).tolist() == [1, 2, 3, 4]


def edges_of(knowledge, node):
    graph = knowledge.graph(node, 8)
    ends = zip(graph.ids[graph.first], graph.ids[graph.second], strict=True)
    return [(int(a), int(b)) for a, b in ends if a < b]


def test_links_are_meetings_of_the_last_rounds_by_hand():
    rounds = [[[1, 2], [3, 4]], [[0, 1]], [[0, 3]]]
    # 0 hears in round 2 that 1 met 2, in round 3 that 3 met 4 in round 1
    assert edges_of(run_known(DominatingSet(), rounds), 0) == [(0, 1), (0, 3), (1, 2), (3, 4)]
    assert edges_of(run_known(DominatingSet(links=3), rounds), 0) == [
        (0, 1), (0, 3), (1, 2), (3, 4),
    ]  # fmt: skip
    assert edges_of(run_known(DominatingSet(links=2), rounds), 0) == [(0, 1), (0, 3)]
    last = run_known(DominatingSet(links=1), rounds)
    assert edges_of(last, 0) == [(0, 3)]
    # what it knows is not less: 1, 2 and 4 are loners now, and all are taken
    assert np.flatnonzero(last.known[0] >= 0).tolist() == [0, 1, 2, 3, 4]
    assert len(DominatingSet(links=1).choose(last.graph(0, 8))[0]) == 4
    # what an entry says of old meetings goes, wherever the entry is
    assert (last.entries.met >= 0).sum() == 2


def test_links_that_last_longer_than_the_run_change_nothing_but_what_they_cost():
    memory = {None: None, 9: None}
    rng = np.random.default_rng(6)
    for t in range(1, 9):
        edges = np.argwhere(np.triu(rng.random((6, 6)) < 0.2, 1))
        out = {}
        for links in memory:
            mix = DominatingSet(links=links)
            out[links] = mix.combine(gathering(models(6, t), edges, t=t, memory=memory[links]))
            memory[links] = remembered(out[links])
        assert torch.equal(out[None].rows, out[9].rows)
    assert out[9].traffic.up.sum() > out[None].traffic.up.sum()  # rounds are told, too


def test_what_nodes_send_by_hand():
    """A greeting is two numbers for each entry that one has; an entry is its model of 8 values, a
    size, an accuracy and a number for each link."""
    mix, memory, sent = DominatingSet(), None, []
    for t, edges in enumerate(([[0, 1]], [[0, 1], [1, 2]], [[0, 1]]), 1):
        mixed = mix.combine(gathering(models(3, t), edges, t=t, memory=memory))
        memory = remembered(mixed)
        sent.append((mixed.traffic.up.tolist(), mixed.traffic.down.tolist()))
    one, two = 8 + 2 + 1, 8 + 2 + 2
    assert sent[0] == ([2 + one, 2 + one, 0], [2 + one, 2 + one, 0])
    # 1 tells 0 of itself, and 2 of itself and of 0 as it was
    up = [4 + one, (4 + two) + (4 + two + one), 2 + one]
    assert sent[1] == (up, [4 + two, 4 + one + 2 + one, 4 + two + one])
    # 1 has 2's entry of the round before
    assert sent[2] == ([4 + one, 6 + two + one, 0], [6 + two + one, 4 + one, 0])


def test_the_record_of_a_round_by_hand():
    """A chain whose ends have nearly all the data: all take both ends, and each end knows the other
    as it was a round before."""
    mix, memory, records = DominatingSet(), None, []
    for t in (1, 2):
        g = gathering(models(3, t), [[0, 1], [1, 2]], t=t, weights=[100, 1, 100], memory=memory)
        mixed = mix.combine(g)
        memory = remembered(mixed)
        records.append(mixed.metrics)
    assert records[0]["known"] == pytest.approx(7 / 3)
    assert (records[0]["entries"], records[0]["age"]) == (3, 0)
    assert records[1] == {"known": 3, "entries": 5, "dominating": 2, "age": pytest.approx(1 / 3)}


def test_knowledge_survives_a_checkpoint_to_the_bit():
    mix = DominatingSet()
    late = np.array([0, 1, 2, 0])
    mixed = mix.combine(gathering(models(4), [[0, 1], [1, 2]], late=late))
    fields = mixed.memory["knowledge"][0]
    again = Knowledge.of({k: v.clone() for k, v in fields.items()}).fields()
    assert fields.keys() == again.keys()
    assert all(torch.equal(fields[k], again[k]) for k in fields)
    assert isinstance(Knowledge.of(fields).entries, Entries)


# -- in a run -------------------------------------------------------------------------------------

SERVERLESS = ("p2p-fedavg", "wafl", "feddom")
FAULTS = "fail=0.2,back=0.5,state=lost,loss=0.1,late=2"


def run(quick, name, **settings):
    given = {
        "participation": 1.0, "topology": "waypoint,area=200", "clients": 8, "rounds": 5,
        "partition": "dirichlet:0.5", "batch": 16,
    }  # fmt: skip
    return quick(name, **{**given, **settings})


def states(result):
    return result.store.checkpoint()[0]


def same(a, b):
    assert states(a).keys() == states(b).keys()
    for key, value in states(a).items():
        assert torch.equal(value, states(b)[key]), key
    assert a.clients.equals(b.clients)


@pytest.mark.parametrize("name", SERVERLESS)
@pytest.mark.parametrize(("faults", "workers"), [("none", 1), (FAULTS, 3)])
def test_processes_give_the_bits_of_serial(quick, name, faults, workers):
    serial = run(quick, name, faults=faults, rounds=4)
    more = {"faults": faults, "rounds": 4, "engine": "processes", "workers": workers}
    same(serial, run(quick, name, **more))


@pytest.mark.parametrize("name", SERVERLESS)
def test_stacked_is_serial_up_to_rounding(quick, name):
    serial, stacked = run(quick, name), run(quick, name, engine="stacked")
    assert torch.allclose(states(serial)["kept/rows"], states(stacked)["kept/rows"], atol=1e-4)
    for column in ("bytes_up", "degree", "contacts"):
        assert serial.rounds[column].equals(stacked.rounds[column])


@pytest.mark.parametrize("name", SERVERLESS)
@pytest.mark.parametrize("faults", ["none", FAULTS])
def test_a_run_goes_on_bit_for_bit(quick, name, faults):
    more = {"faults": faults, "private": "hidden.0.bias"}
    whole = run(quick, name, rounds=6, **more)
    run(quick, name, rounds=3, out="half", **more)
    half = run(quick, name, rounds=6, out="half", resume=True, **more)
    same(whole, half)


def test_a_run_with_recent_links_goes_on_bit_for_bit(quick):
    more = {"faults": FAULTS, "links": 2, "mix_alone": True}
    whole = run(quick, "feddom", rounds=6, **more)
    run(quick, "feddom", rounds=3, out="half", **more)
    same(whole, run(quick, "feddom", rounds=6, out="half", resume=True, **more))
    assert not torch.equal(
        states(whole)["kept/rows"],
        states(run(quick, "feddom", rounds=6, faults=FAULTS, mix_alone=True))["kept/rows"],
    )


@pytest.mark.parametrize("name", SERVERLESS)
def test_nodes_that_nobody_meets_learn_as_if_alone(quick, name, in_tmp):
    (in_tmp / "e.csv").write_text("0,1\n")
    result = run(quick, name, topology="edges:e.csv")
    alone = run(quick, "local", topology=None)
    rows, lone = states(result)["kept/rows"], states(alone)["kept/rows"]
    assert torch.equal(rows[2:], lone[2:])
    assert not torch.equal(rows[0], lone[0])


def test_worlds_that_never_meet_do_not_touch(quick, in_tmp):
    """Other data in one world: not a bit changes in the other."""
    (in_tmp / "e.csv").write_text("0,1\n1,2\n3,4\n4,5\n")
    rng = np.random.default_rng(0)
    x, y = rng.random((120, 1, 4, 4), dtype=np.float32), rng.integers(3, size=120)
    lists = [list(range(20 * c, 20 * c + 20)) for c in range(6)]
    (in_tmp / "p.json").write_text(json.dumps(lists))
    other = y.copy()
    other[60:] = (other[60:] + 1) % 3
    for name in SERVERLESS:
        one, two = (
            run(quick, name, data=(x, labels, x[:9], y[:9]), clients=6, topology="edges:e.csv",
                partition="file:p.json", augment="none")
            for labels in (y, other)
        )  # fmt: skip
        rows = [states(r)["kept/rows"] for r in (one, two)]
        assert torch.equal(rows[0][:3], rows[1][:3])
        assert not torch.equal(rows[0][3:], rows[1][3:])


def test_a_node_that_comes_back_without_its_state_starts_anew(quick):
    """One that fails in every round and forgets never gets beyond the first steps."""
    lost = run(quick, "wafl", faults="fail=0.5,back=1,state=lost", rounds=8)
    kept = run(quick, "wafl", faults="fail=0.5,back=1", rounds=8)
    assert lost.summary["similarity"] != kept.summary["similarity"]
    assert lost.rounds["participants"].tolist() == kept.rounds["participants"].tolist()
    assert kept.summary["test_accuracy"] > lost.summary["test_accuracy"]


def test_the_records_tell_what_happened(quick):
    result = run(quick, "feddom")
    rounds = result.rounds
    for name in (
        "degree",
        "isolated",
        "contacts",
        "components",
        "dominating",
        "known",
        "age",
        "entries",
    ):
        assert rounds[name].notna().all(), name
    assert (rounds["dominating"] <= rounds["known"]).all()
    assert rounds["known"].is_monotonic_increasing
    assert -1 <= result.summary["similarity"] <= 1
    table = result.clients[result.clients["round"] == 5]
    assert table["test_accuracy"].mean() == pytest.approx(result.summary["test_accuracy"])
    assert result.summary["bytes_up"] == result.summary["bytes_down"] > 0
    assert "degree" not in run(quick, "fedavg", topology=None).rounds


def test_similarity_is_the_mean_cosine_of_all_pairs(quick):
    result = run(quick, "wafl")
    rows = states(result)["kept/rows"].double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    pairs = (unit @ unit.T)[np.triu_indices(8, 1)]
    assert result.summary["similarity"] == pytest.approx(float(pairs.mean()))


def test_dominating_sets_of_a_star_are_small(quick):
    result = run(quick, "feddom", topology="star", rounds=3)
    assert result.rounds["known"].iloc[-1] == 8
    assert result.rounds["dominating"].iloc[-1] <= 8


# -- methods with a server, without it ------------------------------------------------------------


def test_fedavg_among_nodes_is_peer_to_peer_fedavg(quick):
    one, two = run(quick, "fedavg"), run(quick, "p2p-fedavg")
    assert torch.equal(states(one)["kept/rows"], states(two)["kept/rows"])


def test_fedper_among_nodes_keeps_the_heads(quick):
    one = run(quick, "fedper", topology="complete", rounds=1)
    two = run(quick, "p2p-fedavg", topology="complete", rounds=1, private="head")
    assert torch.equal(states(one)["kept/rows"], states(two)["kept/rows"])
    rows, body = states(one)["kept/rows"], 64 * 16 + 16
    assert torch.allclose(rows[:, :body], rows[:1, :body].expand(8, -1), atol=1e-6)
    assert len({tuple(head) for head in rows[:, body:].tolist()}) == 8
    assert one.summary["bytes_up"] == 4 * 8 * 7 * body


@pytest.mark.parametrize(
    "name", ["fedprox", "lg-fedavg", "fedmeta-maml", "fedmeta-per-metasgd", "fedavg-meta"]
)
def test_local_rules_and_parts_work_among_nodes(quick, name):
    more = {"support_share": 0.5, "newcomers": 2, "clients": 6, "rounds": 2, "batch": 64}
    result = run(quick, name, **more)
    assert len(states(result)["kept/rows"]) == 6
    assert set(result.clients["population"]) == {"local", "new"}
    same(result, run(quick, name, engine="processes", workers=2, **more))


def test_columns_that_no_node_trains_stay_as_they_were(quick):
    result = run(quick, "heterofl", topology="ring", capacities="0.5:1", rounds=1)
    state, outside = states(result), slice(8 * 64, 16 * 64)  # of 16 hidden units, the upper half
    start = state["shared"][outside].expand(8, -1)
    assert torch.equal(state["kept/rows"][:, outside], start)
    assert not torch.equal(state["kept/rows"][:, : 8 * 64], state["shared"][: 8 * 64].expand(8, -1))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fedsgd", "a model each"),
        ("local", "would do nothing"),
        ("centralised", "would do nothing"),
    ],
)
def test_what_makes_no_sense_among_nodes_is_refused(quick, name, why):
    with pytest.raises(FedloomError, match=why):
        fedloom.run(name, topology="ring")


@pytest.mark.parametrize(
    ("parts", "why"),
    [({"mix": Keep()}, "nobody talks"), ({"topology": Pooled()}, "meets nobody")],
)
def test_parts_that_make_no_sense_among_nodes_are_refused(parts, why):
    with pytest.raises(FedloomError, match=why):
        Method(**parts).among(Peers())


def test_reference_lines_stand_beside_methods_without_a_server(quick, in_tmp):
    more = {"clients": 5, "partition": "iid", "rounds": 1, "topology": "ring"}
    table = fedloom.compare(["local", "centralised", "wafl"], seeds=1, out="c", **more).table
    assert list(table.index) == ["local", "centralised", "wafl"]


def test_a_newcomer_gets_the_mean_of_all_models(quick):
    result = run(quick, "wafl", newcomers=2)
    x = np.random.default_rng(0).integers(0, 16, (4, 1, 8, 8))
    model = result.newcomer_model(x, [0, 1, 2, 3])
    mean = states(result)["kept/rows"].double()
    weights = states(result)["kept/weights"][:, None]
    expected = (mean * weights).sum(0) / weights.sum()
    assert torch.allclose(Layout.of(model).flatten(model).double(), expected, atol=1e-6)


def test_a_mix_of_ones_own_at_the_server_is_refused_among_nodes():
    class Own(Average):
        pass

    with pytest.raises(FedloomError, match="Own combines models in one place"):
        Method(mix=Own()).among(Peers())


def test_gossip_with_a_server_is_refused():
    with pytest.raises(FedloomError, match="all talk to a server"):
        Method(mix=Pull(), topology=Star())


def test_faults_need_nodes_that_meet(quick):
    with pytest.raises(FedloomError, match="would do nothing"):
        quick("fedavg", faults="fail=0.1")


def test_any_rule_goes_with_any_mix(quick):
    class Toy(fedloom.MethodOptions):
        name, family, source = "toy", "test", "test"

        def build(self):
            return Method(MAML(0.1), DominatingSet("body"), Peers(network("ring")))

    result = run(quick, Toy(), topology=None, support_share=0.5, rounds=2, batch=64)
    assert result.summary["macro"] > 0


def test_everybody_may_rest_or_be_down(quick):
    for engine in ("serial", "stacked", "processes"):
        rest = run(quick, "feddom", topology="erdos-renyi:0", alone=False, engine=engine, rounds=2)
        assert rest.rounds["participants"].tolist() == [0, 0]
    down = run(quick, "wafl", faults="fail=1,back=0.01", rounds=2)
    assert down.rounds["participants"].tolist() == [0, 0]


def test_equal_nodes_have_equal_scores_and_the_first_is_taken():
    """Two that know only each other, with as much data and as good: rounding must not decide."""
    for seed in range(20):
        g = gathering(models(2, seed) * 3 + 1, [[0, 1]])
        mix = DominatingSet()
        known = Knowledge.of(mix.combine(g).memory["knowledge"][0])
        score = mix.scores(known.graph(1, 8))
        assert score[0] == score[1]
        assert mix.choose(known.graph(1, 8))[0].tolist() == [0]
