"""Data flows one way; an import in the other direction is a bug."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.imports import uncollected

ROOT = Path(fedloom.__file__).parent

#: package → the packages of fedloom that it must not import
FORBIDDEN = {
    "errors": {"*"},
    "streams": {"*"},
    "layout": {"*"} - {"errors"},
    "similarity": {"*"},
    "tasks": {"*"},
    "data": {"models", "local", "mix", "select", "topology", "method", "methods", "engine",
             "metrics", "experiment", "report", "cli"},
    "models": {"data", "local", "mix", "methods", "engine", "metrics", "experiment", "report"},
    "local": {"data", "mix", "methods", "engine", "metrics", "experiment", "report", "cli"},
    "mix": {"data", "local", "methods", "engine", "metrics", "experiment", "report", "cli"},
    "select": {"data", "mix", "methods", "engine", "metrics", "experiment", "report", "cli"},
    "topology": {"data", "local", "mix", "methods", "engine", "metrics", "experiment", "report"},
    "methods": {"data", "engine", "metrics", "experiment", "report", "cli"},
    "kinds": {"*"} - {"errors"},
    "round": {"methods", "experiment", "report", "cli"},
    "engine": {"round", "mix", "method", "methods", "experiment", "report", "cli"},
    "metrics": {"data", "local", "mix", "methods", "engine", "experiment", "report", "cli"},
    "experiment": {"cli", "watch", "doctor"},
    "report": {"engine", "local", "mix", "methods", "cli", "models", "watch"},
    "watch": {"data", "models", "local", "mix", "select", "method", "methods", "round", "engine",
              "metrics", "native", "studies", "cli"},
    "names": {"*"},
}  # fmt: skip


def imports(file: Path) -> set[str]:
    """The parts of fedloom that a file imports when it runs (not for types only)."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fedloom.")}
    return found


def test_imports_point_one_way():
    wrong = []
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        forbidden = FORBIDDEN.get(part, set())
        for name in imports(file) - {part}:
            if name in forbidden or ("*" in forbidden and name not in ("errors", "layout", part)):
                wrong.append(f"{file.relative_to(ROOT)} imports fedloom.{name}")
    assert not wrong, wrong


def test_the_runner_knows_no_method_by_name():
    from fedloom.methods.registry import methods

    for folder in ("engine", "experiment"):
        for file in (ROOT / folder).glob("*.py"):
            if file.name == "compare.py":  # pairs with FedAvg where it is there
                continue
            names = {n.value for n in ast.walk(ast.parse(file.read_text()))
                     if isinstance(n, ast.Constant) and isinstance(n.value, str)}  # fmt: skip
            allowed = {"fedavg"} if file.name in ("settings.py", "api.py") else set()
            allowed |= {"local"}  # also the name of a population: local and new clients
            assert not (names & set(methods())) - allowed, file


#: what only some commands need, and takes long to import
OPTIONAL = (
    "PIL", "matplotlib", "networkx", "pandas", "pyarrow", "pymcdm", "ray", "scipy", "sklearn",
    "sympy", "torch._dynamo", "torch._inductor", "torch.onnx",
)  # fmt: skip
HELP = """
from fedloom.cli import app
app(["--help"], standalone_mode=False)
"""
FIRST_ROUND = """
from pathlib import Path
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.runner import Runner
from fedloom.experiment.setup import prepare
from fedloom.experiment.store import RunStore
import fedloom

fedloom.run  # the import of it
given = {"method": "fedavg", "clients": 4, "engine": "ENGINE", "model": "MODEL", "workers": 1}
given["steps"] = 1
config, options = make_config(given, method_class("fedavg"))
runner = Runner(prepare(config, options.build()), RunStore(Path("nowhere")))
assert runner.round(1)["steps"] > 0
"""


STACKED = FIRST_ROUND.replace("ENGINE", "stacked")
OWN_OBJECTIVE = """
from fedloom.local import SGD
from fedloom.method import Method
from fedloom.mix import Average

class Decayed(SGD):
    def objective(self, net, params, data, me):
        loss = super().objective(net, params, data, me)
        return loss + 0.01 * sum((p**2).sum() for p in params.values())

""" + STACKED.replace("options.build()", "Method(local=Decayed(), mix=Average())")


@pytest.mark.parametrize(
    ("does", "without"),
    [
        ("import fedloom", ("torch", "numpy", "pydantic", *OPTIONAL)),
        (HELP, ("torch", "numpy", *OPTIONAL)),
        (FIRST_ROUND.replace("ENGINE", "serial").replace("MODEL", "conv4"), ("rich", *OPTIONAL)),
        (STACKED.replace("MODEL", "mlp"), ("rich", *OPTIONAL)),
        (OWN_OBJECTIVE.replace("MODEL", "mlp"), ("rich", *OPTIONAL)),
        (STACKED.replace("MODEL", "conv4"), ("rich", *OPTIONAL)),
    ],
    ids=["import", "help", "a round", "stacked", "an objective of one's own", "a stacked CNN"],
)
def test_nothing_is_imported_before_it_is_needed(does, without):
    code = f"import sys\n{does}\nprint('loaded:', sorted({set(without)} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "loaded: []"


def test_a_method_is_found_without_importing_the_others():
    code = (
        "import sys; from fedloom.methods.registry import find; find('fedavg'); "
        "print([m for m in ('fedavg', 'submodels') if f'fedloom.methods.{m}' in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['fedavg']"


def test_collecting_goes_on_after_imports_as_it_was():
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
