"""Federated learning where clients differ in data, capacity, personalisation and connectivity.

    import fedloom
    result = fedloom.run("fedavg", data="digits", clients=20, rounds=10)

Names are imported when they are first used, so that `import fedloom` and `fedloom --help` are fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedloom.imports import uncollected

__version__ = "0.1.0"

_HOMES = {
    "run": "fedloom.experiment.api",
    "compare": "fedloom.experiment.comparing",
    "load": "fedloom.experiment.api",
    "sweep": "fedloom.experiment.swept",
    "trust": "fedloom.experiment.plugins",
    "Config": "fedloom.experiment.settings",
    "Result": "fedloom.experiment.result",
    "Comparison": "fedloom.experiment.compare",
    "Swept": "fedloom.experiment.swept",
    "FedloomError": "fedloom.errors",
    "Method": "fedloom.method",
    "MethodOptions": "fedloom.methods.registry",
    "register": "fedloom.methods.registry",
    "Layout": "fedloom.layout",
}

if TYPE_CHECKING:
    from fedloom.errors import FedloomError
    from fedloom.experiment.api import load, run
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.comparing import compare
    from fedloom.experiment.plugins import trust
    from fedloom.experiment.result import Result
    from fedloom.experiment.settings import Config
    from fedloom.experiment.swept import Swept, sweep
    from fedloom.layout import Layout
    from fedloom.method import Method
    from fedloom.methods.registry import MethodOptions, register

__all__ = [
    "Comparison",
    "Config",
    "FedloomError",
    "Layout",
    "Method",
    "MethodOptions",
    "Result",
    "Swept",
    "__version__",
    "compare",
    "load",
    "register",
    "run",
    "sweep",
    "trust",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    with uncollected():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
