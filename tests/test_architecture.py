"""Data flows one way; an import in the other direction is a bug."""

import ast
from pathlib import Path

import fedloom

ROOT = Path(fedloom.__file__).parent

#: package → the packages of fedloom that it must not import
FORBIDDEN = {
    "errors": {"*"},
    "streams": {"*"},
    "layout": {"*"} - {"errors"},
    "similarity": {"*"},
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
    "experiment": {"cli"},
    "report": {"engine", "local", "mix", "methods", "cli", "models"},
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


def test_help_needs_nothing_heavy():
    import subprocess
    import sys

    heavy = "{'torch', 'pandas', 'sklearn', 'matplotlib'}"
    code = f"import sys, fedloom.cli; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
