"""Every setting of a run, its default and its meaning, in one place.

The same names serve the Python API, the YAML file and the command line. What a run resolved them to
is written beside its results and reruns it exactly. Nothing heavy is imported here before it is
used: the command line's help is made from this class.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedloom.errors import FedloomError, unknown

if TYPE_CHECKING:
    from fedloom.local import Budget, Optimiser


LARGEST_RATE = 1e30  # nothing learns at such a rate; beyond it floats overflow


class Config(BaseModel):
    """A federated experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: str = Field("fedavg", description="method name, or FILE.py[:CLASS] of your own")
    params: dict[str, Any] = Field(
        {}, description="the method's own options (fedloom methods NAME)"
    )

    preset: str | None = Field(
        None, description="constants under a name that the method knows, such as source or tuned"
    )

    data: str = Field("digits", description="data set name, .npz file or folder of images")
    data_options: dict[str, Any] = Field({}, description="options of the data set")
    clients: int = Field(50, ge=1, le=10**9, description="number of registered clients")
    partition: str = Field("dirichlet:0.5", description="who holds what")
    pool: bool = Field(False, description="pool the train and test files before dealing (S1)")
    test_share: float = Field(
        0.2, ge=0, lt=1, description="each client's share held out for its score"
    )
    support_share: float = Field(
        0.2, ge=0, lt=1, description="share of a part that is support, the rest is query"
    )
    newcomers: int = Field(
        0, ge=0, le=10**9, description="clients that take no part in training, scored apart"
    )
    newcomer_classes: int = Field(
        2, ge=1, description="classes of a newcomer, in combinations nobody trained on"
    )
    capacities: str = Field(
        "1",
        description="share of the model that clients can train: 1:0.2,0.5:0.8 is a fifth with all "
        "of it and the rest with half; low-quality | high-quality | rho:SHARE,STRONG,WEAK | "
        "FILE.csv; for methods with sub-models",
    )
    public: str = Field(
        "none",
        description="images that the server may use, for methods that look at them: none | "
        "share:FRACTION of the clients' data | noise:COUNT | a data set or .npz file[:COUNT]",
    )
    topology: str | None = Field(
        None,
        description="who meets whom where there is no server (fedloom topology lists them): "
        "waypoint,area=500 | ring | erdos-renyi:0.1 | ...; none: the method's own",
    )
    faults: str = Field(
        "none",
        description="what goes wrong among nodes: fail=CHANCE,back=CHANCE,state=kept|lost,"
        "loss=CHANCE,late=ROUNDS",
    )
    augment: str = Field("none", description="none | flip | crop:PIXELS | flip+crop:PIXELS")

    model: str = Field("auto", description="auto, a built-in model, or FILE.py:FACTORY of your own")
    model_options: dict[str, Any] = Field(
        {}, description="options of the model: hidden, channels, norm, ..."
    )

    rounds: int = Field(50, ge=1, description="rounds of training")
    participation: float = Field(
        0.2,
        gt=0,
        description="fraction of clients a round (up to 1), or their number (2 or more); with a "
        "topology, all of them unless given",
    )
    epochs: int = Field(1, ge=1, description="local passes over the client's data per round")
    steps: int | None = Field(None, ge=1, description="local batches per round, in place of epochs")
    batch: int | str = Field(32, description="batch size, or inf for all samples at once")
    lr: float = Field(0.05, gt=0, le=LARGEST_RATE, allow_inf_nan=False, description="learning rate")
    lr_schedule: str = Field(
        "constant",
        description="constant | cosine[:FLOOR] | step:EVERY,FACTOR | exp:FACTOR, by round",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum, rebuilt each round")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST_RATE, allow_inf_nan=False, description="weight decay (L2)"
    )
    clip: float | None = Field(None, gt=0, description="largest gradient norm")

    seed: int = Field(0, ge=0, description="names every random stream of the run")
    eval_every: int = Field(
        5, ge=1, description="score after every so many rounds, and after the last"
    )
    eval_clients: int = Field(
        1000, ge=0, description="most clients to score; a fixed random choice beyond that"
    )
    eval_common: int = Field(
        1000, ge=0, description="most personal models to score on the common test set; 0: none"
    )
    static_samples: int = Field(
        5000,
        ge=1,
        description="training samples that measure norm statistics before scoring (of static "
        "norms; of all tracked norms where clients train sub-models)",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps")
    engine: str = Field("auto", description="auto, serial, stacked, processes or ray")
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description="processes or threads to train with; 0: as many as there are cores",
    )
    precision: str = Field(
        "fp32", description="fp32, or bf16 for forward and backward passes (weights stay fp32)"
    )
    ray_address: str | None = Field(
        None, description="a Ray cluster for --engine ray; none: one on this machine"
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="CPU threads of one training step; other numbers may change last bits",
    )
    checkpoint_every: int = Field(1, ge=1, description="keep the state after every so many rounds")

    @field_validator("capacities", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) else value

    @field_validator("batch", mode="before")
    @classmethod
    def _batch(cls, value: Any) -> int | str:
        if isinstance(value, float) and math.isinf(value):
            return "inf"
        text = str(value).lower()
        if text in ("inf", "full", "all", "∞"):
            return "inf"
        if not text.isdigit() or int(text) < 1:
            raise ValueError("a batch size is a whole number from 1 up, or inf for all samples")
        return int(text)

    @field_validator("participation")
    @classmethod
    def _participation(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("a number of clients must be whole; a fraction is at most 1")
        return value

    @field_validator("augment")
    @classmethod
    def _augment(cls, value: str) -> str:
        from fedloom.engine.batches import Augment

        Augment.parse(value)
        return value

    @field_validator("public")
    @classmethod
    def _public(cls, value: str) -> str:
        from fedloom.data.public import Wish

        Wish.parse(value)
        return value

    @field_validator("capacities")
    @classmethod
    def _capacities(cls, value: str) -> str:
        from fedloom.experiment.capacities import Capacities

        Capacities.parse(value)
        return value

    @field_validator("topology")
    @classmethod
    def _topology(cls, value: str | None) -> str | None:
        from fedloom.topology import network

        if value is not None:
            network(value)
        return value

    @field_validator("faults")
    @classmethod
    def _faults(cls, value: str) -> str:
        from fedloom.topology import Faults

        Faults.parse(value)
        return value

    @field_validator("lr_schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        from fedloom.local import Schedule

        Schedule(value)
        return value

    @field_validator("precision")
    @classmethod
    def _precision(cls, value: str) -> str:
        if value not in ("fp32", "bf16"):
            raise unknown("precision", value, ("fp32", "bf16"))
        return value

    @model_validator(mode="after")
    def _rates(self) -> Config:
        from fedloom.local import Schedule

        try:
            last = self.lr * Schedule(self.lr_schedule).factor(self.rounds, self.rounds)
        except OverflowError:
            last = math.inf
        if last > LARGEST_RATE:
            raise FedloomError(
                f"lr_schedule={self.lr_schedule} raises the learning rate from {self.lr:g} to "
                f"{last:g} in round {self.rounds}. Give a smaller factor."
            )
        return self

    @property
    def participants(self) -> int:
        """m = max(⌊C·K⌋, 1), or the number asked for."""
        if self.participation > 1:
            return int(self.participation)
        return max(math.floor(self.participation * self.clients + 1e-9), 1)

    @property
    def budget(self) -> Budget:
        from fedloom.local import Budget

        size = None if self.batch == "inf" else int(self.batch)
        return Budget(epochs=self.epochs, steps=self.steps, batch=size)

    def optimiser(self, round: int) -> Optimiser:
        from fedloom.local import Optimiser, Schedule

        lr = self.lr * Schedule(self.lr_schedule).factor(round, self.rounds)
        return Optimiser(lr, self.momentum, self.weight_decay, self.clip)

    def dump(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
