"""The live page follows what runs write, whatever state it is in, and lets in whom it should."""

import http.client
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fedloom
from fedloom.errors import FedloomError, Interrupted
from fedloom.experiment.api import Stopped
from fedloom.experiment.checksums import seal_json
from fedloom.experiment.ending import Ending
from fedloom.experiment.folder import RunFolder
from fedloom.files import is_locked, locked
from fedloom.watch import follow
from fedloom.watch.follow import Follower
from fedloom.watch.network import frames

SMALL = {"clients": 4, "eval_every": 1, "engine": "serial", "model_options": {"hidden": [4]}}


def record(number, **more):
    told = {"round": number, "participants": [0, 1], "seconds": 0.5, "bytes_up": 1000,
            "bytes_down": 1000, "train_loss": 1.0 / number}  # fmt: skip
    return seal_json({**told, **more}) + "\n"


def scored(number):
    return record(number, test={"accuracy": number / 10, "loss": 1.0}, eval_seconds=0.1)


def make_run(folder, rounds=10, lines=()):
    folder.mkdir(parents=True)
    settings = {"method": "fedavg", "data": "digits", "clients": 4, "seed": 0, "rounds": rounds}
    (folder / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in settings.items()))
    (folder / "rounds.jsonl").write_text("".join(lines))
    return folder / "rounds.jsonl"


def only(follower):
    follower.look()
    (run,) = follower.runs.values()
    return run


def test_a_half_written_line_waits_for_its_end(tmp_path):
    file = make_run(tmp_path / "r", lines=[scored(1), record(2)[:-20]])
    follower = Follower(tmp_path)
    assert only(follower).done == 1
    before = only(follower).version
    file.write_text(scored(1) + record(2) + scored(3))
    run = only(follower)
    assert run.version > before
    assert run.details(1)["round"] == [2, 3]
    assert run.details(0)["scores"]["test"] == [10.0, None, 30.0]
    assert run.details(0)["MB"] == pytest.approx([0.002, 0.004, 0.006])


def test_scores_are_in_the_measure_of_the_task(tmp_path):
    line = record(1, task="regression", test={"mse": 1.5, "loss": 0.1}, clients={"macro": 2.5})
    make_run(tmp_path / "r", lines=[line])
    run = only(Follower(tmp_path))
    assert run.scored == {"round": 1, "test": 1.5, "macro": 2.5}
    assert run.summary()["measure"] == {"axis": "MSE", "unit": "", "called": "MSE"}
    assert "test MSE 1.5, clients MSE 2.5" in run.details(0)["log"][0]


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    make_run(tmp_path / "r", lines=[scored(1)])
    follower = Follower(tmp_path)
    version = only(follower).version
    monkeypatch.setattr(follow, "_record", lambda *given: pytest.fail("it was read again"))
    assert only(follower).version == version


def test_of_a_long_file_only_the_end_is_read_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_BLOCK", 1000)
    lines = [record(t) for t in range(1, 60)]
    lines[9] = scored(10)
    make_run(tmp_path / "r", 60, lines)
    read, real = [], follow._record
    monkeypatch.setattr(follow, "_record", lambda *given: read.append(given) or real(*given))
    run = only(Follower(tmp_path))
    assert run.done == 59
    assert run.scored == {"round": 10, "test": 100.0}
    assert len(read) < 59 or run.recent.maxlen >= 59
    assert run.details(0)["round"] == list(range(1, 60))


def test_a_run_that_is_cut_or_replaced_begins_anew(tmp_path):
    file = make_run(tmp_path / "r", lines=[scored(1), scored(2), scored(3)])
    follower = Follower(tmp_path)
    assert only(follower).details(0)["round"] == [1, 2, 3]
    other = tmp_path / "other"
    other.write_text(scored(1) + scored(2))
    os.replace(other, file)
    only(follower)
    run = only(follower)
    assert run.done == 2
    assert run.details(0)["round"] == [1, 2]


def test_damage_is_a_state_and_a_deleted_run_is_gone(tmp_path):
    file = make_run(tmp_path / "bad", lines=[scored(1), "{not json\n", scored(3)])
    make_run(tmp_path / "wrong", lines=[seal_json({"round": "one"}) + "\n"])
    make_run(tmp_path / "torn")
    (tmp_path / "torn/config.yaml").write_bytes(b"rounds: [\xff")
    make_run(tmp_path / "deep/er/good", rounds=1, lines=[scored(1)])
    (tmp_path / "loop").symlink_to(tmp_path)
    follower = Follower(tmp_path)
    follower.look()
    states = {run.name: run.state for run in follower.runs.values()}
    assert states == {"bad": "damaged", "wrong": "damaged", "torn": "damaged", "good": "finished"}
    bad = next(run for run in follower.runs.values() if run.name == "bad")
    assert "rounds.jsonl is damaged" in bad.details(0)["log"][-1]
    shutil.rmtree(file.parent)
    follower.look(find=False)
    assert "bad" not in {run.name for run in follower.runs.values()}
    assert not file.parent.exists()


def damage(folder):
    run = only(Follower(folder))
    assert run.summary()["wrong"] == run.wrong
    return run.state, run.wrong


def test_a_damaged_run_says_what_is_damaged(quick, tmp_path):
    """Killed or cut: only what is behind the newest checkpoint may be missing."""
    quick(out="runs/r")
    folder, runs = tmp_path / "runs/r", tmp_path / "runs"
    config, rounds = folder / "config.yaml", folder / "rounds.jsonl"
    whole, lines = config.read_bytes(), rounds.read_bytes().splitlines(keepends=True)
    follower = Follower(runs)
    assert damage(runs) == (only(follower).state, "") == ("finished", "")

    rounds.write_bytes(b"".join(lines)[:-30])
    state, wrong = damage(runs)
    assert state == only(follower).state == "damaged"
    assert "its last whole line is round 2, but there is a checkpoint of round 3" in wrong
    rounds.write_bytes(lines[0] + lines[2])
    assert "line of round 2 is missing; round 3 is in its place" in damage(runs)[1]
    rounds.write_bytes(lines[0] + lines[1][:40] + lines[2])
    assert "line of round 2 is cut off or changed" in damage(runs)[1]
    rounds.write_bytes(lines[1] + lines[2])
    assert "line of round 1 is missing" in damage(runs)[1]
    rounds.unlink()
    assert "rounds.jsonl is empty or missing" in damage(runs)[1]
    rounds.write_bytes(b"".join(lines))
    follower.look()
    assert only(follower).state == "finished"  # a good copy was put in its place

    config.write_bytes(whole.replace(b"rounds: 3", b"rounds: 5"))
    assert damage(runs)[1].startswith("config.yaml is damaged: its checksum does not match.")
    config.write_bytes(b"method: [")
    run = only(follower)
    assert run.state == "damaged"
    assert (run.done, run.rounds) == (3, 0)
    config.unlink()
    assert damage(runs)[1].startswith("config.yaml is missing.")
    config.write_bytes(whole)
    assert damage(runs) == (only(follower).state, only(follower).wrong) == ("finished", "")

    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    rounds.write_bytes(b"".join(lines)[:-30])
    assert damage(runs) == ("stopped", "")  # as after a kill: --resume goes on


def test_hundreds_of_runs_are_found_in_their_groups(tmp_path):
    for i in range(300):
        make_run(tmp_path / f"sweep/lr={i}-s0", rounds=1, lines=[scored(1)])
    (tmp_path / "sweep/cells").mkdir()
    (tmp_path / "sweep/cells/lr=0-s0.yaml").write_text("")
    make_run(tmp_path / "c/fedavg-s0", lines=[scored(1)])
    asked = {"seeds": 2, "own": {"fedavg": {}, "local": {}}, "diverged": {"fedavg": "NaN"}}
    (tmp_path / "c/comparison.yaml").write_text(json.dumps(asked))
    follower = Follower(tmp_path)
    follower.look()
    assert len(follower.runs) == 301
    assert follower.groups["sweep"]["kind"] == "study"
    assert (follower.groups["c"]["kind"], follower.groups["c"]["planned"]) == ("comparison", 4)
    (lost,) = (run for run in follower.runs.values() if run.group == "c")
    assert lost.state == "diverged"


def test_a_lock_tells_who_is_running_and_looking_does_not_disturb(tmp_path):
    folder = RunFolder(tmp_path / "r")
    assert not is_locked(tmp_path / "no/such/lock")
    assert not (tmp_path / "no").exists()
    with folder.held():
        assert folder.active
        with pytest.raises(FedloomError, match="Another process is writing"), folder.held():
            pass
    assert not folder.active
    with locked(tmp_path / "r/.lock", wait=False):
        assert folder.active
    context = multiprocessing.get_context("spawn")
    looker = context.Process(target=_look_often, args=(str(tmp_path / "r/.lock"),))
    looker.start()
    for _ in range(200):
        with folder.held():
            pass
    looker.terminate()
    looker.join()


def _look_often(lock):
    while True:
        is_locked(Path(lock))


class StopAt:
    """Asks a run to stop in the middle of a round, as the page does."""

    def __init__(self, path, at):
        self.folder, self.at = RunFolder(Path(path)), at

    def start(self, name, rounds, done):
        assert self.folder.active
        assert not self.folder.stop_asked

    def round(self, record):
        if record["round"] == self.at:
            self.folder.ask_to_stop()

    def end(self):
        pass


def test_a_run_that_is_asked_to_stop_can_be_resumed_to_the_same_bits(in_tmp, row):
    whole = fedloom.run("fedavg", rounds=5, out="whole", checkpoint_every=4, **SMALL)
    Path("r").mkdir()
    RunFolder(Path("r")).ask_to_stop()  # a request from before counts for nothing
    with pytest.raises(Stopped) as stopped:
        fedloom.run("fedavg", rounds=5, out="r", checkpoint_every=4, watchers=[StopAt("r", 2)],
                    **SMALL)  # fmt: skip
    assert stopped.value.after == 2
    assert len(fedloom.load("r").rounds) == 2
    assert not RunFolder(Path("r")).stop_asked
    assert only(Follower(Path("r"))).state == "stopped"
    resumed = fedloom.run(out="r", resume=True)
    assert (row(resumed) == row(whole)).all()
    assert only(Follower(Path("r"))).state == "finished"


def test_the_page_tells_what_ended_a_run_from_a_stop_that_was_asked_for(tmp_path):
    make_run(tmp_path / "r", lines=[scored(1), scored(2)])
    folder = RunFolder(tmp_path / "r")
    run = only(follower := Follower(tmp_path / "r"))
    assert (run.state, run.ended) == ("stopped", "")  # as all runs of older versions
    with folder.held():
        folder.begin()
        assert (only(follower).state, only(follower).ended) == ("running", "")
    before = run.version  # the process is gone, and has not said why
    assert (only(follower).state, run.ended) == ("ended", "ended without a word (killed?)")
    assert run.version > before
    for ending, resumes in (
        (Ending.of("ValueError: oops", 3), f"fedloom run --resume --out {tmp_path / 'r'}"),
        (Ending.of("It is NaN.", 3, diverged=True), ""),
    ):
        with folder.held():
            folder.begin()
            folder.end(ending)
        assert (only(follower).state, run.ended) == (ending.kind, ending.text)
        assert run.summary()["resume"] == resumes
        assert run.details(0)["log"][-1] == ending.text
    with folder.held():
        folder.begin()
        folder.end()
    assert (only(follower).state, run.ended) == ("stopped", "")


def test_a_study_that_ends_its_runs_has_not_killed_them(tmp_path, monkeypatch):
    from fedloom.experiment import study

    job = study.Job(None, 0, tmp_path / "a-s0", 10)
    make_run(job.path)

    class Slow:
        returncode = None
        poll = wait = terminate = lambda self: None

    def started(job, server):
        RunFolder(job.path).begin()
        return study._Running(job.cell, job.seed, job.path, job.rounds, Slow())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "_start", started)
    with pytest.raises(KeyboardInterrupt):
        study.run_jobs([job], 1, interrupted)
    assert only(Follower(tmp_path)).state == "stopped"


def test_a_run_of_several_is_resumed_with_all_of_them(tmp_path):
    for group, file in (("a b", "comparison.yaml"), ("swept", "study.yaml"), ("plain", "notes")):
        make_run(tmp_path / group / "fedper-s0", lines=[scored(1)])
        (tmp_path / group / file).write_text("sweep:\n  methods: [fedper]\n")
    make_run(tmp_path / "study" / "fedper-s0", lines=[scored(1)])
    (tmp_path / "study" / "study.yaml").write_text("study: s1\n")
    follower = Follower(tmp_path)
    follower.look()
    resumes = {run.group: run.summary()["resume"] for run in follower.runs.values()}
    assert resumes == {
        "a b": f"fedloom compare --resume --out '{tmp_path}/a b'",
        "swept": f"fedloom compare --resume --out {tmp_path}/swept",
        "plain": f"fedloom run --resume --out {tmp_path}/plain/fedper-s0",
        "study": f"fedloom run --resume --out {tmp_path}/study/fedper-s0",
    }


def test_a_request_in_the_last_round_lets_the_run_finish(in_tmp):
    done = fedloom.run("fedavg", rounds=2, out="r", watchers=[StopAt("r", 2)], **SMALL)
    assert len(done.rounds) == 2


def test_a_study_goes_on_without_a_run_that_was_stopped(tmp_path, monkeypatch):
    from fedloom.experiment import study

    class Ended:
        returncode = 130

        def poll(self):
            return 130

    started = []

    def start(job, server):
        started.append(job.path.name)
        study._log(job).parent.mkdir(exist_ok=True)
        study._log(job).write_text("Stopped after round 1")
        return study._Running(job.cell, job.seed, job.path, job.rounds, Ended())

    monkeypatch.setattr(study, "_start", start)
    jobs = [study.Job(None, 0, tmp_path / name, 3) for name in ("a", "b")]
    with pytest.raises(Interrupted, match="a, b was stopped before its end"):
        study.run_jobs(jobs, 1, lambda *_: None)
    assert started == ["a", "b"]


def test_the_network_of_a_run_is_the_one_that_it_had(quick):
    made = quick("feddom", rounds=2, participation=1.0, topology="waypoint,area=300,steps=3",
                 faults="fail=0.3", clients=8, out="r")  # fmt: skip
    run = only(Follower(Path("r")))
    shown = frames(run, 1, 9)
    assert [r["round"] for r in shown["rounds"]][:2] == [1, 2]
    for drawn, known in zip(shown["rounds"], made.records, strict=False):
        pairs = {tuple(step["links"][i : i + 2]) for step in drawn["steps"]
                 for i in range(0, len(step["links"]), 2)}  # fmt: skip
        assert len(pairs) == known["contacts"]
        assert drawn["there"] == known["participants"]
        assert len(drawn["steps"]) == 3
        assert drawn["sets"] == known["mix"].get("dominating", [])
        combined = [len(members) for nodes, members in drawn["sets"] for _ in nodes]
        assert sum(combined) / max(len(combined), 1) == pytest.approx(known["dominating"])


# -- the server ----------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """Start the page of a folder; `ask(method, path, **headers)` gives status, headers, body."""
    pytest.importorskip("starlette", reason="pip install 'fedloom[watch]'")
    import uvicorn

    from fedloom.watch.server import Watch, application

    servers = []

    def start(root=tmp_path, token=None):
        watch = Watch(root)
        watch.start()
        opened = socket.create_server(("127.0.0.1", 0))
        port = opened.getsockname()[1]
        app = application(watch, "127.0.0.1", token, lambda: port)
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        servers.append((server, watch, thread))

        def ask(method, path, **headers):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            given = {k.replace("_", "-"): v for k, v in headers.items()}
            client.request(method, path, headers=given)
            answer = client.getresponse()
            out = answer.status, dict(answer.getheaders()), answer.read().decode()
            client.close()
            return out

        ask.watch, ask.port = watch, port
        return ask

    yield start
    for server, watch, thread in servers:
        server.should_exit = True
        watch.close()
        thread.join(timeout=10)


def test_the_page_needs_nothing_from_elsewhere(served):
    ask = served()
    status, headers, page = ask("GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "//" not in page.replace("<!doctype", "").replace("http://www.w3.org", "")
    for name in page.split('"'):
        if name.startswith("/assets/"):
            assert ask("GET", name)[0] == 200, name
    assert ask("GET", "/assets/..%2fserver.py")[0] == 404


def test_foreign_names_and_foreign_pages_are_refused(served, tmp_path):
    make_run(tmp_path / "r", lines=[scored(1)])
    ask = served()
    (key,) = json.loads(ask("GET", "/api/runs")[2])["runs"]
    assert ask("GET", "/", Host="evil.example:80")[0] == 421
    assert ask("GET", "/", Host="localhost:1234")[0] == 200
    stop = f"/api/runs/{key}/stop"
    assert ask("POST", stop)[0] == 403
    assert ask("POST", stop, X_Fedloom="1", Origin="http://evil.example")[0] == 403
    assert ask("GET", stop)[0] == 405
    status, _, why = ask("POST", stop, X_Fedloom="1", Origin=f"http://127.0.0.1:{ask.port}")
    assert status == 409
    assert "is not running" in why
    assert not (tmp_path / "r/.stop").exists()
    with RunFolder(tmp_path / "r").held():
        status, _, said = ask("POST", stop, X_Fedloom="1")
        assert (status, json.loads(said)["state"]) == (202, "stopping")
        assert (tmp_path / "r/.stop").exists()
    for gone in (f"/api/runs/{key}x", "/api/runs/..%2f..%2fetc", "/report/none", "/report/,"):
        assert ask("GET", gone)[0] == 404


def test_a_token_comes_once_in_the_address_and_is_a_cookie_then(served):
    token = "correct-horse-battery"
    ask = served(token=token)
    assert ask("GET", "/")[0] == 401
    assert ask("GET", "/api/runs")[0] == 401
    assert ask("GET", f"/?token={token[:-1]}")[0] == 401
    assert ask("POST", "/api/runs/x/stop", X_Fedloom="1")[0] == 401
    status, headers, _ = ask("GET", f"/?token={token}")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"]
    assert ask("GET", "/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200


def test_a_report_is_shown_without_access_to_the_page(served, tmp_path):
    make_run(tmp_path / "r", rounds=1, lines=[scored(1)])
    (tmp_path / "r/report.html").write_text("<script>steal()</script>")
    ask = served()
    (key,) = json.loads(ask("GET", "/api/runs")[2])["runs"]
    status, headers, page = ask("GET", f"/report/{key}")
    assert (status, page) == (200, "<script>steal()</script>")
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "allow-same-origin" not in policy
    shutil.rmtree(tmp_path / "r/")
    make_run(tmp_path / "s", lines=[record(1)])
    ask.watch.follower.look()
    (key,) = ask.watch.follower.runs
    status, _, why = ask("GET", f"/report/{key}")  # no run at all: the reason is told
    assert status == 409
    assert "config.yaml" in why


def test_the_command_refuses_what_would_be_unsafe_or_can_t_work(call):
    pytest.importorskip("starlette", reason="pip install 'fedloom[watch]'")
    Path("runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            (("--host", "0.0.0.0"), "Add --token new"),
            (("--host", "0.0.0.0", "--token", "short"), "can be guessed"),
            (("--port", port), f"Port {port} is in use"),
            (("nowhere",), "'nowhere' does not exist"),
            (("--host", "no.such.host.example.invalid", "--token", "x" * 16), "is not a name"),
        ):
            code, told = call("watch", "--no-open", *words)
            assert code == 2
            assert said in told


def test_without_the_extra_there_is_one_sentence(in_tmp):
    code = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['fedloom', 'watch']\n"
        "from fedloom.cli import main; main()"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert said.stderr == (
        "Error: fedloom watch needs two more packages: pip install 'fedloom[watch]'.\n"
    )


def test_the_page_runs_without_torch():
    pytest.importorskip("starlette", reason="pip install 'fedloom[watch]'")
    code = "import sys, fedloom.watch.server; print({'torch', 'pandas'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
