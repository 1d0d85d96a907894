"""Tasks: what a label is, what is minimised, and how it is scored."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from native_nets import needs_kernels
from sklearn import metrics
from torch import nn
from torch.nn import functional as F

import fedloom
from fedloom.data.catalog import load
from fedloom.data.dataset import from_arrays
from fedloom.errors import FedloomError
from fedloom.local import SGD, Batch, cross_entropy
from fedloom.method import Method
from fedloom.mix import Average
from fedloom.native.library import library
from fedloom.newcomer import Vote
from fedloom.tasks import (
    TASKS,
    Binary,
    Classification,
    Kept,
    MultiLabel,
    NextToken,
    Regression,
    Segmentation,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)).astype(np.float32)
IMAGES = RNG.normal(size=(60, 1, 4, 4)).astype(np.float32)
TOKENS = np.cumsum(RNG.integers(0, 2, size=(80, 7)), 1) % 5
#: data of every task, as a user may give it
DATA = {
    "binary": (X, X[:, 0] > 0),
    "multi-label": (X, (X[:, :3] > 0).astype(int)),
    "regression": (X, 100 + 5 * X[:, 0] - 3 * X[:, 1]),
    "next-token": (TOKENS[:, :-1], TOKENS[:, 1:]),
    "segmentation": (IMAGES, (IMAGES[:, 0] > 0).astype(int)),
}
OPTIONS = {"next-token": {"hidden": 8, "embed": 4}, "segmentation": {"width": 4}}


def small(of, method="fedavg", **settings):
    """A run of a task in a moment."""
    given = {
        "data": DATA[of], "clients": 3, "participation": 3, "rounds": 1, "steps": 2, "lr": 0.1,
        "partition": "iid", "model_options": OPTIONS.get(of, {"hidden": [8]}), "engine": "serial",
    } | settings  # fmt: skip
    if method == "centralised" or "topology" in given:
        del given["participation"]
    return fedloom.run(method, **given)


# -- scores, against scikit-learn ------------------------------------------------------------------


def tallied(task, outputs, y, who, clients):
    sums = task.nothing(clients)
    kept = []
    for some in np.array_split(np.arange(len(y)), 3):
        at = torch.from_numpy(outputs[some]), torch.from_numpy(y[some])
        for name, values in task.count(*at, who[some], clients).items():
            sums[name] += values
        values = task.keep(*at)
        kept += [] if values is None else [Kept(who[some], values)]
    both = Kept(np.concatenate([k.owner for k in kept]), np.concatenate([k.values for k in kept])) \
        if kept else None  # fmt: skip
    return task.scores(sums, both)


WHO = RNG.integers(0, 2, 50)


def of_clients(function):
    """What scikit-learn says of each of two clients."""
    return [pytest.approx(function(k == WHO)) for k in (0, 1)]


def test_binary_scores_are_those_of_scikit_learn():
    outputs, y = RNG.normal(size=(50, 2)).round(1), RNG.integers(0, 2, 50)
    found = tallied(Binary(2), outputs, y, WHO, 2)
    guess, margin = outputs.argmax(1), outputs[:, 1] - outputs[:, 0]
    assert found["auc"].tolist() == of_clients(lambda k: metrics.roc_auc_score(y[k], margin[k]))
    assert found["accuracy"].tolist() == of_clients(
        lambda k: metrics.accuracy_score(y[k], guess[k])
    )
    assert found["sensitivity"].tolist() == of_clients(
        lambda k: metrics.recall_score(y[k], guess[k])
    )
    assert found["specificity"].tolist() == of_clients(
        lambda k: metrics.recall_score(y[k], guess[k], pos_label=0)
    )


def test_auc_is_not_defined_for_a_client_with_one_class():
    found = tallied(Binary(2), np.eye(2)[[0, 1, 0]], np.array([1, 1, 0]), np.array([0, 0, 1]), 2)
    assert np.isnan(found["auc"]).all()
    assert found["sensitivity"][0] == 0.5
    assert np.isnan(found["sensitivity"][1])


def test_multi_label_scores_are_those_of_scikit_learn():
    outputs, y = RNG.normal(size=(50, 4)), RNG.integers(0, 2, (50, 4)).astype(np.float32)
    found, said = tallied(MultiLabel(4), outputs, y, WHO, 2), outputs > 0
    assert found["f1"].tolist() == of_clients(
        lambda k: metrics.f1_score(y[k], said[k], average="micro")
    )
    assert found["accuracy"].tolist() == of_clients(
        lambda k: 1 - metrics.hamming_loss(y[k], said[k])
    )
    assert found["exact"].tolist() == of_clients(lambda k: metrics.accuracy_score(y[k], said[k]))


def test_regression_scores_are_those_of_scikit_learn_in_the_values_units():
    y = (50 + 7 * RNG.normal(size=(50, 2))).astype(np.float32)
    task = Regression(2, mean_of=(50.0, 40.0), std_of=(7.0, 3.0))
    outputs = RNG.normal(size=(50, 2))
    found, values = tallied(task, outputs, y, WHO, 2), outputs * [7, 3] + [50, 40]
    assert found["mse"].tolist() == of_clients(
        lambda k: metrics.mean_squared_error(y[k], values[k])
    )
    assert found["mae"].tolist() == of_clients(
        lambda k: metrics.mean_absolute_error(y[k], values[k])
    )
    assert found["r2"].tolist() == of_clients(lambda k: metrics.r2_score(y[k], values[k]))
    alike = tallied(task, outputs[:2], y[[0, 0]], np.zeros(2, int), 1)
    assert np.isnan(alike["r2"][0])


def test_segmentation_scores_are_those_of_scikit_learn():
    outputs, y = RNG.normal(size=(50, 3, 2, 2)), RNG.integers(0, 2, (50, 2, 2))
    found, said = tallied(Segmentation(3), outputs, y, WHO, 2), outputs.argmax(1)
    assert found["iou"].tolist() == of_clients(
        lambda k: metrics.jaccard_score(y[k].ravel(), said[k].ravel(), average="macro")
    )
    assert found["accuracy"].tolist() == of_clients(lambda k: (y[k] == said[k]).mean())


def test_next_token_scores_are_those_of_scikit_learn():
    outputs, y = RNG.normal(size=(50, 6, 4)), RNG.integers(0, 4, (50, 6))
    found = tallied(NextToken(4), outputs, y, WHO, 2)
    chances = F.softmax(torch.from_numpy(outputs), -1).numpy()
    assert found["perplexity"].tolist() == of_clients(
        lambda k: np.exp(metrics.log_loss(y[k].ravel(), chances[k].reshape(-1, 4), labels=range(4)))
    )
    assert found["accuracy"].tolist() == of_clients(
        lambda k: (y[k] == outputs[k].argmax(-1)).mean()
    )


def test_losses_are_torchs_and_padding_counts_for_nothing():
    cases = [
        (Classification(3), (4, 3), RNG.integers(0, 3, 4), F.cross_entropy),
        (MultiLabel(3), (4, 3), RNG.integers(0, 2, (4, 3)).astype(np.float32),
         F.binary_cross_entropy_with_logits),
        (Regression(2), (4, 2), RNG.normal(size=(4, 2)).astype(np.float32), F.mse_loss),
        (NextToken(3), (4, 5, 3), RNG.integers(0, 3, (4, 5)),
         lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten())),
        (Segmentation(3), (4, 3, 2, 2), RNG.integers(0, 3, (4, 2, 2)), F.cross_entropy),
    ]  # fmt: skip
    for task, shape, labels, wanted in cases:
        outputs, y = torch.from_numpy(RNG.normal(size=shape)).float(), torch.from_numpy(labels)
        assert torch.isclose(task.loss(outputs, y), wanted(outputs, y)), task.name
        weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
        padded = task.loss(outputs, y, weight)
        assert torch.isclose(padded, wanted(outputs[:3], y[:3])), task.name
        assert task.loss(outputs, y, 0 * weight) == 0


# -- what labels are ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "name"),
    [
        (["no", "yes", "maybe"] * 40, "classification"),
        (["no", "yes"] * 60, "binary"),
        ([0.0, 1.0] * 60, "binary"),
        (np.arange(120) % 7, "classification"),
        (np.linspace(0, 1, 120), "regression"),
        (np.linspace(0, 1, 120)[:, None], "regression"),
        (RNG.normal(size=(120, 2)), "regression"),
        ((X[:, :3] > 0).astype(int), "multi-label"),
    ],
)
def test_labels_tell_the_task(y, name):
    assert from_arrays(X, y).task.name == name


def test_maps_and_sequences_tell_the_task():
    for name in ("segmentation", "next-token"):
        assert from_arrays(*DATA[name]).task.name == name


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (np.eye(3)[np.arange(120) % 3], "--task multi-label"),
        (np.arange(120) // 2, "--task regression"),
        ([f"case {i}" for i in range(120)], "--task classification"),
        (np.arange(240).reshape(120, 2), "--task next-token"),
        (np.zeros((120, 5, 5), int), "not of shape"),
    ],
)
def test_labels_that_could_be_two_things_are_asked_about(y, told):
    with pytest.raises(fedloom.FedloomError, match=told):
        from_arrays(X, y)


def test_a_task_that_is_asked_for_is_taken_or_refused():
    whole = np.arange(120) // 2
    assert from_arrays(X, whole, task="regression").task.name == "regression"
    assert from_arrays(X, whole, task="classification").n_classes == 60
    assert from_arrays(X, np.eye(3)[whole % 3], task="multi-label").task.outputs == 3
    for y, task, told in (
        (whole % 3, "binary", "there are 3"),
        (["a", "b"] * 60, "regression", "needs numbers"),
        (X[:, 0], "classification", "--task regression"),
        (X[:, 0], "segmentation", "a class for every pixel"),
        (X[:, :2], "multi-label", "0 and 1"),
    ):
        with pytest.raises(fedloom.FedloomError, match=told):
            from_arrays(X, y, task=task)
    with pytest.raises(fedloom.FedloomError, match="Did you mean 'regression'"):
        small("regression", task="regresion")
    with pytest.raises(fedloom.FedloomError, match="made for classification"):
        load("digits", task="regression")


def test_the_class_to_find_can_be_named():
    y = ["ill", "well"] * 60
    assert load((X, y)).classes == ("ill", "well")
    turned = load((X, y), options={"positive": "ill"})
    assert turned.classes == ("well", "ill")
    assert (turned.y == 1 - load((X, y)).y).all()
    with pytest.raises(fedloom.FedloomError, match="for two classes"):
        load("digits", options={"positive": "3"})


# -- training -------------------------------------------------------------------------------------


def answers(result, data):
    """What the model answers on the common test set, and the labels."""
    with torch.no_grad():
        return result.model()(result.normalise(np.asarray(data.x)[data.held_out])), \
            data.y[data.held_out]  # fmt: skip


def test_a_table_of_two_classes_is_learned_and_scored(in_tmp):
    result = fedloom.run("fedavg", data="breast-cancer", clients=8, rounds=15, participation=1.0,
                         partition="iid", lr=0.3, engine="serial")  # fmt: skip
    outputs, y = answers(result, load("breast-cancer"))
    done, guess = result.summary, outputs.argmax(1).numpy()
    assert result.task == "binary"
    assert result.classes == ("benign", "malignant")
    assert done["test_auc"] == pytest.approx(
        metrics.roc_auc_score(y, outputs[:, 1] - outputs[:, 0])
    )
    assert done["test_sensitivity"] == pytest.approx(metrics.recall_score(y, guess))
    assert done["test_auc"] > 0.98
    assert done["test_accuracy"] > 0.94
    last = result.clients[result.clients["round"] == 15]
    assert done["auc"] == pytest.approx(last["auc"].mean())


def test_values_are_learned_and_scored_in_their_units(in_tmp):
    """As well as least squares can."""
    from sklearn.linear_model import LinearRegression

    result = fedloom.run("fedavg", data="diabetes", clients=5, rounds=20, participation=1.0,
                         lr=0.05, engine="serial")  # fmt: skip
    data = load("diabetes")
    outputs, y = answers(result, data)
    values = result.values(outputs).numpy()
    done = result.summary
    assert result.config["partition"] == "iid"
    assert done["test_mse"] == pytest.approx(metrics.mean_squared_error(y, values), rel=1e-4)
    assert done["test_r2"] == pytest.approx(metrics.r2_score(y, values), rel=1e-3)
    x, rows = np.asarray(data.x)[:, 0, 0], data.training_rows
    line = LinearRegression().fit(x[rows], data.y[rows, 0])
    assert done["test_r2"] > metrics.r2_score(y, line.predict(x[data.held_out])) - 0.08
    assert done["worst10"] >= done["macro"] >= done["best10"]


@pytest.mark.parametrize("task", ["multi-label", "segmentation"])
def test_labels_and_maps_are_learned_and_scored(in_tmp, task):
    settings = {"rounds": 12, "steps": 10, "lr": 0.5, "batch": 16}
    result = small(task, **settings)
    outputs, y = answers(result, from_arrays(*DATA[task]))
    done = result.summary
    if task == "segmentation":
        said = outputs.argmax(1).numpy()
        wanted = metrics.jaccard_score(y.ravel(), said.ravel(), average="macro")
    else:
        wanted = metrics.f1_score(y, outputs.numpy() > 0, average="micro")
    first = result.measures[0].name
    assert done[f"test_{first}"] == pytest.approx(wanted)
    assert done[f"test_{first}"] > 0.8


def test_a_pattern_of_letters_is_learned(in_tmp):
    """'abcabc...': after a few letters, what follows is certain."""
    (in_tmp / "lines.txt").write_text("abc" * 400)
    result = fedloom.run("fedavg", data="lines.txt", partition="iid", clients=3, participation=3,
                         rounds=4, optimiser="adam", lr=0.02, model_options={"hidden": 16},
                         data_options={"length": 12}, engine="serial")  # fmt: skip
    assert (result.task, result.about["model"]) == ("next-token", "gru")
    assert result.summary["test_accuracy"] == 1.0
    assert result.summary["test_perplexity"] == pytest.approx(np.exp(result.summary["test_loss"]))


# -- engines, kernels, resuming -------------------------------------------------------------------


@pytest.mark.parametrize("task", ["multi-label", "regression", "next-token", "segmentation"])
def test_engines_agree_on_every_task(in_tmp, row, task):
    given = {"steps": None, "batch": 24, "partition": "quantity:zipf"}
    serial = small(task, out="serial", **given)
    stacked = small(task, out="stacked", **given | {"engine": "stacked"})
    assert torch.allclose(row(serial), row(stacked), atol=1e-5)
    first = f"test_{serial.measures[0].name}"
    assert stacked.summary[first] == pytest.approx(serial.summary[first], rel=1e-4)
    if task == "next-token":
        workers = small(task, out="workers", **given | {"engine": "processes", "workers": 2})
        assert torch.equal(row(serial), row(workers))


@needs_kernels
def test_kernels_agree_on_values(in_tmp, row):
    native, plain = (small("regression", kernels=k, out=k) for k in ("auto", "torch"))
    assert "through autograd: the loss of regression" in native.kernels
    assert torch.allclose(row(native), row(plain), atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedmeta-maml"])
def test_a_resumed_regression_is_the_uninterrupted_one(in_tmp, row, method):
    small("regression", method, rounds=1, out="cut")
    cut = fedloom.run(method, data=DATA["regression"], out="cut", resume=True, rounds=2)
    whole = small("regression", method, rounds=2, out="whole")
    assert torch.equal(row(cut), row(whole))
    assert cut.summary["test_mse"] == whole.summary["test_mse"]


# -- methods --------------------------------------------------------------------------------------

FAMILIES = {
    "fedprox:mu=0.1": {},
    "scaffold": {},
    "fedadam": {},
    "fedper": {},
    "ditto": {},
    "pfedme": {},
    "fedmeta-per-metasgd": {},
    "fedrolex": {"capacities": "1:0.5,0.5:0.5"},
    "fjord:distil=0": {"capacities": "1:0.5,0.5:0.5"},
    "fedswap:partner=min": {"public": "share:0.2"},
    "p2p-fedavg": {"topology": "ring"},
    "local": {},
    "centralised": {},
}


SLOW = ("fedadam", "pfedme", "fjord:distil=0", "local", "centralised")  # on such models


@pytest.mark.parametrize(
    ("task", "method"),
    [
        *[(task, method) for task in ("regression", "multi-label") for method in FAMILIES],
        *[(task, method) for task in ("next-token", "segmentation") for method in FAMILIES
          if method not in SLOW],
    ],
)  # fmt: skip
def test_every_family_learns_every_task(in_tmp, task, method):
    result = small(task, method, **FAMILIES[method])
    assert result.task == task
    assert np.isfinite(result.summary["macro"])
    assert result.clients[result.measures[0].name].notna().any()


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        ("ds-fl", {"public": "share:0.2"}, "exchanges class probabilities"),
        ("fjord", {}, "distil=0 does without"),
        ("depthfl", {}, "from exit to exit"),
        ("fedgse-spl", {"public": "share:0.2"}, "by the class that a model gives them"),
        ("heterofl:mask=zero", {}, "mask=none does without"),
        ("feddom", {"topology": "ring"}, "a score between 0 and 1"),
        ("fedavg", {"partition": "dirichlet:0.5"}, "deals by class"),
        ("fedavg", {"partition": "classes:2"}, "deals by class"),
        ("fedavg", {"test_cut": "by-class"}, "needs classes"),
        ("fedavg", {"newcomers": 2, "newcomer_partition": "classes:2"}, "deals by class"),
    ],
)
def test_what_needs_classes_is_refused_with_a_sentence(in_tmp, method, settings, told):
    with pytest.raises(fedloom.FedloomError, match=told):
        small("regression", method, **settings)


def test_a_vote_needs_classes(in_tmp):
    method = Method(local=SGD(), mix=Average("not head"), newcomer=Vote())
    with pytest.raises(fedloom.FedloomError, match="vote of class probabilities"):
        small("regression", method)


def test_an_answer_for_every_place_has_no_exits(in_tmp):
    with pytest.raises(fedloom.FedloomError, match="an answer for every place"):
        small("next-token", "depthfl:distil=0")


def test_newcomers_without_classes_are_dealt_evenly(in_tmp):
    result = small("regression", "fedper", newcomers=2, test_share=0.4)
    assert np.isfinite(result.summary["new_macro"])
    images, labels = DATA["regression"]
    model = result.newcomer_model(images[:10], labels[:10])
    assert model(result.normalise(images)).shape == (120, 1)


def test_a_model_with_another_answer_is_refused(in_tmp):
    def flat(shape, outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), outputs))

    with pytest.raises(fedloom.FedloomError, match="a logit per class for every pixel"):
        small("segmentation", model=flat, model_options={})
    assert small("regression", model=flat, model_options={}).task == "regression"


# -- losses of one's own --------------------------------------------------------------------------


def squared(outputs, y):
    return ((outputs - y) ** 2).mean()


def test_a_loss_of_ones_own_is_what_is_minimised(in_tmp, row):
    """The task's own, written by hand, gives the same; another one does not."""
    plain, same = small("regression", out="a"), small("regression", loss=squared, out="b")
    other = small("regression", loss=nn.L1Loss(), out="c")
    assert torch.allclose(row(plain), row(same), atol=1e-6)
    assert not torch.allclose(row(plain), row(other), atol=1e-4)
    assert other.summary["test_mse"] > 0
    assert same.config["loss"] == "custom"
    weighted = small("binary", loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])), out="d")
    assert library() is None or "a loss of one's own" in weighted.kernels


def test_a_loss_of_ones_own_is_needed_again_and_must_be_the_same(in_tmp):
    small("regression", loss=squared, out="r")
    again = {"data": DATA["regression"], "out": "r", "resume": True, "rounds": 2}
    with pytest.raises(fedloom.FedloomError, match="pass loss="):
        fedloom.run(**again)
    with pytest.raises(fedloom.FedloomError, match="another source of the loss"):
        fedloom.run(**again, loss=tripled)
    assert len(fedloom.run(**again, loss=squared).rounds) == 2


def tripled(outputs, y):
    return 3 * ((outputs - y) ** 2).mean()


def test_a_loss_in_a_file_runs_from_the_command_line(call, in_tmp):
    (in_tmp / "mine.py").write_text(
        "def huber(outputs, y):\n    from torch.nn import functional as F\n"
        "    return F.huber_loss(outputs, y)\n"
    )
    words = ("run", "fedavg", "--data", "diabetes", "--clients", "3", "--rounds", "1", "--out", "r")
    assert call(*words, "--loss", "mine.py:huber")[0] == 0
    assert fedloom.load("r").config["loss"] == "mine.py:huber"
    code, told = call(*words[:-1], "s", "--loss", "huber")
    assert (code, "FILE.py:FUNCTION" in told) == (2, True)


def test_a_loss_that_is_no_loss_is_refused(in_tmp):
    with pytest.raises(fedloom.FedloomError, match="one number for a batch"):
        small("regression", loss=lambda outputs, y: (outputs - y) ** 2)
    with pytest.raises(fedloom.FedloomError, match="give a function"):
        small("regression", loss=3)
    with pytest.raises(fedloom.FedloomError, match="can't be stacked"):
        small("regression", loss=squared, engine="stacked")


def test_a_rule_that_insists_on_cross_entropy_is_told_what_to_use():
    batch = Batch(torch.zeros(2, 3), torch.zeros(2, 1), task=Regression(1))
    with pytest.raises(fedloom.FedloomError, match=r"batch\.loss"):
        cross_entropy(torch.zeros(2, 1), batch)
    assert SGD().objective(lambda p, x: torch.ones(2, 1), {}, {"train": batch}, None) == 1


# -- text -----------------------------------------------------------------------------------------


def test_files_of_text_are_users_and_labels_are_what_follows(in_tmp):
    folder = in_tmp / "texts"
    folder.mkdir()
    (folder / "ann.txt").write_text("hello world, " * 20)
    (folder / "bob.txt").write_text("what a day! " * 10)
    data = load(folder, options={"length": 16})
    letters = np.array(data.classes)
    assert data.columns["user"].tolist() == ["ann"] * 16 + ["bob"] * 7
    assert "".join(letters[data.x[0].ravel()]) == "hello world, hel"
    assert "".join(letters[data.y[0]]) == "ello world, hell"
    assert "".join(letters[data.x[1].ravel()]) == "lo world, hello "
    result = fedloom.run("fedavg", data=str(folder), data_options={"length": 16}, rounds=1,
                         participation=2, steps=1, model_options={"hidden": 8})  # fmt: skip
    assert result.names == ("ann", "bob")
    with pytest.raises(fedloom.FedloomError, match="No text"):
        load(folder, options={"length": 1000})


def test_speakers_of_a_play_are_users(in_tmp):
    (in_tmp / "play.txt").write_text("ANN:\nGood day to you.\n\nBOB:\nAnd you.\n\nANN:\nWell.\n")
    data = load("play.txt", options={"users": "speaker", "length": 4})
    assert set(data.columns["user"]) == {"ANN", "BOB"}
    with pytest.raises(fedloom.FedloomError, match="file or speaker"):
        load("play.txt", options={"users": "line"})


def test_texts_in_a_table_are_classified(in_tmp):
    words = {"good": ["fine", "great"], "bad": ["poor", "awful"]}
    rows = [f"it is {word},{label}" for label, found in words.items() for word in found * 20]
    (in_tmp / "reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    result = fedloom.run("fedavg", data="reviews.csv", data_options={"text": "text"}, clients=2,
                         partition="iid", participation=2, rounds=8, optimiser="adam", lr=0.02,
                         model_options={"hidden": 16}, engine="serial")  # fmt: skip
    assert (result.task, result.about["model"]) == ("binary", "gru")
    assert result.summary["test_accuracy"] == 1.0


def test_leaf_shakespeare_is_the_letter_that_follows(in_tmp):
    lines = {"x": ["to be or", "o be or "], "y": [" ", "n"]}
    content = {"users": ["HAMLET"], "num_samples": [2], "user_data": {"HAMLET": lines}}
    (in_tmp / "leaf.json").write_text(json.dumps(content))
    one, every = load("leaf.json"), load("leaf.json", task="next-token")
    assert (one.task.name, one.y.shape, one.tokens) == ("classification", (2,), one.n_classes)
    assert (every.task.name, every.y.shape) == ("next-token", (2, 8))
    assert "".join(np.array(every.classes)[every.y[0]]) == "o be or "


# -- tables of results ----------------------------------------------------------------------------


def test_less_is_better_where_a_measure_says_so(in_tmp):
    given = {"data": DATA["regression"], "clients": 3, "participation": 3, "rounds": 2, "lr": 0.05,
             "model_options": {"hidden": [8]}, "seeds": 2}  # fmt: skip
    found = fedloom.compare(["fedavg", "local"], out="c", **given)
    table = found.table
    assert table["macro"]["fedavg"] < table["macro"]["local"]
    assert found.best("macro")[0] == "fedavg"
    by_seed = found.runs.pivot(index="seed", columns="method", values="macro")
    assert table["macro_wins"]["local"] == (by_seed["local"] < by_seed["fedavg"]).sum()
    heads, _ = found.cells()
    assert heads[1:5] == ["test MSE", "test MAE", "test R²", "client MSE"]
    bold = next(line for line in found.latex().splitlines() if line.startswith("fedavg"))
    assert bold.count("textbf") >= 2
    alone = found.results["fedavg"][0].latex().splitlines()
    assert alone[2] == r"score & value \\"
    assert [line.partition(" & ")[0] for line in alone[4:-2]] == [
        "common test set, MSE", "clients, mean, MSE", r"clients, worst 10 \%, MSE",
        r"clients, best 10 \%, MSE", "common test set, MAE", "common test set, R²",
    ]  # fmt: skip
    from fedloom.experiment.reporting import headline

    assert headline(found).startswith("fedavg reaches MSE")
    assert "MSE" in found.report().read_text()
    result = found.results["fedavg"][0]
    assert "MSE" in result.report().read_text()
    result.plot("p.png")
    other = small("multi-label", out="m")
    with pytest.raises(fedloom.FedloomError, match="different tasks"):
        _ = fedloom.Comparison.of([result, other]).table


def test_a_search_takes_the_smallest_error():
    from fedloom.experiment.tune import _score

    measures = TASKS["regression"].measures
    assert _score({"macro": 2.0}, "macro", measures) == -2.0
    assert _score({"test_r2": 0.5}, "test_r2", measures) == 0.5
    assert _score({"macro": 0.5}, "macro", TASKS["classification"].measures) == 0.5
    with pytest.raises(fedloom.FedloomError, match="name one kind"):
        _score({"macro": 2.0, "r2": 0.5}, "macro+r2", measures)


def test_an_exported_regression_answers_in_the_values_units(in_tmp):
    result = small("regression", rounds=2)
    result.export("m.ts")
    x = torch.from_numpy(X)[:, None, None]
    with torch.no_grad():
        ready = torch.jit.load("m.ts")(x)
        plain = result.values(result.model()(result.normalise(X)))
    assert torch.allclose(ready, plain, atol=1e-3)
    assert 90 < ready.mean() < 110
    assert json.loads((in_tmp / "m.ts.json").read_text())["task"]["name"] == "regression"


def test_the_best_of_a_sweep_of_values_is_the_lowest():
    from fedloom.report.latex import tabular

    rows = [["a", "3762 ± 12"], ["b", "5844 ± 15"]]
    assert r"\textbf{3762" in tabular(["m", "MSE"], rows, lower=True)
    assert r"\textbf{5844" in tabular(["m", "score"], rows)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda outputs, y: outputs.detach().sum(), "differentiated"),
        (lambda outputs: outputs.sum(), "Your loss failed with TypeError"),
        (lambda outputs, y: 1 / 0, "Your loss failed with ZeroDivisionError"),
    ],
)
def test_a_loss_that_fails_is_told_in_a_sentence(in_tmp, loss, why):
    with pytest.raises(FedloomError, match=why):
        fedloom.run("fedavg", data="wine", clients=3, rounds=1, loss=loss)


def test_classes_called_yes_and_no_can_be_found(in_tmp):
    rows = "\n".join(f"{i},{'yes' if i % 3 else 'no'}" for i in range(60))
    Path("visits.csv").write_text(f"a,label\n{rows}\n")
    found = load("visits.csv", options={"positive": False})
    assert found.classes == ("yes", "no")


def test_a_preset_that_draws_by_capacity_takes_data_without_classes(in_tmp):
    rows = "\n".join(f"{i},{i / 7:.3f}" for i in range(200))
    Path("values.csv").write_text(f"a,label\n{rows}\n")
    options = {"capacities": "1:0.5,0.5:0.5", "draw": "capacity", "participation": 0.5}
    result = fedloom.run("heterofl", data="values.csv", clients=4, rounds=1, **options)
    assert result.task == "regression"


def test_values_that_single_precision_would_lose_are_refused():
    spread = np.random.default_rng(0).normal(0, 50, 100)
    assert from_arrays(np.zeros((100, 2)), 1e6 + spread).task.name == "regression"
    with pytest.raises(FedloomError, match="Subtract a constant"):
        from_arrays(np.zeros((100, 2)), 1.7e9 + spread)
