"""From a config to something that can run: data, model, method, state and engine, all checked."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.catalog import load
from fedloom.data.dataset import Dataset
from fedloom.data.images import chunks, noun, unit_of
from fedloom.data.partition import Partition, by_column
from fedloom.data.public import PublicSet, public_set
from fedloom.data.split import Federation, check_options, federate
from fedloom.engine import Engine, Setting, make_engine
from fedloom.engine.asked import rule_at
from fedloom.engine.batches import Augment
from fedloom.engine.kernels import described, kernels_for, resolve, why_torch
from fedloom.errors import FedloomError, telling_memory, unknown
from fedloom.experiment.capacities import Capacities
from fedloom.experiment.concern import idle
from fedloom.experiment.fitting import check_task
from fedloom.experiment.identity import check_contents, check_settings, fingerprints, settings_of
from fedloom.experiment.plugins import loss_function, model_factory
from fedloom.experiment.settings import Config
from fedloom.experiment.state import State
from fedloom.kinds import Sizes, Values
from fedloom.layout import Layout
from fedloom.local import Budget
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions
from fedloom.models import TEXT, Factory, build, choose
from fedloom.models.exits import Exits
from fedloom.models.inputs import looks_up
from fedloom.models.norm import has_batch_norm, has_measured_norm
from fedloom.native.net import Native
from fedloom.round.attack import Attack
from fedloom.round.encode import encoding
from fedloom.round.plan import LATECOMERS, NEWCOMERS, Manifest, Plan
from fedloom.round.screen import Screen
from fedloom.select import Channels, Prefix, Select, Whole
from fedloom.select.verify import verify
from fedloom.streams import streams_of
from fedloom.tasks import Loss, NextToken, Task
from fedloom.topology import DrawnBy, Faults, Peers, network

DEVICES = ("cpu", "cuda", "mps")

#: what else to do about a setting that would do nothing
_ELSE = {
    "capacities": ", or choose a method with sub-models",
    "faults": ", or give a --topology",
}


@dataclass
class Experiment:
    """Everything a runner needs."""

    config: Config
    method: Method
    dataset: Dataset
    federation: Federation
    layout: Layout
    state: State
    engine: Engine
    capacities: np.ndarray
    budget: Budget
    device: torch.device
    public: PublicSet | None
    about: dict[str, Any]  # what is needed to build the model again
    class_of: Tensor | None = None  # per column, the class it works for alone, for mixes that ask
    path: str = "torch"  # which kernels run the clients' training, and why

    @property
    def manifest(self) -> dict[str, Any]:
        """What leaves a client, what stays with it and what the server keeps, with bytes."""
        sizes = Sizes(
            self.layout, self.dataset.n_classes, 0 if self.public is None else len(self.public)
        )
        config, strangers = self.config, []
        if config.newcomers:
            strangers.append(NEWCOMERS)
        if config.participants < config.clients or config.faults != "none":
            strangers.append(LATECOMERS)
        written = self.state.post.encoding
        norms = self.layout.norm_bytes if self.engine.setting.shares_norms else 0
        found = Manifest.of(self.method, sizes, self.state.plan, written, strangers, norms)
        return {"method": self.config.method, "encoding": self.config.encode, **found.plain()}

    def facts(self, needs: Collection[str]) -> dict[str, np.ndarray]:
        """What a topology may know of the clients: a value, or a row, for each."""
        clients, federation = range(self.config.clients), self.federation
        known: dict[str, Callable[[], np.ndarray]] = {
            "samples": lambda: federation.sizes("train"),
            "classes": lambda: np.stack([federation.classes_of(c) for c in clients]),
            "capacity": lambda: _capacities(self.config)[: self.config.clients],
            "speed": lambda: Capacities.speeds(self.config.speeds).assign(
                self.config.clients, self.config.seed
            ),
            "seen": lambda: self.state.server.seen(self.config.clients),
        }
        return {name: known[name]() for name in needs}

    def restore(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
        free: Collection[str] = (),
    ) -> None:
        """Take the state of the checkpoint of the run in `path`, if this is the same experiment.

        `free` are settings and options of the method that may differ, besides those that always
        may.
        """
        check_settings(path, about, self.config, free)
        check_contents(path, about, self.about, self.config)
        self.state.restore(tensors)
        if "forked_from" in about:
            self.about["forked_from"] = about["forked_from"]

    def adopt(self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Take the state of another run's checkpoint, as far as it means the same here."""
        if about.get("layout", self.about["layout"]) != self.about["layout"]:
            raise FedloomError(
                f"'{path}' holds another model than this config builds: its layers differ. A "
                "fork keeps the model; leave out what changes it."
            )
        try:
            self._check_remembered(tensors, about)
            self.state.adopt(tensors, about, about.get("dealt") == self.about["dealt"])
        except FedloomError as e:
            raise FedloomError(f"'{path}' can't be forked like this: {e}") from None
        self.about["forked_from"] = {
            "path": str(path),
            "round": about["round"],
            "fingerprint": about.get("tensors", about.get("crc32")),
        }

    def _check_remembered(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Refuse clients' optimiser state that is not what this optimiser keeps."""
        known = about.get("settings", {})
        names = ("optimiser", "optimiser_state", "momentum")
        before = Config(**{name: known[name] for name in names if name in known})
        kept, here = (dict(_remembered(config) or {}) for config in (before, self.config))
        if kept == here or not len(tensors.get("kept/clients", ())):
            return
        was, now = (
            f"optimiser={c.optimiser}, optimiser_state={c.optimiser_state}"
            + f", momentum={c.momentum:g}" * bool(c.momentum)
            for c in (before, self.config)
        )
        raise FedloomError(
            f"between rounds its clients keep {_moments(kept)} ({was}), and here they would keep "
            f"{_moments(here)} ({now}). Leave optimiser, optimiser_state and momentum as they "
            "were, or start a new run."
        )


def _moments(values: Values) -> str:
    """What clients keep of their optimiser, in words."""
    return f"its {' and '.join(values)}" if values else "nothing of the optimiser"


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in DEVICES or (number and not number.isdigit()):
        raise unknown("device", name, ("auto", *DEVICES, "cuda:0"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        reason = str(e).splitlines()[0].partition(". ")[0][:120]
        raise FedloomError(
            f"The device '{name}' can't be used here: {reason}. Use --device cpu, or auto."
        ) from None
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 arithmetic is in the hardware, and so worth asking for."""
    if device.type != "cpu":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # not known here: let the user try
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16\n", " bf16 "))


def load_dataset(config: Config, data: Any = None) -> Dataset:
    """The data set of a config, or the user's own object in its place."""
    options = dict(config.data_options)
    if config.data == "synthetic" and data is None:
        options.setdefault("samples", max(20_000, 20 * config.clients))
    if isinstance(data, Dataset) and config.data != "custom":
        return data  # that of the config, loaded already
    source = config.data if data is None else data
    return load(source, options=options, by=by_column(config.partition), task=config.task)


def make_federation(
    config: Config, dataset: Dataset, partition: Partition | None = None
) -> Federation:
    """Who holds what: by the config's recipe, or by the user's own object in its place."""
    _check_given(config, partition=partition)
    spec = config.partition if partition is None else partition
    check_options(spec, config.data_options)
    return federate(
        dataset,
        spec,
        config.clients,
        config.seed,
        pool=config.pool,
        test_share=config.test_share,
        support_share=config.support_share,
        validation_share=config.validation_share or 0.0,
        newcomers=config.newcomers,
        newcomer_classes=config.newcomer_classes,
        newcomer_partition=config.newcomer_partition,
        by_class=config.test_cut == "by-class",
        normalise=config.normalise,
        public=config.public,
        tune_share=config.tune_share,
        data_share=config.data_share,
    )


def placed(config: Config, method: Method) -> Method:
    """The method on the topology that the run asks for, with what goes wrong there."""
    faults = Faults.parse(config.faults)
    _check_idle(config, method)
    if config.draw != "uniform":
        return replace(method, topology=DrawnBy(by=config.draw))
    if config.topology is not None:
        peers = method.topology if isinstance(method.topology, Peers) else Peers()
        where = replace(peers, network=network(config.topology), faults=faults)
        try:
            return method.among(where)
        except FedloomError as e:
            inherited = "" if config.fork is None else f" {_undone(config, 'topology', 'none')}."
            raise FedloomError(
                f"{config.method} can't run with topology={config.topology}: {e}{inherited}"
            ) from None
    if isinstance(method.topology, Peers):
        return replace(method, topology=replace(method.topology, faults=faults))
    return method


def _check_idle(config: Config, method: Method) -> None:
    """Refuse a setting that would do nothing with this method."""
    for key, why in idle(config, method).items():
        without = Config.model_fields[key].default
        raise FedloomError(
            f"{key}={getattr(config, key)} would do nothing with {config.method}: {why}. "
            f"{_undone(config, key, without)}{_ELSE.get(key, '')}."
        )


def _check_given(config: Config, **objects: object) -> None:
    for key, given in objects.items():
        if getattr(config, key) == "custom" and given is None:
            raise FedloomError(
                f"This run's {key} was given as a Python object, which a config can't hold: pass "
                f"{key}=... again, in Python."
            )


@telling_memory("setting up this run")
def checked(config: Config, method: Method) -> Method:
    """The method as it runs with these settings; refused, before any data is read, where it can't
    or needs what they do not give."""
    method = placed(config, method)
    _check_public(config, method)
    _check_turnout(config, method)
    return replace(method, adapt=method.adapt.on(config.score_on))


def prepare(
    config: Config,
    method: Method,
    *,
    data: Any = None,
    model: Factory | None = None,
    partition: Partition | None = None,
    init: Any = None,
    loss: Loss | None = None,
    options: MethodOptions | None = None,
    before: Mapping[str, Any] | None = None,
) -> Experiment:
    """Build and check everything before any long work begins.

    `options` are what the method was built from, where it matters that it stays the same; `before`
    is what the checkpoint says of itself that the run goes on from.
    """
    _check_given(config, data=data, model=model, partition=partition)
    loss = own_loss(config, loss)
    if before is None or method.mix.home == "node":  # how alike models are is told from the start
        _check_given(config, init=init)
    method = checked(config, method)
    device = _device(config)
    dealt = _deal(config, method, data, partition, loss)
    check_task(config.method, method, dealt.dataset.task)
    factory = model or model_factory(config.model)
    if factory == "auto":
        factory = chosen_for(dealt.dataset)
    start = _weights(config, init, factory)
    built = _build(config, method, dealt, factory, start)
    sizes = Sizes(built.layout, dealt.dataset.n_classes, dealt.public_size)
    plan = Plan.of(method, sizes, _remembered(config))
    known = None if before is None else before.get("kernels", "torch")
    kernels = resolve(config.kernels, device, config.precision, known, config.engine)
    found = kernels_for(kernels, built.module, built.layout, dealt.dataset.shape, built.tokens)
    if kernels == "torch" and config.kernels != "torch":
        found = why_torch(device, config.precision, known, config.engine)
    if config.kernels == "native" and not isinstance(found, Native):
        raise FedloomError(
            f"kernels=native can't run the model '{config.model}': {found}. Leave it out (auto) "
            "to run it with torch."
        )
    native = isinstance(found, Native)
    engine = _engine(config, method, device, dealt, built, plan, kernels, native)
    state = _state(config, method, dealt, built, plan, sizes, engine)
    dataset, layout = dealt.dataset, built.layout
    about = {
        "model": factory if isinstance(factory, str) else config.model,
        "model_options": built.options,
        "shape": list(dataset.shape),
        "classes": dataset.n_classes,
        "labels": list(dataset.classes),
        "task": dataset.task.plain(),
        "seed": config.seed,
        "extras": dict(method.local.extras),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "unit": int(unit_of(dataset.x.dtype)),
        "tokens": built.tokens,
        "features": list(dataset.features),
        "init": None if start is None else f"{config.init} ({_sum(built.row)})",
        "kernels": kernels,
        "settings": settings_of(config),
        **fingerprints(
            config, method, options, factory, dataset, dealt.federation, _capacities(config),
            dealt.public, layout, loss,
        ),
        "network": _first_contacts(config, method, layout),
        "kept": state.kept.columns.ranges,
        "sent": plan.columns.ranges,
        "width": plan.sections.width,
        "own": plan.own_range,
        "personal": plan.personal,
        "public_size": sizes.public,
        "public": None if dealt.public is None else dealt.public.note,
        "submodels": built.submodels,
    }  # fmt: skip
    return Experiment(
        config=config,
        method=method,
        dataset=dataset,
        federation=dealt.federation,
        layout=layout,
        state=state,
        engine=engine,
        capacities=dealt.capacities,
        budget=replace(config.budget, least=2 if has_batch_norm(built.module) else 1),
        device=device,
        public=dealt.public,
        about=about,
        class_of=built.class_of,
        path="torch: the stacked engine trains many clients in one call"
        if engine.stacks
        else described(found, rule_at(method.local, 1), dataset.task),
    )


@dataclass
class _Dealt:
    """Who holds what, what the server may look at, and what devices can do."""

    dataset: Dataset
    federation: Federation
    public: PublicSet | None
    capacities: np.ndarray
    augment: Augment

    @property
    def public_size(self) -> int:
        return 0 if self.public is None else len(self.public)


@dataclass(frozen=True)
class _Built:
    """The model, and what was found out about it."""

    make: Callable[[], nn.Module]
    module: nn.Module
    options: dict[str, Any]
    layout: Layout
    row: Tensor  # its initial values
    tokens: bool
    submodels: bool
    channels: Channels | None
    class_of: Tensor | None


def _device(config: Config) -> torch.device:
    device = pick_device(config.device)
    if config.precision == "bf16" and not has_bf16(device):
        warnings.warn(
            "This CPU has no bf16 arithmetic: --precision bf16 is emulated, and slower than fp32.",
            stacklevel=3,
        )
    return device


def own_loss(config: Config, given: Loss | None) -> Loss | None:
    """The loss that is minimised in place of the task's, if there is one."""
    _check_given(config, loss=given)
    return loss_function(config.loss) if config.loss is not None and given is None else given


def chosen_for(dataset: Dataset) -> str:
    """The model that `auto` stands for with this data."""
    return choose(dataset.shape, dataset.task.name, dataset.tokens)


def _deal(
    config: Config,
    method: Method,
    data: Any,
    partition: Partition | None,
    loss: Loss | None = None,
) -> _Dealt:
    dataset = load_dataset(config, data)
    if loss is not None:
        dataset = replace(dataset, task=replace(dataset.task, own_loss=loss))
    federation = make_federation(config, dataset, partition)
    public = public_set(config.public, federation)
    if public is not None and public.y is None and method.needs("labels"):
        raise FedloomError(
            f"{config.method} needs a public set with labels, and this is {public.note}. Use a "
            "share of the clients' data, or a method that needs no labels."
        )
    _check_drawn(config, federation)
    capacities = _capacities(config)
    if isinstance(method.select, Whole):  # whoever can train less is only drawn by it
        capacities = np.ones_like(capacities)
    wanted = method.select.public_samples if (capacities < 1).any() else 0
    if public is not None and len(public) < wanted:
        warnings.warn(
            f"The public set has {len(public)} images, fewer than the {wanted} that "
            f"{config.method} looks at for each client: it takes what there is. Set more aside "
            "with --public share:FRACTION, or lower samples.",
            stacklevel=3,
        )
    dataset = federation.dataset
    return _Dealt(dataset, federation, public, capacities, _augment(config, dataset))


def _check_drawn(config: Config, federation: Federation) -> None:
    if config.draw == "samples" and len(np.unique(federation.sizes("train"))) == 1:
        raise FedloomError(
            "draw=samples would do nothing: all clients have equally many samples. Leave draw "
            "out, or use an uneven partition."
        )


def _weights(config: Config, init: Any, factory: str | Factory) -> Mapping[str, Tensor] | None:
    """What the model starts from, unless it is the seed's random values."""
    if config.init is None or (config.init == "custom" and init is None):
        return None
    from fedloom.experiment.begin import weights

    return weights(config.init if init is None else init, factory)


def _sum(row: Tensor) -> str:
    return f"{zlib.crc32(row.numpy().tobytes()):08x}"


def _build(
    config: Config,
    method: Method,
    dealt: _Dealt,
    factory: str | Factory,
    state: Mapping[str, Tensor] | None = None,
) -> _Built:
    """Build the model, which starts from `state`, and try it; public images are laid out as it
    takes them."""
    dataset, capacities = dealt.dataset, dealt.capacities
    shape, classes = dataset.shape, dataset.n_classes
    options = _model_options(config, method, factory, dataset)
    make = partial(build, factory, shape, classes, config.seed, options)
    if state is not None:
        from fedloom.experiment.begin import begun

        make = partial(begun, make, state, f"init={config.init}")
    module = make()
    layout = Layout.of(module, method.local.extras)
    row = layout.flatten(module, method.local.extras)
    tokens = looks_up(module, shape)
    _try(module, _samples(dataset, tokens), dataset.task, "exits" in method.select.model_options)
    if tokens:
        dealt.public = public_set(config.public, dealt.federation, tokens)
    # `pixel` is every column by itself, as tables have it anyway.
    if not tokens and config.normalise in ("unit", "half") and dataset.shape[:2] == (1, 1):
        raise FedloomError(
            f"normalise={config.normalise} is for images. The columns of a table are scaled one by "
            "one, each by its own mean and spread: leave it out."
        )
    if tokens and config.normalise != "standard":
        raise FedloomError(
            f"normalise={config.normalise} is for images, and this model looks its input up as "
            "tokens. Leave it out."
        )
    if tokens and dealt.augment:
        raise FedloomError(
            f"augment={config.augment} is for images, and this model looks its input up as tokens. "
            "Leave it out."
        )
    for capacity in np.unique(capacities[capacities < 1]):
        method.select.check(module, shape, float(capacity))
    submodels = bool((capacities < 1).any()) or method.local.narrows
    channels = None
    if method.select.cuts and submodels:
        channels = Channels.of(module, shape)
        verify(channels, shape)
        _note_whole(channels.whole)
    if submodels:
        _note_same(method.select, module, channels, np.unique(capacities[: config.clients])[::-1])
    sees = "classes" in method.mix.needs
    class_of = layout.outputs(_classifiers(module, shape, channels)) if sees else None
    return _Built(make, module, options, layout, row, tokens, submodels, channels, class_of)


def _note_whole(layers: tuple[str, ...]) -> None:
    """Say which layers are as large for weak devices as for strong ones."""
    if not layers:
        return
    names = ", ".join(f"'{name}'" for name in layers[:4])
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    warnings.warn(
        f"At every capacity all outputs stay of {names}{more}: forward() fixes how many there are, "
        "as it does for positions and the size of heads. If channels are meant, take their number "
        "from tensors or layers.",
        stacklevel=4,
    )


def _note_same(
    select: Select, module: nn.Module, channels: Channels | None, capacities: np.ndarray
) -> None:
    """Say which capacities a model of few channels, groups, heads or blocks can't tell apart."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for capacity in capacities[capacities < 1]:
        if channels is not None:
            kept = select.narrowed(channels, float(capacity))[0]
        elif isinstance(select, Prefix) and isinstance(module, Exits):
            kept = (select.depth(module, float(capacity / capacities.max())),)
        else:
            return
        alike.setdefault(kept, []).append(f"{capacity:g}")
    for kept, names in alike.items():
        if len(names) < 2:
            continue
        if channels is None:
            few = f"blocks to tell them apart (each trains {kept[0]} of {module.depths})"
        else:
            groups = [(group.name, group.size) for group in channels.groups]
            _, (name, size) = min(zip(kept, groups, strict=True))
            few = (
                f"channels, groups or heads to tell them apart ('{name}' has {size} to choose from)"
            )
        warnings.warn(
            f"Capacities {' and '.join(names)} give the same sub-model: this network has too few "
            f"{few}. Give it more, or leave one of the capacities out.",
            stacklevel=4,
        )


def _remembered(config: Config) -> Values | None:
    """What clients keep of their optimiser between rounds."""
    return config.optimiser_at(1).values if config.optimiser_state == "kept" else None


def _engine(
    config: Config,
    method: Method,
    device: torch.device,
    dealt: _Dealt,
    built: _Built,
    plan: Plan,
    kernels: str,
    native: bool,
) -> Engine:
    beside = plan.own_sections(method)
    static = has_measured_norm(built.module, built.submodels)
    shared = not method.select.own_norms and not plan.personal and (dealt.capacities < 1).any()
    setting = Setting(
        build=built.make,
        layout=built.layout,
        dataset=dealt.dataset,
        federation=dealt.federation,
        device=device,
        seed=config.seed,
        augment=dealt.augment,
        capacities=dealt.capacities,
        extras=tuple(method.local.extras),
        width=max(plan.sections.width, 0 if beside is None else beside.width),
        pools=method.topology.pools,
        submodels=built.submodels,
        static=static,
        static_samples=config.static_samples,
        shares_norms=static and bool(shared),
        channels=built.channels,
        public=dealt.public if "public" in method.select.needs | method.local.needs else None,
        tokens=built.tokens,
        precision=config.precision,
        kernels=kernels,
        threads=config.threads,
    )
    return make_engine(
        config.engine,
        setting,
        built.module,
        native=native,
        workers=config.workers,
        participants=1 if setting.pools else config.participants,
        parts=(method.local, method.select, method.adapt.rule, method.own, plan.sections, beside),
        ray_address=config.ray_address,
    )


def _state(
    config: Config,
    method: Method,
    dealt: _Dealt,
    built: _Built,
    plan: Plan,
    sizes: Sizes,
    engine: Engine,
) -> State:
    federation, part = dealt.federation, method.local.weighs

    def weigh(clients: np.ndarray) -> np.ndarray:
        if method.topology.pools:
            return np.array([federation.sizes(part).sum()], dtype=np.float64)
        return np.array([federation.size(int(c), part) for c in clients], dtype=np.float64)

    attack = Attack.parse(config.attack)
    return State.of(
        method, sizes, built.row, weigh, engine, plan=plan,
        encoding=encoding(config.encode),
        screen=Screen.parse(config.screen),
        attack=attack,
        bad=attack.bad(config.clients, config.seed),
        seed=config.seed,
        channels=built.channels,
    )  # fmt: skip


def _classifiers(
    module: nn.Module, shape: tuple[int, int, int], channels: Channels | None
) -> tuple[str, ...]:
    """The layers that make logits, a row of weights for each class."""
    if isinstance(module, Exits):
        return module.classifiers
    last = (channels or Channels.of(module, shape, training=False)).classifier
    if last is None:
        raise FedloomError(
            f"{type(module).__name__} has no single layer that produces the logits, so rows "
            "can't be averaged class by class. Leave by_class out."
        )
    return (last,)


def _first_contacts(config: Config, method: Method, layout: Layout) -> str:
    """Let nodes meet once, so that an impossible network is refused before anything runs; returns a
    fingerprint of its file."""
    if not isinstance(method.topology, Peers):
        return ""
    if not len(layout.columns(method.mix.part)):
        raise FedloomError(
            f"Nodes of this {config.method} keep the whole model private, so they have nothing "
            "to exchange. Give a smaller part, or choose local."
        )
    if method.mix.validates == "validation" and not config.validation_share:
        warnings.warn(
            f"{config.method} weights nodes by their accuracy on held-out data, but "
            "validation_share=0 leaves none: all nodes get the same accuracy.",
            stacklevel=2,
        )
    where = method.topology
    first = 1 + where.self_training
    where.contacts(first, config.clients, config.participants, streams_of(config.seed, first))
    return where.network.fingerprint


def _augment(config: Config, dataset: Dataset) -> Augment:
    augment = Augment.parse(config.augment)
    side = min(dataset.shape[1:])
    if augment.crop >= side:
        raise FedloomError(
            f"augment={config.augment} shifts images by up to {augment.crop} pixels, but they "
            f"are only {side} wide: some would be all padding. Use a smaller crop."
        )
    return augment


def _undone(config: Config, key: str, without: str) -> str:
    """How to leave a setting out, which a fork may inherit from its run."""
    if config.fork is None:
        return f"Leave {key} out"
    option = key.replace("_", "-")
    return f"Set --{option} {without} (a fork has the settings of the run that it starts from)"


def _check_public(config: Config, method: Method) -> None:
    if not method.needs("public") or config.public != "none":
        return
    noise = "" if "public" in method.select.needs else ", or use noise (--public noise:256)"
    raise FedloomError(
        f"{config.method} needs public images at the server, and has none. Set some aside "
        f"with --public share:0.01, name a data set or .npz file{noise}."
    )


def _check_turnout(config: Config, method: Method) -> None:
    if config.participants < method.mix.fewest and not method.topology.pools:
        raise FedloomError(
            f"{config.method} needs {method.mix.fewest} participants in a round or more, and "
            f"{config.participants} of {config.clients} clients takes part. Raise --participation "
            "(a fraction, or a number of clients), or --clients."
        )


def _model_options(
    config: Config, method: Method, factory: str | Factory, dataset: Dataset
) -> dict[str, Any]:
    """What the model is built with: the run's options, and those that the selector or (of a model
    for text) the data needs."""
    needed = {**method.select.model_options, **(text_options(dataset) if factory == TEXT else {})}
    for key in config.model_options.keys() & needed.keys():
        if config.model_options[key] != needed[key]:
            raise FedloomError(
                f"model_options.{key}={config.model_options[key]} would do nothing: "
                f"{config.method} and the data set it themselves. Leave it out."
            )
    return {**config.model_options, **needed}


def text_options(dataset: Dataset) -> dict[str, Any]:
    """How many tokens a model for text has to know, and whether it answers at each place."""
    if dataset.x.dtype == np.float32:
        raise FedloomError(
            f"The model {TEXT} reads tokens, whole numbers, and '{dataset.name}' holds others. "
            "Choose another --model."
        )
    most = dataset.tokens
    for x in (dataset.x, dataset.x_test) if not most else ():
        most = max([most, *(int(rows.max(initial=0)) + 1 for _, rows in chunks(x))])
    return {"vocabulary": most, "each": dataset.task.name == NextToken.name}


def _capacities(config: Config) -> np.ndarray:
    """Newcomers have trained nothing; they count as able to hold the whole model."""
    asked = Capacities.parse(config.capacities)
    clients = asked.assign(config.clients, config.seed)
    nobodys = [f"{value:g}" for value in asked.values if value not in clients]
    if nobodys:
        warnings.warn(
            f"No client has capacity {' or '.join(nobodys)}: with {config.clients} clients the "
            "share comes to none. Give it a larger share, or take more clients.",
            stacklevel=4,
        )
    return np.concatenate([clients, np.ones(config.newcomers)])


def _samples(dataset: Dataset, tokens: bool) -> Tensor:
    """Two samples to try a model with: zeros, or those with the least and the largest token."""
    if not tokens:
        return torch.zeros((2, *dataset.shape))
    if dataset.x.dtype == np.float32:
        raise FedloomError(
            f"The model looks its input up as tokens (nn.Embedding), and the data "
            f"'{dataset.name}' are not whole numbers. Give arrays of integers, x.astype(int), or "
            "choose another --model."
        )
    low = high = np.zeros(dataset.shape, np.int64)
    for x in (dataset.x, dataset.x_test):
        for _, rows in chunks(x):
            least, most = rows[rows.min((1, 2, 3)).argmin()], rows[rows.max((1, 2, 3)).argmax()]
            low = least if least.min() < low.min() else low
            high = most if most.max() > high.max() else high
    return torch.from_numpy(np.stack([low, high]).astype(np.int64))


def _try(module: nn.Module, x: Tensor, task: Task, exits: bool) -> None:
    """A pass through the model in either mode: whether it and the data fit at all."""
    try:
        module = copy.deepcopy(module)  # training passes move the statistics of norms
    except (RuntimeError, TypeError) as e:
        raise FedloomError(
            f"The model can't be copied ({str(e).splitlines()[0]}). Tensors that are computed from "
            "parameters can't be kept as attributes: in place of torch.nn.utils.weight_norm, use "
            "torch.nn.utils.parametrizations.weight_norm."
        ) from e
    for training, when in ((False, ""), (True, " in training")):
        try:
            with torch.no_grad():
                logits = module.train(training)(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as e:
            reason = str(e).splitlines()[0]
            if isinstance(e, IndexError) and not x.is_floating_point():
                raise FedloomError(
                    f"The model can't look up the tokens {int(x.min())} to {int(x.max())} of these "
                    f"data: {reason}. Give its embedding a row for each, and number them from 0."
                ) from e
            raise FedloomError(
                f"The model can't take {noun(x.shape)} of shape {tuple(x.shape[1:])}{when}: "
                f"{reason}. "
                "Choose another --model."
            ) from e
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        if isinstance(module, Exits) and training:
            if not exits:
                raise FedloomError(
                    "The model has a classifier after each block (exits), all of which are "
                    "trained; this method trains one. Leave exits out, or choose depthfl."
                )
        elif got != task.answers(2, x.shape[1:]):
            raise FedloomError(
                f"For {task.name} the model must return {task.in_words()}, in evaluation and in "
                f"training; for an input of shape {tuple(x.shape)} it returned {got}{when}."
            )
