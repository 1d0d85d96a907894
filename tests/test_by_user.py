"""Every user is a client, under the name that it has in the data."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom
from fedloom.data.partition import Partition

USERS = ("ana", "bo", "cy")


def visits(n=90, users=USERS):
    """Rows of users: what they do is decided by age, and where they live is text."""
    rng = np.random.default_rng(0)
    age = rng.integers(18, 80, n)
    town = rng.choice(["Rome", "Oslo"], n)
    does = np.where((age > 45) ^ (town == "Oslo"), "stays", "leaves")
    who = np.array(users)[np.arange(n) % len(users)]
    return pd.DataFrame(
        {"who": who, "age": age, "income": rng.normal(3e4, 1e4, n), "town": town, "does": does}
    )


@pytest.fixture
def table(in_tmp):
    visits().to_csv("visits.csv", index=False)
    return ("--data", "visits.csv", "--partition", "by:who", "--set", "data_options.label=does")


def test_a_table_by_user_has_its_users_for_clients(table, call):
    code, shown = call("run", "local", *table, "--participation", 1, "--rounds", 1, "--out", "r")
    assert code == 0, shown
    run = fedloom.load("r")
    assert run.config["clients"] == 3
    assert run.names == USERS
    assert run.clients["name"].tolist() == list(USERS)
    assert run.clients["train_samples"].tolist() == [24, 24, 24]
    assert run.classes == ("leaves", "stays")
    assert run.about["shape"] == [1, 1, 4]  # age, income, town=Oslo, town=Rome: not who
    code, shown = call("show", "r")
    assert "Clients worst off: " in shown
    assert all(f"{name} (" in shown for name in USERS)


def test_a_client_is_found_by_its_name(table, quick, row):
    run = quick("local", data="visits.csv", partition="by:who", data_options={"label": "does"},
                clients=None, participation=1.0, rounds=1)  # fmt: skip
    by_name, by_number = run.model("bo"), run.model(1)
    assert all(map(torch.equal, by_name.parameters(), by_number.parameters()))
    with pytest.raises(fedloom.FedloomError, match=r"no client boo.*Did you mean 'bo'"):
        run.model("boo")


def test_show_names_the_clients_and_counts_them(table, call):
    words = ("data", "show", "visits.csv", "--partition", "by:who", "--set", "label=does")
    code, shown = call(*words, "--plot", "deal.png")
    assert code == 0, shown
    assert "clients and their samples: ana (30), bo (30), cy (30)" in shown
    assert Path("deal.png").stat().st_size > 0


def test_the_picture_of_a_partition_names_the_clients():
    from fedloom.report.partition_plot import plot_partition

    dealt = Partition.of_ids(["b", "a", "b"])
    figure = plot_partition(dealt, np.array([0, 1, 1]), ("no", "yes"), "by name")
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["a", "b"]


def test_the_picture_of_swaps_names_the_clients(quick):
    run = quick("fedswap", data=visits(), data_options={"label": "does"}, partition="by:who",
                clients=None, participation=1.0, rounds=2)  # fmt: skip
    swapped = {*run.swaps["name"], *run.swaps["partner_name"]}
    assert swapped <= set(USERS)
    ticks = [t.get_text() for axis in run.plot_swaps().axes for t in axis.get_yticklabels()]
    assert swapped <= set(ticks)


def test_an_error_names_the_client_and_so_does_what_is_left_out(quick, capsys):
    from fedloom.report.terminal import print_result

    same = {"data": visits(), "data_options": {"label": "does"}, "partition": "by:who",
            "clients": None, "participation": 1.0, "rounds": 1,
            "attack": "nan,share=0.4"}  # fmt: skip
    with pytest.raises(fedloom.FedloomError, match=r"client (ana|bo|cy) in round 1"):
        quick(**same, out="stopped")
    run = quick(**same, on_bad="skip", out="skipped")
    assert list(run.skipped.columns) == ["round", "client", "name", "reason"]
    assert set(run.skipped["name"]) <= set(USERS)
    print_result(run)
    assert f"client {run.skipped['name'][0]} in 1 round" in capsys.readouterr().out


def test_names_stay_with_a_run_that_is_resumed_forked_and_scored_again(table, quick):
    same = {"data": "visits.csv", "partition": "by:who", "data_options": {"label": "does"}}
    quick(**same, clients=None, rounds=1, out="r")
    on = fedloom.run(out="r", rounds=2, resume=True)
    assert on.names == USERS
    assert list(on.score().clients["name"]) == list(USERS)
    assert fedloom.run(fork="r", rounds=3, out="f").names == USERS


def test_newcomers_are_named_apart(quick):
    run = quick(data=visits(), data_options={"label": "does"}, partition="by:who", clients=None,
                newcomers=2, newcomer_classes=1, test_share=0.5, rounds=1)  # fmt: skip
    assert run.clients["name"].tolist() == [*USERS, "newcomer 0", "newcomer 1"]


def test_another_number_of_clients_than_there_are_users_is_refused(table, call):
    code, told = call("run", "fedavg", *table, "--clients", 4, "--out", "r")
    assert (code, "Set clients to 3, or leave it out" in told) == (2, True)
    code, told = call("run", "fedavg", "--data", "visits.csv", "--partition", "by:whom", "--set",
                      "data_options.label=does", "--out", "r")  # fmt: skip
    assert (code, "Unknown column of users (by:COLUMN) 'whom'. Did you mean 'who'?" in told) == (
        2,
        True,
    )
    code, told = call("run", "fedavg", "--partition", "by:who", "--out", "r")
    assert (code, "the data has no column 'who'" in told) == (2, True)


def test_participation_may_count_more_clients_than_the_default(quick):
    frame = visits(n=240, users=[f"u{i}" for i in range(60)])
    run = quick(data=frame, data_options={"label": "does"}, partition="by:who", clients=None,
                participation=55, rounds=1)  # fmt: skip
    assert run.config["clients"] == 60


def test_a_comparison_by_user_shares_the_clients(table, in_tmp):
    found = fedloom.compare(["fedavg", "local"], seeds=1, data="visits.csv", partition="by:who",
                            data_options={"label": "does"}, rounds=1, out="cmp")  # fmt: skip
    assert {r.names for runs in found.results.values() for r in runs} == {USERS}
    assert "clients" in found.same


def test_ids_in_python_may_be_names_or_any_numbers(in_tmp):
    named = Partition.of_object(np.array(["b", "a", "b"]))
    assert (named.names, named[1].tolist()) == (("a", "b"), [0, 2])
    numbers = Partition.of_object(pd.Series([1017, 12, 1017]))
    assert (numbers.names, numbers[0].tolist()) == (("12", "1017"), [1])
    counted = Partition.of_object([1, 0, 1])
    assert (counted.names, counted[1].tolist()) == ((), [0, 2])
    by_name = Partition.of_object({"x": [2], "y": [0, 1]})
    assert (by_name.names, by_name[1].tolist()) == (("x", "y"), [0, 1])
    with pytest.raises(fedloom.FedloomError, match=r"have no client"):
        Partition.of_ids(["a", None])


@pytest.mark.parametrize("ending", [".json", ".csv", ".npz"])
def test_a_partition_file_keeps_names_and_rows(in_tmp, ending):
    for dealt in (Partition.of_ids(["b", "a", "b", "a"]), Partition.of_lists([[3, 0], [1]])):
        dealt.save(f"deal{ending}")
        again = Partition.load(f"deal{ending}")
        assert again.names == dealt.names
        assert [held.tolist() for held in again] == [held.tolist() for held in dealt]


def test_partition_files_made_elsewhere(in_tmp):
    Path("rows.json").write_text(json.dumps({"ana": [0, 2], "bo": [1]}))
    Path("each.csv").write_text("client\nana\nbo\nana\n")
    Path("some.csv").write_text("row,client\n2,ana\n0,ana\n1,bo\n")
    np.savez("each.npz", client=np.array(["ana", "bo", "ana"]))
    for file in ("rows.json", "each.csv", "some.csv", "each.npz"):
        dealt = Partition.load(file)
        assert (file, dealt.names) == (file, ("ana", "bo"))
        assert (sorted(dealt[0].tolist()), dealt[1].tolist()) == ([0, 2], [1])
    Path("bad.csv").write_text("user\nana\n")
    with pytest.raises(fedloom.FedloomError, match=r"first line must name the columns"):
        Partition.load("bad.csv")
    Path("odd.csv").write_text("row,client\nfirst,ana\n")
    with pytest.raises(fedloom.FedloomError, match=r"'first' where a row number"):
        Partition.load("odd.csv")


def test_a_partition_file_says_how_many_clients_there_are(table, quick):
    rows = {user: list(range(i, 90, 3)) for i, user in enumerate(USERS)}
    Path("rows.json").write_text(json.dumps(rows))
    same = {"data": "visits.csv", "data_options": {"label": "does", "user": "who"}, "clients": None}
    file = quick(**same, partition="file:rows.json", rounds=1, out="file")
    column = quick(**same, partition="by:who", rounds=1, out="by")
    assert file.clients.equals(column.clients)
