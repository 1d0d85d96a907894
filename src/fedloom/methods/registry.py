"""Methods by name: what the command line lists, what a config file may ask for.

A method is a small class of options with a `build` that returns its declaration. Registering it
gives it a name, a place in `fedloom methods`, checked options, and everything else for free.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from fedloom.errors import FedloomError, unknown
from fedloom.method import Method
from fedloom.options import Options, wrong

#: of the option that personal methods have for clients that take part for the first time
FIRST = (
    "initial private part of a client that takes part for the first time: initial values, or the "
    "mean of all private parts, which then have to be sent"
)

#: settings and options of a method under a name
Preset = Mapping[str, Any]


class MethodOptions(Options):
    """Base of every method: its options are its fields.

    `fixed` are settings that the method's definition determines (FedSGD's one full batch); a run
    that asks for something else is refused. `defaults` are method-specific defaults of settings.
    `presets` are named sets of settings and options (`--preset`), which explicit ones override.
    `at_test` are options that only matter when clients are scored, so that a trained run can be
    scored again with other values.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    source: ClassVar[str]
    fixed: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Preset] = {}
    presets: ClassVar[Mapping[str, Preset]] = {}
    at_test: ClassVar[Collection[str]] = ()

    @abstractmethod
    def build(self) -> Method:
        """The declaration."""


_registry: dict[str, type[MethodOptions]] = {}


def register(cls: type[MethodOptions]) -> type[MethodOptions]:
    """Make a method available by its name."""
    for attribute in ("name", "family", "source"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise FedloomError(f"The method {cls.__name__} must set its `{attribute}` (a string).")
    _registry[cls.name] = cls
    return cls


def methods() -> dict[str, type[MethodOptions]]:
    """Every method, by name; the built-in ones are the modules of `fedloom.methods`."""
    for module in _modules():
        importlib.import_module(module)
    return dict(_registry)


def _modules() -> list[str]:
    package = importlib.import_module("fedloom.methods")
    return [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]


def find(name: str) -> type[MethodOptions]:
    """The method of this name; all modules are imported only if none has that name. Names joined by
    a + are one composed method (`compose.py`)."""
    if "+" in name and all(name.split("+")):
        from fedloom.methods.compose import composed

        return composed(name)
    own = f"fedloom.methods.{name.replace('-', '_')}"
    if own in _modules():
        importlib.import_module(own)
    known = _registry if name in _registry else methods()
    if name not in known:
        raise unknown("method", name, known)
    return known[name]


def without_nones(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The word `none` as the value None, for fields that can be None."""
    fields = cls.model_fields
    return {
        key: None
        if isinstance(value, str)
        and value == "none"
        and key in fields
        and _may_be_none(fields[key].annotation)
        else value
        for key, value in values.items()
    }


def _may_be_none(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def configure(cls: type[MethodOptions], options: Mapping[str, Any]) -> MethodOptions:
    """The method with these options; a wrong one is refused in a sentence."""
    for option in options:
        if option not in cls.model_fields:
            raise unknown(f"option of method {cls.name}", option, cls.model_fields)
    try:
        return cls(**without_nones(cls, options))
    except ValidationError as e:
        name, value, why = wrong(e)
        raise FedloomError(
            f"Option '{name}' of method {cls.name} can't be {value}: {why}."
        ) from None
