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
from fedloom.mix.knowledge import NOTHING, Knowledge, LocalGraph
from fedloom.streams import stream
from fedloom.topology import LOST, Contacts, Peers, Pooled, Star, network
from fedloom.topology.relay import spreading

LAYOUT = Layout.of(nn.Linear(3, 2))
MIXES = {
    "p2p": PeerAverage(),
    "wafl": Pull(0.8),
    "p2p-relay": PeerAverage(relay=True),
    "wafl-relay": Pull(0.8, relay=True),
    "feddom": DominatingSet(theta=0.3),
    "feddom-memory": DominatingSet(theta=0.3, forget=None, links=None),
}


def gathering(rows, edges, t=1, weights=None, accuracy=None, memory=None, **contacts):
    n = len(rows)
    clients = contacts.pop("clients", np.arange(n))
    start = contacts.pop("start", torch.zeros(8))
    given = Contacts(clients, np.array(edges, dtype=np.int64), **contacts)
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


def met(mix, g):
    """What nodes know after the meetings of a round."""
    return mix.meet(g).knowledge


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
    good, ever = {"accuracy": [0.2, 0.9, 0.5]}, {"forget": None, "links": None}
    first = DominatingSet(**ever).combine(gathering(models(3), [[0, 1], [1, 2]], **good))
    rows = models(3, seed=2)
    g = gathering(rows, [[1, 2]], t=2, memory=remembered(first), **good)
    keeps, moves = (DominatingSet(mix_alone=on, **ever).combine(g) for on in (False, True))
    assert torch.equal(keeps.rows[0], rows[0])
    assert not torch.equal(moves.rows[0], rows[0])
    assert torch.equal(keeps.rows[1:], moves.rows[1:])
    lost = gathering(rows, [[0, 1]], t=2, memory=remembered(first), late=np.array([LOST, LOST]))
    assert torch.equal(DominatingSet(**ever).combine(lost).rows, rows)  # nothing reached anybody


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


LATE = {name: mix for name, mix in MIXES.items() if name != "feddom"}


@pytest.mark.parametrize("mix", LATE.values(), ids=LATE)
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


def test_what_comes_late_is_too_old_where_only_this_round_counts():
    one = DominatingSet().combine(gathering(models(2), [[0, 1]], late=np.array([0, 1])))
    two = DominatingSet().combine(gathering(models(2), [], t=2, memory=remembered(one)))
    assert torch.equal(two.rows, models(2))
    assert (one.traffic.down[0], two.traffic.down[0]) == (0, 8)  # it arrives all the same


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


def greedy(table, score):
    return greedy_dominating_set(np.append(0, table.sum(1).cumsum()), np.nonzero(table)[1], score)


def test_greedy_by_hand():
    # a path 0-1-2-3-4 and a loner 5
    path = linked([(0, 1), (1, 2), (2, 3), (3, 4)], 6)
    score = np.array([0.5, 0.1, 0.9, 0.3, 0.2, 0.4])
    # 2 covers 1 and 3; then 0, then the loner, then 4
    assert greedy(path, score).tolist() == [2, 0, 5, 4]
    assert greedy(path, np.ones(6)).tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.2, 0.6, 1.0])
def test_greedy_covers_every_node_as_networkx_says(chance):
    rng = np.random.default_rng(3)
    for nodes in (1, 2, 15, 40):
        upper = np.triu(rng.random((nodes, nodes)) < chance, 1)
        graph = networkx.from_numpy_array(upper | upper.T)
        taken = greedy(upper | upper.T, rng.random(nodes))
        assert networkx.is_dominating_set(graph, taken.tolist())
        # nothing is taken that was covered: no two members are neighbours
        assert not graph.subgraph(taken.tolist()).edges
        best = greedy(upper | upper.T, upper.sum(0) + upper.sum(1))
        assert len(best) <= max(2 * len(networkx.dominating_set(graph)), 1)


def apart(x, a, b):
    """1 − cos and 1 − Pearson's r of rows, pair by pair."""
    cosine = [1 - x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j])
              for i, j in zip(a, b, strict=True)]  # fmt: skip
    pearson = [1 - np.corrcoef(x[i], x[j])[0, 1] for i, j in zip(a, b, strict=True)]
    return np.array(cosine), np.array(pearson)


def local_graph(edges, sizes, accuracies, rows):
    n = len(sizes)
    both = linked(edges, n)
    first, second = np.nonzero(both)
    far = apart(rows.double().numpy(), first, second)
    size, starts = np.array(sizes, float), np.append(0, both.sum(1).cumsum())
    return LocalGraph(0, np.arange(n), size, np.array(accuracies), starts, second, *far)


def test_node_weights_by_hand():
    graph = local_graph([], [10, 30], [0.2, 0.5], models(2))
    w = np.array([0.25 * 0.5, 0.75 / (1 + np.exp(-0.3))])
    assert DominatingSet(theta=0.2).weights(graph) == pytest.approx(w / w.max())


def test_distances_are_those_of_cosine_and_pearson():
    """Each is divided by its maximum over links; 0 and 2, who are not linked, play no part."""
    rows = models(3)
    g = gathering(rows, [[0, 1], [1, 2]])
    (_, graph), *_ = met(DominatingSet(), g).graphs(np.array([1]), 8)
    cosine, pearson = apart(rows.double().numpy(), graph.first, graph.second)
    assert graph.cosine == pytest.approx(cosine)
    assert graph.pearson == pytest.approx(pearson)
    d = 0.4 * cosine / max(cosine) + 0.6 * pearson / max(pearson)
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
    with pytest.raises(FedloomError, match="nothing to exchange"):
        fedloom.run("wafl:private=all", **settings)
    Path("e.csv").write_text("0,99\n")
    with pytest.raises(FedloomError, match="node 99"):
        fedloom.run("wafl", **{**settings, "topology": "edges:e.csv"})
    assert not Path("a").exists()
    with pytest.warns(UserWarning, match="validation_share=0"):
        fedloom.run("feddom:neighbours=none", **settings, validation_share=0)


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (((1, 9, 1 / 9), (1 / 9, 1, 9), (9, 1 / 9, 1)), "is inconsistent"),
        (((1, 2), (0.5, 1)), "3×3"),
        (((1, 2, 3), (0.5, 1)), "3×3"),
        (((1, 2, 3), (2, 1, 2), (3, 2, 1)), "across the diagonal"),
        (((1, -2, 3), (-0.5, 1, 2), (1 / 3, 0.5, 1)), "must be positive"),
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
    """Meetings as a story: every node a dict of what it was told, told on in the order of time.
    Written apart from the mixes."""

    def __init__(self, forget=0, links=0, neighbours=None, remembers=True):
        self.forget, self.links, self.neighbours = forget, links, neighbours
        self.remembers, self.graphs, self.own, self.mail = remembers, {}, {}, []

    def useful(self, graph, t):
        return {n: e for n, e in graph.items()
                if self.forget is None or e["round"] >= t - self.forget}  # fmt: skip

    def meet(self, g):
        """What everybody knows after a round, and whom something reached."""
        t = g.round
        for node in g.contacts.forgotten:
            self.graphs.pop(int(node), None)
        if not self.remembers:
            self.graphs = {}
        self.graphs = {n: self.useful(graph, t) for n, graph in self.graphs.items()}
        graphs = self.graphs
        for i, n in enumerate(g.clients.tolist()):
            graph = graphs.setdefault(n, {})
            mine = self.own.pop(n, {}) if n not in g.contacts.forgotten.tolist() else {}
            graph[n] = {
                "round": t, "step": 0, "row": g.rows[i].double().numpy(), "size": g.weights[i],
                "accuracy": g.accuracy[i], "met": self.recent(mine, t),
            }  # fmt: skip
        reached = set()

        def merge(receiver, told):
            for n, entry in self.useful(told, t).items():
                has = graphs[receiver].get(n)
                if has is None or (has["round"], has["step"]) < (entry["round"], entry["step"]):
                    graphs[receiver][n] = entry

        def hear(receiver, who, step, sent):
            mine = graphs[receiver][receiver]
            newest = {k: max(sent, mine["met"].get(k, 0)) for k in who}
            met = {k: v for k, v in mine["met"].items() if k not in who} | newest
            if self.neighbours is not None:
                met = dict(list(met.items())[-self.neighbours :])
            graphs[receiver][receiver] = {**mine, "met": met, "step": step}
            reached.add(receiver)

        here = set(g.clients.tolist())
        for due, r, s, told, sent in self.mail:
            if due <= t and r in here:
                merge(r, told)
                hear(r, [s] if self.links is None or sent >= t - self.links else [], 0, sent)
        self.mail = [m for m in self.mail if m[0] > t or m[1] not in here]
        steps, senders, receivers, late = g.contacts.messages()
        for step in np.unique(steps):
            before = {n: dict(graph) for n, graph in graphs.items()}
            heard = {}
            for k in np.flatnonzero(steps == step):
                s, r = int(senders[k]), int(receivers[k])
                if late[k] == 0:
                    merge(r, before[s])
                    heard.setdefault(r, []).append(s)
                elif late[k] > 0:
                    self.mail.append((t + int(late[k]), r, s, before[s], t))
            for r, who in heard.items():
                hear(r, who, int(step), t)
        for n in here:
            self.own[n] = graphs[n][n]["met"]
        return {n: graphs[n] for n in here}, reached

    def recent(self, met, t):
        return {k: v for k, v in met.items() if self.links is None or v >= t - self.links}

    def edges(self, graph, t):
        return [(a, b) for a in sorted(graph) for b in sorted(graph)
                if a < b and (b in self.recent(graph[a]["met"], t)
                              or a in self.recent(graph[b]["met"], t))]  # fmt: skip


def combined(mix, known, me, edges):
    """feddom's step over a node's dict of what it was told."""
    ids = sorted(known)
    at = {n: i for i, n in enumerate(ids)}
    graph = local_graph(
        [(at[a], at[b]) for a, b in edges], [known[n]["size"] for n in ids],
        [known[n]["accuracy"] for n in ids],
        torch.from_numpy(np.stack([known[n]["row"] for n in ids])),
    )  # fmt: skip
    members, shares = mix.choose(graph)
    mean = sum(q * known[ids[m]]["row"] for m, q in zip(members, shares, strict=True))
    return mix.delta * mean + (1 - mix.delta) * known[me]["row"]


def a_list_of_meetings(rng, nodes, chance=0.08, steps=5, alone=False):
    rows = []
    for step in range(1, steps + 1):
        pairs = np.argwhere(np.triu(rng.random((nodes, nodes)) < chance, 1))
        pairs = rng.permutation(pairs)[:1] if alone else pairs
        rows += [[step, a, b] for a, b in pairs.tolist()]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def edges_of(knowledge, node):
    (_, graph), *_ = knowledge.graphs(np.array([node]), 8)
    ends = zip(graph.ids[graph.first], graph.ids[graph.second], strict=True)
    return [(int(a), int(b)) for a, b in ends if a < b]


def knows(knowledge, node):
    return np.flatnonzero(knowledge.known[node] != NOTHING).tolist()


def test_what_is_heard_at_one_step_is_passed_on_at_later_ones():
    """0-1 at 1, 1-2 at 3, 2-3 at 5: the news goes up the chain, and not down."""
    known = met(DominatingSet(), gathering(models(4), [[1, 0, 1], [3, 1, 2], [5, 2, 3]]))
    assert [knows(known, n) for n in range(4)] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert edges_of(known, 3) == [(0, 1), (1, 2), (2, 3)]
    assert edges_of(known, 1) == [(0, 1), (1, 2)]
    back = met(DominatingSet(), gathering(models(4), [[1, 2, 3], [3, 1, 2], [5, 0, 1]]))
    assert [knows(back, n) for n in range(4)] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [2, 3]]


def test_nobody_knows_of_a_link_before_it_was_told():
    """7-8 at 1, 7-9 at 2, 8-9 at 3: 7 knows both ends and not that they met."""
    known = met(DominatingSet(), gathering(models(10), [[1, 7, 8], [2, 7, 9], [3, 8, 9]]))
    assert knows(known, 7) == [7, 8, 9]
    assert edges_of(known, 7) == [(7, 8), (7, 9)]
    assert edges_of(known, 8) == edges_of(known, 9) == [(7, 8), (7, 9), (8, 9)]


def test_what_is_said_at_one_step_is_what_was_known_before_it():
    known = met(DominatingSet(), gathering(models(3), [[1, 0, 1], [1, 1, 2]]))
    assert [knows(known, n) for n in range(3)] == [[0, 1], [0, 1, 2], [1, 2]]
    assert edges_of(known, 0) == [(0, 1)]


def test_knowledge_is_that_of_brute_force_on_random_lists():
    """150 lists of meetings: who knows whose model, and which links."""
    rng = np.random.default_rng(8)
    for _ in range(150):
        nodes = int(rng.integers(2, 12))
        chance, steps = rng.uniform(0.02, 0.4), int(rng.integers(1, 7))
        g = gathering(models(nodes), a_list_of_meetings(rng, nodes, chance, steps))
        slow, known = Slow(), met(DominatingSet(), g)
        graphs, _ = slow.meet(g)
        for n, graph in graphs.items():
            assert knows(known, n) == sorted(graph)
            assert edges_of(known, n) == slow.edges(graph, 1)
        *_, (_, has) = spreading(g.contacts)
        assert np.array_equal(has, known.known != NOTHING)


def test_permuting_the_times_of_a_round_changes_what_is_known():
    rng, changed = np.random.default_rng(9), 0
    for _ in range(20):
        rows = a_list_of_meetings(rng, 10, 0.1)
        other = rows.copy()
        other[:, 0] = 6 - rows[:, 0]
        other = other[np.argsort(other[:, 0], kind="stable")]
        one, two = (met(DominatingSet(), gathering(models(10), r)) for r in (rows, other))
        changed += not np.array_equal(one.known, two.known)
    assert changed > 15


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_no_state_of_a_node_that_never_reached_one_leaks(mix):
    """Whoever's news did not come to a node in time may be anything: nothing changes for it."""
    rng = np.random.default_rng(10)
    for _ in range(15):
        rows, meetings = models(8, int(rng.integers(99))), a_list_of_meetings(rng, 8, 0.08)
        size, score = rng.integers(1, 9, 8), rng.random(8)
        g = gathering(rows, meetings, weights=size, accuracy=score)
        graphs, _ = Slow().meet(g)
        plain = mix.combine(g).rows
        for node in range(8):
            strangers = sorted(set(range(8)) - set(graphs[node]))
            other, sizes, scores = rows.clone(), size.copy(), score.copy()
            other[strangers], sizes[strangers], scores[strangers] = 1e6, 999, 1
            moved = mix.combine(gathering(other, meetings, weights=sizes, accuracy=scores)).rows
            assert torch.allclose(moved[node], plain[node], atol=1e-6)


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"forget": None, "links": None},
        {"forget": None, "links": None, "mix_alone": True},
        {"forget": 2, "links": 0},
        {"forget": 1, "links": 3},
        {"forget": 3, "links": 2, "mix_alone": True},
        {"forget": None, "links": 1},
        {"neighbours": 2},
        {"forget": 3, "links": 3, "neighbours": 3},
        {"forget": None, "links": None, "neighbours": 2},
    ],
    ids=str,
)
def test_what_nodes_know_comes_from_meetings_and_merges(faults, options):
    """Rounds of meetings, with nodes that rest or lose their state, messages that are lost or late,
    against the story. (Where neighbours are bounded, one pair meets at a time: no lots.)"""
    rng = np.random.default_rng(4)
    mix, nodes = DominatingSet(theta=0.3, **options), 10
    alone = "neighbours" in options
    slow = Slow(**{k: v for k, v in options.items() if k != "mix_alone"})
    memory, rows = None, models(nodes)
    weights = rng.integers(1, 50, nodes)
    for t in range(1, 16):
        there = np.arange(nodes)
        gone = np.empty(0, dtype=np.int64)
        if faults:
            there = np.sort(rng.choice(nodes, 8, replace=False))
            gone = there[:1] if t % 4 == 0 else gone
        meetings = a_list_of_meetings(rng, nodes, 0.3 if alone else 0.06, 6 if alone else 4, alone)
        meetings = meetings[np.isin(meetings[:, 1:], there).all(axis=1)]
        late = rng.integers(-1, 3, 2 * len(meetings)) if faults else None
        if alone and faults:  # late ones of a round arrive together: only one at a time is
            late = np.where(late > 0, LOST, late)
        g = gathering(
            rows[there] + 0.3 * models(len(there), seed=t), meetings, t=t, clients=there, late=late,
            weights=weights[there], accuracy=rng.random(len(there)), memory=memory, forgotten=gone,
        )  # fmt: skip
        mixed, known, (graphs, reached) = mix.combine(g), met(mix, g), slow.meet(g)
        assert set(there[mix.meet(g).reached].tolist()) == reached
        for i, n in enumerate(there.tolist()):
            assert knows(known, n) == sorted(graphs[n])
            assert edges_of(known, n) == slow.edges(graphs[n], t)
            expected = graphs[n][n]["row"]
            if n in reached or mix.mix_alone:
                expected = combined(mix, graphs[n], n, slow.edges(graphs[n], t))
            assert np.allclose(mixed.rows[i], expected, atol=1e-5)
        memory = remembered(mixed)
        rows = rows.clone()
        rows[there] = mixed.rows


@pytest.mark.parametrize("faults", [False, True])
def test_models_are_passed_on_to_be_averaged(faults):
    """P2P FedAvg and WAFL with relay against the story: all that was heard, the newest of each."""
    rng, nodes = np.random.default_rng(11), 9
    mixes = PeerAverage(relay=True), Pull(0.6, relay=True)
    memories = [None, None]
    slow = Slow(forget=None, remembers=False)
    weights = rng.integers(1, 50, nodes)
    for t in range(1, 10):
        rows, meetings = models(nodes, t), a_list_of_meetings(rng, nodes)
        late = rng.integers(-1, 3, 2 * len(meetings)) if faults else None
        graphs = None
        for k, mix in enumerate(mixes):
            g = gathering(rows, meetings, t=t, late=late, weights=weights, memory=memories[k])
            graphs = graphs or slow.meet(g)[0]
            mixed = mix.combine(g)
            memories[k] = remembered(mixed)
            for n, known in graphs.items():
                own, told = known[n]["row"], np.stack([e["row"] for e in known.values()])
                size = [e["size"] for e in known.values()]
                mean = np.average(told, axis=0, weights=None if k else size)
                expected = own + 0.6 * (mean - own) if k else mean
                assert np.allclose(mixed.rows[n], expected, atol=1e-5)
            mean = np.mean([len(known) for known in graphs.values()])
            assert mixed.metrics["known"] == pytest.approx(mean)


def test_relay_on_a_complete_graph_of_one_step_is_no_relay():
    rows, edges = models(6), network("complete").meetings(1, 6, None)
    g = gathering(rows, edges, weights=[1, 2, 3, 4, 5, 6])
    for plain, relay in (
        (PeerAverage(), PeerAverage(relay=True)),
        (Pull(0.7), Pull(0.7, relay=True)),
    ):
        one, two = plain.combine(g), relay.combine(g)
        assert torch.allclose(one.rows, two.rows, atol=1e-6)
        assert one.traffic.up.tolist() == two.traffic.up.tolist() == [5 * 8] * 6


def test_relay_over_enough_hops_is_an_average_over_all():
    """A ring of seven, in three hops: everybody has heard of everybody."""
    rows, weights = models(7), np.arange(1.0, 8)
    for hops, all_ in ((2, False), (3, True)):
        g = gathering(rows, network(f"ring,hops={hops}").meetings(1, 7, None), weights=weights)
        whole = torch.from_numpy(np.average(rows.double(), axis=0, weights=weights)).float()
        out = PeerAverage(relay=True).combine(g).rows
        assert torch.allclose(out, whole.expand(7, -1), atol=1e-6) == all_
        out = Pull(relay=True).combine(g).rows
        assert torch.allclose(out, rows.mean(0).expand(7, -1), atol=1e-6) == all_
        # whoever tells of itself alone does not care how often two meet
        plain = gathering(rows, network("ring").meetings(1, 7, None), weights=weights)
        for mix in (PeerAverage(), Pull(0.4)):
            one, two = mix.combine(g), mix.combine(plain)
            assert torch.equal(one.rows, two.rows)
            assert one.traffic.up.tolist() == two.traffic.up.tolist()


def test_feddom_without_its_parts_is_an_average_with_relay():
    """All members, shares by size or equal, δ = 1: P2P FedAvg and WAFL over the same relay."""
    rng = np.random.default_rng(12)
    g = gathering(models(9), a_list_of_meetings(rng, 9), weights=rng.integers(1, 9, 9))
    for weigh, other in (("size", PeerAverage(relay=True)), ("equal", Pull(relay=True))):
        mix = DominatingSet(members="all", weigh=weigh, delta=1.0)
        assert torch.allclose(mix.combine(g).rows, other.combine(g).rows, atol=1e-6)
        assert mix.combine(g).metrics["dominating"] == mix.combine(g).metrics["known"]


def test_shares_of_members_may_be_equal_or_by_size():
    graph = local_graph([(0, 1)], [10, 40, 50], [0.9, 0.3, 0.1], models(3))
    members, plain = DominatingSet().choose(graph)
    for weigh, expected in (("equal", [1 / 2] * 2), ("size", graph.size[members] / 90)):
        same, shares = DominatingSet(weigh=weigh).choose(graph)
        assert same.tolist() == members.tolist() == [2, 1]
        assert shares == pytest.approx(expected)
        assert shares != pytest.approx(plain)
    everybody, shares = DominatingSet(members="all").choose(graph)
    assert everybody.tolist() == [0, 1, 2]
    criteria = np.stack([graph.accuracy, graph.size, DominatingSet().scores(graph)], axis=1)
    assert shares == pytest.approx(waspas(criteria, criteria_weights(PAIRWISE)))


def test_a_late_message_carries_its_senders_state_of_that_step():
    """1 meets 2 late at step 2 and hears of 0 only at step 3: the message tells of 1 alone."""
    meetings = [[1, 1, 3], [2, 1, 2], [3, 0, 1]]
    late = np.array([0, 1, 0, 0, 0, 0])  # 1 → 2 a round late
    for mix, expected in (
        (PeerAverage(relay=True), [1, 2, 3]),
        (DominatingSet(forget=1, members="all", weigh="equal", delta=1.0), [1, 2, 3]),
    ):
        rows = torch.eye(4, 8)
        one = mix.combine(gathering(rows, meetings, late=late))
        assert torch.equal(one.rows[2], rows[2])
        two = mix.combine(gathering(rows, [], t=2, memory=remembered(one)))
        assert two.rows[2, :4].nonzero().ravel().tolist() == expected
        assert (two.traffic.down > 0).tolist() == [False, False, True, False]


def test_what_was_lost_is_sent_again_at_the_next_step():
    meetings = [[1, 0, 1], [2, 0, 1], [3, 0, 1]]
    late = np.array([LOST, 0, 0, 0, 0, 0])  # 0 → 1 is lost once
    for mix in (PeerAverage(), PeerAverage(relay=True)):
        mixed = mix.combine(gathering(models(2), meetings, late=late))
        assert torch.allclose(mixed.rows, models(2).mean(0).expand(2, -1))
        assert mixed.traffic.up.tolist() == [16, 8]
        assert mixed.traffic.down.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("delays", "sent"),
    [
        ([1, 1, 1], 1),  # two in range for three steps: a model goes once
        ([0, 1, 1], 1),  # what came at once is not sent late
        ([2, 1, 2], 2),  # the second overtakes the first, so it brings the model too
        ([1, LOST, 1], 2),  # a lost one was asked for, and paid for
    ],
)
def test_a_late_message_does_not_bring_again_what_another_has_brought(delays, sent):
    late = np.array([*delays, 0, 0, 0])  # 0 → 1, and 1 → 0 at once
    meetings = [[step, 0, 1] for step in (1, 2, 3)]
    for mix in (PeerAverage(relay=True), DominatingSet(), DominatingSet(forget=3, links=3)):
        mixed = mix.combine(gathering(models(2), meetings, late=late))
        assert mixed.traffic.up.tolist() == [8 * sent, 8]


def test_a_late_message_brings_what_its_sender_has_heard_since():
    """0 gets the model of 2 between its messages to 1: the late one brings that alone."""
    meetings = [[1, 0, 1], [2, 0, 2], [3, 0, 1]]
    late = np.array([0, 0, 1, 0, 0, 0])
    mixed = DominatingSet().combine(gathering(models(3), meetings, late=late))
    assert mixed.traffic.up.tolist() == [8 * (1 + 2 + 1), 8, 8]


def test_a_late_message_is_no_meeting_of_the_round_in_which_it_comes():
    """0 and 1 meet in round 1, and hear of it in round 2: by default that is no link there."""
    for links, edges in ((0, [(0, 2), (1, 2)]), (1, [(0, 1), (0, 2), (1, 2)])):
        mix = DominatingSet(links=links)
        one = mix.combine(gathering(models(3), [[1, 0, 1]], late=np.array([1, 1])))
        g = gathering(models(3), [[1, 0, 2], [2, 1, 2], [3, 0, 2]], t=2, memory=remembered(one))
        assert edges_of(met(mix, g), 0) == edges
        three = gathering(
            models(3), [[1, 0, 2], [2, 1, 2], [3, 0, 2]], t=3, memory=remembered(mix.combine(g))
        )
        assert edges_of(met(mix, three), 0) == [(0, 2), (1, 2)]


def test_a_model_that_one_has_is_not_sent_to_it_again():
    """Everybody gets every other model once, from whomever, however often they meet."""
    g = gathering(models(12), network("complete,hops=4").meetings(1, 12, None))
    for mix in (PeerAverage(relay=True), DominatingSet()):
        traffic = mix.combine(g).traffic
        assert traffic.down.tolist() == [11 * 8] * 12
        assert traffic.up.sum() == 12 * 11 * 8
    rng = np.random.default_rng(13)
    for _ in range(20):
        g = gathering(models(9), a_list_of_meetings(rng, 9, 0.15))
        mixed = DominatingSet().combine(g)
        known = (met(DominatingSet(), g).known != NOTHING).sum(1) - 1
        assert mixed.traffic.down.tolist() == (8 * known).tolist()
        assert mixed.traffic.up.sum() == mixed.traffic.down.sum()
        assert mixed.traffic.numbers_up.sum() == mixed.traffic.numbers_down.sum()


def test_what_nodes_send_by_hand():
    """A greeting is two numbers for each entry that one has; an entry is its model of 8 values, a
    size and an accuracy; a link is a number."""
    mixed = DominatingSet().combine(gathering(models(3), [[1, 0, 1], [2, 0, 1], [2, 1, 2]]))
    assert mixed.traffic.up.tolist() == [8, 8 + 16, 8]
    assert mixed.traffic.down.tolist() == [8, 16, 16]
    # Step 1: each names itself and sends itself. Step 2: 0 and 1 name two each and tell that they
    # met; 1 tells that to 2, with two entries (not 0's word for it, which it hears only now); 2
    # tells of itself.
    first, again, news = 2 + 2, 4 + 1, 4 + 2 * 2 + 1
    assert mixed.traffic.numbers_up.tolist() == [first + again, first + again + news, first]
    assert mixed.traffic.numbers_down.tolist() == [first + again, first + again + first, news]
    relay = PeerAverage(relay=True).combine(gathering(models(3), [[1, 0, 1], [2, 1, 2]]))
    assert relay.traffic.numbers_up.tolist() == [1, 1 + 2, 1]  # only names
    assert PeerAverage().combine(gathering(models(3), [[0, 1]])).traffic.numbers_up is None


def test_links_cost_more_where_it_matters_when_they_were_made():
    sent = {}
    for links in (0, 1, None):
        mix = DominatingSet(links=links)
        mixed = mix.combine(gathering(models(3), [[1, 0, 1], [2, 1, 2]]))
        sent[links] = mixed.traffic.numbers_up.sum()
    assert sent[1] > sent[0] == sent[None]


def test_a_node_that_asks_for_what_it_was_never_told_fails():
    class Curious(DominatingSet):
        def choose(self, graph):
            graph.position(3)
            return super().choose(graph)

    chain = [[1, 2, 3], [2, 1, 2], [3, 0, 1]]
    with pytest.raises(FedloomError, match="Node 0 asks for node 3, which it has never heard of"):
        Curious().combine(gathering(models(4), [[1, 0, 1], [2, 1, 2]]))
    assert Curious().combine(gathering(models(4), chain)).rows is not None


def test_a_model_that_many_know_is_stored_once():
    mix, memory = DominatingSet(forget=1), None
    edges = network("complete").edges(1, 100, None)
    for t in (1, 2, 3):
        mixed = mix.combine(gathering(models(100, t), edges, t=t, memory=memory))
        memory = remembered(mixed)
    fields = mixed.memory["knowledge"][0]
    assert (fields["node.known"] == 3).all()  # 100 × 100 known models
    assert fields["rows"].shape == (100, 8)  # those of the round


def test_where_only_this_round_counts_nothing_is_kept():
    mixed = DominatingSet().combine(gathering(models(5), [[1, 0, 1], [2, 1, 2]]))
    fields = mixed.memory["knowledge"][0]
    assert {k: v.numel() for k, v in fields.items() if v.numel()} == {"node.count": 5}
    assert not PeerAverage(relay=True).combine(gathering(models(5), [[0, 1]])).memory


def test_only_what_changed_is_compared(monkeypatch):
    mix = DominatingSet(forget=None)
    first = mix.combine(gathering(models(6), [[0, 1], [2, 3], [4, 5]]))
    seen = []
    plain = torch.Tensor.__matmul__

    def counted(a, b):
        seen.append((a.shape[0], b.shape[1]))
        return plain(a, b)

    there = np.array([0, 2])
    g = gathering(models(2, 9), [[0, 2]], t=2, clients=there, memory=remembered(first))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", counted)
        entries = met(mix, g).entries
    # the two new models with each other, with the six that are known, and with the start
    assert seen == [(2, 2), (2, 6), (2, 1)]
    x = entries.rows.numpy()
    assert np.allclose(entries.dots, x @ x.T, atol=1e-5)


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("layers", ["all", "weight", "bias"])
@pytest.mark.parametrize("forget", [0, None])
def test_distances_are_those_of_the_models_whatever_they_started_from(forget, layers, scale):
    """Entries of several rounds, some of them dropped, against the models that were told."""
    start = (models(1, seed=30)[0] + 0.5) * scale
    mix, memory, told = DominatingSet(layers=layers, forget=forget, links=forget), None, {}
    for t, edges in enumerate(([[0, 1], [1, 2], [3, 4]], [[2, 3]], [[0, 4], [1, 3]]), 1):
        rows = start + 0.1 * models(5, seed=t)
        told |= {(node, t): row.double().numpy() for node, row in enumerate(rows)}
        g = gathering(rows, edges, t=t, memory=memory, start=start)
        known, memory = met(mix, g), remembered(mix.combine(g))
    there = LAYOUT.columns(layers).index.numpy()
    assert len(set(known.entries.round)) == (1 if forget == 0 else 3)
    seen = 0
    for nodes, graph in known.graphs(np.arange(5), len(there)):
        when = known.known[nodes[0], graph.ids]
        x = np.stack([told[key][there] for key in zip(graph.ids, when, strict=True)])
        for ours, theirs in zip((graph.cosine, graph.pearson), apart(x, graph.first, graph.second),
                                strict=True):  # fmt: skip
            assert ours == pytest.approx(theirs, rel=0.01, abs=1e-7 / scale)
        seen += len(nodes)
    assert seen == 5


def test_nodes_that_know_the_same_share_one_graph():
    choices = []

    class Counting(DominatingSet):
        def choose(self, graph):
            choices.append(graph.node)
            return super().choose(graph)

    g = gathering(models(8), network("complete,hops=2").meetings(1, 8, None))
    one = Counting().combine(g).rows
    assert choices == [0]
    choices.clear()
    # 2 and 3 know the same; 0 hears of nothing but 1
    Counting().combine(gathering(models(4), [[1, 0, 1], [2, 1, 2], [3, 2, 3]]))
    assert sorted(choices) == [0, 1, 2]
    mean = (one - 0.3 * models(8)) / 0.7
    assert torch.allclose(mean, mean[0].expand(8, -1), atol=1e-5)


def test_dense_and_sparse_mixing_are_the_same():
    from scipy.sparse import csr_array

    from fedloom.mix import knowledge

    rng = np.random.default_rng(0)
    for filled in (0.01, 0.5):
        matrix = rng.random((20, 30)) * (rng.random((20, 30)) < filled)
        rows = torch.from_numpy(rng.standard_normal((30, 5000)).astype(np.float32))
        parts = list(knowledge.products(csr_array(matrix), rows))
        assert [(p.start, v.shape[1]) for p, v in parts] == [(0, 4096), (4096, 904)]
        whole = torch.cat([v for _, v in parts], dim=1).numpy()
        assert np.allclose(whole, matrix @ rows.double().numpy())


def test_layers_bound_what_is_compared():
    rows = models(3)
    same = rows.clone()
    same[:, :6] = models(3, seed=8)[:, :6]
    g = [gathering(r, [[1, 0, 1], [2, 1, 2]]) for r in (rows, same)]
    dots = [met(DominatingSet(layers="bias"), x).entries.dots for x in g]
    assert np.array_equal(*dots)
    with pytest.raises(FedloomError, match="'bias' stays with the clients"):
        DominatingSet(part="weight", layers="bias").combine(shared_part(g[0], "weight"))


def run_known(mix, rounds):
    memory = None
    for t, edges in enumerate(rounds, 1):
        g = gathering(models(5, t), edges, t=t, memory=memory)
        known, memory = met(mix, g), remembered(mix.combine(g))
    return known


def test_options_reach_the_mix():
    given = {
        "theta": 0.3, "balance": 0.1, "delta": 0.6, "layers": "head", "neighbours": 3, "most": 7,
        "forget": 5, "links": 2, "mix_alone": True, "members": "all", "weigh": "size",
    }  # fmt: skip
    pairwise = [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    mix = FedDom(**given, pairwise=pairwise, private="body").build().mix
    assert {name: getattr(mix, name) for name in given} == given
    assert mix.pairwise == tuple(map(tuple, pairwise))
    assert (mix.validates, mix.part) == ("validation", "not body")
    assert (FedDom().forget, FedDom().links) == (0, 0)
    assert WAFL(rate=0.4, private="head").build().mix == Pull(0.4, "not head")
    assert WAFL(relay=True).build().mix == Pull(1.0, "not none", relay=True)
    assert P2PFedAvg(private="head").build().mix == PeerAverage("not head")
    assert P2PFedAvg(relay=True).build().mix == PeerAverage("not none", relay=True)
    where = WAFL(self_training=2, alone=False).build().topology
    assert (where.self_training, where.alone) == (2, False)


def test_what_is_old_or_too_much_is_dropped():
    rounds = [[[0, 1]], [[0, 2]], [[0, 3]], []]
    everything = run_known(DominatingSet(forget=None), rounds)
    assert knows(everything, 0) == [0, 1, 2, 3]
    assert knows(run_known(DominatingSet(forget=2), rounds), 0) == [0, 2, 3]
    assert knows(run_known(DominatingSet(forget=1), rounds), 0) == [0, 3]
    assert knows(run_known(DominatingSet(), rounds), 0) == [0]
    few = run_known(DominatingSet(forget=None, most=2), rounds)
    assert knows(few, 0) == [0, 3]
    # entries that nobody has any more are gone
    assert len(few.entries) < len(everything.entries)


def test_a_bounded_graph_holds_the_node_itself_and_others_by_lot():
    """All are met in the same round: who stays is drawn, so nobody is known by nobody."""
    edges = network("complete,hops=3").meetings(1, 12, None)
    mix = DominatingSet(most=4, neighbours=4)
    knowledge = met(mix, gathering(models(12), edges))
    known = knowledge.known != NOTHING
    assert known.diagonal().all()
    assert known.sum(1).tolist() == [4] * 12
    assert (known.sum(0) > 1).all()
    mixed = mix.combine(gathering(models(12), edges))
    assert mixed.metrics["known"] == 4
    links, told = knowledge.links, knowledge.count[knowledge.links.receiver]
    there = (links.place <= told) & (told < links.end)
    assert np.bincount(links.receiver[there]).tolist() == [4] * 12
    assert set(links.sender[there]) == set(range(12))


def test_a_node_with_nothing_to_validate_on_has_shown_no_accuracy():
    g = gathering(models(3), [[0, 1], [1, 2]], accuracy=[0.5, np.nan, 0.7])
    assert met(DominatingSet(), g).entries.accuracy.tolist() == [0.5, 0, 0.7]


def test_neighbours_are_bounded_to_the_last_met():
    rounds = [[[0, 1]], [[0, 2]], [[0, 3]], [[1, 0, 1], [2, 0, 4]]]
    ever = {"forget": None, "links": None}
    # what 0 tells of itself: 1 and 4; the others still tell that they met 0
    few = run_known(DominatingSet(neighbours=2, **ever), rounds)
    mine = few.links.known(few.known[0], few.told[0]) & (few.links.receiver == 0)
    assert sorted(few.links.sender[mine]) == [1, 4]
    every = run_known(DominatingSet(**ever), rounds)
    mine = every.links.known(every.known[0], every.told[0]) & (every.links.receiver == 0)
    assert sorted(every.links.sender[mine]) == [1, 2, 3, 4]
    # within a round: 0 met 1, 2 and 3; to 4 it tells of the last two
    now = [[1, 0, 1], [2, 0, 2], [3, 0, 3], [4, 0, 4]]
    told = run_known(DominatingSet(neighbours=2), [now])
    assert edges_of(told, 4) == [(0, 2), (0, 3), (0, 4)]
    assert edges_of(run_known(DominatingSet(), [now]), 4) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_links_are_meetings_of_the_last_rounds_by_hand():
    rounds = [[[1, 2], [3, 4]], [[0, 1]], [[0, 3]]]
    # 0 hears in round 2 that 1 met 2, in round 3 that 3 met 4 in round 1
    every = [(0, 1), (0, 3), (1, 2), (3, 4)]

    def edges(links):
        return edges_of(run_known(DominatingSet(forget=None, links=links), rounds), 0)

    assert edges(None) == edges(2) == every
    assert edges(1) == [(0, 1), (0, 3)]
    assert edges(0) == [(0, 3)]
    # what it knows is not less: 1, 2 and 4 are loners now, and all are taken
    last = run_known(DominatingSet(forget=None, links=0), rounds)
    assert knows(last, 0) == [0, 1, 2, 3, 4]
    (_, graph), *_ = last.graphs(np.array([0]), 8)
    assert len(DominatingSet().choose(graph)[0]) == 4
    # what was told of old meetings goes, wherever it is
    assert len(last.links) == 2


def test_links_that_last_longer_than_the_run_change_nothing_but_what_they_cost():
    memory = {None: None, 9: None}
    rng = np.random.default_rng(6)
    for t in range(1, 9):
        edges = np.argwhere(np.triu(rng.random((6, 6)) < 0.2, 1))
        out = {}
        for links in memory:
            mix = DominatingSet(links=links, forget=None)
            out[links] = mix.combine(gathering(models(6, t), edges, t=t, memory=memory[links]))
            memory[links] = remembered(out[links])
        assert torch.equal(out[None].rows, out[9].rows)
    # rounds are told, too, and a meeting again is news
    assert out[9].traffic.numbers_up.sum() > out[None].traffic.numbers_up.sum()


def test_the_record_of_a_round_by_hand():
    """A chain whose ends have nearly all the data: all take both ends, and each end knows the other
    as it was a round before."""
    mix, memory, records = DominatingSet(forget=None, links=None), None, []
    for t in (1, 2):
        g = gathering(models(3, t), [[0, 1], [1, 2]], t=t, weights=[100, 1, 100], memory=memory)
        mixed = mix.combine(g)
        memory = remembered(mixed)
        records.append(mixed.metrics)
    assert records[0]["known"] == pytest.approx(7 / 3)
    assert (records[0]["entries"], records[0]["age"]) == (3, 0)
    assert records[1] == {"known": 3, "entries": 5, "dominating": 2, "age": pytest.approx(1 / 3)}


def test_a_node_that_lost_its_state_and_rests_changes_nothing():
    """It comes back, and is not drawn: nobody has heard of it yet."""
    g = gathering(models(3), [[0, 1]], forgotten=np.array([7]))
    assert torch.equal(DominatingSet().combine(g).rows,
                       DominatingSet().combine(gathering(models(3), [[0, 1]])).rows)  # fmt: skip


def test_knowledge_survives_a_checkpoint_to_the_bit():
    mix = DominatingSet(forget=2, links=2)
    late = np.array([0, 1, 2, 0])
    mixed = mix.combine(gathering(models(4), [[1, 0, 1], [2, 1, 2]], late=late))
    fields = mixed.memory["knowledge"][0]
    again = Knowledge.of({k: v.clone() for k, v in fields.items()}).fields()
    assert fields.keys() == again.keys()
    assert all(torch.equal(fields[k], again[k]) for k in fields)
    assert len(Knowledge.of(fields).mail.due) == 2


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_refused_model_does_not_come_through_others(mix):
    """1 and 2 refuse 0, whose model 3 takes: it reaches neither through 3."""
    rows = torch.eye(4, 8)
    meetings = [[1, 0, 3], [1, 0, 1], [2, 1, 3], [3, 2, 3]]
    g = gathering(rows, meetings, refused=np.array([[1, 0], [2, 0]]), accuracy=[0.9, 0.1, 0.1, 0.1])
    out = mix.combine(g).rows
    assert out[1, 0] == out[2, 0] == 0
    plain = mix.combine(replace(g, contacts=Contacts(np.arange(4), np.array(meetings)))).rows
    assert plain[1, 0] > 0


# -- in a run -------------------------------------------------------------------------------------

SERVERLESS = ("p2p-fedavg", "wafl", "feddom", "p2p-fedavg:relay=true", "wafl:relay=true",
              "feddom:forget=2,links=1,neighbours=3,most=6,layers=head")  # fmt: skip
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
    more = {"faults": FAULTS, "links": 2, "forget": 2, "mix_alone": True}
    whole = run(quick, "feddom", rounds=6, **more)
    run(quick, "feddom", rounds=3, out="half", **more)
    same(whole, run(quick, "feddom", rounds=6, out="half", resume=True, **more))
    assert not torch.equal(
        states(whole)["kept/rows"],
        states(run(quick, "feddom", rounds=6, faults=FAULTS))["kept/rows"],
    )


@pytest.mark.parametrize("name", SERVERLESS)
def test_nodes_that_nobody_meets_learn_as_if_alone(quick, name, in_tmp):
    (in_tmp / "e.csv").write_text("0,1\n")
    result = run(quick, name, topology="edges:e.csv")
    same_data = result.config["validation_share"]
    alone = run(quick, "local", topology=None, validation_share=same_data)
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
    assert (rounds["age"] == 0).all()
    assert -1 <= result.summary["similarity"] <= 1
    table = result.clients[result.clients["round"] == 5]
    assert table["test_accuracy"].mean() == pytest.approx(result.summary["test_accuracy"])
    assert result.summary["bytes_up"] == result.summary["bytes_down"] > 0
    assert "degree" not in run(quick, "fedavg", topology=None).rounds


def test_similarity_is_the_mean_cosine_of_how_all_models_moved(quick):
    result = run(quick, "wafl")
    rows = (states(result)["kept/rows"] - states(result)["shared"]).double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    pairs = (unit @ unit.T)[np.triu_indices(8, 1)]
    assert result.summary["similarity"] == pytest.approx(float(pairs.mean()))


def test_dominating_sets_of_a_star_are_small(quick):
    """In two hops all know all, but the last meetings only of their own."""
    result = run(quick, "feddom", topology="star,hops=2", rounds=3)
    assert (result.rounds["known"] == 8).all()
    assert (result.rounds["dominating"] < 8).all()
    one = run(quick, "feddom", topology="star", rounds=3)
    assert one.rounds["known"].tolist() == [(8 + 7 * 2) / 8] * 3


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
        ("fedsgd", "their own model"),
        ("local", "would do nothing"),
        ("centralised", "would do nothing"),
    ],
)
def test_what_makes_no_sense_among_nodes_is_refused(quick, name, why):
    with pytest.raises(FedloomError, match=why):
        fedloom.run(name, topology="ring")


@pytest.mark.parametrize(
    ("parts", "why"),
    [({"mix": Keep()}, "no communication"), ({"topology": Pooled()}, "meets nobody")],
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

    with pytest.raises(FedloomError, match="Own combines models at a server"):
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
        (_, graph), *_ = met(mix, g).graphs(np.array([1]), 8)
        score = mix.scores(graph)
        assert score[0] == score[1]
        assert mix.choose(graph)[0].tolist() == [0]
