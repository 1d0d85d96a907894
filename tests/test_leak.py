"""Which samples are read when: nobody learns from, or is chosen by, what it is scored on."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedloom.data.dataset import from_arrays
from fedloom.data.images import positions
from fedloom.data.split import federate
from fedloom.engine import Engine, Scored
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import make_federation
from fedloom.methods.feddom import FedDom
from fedloom.mix import DominatingSet
from fedloom.models.nets import MLP


class Watched:
    """Images that note which of them are read."""

    def __init__(self, x):
        self._x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, set()

    def __len__(self):
        return len(self._x)

    def __getitem__(self, index):
        at = positions(index, len(self))
        self.read.update(at.tolist())
        return self._x[at]


def data(n=240):
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = rng.normal(size=(n, 1, 4, 4)).astype(np.float32) + y[:, None, None, None]
    made = from_arrays(x, y, x[:30], y[:30])
    return replace(made, x=Watched(made.x))


@pytest.fixture
def watched(quick, monkeypatch):
    """A small run, the samples that each call of its engine read, and who holds them."""

    def run(method, **settings):
        given, calls = data(), []

        def noting(name):
            plain = getattr(Engine, name)

            def call(self, *words, **more):
                given.x.read.clear()
                out = plain(self, *words, **more)
                calls.append((name, words, set(given.x.read)))
                return out

            monkeypatch.setattr(Engine, name, call)

        for name in ("train", "score", "score_global"):
            noting(name)
        result = quick(method, data=given, **{"rounds": 1, "test_share": 0.4, "lr": 0.1,
                                              "support_share": 0.5, **settings})  # fmt: skip
        federation = make_federation(Config(**result.config), given)
        return SimpleNamespace(result=result, calls=calls, federation=federation)

    return run


def samples(federation, clients, part):
    return set(np.concatenate([federation.indices(int(c), part) for c in clients]).tolist())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("centralised", {}),
        ("fedavg-meta", {}),
        ("fedmeta-per-maml", {}),
        ("lg-fedavg", {}),
        ("feddse", {"capacities": "0.5:1"}),
        ("wafl", {"participation": 1.0, "topology": "ring"}),
    ],
)
def test_rounds_train_on_the_training_part_and_models_adapt_to_the_support(
    watched, method, settings
):
    run = watched(method, newcomers=2, newcomer_classes=2, **settings)
    trained = [call for call in run.calls if call[0] == "train"]
    assert trained
    for _, (order, clients, *_), read in trained:
        who = range(6) if method == "centralised" else clients
        part = "test-support" if order.data else "train"
        assert read == samples(run.federation, who, part)


@pytest.mark.parametrize("score_on", ["test", "query"])
def test_feddom_validates_on_training_data_that_nobody_trains_or_is_scored_on(watched, score_on):
    run = watched("feddom", participation=1.0, topology="ring", score_on=score_on, newcomers=2,
                  validation_share=0.3)  # fmt: skip
    everyone = range(6)
    validated = samples(run.federation, everyone, "validation")
    scored = [read for name, _, read in run.calls if name == "score"]
    where = {"test": "test", "query": "test-query"}[score_on]
    assert scored == [
        validated,
        samples(run.federation, everyone, where),
        samples(run.federation, run.federation.newcomer_ids, where),
    ]
    trained = [read for name, _, read in run.calls if name == "train"]
    assert trained == [samples(run.federation, everyone, "train")]
    assert validated
    assert not set(validated) & set(trained[0])
    assert not set(validated) & set(samples(run.federation, everyone, "test"))


def test_a_part_is_chosen_by_the_support_and_scored_on_the_query(watched):
    run = watched("fedmeta-per-maml", participation=1.0, newcomers=2)
    newcomers = run.federation.newcomer_ids
    parts = [words[2] for name, words, _ in run.calls
             if name == "score" and words[0][0] in newcomers]  # fmt: skip
    assert parts == ["test-query"] * 2  # before and after
    tried = [read for name, (order, clients, *_), read in run.calls
             if name == "train" and order.data and clients[0] in newcomers]  # fmt: skip
    assert len(tried) >= 6  # each private part, chosen by its loss while it adapts
    assert all(read == samples(run.federation, newcomers, "test-support") for read in tried)
    for name, words, read in run.calls:
        if name == "score":
            assert read == samples(run.federation, words[0], words[2])


def test_the_accuracy_that_a_mix_is_given_is_that_of_the_trained_rows(quick):
    gathered = []

    class Noting(DominatingSet):
        def combine(self, g):
            gathered.append(g)
            return super().combine(g)

    class Noted(FedDom):
        name = "noted"
        kind = Noting

    given = data()
    result = quick(Noted(), data=given, model=lambda shape, classes: MLP(shape, classes, (8,)),
                   participation=1.0, topology="ring", partition="quantity:zipf,a=5", rounds=2,
                   lr=0.3, batch=4, test_share=0.5)  # fmt: skip
    federation = make_federation(Config(**result.config), given)
    empty = [federation.size(client, "validation") == 0 for client in range(6)]
    assert any(empty)
    for g in gathered:
        expected = []
        for client, row in enumerate(g.rows):
            model = g.layout.load(MLP((1, 4, 4), 3, (8,)), row).eval()
            at = federation.indices(client, "validation")
            right = model(result.normalise(given.x[at])).argmax(1).numpy() == given.y[at]
            expected.append(right.mean() if len(at) else np.nan)
        assert g.accuracy == pytest.approx(expected, nan_ok=True)
    assert len({a for a in gathered[-1].accuracy if a == a}) > 1


# -- whose data measures static norms -------------------------------------------------------------


def dealt(newcomers=3):
    return federate(data(), "quantity:zipf", 6, 0, test_share=0.4, support_share=0.5,
                    newcomers=newcomers)  # fmt: skip


def test_norms_are_measured_on_training_data_and_of_newcomers_on_their_support():
    f = dealt()
    for clients, part in ((range(6), "train"), ([2], "train"), (f.newcomer_ids, "test-support")):
        assert set(f.calibration(clients, 10**6).tolist()) == samples(f, clients, part)


def test_norms_are_measured_on_samples_of_all_where_not_on_all_samples():
    f = dealt()
    some = f.calibration(range(6), 60)
    assert len(set(some.tolist())) == 60
    assert set(some.tolist()) <= samples(f, range(6), "train")
    for client in range(6):
        mine = samples(f, [client], "train")
        share = len(mine & set(some.tolist())) / len(mine)
        assert len(mine) < 12 or 0.1 < share < 0.8  # of 144, in all


class Asked(Engine):
    """An engine that notes by whom norms would be measured, and scores nothing."""

    def train_each(self, order, clients, rows, lasts=None):
        raise NotImplementedError

    def run_blocks(self, rows, blocks):
        self.blocks = blocks
        return [Scored(self.task.nothing(len(b.who))) for b in blocks]


def test_a_model_of_ones_own_is_measured_by_oneself_and_a_shared_one_by_everybody():
    f = dealt()
    data = f.dataset
    engine = Asked(SimpleNamespace(federation=f, dataset=data, static=True, task=data.task))
    own, shared = torch.zeros(3, 5), torch.zeros(1, 5).expand(3, -1)
    for clients in (np.array([1, 3, 5]), np.array(f.newcomer_ids)):
        for score in (
            lambda c: engine.score(c, own, "test"),
            lambda c: engine.score_global(own, c),
        ):
            score(clients)
            assert [b.calibrate for b in engine.blocks] == [(c,) for c in clients]
        engine.score(clients, shared, "test", shared=True)
        assert [b.calibrate for b in engine.blocks] == [tuple(range(6))]
        engine.score(clients, shared, "test")  # one row that is none of everybody's
        assert [b.calibrate for b in engine.blocks] == [tuple(clients)]
