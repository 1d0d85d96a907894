"""Networks without a server: who is linked, who moves where, what goes wrong."""

import itertools

import networkx
import numpy as np
import pytest

from fedloom.errors import FedloomError
from fedloom.streams import stream
from fedloom.topology import LOST, Contacts, Faults, Peers, network
from fedloom.topology.report import ContactReport, meetings


def draws(t=1, seed=0):
    return lambda *purpose, round=t: stream(seed, *purpose, round)


def links(text, nodes, t=1):
    return network(text).edges(t, nodes, draws(t)).tolist()


def graph(edges, nodes):
    out = networkx.empty_graph(nodes)
    out.add_edges_from(map(tuple, edges))
    return out


# -- fixed graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("ring", networkx.cycle_graph(12)),
        ("complete", networkx.complete_graph(12)),
        ("star", networkx.star_graph(11)),
        ("grid:4", networkx.grid_2d_graph(3, 4)),
        ("grid", networkx.grid_2d_graph(3, 4)),
        ("watts-strogatz:4,chance=0", networkx.watts_strogatz_graph(12, 4, 0)),
    ],
)
def test_fixed_graphs_are_those_of_networkx(text, theirs):
    ours = graph(links(text, 12), 12)
    assert ours.number_of_edges() == theirs.number_of_edges()
    assert networkx.is_isomorphic(ours, theirs)
    assert links(text, 12, 1) == links(text, 12, 7)


@pytest.mark.parametrize("text", ["erdos-renyi:0.3", "watts-strogatz:4,chance=0.5"])
def test_a_random_graph_is_drawn_once_for_a_run(text):
    assert links(text, 30, 1) == links(text, 30, 9)
    other = network(text).edges(1, 30, draws(1, seed=5)).tolist()
    assert links(text, 30) != other


def test_the_chance_of_a_link_is_met():
    assert len(links("erdos-renyi:0.3", 100)) == pytest.approx(0.3 * 4950, rel=0.1)
    assert links("erdos-renyi:0", 10) == []
    assert links("erdos-renyi:1", 10) == links("complete", 10)


@pytest.mark.parametrize("text", ["ring", "complete", "star", "grid", "erdos-renyi", "waypoint"])
def test_one_node_meets_nobody(text):
    assert links(text, 1) == []


def test_links_come_from_a_file(in_tmp):
    (in_tmp / "e.csv").write_text("from,to\n# a comment\n2,1\n1,2\n0,2\n")
    assert links("edges:e.csv", 3) == [[0, 2], [1, 2]]
    with pytest.raises(FedloomError, match="--clients 3"):
        links("edges:e.csv", 2)


def test_a_trace_is_cut_into_rounds_and_begins_again(in_tmp):
    (in_tmp / "t.csv").write_text("time,a,b\n100,bob,ann\n105,cid,bob\n112,ann,cid\n131,ann,bob\n")
    rounds = [links("trace:t.csv,every=10", 3, t) for t in range(1, 6)]
    assert rounds == [[[0, 1], [1, 2]], [[0, 2]], [], [[0, 1]], [[0, 1], [1, 2]]]
    with pytest.raises(FedloomError, match="--clients 3"):
        links("trace:t.csv", 2)


def test_numbers_in_a_file_are_nodes_and_names_are_numbered_in_order(in_tmp):
    (in_tmp / "e.csv").write_text("3,1\n")
    (in_tmp / "t.csv").write_text("7,3,1\n")
    assert links("edges:e.csv", 4) == links("trace:t.csv", 4) == [[1, 3]]
    for text in ("edges:e.csv", "trace:t.csv"):
        with pytest.raises(FedloomError, match="--clients 4"):
            links(text, 3)
    (in_tmp / "e.csv").write_text("# a,b\neve,bob\nbob,ann\n")
    (in_tmp / "t.csv").write_text("time,a,b\n0,eve,bob\n0,bob,ann\n")
    assert links("edges:e.csv", 3) == links("trace:t.csv", 3) == [[0, 1], [1, 2]]
    (in_tmp / "e.csv").write_text("a,b\n0.0,2.0\n2.0,10.0\n")  # as tables are often saved
    assert links("edges:e.csv", 11) == [[0, 2], [2, 10]]


def test_a_byte_order_mark_is_no_part_of_the_first_word(in_tmp):
    (in_tmp / "e.csv").write_text("ann,bob\nann,cid\n", encoding="utf-8-sig")
    assert links("edges:e.csv", 3) == [[0, 1], [0, 2]]
    (in_tmp / "t.csv").write_text("0,0,1\n5,1,2\n", encoding="utf-8-sig")
    assert links("trace:t.csv", 3) == [[0, 1]]


@pytest.mark.parametrize("word", ["nan", "inf", "", "noon"])
def test_a_time_that_is_none_is_refused_with_its_line(in_tmp, word):
    (in_tmp / "t.csv").write_text(f"time,a,b\n# a comment\n0,0,1\n\n{word},1,2\n")
    with pytest.raises(FedloomError, match=f"'{word}' in line 5 .* is not a time"):
        links("trace:t.csv", 3)
    (in_tmp / "first.csv").write_text(",1,2\n")
    with pytest.raises(FedloomError, match="'' in line 1"):
        links("trace:first.csv", 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rong", "Did you mean 'ring'"),
        ("waypoint,are=500", "Did you mean 'area'"),
        ("waypoint,area=-1", "area"),
        ("waypoint,area=nan", "area"),
        ("waypoint,slowest=9", "Swap"),
        ("waypoint,area=5,area=6", "once"),
        ("ring:3", "option=value"),
        ("erdos-renyi:2", "chance"),
        ("edges", "file"),
        ("edges:none.csv", "no file"),
        ("trace:empty.csv", "no contact"),
        ("trace:wide.csv", "4 values"),
        ("edges:words.csv", "'x' in line 1 .* numbered from 0"),
        ("trace:nobody.csv", "'' in line 2"),
        ("watts-strogatz:20", "smaller"),
        ("watts-strogatz:3", "even number, such as 4"),
        ("edges:empty.csv", "no link"),
        ("edges:minus.csv", "'-1' in line 1"),
        ("edges:half.csv", "'1.5' in line 2"),
        ("trace:far.csv", "rounds of every=1"),
        ("trace:first.csv", "'O1' in line 1 .* is not a time"),
        ("trace:named.csv", "'one' in line 1 .* is not a time"),
        ("trace:selves.csv", "two different nodes"),
        ("trace:", "is a folder"),
        ("grid:99999999999999999999", "width"),
        ("waypoint,steps=99999999999999999999", "steps"),
        ("waypoint,area=1e300", "area"),
        ("waypoint,area=1,slowest=1e6,fastest=1e6", "crosses"),
    ],
)
def test_a_wrong_network_is_refused_in_a_sentence(in_tmp, text, why):
    (in_tmp / "empty.csv").write_text("")
    (in_tmp / "wide.csv").write_text("1,2,3,4\n")
    (in_tmp / "words.csv").write_text("0,x\n")
    (in_tmp / "minus.csv").write_text("-1,-2\n")
    (in_tmp / "half.csv").write_text("0,1\n1,1.5\n")
    (in_tmp / "far.csv").write_text("0,0,1\n1e300,1,2\n")
    (in_tmp / "nobody.csv").write_text("0,a,b\n1,a,\n")
    (in_tmp / "first.csv").write_text("O1,0,1\n3,1,2\n")
    (in_tmp / "named.csv").write_text("one,ann,bob\n3,bob,cid\n")
    (in_tmp / "selves.csv").write_text("0,1,1\n3,2,2\n")
    with pytest.raises(FedloomError, match=why):
        links(text, 10)


# -- moving nodes ---------------------------------------------------------------------------------


def test_nodes_walk_within_the_area_no_faster_than_they_can():
    way = network("waypoint,area=200,slowest=2,fastest=5,pause=3")
    places = way.places(np.arange(0.0, 500.0), 40, draws())
    assert places.min() >= 0
    assert places.max() <= 200
    paces = np.linalg.norm(np.diff(places, axis=0), axis=-1)
    assert paces.max() <= 5 + 1e-9
    resting = (paces == 0).mean()
    assert 0.02 < resting < 0.3  # some 60 steps of walking, then 3 of rest
    assert network("waypoint,area=200,pause=0").places(np.arange(9.0), 5, draws()).shape == (
        9,
        5,
        2,
    )


def test_nodes_walk_no_slower_than_they_can():
    way = network("waypoint,area=200,slowest=4,fastest=5,pause=0")
    places = way.places(np.arange(0.0, 300.0), 20, draws())
    paces = np.linalg.norm(np.diff(places, axis=0), axis=-1)
    assert np.quantile(paces, 0.2) >= 4 - 1e-9  # all but the steps in which a node turns
    assert paces.max() <= 5 + 1e-9


def test_every_node_goes_its_own_ways_and_new_ones_all_the_time():
    way = network("waypoint,area=200,slowest=20,fastest=20,pause=2")
    places = way.places(np.arange(0.0, 600.0), 3, draws())
    rests = [
        {tuple(place) for place in walk[1:][resting].round(6).tolist()}
        for walk, resting in zip(
            places.swapaxes(0, 1),
            (np.linalg.norm(np.diff(places, axis=0), axis=-1) == 0).T,
            strict=True,
        )
    ]
    assert min(map(len, rests)) > 50  # some eight steps from one to the next
    assert not rests[0] & rests[1]


def test_where_nodes_are_needs_no_rounds_before():
    way = network("waypoint,area=300")
    late = way.positions(40, 20, draws(40))
    walked = way.places(np.arange(0.0, 401.0), 20, draws(1))
    assert np.array_equal(walked[400], late)
    assert way.edges(40, 20, draws(40)).tolist() == way.edges(40, 20, draws(40)).tolist()


def test_nodes_meet_if_they_are_in_range_at_a_step_of_the_round():
    way = network("waypoint,area=300,range=60,steps=4")
    for t in (1, 5):
        seen = set()
        for places in way.places(np.arange(4.0 * (t - 1) + 1, 4 * t + 1), 25, draws(t)):
            apart = np.linalg.norm(places[:, None] - places[None], axis=-1)
            seen |= {(a, b) for a, b in np.argwhere(apart <= 60).tolist() if a < b}
        assert sorted(seen) == [tuple(pair) for pair in way.edges(t, 25, draws(t)).tolist()]


@pytest.mark.parametrize("text", ["waypoint", "waypoint,pause=0", "waypoint,pause=200,fastest=3"])
def test_nodes_crowd_in_the_middle_from_the_first_step_on(text):
    """The share in the central quarter, of nodes that have walked for ever: no drift."""
    way, times = network(text), np.array([1.0, 30, 100, 300, 1000])
    places = way.places(times, 8000, draws())
    inside = ((places > way.area / 4) & (places < 3 * way.area / 4)).all(axis=-1).mean(axis=1)
    assert inside == pytest.approx([inside.mean()] * 5, abs=0.02)
    assert inside.mean() > 0.28  # of a quarter of the area


def test_nodes_rest_as_often_at_first_as_later():
    way = network("waypoint,pause=100")
    places = way.places(np.array([1.0, 2, 500, 501]), 8000, draws())
    rests = [(places[i] == places[i + 1]).all(axis=1).mean() for i in (0, 2)]
    # some 109 steps of walking (521 at a mean slowness of 0.21), then 100 of rest
    assert rests == pytest.approx([100 / 210] * 2, abs=0.02)


def test_a_larger_area_has_fewer_contacts():
    degree = {
        area: ContactReport.of(Peers(network(f"waypoint,area={area}")), 50, 20).table["degree"]
        for area in (500, 1000, 2000)
    }
    means = [float(d.mean()) for d in degree.values()]
    assert means[0] > 2 * means[1] > 4 * means[2] > 0


# -- faults ---------------------------------------------------------------------------------------


def test_nodes_fail_and_come_back_as_often_as_said():
    faults = Faults.parse("fail=0.1,back=0.3")
    up = np.array([faults.nodes(t, 400, draws(t))[0] for t in range(1, 60)])
    failed, back = up[:-1] & ~up[1:], ~up[:-1] & up[1:]
    assert failed.sum() / up[:-1].sum() == pytest.approx(0.1, rel=0.1)
    assert back.sum() / (~up[:-1]).sum() == pytest.approx(0.3, rel=0.1)
    for t in (5, 50):
        assert np.array_equal(faults.nodes(t + 1, 400, draws(t))[1], back[t - 1])


def test_nodes_may_fail_from_the_first_round_on():
    up, back = Faults.parse("fail=0.5").nodes(1, 400, draws())
    assert (~up).mean() == pytest.approx(0.5, abs=0.1)
    assert not back.any()


def test_which_messages_are_lost_is_drawn_in_every_round():
    faults = Faults.parse("loss=0.5,late=1")
    one, two = (faults.messages(100, draws(t)) for t in (1, 2))
    assert not np.array_equal(one, two)


def test_who_is_down_neither_trains_nor_meets():
    peers = Peers(network("complete"), Faults.parse("fail=0.5,back=0.5,state=lost"))
    seen = [peers.contacts(t, 20, 20, draws(t)) for t in range(1, 8)]
    for before, after in itertools.pairwise(seen):
        assert len(after.edges) == len(after.participants) * (len(after.participants) - 1) / 2
        assert set(after.edges.ravel()) <= set(after.participants)
        assert set(after.forgotten) == set(after.participants) - set(before.participants)
    kept = Peers(network("complete"), Faults.parse("fail=0.5"))
    assert not any(len(kept.contacts(t, 20, 20, draws(t)).forgotten) for t in range(1, 8))


def test_messages_are_lost_and_late_as_often_as_said():
    late = Faults.parse("loss=0.2,late=3").messages(10000, draws())
    assert (late == LOST).mean() == pytest.approx(0.2, rel=0.1)
    assert [(late == d).mean() for d in range(4)] == pytest.approx([0.2] * 4, rel=0.1)
    assert Faults.parse("fail=1").messages(10, draws()) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [("loss=2", "loss"), ("los=0.1", "Did you mean 'loss'"), ("fail", "option=value"),
     ("state=gone", "kept"), ("back=0,fail=1", "back")],
)  # fmt: skip
def test_wrong_faults_are_refused(text, why):
    with pytest.raises(FedloomError, match=why):
        Faults.parse(text)


# -- who takes part -------------------------------------------------------------------------------


def test_all_train_alone_before_the_first_exchange():
    peers = Peers(network("ring"), self_training=3, alone=False)
    assert [len(peers.contacts(t, 5, 5, draws(t)).edges) for t in (1, 3, 4)] == [0, 0, 5]
    assert peers.contacts(1, 5, 5, draws(1)).participants.tolist() == [0, 1, 2, 3, 4]


def test_a_node_that_meets_nobody_may_rest(in_tmp):
    (in_tmp / "e.csv").write_text("0,2\n")
    rests = Peers(network("edges:e.csv"), alone=False).contacts(1, 4, 4, draws())
    assert rests.participants.tolist() == [0, 2]
    assert meetings(rests)["isolated"] == 0.5
    assert Peers(network("edges:e.csv")).contacts(1, 4, 4, draws()).participants.tolist() == [
        0, 1, 2, 3,
    ]  # fmt: skip


def test_participation_draws_who_is_awake():
    contacts = Peers(network("complete")).contacts(1, 20, 5, draws())
    assert len(contacts.participants) == 5
    assert len(contacts.edges) == 10


def test_messages_go_both_ways():
    late = np.array([0, LOST, 2, 1])
    contacts = Contacts(np.arange(3), np.array([[0, 1], [1, 2]]), late)
    assert list(zip(*contacts.messages(), strict=True)) == [
        (1, 1, 0, 2), (1, 0, 1, 0), (1, 2, 1, 1), (1, 1, 2, LOST),
    ]  # fmt: skip
    ordered = Contacts(np.arange(3), np.array([[1, 1, 2], [2, 0, 1]]), late)
    assert list(zip(*ordered.messages(), strict=True)) == [
        (1, 2, 1, 2), (1, 1, 2, 0), (2, 1, 0, 1), (2, 0, 1, LOST),
    ]  # fmt: skip


def test_who_meets_in_a_round_follows_from_its_meetings():
    contacts = Contacts(np.arange(4), np.array([[1, 2, 1], [2, 0, 3], [4, 1, 2]]))
    assert contacts.edges.tolist() == [[0, 3], [1, 2]]
    assert Contacts(np.arange(4), np.array([[0, 1]])).meetings.tolist() == [[1, 0, 1]]
    assert Contacts(np.arange(4), []).meetings.shape == (0, 3)
    assert Contacts(np.arange(4)).edges is None


@pytest.mark.parametrize(
    ("rows", "why"),
    [([[2, 0, 1], [1, 0, 1]], "order of time"), ([[0, 0, 1]], "from 1 on"), ([[1], [2]], "shape")],
)
def test_meetings_out_of_order_are_refused(rows, why):
    with pytest.raises(FedloomError, match=why):
        Contacts(np.arange(4), np.array(rows))


def test_fixed_graphs_meet_at_each_of_their_hops():
    ring = network("ring,hops=3")
    rows = ring.meetings(1, 4, draws())
    assert [rows[rows[:, 0] == step, 1:].tolist() for step in (1, 2, 3)] == [links("ring", 4)] * 3
    assert network("ring").meetings(1, 4, draws())[:, 0].tolist() == [1] * 4
    contacts = Peers(ring).contacts(1, 4, 4, draws())
    assert contacts.edges.tolist() == links("ring", 4)
    assert len(Peers(ring, Faults.parse("loss=0.5")).contacts(1, 4, 4, draws()).late) == 24
    with pytest.raises(FedloomError, match="hops"):
        network("waypoint,hops=2")


def test_a_trace_has_a_step_for_every_time(in_tmp):
    (in_tmp / "t.csv").write_text("5,2,3\n1,0,1\n3,1,2\n3,4,0\n3,0,4\n11,0,1\n")
    trace = network("trace:t.csv,every=10")
    assert trace.meetings(1, 5, draws()).tolist() == [
        [1, 0, 1], [2, 0, 4], [2, 1, 2], [3, 2, 3],
    ]  # fmt: skip
    assert trace.meetings(2, 5, draws()).tolist() == [[1, 0, 1]]


def test_moving_nodes_meet_at_every_step_at_which_they_are_in_range():
    way = network("waypoint,area=300,range=60,steps=4")
    rows = way.meetings(3, 25, draws(3))
    assert (np.diff(rows[:, 0]) >= 0).all()
    for step, places in enumerate(way.places(np.arange(9.0, 13), 25, draws(3)), 1):
        apart = np.linalg.norm(places[:, None] - places[None], axis=-1)
        near = [(a, b) for a, b in np.argwhere(apart <= 60).tolist() if a < b]
        assert [tuple(pair) for pair in rows[rows[:, 0] == step, 1:].tolist()] == near


def test_steps_of_those_who_are_down_drop_out():
    peers = Peers(network("complete,hops=2"), Faults.parse("fail=0.5"))
    contacts = peers.contacts(1, 20, 20, draws())
    up = len(contacts.participants)
    assert 0 < up < 20
    assert len(contacts.meetings) == up * (up - 1)
    assert set(contacts.meetings[:, 1:].ravel()) <= set(contacts.participants)


# -- the report -----------------------------------------------------------------------------------


def test_contacts_are_counted(in_tmp):
    trace = "0,0,1\n0,1,2\n1,0,1\n4,0,1\n5,3,2\n"
    (in_tmp / "t.csv").write_text(trace)
    report = ContactReport.of(Peers(network("trace:t.csv")), 5, 6)
    assert report.table["degree"].tolist() == [0.8, 0.4, 0, 0, 0.4, 0.4]
    assert report.table["isolated"].tolist() == [0.4, 0.6, 1, 1, 0.6, 0.6]
    assert report.table["contacts"].tolist() == [2, 1, 0, 0, 1, 1]
    assert report.table["components"].tolist() == [3, 4, 5, 5, 4, 4]
    assert report.gaps.tolist() == [3]  # 0 and 1 met in rounds 1 and 2, then in round 5
    assert report.met == 3 / 10


@pytest.mark.parametrize("text", ["waypoint,area=300", "ring", "grid"])
def test_a_network_is_drawn_as_a_strip_or_a_film(in_tmp, text):
    from PIL import Image

    from fedloom.report.topology_plot import save_film

    links = network(text)
    report = ContactReport.of(Peers(links, Faults.parse("fail=0.2")), 12, 3)
    save_film(report, links, 0, text, in_tmp / "strip.png")
    assert Image.open(in_tmp / "strip.png").size[0] > 1000
    save_film(report, links, 0, text, in_tmp / "film.gif")
    assert Image.open(in_tmp / "film.gif").n_frames == 3


def test_the_spreading_of_models_is_drawn_step_by_step(in_tmp):
    from fedloom.report.topology_plot import spread_strip
    from fedloom.topology.relay import spreading

    links = network("ring,hops=3")
    report = ContactReport.of(Peers(links), 9, 2)
    counts = {step: has.sum(1).tolist() for step, has in spreading(report.rounds[0])}
    assert counts == {step: [1 + 2 * step] * 9 for step in range(4)}
    figure = spread_strip(report, links, 0, 2, "a ring")
    maps = [axis.get_title() for axis in figure.subfigs[0].axes if axis.get_title()]
    assert maps == ["before", *(f"step {step}: 9 meetings" for step in (1, 2, 3))]
    shown = [axis.get_xlabel() for axis in figure.subfigs[0].axes if axis.get_xlabel()]
    assert shown == [f"{100 * (1 + 2 * step) / 9:.0f} % of all pairs" for step in range(4)]
    (curve,) = figure.subfigs[1].axes
    assert curve.lines[0].get_ydata().tolist() == [1, 3, 5, 7]


def test_a_round_without_meetings_is_drawn_too():
    from fedloom.report.topology_plot import spread_strip

    links = network("erdos-renyi:0")
    report = ContactReport.of(Peers(links, Faults.parse("fail=0.3")), 9, 1)
    figure = spread_strip(report, links, 0, 1, "nobody")
    assert len(figure.subfigs[0].axes) == 3
    there = len(report.rounds[0].participants)
    assert there < 9
    assert f"({there} of 9 nodes there)" in figure.get_suptitle()


def test_the_command_line_shows_a_network(in_tmp):
    from typer.testing import CliRunner

    from fedloom.cli import app

    shown = CliRunner().invoke(app, ["topology"])
    assert "erdos-renyi" in shown.output
    words = ["topology", "waypoint,area=300", "--clients", "10", "--rounds", "4", "--plot", "a.png"]
    shown = CliRunner().invoke(app, words)
    assert "isolated nodes" in shown.output
    assert (in_tmp / "a.png").exists()
    spread = CliRunner().invoke(app, [*words[:-2], "--spread", "b.png", "--round", "3"])
    assert "Picture: b.png" in spread.output
    assert (in_tmp / "b.png").exists()
    late = CliRunner().invoke(app, [*words[:-2], "--spread", "c.png", "--round", "9"])
    assert "There is no round 9 of 4" in str(late.exception)
    down = ["--faults", "fail=1,back=0.001", "--spread", "d.png"]
    assert "No node is up in round 1" in str(
        CliRunner().invoke(app, [*words[:-2], *down]).exception
    )
    wrong = CliRunner().invoke(app, [*words[:-1], "a.txt"])
    assert isinstance(wrong.exception, FedloomError)
    assert ".gif" in str(wrong.exception)
