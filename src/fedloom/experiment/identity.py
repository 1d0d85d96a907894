"""What makes a run the run it is: its settings, and the contents behind the names in them.

A checkpoint carries both, so that a run never goes on as another one: not with other settings, not
with another file under the same name. Only settings that change nothing of what is learned
(`settings.RESUMABLE`) may differ.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import textwrap
import zlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.data.public import PublicSet
from fedloom.data.split import Federation
from fedloom.errors import FedloomError
from fedloom.experiment.plugins import is_file, source_of
from fedloom.experiment.settings import RESUMABLE, Config
from fedloom.layout import Layout
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions
from fedloom.models import Factory
from fedloom.tasks import Loss

_LOOKED_AT = 64  # images that tell one data set from another

#: fingerprint in a checkpoint → what it is of, and the setting that names it
CONTENTS = {
    "fingerprint": ("other data", "data"),
    "images": ("other data", "data"),
    "dealt": ("another partition", "partition"),
    "dealt_capacities": ("other capacities", "capacities"),
    "network": ("other contacts", "topology"),
    "public_images": ("other public images", "public"),
    "method_source": ("another source of the method", "method"),
    "model_source": ("another source of the model", "model"),
    "loss_source": ("another source of the loss", "loss"),
    "layout": ("other layers of the model", "model"),
}


def settings_of(config: Config, free: Collection[str] = RESUMABLE) -> dict[str, Any]:
    """The settings that must stay the same when a run is resumed, as JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(config.model_dump(exclude=set(free))))
    return plain


def check_settings(
    path: Path, about: Mapping[str, Any], config: Config, free: Collection[str] = ()
) -> None:
    """Refuse a config that is not the one which the run's checkpoint was made with."""
    known = about.get("settings")
    if known is None:
        return  # of an older version
    for key, now in settings_of(config, {*RESUMABLE, *free}).items():
        before = known.get(key, Config.model_fields[key].get_default())
        if key == "params":
            before, now = ({k: v for k, v in d.items() if k not in free} for d in (before, now))
        if json.dumps(before, sort_keys=True) != json.dumps(now, sort_keys=True):
            raise FedloomError(
                f"'{path}' was started with {key}={before}, not {now}. {go_on(path)}"
            )


def check_contents(
    path: Path, before: Mapping[str, Any], now: Mapping[str, Any], config: Config
) -> None:
    """Refuse other data, partitions, files or sources than the run's checkpoint was made with."""
    for key, (_, setting) in CONTENTS.items():
        if before.get(key, now[key]) != now[key]:
            raise _changed(path, key, getattr(config, setting))


def check_sources(path: Path, about: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse source files that have changed since the run's checkpoint was made, before they run:
    naming them would not help."""
    for key in ("method", "model", "loss"):
        name, known = str(config.get(key) or ""), f"{key}_source"
        if is_file(name) and about.get(known) not in (None, _digest([source_of(name)])):
            raise _changed(path, known, name)


def _changed(path: Path, key: str, name: str) -> FedloomError:
    what, setting = CONTENTS[key]
    return FedloomError(
        f"'{path}' was made with {what} than this ({setting}={name} has changed since). "
        f"{go_on(path)}"
    )


def go_on(path: Path) -> str:
    return (
        "Undo the change to continue this run, or start a new one from its last checkpoint with "
        f"the change: fedloom run --fork {path} --out NEW."
    )


def fingerprints(
    config: Config,
    method: Method,
    options: MethodOptions | None,
    factory: str | Factory,
    dataset: Dataset,
    federation: Federation,
    capacities: np.ndarray,
    public: PublicSet | None,
    layout: Layout,
    loss: Loss | None = None,
) -> dict[str, str]:
    """What tells the contents behind a config's names from others."""
    dealt, new = federation.partition, federation.newcomers
    shapes = [(e.name, e.kind, e.shape, str(e.dtype)) for e in layout.entries]
    public_arrays = (
        [] if public is None else [t.numpy() for t in (public.x, public.y) if t is not None]
    )
    return {
        "fingerprint": _labels(dataset),
        "images": _images(dataset),
        "dealt": _sum(dealt.indices, dealt.offsets, new.indices, new.offsets),
        "dealt_capacities": _sum(capacities),
        "public_images": _sum(*public_arrays),
        "method_source": _method_source(config, method, options),
        "model_source": _digest([source_of(config.model)])
        if is_file(config.model)
        else _digest([_source(factory)]),
        "loss_source": _digest([source_of(config.loss)])
        if config.loss is not None and is_file(config.loss)
        else _digest([] if loss is None else [_source(loss)]),
        "layout": f"{zlib.crc32(repr(shapes).encode()):08x}",
    }


def _sum(*arrays: np.ndarray) -> str:
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).data, total)
    return f"{total:08x}"


def _labels(dataset: Dataset) -> str:
    """What tells one data set from another: its labels, shape and the scale of its pixels."""
    words = repr((dataset.shape, str(dataset.x.dtype), dataset.mean, dataset.std, dataset.classes))
    total = zlib.crc32(words.encode())
    for labels in (dataset.y, dataset.y_test, dataset.held_out):
        total = zlib.crc32(np.ascontiguousarray(labels).data, total)
    return f"{total:08x}"


def _images(dataset: Dataset) -> str:
    """A checksum of a few images, for data that differ in nothing else."""
    some = [
        x[np.linspace(0, len(x) - 1, min(len(x), _LOOKED_AT), dtype=np.int64)]
        for x in (dataset.x, dataset.x_test)
    ]
    return _sum(*some)


def _method_source(config: Config, method: Method, options: MethodOptions | None) -> str:
    """Of a method that is not ours: its file, or the classes that it is made of."""
    if is_file(config.method):
        return _digest([source_of(config.method)])
    parts = [getattr(method, field.name) for field in fields(method)]
    classes = [type(part) for part in (*parts, method.adapt.rule)]
    return _digest([_source(cls) for cls in (*classes, *([type(options)] if options else []))])


def _source(thing: Any) -> str:
    """The source of a class or function of the user's; nothing for ours, or where it is unknown."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        thing = type(thing)
    ours = (thing.__module__ or "").partition(".")[0] in ("fedloom", "builtins")
    if ours or thing.__name__ == "<lambda>":  # its lines are those of the call it stands in
        return ""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed at a prompt
        return ""


def _digest(sources: list[str]) -> str:
    text = "\n".join(source for source in sources if source)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
