"""A method is a declaration: topology × select × local × mix × adapt (× newcomer × own).

This is the contract that all methods share. A method names its parts and nothing else; the runner
walks the round, the engine trains, and everything that follows from the parts (messages, state,
checkpoints, bytes, who keeps what) is derived from what they declare.

    FedAvg  = Method(local=SGD(), mix=Average())
    FedProx = Method(local=Proximal(mu), mix=Average())
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from fedloom.adapt import Adapt, AsIs
from fedloom.errors import FedloomError, unknown
from fedloom.local import SGD, LocalRule
from fedloom.mix import Average, Mix
from fedloom.mix.base import ALL_OF_IT
from fedloom.newcomer import Newcomer, Shared
from fedloom.returned import with_article
from fedloom.select import Select, Whole
from fedloom.topology import Star, Topology

#: what a client's private part starts from
First = Literal["initial", "mean"]

#: the parts of a method, and what they must be
_KINDS: dict[str, type] = {
    "local": LocalRule, "mix": Mix, "topology": Topology, "select": Select, "adapt": Adapt,
    "newcomer": Newcomer, "own": LocalRule,
}  # fmt: skip

#: facts that a part may request in `needs`, who may request them, and what they are
FACTS: dict[str, tuple[tuple[str, ...], str]] = {
    "classes": (("local", "mix", "topology"), "which classes a client holds"),
    "public": (("local", "select", "mix"), "the public images"),
    "labels": (("select", "mix"), "labels of the public images"),
    "data": (("select",), "the client's own data"),
    "last": (("select",), "what a client last sent"),
    "accuracy": (("mix",), "accuracy of what a client sent, on a part of its own data"),
    "samples": (("topology",), "how many samples a client has"),
    "capacity": (("topology",), "the share of the model that a client can train"),
    "speed": (("topology",), "how fast a client is, relative to others"),
    "seen": (("topology",), "the last round in which a client took part"),
}


@dataclass(frozen=True)
class Method:
    """A few choices. Combinations that make no sense are refused with the reason.

    `first` is the initial private part of a client that takes part for the first time: its initial
    values, or the average of all private parts at that moment, which then have to be sent. `own`,
    if given, is the rule by which every client trains a second model next to the shared one; the
    client keeps it and is scored with it (Ditto).

    >>> Method(mix=Average(part="body")).mix.home
    'server'
    """

    local: LocalRule = field(default_factory=SGD)
    mix: Mix = field(default_factory=Average)
    topology: Topology = field(default_factory=Star)
    select: Select = field(default_factory=Whole)
    adapt: Adapt = field(default_factory=AsIs)
    newcomer: Newcomer = field(default_factory=Shared)
    first: First = "initial"
    own: LocalRule | None = None

    def among(self, topology: Topology) -> Method:
        """The same method on this topology, or an error that says why that is impossible."""
        if self.topology.pools:
            raise FedloomError(
                f"{type(self.topology).__name__} has a single learner, which meets nobody. Leave "
                "the topology out, or choose another method."
            )
        return replace(self, topology=topology, mix=self.mix.among_nodes())

    @property
    def silent(self) -> bool:
        """Whether no messages are sent in a round: everything stays with the clients, or the data
        itself has been pooled."""
        nothing = self.mix.part in ("none", "not all") and not self.local.sends
        return nothing or self.topology.pools

    def needs(self, fact: str) -> bool:
        """Whether any part looks at this fact."""
        return any(fact in part.needs for _, part in self._parts())

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            part = getattr(self, name)
            if not isinstance(part, kind) and not (name == "own" and part is None):
                raise FedloomError(
                    f"The method's `{name}` must be {with_article(kind)}, not "
                    + (f"the class {part.__name__}: write {part.__name__}()."
                       if isinstance(part, type) else f"{with_article(type(part))}.")
                )  # fmt: skip
        for reason in (*self._wrong_words(), *self._wrong_pairs(), *self._wrong_places()):
            raise FedloomError(reason)

    def _parts(self) -> Iterator[tuple[str, LocalRule | Mix | Topology | Select]]:
        yield "local", self.local
        yield "mix", self.mix
        yield "topology", self.topology
        yield "select", self.select
        if self.own is not None:
            yield "local", self.own

    def _wrong_words(self) -> Iterator[str]:
        """Refuse values that a part asks for or sends and no other part provides or takes."""
        for role, part in self._parts():
            name = type(part).__name__
            for fact in sorted(part.needs):
                if fact not in FACTS:
                    yield str(unknown(f"fact that {name} needs", fact, FACTS))
                elif role not in FACTS[fact][0]:
                    yield (
                        f"{name} needs '{fact}' ({FACTS[fact][1]}), which is not there for "
                        f"{role}: only for {' and '.join(FACTS[fact][0])}."
                    )
            if not self.topology.server and {"public", "last"} & part.needs:
                yield (
                    f"{name} needs a public set, which only a server has, and "
                    f"{type(self.topology).__name__} has none. Use a part that needs no public "
                    "set."
                )
        local, mix = type(self.local).__name__, type(self.mix).__name__
        for word in sorted(set(self.local.told) - set(self.mix.keeps)):
            yield (
                f"{local} is told '{word}', which nobody keeps. Use a mix that declares it in "
                f"`keeps`, in place of {mix}."
            )
        for word in sorted(set(self.local.sends) - self.mix.takes):
            yield (
                f"{local} sends '{word}', which {mix} does not combine. Use a mix that names it in "
                "`takes`, or another local rule."
            )
        for word in sorted(self.mix.takes - set(self.local.sends)):
            yield f"{mix} combines '{word}', which {local} does not send. Use a rule that does."

    def _wrong_pairs(self) -> Iterator[str]:
        """Parts that do not fit each other."""
        local, mix = type(self.local).__name__, type(self.mix).__name__
        if self.local.hands_back != self.mix.expects:
            yield (
                f"{local} hands back {self.local.hands_back}, but {mix} combines "
                f"{self.mix.expects}. Use a mix for {self.local.hands_back}, or another local rule."
            )
        unlearned = set(self.adapt.rule.extras if self.adapt.rule else ()) - set(self.local.extras)
        if unlearned:
            yield (
                f"{type(self.adapt.rule).__name__} needs values ({', '.join(sorted(unlearned))}) "
                f"that {local} does not learn. Use a local rule that does, or another adapt."
            )
        if self.newcomer.choice == "best" and self.adapt.rule is None:
            yield (
                f"{type(self.newcomer).__name__} picks a part by how well it adapts on the "
                "support part, but nothing is adapted. Give the method an adapt, such as "
                "FineTune()."
            )
        if not self.mix.takes_parts and not isinstance(self.select, Whole):
            yield (
                f"{mix} combines whole models, and {type(self.select).__name__} gives "
                "clients parts of it. Use a mix that averages element by element."
            )
        if "last" in self.select.needs and self.mix.part not in ALL_OF_IT:
            yield (
                f"{type(self.select).__name__} runs clients' models at the server, which does not "
                f"have their private parts: only '{self.mix.part}' is sent. Share the whole model, "
                "or choose sub-models on the clients (feddse)."
            )
        if self.mix.keeps and self.mix.part not in (*ALL_OF_IT, "none"):
            yield (
                f"{mix} keeps values for all weights of the model ({', '.join(self.mix.keeps)}), "
                f"so it can't combine a part of it ('{self.mix.part}'). Use Average."
            )
        if self.local.narrows and not (self.select.nested and self.select.cuts):
            yield (
                f"{local} trains narrower nets inside a client's own, and "
                f"{type(self.select).__name__} does not support that. Use Ordered()."
            )
        if self.own is not None and (not isinstance(self.select, Whole) or self.own.extras):
            yield (
                "A client's second model is a whole model of weights: it can't be combined with "
                f"{type(self.select).__name__} or with rules that learn more than weights."
            )

    def _wrong_places(self) -> Iterator[str]:
        """Parts that need a server, a meeting, or clients, where there is none."""
        mix, topology = type(self.mix).__name__, type(self.topology).__name__
        if not self.topology.server and self.mix.home == "server":
            yield (
                f"{mix} needs a server to hold the shared model, and {topology} has none. Use a "
                "mix whose models live on the nodes."
            )
        if self.topology.server and self.mix.meets:
            yield (
                f"{mix} combines the models of nodes that meet, but with {topology} all talk to a "
                "server. Give nodes a topology, such as Peers()."
            )
        if not self.topology.pools:
            return
        if self.mix.home == "node" or self.own is not None:
            yield (
                f"{topology} trains one model on everyone's data, but this method keeps a model "
                f"on each client ({mix}). Use a mix with a shared model."
            )
        if not isinstance(self.select, Whole):
            yield (
                f"{topology} has one learner, so there is no weaker client to give a sub-model "
                f"to. Drop {type(self.select).__name__}."
            )
