"""`fedloom doctor`: what is installed and whether it works, ending with a small real run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fedloom

#: extras for users: their packages, and what they are for
EXTRAS = {
    "cluster": (("ray",), "--engine ray"),
    "onnx": (("onnx",), "fedloom export --out FILE.onnx"),
    "watch": (("starlette", "uvicorn"), "fedloom watch"),
    "tensorboard": (("tensorboard",), "--track tensorboard"),
    "mlflow": (("mlflow",), "--track mlflow"),
    "wandb": (("wandb",), "--track wandb"),
}
_LITTLE = 1e9  # bytes of free disk below which to warn; a tenth of it is an error
_SELF_TEST: dict[str, Any] = {
    "data": "digits", "clients": 10, "partition": "dirichlet:1.0", "participation": 1.0,
    "rounds": 8, "eval_every": 8, "lr": 0.1, "model_options": {"hidden": [32]}, "seed": 0,
}  # fmt: skip
_BY_TORCH = {"engine": "serial", "kernels": "torch"}
_USUAL, _LEAST = 0.82, 0.75  # accuracy of the self-test
_NEAR = 0.02  # how far two ways to compute it may be apart


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: `wrong` is something that should work and does not."""

    what: str
    says: str
    state: Literal["ok", "note", "wrong"] = "ok"


def examine() -> Iterator[Finding]:
    """All checks in turn; a check that fails is a finding, not an error."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        _versions, _extras, _devices, _compiler, _kernels, _data, _disk, _self_test,
    ]  # fmt: skip
    for look in looks:
        try:
            yield from look()
        except Exception as e:
            name = look.__name__.strip("_").replace("_", "-")
            yield Finding(name, f"{type(e).__name__}: {' '.join(str(e).split())}", "wrong")


def _versions() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding("fedloom", f"{fedloom.__version__} in {Path(fedloom.__file__).parent}")
    old = sys.version_info < (3, 11)
    yield Finding("python", f"{platform.python_version()}, {system}", "wrong" if old else "ok")
    found: list[str] = []
    lost: list[str] = []
    try:
        asked = importlib.metadata.requires("fedloom") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "fedloom is not installed, but run from its source", "note")
        return
    for line in asked:
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line:
            version = _version(name[0])
            (found if version else lost).append(f"{name[0]} {version}" if version else name[0])
    yield Finding("packages", ", ".join(found))
    if lost:
        yield Finding("packages", f"missing: {', '.join(lost)}; pip install fedloom", "wrong")


def _extras() -> Iterator[Finding]:
    for extra, (names, use) in EXTRAS.items():
        if any(_version(name) is None for name in names):
            says = f"not installed, so no `{use}`; pip install 'fedloom[{extra}]'"
            yield Finding(f"[{extra}]", says, "note")
        else:
            yield Finding(f"[{extra}]", ", ".join(f"{n} {_version(n)}" for n in names))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    import torch

    from fedloom.engine.choose import cores

    memory = ""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = f", {size / 1e9:.0f} GB of memory"
    yield Finding("cpu", f"{cores()} cores{memory}, {torch.backends.cpu.get_cpu_capability()}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("Apple GPU (mps)")
    if not names:
        yield Finding("gpu", "none that torch can use; runs are on the CPU", "note")
        return
    device = "cuda" if torch.cuda.device_count() else "mps"
    right = float((torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device))[0, 0])
    works = right == 64.0
    says = ", ".join(names) if works else f"{', '.join(names)}: a product of ones came out wrong"
    yield Finding("gpu", says, "ok" if works else "wrong")


def _compiler() -> Iterator[Finding]:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if path := shutil.which(name):
            asked = [path, "--version"]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
            first = said.stdout.splitlines()[0] if said.stdout else "no version"
            yield Finding("compiler", f"{path}: {first}")
            return
    yield Finding("compiler", "none: a new install builds no kernels, and runs on torch's", "note")


def _kernels() -> Iterator[Finding]:
    from fedloom.native.library import AVX512, SETS, instructions, library, why_not
    from fedloom.native.selftest import passes

    lib, number = library(), instructions()
    if lib is None or number is None:
        yield Finding("kernels", f"torch's for everything: {why_not()}", "note")
        return
    name = SETS[number][0]
    if not passes(number):
        says = f"{name} in {lib._name} fails its self-test; use --kernels torch"
        yield Finding("kernels", says, "wrong")
    elif number != AVX512 and lib.fl_wide():
        says = f"{name}, since avx512 fails its self-test, which is slower; {lib._name}"
        yield Finding("kernels", says, "wrong")
    else:
        yield Finding("kernels", f"{name}, self-test passed, {lib._name}")


def _data() -> Iterator[Finding]:
    from fedloom.data.catalog import describe
    from fedloom.data.store import cache_dir

    rows = describe()
    here = [str(row["name"]) for row in rows if row["here"] == "yes"]
    away = [str(row["name"]) for row in rows if row["here"] != "yes"]
    more = f"; `fedloom data fetch` gets {', '.join(away)}" if away else ""
    yield Finding("data", f"{', '.join(here)} (cache: {cache_dir()}){more}")


def _disk() -> Iterator[Finding]:
    from fedloom.data.store import cache_dir

    for what, folder in (("disk, here", Path.cwd()), ("disk, cache", cache_dir())):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        state: Literal["ok", "note", "wrong"] = "ok"
        if free < _LITTLE:
            state = "wrong" if free < _LITTLE / 10 else "note"
        if not os.access(there, os.W_OK):
            yield Finding(what, f"{there} can't be written to", "wrong")
            continue
        yield Finding(what, f"{free / 1e9:,.1f} GB free", state)


def _self_test() -> Iterator[Finding]:
    """Ten clients learn digits, as a run would and once more by torch alone; both must get there,
    and to the same place."""
    started = time.perf_counter()
    scores, path = {}, ""
    with tempfile.TemporaryDirectory(prefix="fedloom-doctor-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways: dict[str, dict[str, Any]] = {"auto": {}, "torch": _BY_TORCH}
        for name, how in ways.items():
            with contextlib.redirect_stdout(io.StringIO()):
                done = fedloom.run("fedavg", out=Path(folder) / name, **_SELF_TEST, **how)
            if len(done.records) != _SELF_TEST["rounds"] or not done.store.has_checkpoint():
                yield Finding("self-test", "the run did not write all of its rounds", "wrong")
                return
            scores[name] = float(done.summary["test_accuracy"])
            path = path or done.kernels
    took = f"{time.perf_counter() - started:.1f} s"
    got, other = scores["auto"], scores["torch"]
    if got < _LEAST or abs(got - other) > _NEAR:
        says = f"{100 * got:.1f} % on digits ({path}), {100 * other:.1f} % by torch alone; "
        says += f"expected about {100 * _USUAL:.0f} % from both ({took})"
        yield Finding("self-test", says, "wrong")
        return
    says = f"10 clients, 8 rounds of FedAvg on digits: {100 * got:.1f} % ({path}), {took}"
    yield Finding("self-test", says)
