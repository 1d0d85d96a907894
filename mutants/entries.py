"""The list of errors: `*.toml` beside this file, each entry a small patch of one source file.

An entry names the promise that it breaks and the tests that must notice. `harmless` gives the
reason why an error changes nothing that anybody could see; such an entry must survive.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

#: of these every error must be noticed
STRICT = ("randomness", "feddom-distances", "train-loss", "masks", "leak", "parts", "s1-scores",
          "distillation")  # fmt: skip
GROUPS = (*STRICT, "also", "core")


@dataclass(frozen=True)
class Mutant:
    """One deliberate error: `old`, which is there exactly once in `file`, becomes `new`."""

    name: str
    group: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str | None = None

    def apply(self, package: Path) -> Path:
        """Put the error into the copy of the package at `package`; returns the changed file."""
        file = package / self.file
        text = file.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: 'old' is {text.count(self.old)} times in {self.file}")
        file.write_text(text.replace(self.old, self.new))
        return file


def entries(folder: Path = FOLDER) -> list[Mutant]:
    """All errors on the lists in `folder`."""
    found = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            found.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    return found


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with these entries; none of it needs a run."""
    found = [
        f"{n}: the name is taken" for n, k in Counter(m.name for m in mutants).items() if k > 1
    ]
    for m in mutants:
        found += [f"{m.name}: {fault}" for fault in _faults(m, root)]
    return found


def _faults(m: Mutant, root: Path) -> list[str]:
    if m.group not in GROUPS:
        return [f"no group is called '{m.group}'"]
    source = root / "src" / "fedloom" / m.file
    if not source.is_file():
        return [f"there is no {m.file}"]
    text = source.read_text()
    if text.count(m.old) != 1:
        return [f"'old' is {text.count(m.old)} times in {m.file}, not once"]
    if m.new == m.old:
        return ["'new' is 'old'"]
    try:
        ast.parse(text.replace(m.old, m.new))
    except SyntaxError as e:
        return [f"with 'new', {m.file} does not parse: {e}"]
    return (
        [f"there is no {t}" for t in m.tests if not _exists(t, root)] if m.tests else ["no tests"]
    )


def _exists(test: str, root: Path) -> bool:
    path, _, name = test.partition("::")
    file = root / path
    if not path.startswith("tests/") or not file.is_file():
        return False
    function = name.partition("[")[0]
    return not name or bool(re.search(rf"^def {re.escape(function)}\(", file.read_text(), re.M))
