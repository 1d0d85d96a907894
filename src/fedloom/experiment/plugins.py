"""The user's own methods, models and losses, given as `FILE.py` or `FILE.py:NAME`.

Such a file is a program. It runs only if the user has named it, now or before (`trust`): a run's
config that somebody else made can't have its own code run. Files are known by their contents, so it
does not matter where they are or what they are called.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedloom.errors import FedloomError, unknown
from fedloom.files import state_folder
from fedloom.methods.registry import MethodOptions, find
from fedloom.models import Factory
from fedloom.tasks import Loss

_trusted: set[str] = set()  # by this process, which may not be able to write the list


def is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def trust(name: str | Path) -> None:
    """Let this file of methods or models run, from now on, also where only a config names it.

    What is remembered is the file's contents: after a change it has to be named again.
    """
    if is_file(str(name)):
        digest = _digest(_read(str(name)))
        _trusted.add(digest)
        _remember(digest, str(name))


def source_of(name: str) -> str:
    """The text of the file that defines a method or model."""
    return _read(name).decode(errors="replace")


def _remember(digest: str, name: str) -> None:
    if digest in _remembered():
        return
    try:
        file = _list()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as f:
            f.write(f"{digest} {Path(name.partition(':')[0]).name}\n")
    except OSError:
        pass  # nowhere to write: later commands ask for the file's name again


def _remembered() -> set[str]:
    try:
        lines = _list().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line.partition(" ")[0] for line in lines}


def _list() -> Path:
    """Where the fingerprints of files that this user trusts are."""
    return state_folder() / "trusted"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(name: str) -> bytes:
    file = Path(name.partition(":")[0])
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise FedloomError(f"There is no file '{file}'.") from None
    except OSError as e:
        raise FedloomError(f"'{file}' can't be read: {e.strerror}.") from None


def check_trusted(name: str) -> bytes:
    """The contents of a file that may run."""
    content = _read(name)
    digest = _digest(content)
    if digest in _trusted or digest in _remembered():
        return content
    file = name.partition(":")[0]
    raise FedloomError(
        f"'{file}' is a program that you have not run before (or that has changed since), and "
        f"only a config names it. Read it; if you trust it, add --trust {file} to the command, "
        f"or call fedloom.trust('{file}') in Python."
    )


def check_files(read: Mapping[str, Any]) -> None:
    """Refuse settings that were read from a file and name one that the user has never run."""
    for key in ("method", "model", "loss"):
        file = read.get(key)
        if isinstance(file, str) and is_file(file):
            check_trusted(file)


def method_class(name: str) -> type[MethodOptions]:
    """A registered method by name, or the one that a file defines."""
    if not is_file(name):
        return find(name)

    def fits(value: Any) -> bool:
        own = isinstance(value, type) and issubclass(value, MethodOptions)
        return own and value is not MethodOptions

    needs = "its build() returns a fedloom.Method (docs/writing-a-method.md has one to start from)"
    return _pick(name, fits, "method (a class based on fedloom.MethodOptions)", needs)


def model_factory(name: str) -> str | Factory:
    """A model's name as it is, or the factory that a file defines."""
    if not is_file(name):
        return name
    needs = "a function or class that is called with shape and classes and returns an nn.Module"
    return _pick(name, callable, "model factory", needs)


def loss_function(name: str) -> Loss:
    """The loss that a file defines."""
    if not is_file(name):
        raise FedloomError(
            f"loss={name} is not valid: give FILE.py:FUNCTION or, in Python, a function of outputs "
            "and labels."
        )
    needs = "it is called with outputs and labels and returns the mean loss of a batch"
    found: Loss = _pick(name, callable, "loss function", needs)
    return found


def _pick(name: str, fits: Callable[[Any], bool], what: str, needs: str) -> Any:
    """What a file defines: the one that fits, or the one of that name."""
    file, _, wanted = name.partition(":")
    module = _load(Path(file))
    found = {
        key: value
        for key, value in vars(module).items()
        if fits(value) and getattr(value, "__module__", None) == module.__name__
    }
    if not found:
        raise FedloomError(f"'{file}' defines no {what}. It needs one: {needs}.")
    if wanted:
        if wanted not in found:
            raise unknown(f"{what} in {file}", wanted, found)
        return found[wanted]
    if len(found) != 1:
        raise FedloomError(
            f"'{file}' defines more than one {what}: {', '.join(sorted(found))}. Say which: "
            f"{file}:{min(found)}."
        )
    return next(iter(found.values()))


def _load(file: Path) -> ModuleType:
    content = check_trusted(str(file))
    name = f"fedloom_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FedloomError(f"'{file}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not through the loader: it would prefer compiled code next to the file.
        exec(compile(content, str(file), "exec"), vars(module))
    except FedloomError:
        raise
    except (Exception, SystemExit) as e:
        raise FedloomError(f"'{file}' can't be imported: {type(e).__name__}: {e}.") from e
    return module
