"""Which engine trains the clients: by name, or by a fixed rule, never by timing.

`auto` looks at the model, the device and the number of participants only, so that a rerun picks the
same. On a CPU with more than one core and more than one participant it is processes where fedloom's
own kernels run the model, or where it has more than linear layers; else serial. Other models of
linear layers are stacked, and on a GPU small convolutional ones too. Serial and processes give the
same bits, so a machine with another number of cores gives the same results.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from fedloom.engine.base import Engine, Setting
from fedloom.engine.processes import Processes, can_fork
from fedloom.engine.serial import Serial
from fedloom.errors import FedloomError, unknown

ENGINES = ("auto", "serial", "stacked", "processes", "ray")


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pick(module: nn.Module, setting: Setting, native: bool, workers: int, participants: int) -> str:
    """What `auto` stands for; `native`: fedloom's own kernels can run the model."""
    from fedloom.engine.stacked import stacks_well

    own = setting.task.own_loss is not None
    if not native and not own and participants > 1 and stacks_well(module, setting.device):
        return "stacked"
    if setting.device.type == "cpu" and workers > 1 and participants > 1 and can_fork():
        return "processes"
    return "serial"


def make_engine(
    name: str,
    setting: Setting,
    module: nn.Module,
    *,
    native: bool,
    workers: int,
    participants: int,
    parts: Sequence[object] = (),
    ray_address: str | None = None,
) -> Engine:
    """The engine `name`; `parts` are the method's own objects, which workers inherit."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    workers = workers or cores()
    chosen = pick(module, setting, native, workers, participants) if name == "auto" else name
    workers = min(workers, participants)
    if chosen == "stacked":
        from fedloom.engine.stacked import Stacked, check_stackable

        check_stackable(module)
        if setting.task.own_loss is not None:
            raise FedloomError(
                "A loss of one's own may look at a batch as a whole, so its batches can't be "
                "stacked, where some are padded. Use --engine serial or processes."
            )
        if workers == 1 or setting.device.type != "cpu" or not can_fork():
            return Stacked(setting)
        return Processes(setting, Stacked, workers, participants, parts)
    if chosen == "processes":
        return Processes(setting, Serial, workers, participants, parts)
    if chosen == "ray":
        from fedloom.engine.cluster import Cluster

        return Cluster(setting, workers, parts, ray_address)
    return Serial(setting)
