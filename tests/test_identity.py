"""A run goes on only as the experiment that it is; a fork starts a new one from it."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.settings import RESUMABLE
from fedloom.report.terminal import print_result


def edit(path, **changes):
    """Change settings in a run's config by hand, as an older version wrote it: no checksum."""
    file = Path(path) / "config.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))


def everything(path):
    return {f: f.read_bytes() for f in Path(path).rglob("*") if f.is_file()}


CHANGES = {
    "lr": 0.5, "momentum": 0.5, "batch": 16, "epochs": 2, "partition": "shards:2", "seed": 7,
    "participation": 1.0, "test_share": 0.4, "static_samples": 7, "model_options": {"hidden": [9]},
    "params": {"mu": 0.9}, "method": "local", "precision": "bf16", "clients": 5,
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES)
def test_a_config_that_was_edited_does_not_go_on(quick, key):
    quick("fedavg" if key == "method" else "fedprox", out="here")
    edit("here", **{key: CHANGES[key]})
    before = everything("here")
    with pytest.raises(FedloomError, match=rf"was started with {key}=.*--fork here --out NEW"):
        fedloom.run(None if key == "method" else "fedprox", out="here", resume=True, rounds=5)
    assert everything("here") == before


def test_an_edited_line_is_named_wherever_the_config_is_read(quick):
    quick(out="here")
    file = Path("here/config.yaml")
    file.write_text(file.read_text().replace("lr: 0.05", "lr: 0.5"))
    for use in (
        lambda: fedloom.run(out="here", resume=True),
        lambda: print_result(fedloom.load("here")),
        fedloom.load("here").score,
    ):
        with pytest.raises(FedloomError, match=r"It says lr=0.5, and the run was made with 0.05"):
            use()
    with pytest.warns(UserWarning, match=r"says lr=0.5, .* The fork starts with the settings that"):
        fork = fedloom.run(fork="here", out="new", rounds=4)
    assert fork.rounds["lr"].tolist() == [0.05] * 4


def test_a_config_cut_in_half_is_damaged(quick):
    quick(out="here")
    file = Path("here/config.yaml")
    text = file.read_text()
    lines = [i + 1 for i, letter in enumerate(text[:-1]) if letter == "\n"]
    for size in (len(text) // 2, len(text) * 2 // 3, len(text) - 30, len(text) - 3, *lines):
        file.write_text(text[:size])
        with pytest.raises(FedloomError, match=r"config.yaml' is (damaged|not as fedloom wrote)"):
            _ = fedloom.load("here").config


@pytest.fixture
def named_files(in_tmp):
    """Settings that name files, and for each what else may be in them."""
    half = np.arange(120) % 3
    images = np.random.default_rng(0).random((120, 1, 4, 4), dtype=np.float32)
    np.savez("data.npz", x=images, y=half, x_test=images[:30], y_test=half[:30])
    np.savez("public.npz", x=images[:50] * 0.5, y=half[:50], x_test=images[:9], y_test=half[:9])
    deal = [list(range(c, 120, 4)) for c in range(4)]
    Path("deal.json").write_text(json.dumps(deal))
    Path("able.csv").write_text("client,capacity\n0,1\n1,1\n2,0.5\n3,0.5\n")
    Path("meet.csv").write_text("round,a,b\n1,0,1\n2,2,3\n3,0,2\n")
    Path("mine.py").write_text(
        "import fedloom\n\n\nclass Mine(fedloom.MethodOptions):\n    name = 'mine'\n"
        "    family = source = 'test'\n\n    def build(self):\n        return fedloom.Method()\n"
    )
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), "
        "nn.Linear(8, classes))\n"
    )
    return {"data": "data.npz", "clients": 4, "rounds": 2, "participation": 1.0,
            "engine": "serial"}  # fmt: skip


def swapped():
    deal = json.loads(Path("deal.json").read_text())
    Path("deal.json").write_text(json.dumps([deal[1], deal[0], *deal[2:]]))


def other_public():
    with np.load("public.npz") as old:
        np.savez("public.npz", **{**old, "x": old["x"] + 1})


def replaced(file, old, new):
    def change():
        text = Path(file).read_text()
        assert old in text
        Path(file).write_text(text.replace(old, new))

    return change


FILES = {
    "another partition": ("fedavg", {"partition": "file:deal.json"}, swapped),
    "other capacities": (
        "heterofl",
        {"capacities": "able.csv", "model_options": {"hidden": [8]}},
        replaced("able.csv", "0,1\n1,1\n2,0.5\n3,0.5", "0,0.5\n1,1\n2,1\n3,0.5"),
    ),
    "other public images": ("fedswap:partner=min", {"public": "public.npz"}, other_public),
    "other contacts": ("p2p-fedavg", {"topology": "trace:meet.csv"},
                 replaced("meet.csv", "2,2,3", "2,1,3")),
    "another source of the method": ("mine.py", {}, replaced("mine.py", "Method()", "Method() ")),
    "another source of the model": ("fedavg", {"model": "net.py:net"},
                                    replaced("net.py", "ReLU", "Tanh")),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_run_does_not_go_on_with_another_file_of_the_same_name(named_files, what):
    method, settings, change = FILES[what]
    fedloom.run(method, out="here", **named_files, **settings)
    fedloom.run(method, out="here", resume=True, rounds=3)
    before = everything("here")
    change()
    with pytest.raises(FedloomError, match=f"made with {what} than this .*--fork here"):
        fedloom.run(method, out="here", resume=True, rounds=4, model=settings.get("model"))
    assert everything("here") == before
    forked = fedloom.run(method, fork="here", out="new", rounds=4, model=settings.get("model"))
    assert len(forked.rounds) == 4


def test_a_model_given_in_python_is_known_by_its_source_and_layers(quick):
    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))

    def another(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, classes))

    quick(model=factory, out="here")
    with pytest.raises(FedloomError, match="other source of the model"):
        quick(model=another, out="here", resume=True, rounds=4)
    assert len(quick(model=factory, out="here", resume=True, rounds=4).rounds) == 4


def test_what_concerns_length_speed_or_scores_may_change_and_is_written_down(quick):
    whole = quick(rounds=6, eval_every=2)
    quick(rounds=3, eval_every=1, out="here")
    changes = {
        "rounds": 6, "eval_every": 2, "workers": 2, "engine": "processes", "threads": 1,
        "checkpoint_every": 3, "eval_clients": 4, "eval_common": 3, "device": "cpu",
        "track": "tensorboard",
    }  # fmt: skip
    assert changes.keys() == RESUMABLE - {"ray_address"}
    longer = fedloom.run(out="here", resume=True, **changes)
    assert changes.items() <= longer.config.items()
    assert torch.equal(*(r.store.checkpoint()[0]["shared"] for r in (whole, longer)))
    assert longer.evaluations["round"].tolist() == [1, 2, 3, 4, 6]


def test_a_run_of_an_older_version_is_shown_and_goes_on(quick):
    """Without checksums, and with a checkpoint that knows only its data."""
    whole = quick(rounds=4)
    quick(rounds=3, out="old")
    edit("old")
    rounds = Path("old/rounds.jsonl")
    plain = [json.loads(line) for line in rounds.read_text().splitlines()]
    rounds.write_text("".join(json.dumps(r | {"crc": None}) + "\n" for r in plain))
    rounds.write_text(rounds.read_text().replace(', "crc": null', ""))
    table = Path("old/clients.parquet")
    pd.read_parquet(table).to_parquet(table, index=False)
    age_checkpoints(Path("old"))
    print_result(fedloom.load("old"), details=True)
    fedloom.load("old").score()
    resumed = quick(rounds=4, out="old", resume=True)
    assert torch.equal(*(r.store.checkpoint()[0]["shared"] for r in (whole, resumed)))
    pd.testing.assert_frame_equal(whole.clients, resumed.clients)
    assert '"crc"' in rounds.read_text().splitlines()[0]


def age_checkpoints(path):
    import zlib

    import safetensors
    import safetensors.torch

    for file in (path / "checkpoints").iterdir():
        with safetensors.safe_open(file, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
            about = json.loads(f.metadata()["fedloom"])
        for key in ("settings", "dealt", "dealt_capacities", "public_images", "method_source",
                    "model_source", "layout", "tensors", "crc"):  # fmt: skip
            del about[key]
        total = 0
        for name in sorted(tensors):
            values = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(values.numpy().data, total)
        meta = {"fedloom": json.dumps({**about, "crc32": f"{total:08x}"}, sort_keys=True)}
        safetensors.torch.save_file(tensors, file, metadata=meta)


# -- forks ---------------------------------------------------------------------------------------


def shared(result):
    return result.store.checkpoint()[0]["shared"]


def test_a_fork_without_a_change_is_the_run_gone_on(quick):
    whole = quick("fedper", rounds=5, momentum=0.5)
    quick("fedper", rounds=3, momentum=0.5, out="start")
    before = everything("start")
    fork = fedloom.run(fork="start", rounds=5, out="new")
    assert everything("start") == before
    states = [r.store.checkpoint()[0] for r in (whole, fork)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert fork.rounds["round"].tolist() == [1, 2, 3, 4, 5]
    assert fork.rounds["train_loss"].tolist() == whole.rounds["train_loss"].tolist()
    pd.testing.assert_frame_equal(fork.clients, whole.clients)
    assert fork.config["fork"] == "start@3"
    origin = fork.store.checkpoint()[1]["forked_from"]
    assert (origin["path"], origin["round"]) == ("start", 3)
    assert origin["fingerprint"] == fedloom.load("start").store.checkpoint()[1]["tensors"]
    print_result(fork)


def test_a_fork_takes_other_settings_from_its_first_round_on(quick):
    quick(rounds=3, lr=0.1, out="start")
    same, other = (
        fedloom.run(fork="start", rounds=5, out=f"lr{lr}", lr=lr).rounds for lr in (0.1, 0.3)
    )
    assert same["lr"].tolist() == [0.1] * 5
    assert other["lr"].tolist() == [0.1] * 3 + [0.3] * 2
    assert same["train_loss"][:3].tolist() == other["train_loss"][:3].tolist()
    assert (same["train_loss"] != other["train_loss"]).tolist()[3:] == [True, True]
    assert fedloom.load("lr0.3").config["model_options"] == {"hidden": [16]}
    resumed = fedloom.run(out="lr0.3", resume=True, rounds=6)
    assert resumed.store.checkpoint()[1]["forked_from"]["round"] == 3


def test_a_fork_can_start_from_the_checkpoint_before_the_last(quick):
    quick(rounds=4, out="start")
    fork = fedloom.run(fork="start@3", rounds=4, out="new")
    assert fork.config["fork"] == "start@3"
    assert torch.equal(shared(fork), shared(fedloom.load("start")))
    with pytest.raises(FedloomError, match=r"no checkpoint of round 1; it has those of: 3, 4"):
        fedloom.run(fork="start@1", rounds=9)


def test_private_parts_of_a_fork_start_from_the_shared_model(quick):
    start = quick("fedavg", rounds=2, out="start")
    fork = fedloom.run("local", fork="start", rounds=3, out="new", participation=1.0)
    assert fork.config["method"] == "local"
    assert torch.equal(shared(fork), shared(start))
    assert len(fork.store.checkpoint()[0]["kept/clients"]) == 6


@pytest.mark.parametrize(
    ("start", "change", "why"),
    [
        ("fedavg", {"model_options": {"hidden": [17]}}, "another model"),
        ("fedavg", {"model": "lenet"}, "model"),
        ("fedper", {"method": "fedavg"}, "keep private parts of the model"),
        ("fedper", {"method": "lg-fedavg"}, "keep private parts of the model"),
        ("fedper", {"seed": 3}, "other data here"),
        ("fedper", {"clients": 5}, "other data here"),
        ("fedavg", {"rounds": 2}, "give --rounds above 2"),
        ("fedavg", {"out": "start", "overwrite": True}, "can't replace it"),
        ("fedavg", {"preset": "source"}, "preset would do nothing"),
    ],
)
def test_a_fork_that_would_lose_what_was_learned_is_refused(quick, start, change, why):
    quick(start, rounds=2, out="start")
    with pytest.raises(FedloomError, match=why):
        fedloom.run(**{"fork": "start", "rounds": 4, "out": "new", **change})
    assert not Path("new").exists()


KEPT = {"optimiser_state": "kept"}


@pytest.mark.parametrize(
    ("start", "change", "why"),
    [
        (
            {"optimiser": "adam", **KEPT},
            {"optimiser": "adagrad"},
            r"keep its first and second and count \(optimiser=adam, optimiser_state=kept\), and "
            r"here they would keep its squares \(optimiser=adagrad, .* Leave optimiser",
        ),
        (
            {"optimiser": "adam", **KEPT},
            {"optimiser_state": "fresh"},
            "here they would keep nothing of the optimiser",
        ),
        (  # a vector each, which mean different things
            {"momentum": 0.5, **KEPT},
            {"optimiser": "adagrad", "momentum": 0.0},
            "keep its velocity .*momentum=0.5.* would keep its squares",
        ),
        (
            {"method": "fedper"},
            {"optimiser": "adam", **KEPT},
            "keep nothing of the optimiser .* would keep its first and second",
        ),
    ],
)
def test_a_fork_with_another_optimisers_memory_is_refused_with_what_differs(
    quick, start, change, why
):
    quick(**{"method": "fedavg", "rounds": 1, "out": "start", **start})
    with pytest.raises(FedloomError, match=why):
        fedloom.run(fork="start", rounds=2, out="new", **change)


def test_moments_that_mean_the_same_go_on_in_a_fork(quick):
    quick(rounds=1, optimiser="adam", **KEPT, participation=1.0, out="start")
    fork = fedloom.run(fork="start", rounds=2, out="new", optimiser="adamw,beta1=0.8")
    counts = fork.store.checkpoint()[0]["kept/rows"][:, -1]
    alone = quick(rounds=1, optimiser="adam", **KEPT, participation=1.0)
    assert (counts == 2 * alone.store.checkpoint()[0]["kept/rows"][:, -1]).all()


@pytest.mark.parametrize(
    "change", [{"encode": "fp32"}, {"method": "fedper"}, {"clients": 5}], ids=str
)
def test_what_an_encoding_owes_is_forgotten_by_a_fork_only_with_a_warning(quick, change):
    quick(rounds=1, encode="topk:0.1", participation=1.0, out="start")
    with pytest.warns(UserWarning, match="had left out of clients' messages is forgotten"):
        fork = fedloom.run(**{"fork": "start", "rounds": 2, "out": "new", **change})
    assert len(fork.rounds) == 2


def test_what_an_encoding_owes_goes_on_in_a_fork_that_sends_the_same(quick):
    whole = quick(rounds=3, encode="topk:0.1")
    quick(rounds=2, encode="topk:0.1", out="start")
    fork = fedloom.run(fork="start", rounds=3, out="new")
    for name, value in whole.store.checkpoint()[0].items():
        assert torch.equal(value, fork.store.checkpoint()[0][name])


def test_a_cosine_run_can_be_forked_to_another_length(quick):
    quick(rounds=2, lr_schedule="cosine", out="start")
    fork = fedloom.run(fork="start", rounds=4, out="new")
    assert fork.rounds["lr"].tolist()[3] < fork.rounds["lr"].tolist()[2]


def test_a_comparison_may_start_from_a_run(quick):
    quick(rounds=2, out="start")
    both = {"methods": ["fedavg", "fedprox:mu=1"], "seeds": 1, "fork": "start", "out": "two"}
    done = fedloom.compare(rounds=3, **both)
    first, second = (runs[0].rounds["train_loss"] for runs in done.results.values())
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    longer = fedloom.compare(rounds=4, resume=True, **both)
    assert [len(runs[0].rounds) for runs in longer.results.values()] == [4, 4]
