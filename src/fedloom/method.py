"""A method is a declaration: topology × select × local × mix × adapt (× newcomer).

This is the contract that all methods share. A method names its parts and nothing else; the runner
walks the round, the engine trains, and everything that follows from the parts (state, checkpoints,
traffic, who keeps what) is derived from what they declare.

    FedAvg  = Method(local=SGD(), mix=Average())
    FedProx = Method(local=Proximal(mu), mix=Average())
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedloom.adapt import Adapt, AsIs
from fedloom.errors import FedloomError
from fedloom.local import SGD, LocalRule
from fedloom.mix import Average, Mix
from fedloom.newcomer import Newcomer, Shared
from fedloom.select import Select, Whole
from fedloom.topology import Star, Topology


@dataclass(frozen=True)
class Method:
    """Six choices. Combinations that make no sense are refused with the reason.

    >>> Method(mix=Average(part="body")).mix.home
    'server'
    """

    local: LocalRule = field(default_factory=SGD)
    mix: Mix = field(default_factory=Average)
    topology: Topology = field(default_factory=Star)
    select: Select = field(default_factory=Whole)
    adapt: Adapt = field(default_factory=AsIs)
    newcomer: Newcomer = field(default_factory=Shared)

    def among(self, topology: Topology) -> Method:
        """The same method for nodes that meet as this topology says, or why that can't be."""
        if self.topology.pools:
            raise FedloomError(
                f"{type(self.topology).__name__} has one learner, who meets nobody. Leave the "
                "topology out, or choose another method."
            )
        return replace(self, topology=topology, mix=self.mix.among_nodes())

    def __post_init__(self) -> None:
        names = {name: type(getattr(self, name)).__name__ for name in ("local", "mix", "topology")}
        if self.local.sends != self.mix.expects:
            raise FedloomError(
                f"{names['local']} hands back {self.local.sends}, but {names['mix']} combines "
                f"{self.mix.expects}. Use a mix for {self.local.sends}, or another local rule."
            )
        if not self.topology.server and self.mix.home == "server":
            raise FedloomError(
                f"{names['mix']} needs a server to hold the shared model, and "
                f"{names['topology']} has none. Use a mix whose models live on the nodes."
            )
        if not self.topology.server and self.mix.sees_public:
            raise FedloomError(
                f"{names['mix']} looks at a public set, which only a server holds, and "
                f"{names['topology']} has none. Use a mix that needs no public set."
            )
        if not self.topology.server and self.select.sees_public:
            raise FedloomError(
                f"{type(self.select).__name__} chooses by a public set, which only a server holds, "
                f"and {names['topology']} has none. Use a selector that needs no public set."
            )
        if self.topology.server and self.mix.meets:
            raise FedloomError(
                f"{names['mix']} combines the models of nodes that meet, but with "
                f"{names['topology']} all talk to a server. Give nodes a topology, such as Peers()."
            )
        if self.topology.pools and self.mix.home == "node":
            raise FedloomError(
                f"{names['topology']} trains one model on everyone's data, but "
                f"{names['mix']} keeps a model on each client. Use a mix with a shared model."
            )
        unlearned = set(self.adapt.rule.extras if self.adapt.rule else ()) - set(self.local.extras)
        if unlearned:
            raise FedloomError(
                f"{type(self.adapt.rule).__name__} needs values ({', '.join(sorted(unlearned))}) "
                f"that {names['local']} does not learn. Use a local rule that does, or another "
                "adapt."
            )
        if self.newcomer.choice == "best" and self.adapt.rule is None:
            raise FedloomError(
                f"{type(self.newcomer).__name__} picks a part by how it adapts to the support "
                "part, but nothing is adapted. Give the method an adapt, such as FineTune()."
            )
        if not self.mix.takes_parts and not isinstance(self.select, Whole):
            raise FedloomError(
                f"{names['mix']} combines whole models, and {type(self.select).__name__} gives "
                "clients parts of it. Use a mix that averages element by element."
            )
        if self.local.narrows and not (self.select.nested and self.select.cuts):
            raise FedloomError(
                f"{names['local']} trains narrower nets inside a client's own, and "
                f"{type(self.select).__name__} has none such. Use Ordered()."
            )
        if self.topology.pools and not isinstance(self.select, Whole):
            raise FedloomError(
                f"{names['topology']} has one learner, so there is no weaker client to give a "
                f"sub-model to. Drop {type(self.select).__name__}."
            )
