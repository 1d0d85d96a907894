"""FedSwap (S0 chapter 4, S3): clients swap models instead of averaging in most rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedloom.errors import FedloomError
from fedloom.local import SGD
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, register
from fedloom.mix import (
    Alternate,
    Average,
    Greedy,
    InTurn,
    LeastSimilar,
    OnProbes,
    OnWeights,
    Partners,
    RandomPairs,
    Rotating,
    Swap,
)
from fedloom.newcomer import MeanPart, Shared
from fedloom.similarity import kernel_named, measure_named

_COMPARING = ("similarity", "kernel", "debiased", "layers", "probes")
_ON_WEIGHTS = ("cosine", "pearson")


@register
class FedSwap(MethodOptions):
    """Every client has its own model. Participants of a round train theirs and swap models among
    themselves; the others keep theirs. Every h2-th round (`average_every`) ends with FedAvg's
    average of the participants instead, which goes to all clients. h1 is the local work of a round,
    epochs or steps. average_every=1 trains exactly as FedAvg does. Comparing activations
    needs public images (--public)."""

    name = "fedswap"
    family = "swap"
    source = "S0 chapter 4; S3"

    partner: Literal["random", "sequential", "rotating", "greedy", "min"] = Field(
        "random",
        description="how participants are paired: random, disjoint pairs; sequential, one client "
        "after another with any other, as in the source's listing; rotating, neighbours on a ring, "
        "so that with full participation every model visits every client in n - 1 swaps (odd n: "
        "2(n - 1)); greedy, a random client with the least similar one left; min, the least "
        "similar pairs first",
    )
    similarity: Literal["cka", "dcka", "cca", "hsic", "inner", "cosine", "pearson"] = Field(
        "cka", description="measure of greedy and min; cosine and pearson compare weights"
    )
    kernel: str = Field(
        "linear", description="kernel of cka, dcka, hsic: linear, poly[:DEGREE], rbf[:FRACTION]"
    )
    debiased: bool = Field(False, description="use the debiased cka, dcka or hsic")
    layers: str = Field("all", description="layers to compare: all with weights, or A+B+C")
    probes: int = Field(
        256, ge=4, description="public images per round that models are compared on"
    )
    swap_share: float = Field(1.0, ge=0, le=1, description="fraction of the pairs that swap (SP)")
    average_every: int = Field(
        5,
        ge=1,
        description="rounds from one average to the next (h2), with h2 - 1 swaps in between, as in "
        "the source's pseudo-code (its text and table 4-1 say h2)",
    )
    private: str = Field(
        "none", description="part that is neither swapped nor averaged: none, head, a layer"
    )

    @model_validator(mode="after")
    def _useful(self) -> FedSwap:
        if self.partner in ("random", "sequential", "rotating"):
            self._refuse(_COMPARING, f"partner={self.partner} compares no models")
        elif self.similarity in _ON_WEIGHTS:
            self._refuse(("layers", "probes"), f"{self.similarity} compares weights")
        if self.partner == "sequential":
            self._refuse(("swap_share",), "every client swaps")
        if self.partner == "rotating":
            self._refuse(("swap_share",), "all neighbours on the ring swap")
        measure_named(self.similarity, kernel_named(self.kernel), self.debiased)
        if self.private != "none" and self.partner in ("greedy", "min"):
            self._see_parts()
        return self

    def _see_parts(self) -> None:
        if self.similarity not in _ON_WEIGHTS:
            raise FedloomError(
                f"similarity={self.similarity} runs whole models on public images, but the server "
                f"never sees the private part ({self.private}). Compare weights (cosine, pearson), "
                "or choose partner=random or sequential."
            )

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise FedloomError(f"{name}={value} would do nothing: {why}. Leave it out.")

    def build(self) -> Method:
        part = "all" if self.private == "none" else f"not {self.private}"
        swap, average = Swap(self._partners(), part), Average(part)
        newcomer = Shared() if part == "all" else MeanPart()
        return Method(SGD(), Alternate(swap, average, self.average_every), newcomer=newcomer)

    def _partners(self) -> Partners:
        if self.partner == "random":
            return RandomPairs(self.swap_share)
        if self.partner == "sequential":
            return InTurn()
        if self.partner == "rotating":
            return Rotating()
        measure = measure_named(self.similarity, kernel_named(self.kernel), self.debiased)
        layers = None if self.layers == "all" else tuple(self.layers.split("+"))
        on_weights = measure.on_weights
        likeness = OnWeights(measure) if on_weights else OnProbes(measure, layers, self.probes)
        chooses = Greedy if self.partner == "greedy" else LeastSimilar
        return chooses(likeness, self.swap_share)
