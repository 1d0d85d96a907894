"""Reports show what the runs' tables hold, in one file that needs nothing else."""

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import fedloom
from fedloom.experiment.compare import Comparison
from fedloom.experiment.reporting import comparison_page, headline, run_page
from fedloom.mix import Average
from fedloom.report.cost_plot import Spot, drawable, ranges, svg, together
from fedloom.report.html import Dot, Grid, Line, Page, Panel, render, table
from fedloom.report.plots import plot_curves
from fedloom.tasks import Classification, Measure

SMALL = {"clients": 5, "rounds": 2, "eval_every": 1, "test_share": 0.4, "engine": "serial",
         "model_options": {"hidden": [8]}}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("report"))
        methods = ["fedavg", "fedavg-meta", "heterofl@capacities=1:0.5,0.5:0.5"]
        made = fedloom.compare(methods, seeds=2, out="c", participation=1.0, **SMALL)
        yield made, made.report()


def data_of(file):
    text = Path(file).read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_report_needs_nothing_but_itself(compared):
    text = compared[1].read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", text)
    assert "@import" not in text
    assert not re.search(r"url\((?!['\"]?data:)", text)


def test_curves_are_means_and_ranges_over_seeds(compared):
    comparison, file = compared
    panel = next(p for p in data_of(file)["panels"] if p["title"] == "Clients' own test data")
    for line in panel["lines"]:
        runs = comparison.results[line["name"]]
        values = 100 * np.stack([run.evaluations["macro"].to_numpy() for run in runs])
        assert line["x"]["round"] == [1, 2]
        assert line["mean"] == pytest.approx(values.mean(0).tolist())
        assert line["low"] == pytest.approx(values.min(0).tolist())
        traffic = [(r.rounds["bytes_up"] + r.rounds["bytes_down"]).cumsum() / 1e6 for r in runs]
        assert line["x"]["MB"] == pytest.approx(np.mean(traffic, axis=0).tolist())


def test_every_client_is_a_dot_and_says_who_it_is(compared):
    page = comparison_page(compared[0])
    adapted = compared[0].results["fedavg-meta"][0].clients
    last = adapted[(adapted["round"] == 2) & (adapted["samples"] > 0)]
    dots = page.dots["fedavg-meta"]
    assert sorted(d.value for d in dots) == sorted(last["accuracy"])
    assert sorted(d.before for d in dots) == sorted(last["accuracy_before"])
    assert dots[0].says.startswith("client 0: ")
    assert all(d.before is None for d in page.dots["fedavg"])


def test_a_report_tells_devices_manifest_and_how_to_run_it_again(compared):
    page = comparison_page(compared[0])
    assert [row[1] for row in page.tables["Weak and strong devices"].rows] == ["1", "0.5"]
    leaves = page.tables["What leaves a client in a round"].rows
    assert any(row[0] == "fedavg" and "the whole model" in row[1] for row in leaves)
    (command,) = page.commands
    assert command.startswith("fedloom compare fedavg fedavg-meta heterofl@capacities=")
    assert "--seeds 2" in command
    assert "--set 'model_options.hidden=[8]'" in command


def test_a_method_is_named_once_and_words_are_read_from_the_left(compared):
    grid = comparison_page(compared[0]).tables["What leaves a client in a round"]
    assert [row[0] for row in grid.rows if row[0]] == list(compared[0].results)
    text = table(grid)
    assert "<th class=text>what leaves a client</th><th>bytes</th>" in text
    assert "<td class='text' data-head='what leaves a client'>" in text
    mixed = table(Grid(["a", "b", "c"], [["x", "never", "1.2 ± 0.1"], ["y", "12", "–"],
                                         ["z", "14", "word"]]))  # fmt: skip
    assert "class='text' data-head='b'" not in mixed
    assert "class='text' data-head='c'" not in mixed


def test_a_few_clients_have_their_names_on_the_axes(compared):
    page = comparison_page(compared[0])
    text = render(page)
    dots, held = len(page.dots) * len(page.dots["fedavg"]), len(page.held.counts)
    assert text.count("class='name'") == dots + held
    many = [Dot(i / 21, None, "", str(i)) for i in range(21)]
    for dots, named in ((many, 0), (many[:20], 20)):
        page = Page("", "", "", ["a"], dots={"a": dots})
        assert render(page).count("class='name'") == named
    long = Page("", "", "", ["a"], dots={"a": [Dot(0.5, None, "", "a client of a hospital")] * 9})
    assert "rotate(-90)' text-anchor='end'>a client of…</text>" in render(long)


def test_only_what_adapts_has_hollow_dots(compared):
    assert "hollow" in comparison_page(compared[0]).dots_note
    assert "hollow" not in run_page(compared[0].results["fedavg"][0]).dots_note


def test_runs_side_by_side_say_how_to_run_each_of_them(compared):
    runs = [runs[0] for runs in compared[0].results.values()]
    commands = comparison_page(Comparison.of(runs)).commands
    assert commands == [f"fedloom run --config {shlex.quote(str(r.path))}/config.yaml"
                        for r in runs]  # fmt: skip


def test_figures_for_print_have_their_numbers_and_no_others(compared, tmp_path):
    run = compared[0].results["fedavg"][0]
    for what, more in ((run, set()), (compared[0], {"cost"})):
        folder = tmp_path / type(what).__name__
        what.report(tmp_path / "page.html", folder)
        drawn = {file.stem for file in folder.glob("*.svg")}
        assert drawn == {"curves", "clients", "partition"} | more
        assert drawn == {file.stem for file in folder.glob("*.pdf")}
        assert drawn == {file.stem for file in folder.glob("*.csv")}


@dataclass(frozen=True)
class Counting(Average):
    def combine(self, g):
        return replace(super().combine(g), metrics={"senders": float(len(g.clients))})


def test_numbers_that_a_method_reports_are_drawn_and_classes_have_their_names(in_tmp):
    y = np.array(["owl", "cat", "dog"])[np.arange(90) % 3]
    data = np.random.default_rng(0).random((90, 4)).astype(np.float32), y
    run = fedloom.run(fedloom.Method(mix=Counting()), data=data, **SMALL, participation=3)
    assert run.metrics == ["senders"]
    page = run_page(run)
    panel = next(p for p in page.panels if p.title.startswith("senders"))
    (line,) = panel.lines.values()
    assert (line.x["round"], line.mean) == ([1.0, 2.0], [3.0, 3.0])
    (dots,) = page.dots.values()
    assert all(re.search("mostly class (owl|cat|dog)$", dot.says) for dot in dots)


def test_methods_at_one_place_are_named_together_and_names_cover_nothing():
    spots = {name: Spot(1.05, 0.31, f"{name}: ...") for name in ("a", "b", "c")}
    spots |= {"d": Spot(0.77, 0.36, "d: ..."), "free": Spot(0, 0.2, "free: ...")}
    found, share = drawable(spots), Measure("accuracy")
    assert list(found) == ["a", "b", "c", "d"]
    assert together(found, share) == [["d"], ["a", "b", "c"]]
    (left, right), (low, high) = ranges(found, share)
    assert 0.5 < left < 0.77 < 1.05 < right < 1.5  # not a decade
    assert (low, high) == pytest.approx((30, 37))
    text = svg(found, share, dict.fromkeys(found, "#000"), ("MB", "client accuracy (%)"))
    assert text.count("<title>a: ...\nb: ...\nc: ...</title>") == 3
    assert ">client accuracy (%)</text>" in text
    assert drawable({"a": spots["a"]}) == {}
    crowd = {f"method-{i}": Spot(1 + i / 20, 0.5 + i / 400, "") for i in range(10)}
    text = svg(crowd, share, dict.fromkeys(crowd, "#000"), ("MB", "%"))
    names = r"<text x='([\d.]+)' y='([\d.]+)' text-anchor='(start|end)'>[^%]*?method"
    boxes = [(float(x) - 60 * (side == "end"), float(y)) for x, y, side in re.findall(names, text)]
    assert len(boxes) == 10
    for i, (x, y) in enumerate(boxes):
        assert all(abs(x - a) > 55 or abs(y - b) >= 13 for a, b in boxes[:i])
    page = Page("", "", "", list(spots), costs=spots)
    assert "Not drawn, as nothing is sent: free." in render(page)


class Ran:
    scored_on = None
    task = "classification"
    measures = Classification.measures

    def __init__(self, **summary):
        self.summary = summary


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [([0.5, 0.7, 0.9], [0.4, 0.6, 0.8], "10.00 points ahead of b (a clear lead over 3 seeds"),
     ([0.5, 0.7, 0.9], [0.4, 0.9, 0.7], "3.33 points ahead of b (not a clear lead over 3 seeds"),
     ([0.5], [0.4], "10.00 points ahead of b (one seed")],
)  # fmt: skip
def test_the_headline_says_who_leads_and_how_sure(one, other, says):
    runs = {"a": [Ran(seed=i, macro=v) for i, v in enumerate(one)],
            "b": [Ran(seed=i, macro=v) for i, v in enumerate(other)]}  # fmt: skip
    comparison = Comparison(runs, None)
    assert says in headline(comparison)
    best, ties = comparison.best("macro")
    assert best == "a"
    assert ties == (["b"] if "not a clear" in says else [])


def test_text_of_users_can_do_no_harm():
    evil = "</script><script>alert(1)</script>"
    line = Line({"round": [1.0]}, [float("nan")], [0.0], [1.0])
    page = Page(evil, evil, evil, [evil], Grid([evil], [[evil]], marked=True), axes={"round": "r"},
                panels=[Panel(evil, evil, {evil: line})], dots={evil: [Dot(0.5, None, evil)]},
                commands=[evil], made={evil: evil}, settings={evil: evil})  # fmt: skip
    text = render(page)
    assert "<script>alert" not in text
    assert "NaN" not in re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert "&lt;script&gt;" in table(Grid(["a"], [[evil]]))


def test_the_command_line_writes_reports(call, in_tmp):
    small = ("--clients", 4, "--rounds", 1, "--set", "model_options.hidden=[4]")
    for seed in (0, 1):
        code, said = call("run", "fedavg", *small, "--seed", seed, "--out", f"r{seed}")
        assert code == 0
        assert f"Report: r{seed}/report.html" in said
    assert data_of("r0/report.html")["panels"]
    assert call("report", "r0", "--out", "mine.html")[0] == 0
    assert Path("mine.html").exists()
    assert call("report", "r0", "r1", "--out", "both.html")[0] == 0
    assert "2 seeds" in Path("both.html").read_text(encoding="utf-8")
    for words, said in ((("r0", "r1"), "--out FILE.html"), (("r0", "--out", "x.pdf"), ".html")):
        code, told = call("report", *words)
        assert code
        assert said in told
    assert "fedavg" in fedloom.load("r0")._repr_html_()


def test_a_run_that_is_replaced_takes_its_report_with_it(call, in_tmp):
    small = ("--clients", 4, "--rounds", 1, "--set", "model_options.hidden=[4]", "--out", "r")
    assert call("run", "fedavg", *small)[0] == 0
    fedloom.run("local", clients=4, rounds=1, out="r", overwrite=True)
    assert not Path("r/report.html").exists()


@pytest.mark.parametrize("methods", [2, 11, 24])
def test_a_legend_of_many_lines_leaves_the_panel_its_room(methods):
    frame = pd.DataFrame({"round": [1, 2, 3], "divergence": [3.0, 2.0, 1.0]})
    curves = {f"a method with a name, number {i}": [frame] for i in range(methods)}
    figure = plot_curves(curves, {"divergence": "how far apart models are"})
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_position().height * figure.get_size_inches()[1] > 2
