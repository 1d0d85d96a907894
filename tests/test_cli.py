"""The command line as a user meets it: real processes, exit codes, one paragraph of error."""

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from rich.console import Console

import fedloom
from fedloom.cli import main
from fedloom.experiment.folder import RunFolder
from fedloom.experiment.settings import Config
from fedloom.files import atomic_file


@pytest.fixture
def call(in_tmp, monkeypatch, capsys):
    """`fedloom WORDS` in this process: what it printed and how it ended."""
    monkeypatch.setenv("FEDLOOM_DATA", str(in_tmp / "cache"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    return run


def real_call(*words):
    """The same in a process of its own."""
    words = [sys.executable, "-m", "fedloom", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


SMALL = ("--clients", 4, "--rounds", 2, "--eval-every", 1, "--partition", "iid")


def test_run_show_and_rerun_from_the_config(call):
    done = call("run", "fedprox", *SMALL, "--set", "mu=0.5", "--out", "runs/a", "--plot", "a.png")
    assert done.returncode == 0, done.stderr
    assert "mu=0.5" in done.stdout
    assert "worst / best 10 %" in done.stdout
    assert Path("a.png").exists()
    shown = call("show", "runs/a")
    assert shown.returncode == 0
    assert "Clients worst off" in shown.stdout
    scored = call("score", "runs/a", "--set", "eval_clients=2", "--table", "a.csv")
    assert scored.returncode == 0, scored.stderr
    assert "as it ran, round 2" in scored.stdout
    assert len(Path("a.csv").read_text().splitlines()) == 3
    for table in ("no/a.csv", "runs", "runs/a/config.yaml"):
        assert call("score", "runs/a", "--table", table).returncode == 2
    assert call("score", "runs/a", "--set", "data=mnist").returncode == 2
    again = call("run", "--config", "runs/a/config.yaml", "--out", "runs/b")
    assert again.returncode == 0, again.stderr
    a, b = (next(Path(f"runs/{n}/checkpoints").iterdir()).read_bytes() for n in "ab")
    assert a == b


def test_profile_tells_where_the_time_went(call):
    done = call("run", "fedavg", *SMALL, "--profile", "--out", "a")
    for phase in ("data", "selecting", "local training", "mixing", "scoring", "storing"):
        assert phase in done.stdout
    profile = fedloom.load("a").profile
    assert (profile[["data", "train", "mix", "score"]] > 0).all().all()


def test_compare_writes_a_report(call):
    done = call("compare", "fedavg", "local", *SMALL, "--seeds", 2, "--out", "cmp")
    assert done.returncode == 0, done.stderr
    assert "paired" in done.stdout
    assert "±" in done.stdout
    assert Path("cmp/report.html").exists()
    more = call("compare", "fedavg", "local", *SMALL, "--seeds", 3, "--out", "cmp", "--resume")
    assert more.returncode == 0, more.stderr
    assert len(list(Path("cmp").glob("*-s*"))) == 6


def test_lists(call):
    assert "fedprox" in call("methods").stdout
    assert "proximal" in call("methods", "fedprox").stdout
    listed = call("data", "list")
    assert "tiny-imagenet" in listed.stdout
    shown = call("data", "show", "digits", "--partition", "classes:2", "--plot", "p.png")
    assert shown.returncode == 0, shown.stderr
    assert Path("p.png").exists()
    assert call("--version").stdout.strip() == f"fedloom {fedloom.__version__}"


def test_every_setting_is_an_option(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = call("run", "--help").stdout
    for name in Config.model_fields:
        if name not in ("method", "params", "data_options", "model_options"):
            assert f"--{name.replace('_', '-')}" in shown, name


def test_help_lists_every_command_in_one_line_and_no_flag_with_a_value():
    from typer.main import get_command

    from fedloom.cli import app

    def commands(group):
        for command in group.commands.values():
            yield command
            if hasattr(command, "commands"):
                yield from commands(command)

    for command in commands(get_command(app)):
        assert "\n" not in command.help.partition("\n\n")[0], command.name
        for option in command.params:
            if getattr(option, "is_flag", False):
                assert option.metavar == "", (command.name, option.name)


BAD = {
    "method": (("run", "fedavgg"), "Did you mean 'fedavg'?"),
    "no method": (("run",), "fedloom methods"),
    "option name": (("run", "fedavg", "--set", "momentumm=1"), "Did you mean 'momentum'?"),
    "method option": (("run", "fedprox:muu=1"), "Did you mean 'mu'?"),
    "method option value": (("run", "fedprox", "--set", "mu=-1"), "mu"),
    "set": (("run", "fedavg", "--set", "lr"), "key=value"),
    "data": (("run", "fedavg", "--data", "mnits"), "Did you mean 'mnist'?"),
    "data not fetched": (("run", "fedavg", "--data", "mnist"), "fedloom data fetch mnist"),
    "data file": (("run", "fedavg", "--data", "nowhere.npz"), "nowhere.npz"),
    "partition": (("run", "fedavg", "--partition", "dirichet:1"), "Did you mean 'dirichlet'?"),
    "partition value": (("run", "fedavg", "--partition", "dirichlet:x"), "dirichlet"),
    "partition file": (("run", "fedavg", "--partition", "file:none.json"), "none.json"),
    "model": (("run", "fedavg", "--model", "lenett"), "Did you mean 'lenet'?"),
    "model and data": (("run", "fedavg", "--model", "lenet"), "16×16"),
    "model file": (("run", "fedavg", "--model", "none.py:net"), "none.py"),
    "config": (("run", "--config", "none.yaml"), "none.yaml"),
    "participation": (("run", "fedavg", "--participation", 60), "60"),
    "participation half": (("run", "fedavg", "--participation", 2.5), "whole"),
    "batch": (("run", "fedavg", "--batch", "many"), "inf"),
    "rounds": (("run", "fedavg", "--rounds", 0), "greater than or equal to 1"),
    "lr": (("run", "fedavg", "--lr", "nan"), "finite"),
    "schedule": (("run", "fedavg", "--lr-schedule", "cosin"), "constant"),
    "augment": (("run", "fedavg", "--augment", "turn"), "crop"),
    "device": (("run", "fedavg", "--device", "cuda:7"), "cuda:7"),
    "fixed": (("run", "fedsgd", "--epochs", 3), "by definition"),
    "too many clients": (("run", "fedavg", "--clients", 5000), "5000"),
    "run": (("show", "nowhere"), "does not exist"),
    "score what": (("score", "nowhere"), "does not exist"),
    "resume": (("run", "fedavg", "--resume", "--out", "nowhere"), "does not exist"),
    "compare twice": (("compare", "fedavg", "fedavg"), "twice"),
    "compare method": (("compare", "fedavg", "fedprx"), "Did you mean 'fedprox'?"),
    "fetch": (("data", "fetch", "imagenet"), "Unknown data set"),
    "diverged": (("run", "fedavg", "--lr", "1e30"), "Lower --lr"),
    "plot": (("data", "show", "digits", "--plot", "x.abc"), "x.abc"),
    "newcomers": (("run", "fedavg", "--newcomers", 2, "--test-share", 0), "test"),
    "newcomer classes": (("run", "fedavg", "--newcomers", 2, "--newcomer-classes", 11), "10"),
    "a world of clients": (("run", "fedavg", "--clients", 10**24), "less than or equal"),
    "a world of data": (("run", "fedavg", "--clients", 10**9), "samples"),
    "schedule that explodes": (("run", "fedavg", "--lr-schedule", "exp:1e30"), "smaller factor"),
    "schedule below zero": (("run", "fedavg", "--lr-schedule", "exp:-1"), "above 0"),
    "schedule near": (("run", "fedavg", "--lr-schedule", "cosin"), "Did you mean 'cosine'?"),
    "augment near": (("run", "fedavg", "--augment", "flop"), "Did you mean 'flip'?"),
    "crop": (("run", "fedavg", "--augment", "crop:8"), "padding"),
    "law": (("run", "fedavg", "--partition", "quantity:zipff"), "Did you mean 'zipf'?"),
    "precision": (("run", "fedavg", "--precision", "bf61"), "Did you mean 'bf16'?"),
    "a data option": (("run", "fedavg", "--set", "shape=3x8x8"), "data_options.shape"),
    "rate": (("run", "fedavg", "--lr", "1e300"), "less than or equal"),
    "widths": (("run", "fedavg", "--set", "model_options.hidden=[0]"), "whole numbers above 0"),
    "width": (("run", "fedavg", "--set", "model_options.hidden=wide"), "such as 200"),
    "too much data": (
        ("run", "fedavg", "--data", "synthetic", "--set", "data_options.samples=100000000000000"),
        "not enough memory",
    ),
    "too large a model": (
        ("run", "fedavg", "--set", "model_options.hidden=[1000000000000000]"),
        "not enough memory",
    ),
    "threads": (("run", "fedavg", "--threads", 10**6), "less than or equal"),
    "device name": (("run", "fedavg", "--device", "cudaa"), "Did you mean 'cuda'?"),
    "overwrite nothing": (("run", "fedavg", "--overwrite"), "--out"),
    "overwrite and resume": (
        ("run", "fedavg", "--overwrite", "--resume", "--out", "x"),
        "only one",
    ),
    "two methods": (("run", "fedavg", "--set", "method=local"), "local"),
    "resume what": (("run", "fedavg", "--resume"), "--resume --out"),
    "picture after a run": (("run", "fedavg", "--rounds", 10**6, "--plot", "x.foo"), "x.foo"),
    "a round without a picture": (("topology", "ring", "--round", 2), "--spread FILE"),
    "picture without name": (("run", "fedavg", "--rounds", 10**6, "--plot", "."), "ends in"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_sentence(case, call):
    words, expected = BAD[case]
    done = call(*words)
    assert done.returncode not in (0, -11)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error: ")]) == 1


def test_errors_of_a_real_process_go_to_stderr_without_traceback(in_tmp):
    done = real_call("run", "fedavgg")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: Unknown method 'fedavgg'")
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(in_tmp):
    done = real_call("run", "fedavgg", "--debug")
    assert "Traceback" in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("content", ["- a\n- b", "lr: [", "\x00", "lr: 1\nlr: 2"])
def test_bad_config_files(call, content):
    Path("c.yaml").write_text(content)
    done = call("run", "fedavg", "--config", "c.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "c.yaml" in done.stderr


def test_settings_win_over_the_file_and_set_over_all(call):
    Path("c.yaml").write_text(yaml.safe_dump({"rounds": 1, "clients": 4, "lr": 0.1, "seed": 1}))
    done = call("run", "fedavg", "--config", "c.yaml", "--lr", 0.2, "--set", "seed=5", "--out", "o")
    assert done.returncode == 0, done.stderr
    config = fedloom.load("o").config
    assert (config["rounds"], config["lr"], config["seed"]) == (1, 0.2, 5)


def test_ctrl_c_keeps_the_rounds_and_resumes(call, start_process):
    words = [sys.executable, "-m", "fedloom", "run", "local", "--rounds", "100000",
             "--clients", "4", "--out", "long"]  # fmt: skip
    process = start_process(words, stderr=subprocess.PIPE)
    lines = Path("long/rounds.jsonl")
    while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "\nInterrupted; finished rounds" in f"\n{errors}"
    assert "fedloom run --resume --out long" in errors
    assert "Traceback" not in errors
    done = len(fedloom.load("long").rounds)
    assert done > 3
    fewer = call("run", "--resume", "--out", "long", "--rounds", done + 2)
    assert fewer.returncode == 0, fewer.stderr
    assert len(fedloom.load("long").rounds) == done + 2


METHOD = '''
import fedloom
from fedloom.local import SGD
from fedloom.mix import Average

class Mine(fedloom.MethodOptions):
    """Mine."""
    name, family, source = "mine", "test", "test"
    part: str = "all"

    def build(self):
        return fedloom.Method(local=SGD(), mix=Average(self.part))

def net(shape, classes):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
'''


def test_methods_and_models_from_a_file(call):
    Path("mine.py").write_text(METHOD)
    done = call("run", "mine.py", *SMALL, "--model", "mine.py:net", "--out", "a")
    assert done.returncode == 0, done.stderr
    assert fedloom.load("a").model().state_dict().keys() == {"1.weight", "1.bias"}
    assert call("methods", "mine.py").stdout.startswith("mine")
    done = call("run", "mine.py", *SMALL, "--set", "part=hed")
    assert "Unknown part" in done.stderr
    Path("broken.py").write_text("import nothing_like_this")
    assert "can't be imported" in call("run", "broken.py").stderr


def test_data_files_of_ones_own(call):
    rng = np.random.default_rng(0)
    np.savez("d.npz", x=rng.integers(0, 255, (60, 9, 9), dtype=np.uint8), y=np.arange(60) % 3)
    done = call("run", "fedavg", *SMALL, "--data", "d.npz")
    assert done.returncode == 0, done.stderr
    Path("bad.npz").write_bytes(b"not a zip")
    done = call("run", "fedavg", *SMALL, "--data", "bad.npz")
    assert done.returncode == 2
    assert "bad.npz" in done.stderr
    assert "Traceback" not in done.stderr
    np.save("one.npy", np.zeros(3))
    Path("one.npy").rename("one.npz")
    assert "not a .npz file" in call("run", "fedavg", *SMALL, "--data", "one.npz").stderr
    np.savez("last.npz", x=np.zeros((60, 9, 9, 3), np.uint8), y=np.arange(60) % 3)
    assert "transpose(0, 3, 1, 2)" in call("run", "fedavg", *SMALL, "--data", "last.npz").stderr
    x = np.zeros((60, 9, 9))
    x[3] = np.nan
    np.savez("nan.npz", x=x, y=np.arange(60) % 3)
    assert "image 3." in call("run", "fedavg", *SMALL, "--data", "nan.npz").stderr


def test_resume_finds_the_run_with_the_same_settings(call):
    first = (*SMALL, "--lr", 0.1)
    assert call("run", "fedavg", *first).returncode == 0
    assert call("run", "fedavg", *SMALL, "--lr", 0.2).returncode == 0
    before = [
        fedloom.load(f"runs/{name}").rounds for name in ("fedavg-digits-s0", "fedavg-digits-s0-2")
    ]
    assert call("run", "fedavg", *first, "--resume", "--set", "rounds=5").returncode == 0
    assert len(fedloom.load("runs/fedavg-digits-s0").rounds) == 5 > len(before[0])
    assert fedloom.load("runs/fedavg-digits-s0-2").rounds.equals(before[1])
    fewer = call("run", "fedavg", *first, "--resume", "--set", "rounds=1")
    assert "can't go back" in fewer.stderr
    assert "runs/fedavg-digits-s0-2" in call("run", "fedavg", "--resume").stderr


def test_a_comparison_and_a_run_are_told_apart(call):
    assert call("run", "fedavg", *SMALL, "--out", "one").returncode == 0
    assert "single run" in call("compare", "fedavg", *SMALL, "--out", "one").stderr
    assert call("compare", "fedavg", *SMALL, "--seeds", 1, "--out", "many").returncode == 0
    assert "paired by seed" in call("show", "many").stdout
    Path("many/comparison.yaml").unlink()  # as older versions left it
    assert "many/fedavg-s0" in call("show", "many").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cant_be_written_gets_a_sentence(in_tmp):
    words = [sys.executable, "-m", "fedloom", "data", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdout_is_no_reason_to_fail(in_tmp):
    words = " ".join(["exec", sys.executable, "-m", "fedloom", "run", "local", *map(str, SMALL)])
    done = subprocess.run(f"{words} --out o >&-", shell=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(fedloom.load("o").rounds)


def test_a_comparison_goes_on_without_a_method_that_diverges(call):
    words = ("compare", "fedprox:mu=1e30", "local", *SMALL, "--seeds", 1, "--out", "c")
    done = call(*words)
    assert done.returncode == 1
    assert "Not in the table: fedprox:mu=1e30 with seed 0: Training diverged" in done.stdout
    assert len(fedloom.load("c/local-s0").rounds) == 2
    assert "diverged" in call("compare", "fedavg", *SMALL, "--seeds", 1, "--lr", "1e30").stderr


@pytest.mark.parametrize("on_terminal", [False, True])
def test_lists_break_no_word_at_80_columns(monkeypatch, on_terminal):
    from fedloom.data.catalog import describe
    from fedloom.report import terminal
    from fedloom.studies import STUDIES

    for width in (80, 140):
        console = Console(width=width, force_terminal=on_terminal, file=io.StringIO())
        monkeypatch.setattr(terminal, "out", console)
        terminal.print_datasets(describe())
        terminal.print_studies(STUDIES)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
        assert max(map(len, printed.splitlines())) <= width
        shown = printed.split()
        for text in (*(str(v) for row in describe() for v in row.values()),
                     *(study.title for study in STUDIES.values()),
                     *(", ".join(study.presets) for study in STUDIES.values())):  # fmt: skip
            assert set(text.split()) <= set(shown), text
        assert printed.count("name ") == (2 if width == 80 else 1)  # 140: all in one table


def test_a_stop_is_not_called_an_error(call, monkeypatch):
    monkeypatch.setattr(RunFolder, "stop_asked", True)
    done = call("run", "fedavg", "--rounds", "3", "--clients", "4", "--out", "my run")
    said = done.stderr
    assert done.returncode == 130
    assert "Stopped after round 1; finished rounds are kept. Continue with: " in said
    assert "fedloom run --resume --out 'my run'" in said
    assert "Error" not in said


@pytest.mark.parametrize(
    ("flag", "needs"),
    [([], "build() returns a fedloom.Method"), (["fedavg", "--model"], "shape and classes")],
)
def test_a_file_without_what_it_should_define_gets_told_what_that_is(call, flag, needs):
    Path("bare.py").write_text("import math\n")
    for name in ("bare.py", "bare.py:net"):
        done = call("run", *flag, name)
        assert done.returncode == 2
        assert "'bare.py' defines no m" in done.stderr
        assert needs in done.stderr


def test_of_several_methods_in_a_file_one_has_to_be_named(call):
    own = "import fedloom\n\n\nclass {}(fedloom.MethodOptions):\n    pass\n"
    Path("two.py").write_text(own.format("A") + own.format("B"))
    assert "MethodOptions): A, B. Say which: two.py:A." in call("run", "two.py").stderr


def test_what_can_not_be_written_is_named_as_it_was_asked_for(in_tmp):
    with pytest.raises(OSError, match="page") as e, atomic_file(Path("no/page.html")) as part:
        part.write_text("")
    assert e.value.filename == str(Path("no/page.html"))
    Path("page.html").mkdir()
    with pytest.raises(OSError, match="page") as e, atomic_file(Path("page.html")) as part:
        part.write_text("")
    assert ".tmp" not in str(e.value)
