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
from fedloom.kinds import Array, Kind, Model, PerClass, Sections, Sizes, Values, Weights
from fedloom.layout import Columns
from fedloom.method import FACTS, Method
from fedloom.mix.base import ALL_OF_IT
from fedloom.round.encode import Encoding, Float32
from fedloom.select import Whole

OWN = "own"  # the section of a client's second model
NEWCOMERS = "once, for newcomers"
LATECOMERS = "at evaluations, for clients that have not taken part yet"
OPTIMISER = "optimiser."  # in front of the names of what an optimiser remembers


@dataclass(frozen=True)
class Plan:
    """How the columns and sections of a row are shared out."""

    sections: Sections
    columns: Columns  # of the model, that travel
    private: Columns  # of the model, that live with the clients
    values: Values  # all that is told, kept or sent besides the model
    told: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    sends_choice: bool = False  # a sub-model's receiver can't know which channels it has
    chosen_there: bool = False  # by the server, from what clients can't know

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
            sends_choice=not method.select.follows
            and ("data" in method.select.needs or not method.topology.server),
            chosen_there=not method.select.follows and "data" not in method.select.needs,
        )

    def tells_choice(self, changes: bool) -> bool:
        """Whether a client has to know which channels the server chose for it: to find those of
        what it keeps, such as the rest of an encoding that sends `changes`. Otherwise its sub-model
        is a model to it like any other."""
        like_weights = any(self.sections[name].like_weights for name in self.keeps)
        keeps = changes or like_weights or len(self.private) > 0
        return self.chosen_there and not self.sends_choice and keeps

    def initial(self, sizes: Sizes, row: Tensor) -> Tensor:
        """A whole row of initial values; `row` is the initial model."""
        start = {name: kind.initial(sizes, row) for name, kind in self.values.items()}
        return self.sections.widened(row, start)

    def inside(self, indexes: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Columns of whole rows as positions among those that travel."""
        cut: Sequence[Tensor | None] = indexes
        if self.sections:  # beyond the model
            size = self.sections.layout.size
            cut = [None if i is None else i[i < size] for i in indexes]
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
    bytes: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What leaves a client, what it is told, what stays with it, and what the server keeps.

    What travels has the bytes of the run's encoding, what stays those of the values themselves.
    """

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
    def of(
        method: Method,
        sizes: Sizes,
        plan: Plan,
        encoding: Encoding | None = None,
        strangers: Sequence[str] = (NEWCOMERS,),
        norms: int = 0,
    ) -> Manifest:
        """`strangers`: when a model is needed for somebody without a private part, and for whom;
        `norms`: bytes of norm statistics that clients measure together before they look."""
        nodes, written = not method.topology.server, encoding or Float32()
        if method.silent:
            written = Float32()
        return Manifest(
            leaves=(*_leaves(method, sizes, plan, written, strangers), *_norms("its", norms)),
            told=(*_told(method, sizes, plan, written), *_norms("everybody's", norms)),
            stays=tuple(_stays(method, sizes, plan, written)),
            server=() if nodes else tuple(_server(method, sizes, plan)),
        )

    def plain(self) -> dict[str, list[dict[str, str | int]]]:
        """As lists of words and numbers, for a file."""
        return {
            title: [
                {"name": line.name, "what": line.what}
                | ({} if line.bytes is None else {"bytes": line.bytes})
                for line in getattr(self, field)
            ]
            for field, title in self.TITLES.items()
        }


_PLAIN = Float32()  # how values lie in memory


def _leaves(
    method: Method, sizes: Sizes, plan: Plan, written: Encoding, strangers: Sequence[str]
) -> Iterator[Line]:
    beside = written if written.beside else _PLAIN
    if len(plan.columns):
        carries = "gradients of " if method.local.hands_back == "gradients" else ""
        what = carries + _part(method.mix.part)
        if not isinstance(method.select, Whole):
            what += ", limited to its capacity"
        yield Line("model", what, written.size(len(plan.columns)))
        if plan.sends_choice:
            yield Line("choice", "which channels it trained, of each group a bit for every channel "
                       "or the numbers of those chosen")  # fmt: skip
    for name in plan.sends:
        kind = method.local.sends[name]
        yield Line(name, _kind(kind), beside.size(_size(kind, sizes)))
    if len(plan.columns) or plan.sends:
        yield Line("samples, steps", f"n_k, the size of its '{method.local.weighs}' part, and the "
                   "number of steps it took")  # fmt: skip
    for fact in sorted(method.mix.needs | method.topology.needs):
        if fact not in ("public", "labels"):
            yield Line(fact, FACTS[fact][1])
    if method.first == "mean" and len(plan.private):
        why = "for the average that clients start from when they first take part"
        yield Line("private part", why, _PLAIN.size(len(plan.private)))
    elif method.newcomer.needs_private and plan.personal and strangers:
        why = f"{' and '.join(strangers)} ({type(method.newcomer).__name__})"
        yield Line("private part", why, _PLAIN.size(len(plan.private)))


def _norms(whose: str, size: int) -> Iterator[Line]:
    if size:
        yield Line("norms", f"mean and variance of what batch norms see of {whose} data", size)


def _told(method: Method, sizes: Sizes, plan: Plan, written: Encoding) -> Iterator[Line]:
    down = written if written.down else _PLAIN
    if len(plan.columns):
        what = _part(method.mix.part)
        if not isinstance(method.select, Whole) and "data" not in method.select.needs:
            what += ", limited to its capacity"
        yield Line("model", what, down.size(len(plan.columns)))
        if plan.tells_choice(written.changes):
            yield Line("choice", "which channels it is to train")
    for name in plan.told:
        kind = method.local.told[name]
        yield Line(name, _kind(kind), down.size(_size(kind, sizes)))
    if method.first == "mean" and len(plan.private):
        yield Line("private part", "the average of all, once, when it first takes part",
                   _PLAIN.size(len(plan.private)))  # fmt: skip
    if "public" in method.local.needs:
        yield Line("public", "the public images, once")


def _stays(method: Method, sizes: Sizes, plan: Plan, written: Encoding) -> Iterator[Line]:
    yield Line("data", "all of its samples")
    if len(plan.private):
        whole = plan.private.everything
        part = "a model of its own" if whole else _part(f"not {method.mix.part}")
        yield Line("private part", part, _PLAIN.size(len(plan.private)))
    for name in plan.keeps:
        section = plan.sections[name]
        what = "a second model, trained next to the shared one" if name == OWN else "client state"
        yield Line(name, what, _PLAIN.size(section.stop - section.start))
    if written.changes and method.mix.home == "server" and len(plan.columns):
        yield Line("rest", "what the encoding left out of its messages, which goes into the next",
                   _PLAIN.size(len(plan.columns)))  # fmt: skip
    if not method.topology.server:
        yield from (Line(name, "what it remembers of others") for name in method.mix.memory)


def _server(method: Method, sizes: Sizes, plan: Plan) -> Iterator[Line]:
    if len(plan.columns) and method.mix.home == "server":
        yield Line("model", _part(method.mix.part), _PLAIN.size(len(plan.columns)))
    for name, kind in method.mix.keeps.items():
        yield Line(name, _kind(kind), _PLAIN.size(_size(kind, sizes)))
    if "last" in method.select.needs:
        yield Line("last", "what each client last sent", _PLAIN.size(len(plan.columns)))
    if any("public" in part.needs for part in (method.select, method.mix, method.local)):
        yield Line("public", "public images")


def _part(part: str) -> str:
    while part.startswith("not not "):
        part = part[8:]
    if part in ALL_OF_IT:
        return "the whole model"
    return f"the model without {part[4:]}" if part.startswith("not ") else f"{part} of the model"


def _kind(kind: Kind) -> str:
    if isinstance(kind, Array):
        words = {(): "one number", PerClass().dims: "one number per class"}
        shape = " × ".join(map(str, kind.dims))
        return words.get(kind.dims, f"an array of shape {shape}")
    return {Weights: "a vector like the weights", Model: "a whole model"}.get(type(kind), "numbers")


def _size(kind: Kind, sizes: Sizes) -> int:
    total = 1
    for n in kind.shape(sizes):
        total *= n
    return total
