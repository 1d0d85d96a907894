"""Each format of a user's own data, from a small file or object to a run that learns."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from fedloom.data.catalog import load, natural
from fedloom.errors import FedloomError


def table(n=200):
    """A label that a number and a text decide together, a user column and one of no use."""
    rng = np.random.default_rng(1)
    a, kind = rng.normal(size=n), rng.choice(["x", "y", "z"], n)
    label = np.where(a + (kind == "x") > 0.3, "yes", "no")
    frame = {"user": np.arange(n) % 4, "a": 1e4 * a, "kind": kind, "flag": a > 0, "label": label}
    return pd.DataFrame(frame)


def accuracy(run):
    return run.summary["test_accuracy"]


@pytest.fixture
def learn(quick):
    def run(**settings):
        more = {"participation": 1.0, "rounds": 15, "lr": 0.5, "eval_every": 15}
        left_out = {"clients": None, "partition": None}
        return quick(**{**more, **left_out, **settings})

    return run


# -- tables --------------------------------------------------------------------------------------


def test_a_table_is_encoded_column_by_column():
    data = load(table(), options={"user": "user"})
    assert data.features == ("a", "kind=x", "kind=y", "kind=z", "flag")
    frame = table()
    assert data.x[:, 0, 0, 0] == pytest.approx(frame["a"].to_numpy())
    for i, kind in enumerate("xyz"):
        assert (data.x[:, 0, 0, 1 + i] == (frame["kind"] == kind)).all()
    assert data.classes == ("no", "yes")
    assert data.y.tolist() == (frame["label"] == "yes").astype(int).tolist()
    assert data.columns["user"].tolist() == frame["user"].tolist()
    assert len(data.mean) == 5  # a scale for each column


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz", ".parquet"])
def test_table_files_hold_the_same(in_tmp, ending):
    file = f"t{ending}"
    if ending == ".parquet":
        table().to_parquet(file)
    else:
        table().to_csv(file, index=False, sep="\t" if ending == ".tsv" else ",")
    data, other = load(file, by="user"), load(table(), by="user")
    np.testing.assert_allclose(data.x, other.x, rtol=1e-6)
    assert (data.classes, data.features, data.name) == (other.classes, other.features, "t")
    assert (data.y == other.y).all()


def test_semicolons_and_the_row_numbers_of_pandas_are_understood(in_tmp):
    table().to_csv("semi.csv", sep=";", index=False)
    table().to_csv("numbered.csv")
    for file in ("semi.csv", "numbered.csv"):
        assert load(file, by="user").features == ("a", "kind=x", "kind=y", "kind=z", "flag")


def test_a_table_by_user_learns_as_well_as_scikit_learn(in_tmp, learn):
    table().to_csv("t.csv", index=False)
    run = learn(data="t.csv", partition="by:user")
    assert run.config["clients"] == 4
    data = load("t.csv", by="user")
    scaled = (data.x[:, 0, 0] - np.array(data.mean)) / np.array(data.std)
    best = LogisticRegression().fit(scaled, data.y).score(scaled, data.y)
    assert accuracy(run) > best - 0.05


def test_whole_numbers_of_a_table_stay_whole():
    frame = pd.DataFrame({"t0": [1, 2, 3, 4], "t1": [5, 6, 7, 8], "y": list("abab")})
    assert load(frame).x.dtype == np.int32
    assert load(frame.assign(t1=0.5)).x.dtype == np.float32


def test_the_test_part_of_a_table_is_a_file_or_a_column(in_tmp):
    frame = table()
    frame[:150].to_csv("train.csv", index=False)
    frame[150:].to_csv("test.csv", index=False)
    two = load("train.csv", options={"test": "test.csv", "user": "user"})
    parts = np.where(np.arange(200) < 150, "train", "test")
    one = load(frame.assign(part=parts), options={"split": "part", "user": "user"})
    pair = load((frame[:150], frame[150:]), options={"user": "user"})
    for data in (two, one, pair):
        assert (len(data.x), len(data.x_test)) == (150, 50)
        np.testing.assert_allclose(data.x_test[:, 0, 0, 0], frame["a"][150:], rtol=1e-6)
        assert data.columns["user"].tolist() == frame["user"].tolist()
    with pytest.raises(FedloomError, match=r"train or test, not 'x'"):
        load(frame, options={"split": "kind"})


def test_what_a_table_cannot_say_is_asked_for(in_tmp):
    frame = table().rename(columns={"label": "outcome"})
    with pytest.raises(FedloomError, match=r"Which column is the label\?.*there are user, a, kind"):
        load(frame)
    with pytest.raises(FedloomError, match=r"Unknown column in label 'outcom'. Did you mean"):
        load(frame, options={"label": "outcom"})
    picked = load(frame, options={"label": "outcome", "features": "a,flag"})
    assert picked.features == ("a", "flag")
    assert set(picked.columns) == {"user", "kind", "outcome"}
    many = table().assign(name=[f"n{i}" for i in range(200)])
    with pytest.raises(FedloomError, match=r"'name'.* has 200 different texts.*by:name"):
        load(many)
    holes = table()
    holes.loc[[7, 9], "a"] = np.nan
    with pytest.raises(FedloomError, match=r"'a' has 2 empty cells, the first in row 7"):
        load(holes)
    with pytest.warns(UserWarning, match=r"^2 of 200 rows left out for empty cells: a 2\.$"):
        assert len(load(holes, options={"missing": "drop"}).x) == 198
    holes = table()
    holes.loc[3, "label"] = None
    with pytest.raises(FedloomError, match=r"'label' has 1 empty cell,"):
        load(holes)
    assert load(table().assign(label=np.linspace(0, 1, 200))).task.name == "regression"
    dated = table().assign(day=pd.Timestamp("2024-01-01"))
    with pytest.raises(FedloomError, match=r"'day'.* holds dates"):
        load(dated)
    Path("empty.csv").write_text("")
    with pytest.raises(FedloomError, match=r"Cannot read empty\.csv"):
        load("empty.csv")


# -- arrays and objects --------------------------------------------------------------------------


def images(n=80):
    """Bright ones and dark ones."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 2
    return (rng.integers(0, 100, (n, 1, 6, 6)) + 120 * y[:, None, None, None]).astype(np.uint8), y


def test_an_npz_has_columns_to_deal_by(in_tmp, learn):
    x, y = images()
    np.savez("i.npz", x=x, y=y, who=np.array(["p", "q"])[y])
    run = learn(data="i.npz", partition="by:who", rounds=5)
    assert (run.names, run.clients["main_class"].tolist()) == (("p", "q"), [0, 1])
    assert accuracy(run) == 1
    np.savez("j.npz", x=x[:60], y=y[:60], who=y[:60], x_test=x[60:], y_test=y[60:], who_test=y[60:])
    data = load("j.npz")
    assert (len(data.x), len(data.x_test), len(data.columns["who"])) == (60, 20, 80)
    np.savez("k.npz", x=x, y=y, who=y[:-1])
    with pytest.raises(FedloomError, match=r"k\.npz: Column 'x' has 80 rows, but 'who' has 79"):
        load("k.npz")


def test_a_dict_of_arrays_is_arrays_or_a_table(learn):
    x, y = images()
    run = learn(data={"x": x, "y": y, "who": y}, partition="by:who", rounds=5)
    assert (run.names, accuracy(run)) == (("0", "1"), 1)
    columns = {name: values.to_list() for name, values in table().items()}
    np.testing.assert_allclose(load(columns, by="user").x, load(table(), by="user").x)


def test_torch_datasets_are_read(learn):
    x, y = images()
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    assert accuracy(learn(data=tensors, clients=4, rounds=5)) == 1
    assert load(tensors).x.dtype == np.uint8

    class Photos(TorchDataset):
        classes = ("dark", "bright")

        def __len__(self):
            return len(y)

        def __getitem__(self, i):
            return Image.fromarray(x[i, 0]), int(y[i])

    photos = load(Photos())
    assert (photos.classes, photos.shape) == (("dark", "bright"), (1, 6, 6))
    assert (photos.x == x).all()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    stream = load(Stream())
    assert (stream.x == x).all()
    assert (stream.y == y).all()
    both = load((tensors, TensorDataset(torch.from_numpy(x[:8]), torch.from_numpy(y[:8]))))
    assert (len(both.x), len(both.x_test)) == (80, 8)
    with pytest.raises(FedloomError, match=r"pairs of a sample and its label"):
        load(TensorDataset(torch.from_numpy(x)))


class Hugging:
    """What of a Hugging Face `Dataset` is used: its columns, by name, and what they are."""

    def __init__(self, columns, names):
        self._columns = columns
        self.column_names = list(columns)
        kinds = {name: SimpleNamespace(dtype="x") for name in columns}
        self.features = {**kinds, "label": SimpleNamespace(names=names)}

    def __getitem__(self, name):
        return self._columns[name]


def hugging(rows=slice(None), names=("dark", "bright")):
    x, y = images()
    pictures = [Image.fromarray(one[0]) for one in x[rows]]
    return Hugging({"image": pictures, "label": y[rows].tolist(), "who": y[rows].tolist()}, names)


def test_hugging_face_datasets_are_read(learn):
    data = load(hugging())
    assert (data.classes, data.shape) == (("dark", "bright"), (1, 6, 6))
    assert (data.x == images()[0]).all()
    assert accuracy(learn(data=hugging(), partition="by:who", rounds=5)) == 1
    splits = load({"train": hugging(slice(0, 60)), "test": hugging(slice(60, None))})
    assert (len(splits.x), len(splits.x_test)) == (60, 20)
    tokens = Hugging({"input_ids": [[1, 2], [3, 4]] * 4, "label": [0, 1] * 4}, ["a", "b"])
    assert (load(tokens).x.dtype, load(tokens).shape) == (np.int32, (1, 1, 2))
    ragged = Hugging({"input_ids": [[1, 2], [3]] * 4, "label": [0, 1] * 4}, ["a", "b"])
    with pytest.raises(FedloomError, match=r"pad or cut them"):
        load(ragged)


class Flower:
    """What of a `flwr_datasets` FederatedDataset is used."""

    def __init__(self):
        self._ready = False
        self.partitioners = {"train": self}

    @property
    def num_partitions(self):
        assert self._ready, "a partitioner knows it once a partition was loaded"
        return 3

    def load_partition(self, number):
        self._ready = True
        return hugging(slice(20 * number, 20 * number + 20))

    def load_split(self, split):
        if split != "test":
            raise ValueError(split)
        return hugging(slice(60, None))


def test_the_partitions_of_flwr_datasets_are_the_clients(learn):
    run = learn(data=Flower(), rounds=5)
    assert (run.config["partition"], run.names) == ("by:site", ("0", "1", "2"))
    assert run.clients["train_samples"].tolist() == [16, 16, 16]
    assert accuracy(run) == 1
    assert len(load(Flower()).x_test) == 20


def test_partitions_that_flwr_datasets_itself_deals(learn):
    datasets = pytest.importorskip("datasets")
    dealt = pytest.importorskip("flwr_datasets.partitioner")
    rng = np.random.default_rng(0)
    who = [f"u{i % 3}" for i in range(90)]
    held = {"a": rng.normal(size=90), "who": who, "label": rng.choice(["x", "y"], 90)}
    by_user, evenly = dealt.NaturalIdPartitioner("who"), dealt.IidPartitioner(2)
    for dealer in (by_user, evenly):
        dealer.dataset = datasets.Dataset.from_dict(held)
    run = learn(data=by_user, rounds=1)
    assert (run.names, run.about["features"]) == (("u0", "u1", "u2"), ["a"])
    assert learn(data=evenly, data_options={"user": "who"}, rounds=1).names == ("0", "1")


def test_users_of_flwr_datasets_keep_their_names():
    class ByUser(Flower):
        partition_id_to_natural_id = {0: "ann", 1: "bob", 2: "eve"}  # noqa: RUF012

        def load_partition(self, number):
            part = super().load_partition(number)
            part._columns["who"] = [self.partition_id_to_natural_id[number]] * 20
            return part

    found = load(ByUser())
    assert set(found.columns) >= {"site"}
    assert {str(s) for s in found.columns["site"]} >= {"ann", "bob", "eve"}
    assert "who" not in found.columns


def test_one_object_for_every_client(learn):
    x, y = images()
    run = learn(data={"rome": (x[:30], y[:30]), "oslo": (x[30:], y[30:])}, rounds=5)
    assert run.names == ("oslo", "rome")
    assert run.clients["train_samples"].tolist() == [40, 24]
    frames = [table(40), table(60)]
    sites = load(frames, options={"user": "user"}).columns["site"]
    assert sites.tolist() == ["0"] * 40 + ["1"] * 60
    assert natural(frames) == "site"
    assert natural((x, y)) is None
    with pytest.raises(FedloomError, match=r"Not all parts of the data have the column 'flag'"):
        load([table(40), table(60).drop(columns="flag")])


def test_what_holds_no_data_is_refused():
    with pytest.raises(FedloomError, match=r"Data must be a name, a path.*not float"):
        load(0.5)


# -- pictures ------------------------------------------------------------------------------------


def write_images(folder, rows, classes=None):
    x, y = images()
    for i in rows:
        place = folder if classes is None else folder / classes[y[i]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i, 0]).save(place / f"{i}.png")


def test_a_folder_of_images_may_have_a_labels_file(in_tmp, learn):
    _, y = images()
    write_images(Path("pics"), range(80))
    lines = [f"{i}.png,{('dark', 'bright')[y[i]]},{'uv'[i % 3 == 0]}" for i in range(80)]
    Path("pics/labels.csv").write_text("\n".join(["file,label,camera", *lines]))
    data = load("pics")
    assert (data.classes, data.shape) == (("bright", "dark"), (1, 6, 6))
    assert (data.x == images()[0]).all()
    run = learn(data="pics", partition="by:camera", rounds=5)
    assert (run.names, accuracy(run)) == (("u", "v"), 1)
    Path("pics/labels.csv").write_text("\n".join(["file,label", "none.png,dark"]))
    with pytest.raises(FedloomError, match=r"names .*none\.png, and there is no such file"):
        load("pics")


# -- sites ---------------------------------------------------------------------------------------


def test_a_file_for_every_site(in_tmp, learn):
    Path("sites").mkdir()
    frame = table()
    frame[:120].to_csv("sites/rome.csv", index=False)
    frame[120:].to_parquet("sites/oslo.parquet")
    more = {"data_options": {"user": "user"}, "rounds": 15}
    data = learn(data="sites:sites", **more, out="data")
    deal = learn(partition="sites:sites", **more, out="deal")
    for run in (data, deal):
        assert (run.names, run.config["partition"]) == (("oslo", "rome"), "by:site")
        assert run.clients["train_samples"].tolist() == [64, 96]
        assert accuracy(run) > 0.85
    with pytest.raises(FedloomError, match=r"is data and its partition at once"):
        learn(data="digits", partition="sites:sites")


def test_a_folder_for_every_site(in_tmp):
    for site, rows in (("rome", range(50)), ("oslo", range(50, 80))):
        write_images(Path("pics") / site, rows, ("dark", "bright"))
        x, y = images()
        Path("arrays", site).mkdir(parents=True)
        np.savez(f"arrays/{site}/train.npz", x=x[rows], y=y[rows])
        np.savez(f"arrays/{site}/test.npz", x=x[:4], y=y[:4])
    pics, arrays = load("sites:pics"), load("sites:arrays")
    for data in (pics, arrays):
        assert data.columns["site"][: len(data.x)].tolist() == ["oslo"] * 30 + ["rome"] * 50
        assert data.shape == (1, 6, 6)
    assert pics.classes == ("bright", "dark")
    assert (len(arrays.x_test), len(arrays.columns["site"])) == (8, 88)
    Path("pics/notes.txt").write_text("?")
    with pytest.raises(FedloomError, match=r"notes\.txt is no site's data"):
        load("sites:pics")


# -- LEAF ----------------------------------------------------------------------------------------


def write_leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(held["y"]) for held in users.values()]
    content = {"users": list(users), "num_samples": counts, "user_data": users}
    path.write_text(json.dumps(content))


def test_femnist_of_leaf_is_images_by_user(in_tmp, learn):
    rng = np.random.default_rng(0)

    def some(n):
        y = np.arange(n) % 2
        return {"x": (rng.random((n, 784)) / 2 + y[:, None] / 2).tolist(), "y": y.tolist()}

    users = {"f0000_14": some(20), "f0001_41": some(12)}
    write_leaf(Path("femnist/train/all_data_0.json"), users)
    write_leaf(Path("femnist/test/all_data_0.json"), {"f0000_14": some(6)})
    data = load("femnist")
    assert (data.shape, len(data.x), len(data.x_test)) == ((1, 28, 28), 32, 6)
    np.testing.assert_allclose(data.x[0].ravel(), users["f0000_14"]["x"][0], rtol=1e-6)
    run = learn(data="femnist", rounds=5, lr=0.1)
    assert (run.config["partition"], run.names) == ("by:user", ("f0000_14", "f0001_41"))
    assert accuracy(run) == 1


class Letters(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.words = torch.nn.Embedding(classes, 8)
        self.out = torch.nn.Linear(8 * shape[2], classes)

    def forward(self, x):
        return self.out(self.words(x.flatten(1)).flatten(1))


def test_shakespeare_of_leaf_is_letters_by_user(in_tmp, learn):
    from fedloom.data.leaf import LETTERS

    assert len(LETTERS) == 80
    text = "abcab" * 20
    play = {
        name: {"x": [text[i : i + 5] for i in range(60)], "y": [text[i + 5] for i in range(60)]}
        for name in ("ROMEO", "JULIET")
    }
    write_leaf(Path("shakespeare.json"), play)
    data = load("shakespeare.json")
    assert (data.x.dtype, data.shape, data.classes) == (np.int32, (1, 1, 5), tuple(LETTERS))
    assert "".join(LETTERS[i] for i in data.x[0].ravel()) == "abcab"
    assert LETTERS[data.y[0]] == "a"
    run = learn(data="shakespeare.json", model=Letters)
    assert run.names == ("JULIET", "ROMEO")
    assert accuracy(run) > 0.9


def test_other_json_is_refused(in_tmp):
    Path("a.json").write_text("[1]")
    with pytest.raises(FedloomError, match=r"not one of LEAF's files"):
        load("a.json")
    write_leaf(Path("b.json"), {"u": {"x": [["a tweet", "of someone"]], "y": [1]}})
    with pytest.raises(FedloomError, match=r"neither text nor rows of as many numbers"):
        load("b.json")
