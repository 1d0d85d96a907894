"""Methods together: one of every family with one of every other runs, or is refused with a sentence
that says why. `docs/compositions.md` is made of what happened here; `python
tests/test_compositions.py` writes it anew."""

import os
import tempfile
import warnings
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.method import Method
from fedloom.methods.compose import together
from fedloom.methods.registry import find, methods
from fedloom.mix import Average, Coverage
from fedloom.models import build
from fedloom.select import Channels, Ordered

PAGE = Path(__file__).parent.parent / "docs" / "compositions.md"
#: one of each family
FAMILIES = {
    "reference": "local", "classic": "fedprox", "server optimiser": "fedavgm",
    "personal": "fedper", "meta": "fedmeta-maml", "personal + meta": "fedmeta-per-maml",
    "meta baseline": "fedavg-meta", "swap": "fedswap", "distillation": "ds-fl",
    "sub-models": "heterofl", "serverless": "p2p-fedavg",
}  # fmt: skip
PAIRS = list(combinations(FAMILIES.values(), 2))
HEAD = """# Compositions

`fedloom run A+B` is one method with every choice in which A or B differs from FedAvg: who talks to
whom, which part of the model a client trains, how it learns, how models are combined, what happens
before scoring. The options of both can be set; an option that both have is shared. The table
combines one method of every family with one of every other; each pair runs for a round on the
digits in `tests/test_compositions.py`, which generates this page. ✓ runs; a number is the reason
below.

    fedloom run heterofl+fedper --capacities high-quality
    fedloom run fedrolex+fedprox --set mu=0.1 --capacities 1:0.5,0.25:0.5
    fedloom run heterofl+fedmeta-maml --capacities 1:0.5,0.5:0.5
    fedloom run heterofl+p2p-fedavg --topology ring --capacities 1:0.5,0.5:0.5
    fedloom run fedswap+fedper

Three or more combine as well (`fedrolex+fedper+fedprox`). Sub-model methods also have private parts
and FedProx's term as options (`--set private=head --set mu=0.1`), and FedSwap has private parts.
"""


def settings(*names):
    out = {"clients": 4, "partition": "iid", "rounds": 1, "steps": 2, "eval_every": 1,
           "model": "mlp", "model_options": {"hidden": [8]}, "engine": "serial",
           "eval_clients": 2}  # fmt: skip
    if "heterofl" in names:
        out["capacities"] = "1:0.5,0.5:0.5"
    if "p2p-fedavg" in names and "local" not in names:
        out["topology"] = "ring"
    if "ds-fl" in names:
        out["public"] = "share:0.1"
    return out


def outcome(first, second):
    """ "" if it runs, else the sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fedloom.run(f"{first}+{second}", **settings(first, second))
    except FedloomError as e:
        return str(e).removeprefix(f"{first}+{second} can't be combined: ")
    assert np.isfinite(result.summary["macro"])
    return ""


def page(found):
    names = list(FAMILIES.values())
    reasons = list(dict.fromkeys(text for text in found.values() if text))
    lines = ["| | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for first in names:
        cells = []
        for second in names:
            text = found.get((first, second), found.get((second, first)))
            cells.append("" if text is None else str(reasons.index(text) + 1) if text else "✓")
        lines.append(f"| **{first}** | " + " | ".join(cells) + " |")
    notes = [f"{i}. {text}" for i, text in enumerate(reasons, 1)]
    return "\n".join([HEAD, *lines, "", *notes, ""])


def test_every_family_with_every_other_runs_or_says_why_not(in_tmp):
    """And the page says what is so."""
    assert set(FAMILIES) == {m.family for m in methods().values()}
    found = {pair: outcome(*pair) for pair in PAIRS}
    assert all(text == "" or text.endswith(".") for text in found.values())
    assert PAGE.read_text() == page(found), "run python tests/test_compositions.py"


def test_options_of_sub_models_are_the_compositions(quick, row):
    settings = {"capacities": "1:0.5,0.5:0.5", "rounds": 2, "participation": 1.0, "clients": 4}
    by_option = quick("fedrolex", mu=0.1, private="head", **settings)
    together = quick("fedrolex+fedprox+fedper", **settings)
    assert torch.equal(row(by_option), row(together))
    assert not torch.equal(row(by_option), row(quick("fedrolex", private="head", **settings)))
    without = quick("fedrolex+fedprox", mu=0.0, **settings)
    assert torch.equal(row(without), row(quick("fedrolex", **settings)))


def test_at_full_capacity_sub_models_with_private_heads_are_fedper(quick, row):
    mine, plain = quick("heterofl", private="head"), quick("fedper")
    assert torch.equal(row(mine), row(plain))
    kept = [r.store.checkpoint()[0]["kept/rows"] for r in (mine, plain)]
    assert torch.equal(*kept)


def test_a_weak_clients_private_head_stays_with_it(quick):
    """Of the head it trains the columns of its channels; nothing of it leaves."""
    result = quick("heterofl", private="head", capacities="0.5", rounds=1, participation=1.0,
                   clients=2)  # fmt: skip
    start = build("mlp", (1, 8, 8), 10, options={"hidden": [16]})
    shared = result.store.checkpoint()[0]["shared"]
    head = Layout.of(start).columns("head")
    assert torch.equal(head.take(shared), head.take(Layout.of(start).flatten(start)))
    mine = result.model(client=0)
    assert not torch.equal(mine.out.weight[:, :8], start.out.weight[:, :8])
    assert torch.equal(mine.out.weight[:, 8:], start.out.weight[:, 8:])
    assert [g.size for g in Channels.of(mine, (1, 8, 8)).groups] == [16]


def test_fedswap_keeps_private_heads(quick):
    settings = {"clients": 4, "rounds": 1, "participation": 1.0, "average_every": 5}
    swapped = quick("fedswap", private="head", **settings)
    alone = quick("local", clients=4, rounds=1, participation=1.0)
    for client in range(4):
        mine, other = swapped.model(client=client), alone.model(client=client)
        assert torch.equal(mine.out.weight, other.out.weight)
    bodies = {tuple(swapped.model(client=c).hidden[0].bias.tolist()) for c in range(4)}
    assert bodies == {tuple(alone.model(client=c).hidden[0].bias.tolist()) for c in range(4)}
    assert any(not torch.equal(swapped.model(client=c).hidden[0].bias,
                               alone.model(client=c).hidden[0].bias) for c in range(4))  # fmt: skip
    with pytest.raises(FedloomError, match="never sees the private part"):
        find("fedswap")(partner="min", private="head")


def test_the_defaults_of_the_last_named_method_count():
    assert find("heterofl+fedprox")().mu == 0.1
    assert find("fedprox+heterofl")().mu == 0.0
    method = find("heterofl+fedper")().build()
    assert method.mix == Coverage("not head")
    assert isinstance(method.select, Ordered)


def test_nonsense_names_are_refused():
    with pytest.raises(FedloomError, match="fedper twice"):
        find("fedper+fedper")
    with pytest.raises(FedloomError, match="fedpear"):
        find("heterofl+fedpear")


def test_fedavg_with_anything_is_that():
    for name in FAMILIES.values():
        plain, words = find(name)().build(), [f.name for f in fields(Method)]
        for both in ((plain, Method()), (Method(), plain)):
            made = together(*both)
            for word in words:
                mine, other = getattr(made, word), getattr(plain, word)
                assert type(mine) is type(other), word
                assert word == "newcomer" or mine == other
    assert together(Method(), Method()).mix == Average()
    kept = together(find("fedrolex")(private="head").build(), find("fedprox")().build())
    assert type(kept.newcomer).__name__ == "MeanPart"


# -- what a weak client can hold ------------------------------------------------------------------


def test_a_weak_client_is_scored_with_what_it_can_hold(quick):
    """Half of the hidden units, scaled as in training, on its own test images."""
    result = quick("heterofl", capacities="1:0.5,0.5:0.5", clients=4, rounds=2, participation=1.0)
    table = result.clients[result.clients["round"] == 2].set_index("client")
    module, data = result.model(), fedloom.data.catalog.load("digits")
    federation = _federation(result)
    for client, line in table.iterrows():
        at = federation.indices(int(client), "test")
        x = torch.as_tensor(result.normalise(data.x[at]))
        k, scale = (8, 2.0) if line["capacity"] < 1 else (16, 1.0)
        hidden = torch.relu(scale * module.hidden[0](x.flatten(1)))[:, :k]
        logits = hidden @ module.out.weight[:, :k].T + module.out.bias
        right = (logits.argmax(1).numpy() == data.y[at]).mean()
        assert line["capacity_accuracy"] == pytest.approx(right)
    groups = result.records[-1]["clients"]["groups"]
    assert groups["1"]["capacity_accuracy"] == groups["1"]["macro"]
    assert result.devices["capacity_accuracy"].notna().all()


def _federation(result):
    from fedloom.experiment.config import make_config
    from fedloom.experiment.setup import load_dataset, make_federation

    config, _ = make_config(result.config, find(result.config["method"]))
    return make_federation(config, load_dataset(config))


@pytest.mark.filterwarnings("ignore:Capacities")  # depthfl: few blocks
@pytest.mark.parametrize("method", ["fedgse-csl", "depthfl"])
def test_engines_agree_on_what_weak_clients_can_do(quick, method):
    settings = {"capacities": "1,0.5,0.25", "clients": 4, "rounds": 1, "participation": 1.0,
                "public": "share:0.2" if method == "fedgse-csl" else "none"}  # fmt: skip
    if method == "depthfl":
        settings |= {"model": "conv4", "model_options": {"channels": [4, 4, 4, 8]}}
    tables = [quick(method, **settings, engine=e).clients for e in ("serial", "processes")]
    assert np.array_equal(*(t["capacity_accuracy"].to_numpy() for t in tables))
    assert not np.array_equal(tables[0]["capacity_accuracy"], tables[0]["accuracy"])


def test_whoever_can_train_all_has_no_second_score(quick):
    assert "capacity_accuracy" not in quick("heterofl", rounds=1).clients
    assert "capacity_accuracy" not in quick("fedavg", rounds=1).clients


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(page({pair: outcome(*pair) for pair in PAIRS}))
