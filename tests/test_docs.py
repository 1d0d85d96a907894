"""The documentation keeps its promises."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.method import Method
from fedloom.methods.registry import methods
from fedloom.select import Ordered

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs/writing-a-method.md").read_text()
NESTEROV, SCAFFOLD = (str(ROOT / f"examples/{name}.py") for name in ("nesterov", "scaffold"))


def blocks(page):
    """The programs on a page: its code blocks that are no sessions."""
    found = re.findall(r"```python\n(.*?)```", page, re.S)
    return [code for code in found if not code.startswith(">>>")]


def commands(page):
    lines = re.findall(r"^    (fedloom .*)$", page, re.M)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def method_in(file):
    """The declaration of the one method that a file defines."""
    made = runpy.run_path(file).values()
    (cls,) = (c for c in made if isinstance(c, type) and issubclass(c, fedloom.MethodOptions))
    return cls().build()


def test_the_first_two_programs_are_the_examples_and_short():
    first, _, second, *_ = blocks(GUIDE)
    assert first == Path(NESTEROV).read_text()
    assert second == Path(SCAFFOLD).read_text()
    assert len(first.splitlines()) < 40
    assert len(second.splitlines()) < 55


def test_every_command_of_the_guide_works_as_printed(in_tmp, monkeypatch, capsys):
    from fedloom.cli import main

    shutil.copytree(ROOT / "examples", "examples")
    _, median, *_, model, data = blocks(GUIDE)
    Path("median.py").write_text(median)
    Path("mymodel.py").write_text(model)
    exec(data, {})
    done = commands(GUIDE)
    assert len(done) > 8
    for words in done:
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code
        assert not code, (words, capsys.readouterr().err)
    assert len(fedloom.load("runs/scaffold").rounds) == 20
    table = fedloom.load("runs/median").table
    assert table.loc["median.py", "macro"] > 0.5 > table.loc["fedavg", "macro"]
    attacked = fedloom.load("runs/attacked")
    assert any("skipped" in record for record in attacked.records)


def follow(page, call):
    """Do what a page says, in its order: programs (or files, which begin with their name) and
    commands."""
    step = r"```python\n(?P<code>(?!>>>).*?)```|^    fedloom (?P<words>[^\n]*)$"
    done = []
    for found in re.finditer(step, page, re.S | re.M):
        if found["words"]:
            done.append(shlex.split(found["words"]))
            call(done[-1])
        elif name := re.match(r"# (\w+\.py)\n", found["code"]):
            Path(name[1]).write_text(found["code"])
        else:
            exec(found["code"], {})
    return done


@pytest.fixture
def call(in_tmp, monkeypatch, capsys):
    """`fedloom WORDS`, which must work."""
    from fedloom.cli import main

    def run(words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *words])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code
        assert not code, (words, capsys.readouterr().err)

    return run


def test_the_tutorial_of_tables_and_the_readme_on_own_data_work_as_printed(call, capsys):
    done = follow((ROOT / "docs/tutorial-csv.md").read_text(), call)
    assert [words[0] for words in done] == ["data", "run", "show", "compare", "export"]
    printed = capsys.readouterr().out
    assert "clients and their samples: clinic-00 (" in printed
    assert "Clients worst off: clinic-" in printed
    assert printed.splitlines()[-1] == "ill"  # the patient of the last program
    run = fedloom.load("runs/visits")
    assert run.summary["test_accuracy"] > 0.7  # most are not ill by less than that
    assert Path("runs/clinics/report.html").exists()
    shutil.rmtree("runs/visits")
    own = (ROOT / "README.md").read_text().partition("## Your own data")[2].partition("\n## ")[0]
    assert len(follow(own, call)) == 4


@pytest.mark.parametrize(
    "page", ["quickstart", "howto-data", "howto-model", "howto-task", "howto-privacy"]
)
def test_the_pages_work_as_printed(page, call):
    assert len(follow((ROOT / f"docs/{page}.md").read_text(), call)) > 1


def test_commands_on_all_pages_have_only_options_that_exist():
    import typer.main

    from fedloom.cli import app

    def options(command, words):
        known = getattr(command, "commands", None)
        if known is not None:
            return options(known[words[0]], words[1:])
        return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}

    root, found = typer.main.get_command(app), 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        if page.parent.name == "results":
            continue  # commands of the version that made them
        for words in commands(page.read_text()):
            if "..." in words or "[OPTIONS]" in words:
                continue
            known = options(root, words) | {"--debug", "--help"}
            for word in words[1:]:
                if word.startswith("--"):
                    assert word in known, (page.name, words)
            found += 1
    assert found > 50


def test_the_tutorial_of_text_works_as_printed(call, capsys):
    done = follow((ROOT / "docs/tutorial-text.md").read_text(), call)
    assert [words[0] for words in done] == ["data", "run", "show", "compare"]
    printed = capsys.readouterr().out
    assert "clients and their samples: baker (" in printed
    assert "Clients worst off: " in printed
    run = fedloom.load("runs/letters")
    assert (run.task, run.names) == ("next-token", ("baker", "captain", "fisher", "singer"))
    assert run.summary["test_perplexity"] < 5  # of 45 letters, all but a few are ruled out
    assert printed.rpartition("All hands: the ")[2].count(" ") > 5  # words, the last program's


def test_the_first_example_runs_and_has_the_right_limit(quick, row):
    assert torch.equal(row(quick(NESTEROV, beta=0.0)), row(quick("fedavg")))
    assert not torch.allclose(row(quick(NESTEROV, beta=0.9)), row(quick("fedavg")), atol=1e-3)


def test_the_first_example_by_hand(quick, row):
    """One client: Δ is its change, and the first step goes (1 + β) times as far."""
    alone = {"clients": 1, "participation": 1.0, "rounds": 1}
    start = row(quick(lr=1e-30, **alone))
    change = row(quick(**alone)) - start
    moved = row(quick(NESTEROV, beta=0.5, **alone)) - start
    torch.testing.assert_close(moved, 1.5 * change, atol=1e-6, rtol=1e-4)


def test_the_first_example_leaves_batch_statistics_alone(quick, tmp_path):
    """Momentum on variances makes them negative within a few rounds, and the loss NaN."""
    (tmp_path / "documented.py").write_text(blocks(GUIDE)[0])

    def normed(shape, classes):
        layers = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
        return nn.Sequential(nn.Flatten(), *layers)

    result = quick("documented.py", model=normed, epochs=3, rounds=4, beta=0.9)
    assert np.isfinite(result.rounds["test_loss"]).all()
    norm = result.model(factory=normed)[2]
    assert (norm.running_var >= 0).all()
    mean = quick(model=normed, epochs=3, rounds=1, out="avg").model(factory=normed)[2]
    once = quick("documented.py", model=normed, epochs=3, rounds=1, out="once")
    assert torch.equal(once.model(factory=normed)[2].running_var, mean.running_var)


def test_the_second_example_is_the_method_that_comes_with_fedloom(quick):
    settings = {"partition": "dirichlet:0.5", "rounds": 4}
    mine, shipped = (
        quick(name, out=out, **settings).store.checkpoint()[0]
        for name, out in ((SCAFFOLD, "mine"), ("scaffold", "shipped"))
    )
    assert mine.keys() == shipped.keys()
    for name, value in shipped.items():
        torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_the_second_example_runs_on_other_engines(quick, row, engine):
    serial = row(quick(SCAFFOLD, out="serial"))
    other = row(quick(SCAFFOLD, engine=engine, workers=2, out=engine))
    torch.testing.assert_close(other, serial, atol=1e-5, rtol=1e-4)


def test_the_second_example_resumes_to_the_bit(quick):
    whole = quick(SCAFFOLD, rounds=4, out="whole").store.checkpoint()[0]
    quick(SCAFFOLD, rounds=2, out="half")
    half = quick(SCAFFOLD, rounds=4, out="half", resume=True).store.checkpoint()[0]
    assert all(torch.equal(value, half[name]) for name, value in whole.items())


def test_the_second_example_sends_twice_what_fedavg_does_and_its_model_is_shared(quick):
    mine, fedavg = quick(SCAFFOLD), quick("fedavg")
    for way in ("bytes_up", "bytes_down"):
        assert mine.summary[way] == 2 * fedavg.summary[way]
    assert isinstance(mine.model(), nn.Module)


def test_the_second_example_works_with_sub_models(quick):
    """A client with half of the channels has control variates of those alone."""
    made = method_in(SCAFFOLD)
    both = Method(local=made.local, mix=made.mix, select=Ordered())
    result = quick(both, participation=1.0, rounds=2, capacities="0.5")
    kept = result.store.checkpoint()[0]["kept/rows"]
    assert set((kept != 0).sum(1).tolist()) == {64 * 8 + 8 + 8 * 10 + 10}


def test_the_manifest_on_the_page_is_the_one_that_is_printed():
    from fedloom.experiment.blueprint import manifest
    from fedloom.experiment.plugins import method_class, trust

    trust(SCAFFOLD)
    found = manifest(method_class(SCAFFOLD), {}, "auto", (1, 28, 28), 10).plain()
    rows = []
    for title, lines in found.items():
        for i, line in enumerate(lines):
            size = f"{line['bytes']:,}" if "bytes" in line else ""
            cells = ("" if i else title, line["name"], line["what"], size)
            rows.append(re.sub(" +", " ", f"  | {' | '.join(cells)} |").strip())
    assert "\n  ".join(rows) in GUIDE


@pytest.fixture(scope="module")
def make_reference():
    return runpy.run_path(str(ROOT / "docs/make_reference.py"))


def test_the_generated_pages_are_what_the_code_says(make_reference):
    for file, fresh in make_reference["pages"]().items():
        assert file.read_text() == fresh, f"{file.name}: run `make docs`"


def test_every_method_has_a_page_with_all_that_is_written_by_hand(make_reference):
    for name, cls in methods().items():
        if not cls.__module__.startswith("fedloom.methods."):
            continue
        page = make_reference["method_file"](name).read_text()
        parts = dict(re.findall(r"^## (.+?)\n+(.*?)(?=^## |^<!-- |\Z)", page, re.S | re.M))
        for heading in ("What it is for", "Equations", "When it fails", "Results here"):
            assert len(parts[heading].split()) > 3, (name, heading)


def test_the_site_lists_every_page():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")}
    assert set(listed) == pages
    assert len(listed) == len(pages)


def test_the_oracle_reads_no_old_model(quick):
    more = {"clients": 8, "participation": 1.0, "rounds": 4, "topology": "waypoint,area=700"}
    told = quick("feddom:forget=3,links=3", **more)
    oracle = quick(str(ROOT / "examples/feddom_oracle.py"), **more)
    assert told.rounds["age"].max() > 0
    assert (oracle.rounds["age"] == 0).all()
    assert oracle.rounds["known"].equals(told.rounds["known"])


def anchors(page):
    """What a link may point to on a page: its headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    found, seen = set(), {}
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.M):
        heading = re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
    return found


def test_links_between_documents_work():
    """Of all pages, to files and to headings."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} → {target}"
            if anchor:
                assert anchor in anchors(file), f"{page.name} → {target}#{anchor}"


def test_equations_become_mathml_and_nothing_is_loaded_from_elsewhere():
    hooks = runpy.run_path(str(ROOT / "docs/site_hooks.py"))
    page = r'<p><span class="arithmatex">\(w \leftarrow \frac{a}{b}\)</span></p>'
    drawn = hooks["as_mathml"](page)
    assert "<math" in drawn
    assert "arithmatex" not in drawn
    for line in (
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img alt="" src=https://example.org/a.png>',
    ):
        assert len(hooks["fetched"](f"<p>{line}</p>")) == 1
    links = "[a](../examples/a.py), [b](../results.md), [c](quickstart.md)"
    assert hooks["within_site"](links, "methods") == links
    assert hooks["within_site"](links, "") == links.replace(
        "[a](../examples/a.py)", "a (`examples/a.py`)"
    ).replace("[b](../results.md)", "b (`results.md`)")
    assert not hooks["fetched"]('<a href="https://example.org">there</a><img src="images/a.svg">')


def test_every_method_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name, cls in methods().items():
        if cls.__module__.startswith("fedloom."):
            assert f"`{name}`" in readme, name


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs/architecture.md").read_text()
    for path in sorted((ROOT / "src/fedloom").iterdir()):
        if path.name not in ("__pycache__", "__init__.py", "__main__.py", "py.typed"):
            assert f"{path.name}{'/' if path.is_dir() else ''}" in page, path.name
    assert fedloom.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_architecture_page_says_how_every_method_fits():
    page = (ROOT / "docs/architecture.md").read_text()
    ours = [name for name, cls in methods().items() if cls.__module__.startswith("fedloom.")]
    assert f"## How {len(ours)} methods fit" in page
    rows = page.partition("methods fit")[2]
    for name in ours:
        assert f"`{name}`" in rows, name
