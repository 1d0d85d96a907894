"""Which kernels run a model: ours (`fedloom.native`) or torch's, by a fixed rule, never by timing.

What a run takes is recorded with it under the name of the instruction set, `avx2`, `avx512` or
`plain` (NEON on ARM), or `torch`, so that a resumed run goes on with the same. `avx2+torch` leaves
networks of wide convolutions to torch, whose kernels for them use AVX-512 where the CPU has it,
except for those that ours compute with fewer products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedloom.errors import FedloomError, unknown
from fedloom.layout import Layout
from fedloom.local import LocalRule, Optimiser
from fedloom.local.distil import MaskedSGD
from fedloom.local.meta import MAML, SUPPORT, MetaSGD
from fedloom.local.optimiser import KINDS
from fedloom.local.rule import Pull, Samples
from fedloom.native.library import SETS, instructions, library, right, why_not
from fedloom.native.net import Native, Update
from fedloom.native.plan import Unplanned
from fedloom.native.verify import agrees
from fedloom.tasks import Task

_NUMBERS = {name: number for number, (name, _) in SETS.items()}
_BESIDE = "+torch"
_STACKED = "stacked"
_MOSTLY = 0.75  # of a network's multiplications
CHOICES = ("auto", "native", "torch", *_NUMBERS)


def check(choice: str) -> str:
    if choice not in CHOICES:
        raise unknown("kernels", choice, CHOICES)
    return choice


def resolve(
    choice: str, device: torch.device, precision: str, before: str | None, engine: str = "auto"
) -> str:
    """The kernels of a run: the name of an instruction set, or torch. `before` is what the
    checkpoint to resume from was computed with."""
    reason = _excluded(device, precision, engine)
    if before == "torch" and choice == "auto":
        return before
    if before not in (None, "torch") and choice in ("auto", "native", _ours(before)):
        if choice == "auto" and engine == _STACKED:
            raise FedloomError(
                f"This run was computed by fedloom's own kernels for {_ours(before)}, and the "
                "stacked engine computes with torch's. Resume with another engine, or fork it: "
                "fedloom run --fork RUN --engine stacked --kernels torch."
            )
        if available(before) == "torch":
            raise FedloomError(
                f"This run was computed by fedloom's own kernels for {_ours(before)}, which can't "
                f"run here: {_unavailable(_ours(before))}. Resume it where they run, or fork it "
                "with others, which round differently: fedloom run --fork RUN --kernels "
                f"{nearest(before)}."
            )
        if choice == "auto":
            return before
        if reason is None:
            return _ours(before)
    if choice == "torch":
        return "torch"
    if choice in _NUMBERS:
        if reason is None and available(choice) == "torch":
            reason = _unavailable(choice)
        name = choice
    else:
        number = instructions() if reason is None else None
        reason = reason or (why_not() if number is None else None)
        name = "torch" if number is None else SETS[number][0]
        if choice == "auto" and number is not None and torch_has_avx512():
            name += _BESIDE
    if reason is not None and choice != "auto":
        raise FedloomError(
            f"kernels={choice} can't be had: {reason}. Leave it out (auto) to use what is "
            "available."
        )
    return name


def available(name: str) -> str:
    """The kernels `name` if they run, and run right, here; else torch's."""
    return name if name != "torch" and right(_NUMBERS[_ours(name)]) else "torch"


def nearest(name: str) -> str:
    """The kernels `name` if they run here, else those that do."""
    number = instructions()
    if available(name) != "torch":
        return name
    return "torch" if name == "torch" or number is None else SETS[number][0]


def torch_has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _ours(name: str) -> str:
    return name.removesuffix(_BESIDE)


def kernels_for(
    name: str, module: nn.Module, layout: Layout, shape: tuple[int, int, int], tokens: bool
) -> Native | str:
    """The module run by the kernels `name`; or why torch runs it."""
    if name == "torch":
        return "torch's kernels were chosen"
    if tokens:
        return "it looks its input up as tokens"
    if available(name) == "torch":  # on another node of a cluster
        raise FedloomError(
            f"This run computes with fedloom's own kernels for {_ours(name)}, and a worker can't: "
            f"{_unavailable(_ours(name))}. Install the same fedloom on all machines, and run with "
            "kernels that all of them have: --kernels avx2, or torch."
        )
    try:
        native = Native(module, layout, shape, _NUMBERS[_ours(name)])
        same = agrees(native, module, layout, shape)
    except Unplanned as e:
        return str(e)
    except Exception as e:  # a module's own code may raise anything
        return f"a plan for it could not be made ({type(e).__name__}: {e})"
    if not same:
        return "it does not compute what its trace says"
    if name.endswith(_BESIDE) and native.plan(training=True).wide > _MOSTLY:
        return "its convolutions are wide, and torch's are faster there on a CPU with AVX-512"
    return native


def whole_steps(rule: LocalRule, task: Task) -> bool:
    """Whether the kernels can do all of this rule's step: fetch, normalise, gradient."""
    plain = type(rule).objective is LocalRule.objective or masks_logits(rule)
    return plain and task.is_cross_entropy and not rule.differentiates and not rule.narrows


def masks_logits(rule: LocalRule) -> bool:
    """Whether its objective is cross-entropy without the logits of some classes."""
    own = ("objective", "masked")
    return isinstance(rule, MaskedSGD) and all(
        getattr(type(rule), name) is getattr(MaskedSGD, name) for name in own
    )


def meta_steps(rule: LocalRule, task: Task, native: Native, steps: Sequence[Samples] = ()) -> bool:
    """Whether they can do all of these steps of meta-learning."""
    own = ("parts", "objective", "adapted", "rate", "rates", "hands_back")
    if not isinstance(rule, MAML) or not task.is_cross_entropy or rule.narrows:
        return False
    if any(getattr(type(rule), n) not in (getattr(MAML, n), getattr(MetaSGD, n)) for n in own):
        return False
    return native.can_meta(max((len(step[SUPPORT]) for step in steps), default=1))


def update_of(
    optimiser: Optimiser, memory: Mapping[str, Tensor], pull: Pull | None = None
) -> Update:
    """The optimiser, and what a rule adds to gradients, as the kernels take them. `memory` is one
    client's; it is updated in place, and all must live as long as what is returned."""
    o, at = optimiser, {name: value.data_ptr() for name, value in memory.items()}
    first, second, *_ = *(at[name] for name in o.values if name != "count"), None, None
    clip = math.inf if o.clip is None else o.clip
    numbers = (o.lr, o.momentum, o.weight_decay, clip, o.beta1, o.beta2, o.eps)
    made = Update(KINDS.index(o.kind), first, second, at.get("count"), *numbers)
    if pull is not None:
        made.to, made.push = (None if t is None else t.data_ptr() for t in (pull.to, pull.push))
        made.pull = pull.strength
    return made


def described(found: Native | str, rule: LocalRule, task: Task) -> str:
    """Which kernels a run uses and why, as text."""
    if not isinstance(found, Native):
        return f"torch: {found}"
    if whole_steps(rule, task) or meta_steps(rule, task, found):
        return f"native ({found.name}), whole steps"
    if not task.is_cross_entropy:
        loss = "a loss of one's own" if task.own_loss else f"the loss of {task.name}"
        return f"native ({found.name}), through autograd: {loss} is torch's"
    why = "takes derivatives itself" if rule.differentiates else "has an objective of its own"
    return f"native ({found.name}), through autograd: {type(rule).__name__} {why}"


def why_torch(
    device: torch.device, precision: str, before: str | None, engine: str = "auto"
) -> str:
    """Why `auto` came to torch."""
    begun = "the run was begun with torch's kernels" if before == "torch" else None
    return _excluded(device, precision, engine) or begun or why_not()


def _excluded(device: torch.device, precision: str, engine: str) -> str | None:
    if device.type != "cpu":
        return f"they run on CPUs, and this run is on {device}"
    if engine == _STACKED:
        return "they train one client at a time, and the stacked engine trains many as one"
    return None if precision == "fp32" else f"they compute in fp32, not in {precision}"


def _unavailable(name: str) -> str:
    if library() is None:
        return why_not()
    return f"this CPU has no {name}, or its kernels do not pass the self-test"
