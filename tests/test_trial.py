"""What a user met in a trial: scores that contradict each other, files lost without a word,
settings that one method of a comparison has no use for, advice that can't be followed."""

import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedloom
from fedloom.cli import main
from fedloom.data.catalog import load
from fedloom.data.partition import Partition
from fedloom.errors import FedloomError, shortage
from fedloom.experiment import plugins
from fedloom.experiment.runner import Runner
from fedloom.topology import Faults, network

SMALL = {"clients": 4, "rounds": 1, "model_options": {"hidden": [8]}, "engine": "serial"}


@pytest.fixture
def told(monkeypatch, capsys):
    """`told("show", "z")`: the exit code and all that was printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        code = 0
        with warnings.catch_warnings():  # the command line prints them
            warnings.simplefilter("always")
            try:
                main()
            except SystemExit as e:
                code = e.code
        text = capsys.readouterr()
        return code, " ".join((text.out + text.err).split())

    return run


# -- scores ---------------------------------------------------------------------------------------


def test_a_client_that_never_took_part_has_the_mean_head_on_the_common_test_set_too(quick):
    run = quick("fedper", rounds=1)
    table = run.clients.set_index("client")["test_accuracy"]
    apart = sorted(set(range(6)) - set(run.records[0]["participants"]))
    state = run.store.checkpoint()[0]
    mean = np.average(state["kept/rows"].numpy(), axis=0, weights=state["kept/weights"].numpy())
    model = run.model(client=apart[0])
    weight, bias = list(model.parameters())[-2:]
    weight.data = weight.new_tensor(mean[: weight.numel()]).view_as(weight)
    bias.data = bias.new_tensor(mean[weight.numel() :])
    data = load("digits")
    right = model(run.normalise(data.x_test)).argmax(1).numpy() == data.y_test
    assert table[apart].tolist() == pytest.approx([right.mean()] * 3)
    assert table.notna().all()


@pytest.mark.parametrize("method", ["lg-fedavg", "fedmeta-per-maml"])
def test_clients_without_a_single_model_are_left_out_of_the_common_test_set(quick, method):
    run = quick(method, rounds=1, test_share=0.5)
    table = run.clients.set_index("client")
    took = table.index.isin(run.records[0]["participants"])
    assert table["accuracy"].notna().all()
    assert table["test_accuracy"].notna().tolist() == took.tolist()
    assert run.summary["test_accuracy"] == pytest.approx(table.loc[took, "test_accuracy"].mean())


def test_after_an_average_all_clients_have_the_shared_model_on_the_common_test_set(quick):
    scores = quick("fedswap:average_every=2", participation=1.0, rounds=2).clients
    assert scores.groupby("round")["test_accuracy"].agg(["count", "nunique"]).loc[2].tolist() == [
        6, 1,
    ]  # fmt: skip


# -- files of a run -------------------------------------------------------------------------------


def test_a_lost_or_damaged_table_of_clients_is_told_with_the_way_to_score_again(quick, told):
    quick(out="z", rounds=2)
    table = Path("z/clients.parquet")
    whole = table.read_bytes()
    again = r"fedloom score z --table FILE\.csv"
    for damage in (table.unlink, lambda: table.write_bytes(whole[:-1])):
        damage()
        with pytest.raises(FedloomError, match=rf"z/clients\.parquet' is .*{again}"):
            _ = fedloom.load("z").clients
        code, text = told("show", "z")
        assert code == 2
        assert re.search(again, text)
    table.unlink()
    code, text = told("run", "--resume", "--out", "z")
    assert code == 0
    assert re.search(rf"Warning: 'z/clients.parquet' is missing.*{again}", text)
    code, text = told("score", "z", "--table", "FILE.csv")
    assert code == 0
    assert Path("FILE.csv").exists()


def test_a_run_with_lost_scores_goes_on_and_is_forked_with_a_warning(quick):
    quick(out="z", rounds=2)
    Path("z/clients.parquet").unlink()
    with pytest.warns(UserWarning, match="scores of rounds 1 to 2"):
        fedloom.run(fork="z", out="new", rounds=3)
    with pytest.warns(UserWarning, match="scores of rounds 1 to 2"):
        longer = fedloom.run(out="z", resume=True, rounds=3)
    for run in (longer, fedloom.load("new")):
        with pytest.warns(UserWarning, match="scores of rounds 1 to 2"):
            assert set(run.clients["round"]) == {3}


def test_an_edited_setting_is_named_and_not_one_in_another_order(quick):
    quick("heterofl", capacities="1:0.5,0.5:0.5", rounds=1, out="z")
    file = Path("z/config.yaml")
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(FedloomError, match="It says seed=1, and the run was made with 0"):
        _ = fedloom.load("z").config


def test_going_on_from_an_older_checkpoint_is_told_without_advice_to_do_so(quick):
    quick(out="z", rounds=3)
    last = Path("z/checkpoints/round-000003.safetensors")
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"^Going on from round 2\. [^.]*3\.safe\S+ is damaged\.$"):
        fedloom.run(out="z", resume=True)
    for file in Path("z/checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FedloomError, match=r"is damaged\. There is no complete one .* again"):
        fedloom.run(out="z", resume=True)


def test_nothing_begun_is_told_from_something_else(in_tmp):
    Path("empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(FedloomError, match=r"no run was started there\. Leave out --resume"):
            fedloom.run("fedavg", out=name, resume=True)
    assert not Path("absent").exists()
    Path("empty/letter.txt").touch()
    with pytest.raises(FedloomError, match="'empty' is not a run: it has no config"):
        fedloom.run(out="empty", resume=True)


def test_a_changed_source_is_told_before_asking_for_trust(quick, monkeypatch):
    Path("mine.py").write_text(
        "import fedloom\n\n\nclass Mine(fedloom.MethodOptions):\n    name = 'mine'\n"
        "    family = source = 'test'\n\n    def build(self):\n        return fedloom.Method()\n"
    )
    quick("mine.py", out="z", rounds=1)
    Path("mine.py").write_text(Path("mine.py").read_text() + "\n# edited\n")
    monkeypatch.setattr(plugins, "_trusted", set())
    with pytest.raises(FedloomError, match="with another source of the method than this"):
        fedloom.run(out="z", resume=True, rounds=2)


# -- comparisons ----------------------------------------------------------------------------------


def test_a_setting_for_some_methods_is_dropped_for_the_others_and_noted(in_tmp):
    comparison = fedloom.compare(
        ["fedavg", "fedrolex"], seeds=1, capacities="1:0.5,0.5:0.5", out="c", **SMALL
    )
    asked = "capacities=1, not 1:0.5,0.5:0.5 as asked (every client trains the whole model)"
    assert comparison.differences == {"fedavg": [asked]}
    assert comparison.results["fedrolex"][0].config["capacities"] == "1:0.5,0.5:0.5"
    nodes = fedloom.compare(["fedavg", "p2p-fedavg"], seeds=1, faults="loss=0.5", out="n", **SMALL)
    assert nodes.differences["fedavg"][0].startswith("faults=none, not loss=0.5 as asked (")
    for key, value in {"capacities": "0.5", "faults": "loss=0.5"}.items():
        with pytest.raises(FedloomError, match=f"{key}={value} would do nothing"):
            fedloom.compare(["fedavg", "fedprox"], seeds=1, out="d", **SMALL, **{key: value})
        with pytest.raises(FedloomError, match=f"would do nothing.* Leave {key} out"):
            fedloom.run("fedavg", **SMALL, **{key: value})


def test_remarks_are_not_called_differences(in_tmp, told):
    small = ("--clients", "4", "--rounds", "1", "--seeds", "1", "--participation", "1")
    _, text = told("compare", "fedavg", "fedrolex", *small, "--out", "c")
    remark = "all capacities are 1, so every client trains the whole model"
    assert f"Note: fedrolex: {remark}" in text
    page = Path("c/report.html").read_text()
    assert f"<p class='small'>Note:</p><ul class='small'><li><b>fedrolex</b>: {remark}" in page
    assert "Not the same" not in text + page


def test_methods_given_one_by_one_are_asked_for_as_a_list():
    with pytest.raises(FedloomError, match=r"as a list: compare\(\['fedavg', 'fedprox'\]\)"):
        fedloom.compare("fedavg", "fedprox")


# -- sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "fork", "advice"),
    [
        ("heterofl", {"capacities": "1:0.5,0.5:0.5"}, "fedavg", {"capacities": "1"}),
        ("p2p-fedavg", {"faults": "loss=0.5"}, "fedswap", {"faults": "none"}),
        ("p2p-fedavg", {"topology": "ring"}, "fedswap", {"topology": "none"}),
    ],
)
def test_what_a_fork_inherits_is_set_otherwise_not_left_out(quick, method, settings, fork, advice):
    quick(method, rounds=1, out="r", participation=1.0, **settings)
    ((key, value),) = advice.items()
    with pytest.raises(FedloomError, match=rf"Set --{key} {value} \(a fork has"):
        fedloom.run(fork, fork="r", out="new", rounds=2)
    assert len(fedloom.run(fork, fork="r", out="new", rounds=2, **advice).rounds) == 2


def test_no_round_is_called_finished_where_none_began(quick, monkeypatch):
    def hungry(*_):
        raise MemoryError

    assert "--resume" not in shortage("this", MemoryError())
    with monkeypatch.context() as short:
        short.setattr(Runner, "round", hungry)
        with pytest.raises(FedloomError, match=r"not enough memory for round 1\b") as first:
            quick(out="z")
    assert "not lost" not in str(first.value)
    quick(out="z", rounds=1)
    monkeypatch.setattr(Runner, "round", hungry)
    with pytest.raises(FedloomError, match=r"for round 2\b.*not lost: .*--resume --out z"):
        quick(out="z", rounds=2, resume=True)


def test_a_wrong_output_is_told_with_the_input(quick):
    def flat(shape, classes):
        return nn.Sequential(nn.Flatten(0), nn.Linear(2 * 64, classes))

    with pytest.raises(FedloomError, match=r"an input of shape \(2, 1, 8, 8\) it returned \(10"):
        quick(model=flat)


def test_values_to_predict_are_not_taken_for_classes(in_tmp):
    x, rng = np.zeros((300, 4), np.float32), np.random.default_rng(0)
    with pytest.raises(
        FedloomError, match=r"300 different labels for 300 samples. Say what they are"
    ):
        load((x, rng.permutation(300)))
    with pytest.raises(FedloomError, match="--task classification"):
        load((x, np.arange(300) % 150))  # two samples each: classes or values?
    assert load((x, np.arange(300) % 60)).n_classes == 60
    assert load((x[:19], np.arange(19))).n_classes == 19


def test_rows_of_a_table_are_not_called_images(in_tmp):
    x, y = np.zeros((4, 3)), [0, 1, 0, 1]
    x[3, 1] = np.nan
    with pytest.raises(FedloomError, match=r"The samples of 'arrays' .*, first in sample 3"):
        load((x, y))
    with pytest.raises(FedloomError, match=r"The images of 'arrays' .*, first in image 3"):
        load((x[:, None, :].repeat(2, 1), y))


def test_partition_files_are_refused_in_plain_words(in_tmp):
    with pytest.raises(FedloomError, match=r"partition no\.json: there is no such file\.$"):
        Partition.load("no.json")
    Path("cut.json").write_text(json.dumps([[0, 1], [2, 3]])[:-5])
    with pytest.raises(FedloomError, match=r"cut\.json: it is not valid JSON from line 1, col"):
        Partition.load("cut.json")
    Path("dir.npz").mkdir()
    with pytest.raises(FedloomError, match=r"dir\.npz: is a directory\.$"):
        Partition.load("dir.npz")


def test_wrong_options_of_networks_and_faults_have_a_colon():
    with pytest.raises(FedloomError, match="valid: area: input should be a finite number"):
        network("waypoint,area=inf")
    with pytest.raises(FedloomError, match="valid: loss: input should be less than"):
        Faults.parse("loss=2")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"clients": True}, "give a whole number"),
        ({"lr": True}, r"give a number \(lr"),
        ({"clip": True}, "give a number or none"),
        ({"score_on": True}, "give auto or test or query"),
        ({"model": 3}, r"model=3 is not valid: give a model's name, FILE.py:FACTORY, or"),
        ({"model": 0}, "model=0 is not valid"),
    ],
)
def test_a_value_of_another_kind_is_told_what_the_setting_takes(in_tmp, settings, wanted):
    with pytest.raises(FedloomError, match=wanted):
        fedloom.run("fedavg", **settings)


def test_a_saved_picture_is_named(quick, told):
    quick(out="z", rounds=1)
    code, text = told("show", "z", "--plot", "z.png")
    assert (code, Path("z.png").exists()) == (0, True)
    assert text.endswith("Picture: z.png")


# -- a second trial -------------------------------------------------------------------------------


def test_a_comparison_tells_options_of_methods_that_are_not_the_default(quick):
    few = {**SMALL, "seeds": 1}
    found = fedloom.compare(["fedavg", "fedprox", "fedprox:mu=2"], mu=1.0, **few, out="c")
    assert found.differences == {"fedprox": ["mu=1, which is not its default"]}  # a label says it
    pair = fedloom.compare(["fedprox:mu=1", "fedprox"], **few, out="d").differences
    assert pair == {"fedprox": ["mu=0.1 (fedprox:mu=1: 1)"]}


def test_a_run_shows_the_options_that_were_chosen_and_no_others(in_tmp, told):
    fedloom.run("heterofl+fedper", **SMALL, capacities="1:0.5,0.5:0.5", out="a")
    fedloom.run("feddom", **SMALL, delta=1.0, out="b")
    assert "heterofl+fedper: digits" in told("show", "a")[1]
    assert "feddom, delta=1.0: digits" in told("show", "b")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--search", "lr=0.1..1", "--by", "macroo"], "Unknown score 'macroo'. Did you mean"),
        ([], "Say what to search: --search NAME=RANGE"),
    ],
)
def test_a_search_that_can_not_be_is_refused_before_its_first_run(in_tmp, told, words, says):
    code, said = told("tune", "fedavg", "--runs", "2", "--out", "t", *words)
    assert code == 2
    assert says in said
    assert not Path("t").exists()


def test_what_a_search_chose_goes_to_each_method_of_a_comparison(in_tmp, told):
    chosen = "clients: 4\nrounds: 1\ntuned:\n  fedavg: {lr: 0.2}\n  fedprox: {lr: 0.3, mu: 2.0}\n"
    Path("chosen.yaml").write_text(chosen)
    words = ["compare", "fedavg", "fedprox@mu=3", "--config", "chosen.yaml", "--seeds", "1"]
    code, _ = told(*words, "--out", "c")
    assert code == 0
    found = {name: runs[0].config for name, runs in fedloom.load("c").results.items()}
    assert {name: (c["lr"], c["clients"]) for name, c in found.items()} == {
        "fedavg@lr=0.2": (0.2, 4), "fedprox@lr=0.3,mu=3": (0.3, 4),
    }  # fmt: skip
    assert found["fedprox@lr=0.3,mu=3"]["params"]["mu"] == 3
    told(*words, "--lr", "0.4", "--out", "d")
    assert {r[0].config["lr"] for r in fedloom.load("d").results.values()} == {0.4}
    assert "no settings for 'local'" in told("compare", "local", "--config", "chosen.yaml")[1]


def test_errors_of_own_files_say_what_to_do(in_tmp, told):
    rng = np.random.default_rng(0)
    rows = [f"{rng.choice(['x', 'y'])},{v:.2f},{rng.choice(['u', 'v'])}" for v in rng.random(60)]
    Path("a.csv").write_text("\n".join(["who,a,label", *rows]))
    Path("holes.csv").write_text("\n".join(["who,a,label", *rows[:3], ",0.5,u", *rows[4:]]))
    few = ("--clients", "4", "--rounds", "1")
    for scale in ("unit", "half"):
        said = told("run", "fedavg", "--data", "a.csv", "--normalise", scale, *few)[1]
        assert f"normalise={scale} is for images" in said
    said = told("run", "fedavg", "--init", "a.csv")[1]
    assert "no file of weights: give a run's directory, or a state_dict" in said
    Path("junk.pt").write_bytes(rng.bytes(100))
    assert "Save one with torch.save" in told("run", "fedavg", "--init", "junk.pt")[1]
    said = told("run", "fedavg", "--data", "holes.csv", "--partition", "by:who")[1]
    assert "'who' has 1 empty cell, the first in line 5, so it does not say whose" in said
    assert "features" not in said
    said = told("run", "fedavg", "--data", "a.csv", "--partition", "by:whom")[1]
    assert "Unknown column of users (by:COLUMN) 'whom'. Did you mean 'who'?" in said
