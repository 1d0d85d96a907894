"""The user's own methods and models, given as `FILE.py` or `FILE.py:NAME`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedloom.errors import FedloomError, unknown
from fedloom.methods.registry import MethodOptions, find
from fedloom.models import Factory


def is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def method_class(name: str) -> type[MethodOptions]:
    """A registered method by name, or the one that a file defines."""
    if not is_file(name):
        return find(name)

    def fits(value: Any) -> bool:
        own = isinstance(value, type) and issubclass(value, MethodOptions)
        return own and value is not MethodOptions

    return _pick(name, fits, "method (a class based on fedloom.MethodOptions)")


def model_factory(name: str) -> str | Factory:
    """A model's name as it is, or the factory that a file defines."""
    if not is_file(name):
        return name
    return _pick(name, callable, "model factory")


def _pick(name: str, fits: Callable[[Any], bool], what: str) -> Any:
    file, _, wanted = name.partition(":")
    module = _load(Path(file))
    found = {
        key: value
        for key, value in vars(module).items()
        if fits(value) and getattr(value, "__module__", None) == module.__name__
    }
    if wanted:
        if wanted not in found:
            raise unknown(f"{what} in {file}", wanted, found)
        return found[wanted]
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise FedloomError(f"'{file}' must define one {what}; found {names}. Name it: {file}:NAME.")
    return next(iter(found.values()))


def _load(file: Path) -> ModuleType:
    if not file.exists():
        raise FedloomError(f"There is no file '{file}'.")
    name = f"fedloom_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FedloomError(f"'{file}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedloomError:
        raise
    except (Exception, SystemExit) as e:
        raise FedloomError(f"'{file}' can't be imported: {type(e).__name__}: {e}.") from e
    return module
