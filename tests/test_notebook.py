"""In a notebook bars, results and figures show themselves; the example does what it says."""

import asyncio
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.report import notebook

EXAMPLE = Path(__file__).parent.parent / "examples/first-steps.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(EXAMPLE, as_version=4)
    nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in book.cells if cell.cell_type == "code"], folder


def shown(cell, kind):
    return [o["data"][kind] for o in cell.outputs if kind in o.get("data", {})]


def test_the_example_notebook_shows_bars_tables_and_figures(executed):
    (run, table, curve, compared, narrow, latex, further), folder = executed
    bar, result = shown(run, "text/html")
    assert '<progress value="1.0000"' in bar
    assert "round 10 of 10. accuracy" in bar
    assert "<table" in result
    assert "worst10" in shown(table, "text/html")[0]
    assert shown(curve, "image/png")
    assert shown(narrow, "image/png")
    bar, result = shown(compared, "text/html")
    assert "6/6" in bar
    assert bar.count("<tr>") == 6  # the table so far has all runs in the end
    assert "fedrolex@capacities=1:0.5,0.5:0.5" in result
    assert r"\textbf{" in latex.outputs[0]["text"]
    assert (folder / "model.ts").exists()
    assert not any(o.output_type == "error" for cell in executed[0] for o in cell.outputs)
    assert len(further.outputs) == 2


def test_outside_of_notebooks_nothing_is_shown_unless_asked_for(quick, capsys):
    assert not notebook.here()
    quick(rounds=2, out="a")
    assert capsys.readouterr() == ("", "")
    quick(rounds=2, out="b", progress=True)
    assert "round 2/2  accuracy" in capsys.readouterr().err


def test_a_sweep_shows_itself(in_tmp):
    small = {"clients": 4, "rounds": 6, "model_options": {"hidden": [16]}}
    found = fedloom.sweep(["fedavg"], {"lr": [0.01, 0.2]}, seeds=1, out="s", **small)
    assert found._repr_html_().count("<table") == 2
    assert found.table["lr"].tolist() == ["0.01", "0.2"]
    alone = fedloom.run("fedavg", lr=0.2, **small)
    assert found.table["macro"].tolist()[1] == pytest.approx(alone.summary["macro"])
    again = fedloom.load("s")
    assert again.tables == found.tables
    assert r"\textbf{" in again.latex()
    again.to_csv("s.csv")
    assert Path("s.csv").read_text().startswith("method,lr,")
    figure = again.plot("lr", "lr.pdf", width=3.3)
    assert figure.get_size_inches()[0] == pytest.approx(3.3)
    assert Path("lr.pdf").read_bytes().startswith(b"%PDF")
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(fedloom.FedloomError, match="Did you mean 'lr'"):
        again.plot("lrr")
    for wrong, says in (({"lr": []}, "Give values"), ({}, "Give values"),
                        ({"model_options": [{"hidden": [4]}]}, "option by option")):  # fmt: skip
        with pytest.raises(fedloom.FedloomError, match=says):
            fedloom.sweep(["fedavg"], wrong)
    with pytest.raises(fedloom.FedloomError, match="data can't be an object"):
        fedloom.sweep(["fedavg"], {"lr": [1]}, data=([1], [2]))
