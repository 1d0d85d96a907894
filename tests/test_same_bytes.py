"""Every method ends with the bytes it ended with before, unless a change means it not to.

The table beside this file is from before rounds were made of messages, that of `feddom` from when
meetings came to be ordered, that of `fedswap` from when activations came to be compared behind the
non-linearity, those of `fedmeta-*` from when there was one outer step a round, that of `wafl` from
when nodes came to combine models by dense products, and that of `feddse` from when clients came to
look at models with norms of all participants' data.
`python tests/test_same_bytes.py NAME ...` writes those methods anew: only for a change that is
meant to move results, and then the changelog says so. Last bits depend on torch and on the CPU (its
maker too, since oneDNN has other kernels for Intel's), so on one that the table does not know the
values are compared, not the bytes; `--here` adds the bytes of this one.
"""

import json
import platform
import sys
import zlib
from pathlib import Path

import pytest
import torch

import fedloom

TABLE = Path(__file__).with_name("same_bytes.json")
KNOWN = json.loads(TABLE.read_text())

SUBMODELS = ("heterofl", "fjord", "federated-dropout", "fedrolex", "feddse", "fedgse-spl",
             "fedgse-csl", "depthfl")  # fmt: skip
SERVERLESS = ("p2p-fedavg", "wafl", "feddom")


def settings(name):
    out = {
        "clients": 6, "partition": "dirichlet:0.5", "rounds": 3, "eval_every": 3, "steps": 3,
        "model": "conv4", "batch": 16, "momentum": 0.5, "weight_decay": 1e-3, "test_share": 0.4,
        "model_options": {"channels": [4, 4, 8, 8]}, "participation": 0.5, "engine": "serial",
        "kernels": "torch",
    }  # fmt: skip
    if name in ("centralised", "fedsgd", *SERVERLESS):
        del out["participation"]
    if name == "fedswap":
        out["participation"] = 1.0
    if name == "fedsgd":
        out = {k: v for k, v in out.items()
               if k not in ("steps", "batch", "momentum", "weight_decay")}  # fmt: skip
    if name in SERVERLESS:
        out["topology"] = "ring,hops=2" if name == "feddom" else "ring"
    if name in SUBMODELS:
        out["capacities"] = "1:0.5,0.5:0.5"
    if name in ("fedswap", "fedgse-spl", "fedgse-csl"):
        out["public"] = "share:0.2"
    if "meta" in name or name in ("fedper", "lg-fedavg"):
        out["newcomers"] = 1
    return out


def here():
    torch_version = torch.__version__.partition("+")[0]
    return f"torch {torch_version}, {torch.backends.cpu.get_cpu_capability()}, {maker()}"


def maker():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "unknown")


def outcome(result):
    """The state as a checksum and a few numbers, and what was scored and spent."""
    state = result.store.checkpoint()[0]
    total = 0
    for name in sorted(state):
        if state[name].numel():
            values = state[name].contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(values.numpy().data, total)
    shared = state["shared"].double()
    kept = state["kept/rows"].double() if "kept/rows" in state else torch.zeros(1)
    numbers = [float(shared.norm()), float(shared.sum()), float(kept.norm()), float(kept.sum())]
    known = ("bytes_up", "bytes_down", "macs")
    return {"crc32": f"{total:08x}", "values": numbers,
            "spent": {name: result.summary[name] for name in known}}  # fmt: skip


def run(name):
    method = "fedswap:partner=min,average_every=3" if name == "fedswap" else name
    return outcome(fedloom.run(method, **settings(name)))


@pytest.mark.parametrize("name", list(KNOWN["methods"]))
def test_a_method_ends_with_the_same_bytes_as_before(in_tmp, name):
    found, before = run(name), KNOWN["methods"][name]
    assert found["spent"] == before["spent"]
    assert found["values"] == pytest.approx(before["values"], rel=1e-3, abs=1e-3)
    assert found["crc32"] == before["crc32"].get(here(), found["crc32"])


if __name__ == "__main__":
    methods = KNOWN["methods"]
    if sys.argv[1:] == ["--here"]:
        for name, known in methods.items():
            known["crc32"][here()] = run(name)["crc32"]
    for name in [word for word in sys.argv[1:] if word != "--here"]:
        made = run(name)
        methods[name] = made | {"crc32": {here(): made["crc32"]}}
    TABLE.write_text(json.dumps(KNOWN, indent=1) + "\n")
