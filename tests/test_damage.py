"""Flipped bits in every file of a run: the right result or a sentence, never other numbers."""

import contextlib
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.checksums import Damaged, open_json, open_table, seal_json, seal_table
from fedloom.report.terminal import out as console
from fedloom.report.terminal import print_result

FILES = ("config.yaml", "rounds.jsonl", "clients.parquet", "checkpoints/round-000003.safetensors",
         "clients/round-000003.parquet")  # fmt: skip
FLIPS = 15


def shown(path):
    with console.capture() as text:
        print_result(fedloom.load(path), details=True)
    return text.get()


def scored(path):
    return fedloom.load(path).score().summary


def resumed(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it goes back to an older checkpoint
        fedloom.run(out=path, resume=True)
    kept = fedloom.load(path)
    times = ["seconds", "eval_seconds", "peak_memory"]
    state = kept.store.checkpoint()[0]["shared"].tolist()
    return kept.rounds.drop(columns=times).to_json(), kept.clients.to_json(), state


@pytest.fixture
def run_of_three(quick):
    quick(rounds=3, out="good", public="share:0.05")
    shutil.copytree("good", "parts")  # as it was before its tables were gathered
    table = fedloom.load("good").clients
    (Path("parts") / "clients.parquet").unlink()
    for t, rows in table.groupby("round"):
        fedloom.load("parts").store.add_clients(t, rows)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_never_another_number(run_of_three, name):
    good = "parts" if name.startswith("clients/") else "good"
    expected = {use: use(good) for use in (shown, scored, resumed)}
    shutil.rmtree("hurt", ignore_errors=True)
    if good == "parts":  # resuming gathered them
        for t, rows in fedloom.load("parts").clients.groupby("round"):
            fedloom.load("parts").store.add_clients(t, rows)
        (Path("parts") / "clients.parquet").unlink()
    content = (Path(good) / name).read_bytes()
    drawn = random.Random(name)
    refused = 0
    for flip in range(FLIPS):
        at, bit = drawn.randrange(len(content)), 1 << drawn.randrange(8)
        shutil.rmtree("hurt", ignore_errors=True)
        shutil.copytree(good, "hurt")
        damaged = bytearray(content)
        damaged[at] ^= bit
        (Path("hurt") / name).write_bytes(damaged)
        uses = (shown, scored, resumed) if flip % 5 == 0 else (shown,)
        for use in uses:
            try:
                found = use("hurt")
            except FedloomError as e:
                refused += "damaged" in str(e) or "not as fedloom wrote" in str(e)
                continue
            same = found == expected[use] or found == expected[use].replace(good, "hurt")
            assert same, (at, bit, use)
    assert refused >= FLIPS // 2 or name.startswith("checkpoints")


@pytest.fixture
def named(in_tmp):
    """A run whose clients have names."""
    x = np.random.default_rng(0).random((60, 4))
    table = pd.DataFrame({f"x{i}": x[:, i] for i in range(4)})
    table["site"], table["label"] = ["Adam", "Bert", "Carl"] * 20, [0, 1] * 30
    table.to_csv("t.csv", index=False)
    return fedloom.run("fedavg", data="t.csv", partition="by:site", rounds=1, eval_every=1,
                       engine="serial", out="r")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "word", "forged"),
    [
        ("names.json", b"Adam", b"Eve!"),
        ("about.json", b'"fedloom": "', b'"fedloom": "9'),
        ("manifest.yaml", b"bytes: ", b"bytes: 9"),
    ],
)
def test_an_edited_file_about_a_run_is_refused_by_name(named, name, word, forged):
    file = named.path / name
    content = file.read_bytes()
    named.report("good.html")
    assert word in content
    file.write_bytes(content.replace(word, forged, 1))
    with pytest.raises(FedloomError, match=rf"{name}' is damaged: .*checksum.*\. Delete it: "):
        fedloom.load("r").report("page.html")
    file.unlink()
    fedloom.load("r").report("page.html")


def test_files_of_older_versions_have_no_checksum_and_are_read(named):
    (named.path / "names.json").write_text('["Eve", "Bert", "Carl"]')
    (named.path / "about.json").write_text('{"versions": {"fedloom": "0.0.9"}}')
    manifest = (named.path / "manifest.yaml").read_text().splitlines(keepends=True)
    (named.path / "manifest.yaml").write_text("".join(manifest[1:-1]))
    old = fedloom.load("r")
    page = old.report("page.html").read_text()
    assert old.names == ("Eve", "Bert", "Carl")
    assert "fedloom 0.0.9" in page
    assert "what leaves a client" in page


def test_a_table_that_is_none_is_named_in_one_sentence(named):
    (named.path / "clients.parquet").write_bytes(b"no table at all")
    with pytest.raises(FedloomError, match=r"it is not a table: [^.].*[^.]\. Put"):
        print_result(fedloom.load("r"), details=True)


def flips(content, every=1):
    for at in range(0, len(content), every):
        for bit in range(8):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def opened(open_, content):
    with contextlib.suppress(Damaged):
        return open_(content)
    return None


def test_any_flip_in_a_sealed_line_is_noticed_unless_it_only_hides_the_checksum():
    record = {"round": 1, "loss": 0.25}
    for flipped in flips(seal_json(record).encode()):
        found = opened(open_json, flipped.decode(errors="replace"))
        assert found is None or (not found[1] and record.items() <= found[0].items())


def test_any_flip_in_a_sealed_table_is_noticed_unless_it_only_hides_the_checksum():
    table = pd.DataFrame({"round": [1, 2], "accuracy": [0.5, 0.25], "name": ["a", "b"]})
    content = seal_table(table)
    pd.testing.assert_frame_equal(open_table(content), table)
    found = [opened(open_table, flipped) for flipped in flips(content, every=9)]
    for other in found:
        if other is not None:
            pd.testing.assert_frame_equal(other, table)
    assert sum(other is None for other in found) > 0.95 * len(found)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads here")
def test_reading_a_table_starts_no_threads():
    """pyarrow's own now and then abort a process that ends right after (exit code 134)."""
    code = (
        "import os; import pandas as pd\n"
        "from fedloom.experiment.checksums import open_table, seal_table\n"
        "import pyarrow.parquet\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "open_table(seal_table(pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})))\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
