"""Who has what: the columns and named values of a method, shared out between the two sides.

Everything that follows from a method's declarations is worked out here, once: the sections of a
row, what travels, what stays, what the server keeps. The manifest is the same in words, with bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Kind, Model, Sections, Sizes, Values, Weights
from fedloom.layout import Columns
from fedloom.method import FACTS, Method

OWN = "own"  # the section of a client's second model
OPTIMISER = "optimiser."  # in front of the names of what an optimiser remembers


@dataclass(frozen=True)
class Plan:
    """How the columns and sections of a row are shared out."""

    sections: Sections
    columns: Columns  # of the model, that travel
    private: Columns  # of the model, that live with the clients
    values: Values  # all that is told, kept or sent beside the model
    told: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()

    @staticmethod
    def of(method: Method, sizes: Sizes, optimiser: Values | None = None) -> Plan:
        """The plan of a method; `optimiser` is what clients keep of it between rounds."""
        layout, local = sizes.layout, method.local
        keeps = {**local.keeps, **({OWN: Model()} if method.own else {})}
        keeps |= {OPTIMISER + name: kind for name, kind in (optimiser or {}).items()}
        named: dict[str, Kind] = {}
        for word, values in (("is told", local.told), ("keeps", keeps), ("sends", local.sends)):
            for name, kind in values.items():
                if name in named:
                    raise FedloomError(
                        f"{type(local).__name__} {word} '{name}', and that name is taken already: "
                        "what is told, kept and sent needs a name each."
                    )
                named[name] = kind
        return Plan(
            sections=Sections.of(named, sizes),
            columns=layout.columns(method.mix.part),
            private=method.mix.kept(layout),
            values=named,
            told=tuple(local.told),
            keeps=tuple(keeps),
            sends=tuple(local.sends),
        )

    def initial(self, sizes: Sizes, row: Tensor) -> Tensor:
        """A whole row before anybody has set anything; `row` is the initial model."""
        start = {name: kind.initial(sizes, row) for name, kind in self.values.items()}
        return self.sections.widened(row, start)

    def inside(self, indexes: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Columns of whole rows as positions among those that travel."""
        size = self.sections.layout.size
        cut = (None if i is None else i[i < size] for i in indexes)
        if self.columns.everything:
            return tuple(cut)
        return tuple(None if i is None else self.columns.within(i) for i in cut)

    @property
    def personal(self) -> bool:
        """Whether clients have a model, or a part of one, of their own."""
        return len(self.private) > 0 or OWN in self.keeps

    @property
    def own_range(self) -> tuple[int, int] | None:
        """The columns of a client's second model, where it has one."""
        if OWN not in self.keeps:
            return None
        return self.sections[OWN].start, self.sections[OWN].stop

    def own_sections(self, method: Method) -> Sections | None:
        """The row of a client's second model: the model, and the weights that its rule is told."""
        if method.own is None:
            return None
        layout = self.sections.layout
        return Sections.of({name: Weights() for name in method.own.told}, Sizes(layout, 0))


@dataclass(frozen=True)
class Line:
    """One thing that travels or stays: its name, what it is, and its size (None: a few bytes)."""

    name: str
    what: str
    values: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What leaves a client, what it is told, what stays with it, and what the server keeps."""

    leaves: tuple[Line, ...]
    told: tuple[Line, ...]
    stays: tuple[Line, ...]
    server: tuple[Line, ...]

    TITLES: ClassVar[dict[str, str]] = {
        "leaves": "leaves a client, each round",
        "told": "a client is told, each round",
        "stays": "stays with a client",
        "server": "the server keeps",
    }

    @staticmethod
    def of(method: Method, sizes: Sizes, plan: Plan) -> Manifest:
        nodes = not method.topology.server
        return Manifest(
            leaves=tuple(_leaves(method, sizes, plan)),
            told=tuple(_told(method, sizes, plan)),
            stays=tuple(_stays(method, sizes, plan)),
            server=() if nodes else tuple(_server(method, sizes, plan)),
        )

    def plain(self, bytes_each: int = 4) -> dict[str, list[dict[str, str | int]]]:
        """As lists of words and numbers, for a file."""
        return {
            title: [
                {"name": line.name, "what": line.what}
                | ({} if line.values is None else {"bytes": line.values * bytes_each})
                for line in getattr(self, field)
            ]
            for field, title in self.TITLES.items()
        }


def _leaves(method: Method, sizes: Sizes, plan: Plan) -> Iterator[Line]:
    if len(plan.columns):
        carries = "gradients of " if method.local.hands_back == "gradients" else ""
        what = carries + _part(method.mix.part)
        if type(method.select).__name__ != "Whole":
            what += ", as far as its capacity lets it train it"
        yield Line("model", what, len(plan.columns))
    for name in plan.sends:
        yield Line(name, _kind(method.local.sends[name]), _size(method.local.sends[name], sizes))
    if len(plan.columns) or plan.sends:
        yield Line("samples, steps", f"n_k, the size of its '{method.local.weighs}' part, and the "
                   "number of steps it took")  # fmt: skip
    for fact in sorted(method.mix.needs | method.topology.needs):
        if fact not in ("public", "labels"):
            yield Line(fact, FACTS[fact][1])
    if method.first == "mean" and len(plan.private):
        why = "for the average that clients start from when they first take part"
        yield Line("private part", why, len(plan.private))
    elif method.newcomer.needs_private and plan.personal:
        yield Line("private part", f"once, for newcomers ({type(method.newcomer).__name__})",
                   len(plan.private))  # fmt: skip


def _told(method: Method, sizes: Sizes, plan: Plan) -> Iterator[Line]:
    if len(plan.columns):
        yield Line("model", _part(method.mix.part), len(plan.columns))
    for name in plan.told:
        yield Line(name, _kind(method.local.told[name]), _size(method.local.told[name], sizes))
    if "public" in method.local.needs:
        yield Line("public", "the public images, once")


def _stays(method: Method, sizes: Sizes, plan: Plan) -> Iterator[Line]:
    yield Line("data", "all of its samples")
    if len(plan.private):
        whole = plan.private.everything
        part = "a model of its own" if whole else _part(f"not {method.mix.part}")
        yield Line("private part", part, len(plan.private))
    for name in plan.keeps:
        section = plan.sections[name]
        what = "a second model, trained beside the shared one" if name == OWN else "client state"
        yield Line(name, what, section.stop - section.start)
    if not method.topology.server:
        yield from (Line(name, "what it remembers of others") for name in method.mix.memory)


def _server(method: Method, sizes: Sizes, plan: Plan) -> Iterator[Line]:
    if len(plan.columns) and method.mix.home == "server":
        yield Line("model", _part(method.mix.part), len(plan.columns))
    for name, kind in method.mix.keeps.items():
        yield Line(name, _kind(kind), _size(kind, sizes))
    if "last" in method.select.needs:
        yield Line("last", "what each client last sent", len(plan.columns))
    if any("public" in part.needs for part in (method.select, method.mix, method.local)):
        yield Line("public", "public images")


def _part(part: str) -> str:
    while part.startswith("not not "):
        part = part[8:]
    if part in ("all", "not none"):
        return "the whole model"
    return f"the model without {part[4:]}" if part.startswith("not ") else f"{part} of the model"


def _kind(kind: Kind) -> str:
    words = {Weights: "a vector like the weights", Model: "a whole model"}
    return words.get(type(kind), "an array")


def _size(kind: Kind, sizes: Sizes) -> int:
    total = 1
    for n in kind.shape(sizes):
        total *= n
    return total
