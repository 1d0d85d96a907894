"""Writes reference.md, the page of reference for each part, from the source: `make docs`.

Everything on the page is in the code: names, types, defaults, docstrings and the comments behind
fields. So it can't go stale; a test compares it with a fresh one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import fedloom.local
import fedloom.mix
import fedloom.select
import fedloom.topology
from fedloom import adapt, kinds, newcomer
from fedloom.adapt import Adapt
from fedloom.layout import Layout
from fedloom.local import Back, Batch, Budget, Context, LocalRule, Net
from fedloom.method import FACTS, Method
from fedloom.methods.registry import MethodOptions
from fedloom.mix import Gathering, Gossip, Mix, Mixed, Networks, ServerStep, Traffic
from fedloom.newcomer import Newcomer
from fedloom.select import Ask, Last, Select, Selection, Width
from fedloom.topology import Contacts, Topology

PAGE = Path(__file__).with_name("reference.md")

INTRO = """\
# Reference of the parts

Made from the code by `make docs`; do not edit. [Writing a method](writing-a-method.md) shows how
they work together.
"""

#: headings, what stands under each, and where to look for parts of that kind that there are
SECTIONS: list[tuple[str, list[type], type | None, ModuleType | None]] = [
    ("Method", [Method, MethodOptions], None, None),
    ("Local rules", [LocalRule, Context, Back, Batch, Budget, Net], LocalRule, fedloom.local),
    (
        "Mixes",
        [Mix, Gathering, Mixed, ServerStep, Gossip, Traffic, Networks],
        Mix,
        fedloom.mix,
    ),
    ("Selectors", [Select, Ask, Selection, Last, Width], Select, fedloom.select),
    ("Topologies", [Topology, Contacts], Topology, fedloom.topology),
    ("Adapting before scoring", [Adapt], Adapt, adapt),
    ("Newcomers", [Newcomer], Newcomer, newcomer),
    ("Kinds of named values", [kinds.Kind], kinds.Kind, kinds),
]


#: names of types that signatures use, by module
ALIASES = {
    "fedloom.method": ("First",),
    "fedloom.kinds": ("Values",),
    "fedloom.local.rule": ("Params", "Samples"),
    "fedloom.mix.base": ("Home", "Fields"),
    "fedloom.newcomer": ("Choice",),
    "fedloom.topology.base": ("Stream",),
}


def page() -> str:
    """The whole page."""
    parts = (line for s in SECTIONS for line in section(*s))
    return "\n".join([INTRO, *facts(), *columns(), *parts, *aliases()])


def columns() -> Iterator[str]:
    yield f"## Parts of a model\n\n{prose(Layout.columns)}\n"


def aliases() -> Iterator[str]:
    yield "## Type names\n"
    found = []
    for module, names in ALIASES.items():
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
                name = f"`{module}.{ast.unparse(node.targets[0])}`"
                found.append((name, f"`{ast.unparse(node.value)}`"))
    yield from table(("name", "what it stands for"), found)


def facts() -> Iterator[str]:
    yield "## Facts\n\nWhat a part may ask for by a word in `needs`.\n"
    yield from table(
        ("fact", "for", "what it is"),
        [(f"`{name}`", ", ".join(who), what) for name, (who, what) in FACTS.items()],
    )


def section(
    title: str, classes: list[type], base: type | None, where: ModuleType | None
) -> Iterator[str]:
    yield f"## {title}\n"
    for cls in classes:
        yield from described(cls)
    if base is None or where is None:
        return
    yield f"### Every `{base.__name__}` in `{where.__name__}`\n"
    names = getattr(where, "__all__", None) or vars(where)
    there = [
        (f"`{name}({fields_of(value)})`", first_sentence(value))
        for name in names
        if is_made(value := getattr(where, name), base)
    ]
    yield from table(("name", "what it is"), there)


def is_made(value: object, base: type) -> bool:
    """Whether this is a kind of `base`, or a function that makes one."""
    if inspect.isclass(value):
        return issubclass(value, base) and value is not base and not value.__name__.startswith("_")
    return inspect.isfunction(value) and base is kinds.Kind and value.__name__[0].isupper()


def fields_of(value: Callable[..., object]) -> str:
    """What it is made with, as in a call."""
    if inspect.isclass(value) and value.__init__ is object.__init__:
        return ""
    return ", ".join(inspect.signature(value).parameters)


def described(cls: type) -> Iterator[str]:
    """A class: its docstring, a table of what it holds, and its methods."""
    yield f"### `{cls.__module__}.{cls.__name__}`\n"
    yield prose(cls) + "\n"
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    rows = [
        (f"`{node.target.id}`", f"`{kind(node)}`", default(node), remark(node, source))
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    if rows:
        heads = ("field", "type", "default", "")
        yield from table(heads, rows) if any(r[3] for r in rows) else table(heads[:3], rows)
    for node in body:
        if isinstance(node, ast.FunctionDef) and is_public(node.name):
            yield from method(node, cls)


def is_public(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")


def method(node: ast.FunctionDef, cls: type) -> Iterator[str]:
    found = inspect.getattr_static(cls, node.name)
    returns = f" → {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in type(found).__name__:
        call = node.name + (f": {ast.unparse(node.returns)}" if node.returns else "")
    else:
        args = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
        call = f"{node.name}({args}){returns}"
    told = ast.get_docstring(node)
    yield f"- `{call}`" + (f":\n{textwrap.indent(told, '  ')}" if told else "")
    yield ""


def kind(node: ast.AnnAssign) -> str:
    text = ast.unparse(node.annotation)
    return text[len("ClassVar[") : -1] if text.startswith("ClassVar[") else text


def default(node: ast.AnnAssign) -> str:
    """The value that stands there, a factory as what it makes."""
    value = node.value
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        made = value.keywords[0].value
        if isinstance(made, ast.Lambda):
            value = made.body
        else:
            named = ast.unparse(made)
            return {"dict": "`{}`", "_nobody": "nobody"}.get(named, f"`{named}()`")
    text = ast.unparse(value)
    return "`{}`" if text == "MappingProxyType({})" else f"`{text}`"


def remark(node: ast.AnnAssign, source: str) -> str:
    """The comment behind a field."""
    rest = source.splitlines()[(node.end_lineno or 1) - 1].encode()[node.end_col_offset :].decode()
    return rest.partition("#")[2].strip()


def prose(thing: object) -> str:
    """A docstring without its examples, which are run where they stand."""
    return (inspect.getdoc(thing) or "").partition("\n>>>")[0].rstrip()


def first_sentence(thing: object) -> str:
    text = " ".join(prose(thing).partition("\n\n")[0].split())
    return re.split(r"(?<=\w\w[.)])\s+(?=[A-Z])", text)[0].rstrip(".:")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield "| " + " | ".join(c.replace("|", "\\|") for c in row[: len(heads)]) + " |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
