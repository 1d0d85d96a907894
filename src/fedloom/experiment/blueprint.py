"""What a model is made of and what it costs, whole or cut to a capacity, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.errors import FedloomError
from fedloom.experiment.plugins import model_factory
from fedloom.kinds import Sizes
from fedloom.layout import Layout
from fedloom.methods.registry import MethodOptions, configure
from fedloom.models import build
from fedloom.models.counts import LayerCost, forward_macs, layer_costs, saved_bytes, training_macs
from fedloom.models.norm import has_measured_norm
from fedloom.round.encode import encoding
from fedloom.round.plan import Manifest, Plan
from fedloom.select import Channels, Ordered, Prefix, Whole
from fedloom.select.verify import verify

_PUBLIC = 1000  # images of the public set, where none is named
_COPIES = 2  # of the weights in a training step: themselves and their gradients


def manifest(
    method: type[MethodOptions],
    params: Mapping[str, Any],
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    options: Mapping[str, Any] | None = None,
    encode: str = "fp32",
) -> Manifest:
    """What leaves a client of this method, what stays with it and what the server keeps."""
    made = configure(method, params).build()
    options = {**(options or {}), **made.select.model_options}
    module = build(model_factory(model), shape, classes, options=options)
    public = _PUBLIC if made.needs("public") else 0
    sizes = Sizes(Layout.of(module, made.local.extras), classes, public)
    plan, every = Plan.of(made, sizes), not isinstance(made.select, Whole)
    shares = not made.select.own_norms and not plan.personal and has_measured_norm(module, every)
    norms = sizes.layout.norm_bytes if shares else 0
    return Manifest.of(made, sizes, plan, encoding(encode), norms=norms)


@dataclass(frozen=True)
class Costs:
    """What one model costs: values, multiply-accumulates of a sample, bytes of a training step."""

    parameters: int
    forward: int
    training: int
    memory: int


@dataclass(frozen=True)
class Blueprint:
    """A model, or its sub-model of some capacity, layer by layer."""

    layers: list[LayerCost]
    whole: Costs
    part: Costs
    groups: list[tuple[str, int, int]]  # of channels: the layer that makes them, kept, of how many


def blueprint(
    name: str,
    shape: tuple[int, int, int],
    classes: int,
    capacity: float = 1.0,
    batch: int = 32,
    options: Mapping[str, Any] | None = None,
) -> Blueprint:
    """Build the model and cut it: by width, or, with the option `exits`, by depth."""
    if not 0 < capacity <= 1:
        raise FedloomError(f"A capacity is above 0 and at most 1, not {capacity:g}.")
    module = build(model_factory(name), shape, classes, options=options)
    part, groups = module, []
    if (options or {}).get("exits"):
        select = Prefix()
        select.check(module, shape, capacity)
        part = module.prefix(select.depth(module, capacity))  # type: ignore[operator, arg-type]
    elif capacity < 1:
        Ordered().check(module, shape, capacity)
        channels = Channels.of(module, shape)
        verify(channels, shape)
        counts = channels.counts(capacity)
        part = channels.build(counts)
        groups = [(g.name, k, g.size) for g, k in zip(channels.groups, counts, strict=True)]
    whole, smaller = (_costs(m, shape, batch) for m in (module, part))
    return Blueprint(layer_costs(part, shape), whole, smaller, groups)


def _costs(module: nn.Module, shape: tuple[int, int, int], batch: int) -> Costs:
    parameters = sum(p.numel() for p in module.parameters())
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return Costs(
        parameters,
        forward_macs(module, shape),
        training_macs(module, shape),
        _COPIES * weights + batch * saved_bytes(module, shape),
    )
