"""The compiled kernels, if there are any, and which of them this CPU can run.

Which instruction set is used is a fixed rule of the CPU, so that CPUs of a kind compute the same
bits: AVX-512 on x86-64 where its units are as wide as its vectors, else AVX2; NEON on 64-bit ARM.
All but AVX2's are used only if they pass a self-test first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedloom.files import state_folder

#: instruction sets by number, as in kernels.cpp, with the number of samples in a vector
SETS = {0: ("plain", 4), 1: ("avx2", 8), 2: ("avx512", 16)}
PLAIN, AVX2, AVX512 = SETS

_P, _I, _L, _F, _D = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_double,
)  # fmt: skip
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "fl_supported": (_I, []),
    "fl_wide": (_I, []),
    "fl_sizes": (_L, [_I]),
    "fl_make": (_P, [_I, _P, _I, _P, _I, _P, _I, _L]),
    "fl_free": (None, [_P]),
    "fl_bytes": (_L, [_P]),
    "fl_load": (None, [_P, _P, _I, _P, _I, _P, _P, _P, _P, _I]),
    "fl_mask": (None, [_P, _I, _P]),
    "fl_forward": (None, [_P, _P, _I, _P]),
    "fl_look": (None, [_P, _P, _P, _I, _P, _L, _P, _P, _P, _P, _I, _P]),
    "fl_read": (None, [_P, _I, _P, _L]),
    "fl_add_up": (None, [_P, _I, _P]),
    "fl_watch": (_I, [_P, _I, _P]),
    "fl_backward": (None, [_P, _P, _P, _P, _I]),
    "fl_hold": (None, [_P, _P, _I]),
    "fl_gradient": (_D, [_P, _P, _P, _P, _F, _I, _I]),
    "fl_along": (_I, [_P, _P, _P, _P, _P, _P]),
    "fl_train": (_D, [_P, _P, _P, _L, _P, _I, _P, _P, _P, _I, _P, _P, _P, _P, _I, _P]),
    "fl_meta": (_D, [_P, _P, _L, _L, _P, _F, _I, _P, _P, _P, _P, _P, _P, _P]),
    "fl_update": (None, [_I, _P, _P, _L, _P]),
    "fl_spread": (None, [_I, _P, _L, _L, _L, _P, _P]),
    "fl_weigh": (None, [_I, _P, _L, _L, _L, _P, _P]),
    "fl_weigh_part": (None, [_P, _P, _L, _D, _P, _P]),
}


def bind(path: Path) -> ctypes.CDLL:
    """The functions in a compiled file."""
    lib = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@cache
def library() -> ctypes.CDLL | None:
    """The kernels that were compiled when fedloom was installed; None: there was no compiler.
    `FEDLOOM_KERNELS` names another file (`make sanitise`)."""
    other = os.environ.get("FEDLOOM_KERNELS")
    if other:
        return bind(Path(other).absolute())
    for path in sorted(Path(__file__).parent.glob("_kernels*")):
        if path.suffix in (".so", ".pyd", ".dylib"):
            try:
                return bind(path)
            except (OSError, AttributeError):  # of another platform, or of an older version
                continue
    return None


@cache
def instructions() -> int | None:
    """The number of the instruction set to use; None: nothing here is worth using."""
    lib = library()
    if lib is None:
        return None
    if lib.fl_wide() and right(AVX512):
        return AVX512
    if lib.fl_supported() & 1 << AVX2:
        return AVX2
    return PLAIN if platform.machine() in ("aarch64", "arm64") and right(PLAIN) else None


def supported(number: int) -> bool:
    """Whether the CPU has this instruction set, and there are kernels for it."""
    lib = library()
    return lib is not None and bool(lib.fl_supported() & 1 << number)


@cache
def right(number: int) -> bool:
    """Whether kernels compute the right thing here: AVX2's are known to, others are tried on first
    use. That they passed is remembered for these kernels on this CPU."""
    if not supported(number) or number == AVX2:
        return supported(number)
    with suppress(OSError, RuntimeError):  # a damaged list, or no home to keep one in
        listed = _passed().read_text(encoding="utf-8", errors="replace").splitlines()
        if _fingerprint(number) in listed:
            return True
    from fedloom.native.selftest import passes

    if not passes(number):
        return False
    with suppress(OSError, RuntimeError):  # then it is tried again next time
        _passed().parent.mkdir(parents=True, exist_ok=True)
        with _passed().open("a", encoding="utf-8") as out:
            out.write(f"{_fingerprint(number)}\n")
    return True


def _passed() -> Path:
    """Where kernels that passed are listed."""
    return state_folder() / "kernels"


def _fingerprint(number: int) -> str:
    """Of an instruction set, the compiled kernels and this CPU."""
    lib, cpu = library(), platform.processor()
    assert lib is not None
    with suppress(OSError, StopIteration):  # which names it better, on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line for line in lines if line.startswith("model name"))
    digest = hashlib.sha256(Path(lib._name).read_bytes() + cpu.encode()).hexdigest()
    return f"{SETS[number][0]} {digest}"


def why_not() -> str:
    """Why no kernels can be used, as text."""
    if library() is None:
        return "fedloom was installed without a C++ compiler, so its kernels were not built"
    return "this CPU has neither AVX2 with FMA nor NEON that passes the self-test"
