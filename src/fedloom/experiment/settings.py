"""Every setting of a run, its default and its meaning, in one place.

The same names serve the Python API, the YAML file and the command line. What a run resolved them to
is written beside its results and reruns it exactly. Nothing heavy is imported here before it is
used: the command line's help is made from this class.
"""

from __future__ import annotations

import importlib
import math
import operator
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from fedloom.errors import FedloomError, unknown
from fedloom.options import Options

if TYPE_CHECKING:
    from fedloom.local import Budget, Optimiser


LARGEST_RATE = 1e30  # nothing learns at such a rate; beyond it floats overflow

_WHERE = {"device", "engine", "workers", "ray_address", "threads", "kernels"}  # and how fast
_SCORED = {"eval_clients", "eval_common"}
#: settings that may change when a run is resumed: its length, what is shown of it, and its speed
RESUMABLE = frozenset(
    {"rounds", "eval_every", "checkpoint_every", "track", *_WHERE, *_SCORED} - {"kernels"}
)
#: settings that may change when a trained run is scored again: they do not affect training
RESCORABLE = frozenset({"score_on", "static_samples", "precision", *_WHERE, *_SCORED})

#: settings that are texts with a grammar → what reads them, imported when it is needed
_PARSERS = {
    "task": "fedloom.tasks:check",
    "augment": "fedloom.engine.batches:Augment.parse",
    "kernels": "fedloom.engine.kernels:check",
    "public": "fedloom.data.public:Wish.parse",
    "newcomer_partition": "fedloom.data.partition:parse",
    "capacities": "fedloom.experiment.capacities:Capacities.parse",
    "speeds": "fedloom.experiment.capacities:Capacities.speeds",
    "topology": "fedloom.topology:network",
    "faults": "fedloom.topology:Faults.parse",
    "optimiser": "fedloom.local.optimiser:parse",
    "encode": "fedloom.round.encode:encoding",
    "screen": "fedloom.round.screen:Screen.parse",
    "attack": "fedloom.round.attack:Attack.parse",
    "lr_schedule": "fedloom.local:Schedule",
    "track": "fedloom.experiment.track:parse",
}

_DEEPEST = 32  # levels of nesting in a config; Python's own limit is a crash


class Config(Options):
    """A federated experiment."""

    model_config = ConfigDict(protected_namespaces=())

    method: str = Field("fedavg", description="method name, or your own FILE.py[:CLASS]")
    params: dict[str, Any] = Field(
        {}, description="the method's own options (fedloom methods NAME)"
    )

    preset: str | None = Field(
        None, description="named set of constants that the method offers, such as source or tuned"
    )

    data: str = Field(
        "digits",
        description="data set name, .csv, .parquet, .npz or .txt file, folder of images, "
        "LEAF JSON, or sites:DIR with one file or folder per site",
    )
    data_options: dict[str, Any] = Field(
        {}, description="options of the data set, such as label=COLUMN for a table"
    )
    task: str = Field(
        "auto",
        description="what is learned: classification | binary | multi-label | regression | "
        "next-token | segmentation; auto: by the labels",
    )
    loss: str | None = Field(
        None,
        description="your own loss instead of the task's: FILE.py:FUNCTION of outputs and labels, "
        "or a function in Python; none: the task's",
    )
    clients: int = Field(
        50,
        ge=1,
        le=10**9,
        description="number of registered clients; a partition that names its clients sets it",
    )
    partition: str = Field(
        "dirichlet:0.5",
        description="how samples are split among clients; by:COLUMN makes each user a client",
    )
    pool: bool = Field(False, description="pool the train and test files before partitioning")
    data_share: float = Field(
        1.0, gt=0, le=1, description="fraction of every class to use; the rest is left out"
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="fraction of each client's data held out to score it on"
    )
    test_cut: Literal["mixed", "by-class"] = Field(
        "mixed",
        description="how a client's test data is drawn: from all of its data at random, or the "
        "same fraction of each of its classes",
    )
    support_share: float = Field(
        0.2, ge=0, lt=1, description="fraction of a part used as support; the rest is query"
    )
    validation_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="fraction of each client's training data held back for validation; none: 0.1 "
        "if the method (in a comparison: any of them) validates, or with --score-on validation, "
        "else 0",
    )
    tune_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of each client's training data to score on instead of its test "
        "data, which is then never touched; for fedloom tune",
    )
    newcomers: int = Field(
        0, ge=0, le=10**9, description="clients that take no part in training, scored separately"
    )
    newcomer_classes: int = Field(
        2, ge=1, description="classes per newcomer, in combinations that no client trained on"
    )
    newcomer_partition: str | None = Field(
        None,
        description="how the clients' test data is split among newcomers, in the syntax of "
        "partition; classes:K and ring:K in combinations that no client trained on; none: "
        "classes:K with newcomer_classes, evenly",
    )
    capacities: str = Field(
        "1",
        description="fraction of the model that clients can train: 1:0.2,0.5:0.8 means a fifth "
        "can train all of it and the rest half; low-quality | high-quality | "
        "rho:SHARE,STRONG,WEAK | FILE.csv; for methods with sub-models",
    )
    speeds: str = Field(
        "1",
        description="relative speeds of clients, in the syntax of capacities (1:0.5,0.2:0.5), "
        "for --draw speed",
    )
    draw: Literal["uniform", "capacity", "samples", "speed"] = Field(
        "uniform",
        description="how participants are drawn: uniformly, stratified by capacity, or weighted "
        "by samples or speed",
    )
    public: str = Field(
        "none",
        description="public images for methods that need some at the server: none | "
        "share:FRACTION of the clients' data | noise:COUNT | a data set or .npz file[:COUNT]",
    )
    topology: str | None = Field(
        None,
        description="who meets whom without a server (fedloom topology lists the networks): "
        "waypoint,area=500 | ring | erdos-renyi:0.1 | ...; none: the method's default",
    )
    faults: str = Field(
        "none",
        description="faults among nodes, P being probabilities, separated by commas: fail=P back=P "
        "state=kept|lost loss=P late=ROUNDS",
    )
    normalise: Literal["standard", "unit", "pixel", "half"] = Field(
        "standard",
        description="image scaling: standard, by mean and std of each channel; unit, x/255; "
        "half, (x/255 - 0.5)/0.5; pixel, by mean and std of each pixel",
    )
    augment: str = Field("none", description="none | flip | crop:PIXELS | flip+crop:PIXELS")

    model: str = Field("auto", description="auto, a built-in model, or your own FILE.py:FACTORY")
    model_options: dict[str, Any] = Field(
        {}, description="options of the model: hidden, channels, norm, ..."
    )

    rounds: int = Field(50, ge=1, description="training rounds")
    participation: float = Field(
        0.2,
        gt=0,
        description="fraction of clients per round (up to 1), or their number (2 or more); with "
        "a topology, all of them unless given",
    )
    epochs: int = Field(1, ge=1, description="local passes over the client's data per round")
    steps: int | None = Field(None, ge=1, description="local batches per round, instead of epochs")
    order: Literal["mixed", "support-first"] = Field(
        "mixed",
        description="order of a local pass over the client's data: shuffled; or batches of the "
        "support part, then of the query part",
    )
    batch: int | str = Field(32, description="batch size, or inf for all samples at once")
    lr: float = Field(0.05, gt=0, le=LARGEST_RATE, allow_inf_nan=False, description="learning rate")
    lr_schedule: str = Field(
        "constant",
        description="constant | cosine[:FLOOR] | step:EVERY,FACTOR | exp:FACTOR, by round",
    )
    optimiser: str = Field(
        "sgd",
        description="sgd | adam | adamw | adagrad, with constants if you like: "
        "adam,beta1=0.9,beta2=0.999,eps=1e-8",
    )
    optimiser_state: Literal["fresh", "kept"] = Field(
        "fresh",
        description="optimiser state (momentum, Adam's moments): reset every round, or kept by the "
        "client",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST_RATE, allow_inf_nan=False, description="weight decay (L2)"
    )
    clip: float | None = Field(None, gt=0, description="clip gradients to this norm")

    encode: str = Field(
        "fp32",
        description="message encoding: fp32 | fp16 (both directions) | int8 | topk:SHARE (client "
        "updates only, with error feedback)",
    )
    screen: str = Field(
        "none",
        description="bound on the norm of a client's update: none | norm:SIZE | norm:10x, ten "
        "times the round's median",
    )
    on_bad: Literal["stop", "skip"] = Field(
        "stop",
        description="when a message contains NaN or exceeds the bound, or a client's training "
        "diverges: stop the run, or skip that client",
    )
    attack: str = Field(
        "none",
        description="simulate bad clients: scale:FACTOR of their update | nan | noise, with "
        "share=FRACTION of the clients, as in scale:-20,share=0.05",
    )

    fork: str | None = Field(
        None,
        description="RUN or RUN@ROUND: start a new run from that run's last checkpoint (or the one "
        "of that round), with its settings; explicit options override them",
    )
    init: str | None = Field(
        None,
        description="initial weights: a run's directory, or a state_dict in a .safetensors or .pt "
        "file; none: random, from the seed",
    )
    seed: int = Field(0, ge=0, description="seed of every random stream in the run")
    score_on: Literal["auto", "test", "query", "validation"] = Field(
        "auto",
        description="data that clients are scored on: test, all of their test data; query, without "
        "the support part; validation, held back from training, for choosing settings; auto, "
        "query if the method (in a comparison: any of them) adapts on the support part",
    )
    eval_every: int = Field(5, ge=1, description="evaluate every N rounds, and after the last")
    eval_clients: int = Field(
        1000, ge=0, description="maximum number of clients to score (a fixed random subset)"
    )
    eval_common: int = Field(
        1000,
        ge=0,
        description="maximum number of personal models to score on the common test set; 0: none",
    )
    static_samples: int | None = Field(
        5000,
        ge=1,
        description="training samples, over all clients, used to measure norm statistics before "
        "scoring (static norms; all tracked norms if clients train sub-models); none: all",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps")
    engine: str = Field("auto", description="auto, serial, stacked, processes or ray")
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description="training processes or threads; 0: one per core",
    )
    precision: str = Field(
        "fp32", description="fp32, or bf16 for forward and backward passes (weights stay fp32)"
    )
    kernels: str = Field(
        "auto",
        description="auto, native (fedloom's own, for small networks on CPUs; or an instruction "
        "set: avx2, avx512) or torch; they differ in the last bits, so a resumed run keeps its own",
    )
    ray_address: str | None = Field(
        None, description="Ray cluster for --engine ray; none: start one on this machine"
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="CPU threads per training step; other values may change the last bits",
    )
    checkpoint_every: int = Field(1, ge=1, description="save a checkpoint every N rounds")
    track: str | None = Field(
        None,
        description="also log every round to a tracking tool: tensorboard | mlflow | wandb | "
        "wandb:offline",
    )

    @field_validator("capacities", "speeds", mode="before")
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
        if value > 1 and not value.is_integer():
            raise ValueError("a number of clients must be whole; a fraction is at most 1")
        return value

    @field_validator(*_PARSERS)
    @classmethod
    def _parsed(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Parse settings with their own syntax once, so that a bad one is refused here."""
        module, *path = _PARSERS[info.field_name or ""].split(":")
        if value is not None:
            operator.attrgetter(path[0])(importlib.import_module(module))(value)
        return value

    @field_validator("precision")
    @classmethod
    def _precision(cls, value: str) -> str:
        if value not in ("fp32", "bf16"):
            raise unknown("precision", value, ("fp32", "bf16"))
        return value

    @model_validator(mode="after")
    def _new(self) -> Config:
        given = self.newcomer_partition
        if given is not None and not self.newcomers:
            raise FedloomError(
                f"newcomer_partition={given} would do nothing: there are no newcomers. Set "
                "newcomers, or leave it out."
            )
        if given is not None and self.newcomer_classes != 2:
            raise FedloomError(
                f"newcomer_classes={self.newcomer_classes} would do nothing next to "
                f"newcomer_partition={given}. Leave it out."
            )
        return self

    @model_validator(mode="after")
    def _drawn(self) -> Config:
        if self.speeds != "1" and self.draw != "speed":
            raise FedloomError(
                f"speeds={self.speeds} would do nothing: speeds only matter when participants "
                "are drawn by speed. Add --draw speed, or leave it out."
            )
        return self

    @model_validator(mode="after")
    def _remembered(self) -> Config:
        if self.momentum and not self.optimiser.startswith("sgd"):
            raise FedloomError(
                f"momentum={self.momentum:g} would do nothing: {self.optimiser} keeps its own "
                "moments. Leave it out, or set beta1."
            )
        if self.optimiser_state == "kept" and not self.optimiser_at(1).values:
            raise FedloomError(
                "optimiser_state=kept would do nothing: plain SGD has no state. Set a momentum or "
                "another optimiser, or leave it at fresh."
            )
        return self

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
        first = self.order == "support-first"
        return Budget(epochs=self.epochs, steps=self.steps, batch=size, support_first=first)

    def optimiser_at(self, round: int) -> Optimiser:
        from fedloom.local import Schedule
        from fedloom.local.optimiser import parse

        lr = self.lr * Schedule(self.lr_schedule).factor(round, self.rounds)
        return parse(self.optimiser, lr, self.momentum, self.weight_decay, self.clip)

    def dump(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


class BadYaml(ValueError):
    """Text that is not YAML, or that a config may not hold; the message says why."""


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The value of a YAML text. Errors of its constructors (`!!int x`, 2001-99-99, 5,000 digits)
    become `BadYaml` too."""
    try:
        value = yaml.load(text, loader)
    except RecursionError:
        raise BadYaml("it is nested too deeply") from None
    except Exception as e:
        raise BadYaml(" ".join(str(e).split()) or type(e).__name__) from None
    if isinstance(value, dict | list):
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        lists = [v.values() if isinstance(v, dict) else v for v in level]
        inside = [item for items in lists for item in items if isinstance(item, dict | list)]
        level = list({id(item): item for item in inside}.values())  # aliases repeat the same ones
        if not level:
            return
    raise BadYaml("it is nested too deeply")
