"""Whether the sub-models of a model compute what they should, tried once with numbers.

A sub-model must give what the whole model gives when nothing reads the channels that were left out.
What a trace says of a model's channels (`trace.py`) follows from the shapes of its operations, and
shapes don't show everything: one that scales by the number of channels, say. So a pass is made
through a sub-model and one through the whole, in evaluation and in training mode, with random
parameters; where they part, the model is refused by the name of the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.errors import FedloomError
from fedloom.layout import Layout
from fedloom.models.inputs import blank
from fedloom.select.calls import Layers
from fedloom.select.channels import Channels, Step, places
from fedloom.select.trace import VIEWS, refusal

_SAMPLES = 4  # with two, batch norm gives -1 and 1 whatever it is given
_TOLERANCE = 1e-3  # of the largest value; what is cut wrongly differs by as much as the values
_RESHAPED = (
    "Give a reshape the size of a head or group and let it find out their number: "
    "reshape(n, t, 3, -1, self.head_size), with the size computed in __init__"
)
_ACROSS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}


def verify(channels: Channels, shape: Sequence[int]) -> None:
    """Refuse a model whose sub-models don't compute what they should."""
    rng = np.random.default_rng(0)
    keep = [np.sort(rng.choice(n, max(n // 2, 1), replace=False)) for n in channels.sizes]
    whole, smaller = copy.deepcopy(channels.module), channels.build([len(k) for k in keep])
    layout, narrow = Layout.of(whole), Layout.of(smaller)
    index = channels.index(layout, keep)
    row = _random_row(layout, layout.flatten(whole))
    masked, part = _masked(channels, layout, row, index), row[index]
    x = _samples(whole, shape, rng)

    def passes(training: bool, record: bool = False) -> tuple[_Pass, _Pass]:
        layout.load(whole, masked)
        narrow.load(smaller, part)
        return _run(whole, x, training, record), _run_smaller(smaller, x, training, record)

    with torch.random.fork_rng():
        for training in channels.steps:
            mine, other = passes(training)
            if not _alike(mine.out, other.out):
                raise _parted(channels, keep, training, *passes(training, record=True))


def _samples(module: nn.Module, shape: Sequence[int], rng: np.random.Generator) -> Tensor:
    """Random images, or tokens that every embedding has."""
    like = blank(module, shape, _SAMPLES)
    if like.is_floating_point():
        return torch.from_numpy(rng.standard_normal(like.shape)).to(like)
    words = min(m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding))
    return torch.from_numpy(rng.integers(words, size=like.shape)).to(like)


class _Pass(TorchDispatchMode):
    """One pass without what makes sub-models differ on purpose: norms across channels, which are
    over fewer of them, leave out all but their weights, and random numbers are all 1."""

    def __init__(self, record: bool) -> None:
        super().__init__()
        self._record = record
        self.results: list[tuple[str, Tensor]] = []
        self.out: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # as in `models.counts`: don't import the compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        if name in _ACROSS:
            first.copy_(_affine(name, args))
        elif name == "native_dropout":
            first.copy_(args[0])
        elif torch.Tag.nondeterministic_seeded in func.tags and first.is_floating_point():
            first.fill_(1.0)
        flat = (b for a in args for b in (a if isinstance(a, list | tuple) else (a,)))
        if self._record and isinstance(first, Tensor) and any(isinstance(a, Tensor) for a in flat):
            self.results.append((name, first.clone()))
        return out


def _affine(name: str, args: Any) -> Tensor:
    x: Tensor = args[0]
    if name == "native_group_norm":
        weight, bias = args[1:3]
    else:
        weight, bias = args[2], args[3] if name == "native_layer_norm" else None
    along = (1, -1, *[1] * (x.dim() - 2)) if name == "native_group_norm" else (-1,)
    for value, join in ((weight, torch.mul), (bias, torch.add)):
        if value is not None:
            x = join(x, value.view(along) if value.dim() == 1 else value)
    return x


def _run(module: nn.Module, x: Tensor, training: bool, record: bool) -> _Pass:
    torch.manual_seed(0)
    done = _Pass(record)
    with torch.no_grad(), done:
        done.out = module.train(training)(x)
    return done


def _run_smaller(module: nn.Module, x: Tensor, training: bool, record: bool) -> _Pass:
    with not_too_rigid(module, "half", training):
        return _run(module, x, training, record)


@contextmanager
def not_too_rigid(module: nn.Module, share: str, training: bool = False) -> Iterator[None]:
    """Refuse a model that does not work with fewer channels, by the layer in which it fails."""
    layers = Layers()
    try:
        with layers.followed(module):
            yield
    except (RuntimeError, ValueError, AssertionError, IndexError) as e:
        raise too_rigid(module, share, str(e).splitlines()[0], training, layers.where) from None


def too_rigid(
    module: nn.Module, share: str, reason: str, training: bool = False, where: str = ""
) -> FedloomError:
    """A model that does not work with fewer channels."""
    at = f" in {where}" if where else ""
    return FedloomError(
        f"{type(module).__name__} can't be cut into sub-models: with {share} of its channels it "
        f"fails{at}{' in training' if training else ''} ({reason}). Take sizes in forward() from "
        "the tensors or layers, not from numbers: x.flatten(1), not x.view(-1, 400); "
        "self.lstm.hidden_size, not self.hidden."
    )


def _random_row(layout: Layout, row: Tensor) -> Tensor:
    """Kernels of about unit gain; vectors above 0, so that variances are and ReLUs stay open."""
    row, g = row.clone(), torch.Generator().manual_seed(0)
    for e in layout.entries:
        if e.dtype != layout.dtype:
            continue
        values = torch.empty(e.stop - e.start)
        if len(e.shape) > 1:
            values.normal_(0.0, (2 / max(prod(e.shape[1:]), 1)) ** 0.5, generator=g)
        else:
            values.uniform_(0.5, 1.5, generator=g)
        row[e.start : e.stop] = values.to(row)
    return row


def _masked(channels: Channels, layout: Layout, row: Tensor, index: Tensor) -> Tensor:
    """The whole model in which no weight reads or makes a channel that was left out."""
    there = torch.zeros(layout.size, dtype=torch.bool)
    there[index] = True
    row = row.clone()
    for e in layout.entries:
        if e.tensor in channels.weights:
            row[e.start : e.stop] *= there[e.start : e.stop].to(row)
    return row


def _alike(mine: Tensor, other: Tensor) -> bool:
    if mine.shape != other.shape:
        return False
    scale = float(mine.abs().nan_to_num(0.0, 0.0, 0.0).max()) if mine.numel() else 0.0
    return torch.allclose(mine, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _parted(
    channels: Channels, keep: list[np.ndarray], training: bool, mine: _Pass, other: _Pass
) -> FedloomError:
    """The refusal, by the first operation whose results differ."""
    steps = zip(channels.steps[training], mine.results, other.results, strict=False)
    for step, (name, a), (theirs, b) in steps:
        if not name == theirs == step.name:
            break  # other operations for other sizes
        if "empty" not in name and not _alike(_kept(a, step, keep), b):
            reason = f"its operation '{name}' gives other values with fewer channels"
            instead = _RESHAPED if name in VIEWS else ""
            return refusal(channels.module, step.where, training, reason, instead)
    reason = "it gives other values with fewer channels"
    return refusal(channels.module, "its forward()", training, reason)


def _kept(values: Tensor, step: Step, keep: list[np.ndarray]) -> Tensor:
    for d, dim in enumerate(step.dims):
        if all(factor.group is None for factor in dim):
            continue  # the trace had other samples
        values = values.index_select(d, torch.from_numpy(places(dim, keep)).to(values.device))
    return values
