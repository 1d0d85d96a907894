"""A user's own data, from the file or array to the model: rows, columns, labels and tokens."""

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom
from fedloom.data.catalog import load
from fedloom.errors import FedloomError
from fedloom.models.inputs import blank, looks_up


def by_user(n=150, users=5):
    """Rows whose label is the user they are of, in no order."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, users, n)
    return (rng.normal(size=(n, 3, 3)) + user[:, None, None]).astype(np.float32), user


@pytest.fixture
def farms(in_tmp):
    """Writes a table of 240 rows of three farms, changed cell by cell: {(row, column): text}."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({
        "farm": rng.choice(["A", "B", "C"], 240),
        "rain": rng.normal(100, 20, 240),
        "soil": rng.normal(5, 1, 240),
        "harvest": rng.normal(50, 9, 240),
    })  # fmt: skip

    def write(cells, name="farms.csv", **options):
        changed = table.astype(object)
        for (row, column), text in cells.items():
            changed.loc[row, column] = text
        changed.to_csv(name, index=False, **options)
        return name

    return write


LABEL = {"label": "harvest"}


def test_empty_cells_are_told_of_all_columns_with_lines_of_the_file(farms):
    holes = {(54, "rain"): "", (60, "rain"): "", (7, "soil"): "", (9, "farm"): ""}
    why = (
        r"^'rain' has 2 empty cells, the first in line 56; 'soil' has 1 empty cell, the first in "
        r"line 9; 'farm' has 1 empty cell, the first in line 11, so it does not say whose"
    )
    with pytest.raises(FedloomError, match=why):
        load(farms(holes), options=LABEL, by="farm")
    with pytest.raises(FedloomError, match=r"'rain' has 1 empty cell, the first in line 5\."):
        load(farms({(3, "rain"): ""}, "farms.tsv", sep="\t"), options=LABEL, by="farm")
    pd.read_csv(farms({(3, "rain"): ""})).to_parquet("farms.parquet")
    with pytest.raises(FedloomError, match=r"'rain' has 1 empty cell, the first in row 3 \(from 0"):
        load("farms.parquet", options=LABEL, by="farm")


def test_lines_are_counted_as_an_editor_counts_them(farms):
    # A blank line in front, and a cell in quotes that goes over two lines.
    file = Path(farms({(1, "farm"): "A\nB", (3, "rain"): "", (5, "farm"): 'C "west"'}))
    file.write_text("\n" + file.read_text())
    assert file.read_text().splitlines()[6].split(",")[1] == ""
    with pytest.raises(FedloomError, match=r"the first in line 7\."):
        load(file, options=LABEL, by="farm")


def test_a_line_of_several_files_is_named_with_its_file(farms):
    farms({}, "train.csv")
    farms({(3, "rain"): ""}, "test.csv")
    with pytest.raises(FedloomError, match=r"the first in line 5 of test\.csv\."):
        load("train.csv", options={**LABEL, "test": "test.csv"}, by="farm")


def test_rows_that_are_dropped_are_counted(farms):
    file = farms({(1, "rain"): "", (2, "rain"): "", (2, "soil"): "", (3, "harvest"): "",
                  (4, "farm"): ""})  # fmt: skip
    with pytest.warns(UserWarning, match=r"^4 of 240 rows left out .*: harvest 1, rain 2, soil 1,"
                                         r" farm 1\.$"):  # fmt: skip
        assert len(load(file, options={**LABEL, "missing": "drop"}, by="farm").x) == 236
    empty = farms({(row, "rain"): "" for row in range(240)})
    with pytest.raises(FedloomError, match=r"All 240 rows have empty cells \(rain 240\)"):
        load(empty, options={**LABEL, "missing": "drop"}, by="farm")


def test_a_word_in_a_column_of_numbers_is_pointed_at(farms):
    with pytest.raises(
        FedloomError, match=r"^'rain' is a number except in 1 cell: 'n/k', line 5\."
    ):
        load(farms({(3, "rain"): "n/k"}), options=LABEL, by="farm")
    words = {(3, "rain"): "n/k", (8, "rain"): "?"}
    with pytest.raises(FedloomError, match=r"except in 2 cells, the first: 'n/k', line 5\. Write"):
        load(farms(words), options=LABEL, by="farm")
    for task in ("auto", "regression"):
        with pytest.raises(FedloomError, match=r"^'harvest' is a number except in 1 cell"):
            load(farms({(3, "harvest"): "n/k"}), options=LABEL, by="farm", task=task)
    rounded = {(row, "rain"): str(row % 9) for row in range(240)} | {(3, "rain"): "n/k"}
    with pytest.warns(UserWarning, match=r"1 cell: 'n/k', line 5\. So all .* its 10 different"):
        assert load(farms(rounded), options=LABEL, by="farm").shape == (1, 1, 11)


def test_codes_of_digits_and_letters_are_text(farms):
    codes = {(row, "rain"): "abc"[row % 3] if row % 2 else str(row % 4) for row in range(240)}
    assert load(farms(codes), options=LABEL, by="farm").shape == (1, 1, 6)


@pytest.mark.parametrize("number", ["inf", "1e300"])
def test_infinite_numbers_are_named_by_column_and_line(farms, number):
    for column in ("rain", "harvest"):
        with pytest.raises(FedloomError, match=rf"^'{column}' has 1 cell with .* in line 5: "):
            load(farms({(3, column): number}), options=LABEL, by="farm")


@pytest.mark.parametrize("before", ["", "data_options."])
def test_data_show_takes_options_as_a_run_does(farms, call, before):
    file = farms({(1, "rain"): ""})
    options = [f"{before}label=harvest", f"{before}missing=drop"]
    words = [word for option in options for word in ("--set", option)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, shown = call("data", "show", file, "--partition", "by:farm", *words)
    assert code == 0
    assert "farms: 239 training" in shown
    assert "Warning: 1 of 240 rows left out for empty cells: rain 1." in shown
    code, said = call("data", "show", file, "--set", "data_options=3")
    assert code != 0
    assert "data_options=3 names no option" in str(said)


def test_runs_of_a_comparison_say_once_what_they_left_out(farms, call):
    words = ("--data", farms({(1, "rain"): ""}), "--partition", "by:farm", "--participation", 1,
             "--set", "data_options.label=harvest", "--set", "data_options.missing=drop",
             "--rounds", 1, "--seeds", 1, "--engine", "serial")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, shown = call("compare", "fedavg", "local", *words, "--out", "c")
    assert code == 0
    assert shown.count("1 of 240 rows left out") == 1


@pytest.fixture
def natural(in_tmp):
    """nat.npz without a test part, and nat.json with the rows of each user."""
    x, user = by_user()
    np.savez("nat.npz", x=x, y=user)
    Path("nat.json").write_text(json.dumps([np.flatnonzero(user == u).tolist() for u in range(5)]))
    return user


@pytest.mark.parametrize("pool", [(), ("--pool",)])
def test_a_partition_file_deals_the_rows_it_names(natural, call, pool):
    deal = ("--clients", 5, "--partition", "file:nat.json", *pool)
    code, shown = call("data", "show", "nat.npz", *deal)
    assert code == 0
    assert "150 training and 0 test images" in shown
    assert "min 1, mean 1, max 1" in shown  # classes per client
    code, _ = call("run", "local", "--data", "nat.npz", "--rounds", 1, *deal, "--out", "r")
    assert code == 0
    table = fedloom.load("r").clients.set_index("client")
    assert table["main_class"].tolist() == [0, 1, 2, 3, 4]
    counts = np.bincount(natural)
    assert table["train_samples"].tolist() == (counts - counts // 5).tolist()


def test_holding_rows_out_is_refused_where_a_partition_names_them(natural, call):
    deal = ("--clients", 5, "--partition", "file:nat.json")
    code, told = call("data", "show", "nat.npz", *deal, "--set", "test_share=0.3")
    assert (code, "test_share=0.3 would do nothing" in told) == (2, True)
    share = ("--set", "data_options.test_share=0.3")
    code, told = call("run", "fedavg", "--data", "nat.npz", *deal, *share, "--out", "r")
    assert (code, "test_share=0.3 would do nothing" in told) == (2, True)
    code, shown = call("data", "show", "nat.npz", "--clients", 5, "--set", "test_share=0.3")
    aside = sum(round(0.3 * n) for n in np.bincount(natural).tolist())
    assert (code, f"{150 - aside} training and {aside} test images" in shown) == (0, True)


def test_a_partition_in_python_is_that_of_a_file(natural, quick, row):
    lists = [np.flatnonzero(natural == u) for u in range(5)]
    same = {"data": "nat.npz", "clients": 5, "rounds": 1}
    given = [natural, natural.tolist(), lists, "file:nat.json", Path("nat.json")]
    runs = [quick(partition=p, out=f"r{i}", **same) for i, p in enumerate(given)]
    for run in runs[1:]:
        assert torch.equal(row(run), row(runs[0]))
        assert run.clients.drop(columns="round").equals(runs[0].clients.drop(columns="round"))


def test_a_run_with_a_partition_in_python_goes_on_with_it_only(natural, quick):
    same = {"data": "nat.npz", "clients": 5, "out": "r"}
    first = quick(partition=natural, rounds=1, **same)
    again = {"resume": True, "out": "r", "rounds": 2}
    with pytest.raises(fedloom.FedloomError, match=r"partition was given .* pass partition=\.\.\."):
        fedloom.run("fedavg", **again)
    with pytest.raises(fedloom.FedloomError, match="pass partition="):
        first.score()
    assert first.score(partition=natural).summary["micro"] == first.summary["micro"]
    assert len(fedloom.run("fedavg", partition=natural, **again).rounds) == 2


def test_a_partition_in_python_that_does_not_fit_is_refused(natural, quick):
    with pytest.raises(fedloom.FedloomError, match="Set clients to 5"):
        quick(data="nat.npz", partition=natural, clients=6)
    with pytest.raises(fedloom.FedloomError, match="each of 50 rows, but the data has 150"):
        quick(data="nat.npz", partition=natural[:50], clients=5)
    with pytest.raises(fedloom.FedloomError, match="this float is none of them"):
        quick(data="nat.npz", partition=0.5)


def test_values_to_predict_are_never_taken_for_classes(call):
    """Fractions are values; whole numbers that may be either are asked about."""
    np.savez("float.npz", x=np.zeros((300, 5)), y=np.linspace(0, 1, 300))
    words = ("run", "fedavg", "--data", "float.npz", "--rounds", "1", "--clients", "3", "--out")
    assert call(*words, "r")[0] == 0
    assert fedloom.load("r").task == "regression"
    code, told = call(*words, "s", "--task", "classification")
    assert (code, "so they are no classes" in told) == (2, True)
    np.savez("whole.npz", x=np.zeros((300, 5)), y=np.arange(300) // 3)
    code, told = call("run", "fedavg", "--data", "whole.npz", "--out", "t")
    assert (code, "--task regression" in told, "--task classification" in told) == (2, True, True)


def test_every_column_of_a_table_reaches_the_model_on_the_same_scale(quick):
    """Also through `normalise`; a column that a common mean would drown decides the label."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) * [1e-3, 1, 1e5] + [0, 0, 1e6]
    result = quick(data=(x, x[:, 0] > 0), rounds=10, lr=0.5, participation=1.0)
    assert result.summary["test_accuracy"] > 0.85
    fed = result.normalise(x)
    assert torch.allclose(fed.mean((0, 1, 2)), torch.zeros(3), atol=0.2)
    assert torch.allclose(fed.std((0, 1, 2)), torch.ones(3), atol=0.2)
    right = result.model()(fed).argmax(1).numpy() == (x[:, 0] > 0)
    assert right.mean() > 0.85


# -- tokens --------------------------------------------------------------------------------------


class Words(nn.Module):
    """The mean of embedded tokens, and a linear layer."""

    def __init__(self, shape, classes, vocabulary=40):
        super().__init__()
        self.words = nn.Embedding(vocabulary, 6)
        self.out = nn.Linear(6, classes)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.out(self.words(x.flatten(1)).mean(1))


class Positions(nn.Module):
    """An image model that embeds where a pixel is, not what it is."""

    def __init__(self, shape, classes):
        super().__init__()
        self.places = nn.Embedding(shape[1] * shape[2], 1)
        self.out = nn.Linear(shape[1] * shape[2], classes)

    def forward(self, x):
        places = torch.arange(self.places.num_embeddings, device=x.device)
        return self.out(x.flatten(1).float() + self.places(places)[:, 0])


def sentences(dtype=np.int64):
    """Tokens of the first or of the second half of the vocabulary, the label says which."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    return (rng.integers(0, 20, (200, 7)) + 20 * y[:, None]).astype(dtype), y


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int16"])
def test_tokens_are_looked_up_as_they_are(quick, dtype):
    result = quick(data=sentences(dtype), model=Words, rounds=15, lr=1.0, participation=1.0)
    assert result.summary["test_accuracy"] > 0.8
    x, y = sentences(dtype)
    assert torch.equal(result.normalise(x), torch.from_numpy(x.astype(np.int64))[:, None, None])
    right = result.model(factory=Words)(result.normalise(x)).argmax(1).numpy() == y
    assert right.mean() > 0.8
    theirs = result.newcomer_model(x[:10], y[:10], factory=Words)
    assert theirs(result.normalise(x)).shape == (200, 2)


def test_tokens_give_the_same_on_every_engine(quick, row):
    more = {"data": sentences(), "model": Words, "rounds": 2, "partition": "dirichlet:1"}
    serial, pool, stacked = (
        quick(**more, engine=e, workers=2) for e in ("serial", "processes", "stacked")
    )
    assert torch.equal(row(pool), row(serial))
    torch.testing.assert_close(row(stacked), row(serial))
    assert pool.clients.equals(serial.clients)


@pytest.mark.parametrize("method", ["fedmeta-maml", "fedper", "fedswap:partner=min", "p2p-fedavg"])
def test_methods_take_tokens(quick, method):
    more = {"public": "share:0.1"} if "swap" in method else {}
    result = quick(method, data=sentences(), model=Words, rounds=1, participation=1.0, **more)
    assert 0 <= result.summary["macro"] <= 1


def test_the_command_line_takes_tokens_and_a_model_of_ones_own(call):
    x, y = sentences()
    np.savez("words.npz", x=x, y=y)
    Path("words.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes, vocabulary=40):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Embedding(vocabulary, 6), nn.Flatten(),\n"
        "                         nn.Linear(6 * shape[2], classes))\n"
    )
    words = ("run", "fedavg", "--data", "words.npz", "--model", "words.py:net", "--clients", 5)
    code, printed = call(*words, "--rounds", 1, "--out", "r")
    assert code == 0, printed
    few = ("--set", "model_options.vocabulary=30", "--out", "s")
    code, told = call(*words, *few)
    assert (code, "can't look up the tokens 0 to 39 of these data" in told) == (2, True)
    code, told = call(*words, "--augment", "flip", "--out", "s")
    assert (code, "augment=flip is for images" in told) == (2, True)


def test_what_tokens_cannot_do_is_refused(quick):
    x, y = sentences()
    with pytest.raises(fedloom.FedloomError, match="are not whole numbers"):
        quick(data=(x.astype(float), y), model=Words)
    with pytest.raises(fedloom.FedloomError, match="tokens -1 to 39"):
        quick(data=(np.where(x == 3, -1, x), y), model=Words)
    with pytest.raises(fedloom.FedloomError, match="public=noise:8 does not work for a model"):
        quick("fedswap:partner=min", data=(x, y), model=Words, public="noise:8",
              participation=1.0)  # fmt: skip


def test_an_embedding_of_positions_makes_no_tokens(quick):
    """Such a model gets its images normalised, integers or not."""
    x, y = np.random.default_rng(0).integers(0, 9, (100, 4, 4)), np.arange(100) % 2
    shape = (1, 4, 4)
    assert not looks_up(Positions(shape, 2), shape)
    assert blank(Positions(shape, 2), shape, 2).dtype == torch.float32
    result = quick(data=(x, y), model=Positions, rounds=1)
    assert abs(float(result.normalise(x).mean())) < 0.2


def test_integers_and_the_same_floats_train_alike(quick, row):
    x, y = np.random.default_rng(0).integers(0, 9, (100, 4, 4)), np.arange(100) % 2
    assert torch.equal(row(quick(data=(x, y))), row(quick(data=(x.astype(np.float32), y))))


@pytest.mark.parametrize("name", ["fedavg-meta", "fedper-meta", "fedmeta-maml",
                                  "fedmeta-per-metasgd"])  # fmt: skip
def test_all_of_s1_works_with_classes_of_ones_own_data(in_tmp, name):
    """Its scale, cut, order, optimiser, newcomers and outer steps, on a table of five classes."""
    rng = np.random.default_rng(0)
    y = np.tile(list("abcde"), 60)
    x = rng.normal(size=(300, 6))
    x[np.arange(300), np.arange(300) % 5] += 4
    result = fedloom.run(
        name, data=(x, y), partition="classes:2,uneven=0.5", clients=6, participation=3, rounds=6,
        batch=8, pool=True, normalise="pixel", test_share=0.4, test_cut="by-class", newcomers=4,
        newcomer_partition="classes:2,uneven=0.5", optimiser="adam", lr=0.02, eval_every=6,
        **({"alpha": 0.05} if "fedmeta" in name else {"order": "support-first", "tune_lr": 0.05}),
    )  # fmt: skip
    assert result.summary["micro"] > result.summary["majority"] > 0.5
    table = result.clients
    assert set(table["population"]) == {"local", "new"}
    assert (table.query("population == 'new'")["samples"] > 0).all()
    assert {"before_f1", "new_before_micro", "new_majority"} <= set(result.summary)


# -- other sizes ----------------------------------------------------------------------------------


def test_images_get_a_frame_or_are_averaged_to_another_size():
    plain = load("digits")
    framed = load("digits", options={"size": 11})
    assert framed.shape == (1, 11, 11)
    assert np.array_equal(framed.x[:, :, 1:9, 1:9], plain.x)
    assert framed.x.sum() == plain.x.sum()
    assert framed.mean != plain.mean
    half = load("digits", options={"size": 4})
    square = plain.x[3, 0, :2, :2].mean()
    assert half.x[3, 0, 0, 0] == np.rint(square)
    assert np.array_equal(load("digits", options={"size": "8"}).x, plain.x)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(FedloomError, match=r"size=5 does not fit 'digits'.*8×8"):
        load("digits", options={"size": 5})
    with pytest.raises(FedloomError, match="size must be a number"):
        load("digits", options={"size": "large"})
