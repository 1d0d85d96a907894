"""The documentation keeps its promises."""

import re
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedloom

ROOT = Path(__file__).parent.parent


def test_the_worked_example_is_the_file_and_short():
    text = (ROOT / "docs/writing-a-method.md").read_text()
    code = (ROOT / "examples/fedavgm.py").read_text()
    assert re.search(r"```python\n(.*?)```", text, re.S).group(1) == code
    assert len(code.splitlines()) < 40


def test_the_worked_example_runs_and_has_the_right_limit(quick, row):
    file = str(ROOT / "examples/fedavgm.py")
    assert torch.allclose(row(quick(file, beta=0.0)), row(quick("fedavg")), atol=1e-7)
    assert not torch.allclose(row(quick(file, beta=0.9)), row(quick("fedavg")), atol=1e-3)


def test_the_worked_example_leaves_batch_statistics_alone(quick, tmp_path):
    """Momentum on variances makes them negative within a few rounds, and the loss NaN."""
    text = (ROOT / "docs/writing-a-method.md").read_text()
    (tmp_path / "documented.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))

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


def test_the_oracle_reads_no_old_model(quick):
    more = {"clients": 8, "participation": 1.0, "rounds": 4, "topology": "waypoint,area=300"}
    told = quick("feddom", **more)
    oracle = quick(str(ROOT / "examples/feddom_oracle.py"), **more)
    assert told.rounds["age"].max() > 0
    assert (oracle.rounds["age"] == 0).all()
    assert oracle.rounds["known"].equals(told.rounds["known"])


def test_links_between_documents_work():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_every_method_is_in_the_readme():
    from fedloom.methods.registry import methods

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
