"""Sub-models for weak devices (S2): one mechanism, one selector for each method.

A client of capacity r trains a network that really is smaller, with a fraction r of the channels of
every hidden layer (DepthFL: the first blocks); the server averages each element over the clients
that trained it. The options cover the points in which published code differs; with all clients at
capacity 1 and default options, every width method is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedloom.local import LocalRule, MaskedSGD, OrderedDropout, SelfDistillation
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, Preset, register
from fedloom.mix import Coverage
from fedloom.newcomer import MeanPart, Shared
from fedloom.select import (
    ByActivation,
    ByGradient,
    Ordered,
    Prefix,
    Random,
    Rolling,
    Select,
)

LOW = "low-quality"
HIGH = "high-quality"
#: DepthFL's clients: a quarter at each of four depths (S2 table 4.2's costs)
DEPTHS = "1,0.75,0.5,0.25"
#: S2 §3.3.3 and tables 3.3, 4.1; `tuned` learns at a rate at which these networks move
_TRAINING = {"epochs": 2, "momentum": 0.9, "weight_decay": 5e-4, "augment": "crop:2",
             "participation": 0.1, "clients": 100, "batch": 16, "partition": "classes:2",
             "draw": "capacity", "model_options": {"norm": "static"}, "mask": "inf",
             "by_class": True}  # fmt: skip
#: all images are trained on; S2's multiply-accumulates are those of 32×32 pixels
_SOURCE = {**_TRAINING, "lr": 0.001, "test_share": 0.0, "static_samples": None, "eval_every": 40,
           "data_options": {"size": 32}}  # fmt: skip
_PRESETS: dict[str, Preset] = {
    "source": {**_SOURCE, "data": "mnist", "model": "conv4", "rounds": 800},
    "source-cifar10": {**_SOURCE, "data": "cifar10", "model": "resnet18", "rounds": 2500,
                       "augment": "flip+crop:4"},
    "tuned": {**_TRAINING, "model": "conv4", "lr": 0.01, "clip": 1.0,
              "lr_schedule": "cosine:0.01"},
}  # fmt: skip


def _presets(capacities: str, **more: object) -> dict[str, Preset]:
    return {name: {**preset, "capacities": capacities, **more} for name, preset in _PRESETS.items()}


class _SubModels(MethodOptions):
    family = "sub-models"

    mask: Literal["none", "zero", "inf"] = Field(
        "none", description="logits of classes a client lacks, in its loss: none (keep), zero, inf"
    )
    weigh: Literal["samples", "equal"] = Field("samples", description="how clients are weighted")
    by_class: bool = Field(
        False, description="average classifier rows only over clients that hold the class"
    )
    old_votes: bool = Field(False, description="the server's old value counts as one more client")
    private: str = Field(
        "none", description="part that clients keep private: none, head, head:K, a layer"
    )
    mu: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of FedProx's term")

    def _select(self) -> Select:
        raise NotImplementedError

    def _local(self) -> LocalRule:
        return MaskedSGD(self.mask, mu=self.mu)

    def build(self) -> Method:
        part = "all" if self.private == "none" else f"not {self.private}"
        mix = Coverage(part, self.weigh, self.by_class, self.old_votes)
        newcomer = Shared() if part == "all" else MeanPart()
        return Method(self._local(), mix, select=self._select(), newcomer=newcomer)


class _Width(_SubModels):
    scaler: bool = Field(True, description="multiply hidden outputs by 1/r in training")
    rounding: Literal["ceil", "floor"] = Field("ceil", description="rounding of r·m channels")
    measure_gap: bool = Field(
        False,
        description="record how far sub-models' gradients and updates are from the whole model's "
        "(gradient_gap, update_gap); clients then train the whole model as well",
    )


@register
class HeteroFL(_Width):
    """A client of capacity r trains the first ⌈r·m⌉ channels of every layer, always the same."""

    name = "heterofl"
    source = "Diao et al. 2021; S2 §2.3"
    presets = _presets(LOW)

    def _select(self) -> Select:
        return Ordered(self.rounding, self.scaler, measures=self.measure_gap)


@register
class FjORD(_Width):
    """Ordered like HeteroFL; for every batch the client also trains a narrower net, drawn inside
    its own width, which learns from its widest one."""

    name = "fjord"
    source = "Horváth et al. 2021; S2 §2.3"
    presets: ClassVar = _presets(LOW, scaler=False)

    scaler: bool = Field(False, description="multiply hidden outputs by 1/r in training")
    levels: tuple[float, ...] = Field(
        (0.2, 0.4, 0.6, 0.8, 1.0), description="widths to draw from, up to the client's own"
    )
    distil: float = Field(0.5, ge=0, le=1, description="weight of distillation in the narrow loss")
    temperature: float = Field(1.0, gt=0, description="temperature of the distillation")

    def _select(self) -> Select:
        return Ordered(self.rounding, self.scaler, measures=self.measure_gap)

    def _local(self) -> LocalRule:
        levels, distil = self.levels, self.distil
        return OrderedDropout(self.mask, levels, distil, self.temperature, mu=self.mu)


@register
class FederatedDropout(_Width):
    """A fresh random subset of the channels for every client and round."""

    name = "federated-dropout"
    source = "Caldas et al. 2018; S2 §2.3"
    presets = _presets(LOW)

    def _select(self) -> Select:
        return Random(self.rounding, self.scaler, measures=self.measure_gap)


@register
class FedRolex(_Width):
    """A window of ⌈r·m⌉ channels that moves by one channel every round and wraps around."""

    name = "fedrolex"
    source = "Alam et al. 2022; S2 §2.3"
    presets = _presets(LOW)

    def _select(self) -> Select:
        return Rolling(self.rounding, self.scaler, measures=self.measure_gap)


@register
class FedDSE(_Width):
    """The client downloads the whole model, runs it on its own data and trains the channels with
    the highest activations (or, with a temperature, samples channels by activation)."""

    name = "feddse"
    source = "S2 ch. 3"
    presets = _presets(LOW)

    temperature: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=True,
        description="T: 0 takes the largest, above 0 samples by softmax(h/T), inf uniformly",
    )
    samples: int | None = Field(
        None, ge=1, description="samples of the client's data to run; none: all"
    )
    norms: Literal["shared", "own"] = Field(
        "shared",
        description="whose data measures batch norms before clients look at the model: that of all "
        "who take part in the round, if they share it; or each its own",
    )

    def _select(self) -> Select:
        return ByActivation(
            self.rounding, self.scaler, self.temperature, self.samples,
            own_norms=self.norms == "own", measures=self.measure_gap,
        )  # fmt: skip


class _FedGSE(_Width):
    defaults: ClassVar[Preset] = {"public": "share:0.01"}
    presets = _presets(HIGH)
    labels: ClassVar[Literal["spl", "csl"]]

    samples: int | None = Field(
        128, ge=1, description="public samples used for the gradients; none: all"
    )

    def _select(self) -> Select:
        return ByGradient(
            self.rounding, self.scaler, self.labels, self.samples, measures=self.measure_gap
        )


@register
class FedGSESPL(_FedGSE):
    """The server picks the channels with the largest gradient on public samples that the client's
    last sub-model classifies correctly."""

    name = "fedgse-spl"
    source = "S2 ch. 4"
    labels = "spl"


@register
class FedGSECSL(_FedGSE):
    """FedGSE without labels: the client's last sub-model labels the public samples."""

    name = "fedgse-csl"
    source = "S2 ch. 4"
    labels = "csl"


@register
class DepthFL(_SubModels):
    """Depth instead of width: a client trains as many of the first blocks as it can afford, with a
    classifier after each; the classifiers learn from each other, and their mean is the output."""

    name = "depthfl"
    source = "Kim et al. 2023; S2 §3.3"
    presets: ClassVar = _presets(DEPTHS, budget="blocks")

    budget: Literal["parameters", "macs", "blocks"] = Field(
        "parameters",
        description="how capacity limits depth: to r² of the parameters or MACs, or to r·blocks, "
        "of what the strongest client can train",
    )
    distil: float = Field(1.0, ge=0, description="weight of the distillation between classifiers")
    ramp: int = Field(300, ge=0, description="rounds over which that weight ramps up")

    def _select(self) -> Select:
        return Prefix(self.budget)

    def _local(self) -> LocalRule:
        return SelfDistillation(self.mask, self.distil, self.ramp, mu=self.mu)
