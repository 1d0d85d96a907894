"""Reports and the live page in a real browser: they open without errors, show their figures on a
phone and on a desk without a horizontal bar, and the live page follows, survives and stops runs.

`make test-browser` says how to get Chromium; without it, these tests are skipped.
"""

import contextlib
import functools
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.ending import Ending
from fedloom.experiment.folder import RunFolder
from fedloom.experiment.study import Ask, write_report
from fedloom.experiment.sweep import Axis, Sweep
from fedloom.studies import STUDIES, find

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: see `make test-browser`"),
    pytest.mark.xdist_group("browser"),
]
WIDTHS = (400, 1400)
PATIENCE = 120_000  # ms that something may take on a busy machine
SMALL = {"clients": 6, "rounds": 3, "eval_every": 1, "test_share": 0.4, "engine": "serial",
         "participation": 1.0, "model_options": {"hidden": [8]}}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """Open a page; whatever it complains about fails the test."""
    errors, contexts = [], []

    def open_page(address, width=1400, **how):
        context = browser.new_context(viewport={"width": width, "height": 900}, **how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:",
                "http://127.0.0.1")) else errors.append(r.url))  # fmt: skip
        page.goto(address, timeout=PATIENCE)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


def too_wide(page):
    """Elements that stick out to the right of the window, or of a box that would cut them off."""
    return page.evaluate("""() => {
        const out = [];
        if (document.documentElement.scrollWidth > innerWidth) out.push("the page");
        for (const e of document.querySelectorAll("body *"))
            if (e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".u-wrap, .wide"))
                out.push(e.tagName + " " + e.textContent.slice(0, 40));
        if (innerWidth > 1000)
            for (const e of document.querySelectorAll(".wide"))
                if (e.scrollWidth > e.clientWidth + 1) out.push(e.textContent.slice(0, 40));
        return out;
    }""")


def empty_charts(page):
    """Charts on which nothing is drawn."""
    return page.evaluate("""() => [...document.querySelectorAll(".chart canvas")].filter(c => {
        const seen = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return !seen.some(v => v);
    }).length""")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of everything that has one, by name."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        out = {}
        alone = {**SMALL, "on_bad": "skip", "attack": "nan,share=0.3"}
        out["run"] = fedloom.run("fedavg", out="run", **alone).report()
        swap = ("fedswap:partner=min,similarity=cka", {"public": "share:0.1"})
        methods = ["fedavg-meta", ("heterofl", {"capacities": "1:0.5,0.5:0.5"}), swap,
                   ("feddom", {"topology": "waypoint,area=300"})]  # fmt: skip
        out["comparison"] = fedloom.compare(methods, seeds=2, out="c", **SMALL).report()
        sweep = Sweep(["fedavg"], [Axis("lr", ("0.01", "0.1"))], {**SMALL, "clients": 4})
        ask = Ask("", "", seeds=1)
        ran = {cell.name: [fedloom.run(**cell.settings, out=f"s/{cell.name}-s0")]
               for cell in sweep.cells(ask)}  # fmt: skip
        write_report(sweep, ask, ran, Path("s"))
        out["sweep"] = Path("s/report.html")
        yield {name: (folder / file).resolve() for name, file in out.items()}


WEAK = {"capacities": "1:0.5,0.5:0.5"}
#: a setting of a study's cells → a run that has what such a study shows, in place of each cell
STAND_INS = {
    "measure_gap": ("heterofl", {**WEAK, "measure_gap": True, "rounds": 6}),
    "topology": ("feddom", {"topology": "waypoint,area=300"}),
    "newcomers": ("fedavg-meta", {"newcomers": 2}),
    "capacities": ("heterofl", WEAK),
    "similarity": ("fedswap:partner=min,similarity=cka", {"public": "share:0.1"}),
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A tiny run for all cells of a study; one for all studies of a kind."""

    @functools.cache
    def ran(kind):
        method, more = STAND_INS.get(kind, ("fedavg", {"partition": "classes:2"}))
        out = tmp_path_factory.mktemp("stand-in") / "run"
        return fedloom.run(method, out=out, **{**SMALL, "rounds": 2, **more})

    def find_one(cells):
        used = {key for cell in cells for key in cell.settings}
        return ran(next((kind for kind in STAND_INS if kind in used), None))

    return find_one


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "comparison", "sweep"])
def test_a_report_opens_and_shows_its_figures(reports, opened, name, width):
    page = opened(reports[name].as_uri(), width)
    assert page.locator(".chart canvas").count() >= 3
    assert empty_charts(page) == 0
    assert too_wide(page) == []
    shown = page.locator("h2").all_inner_texts()
    assert "Over time" in shown
    assert "How to run it again" in shown
    if name != "sweep":
        assert "Who holds what" in shown
    assert page.locator("figure svg circle title").count() > 3
    for image in page.locator("img").all():
        assert image.evaluate("i => i.complete && i.naturalWidth > 0")


def test_a_comparison_has_what_its_methods_have(reports, opened):
    page = opened(reports["comparison"].as_uri(), color_scheme="dark")
    shown = " ".join(page.locator("h2").all_inner_texts())
    for part in ("Similarity and swaps", "The network", "Weak and strong devices",
                 "Accuracy against cost", "What leaves a client"):  # fmt: skip
        assert part in shown
    assert page.locator("td.best").count() > 2
    page.locator(".u-over").first.hover()
    assert "feddom" in page.locator(".tip").first.inner_text()
    page.uncheck("[data-method='fedavg-meta']")
    page.locator(".u-over").first.hover(position={"x": 50, "y": 50})
    assert "fedavg-meta" not in page.locator(".tip").first.inner_text()
    page.select_option("#x-axis", "MB")
    assert empty_charts(page) == 0
    for button, begins in (("[data-svg][data-panel='0']", "<svg"), ("#csv", "score,method,round"),
                           ("[data-csv='clients']", "method,accuracy"),
                           ("[data-svg][data-name='partition']", "<svg"),
                           ("[data-svg][data-name^='The network']", "<?xml"),
                           ("[data-csv='partition']", "client,0")):  # fmt: skip
        with page.expect_download() as saved:
            page.locator(button).first.click()
        assert Path(saved.value.path()).read_text().startswith(begins), button
    page.emulate_media(media="print")
    assert page.locator("#csv").is_hidden()
    assert too_wide(page) == []


def test_a_run_says_who_was_left_out(reports, opened):
    page = opened(reports["run"].as_uri())
    left = page.locator("h2:has-text('Messages left out') + .wide")
    assert "NaN" in left.inner_text()
    links = page.locator("td a")
    assert links.first.get_attribute("href") == "."


def asked(study):
    """A question for each report that a study can write: presets with more cells have others.
    Only such that need no values from elsewhere; the bundled digits, where the study has them."""
    found = {}
    for preset in study.presets:
        for data in sorted(study.data, key=lambda name: name != "digits"):
            with contextlib.suppress(FedloomError):
                ask = Ask(data, preset, "quick")
                study.check(ask)
                cells = study.cells(ask)
                names = frozenset(cell.name for cell in cells)
                if not any(names <= seen for seen in found):
                    found[names] = ask, cells
                break
    return list(found.values())


@pytest.mark.parametrize("name", STUDIES)
def test_reports_of_studies_open(name, tmp_path, opened, stand_in):
    """All cells of a study, each with the same tiny run in place of its own."""
    study = find(name)
    asks = asked(study)
    assert asks
    for ask, cells in asks:
        ran = stand_in(cells)
        folder = tmp_path / ask.preset
        folder.mkdir()
        write_report(study, ask, {cell.name: [ran] for cell in cells}, folder)
        page = opened((folder / "report.html").as_uri(), WIDTHS[0])
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)  # it draws anew a moment later
            assert too_wide(page) == []
            assert empty_charts(page) == 0
            assert page.locator("table").count() > 1
            assert page.locator("img").count() + page.locator(".chart canvas").count() > 0


# -- the live page -------------------------------------------------------------------------------


@pytest.fixture
def watching(tmp_path, start_process):
    """`fedloom watch` and runs beside it; returns the address and a function that starts a run."""
    pytest.importorskip("starlette", reason="pip install 'fedloom[watch]'")
    (tmp_path / "runs").mkdir()
    begun = []

    def fedloom_(*words):
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, "-m", "fedloom", *map(str, words)]
        process = start_process(command, cwd=tmp_path, **pipe)
        begun.append(process)
        return process

    page = fedloom_("watch", "--no-open", "--port", 0)
    address = page.stdout.readline().split()[-1]

    def run(name, *words, rounds=100_000):
        return fedloom_("run", "fedavg", "--clients", 4, "--rounds", rounds, "--engine", "serial",
                        "--eval-every", 2, "--set", "model_options.hidden=[4]",
                        "--out", f"runs/{name}", *words)  # fmt: skip

    yield address, run, tmp_path / "runs"
    for process in begun:
        process.send_signal(signal.SIGINT)
    for process in begun:
        process.communicate(timeout=60)
    assert page.returncode == 0


def wait_for(page, condition):
    """Until something holds; asked from here, since the page allows nothing to be evaluated."""
    for _ in range(PATIENCE // 100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never: {condition}")


def state(page, name):
    row = page.locator(f".run:has(button:text-is('{name}'))")
    return row.locator(".state").inner_text()


def test_the_live_page_follows_stops_and_survives(watching, opened):
    address, run, folder = watching
    page = opened(address)
    page.wait_for_selector("#empty:not([hidden])")
    first, second = run("a"), run("b")
    page.wait_for_selector("button:text-is('b')")
    page.click("button:text-is('a')")
    page.wait_for_selector(".chart[data-score=macro] canvas")
    done = "+document.querySelector('.run.open progress').value"
    before = page.evaluate(done)
    wait_for(page, f"{done} > {before} + 1")  # it goes on without anybody asking
    assert "training loss" in page.locator("#log").inner_text()
    page.locator(".run:has(button:text-is('b')) input").check()
    wait_for(page, "document.querySelectorAll('#legend .item').length === 2")
    assert empty_charts(page) == 0
    assert too_wide(page) == []

    page.reload()  # what was ticked and open still is
    page.wait_for_selector(".chart[data-score=macro] canvas")
    assert page.locator("#legend .item").count() == 2
    assert page.locator("#one-name").inner_text() == "a"

    page.click("#stop")
    wait_for(page, "document.querySelector('#one-state .state').textContent === 'stopped'")
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 130
    assert "fedloom run --resume --out runs/a" in said
    assert "--resume" in page.locator("#said").inner_text()
    kept = fedloom.load(folder / "a")
    assert kept.about["round"] == len(kept.rounds)

    second.kill()
    wait_for(
        page, "![...document.querySelectorAll('.state')].some(e => e.textContent === 'running')"
    )
    assert state(page, "b") == "ended"
    report = opened(address.rstrip("/") + page.locator("#report").get_attribute("href"))
    assert "fedavg" in report.locator("h1").inner_text()  # written on demand
    assert report.locator(".chart canvas").count() >= 3

    shutil.rmtree(folder / "b")
    wait_for(page, "document.querySelectorAll('.run').length === 1")
    assert page.locator("#legend .item").count() == 1
    again = run("a", "--resume", rounds=kept.about["round"] + 3)
    assert "stopped" in state(page, "a") or again.poll() is None
    wait_for(page, "document.querySelector('.run .state').textContent === 'finished'")


def test_the_live_page_plays_a_moving_network_on_a_phone(watching, opened, monkeypatch):
    address, _, folder = watching
    monkeypatch.chdir(folder)
    fedloom.run("feddom", out="walk", **{**SMALL, "rounds": 4}, topology="waypoint,area=300")
    page = opened(address, 400)
    page.click("button:text-is('walk')")
    page.wait_for_selector("#network:not([hidden])")
    wait_for(page, "document.querySelector('#film').nodes !== undefined")
    page.click("#play")
    wait_for(page, "+document.querySelector('#seek').value >= 2")
    page.click("#play")
    spot = page.evaluate("[document.querySelector('#film').nodes.x[0], "
                         "document.querySelector('#film').nodes.y[0]]")  # fmt: skip
    page.locator("#film").click(position={"x": spot[0], "y": spot[1]})
    wait_for(page, "/combines/.test(document.querySelector('#film-says').textContent)")
    assert too_wide(page) == []


def test_the_live_page_says_what_is_damaged(watching, opened, monkeypatch):
    address, _, folder = watching
    monkeypatch.chdir(folder)
    for name in ("cut", "spoilt", "lost"):
        fedloom.run("fedavg", out=name, **SMALL)
    rounds = folder / "cut/rounds.jsonl"
    rounds.write_bytes(rounds.read_bytes()[:-30])
    (folder / "spoilt/config.yaml").write_text("method: [")
    (folder / "lost/config.yaml").unlink()
    page = opened(address, 400)
    page.wait_for_selector("button:text-is('lost')")
    for name, why, done in (("cut", "last whole line is round 2", "2 / 3"),
                            ("spoilt", "config.yaml is damaged", "3 rounds"),
                            ("lost", "config.yaml is missing", "3 rounds")):  # fmt: skip
        row = page.locator(f".run:has(button:text-is('{name}'))")
        assert state(page, name) == "damaged"
        assert why in row.locator(".wrong").inner_text()
        assert row.locator(".line").inner_text().split("\n")[-1] == done
        page.click(f"button:text-is('{name}')")
        wait_for(page, f"document.querySelector('#one-name').textContent === '{name}'")
        assert why in page.locator("#one-state").inner_text()
        assert page.locator("#report").is_hidden()
    assert too_wide(page) == []


def test_the_live_page_draws_each_measure_on_its_own_axis(watching, opened, monkeypatch):
    address, _, folder = watching
    monkeypatch.chdir(folder)
    for name, data in (("a", "digits"), ("b", "digits"), ("c", "diabetes")):
        fedloom.run("fedavg", out=name, data=data, seed=int(name == "b"), **SMALL)
    page = opened(address)
    page.wait_for_selector("button:text-is('c')")
    for name in "ab":
        page.locator(f".run:has(button:text-is('{name}')) input").check()
    page.wait_for_selector(".chart[data-score=macro] canvas")
    assert page.locator(".chart[data-score=macro]").count() == 1
    assert page.locator("#apart").is_hidden()

    page.locator(".run:has(button:text-is('c')) input").check()
    wait_for(page, "document.querySelectorAll('.chart[data-score=macro]').length === 2")
    wait_for(page, "document.querySelectorAll('.chart[data-score=train_loss]').length === 2")
    assert "accuracy, MSE" in page.locator("#apart").inner_text()
    assert page.locator("#together").is_hidden()  # one report can't rank them
    titles = page.locator(".chart h3").all_inner_texts()
    assert titles[:2] == ["Common test set, accuracy", "Common test set, MSE"]
    tips = page.locator(".chart[data-score=macro] .u-over")
    for i, shown in enumerate((["a", "b"], ["c"])):
        tips.nth(i).hover()
        tip = page.locator(".chart[data-score=macro] .tip").nth(i)
        assert [line[0] for line in tip.inner_text().split("\n")[1:]] == shown
    assert empty_charts(page) == 0
    assert too_wide(page) == []
    page.locator(".run:has(button:text-is('c')) input").uncheck()
    wait_for(page, "document.querySelectorAll('.chart[data-score=macro]').length === 1")
    assert page.locator(".chart h3").first.inner_text() == "Common test set"


def test_the_live_page_says_what_ended_a_run_and_how_all_go_on(watching, opened):
    address, _, folder = watching
    group = folder / "my runs"
    fedloom.compare(["fedavg"], seeds=1, out=group, **SMALL)
    run = RunFolder(group / "fedavg-s0")
    lines = run.rounds_file.read_bytes().splitlines(keepends=True)
    run.rounds_file.write_bytes(b"".join(lines[:2]))
    shutil.rmtree(run.path / "checkpoints")
    long = " ".join(["ValueError: a very long story"] * 20)
    run.end(Ending.of(long, 3))
    page = opened(address, width=400)
    page.click("button:text-is('fedavg-s0')")
    wait_for(page, "document.querySelector('#said').textContent.startsWith('Resume with: ')")
    assert state(page, "fedavg-s0") == "failed"
    said = page.locator("#one-state .state").inner_text()
    assert said == f"failed in round 3: {long}"
    command = "fedloom compare --resume --out 'runs/my runs'"
    assert page.locator("#said").inner_text() == f"Resume with: {command}"
    wait_for(page, "document.querySelector('#squares-says').textContent === '2 rounds each'")
    assert too_wide(page) == []
