"""What crosses the line: who may see what, how it is written, and what is let in."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml

import fedloom
from fedloom.errors import FedloomError
from fedloom.kinds import Array, Scalar, Weights
from fedloom.local import SGD, Back, LocalRule
from fedloom.method import Method
from fedloom.mix import Average, Mixed, PeerAverage
from fedloom.report.terminal import amount
from fedloom.round.attack import Attack
from fedloom.round.encode import choice, encoding, nbytes
from fedloom.round.plan import LATECOMERS
from fedloom.topology import Contacts, Peers, Star, network

HIDDEN = {"model_options": {"hidden": [16]}}
HEAD, BODY = 16 * 10 + 10, 64 * 16 + 16


# -- what a mix can see ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Spy(Average):
    """Averages the body, and tries to get at something on the way."""

    tries: object = None

    def combine(self, g):
        self.tries(g)
        return super().combine(g)


def spied(quick, tries, **parts):
    return quick(Method(mix=Spy("body", tries), **parts), rounds=1)


@pytest.mark.parametrize(
    ("tries", "told"),
    [
        (lambda g: g.layout.columns("head"), "'out.weight' stays with the clients"),
        (lambda g: g.layout.columns("out"), "'out.weight' stays with the clients"),
        (lambda g: g.sent["head"], "add it to `takes`"),
        (lambda g: g.state["velocity"], "add it to `keeps`"),
        (lambda g: g.memory["last"], "add it to `memory`"),
        (lambda g: g.classes, "add it to `needs`"),
        (lambda g: g.class_of, "add it to `needs`"),
        (lambda g: g.public, "add it to `needs`"),
        (lambda g: g.networks, "add it to `needs`"),
        (lambda g: g.accuracy, "add it to `needs`"),
        (lambda g: g.facts["capacity"], "add it to `needs`"),
    ],
)
def test_what_a_mix_does_not_declare_is_refused_in_a_sentence(quick, tries, told):
    with pytest.raises(FedloomError, match=told) as found:
        spied(quick, tries)
    assert "Spy" in str(found.value) or "stays with the clients" in str(found.value)


def test_private_columns_are_nowhere_in_what_a_mix_gets(quick):
    """Not in the rows, nor in the memory that they are views of, nor in anything else."""
    seen = []

    def look(g):
        seen.append(g)

    result = spied(quick, look)
    (g,) = seen
    heads = result.store.checkpoint()[0]["kept/rows"]
    assert heads.shape == (3, HEAD)
    assert g.rows.shape == (3, BODY)
    assert g.rows._base is None
    assert g.rows.untyped_storage().nbytes() == 3 * BODY * 4
    assert g.shared.shape == (BODY,)
    assert g.layout.size == BODY
    private = set(heads.flatten().tolist())
    for value in vars(g).values():
        if isinstance(value, torch.Tensor | np.ndarray):
            assert not private & set(np.asarray(value, dtype=np.float64).flatten().tolist()) - {0.0}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda g: Mixed(shared=torch.zeros(BODY + HEAD)), "the columns that were sent"),
        (lambda g: Mixed(state={"v": torch.zeros(1)}), "keeps 'v' without declaring it"),
        (lambda g: Mixed(memory={"v": {}}), "keeps 'v' without declaring it"),
        (lambda g: Mixed(shared=g.shared * torch.nan), "made NaN or infinite values"),
        (lambda g: Mixed(clients=g.clients, rows=torch.zeros(3, 5)), "the columns that were sent"),
    ],
)
def test_what_a_mix_returns_is_checked_in_one_place(quick, made, told):
    class Wrong(Average):
        def combine(self, g):
            return made(g)

    with pytest.raises(FedloomError, match=told):
        quick(Method(mix=Wrong("body")), rounds=1)


# -- what a rule declares -------------------------------------------------------------------------


class Counting(LocalRule):
    """Keeps how often it was asked, is told a number and sends one."""

    told: ClassVar = {"n": Scalar(2.0)}
    keeps: ClassVar = {"times": Scalar(), "classes": Array(dims=("classes",))}
    sends: ClassVar = {"sum": Scalar()}

    def finish(self, me, row, grad):
        times = me.kept["times"] + 1
        kept = {"times": times, "classes": me.kept["classes"] + torch.arange(10.0)}
        return Back(row, keeps=kept, sends={"sum": times * me.told["n"]})


class Adding(Average):
    keeps: ClassVar = {"n": Scalar(2.0)}
    takes: ClassVar = frozenset({"sum"})

    def combine(self, g):
        return Mixed(shared=super().combine(g).shared, state={"n": g.sent["sum"].sum()})


@pytest.mark.parametrize("engine", ["serial", "processes", "stacked"])
def test_named_values_go_round_on_every_engine(quick, engine):
    """Three of three clients, each told n: it is 2, then 3·1·2 = 6, then 3·2·6 = 36."""
    result = quick(Method(local=Counting(), mix=Adding()), clients=3, participation=1.0, rounds=2,
                   engine=engine, workers=2)  # fmt: skip
    state = result.store.checkpoint()[0]
    assert state["server/n"].item() == 36
    assert state["kept/rows"].tolist() == [[2, *(2.0 * i for i in range(10))]] * 3
    plain = quick("fedavg", clients=3, participation=1.0, rounds=2, engine=engine, workers=2)
    assert torch.equal(state["shared"], plain.store.checkpoint()[0]["shared"])
    # one number more, each way, and nothing of what is kept
    extra = result.summary["bytes_up"] - plain.summary["bytes_up"]
    assert extra == result.summary["bytes_down"] - plain.summary["bytes_down"] == 3 * 2 * 4
    assert result.model() is not None  # state that is no model makes nothing personal


def test_declared_state_survives_a_resume_to_the_bit(quick):
    toy = Method(local=Counting(), mix=Adding())
    whole = quick(toy, rounds=4)
    quick(toy, rounds=2, out="half")
    half = quick(toy, rounds=4, out="half", resume=True)
    for name, value in whole.store.checkpoint()[0].items():
        assert torch.equal(value, half.store.checkpoint()[0][name])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"local": Counting()}, "is told 'n', which nobody keeps"),
        ({"mix": Adding()}, "combines 'sum', which SGD does not send"),
        ({"local": type("Wants", (SGD,), {"needs": frozenset({"mood"})})()}, "Unknown fact"),
        ({"local": type("Wants", (SGD,), {"needs": frozenset({"last"})})()}, "not there for local"),
    ],
)
def test_words_that_do_not_fit_are_refused_before_anything_runs(parts, told):
    with pytest.raises(FedloomError, match=told):
        Method(**parts)


@pytest.mark.parametrize(
    ("back", "told"),
    [
        (lambda row: Back(row), "declares that it sends 'v' and did not hand it back"),
        (lambda row: Back(row, sends={"v": row[:3]}), "shape .3,.*declared as .1210,"),
        (lambda row: Back(row[:5], sends={"v": row[:1210]}), "handed back a model of 5 values"),
        (
            lambda row: Back(row, sends={"v": row[:1210], "w": row}),
            "sends 'w' without declaring it",
        ),
    ],
)
def test_what_a_rule_hands_back_is_checked_and_the_client_named(quick, back, told):
    class Sloppy(SGD):
        sends: ClassVar = {"v": Weights()}

        def finish(self, me, row, grad):
            return back(row)

    class Takes(Average):
        takes: ClassVar = frozenset({"v"})

    with pytest.raises(FedloomError, match=told) as found:
        quick(Method(local=Sloppy(), mix=Takes()), rounds=1, **HIDDEN)
    assert "client" in str(found.value)


def test_a_declaration_runs_as_it_is(quick, row):
    assert torch.equal(row(quick(fedloom.Method(local=SGD(), mix=Average()))), row(quick("fedavg")))


# -- how messages are written ---------------------------------------------------------------------


def test_encodings_cost_what_their_arrays_take():
    values = torch.linspace(-1, 1, 1000)
    sizes = {name: encoding(name).through(values)[1] for name in ("fp32", "fp16", "int8")}
    assert sizes == {"fp32": 4000, "fp16": 2000, "int8": 1000 + 4 * 4}
    assert encoding("topk:0.01").through(values)[1] == 10 * 8


@pytest.mark.parametrize(("name", "error"), [("fp32", 0), ("fp16", 1e-3), ("int8", 1 / 127)])
def test_encodings_lose_as_little_as_they_promise(name, error):
    values = torch.randn(700)
    arrived, _ = encoding(name).through(values)
    assert (arrived - values).abs().max() <= error * values.abs().max()
    assert torch.equal(encoding(name).through(torch.zeros(5))[0], torch.zeros(5))


@pytest.mark.parametrize("spec", ["fp8", "topk", "topk:0", "topk:2", "topk:x", "int8:3", ""])
def test_wrong_encodings_are_refused(quick, spec):
    with pytest.raises(FedloomError, match="not an encoding"):
        quick(encode=spec)


def test_rounding_does_not_choose_among_changes_that_are_alike():
    """Of five that are equal but for rounding the first two are sent, whoever is largest."""
    largest = torch.tensor([0.3, 0.1, 0.1, 0.1, 0.1, 0.1])
    for bump in range(1, 6):
        values = largest.clone()
        values[bump] += 1e-8
        assert encoding("topk:0.5").encode(values)["at"].tolist() == [0, 1, 2]
    different = torch.tensor([0.3, 0.1, 0.1, 0.1, 0.102, 0.1])
    assert encoding("topk:0.5").encode(different)["at"].tolist() == [0, 1, 4]


def test_at_the_edge_of_a_rank_rounding_does_choose():
    """No rule without a threshold: that is why engines that round differently may differ here."""
    edge = 1 + 2**-8  # halfway between two values of bfloat16
    chosen = [encoding("topk:0.5").encode(torch.tensor([1.0, edge + e]))["at"].tolist()
              for e in (-1e-6, 1e-6)]  # fmt: skip
    assert chosen == [[0], [1]]


def test_topk_hides_nothing_that_is_not_a_number():
    values = torch.tensor([1.0, torch.nan, 2.0, torch.inf, torch.nan])
    assert encoding("topk:0.4").encode(values)["at"].tolist() == [1, 3]
    assert torch.isnan(encoding("topk:0.2").through(values)[0]).any()


def test_what_topk_leaves_out_is_sent_later(quick):
    """With a rate of zero from round 2 on, the rest of round 1 arrives bit by bit."""
    settings = {"clients": 1, "participation": 1.0, "lr_schedule": "step:1,1e-20"}
    wanted = quick(rounds=1, **settings).store.checkpoint()[0]["shared"]
    start = quick(rounds=1, clients=1, participation=1.0, lr=1e-30).store.checkpoint()[0]["shared"]
    far = []
    for rounds in (1, 4, 8):
        result = quick(rounds=rounds, encode="topk:0.125", **settings)
        state = result.store.checkpoint()[0]
        far.append(float((state["shared"] - wanted).norm()))
        assert "lost/rows" in state
    assert 0.9 * float((start - wanted).norm()) > far[0] > far[1] > far[2]
    assert far[2] < 1e-4


@pytest.mark.parametrize("method", ["fedavg", "fedper", "scaffold", "heterofl", "fedsgd"])
@pytest.mark.parametrize("encode", ["fp16", "int8", "topk:0.2"])
def test_any_method_can_be_compressed(quick, method, encode):
    settings = {"rounds": 6, "clients": 4, "participation": 1.0}
    if method == "heterofl":
        settings["capacities"] = "1:0.5,0.5:0.5"
    plain = quick(method, **settings)
    small = quick(method, encode=encode, **settings)
    beside = 2 if method == "scaffold" and encode.startswith("topk") else 1
    assert small.summary["bytes_up"] < plain.summary["bytes_up"] * (0.52 if beside == 1 else 0.75)
    a, b = (r.rounds["train_loss"].iloc[-1] for r in (plain, small))
    assert b < plain.rounds["train_loss"].iloc[0]
    assert abs(a - b) < 0.35


def test_a_compressed_run_resumes_to_the_bit(quick):
    whole = quick(encode="topk:0.1", rounds=4)
    quick(encode="topk:0.1", rounds=2, out="half")
    half = quick(encode="topk:0.1", rounds=4, out="half", resume=True)
    for name, value in whole.store.checkpoint()[0].items():
        assert torch.equal(value, half.store.checkpoint()[0][name])


def test_nodes_have_nothing_to_send_changes_of(quick):
    with pytest.raises(FedloomError, match="has its own model"):
        quick("p2p-fedavg", encode="topk:0.1", participation=1.0)
    full, half = (quick("p2p-fedavg", encode=e, participation=1.0, topology="ring")
                  for e in ("fp32", "fp16"))  # fmt: skip
    assert half.summary["bytes_up"] * 2 == full.summary["bytes_up"]


# -- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["norm", "norm:0", "norm:-1", "norm:x", "size:3", "norm:infx"])
def test_wrong_screens_are_refused(quick, spec):
    with pytest.raises(FedloomError, match="screen="):
        quick(screen=spec)


@pytest.mark.parametrize("spec", ["scale", "scale:x", "nan:3", "noise,share=2", "noise,who=1", "x"])
def test_wrong_attacks_are_refused(quick, spec):
    with pytest.raises(FedloomError, match="not an attack"):
        quick(attack=spec)


def culprit(clients=6, share=0.05, seed=0):
    (bad,) = Attack(share=share).bad(clients, seed)
    return int(bad)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedswap", "p2p-fedavg"])
def test_a_message_of_nan_stops_the_run_and_names_the_client(quick, method):
    more = {"topology": "complete"} if method == "p2p-fedavg" else {}
    with pytest.raises(FedloomError, match=f"client {culprit()} "):
        quick(method, attack="nan", participation=1.0, **more)


def test_a_huge_value_that_overflows_only_later_is_still_put_down_to_its_sender(quick):
    """Each value fits a float, but not what a server step makes of it."""
    with pytest.raises(FedloomError, match=f"from client {culprit()}"):
        quick("fedavgm:server_lr=1e20", attack="scale:1e30", participation=1.0, rounds=1)


def test_a_bounded_norm_stops_the_run_with_the_reason(quick):
    with pytest.raises(FedloomError, match=rf"client {culprit()} .* times the median"):
        quick(attack="scale:-20", screen="norm:10x", participation=1.0)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedswap", "p2p-fedavg"])
@pytest.mark.parametrize("attack", ["scale:-20", "scale:1e6", "nan"])
def test_skipped_clients_are_recorded_and_do_no_harm(quick, method, attack):
    settings = {"clients": 10, "participation": 1.0, "rounds": 6, "eval_every": 6, "lr": 0.1}
    if method == "p2p-fedavg":
        settings["topology"] = "complete"
    honest = quick(method, **settings)
    found = quick(method, attack=attack, screen="norm:10x", on_bad="skip", **settings)
    bad = str(culprit(10))
    assert all(list(r["skipped"]) == [bad] for r in found.records if "skipped" in r)
    assert "skipped" in found.records[0]
    assert set(found.skipped["client"]) == {int(bad)}
    assert found.summary["micro"] > honest.summary["micro"] - 0.1
    assert np.isfinite(found.rounds["train_loss"]).all()


def test_without_a_screen_one_bad_client_spoils_the_average(quick):
    settings = {"clients": 10, "participation": 1.0, "rounds": 6, "eval_every": 6, "lr": 0.1}
    honest = quick(**settings)
    spoilt = quick(attack="scale:-20", **settings)
    assert spoilt.summary["micro"] < honest.summary["micro"] - 0.2


def test_a_screen_lets_everybody_in_who_is_as_usual(quick, row):
    assert torch.equal(row(quick(screen="norm:10x")), row(quick()))


# -- the manifest ---------------------------------------------------------------------------------


def test_the_manifest_in_the_folder_counts_the_bytes_of_the_messages(quick):
    result = quick("scaffold", rounds=1)
    manifest = yaml.safe_load((result.path / "manifest.yaml").read_text())
    leaves = manifest["leaves a client, each round"]
    assert [line["name"] for line in leaves] == ["model", "dc", "samples, steps"]
    assert sum(line.get("bytes", 0) for line in leaves) * 3 == result.summary["bytes_up"]
    told = manifest["a client is told, each round"]
    assert sum(line.get("bytes", 0) for line in told) * 3 == result.summary["bytes_down"]
    kept = {line["name"]: line for line in manifest["stays with a client"]}
    assert kept["ci"]["bytes"] == 4 * (BODY + HEAD)


@pytest.mark.parametrize("encode", ["fp16", "int8", "topk:0.1"])
@pytest.mark.parametrize("method", ["scaffold", "fedper", "fedsgd"])
def test_the_manifest_has_the_bytes_of_the_runs_encoding_and_what_it_owes(quick, method, encode):
    result = quick(method, rounds=1, encode=encode, participation=1.0)
    manifest = yaml.safe_load((result.path / "manifest.yaml").read_text())
    leaves, told = manifest["leaves a client, each round"], manifest["a client is told, each round"]
    once = [line for line in leaves if line["name"] == "private part"]
    sums = [sum(line.get("bytes", 0) for line in lines if line not in once)
            for lines in (leaves, told)]  # fmt: skip
    assert [6 * n for n in sums] == [result.summary[way] for way in ("bytes_up", "bytes_down")]
    stays = {line["name"]: line.get("bytes") for line in manifest["stays with a client"]}
    owes = result.store.checkpoint()[0].get("lost/rows")
    assert stays.get("rest") == (None if owes is None else 4 * owes.shape[1])
    assert (owes is None) == (encode == "fp16")


def test_methods_are_shown_with_the_bytes_of_an_encoding(monkeypatch):
    from typer.testing import CliRunner

    from fedloom.cli import app
    from fedloom.report import terminal

    monkeypatch.setattr(terminal.out, "width", 140)

    def show(encode):
        return CliRunner().invoke(app, ["methods", "fedavg", "--model", "mlp", "--encode", encode])

    size = 784 * 100 + 100 + 100 * 10 + 10
    for encode in ("fp32", "fp16", "int8", "topk:0.01"):
        text = " ".join(show(encode).output.split())
        sent = amount(encoding(encode).size(size))
        assert f"bytes (mlp, 1x28x28, {encode})" in text
        assert f"the whole model {sent} samples, steps" in text
        assert ("what the encoding left out" in text) == (encode in ("int8", "topk:0.01"))
    assert isinstance(show("fp8").exception, FedloomError)


def test_the_manifest_says_when_private_parts_leave_for_newcomers():
    from fedloom.experiment.blueprint import manifest
    from fedloom.methods.registry import find

    leaves = {
        name: [line.name for line in manifest(find(name), {}, "mlp", (1, 8, 8), 10).leaves]
        for name in ("fedper", "fedavg", "fedmeta-per-maml", "ditto")
    }
    assert "private part" in leaves["fedper"]
    assert "private part" in leaves["fedmeta-per-maml"]
    assert "private part" not in leaves["fedavg"] + leaves["ditto"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"participation": 1.0}, None),
     ({"participation": 0.5}, f"{LATECOMERS} (MeanPart)"),
     ({"participation": 1.0, "newcomers": 2}, "once, for newcomers (MeanPart)")],
)  # fmt: skip
def test_a_runs_manifest_names_private_parts_only_if_they_leave(quick, settings, why):
    manifest = yaml.safe_load((quick("fedper", **settings).path / "manifest.yaml").read_text())
    leaves = {line["name"]: line["what"] for line in manifest["leaves a client, each round"]}
    assert leaves.get("private part") == why


def test_the_manifest_calls_values_by_their_kind():
    from fedloom.kinds import Array, Model, PerClass, Scalar, Weights
    from fedloom.round.plan import _kind

    kinds = (Scalar(), PerClass(), Array(dims=("public", 3)), Weights(), Model())
    assert [_kind(kind) for kind in kinds] == [
        "one number", "one number per class", "an array of shape public × 3",
        "a vector like the weights", "a whole model",
    ]  # fmt: skip


# -- facts of clients -----------------------------------------------------------------------------


def test_participants_are_drawn_by_capacity_in_every_round(quick):
    result = quick("heterofl", clients=12, participation=6, rounds=8, draw="capacity",
                   capacities="1:0.5,0.25:0.5")  # fmt: skip
    capacity = result.clients.drop_duplicates("client").set_index("client")["capacity"]
    for record in result.records:
        assert sum(capacity[c] == 1 for c in record["participants"]) == 3
    assert len({tuple(r["participants"]) for r in result.records}) > 1


@pytest.mark.parametrize("by", ["samples", "speed"])
def test_participants_are_drawn_more_often_the_more_of_it_they_have(quick, by):
    more = {"speeds": "1:0.5,0.05:0.5"} if by == "speed" else {}
    result = quick(clients=10, participation=2, rounds=40, eval_every=40, draw=by, steps=1,
                   partition="quantity:zipf", **more)  # fmt: skip
    took = np.bincount(np.concatenate([r["participants"] for r in result.records]), minlength=10)
    if by == "samples":
        weight = result.clients.set_index("client")["train_samples"].reindex(range(10)).to_numpy()
    else:
        from fedloom.experiment.capacities import Capacities

        weight = Capacities.parse("1:0.5,0.05:0.5").assign(10, 0)
    assert np.corrcoef(took, weight)[0, 1] > 0.7


def test_facts_that_nobody_asks_for_are_refused(quick):
    with pytest.raises(FedloomError, match="speeds only matter"):
        quick(speeds="1:0.5,0.5:0.5")


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("p2p-fedavg", {"draw": "samples", "participation": 1.0}, "no server to draw"),
        ("centralised", {"draw": "samples"}, "no server to draw"),
        ("fedavg", {"draw": "samples", "participation": 1.0}, "all clients take part"),
        ("fedavg", {"draw": "capacity"}, "the same capacity"),
        ("heterofl", {"draw": "capacity", "capacities": "0.5"}, "the same capacity"),
        ("fedavg", {"draw": "speed"}, "the same speed"),
        ("fedavg", {"draw": "speed", "speeds": "1:0.99,0.5:0.01"}, "the same speed"),
        ("fedavg", {"draw": "samples", "partition": "index"}, "equally many samples"),
    ],
)
def test_a_draw_that_would_change_nothing_is_refused_with_the_reason(quick, method, settings, why):
    if settings.get("partition") == "index":
        settings = {**settings, "partition": [np.arange(i, 600, 6) for i in range(6)]}
    with pytest.raises(FedloomError, match=f"draw=.* would do nothing.*{why}.*Leave draw out"):
        quick(method, **settings)


def test_whole_models_can_be_drawn_by_capacity_as_sub_models_are(quick):
    """So participants of a comparison are the same, and the clients of FedAvg train all of it."""
    settings = {"draw": "capacity", "capacities": "1:0.5,0.25:0.5", "rounds": 4}
    parts, whole = (quick(method, **settings) for method in ("heterofl", "fedavg"))
    drawn = [[r["participants"] for r in result.records] for result in (parts, whole)]
    assert drawn[0] == drawn[1]
    plain = quick("fedavg", rounds=4)
    assert whole.summary["bytes_up"] == plain.summary["bytes_up"]
    assert whole.devices.empty
    with pytest.raises(FedloomError, match=r"capacities=0\.5,1 would do nothing with fedavg"):
        quick("fedavg", capacities="0.5,1")


@pytest.mark.parametrize("method", ["local", "centralised", "fedper:private=all"])
@pytest.mark.parametrize(
    "setting", [{"encode": "fp16"}, {"screen": "norm:3"}, {"attack": "nan"}], ids=str
)
def test_settings_of_messages_are_refused_where_none_are_sent(quick, method, setting):
    ((key, value),) = setting.items()
    told = f"{key}={value} would do nothing with .*: no messages are sent. Leave {key} out"
    with pytest.raises(FedloomError, match=told):
        quick(method, **setting)


def test_training_that_diverges_can_be_left_out_where_nothing_is_sent(quick):
    with pytest.raises(FedloomError, match="diverged"):
        quick("local", lr=1e20)
    with pytest.warns(UserWarning, match="All messages of round 1"):
        result = quick("local", lr=1e20, on_bad="skip")
    assert set(result.skipped["reason"]) == {"its training diverged"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"encode": "fp16"}, "encode=fp32, not fp16 as asked (no messages are sent)"),
        ({"screen": "norm:3"}, "screen=none, not norm:3 as asked (no messages are sent)"),
        ({"attack": "scale:-2"}, "attack=none, not scale:-2 as asked (no messages are sent)"),
        (
            {"draw": "speed", "speeds": "1,0.5"},
            "draw=uniform, not speed as asked (there is no server to draw participants)",
        ),
    ],
)
def test_a_comparison_notes_what_does_not_concern_a_method(in_tmp, settings, told):
    comparison = fedloom.compare(["fedavg", "centralised"], seeds=1, clients=4, rounds=1,
                                 participation=0.5, **settings)  # fmt: skip
    assert told in comparison.differences["centralised"]
    ((key, value), *_) = settings.items()
    assert comparison.results["fedavg"][0].config[key] == value
    with pytest.raises(FedloomError, match="would do nothing"):
        fedloom.compare(["centralised"], seeds=1, clients=4, rounds=1, **settings)


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ("2", "speeds='2' is not valid.* with speeds R above 0 .* client and speed"),
        ("rho:1", "speeds='rho:1' is not valid"),
        ("1:0.5,0.5", "speeds='1:0.5,0.5' is not valid"),
        ("none.csv", "no file 'none.csv' with speeds"),
        ("strong.csv", "can't be read as speeds .*'client,speed'"),
        ("wrong.csv", "gives client 1 a speed of 3"),
        ("short.csv", "The file of speeds has 2 clients, the run 6"),
    ],
)
def test_errors_about_speeds_speak_of_speeds(quick, in_tmp, speeds, told):
    for name, text in {
        "strong": "client,capacity\n0,1",
        "wrong": "client,speed\n0,1\n1,3",
        "short": "client,speed\n0,1\n1,0.5",
    }.items():
        (in_tmp / f"{name}.csv").write_text(text)
    with pytest.raises(FedloomError, match=told) as found:
        quick(draw="speed", speeds=speeds)
    assert "apacit" not in str(found.value)


class Oldest(Star):
    """Those who have not been there for longest."""

    needs = frozenset({"seen"})

    def contacts(self, round, clients, participants, stream, facts):
        return Contacts(np.sort(np.argsort(facts["seen"], kind="stable")[:participants]))


def test_a_topology_may_ask_when_clients_were_last_seen(quick):
    toy = Method(topology=Oldest())
    whole = quick(toy, rounds=4)
    assert [r["participants"] for r in whole.records] == [[0, 1, 2], [3, 4, 5]] * 2
    quick(toy, rounds=3, out="half")
    half = quick(toy, rounds=4, out="half", resume=True)
    assert half.records[-1]["participants"] == [3, 4, 5]


def test_a_topology_that_reads_what_it_does_not_declare_is_told_the_word(quick):
    curious = type("Curious", (Oldest,), {"needs": frozenset({"samples"})})()
    with pytest.raises(FedloomError, match=r"Curious reads 'seen'.*`needs`"):
        quick(Method(topology=curious), rounds=1)


def test_a_rule_that_reads_what_it_does_not_declare_is_told_the_word(quick):
    class Curious(SGD):
        def direction(self, grad, weights, me):
            return grad + me.told["c"]

    with pytest.raises(FedloomError, match=r"Curious reads 'c'.*`told`"):
        quick(Method(local=Curious()), rounds=1)


def test_a_mix_that_writes_in_place_changes_nothing_but_its_copy(quick, row):
    class Vandal(Average):
        keeps: ClassVar = {"v": Scalar(3.0)}

        def combine(self, g):
            out = super().combine(g)
            g.shared.zero_()
            g.state["v"].zero_()
            return out

    result = quick(Method(mix=Vandal()))
    assert torch.equal(row(result), row(quick("fedavg")))
    assert result.store.checkpoint()[0]["server/v"].item() == 3


def test_values_like_the_weights_are_billed_as_the_sub_model_has_them(quick):
    from fedloom.local import Controlled
    from fedloom.mix import ControlledAverage
    from fedloom.select import Ordered

    method = Method(local=Controlled(), mix=ControlledAverage(), select=Ordered())
    double = quick(method, capacities="0.5", rounds=1)
    plain = quick("heterofl", capacities="0.5", rounds=1)
    assert double.summary["bytes_up"] == 2 * plain.summary["bytes_up"]
    assert double.summary["bytes_down"] == 2 * plain.summary["bytes_down"]


def test_a_choice_of_channels_costs_a_bitmap_or_numbers_whichever_is_smaller():
    def size(chosen, of):
        return nbytes(choice([np.arange(chosen)], [of]))

    assert size(3, 16) == 2  # 16 bits, or 3 numbers
    assert size(1, 16) == 1
    assert size(5, 100) == 5
    assert size(50, 100) == 13
    assert size(3, 1000) == 6  # numbers of two bytes
    assert nbytes(choice([np.arange(2), np.arange(4)], [4, 8])) == 2


@pytest.mark.parametrize(
    ("method", "more", "up", "down"),
    [
        ("feddse", {}, 2, 0),  # chosen by the client: of 16 channels, a bit each
        ("heterofl", {}, 0, 0),  # always the first
        ("fedrolex", {"encode": "int8"}, 0, 0),  # by the round
        ("federated-dropout", {}, 0, 0),  # the server knows what it sent
        ("federated-dropout", {"encode": "int8"}, 0, 2),  # the client keeps a rest, by channel
        ("federated-dropout", {"optimiser_state": "kept", "momentum": 0.5}, 0, 2),
        ("feddse", {"encode": "int8"}, 2, 0),
    ],
)
def test_a_choice_of_channels_is_billed_to_those_who_can_not_know_it(quick, method, more, up, down):
    settings = {"capacities": "0.5", "rounds": 1, "participation": 1.0}
    ordered = quick("heterofl", **settings, **({"encode": "int8"} if "encode" in more else {}))
    found = quick(method, **settings, **more)
    assert found.summary["bytes_up"] - ordered.summary["bytes_up"] == 6 * up
    whole = 4 * (BODY + HEAD) if method == "feddse" else None
    asked = ordered.summary["bytes_down"] if whole is None else 6 * whole
    assert found.summary["bytes_down"] - asked == 6 * down
    words = (found.path / "manifest.yaml").read_text()
    assert ("name: choice" in words) == bool(up or down)


def test_nodes_tell_each_other_which_part_they_trained(quick):
    """Three of six train columns of an MLP, no channels: a bit each, to each of two neighbours."""
    from test_contract import Half

    def paid(follows):
        half = type("Part", (Half,), {"follows": follows})()
        toy = Method(mix=PeerAverage(), select=half, topology=Peers(network("ring")))
        return quick(toy, rounds=1, participation=1.0).summary["bytes_up"]

    assert paid(False) - paid(True) == pytest.approx(3 * 2 * -(-(BODY + HEAD) // 8), abs=6)


@pytest.mark.parametrize("first", ["initial", "mean"])
def test_what_a_private_part_first_starts_from_is_a_choice(quick, first):
    """One client a round, and from the second round on a rate of nothing: later ones keep what they
    started from, which is the part of the first or their initial values."""
    result = quick(f"fedper:first={first}", clients=3, participation=0.34, rounds=10, lr=0.1,
                   lr_schedule="step:1,1e-20")  # fmt: skip
    state = result.store.checkpoint()[0]
    assert state["kept/clients"].tolist() == [0, 1, 2]
    alike = [torch.allclose(head, state["kept/rows"][0], atol=1e-6) for head in state["kept/rows"]]
    assert all(alike) == (first == "mean")


def test_private_parts_that_travel_are_billed(quick):
    """Up with every message, down to those who take part for the first time after others have."""
    settings = {"clients": 3, "participation": 0.34, "rounds": 10}
    stay, travel = (quick(f"fedper:first={first}", **settings) for first in ("initial", "mean"))
    assert [r["participants"] for r in stay.records] == [r["participants"] for r in travel.records]
    up = travel.rounds["bytes_up"] - stay.rounds["bytes_up"]
    down = travel.rounds["bytes_down"] - stay.rounds["bytes_down"]
    assert up.tolist() == [4 * HEAD] * 10
    seen, expected = set(), []
    for (client,) in (r["participants"] for r in travel.records):
        expected.append(4 * HEAD if seen and client not in seen else 0)
        seen.add(client)
    assert down.tolist() == expected
    assert sum(expected) == 2 * 4 * HEAD


@pytest.mark.parametrize("attack", ["nan", "scale:1e6"])
def test_bad_clients_spoil_what_they_send_beside_the_model_too(quick, attack):
    settings = {"public": "share:0.1", "participation": 1.0, "rounds": 1, "attack": attack}
    if attack == "nan":
        with pytest.raises(FedloomError, match=f"client {culprit()} "):
            quick("ds-fl", **settings)
        return
    honest = quick("ds-fl", **{**settings, "attack": "none"})
    spoilt = quick("ds-fl", **settings)
    targets = [r.store.checkpoint()[0]["server/targets"] for r in (honest, spoilt)]
    assert not torch.equal(*targets)


@pytest.mark.parametrize("method", ["scaffold", "fednova", "fedsgd"])
def test_methods_that_count_on_plain_steps_refuse_other_optimisers(quick, method):
    with pytest.raises(FedloomError, match="fixes optimiser to sgd"):
        quick(method, optimiser="adam")


def test_the_device_table_counts_parameters_of_the_model_only(quick):
    settings = {"capacities": "1:0.5,0.5:0.5", "rounds": 1, "participation": 1.0, "momentum": 0.5}
    fresh, kept = (quick("heterofl", optimiser_state=s, **settings) for s in ("fresh", "kept"))
    assert fresh.devices["parameters"].tolist() == kept.devices["parameters"].tolist()
