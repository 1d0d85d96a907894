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
#: settings that a run may go on with others of: its length, what is shown of it, and its speed
RESUMABLE = frozenset(
    {"rounds", "eval_every", "checkpoint_every", "track", *_WHERE, *_SCORED} - {"kernels"}
)
#: settings that a trained run may be scored with others of: nothing of it was learned
RESCORABLE = frozenset({"score_on", "static_samples", "precision", *_WHERE, *_SCORED})

#: settings that are texts with a grammar → what reads them, imported when it is needed
_PARSERS = {
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

    method: str = Field("fedavg", description="method name, or FILE.py[:CLASS] of your own")
    params: dict[str, Any] = Field(
        {}, description="the method's own options (fedloom methods NAME)"
    )

    preset: str | None = Field(
        None, description="constants under a name that the method knows, such as source or tuned"
    )

    data: str = Field(
        "digits",
        description="data set name, .csv, .parquet or .npz file, folder of images, "
        "LEAF's JSON, or sites:DIR with a file or folder for every site",
    )
    data_options: dict[str, Any] = Field(
        {}, description="options of the data set, such as label=COLUMN of a table"
    )
    clients: int = Field(
        50,
        ge=1,
        le=10**9,
        description="number of registered clients; unless given, as many as the partition names",
    )
    partition: str = Field(
        "dirichlet:0.5", description="who holds what; by:COLUMN of the data: each user is a client"
    )
    pool: bool = Field(False, description="pool the train and test files before dealing (S1)")
    data_share: float = Field(
        1.0, gt=0, le=1, description="share of every class that is dealt; the rest is left out"
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="each client's share held out for its score"
    )
    test_cut: Literal["mixed", "by-class"] = Field(
        "mixed",
        description="how a client's test data is cut off: from all of its data mixed, or the same "
        "share of each of its classes (S1)",
    )
    support_share: float = Field(
        0.2, ge=0, lt=1, description="share of a part that is support, the rest is query"
    )
    validation_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of each client's training data that is not trained on, but validated "
        "on; none: 0.1 if the method (in a comparison: any of them) validates, or with "
        "--score-on validation, else 0",
    )
    tune_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each client's training data that stands in for its test data, which "
        "nobody looks at then; for fedloom tune",
    )
    newcomers: int = Field(
        0, ge=0, le=10**9, description="clients that take no part in training, scored apart"
    )
    newcomer_classes: int = Field(
        2, ge=1, description="classes of a newcomer, in combinations nobody trained on"
    )
    newcomer_partition: str | None = Field(
        None,
        description="how the clients' test data is dealt to newcomers, written as partition is; "
        "classes:K and ring:K in combinations nobody trained on; none: classes:K with "
        "newcomer_classes, evenly",
    )
    capacities: str = Field(
        "1",
        description="share of the model that clients can train: 1:0.2,0.5:0.8 is a fifth with all "
        "of it and the rest with half; low-quality | high-quality | rho:SHARE,STRONG,WEAK | "
        "FILE.csv; for methods with sub-models",
    )
    speeds: str = Field(
        "1",
        description="relative speeds of clients, written as capacities are (1:0.5,0.2:0.5), for "
        "--draw speed",
    )
    draw: Literal["uniform", "capacity", "samples", "speed"] = Field(
        "uniform",
        description="how participants are drawn: all alike; so many of each capacity; or with a "
        "chance that grows with samples or speed",
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
    normalise: Literal["standard", "unit", "pixel", "half"] = Field(
        "standard",
        description="scale of the images: standard, by mean and std of each channel; unit, x/255; "
        "half, (x/255 - 0.5)/0.5; pixel, by mean and std of each pixel (S1 on MNIST)",
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
    order: Literal["mixed", "support-first"] = Field(
        "mixed",
        description="how a local pass goes over the client's data: all of it mixed; or batches of "
        "the support part, then of the query part (S1)",
    )
    batch: int | str = Field(32, description="batch size, or inf for all samples at once")
    lr: float = Field(0.05, gt=0, le=LARGEST_RATE, allow_inf_nan=False, description="learning rate")
    lr_schedule: str = Field(
        "constant",
        description="constant | cosine[:FLOOR] | step:EVERY,FACTOR | exp:FACTOR, by round",
    )
    optimiser: str = Field(
        "sgd",
        description="sgd | adam | adamw | adagrad, and their constants: adam,beta1=0.9,beta2=0.999,"
        "eps=1e-8",
    )
    optimiser_state: Literal["fresh", "kept"] = Field(
        "fresh",
        description="what the optimiser remembers (momentum, Adam's moments): fresh in each round, "
        "or kept by the client",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST_RATE, allow_inf_nan=False, description="weight decay (L2)"
    )
    clip: float | None = Field(None, gt=0, description="largest gradient norm")

    encode: str = Field(
        "fp32",
        description="how messages are written: fp32 | fp16 (both ways) | int8 | topk:SHARE (what "
        "clients send, as changes, with error feedback)",
    )
    screen: str = Field(
        "none",
        description="bound on a client's change where it comes in: none | norm:SIZE | norm:10x, "
        "ten times the round's median",
    )
    on_bad: Literal["stop", "skip"] = Field(
        "stop",
        description="what a message that holds NaN or is over the bound does, or a client whose "
        "training diverges: stop the run, or be left out",
    )
    attack: str = Field(
        "none",
        description="bad clients, to try what happens: scale:FACTOR of their change | nan | noise, "
        "and share=FRACTION of the clients, as in scale:-20,share=0.05",
    )

    fork: str | None = Field(
        None,
        description="RUN or RUN@ROUND: start a new run from that run's last checkpoint (or that of "
        "a round), with its settings and those given",
    )
    init: str | None = Field(
        None,
        description="weights to start from: a run's directory, or a state_dict in a .safetensors "
        "or .pt file; none: random, by the seed",
    )
    seed: int = Field(0, ge=0, description="names every random stream of the run")
    score_on: Literal["auto", "test", "query", "validation"] = Field(
        "auto",
        description="what clients are scored on: test, all of their test data; query, without the "
        "support part; validation, what was held back from training, to choose settings by; auto, "
        "query if the method (in a comparison: any of them) adapts to that",
    )
    eval_every: int = Field(
        5, ge=1, description="score after every so many rounds, and after the last"
    )
    eval_clients: int = Field(
        1000, ge=0, description="most clients to score; a fixed random choice beyond that"
    )
    eval_common: int = Field(
        1000, ge=0, description="most personal models to score on the common test set; 0: none"
    )
    static_samples: int | None = Field(
        5000,
        ge=1,
        description="training samples of all clients that measure norm statistics before scoring "
        "(of static norms; of all tracked norms where clients train sub-models); none: all",
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
    kernels: str = Field(
        "auto",
        description="auto, native (fedloom's own, for small networks on CPUs; or by instruction "
        "set: avx2, avx512) or torch; others change last bits, so a resumed run keeps what it had",
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
    track: str | None = Field(
        None,
        description="write every round's numbers for a tracking tool, too: tensorboard | mlflow | "
        "wandb | wandb:offline",
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
        """A text with a grammar of its own is read here once, so that a wrong one is refused."""
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
                f"newcomer_partition={given} would do nothing: there are no newcomers. Give "
                "newcomers, or leave it out."
            )
        if given is not None and self.newcomer_classes != 2:
            raise FedloomError(
                f"newcomer_classes={self.newcomer_classes} would do nothing beside "
                f"newcomer_partition={given}. Leave it out."
            )
        return self

    @model_validator(mode="after")
    def _drawn(self) -> Config:
        if self.speeds != "1" and self.draw != "speed":
            raise FedloomError(
                f"speeds={self.speeds} would do nothing: nobody asks how fast clients are. Draw "
                "participants by it (--draw speed), or leave it out."
            )
        return self

    @model_validator(mode="after")
    def _remembered(self) -> Config:
        if self.momentum and not self.optimiser.startswith("sgd"):
            raise FedloomError(
                f"momentum={self.momentum:g} would do nothing: {self.optimiser} has moments of its "
                "own. Leave it out, or set beta1."
            )
        if self.optimiser_state == "kept" and not self.optimiser_at(1).values:
            raise FedloomError(
                "optimiser_state=kept would do nothing: plain SGD remembers nothing. Give a "
                "momentum or another optimiser, or set it to fresh."
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
    """Text that is not YAML, or not such as a config may hold; the text says why."""


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The value of a YAML text. Its constructors let pass what int() and dates raise (`!!int x`,
    2001-99-99, 5,000 digits)."""
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
