"""Writes the generated pages of the documentation from the code: `make docs`.

`reference.md` (the parts of a method), `cli.md`, `settings.md` and `methods/index.md` are generated
as a whole. A page per method is written by hand, except for the blocks between
`<!-- made: NAME -->` and `<!-- end -->`, which are filled in here. All of it comes from the code:
names, types, defaults, docstrings, comments behind fields. A test compares the pages with fresh
ones.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal, get_args, get_origin

import typer.main
from pydantic.fields import FieldInfo

import fedloom.local
import fedloom.mix
import fedloom.select
import fedloom.topology
from fedloom import adapt, kinds, newcomer
from fedloom.adapt import Adapt
from fedloom.cli import app
from fedloom.experiment.blueprint import manifest
from fedloom.experiment.settings import Config
from fedloom.layout import Layout
from fedloom.local import Back, Batch, Budget, Context, LocalRule, Net
from fedloom.method import FACTS, Method
from fedloom.methods.registry import MethodOptions, methods
from fedloom.mix import Gathering, Gossip, Mix, Mixed, Networks, ServerStep, Traffic
from fedloom.newcomer import Newcomer
from fedloom.select import Ask, Last, Select, Selection, Width
from fedloom.topology import Contacts, Topology

DOCS = Path(__file__).parent

INTRO = """\
# Parts of a method

Generated from the code by `make docs`; do not edit. [Writing a method](writing-a-method.md) shows
how the parts work together.
"""

#: headings, the classes under each, and where to look for the parts of that kind
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


def pages() -> dict[Path, str]:
    """All generated pages, by file."""
    whole = {
        "reference.md": parts_page(),
        "cli.md": cli_page(),
        "settings.md": settings_page(),
        "methods/index.md": methods_page(),
    }
    made = {DOCS / name: text for name, text in whole.items()}
    return made | {method_file(name): filled(method_file(name), cls) for name, cls in shipped()}


# -- the parts -----------------------------------------------------------------------------------


def parts_page() -> str:
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
        how = {word.arg: word.value for word in value.keywords}
        made = how.get("default_factory")
        if made is None:
            value = how["default"]
        elif isinstance(made, ast.Lambda):
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


# -- the command line ----------------------------------------------------------------------------

CLI = """\
# Command line

Generated from the code by `make docs`; do not edit. `fedloom COMMAND --help` prints the same.
Commands that run something also take every [setting](settings.md) as an option, `--lr 0.1` for
`lr`, and `--set KEY=VALUE` for options of the method, model or data set. `--debug`, on any command,
shows the traceback of an error.
"""


def cli_page() -> str:
    root = typer.main.get_command(app)
    return "\n".join([CLI, *commands(root, "fedloom")])


def commands(command: Any, name: str) -> Iterator[str]:
    """A command, or all those of a group."""
    known = getattr(command, "commands", None)
    if known is not None:
        for word in sorted(known):
            yield from commands(known[word], f"{name} {word}")
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p not in arguments and not is_setting(p)]
    usage = " ".join(
        [name, *(usage_of(a) if a.required else f"[{usage_of(a)}]" for a in arguments), "[OPTIONS]"]
    )
    yield f"## {name}\n\n    {usage}\n"
    yield textwrap.fill(plain(command.help or ""), 100) + "\n"
    rows = [(f"`{usage_of(a)}`", "", plain(help_of(a, command))) for a in arguments]
    rows += [(f"`{words(o)}`", shown_default(o), meaning(o)) for o in options]
    if rows:
        yield from table(("argument or option", "default", "meaning"), rows)
    if any(map(is_setting, command.params)):
        yield "All [settings](settings.md) are options too.\n"


def is_setting(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) == "Settings"


def usage_of(argument: Any) -> str:
    return argument.metavar or (argument.name or "").upper() + ("..." if argument.nargs < 0 else "")


def help_of(argument: Any, command: Any) -> str:
    """As it is declared: typer 0.20 with click 8.5 loses it on the way."""
    hint = inspect.signature(command.callback, eval_str=True).parameters[argument.name].annotation
    found: str = next(said.help for said in hint.__metadata__ if hasattr(said, "help"))
    return found


def words(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    return ", ".join([*option.opts, *option.secondary_opts]) + value


def shown_default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.required:
        return "required"
    if said := DEFAULT.search(plain(option.help or "")):
        return said[1]
    return "" if option.default is None or option.default is False else f"`{option.default}`"


def meaning(option: Any) -> str:
    return DEFAULT.sub("", plain(option.help or ""))


#: a default that the help text itself gives
DEFAULT = re.compile(r" \[default: (.+)\]$")


def plain(text: str) -> str:
    return " ".join(text.replace(r"\[", "[").split())


# -- the settings --------------------------------------------------------------------------------

SETTINGS = """\
# Settings

Generated from the code by `make docs`; do not edit. The same names are options of the command line
(`--eval-every 10`), keywords in Python (`eval_every=10`) and keys of a config file
(`eval_every: 10`). A run writes what its settings resolved to into `config.yaml`, which runs it
again: `fedloom run --config runs/mine/config.yaml`. Explicit options override a config, a config
overrides a preset, and a preset overrides a method's own defaults.
"""

#: headings, and the first setting under each
GROUPS = {
    "method": "Method",
    "data": "Data and clients",
    "model": "Model",
    "rounds": "Training",
    "encode": "Messages",
    "fork": "Where to start",
    "score_on": "Scoring",
    "device": "Speed and storage",
}


def settings_page() -> str:
    out, rows = [SETTINGS], list[tuple[str, ...]]()
    heads = ("setting", "values", "default", "meaning")
    for name, field in Config.model_fields.items():
        if name in GROUPS:
            if rows:
                out += table(heads, rows)
            out.append(f"## {GROUPS[name]}\n")
            rows = []
        rows.append((f"`{name}`", values(field), f"`{field.default}`", field.description or ""))
    return "\n".join([*out, *table(heads, rows)])


def values(field: FieldInfo) -> str:
    """What a field takes, in a few words."""
    found = list(get_args(field.annotation) or (field.annotation,))
    if get_origin(field.annotation) in (dict, list, tuple, Literal):
        found = [field.annotation]
    said = [one_of(kind) for kind in found]
    limits = " ".join(said_limit for limit in field.metadata if (said_limit := bound(limit)))
    return " or ".join(said) + (f", {limits}" if limits else "")


def one_of(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    names = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "yes or no",
        NoneType: "`none`",
    }
    return names.get(kind) or {dict: "options", list: "list", tuple: "list"}[get_origin(kind)]


def bound(limit: object) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " ".join(
        f"{sign} {value:g}"
        for word, sign in signs.items()
        if (value := getattr(limit, word, None)) is not None and abs(value) < 1e9
    )


# -- the methods ---------------------------------------------------------------------------------

METHODS = """\
# Methods

Generated from the code by `make docs`; do not edit. A method is a declaration of a few
[choices](../concepts.md#the-choices-of-a-method). Two that choose different things
[combine](../compositions.md): `fedloom run heterofl+fedper`. `fedloom methods NAME` prints one with
its options and what leaves a client. [Write your own](../writing-a-method.md) in under 40 lines.
"""

#: what the choices of a method are called on its page
CHOICES = {
    "topology": "who takes part, who meets whom",
    "select": "which part of the model a client trains",
    "local": "how a client learns",
    "mix": "how models are combined",
    "adapt": "before scoring",
    "newcomer": "model of a newcomer",
    "own": "second model on the client",
}


def shipped() -> list[tuple[str, type[MethodOptions]]]:
    """The methods that come with fedloom, by family."""
    ours = [item for item in methods().items() if item[1].__module__.startswith("fedloom.methods.")]
    return sorted(ours, key=lambda item: (item[1].family, item[0]))


def method_file(name: str) -> Path:
    return DOCS / "methods" / f"{name}.md"


def methods_page() -> str:
    rows = [
        (f"[`{name}`]({name}.md)", cls.family, first_sentence(cls), cls.source)
        for name, cls in shipped()
    ]
    return "\n".join([METHODS, *table(("method", "family", "what it does", "source"), rows)])


def filled(file: Path, cls: type[MethodOptions]) -> str:
    """A method's page with its generated blocks."""
    if not file.exists():
        raise SystemExit(f"{cls.name} has no page: write {file}, see docs/methods/fedavg.md.")
    text = file.read_text(encoding="utf-8")
    for name, lines in {"head": head_of(cls), "reference": reference_of(cls)}.items():
        begin, end = f"<!-- made: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{file} needs a block {begin} ... {end}.")
        text = "\n".join([f"{before}{begin}", "", *lines, f"{end}{after}"])
    return text


def head_of(cls: type[MethodOptions]) -> Iterator[str]:
    yield f"`{cls.name}` · {cls.family} · {cls.source}\n{{ .facts }}\n"
    yield prose(cls) + "\n"


def reference_of(cls: type[MethodOptions]) -> Iterator[str]:
    yield "## Choices\n"
    built, plain_one = cls().build(), Method()
    rows = [
        (what, f"`{called(value)}`", first_sentence(type(value)))
        for word, what in CHOICES.items()
        if (value := getattr(built, word)) is not None
        and (word in ("local", "mix") or type(value) is not type(getattr(plain_one, word)))
    ]
    yield from table(("choice", "part", "what it does"), rows)
    yield "Everything else is as in [FedAvg](fedavg.md).\n" if cls.name != "fedavg" else ""
    yield "## Options\n"
    options = [
        (f"`{name}`", values(field), f"`{field.default}`", field.description or "")
        for name, field in cls.model_fields.items()
    ]
    yield from (
        table(("option", "values", "default", "meaning"), options) if options else ["None.\n"]
    )
    for title, found in (
        ("Fixed by definition", cls.fixed),
        ("Method-specific defaults", cls.defaults),
    ):
        if found:
            yield f"{title}: {', '.join(f'`{k}={v}`' for k, v in found.items())}.\n"
    if cls.presets:
        yield f"Presets (`--preset`): {', '.join(f'`{name}`' for name in cls.presets)}.\n"
    if cls.at_test:
        names = ", ".join(f"`{name}`" for name in cls.at_test)
        yield f"Can be changed when a trained run is scored again (`fedloom score`): {names}.\n"
    yield "## What leaves a client\n"
    model = str(cls.defaults.get("model", "auto"))
    found = manifest(cls, {}, model, (1, 28, 28), 10).plain()
    rows = []
    for title, lines in found.items():
        for i, line in enumerate(lines or [{"name": "nothing", "what": ""}]):
            size = f"{line['bytes']:,}" if "bytes" in line else ""
            rows.append(("" if i else title, str(line["name"]), str(line["what"]), size))
    yield from table(("", "name", "what", "bytes"), rows)
    of = "the default MLP (784-100-10)" if model == "auto" else f"`{model}`"
    yield f"Bytes of {of} on 28×28 images, encoded as `fp32`, with capacity 1.\n"
    file = cls.__module__.replace(".", "/")
    yield f"Source: `src/{file}.py`.\n"


def called(choice: object) -> str:
    """A part by its class, with the part of the model that it concerns."""
    named = getattr(choice, "__dataclass_fields__", {})
    part = getattr(choice, "part", "all") if "part" in named else "all"
    own = "" if part in ("all", "not none") else f'("{part}")'
    return type(choice).__name__ + own


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
