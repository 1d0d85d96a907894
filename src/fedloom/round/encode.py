"""Message encodings: a choice of the run, not of the method.

An encoding turns the values of a message into the arrays that travel, and back. What a message
costs is what those arrays take. `fp16` rounds both ways; `int8` and `topk` compress what clients
send, as changes of what they were told, and what an encoding loses is added to the client's next
message (error feedback). Privacy by noise or by masks would act at the same place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError, nearest

ENCODINGS = "fp32 | fp16 | int8 | topk:SHARE"

#: the arrays that travel
Payload = dict[str, np.ndarray]

_BLOCK = 256  # values that share a scale


def nbytes(payload: Payload) -> int:
    return sum(array.nbytes for array in payload.values())


def choice(chosen: Sequence[np.ndarray], sizes: Sequence[int]) -> Payload:
    """Which of its channels a sub-model has, for those who can't know: for each group of `sizes` a
    bitmap or the numbers of those `chosen`, whichever is smaller.

    >>> [a.tolist() for a in choice([np.array([0, 6]), np.array([3])], [8, 100]).values()]
    [[130], [3]]
    """
    out = {}
    for number, (some, size) in enumerate(zip(chosen, sizes, strict=True)):
        there = np.zeros(size, dtype=bool)
        there[some] = True
        forms = np.packbits(there), np.flatnonzero(there).astype(np.min_scalar_type(size - 1))
        out[str(number)] = min(forms, key=lambda form: form.nbytes)
    return out


class Encoding(ABC):
    """`changes`: clients send changes of what they were told, with error feedback; `whole`: a model
    that nobody knows the start of can be encoded as well; `down`: what the server tells is encoded,
    too; `beside`: so are values that travel besides the model."""

    changes: bool = False
    whole: bool = True
    down: bool = False
    beside: bool = True

    @abstractmethod
    def encode(self, values: Tensor) -> Payload:
        """The arrays that stand for a vector."""

    @abstractmethod
    def decode(self, payload: Payload, size: int) -> Tensor:
        """The vector that the arrays stand for."""

    def size(self, count: int) -> int:
        """The bytes of a message of so many values."""
        return self.through(torch.zeros(count))[1]

    def through(self, values: Tensor) -> tuple[Tensor, int]:
        """What arrives of a vector (of any shape), and the bytes that it took."""
        payload = self.encode(values.reshape(-1))
        arrived = self.decode(payload, values.numel()).view(values.shape)
        return arrived, nbytes(payload)


@dataclass(frozen=True)
class Float32(Encoding):
    """As it is."""

    def encode(self, values: Tensor) -> Payload:
        return {"values": values.numpy()}

    def decode(self, payload: Payload, size: int) -> Tensor:
        return torch.from_numpy(payload["values"])


@dataclass(frozen=True)
class Float16(Encoding):
    """Half the bytes, about three digits, both ways; values beyond 65,504 become infinite."""

    down = True

    def encode(self, values: Tensor) -> Payload:
        return {"values": values.half().numpy()}

    def decode(self, payload: Payload, size: int) -> Tensor:
        return torch.from_numpy(payload["values"]).float()


@dataclass(frozen=True)
class Int8(Encoding):
    """A byte a value: rounded to 1/127 of the largest in its block of 256.

    >>> Int8().through(torch.tensor([1.0, -0.5, 0.0]))[0].tolist()
    [1.0, -0.5039370059967041, 0.0]
    """

    changes = True

    def encode(self, values: Tensor) -> Payload:
        blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
        scale = blocks.abs().amax(1) / 127
        whole = (blocks / torch.where(scale > 0, scale, 1.0)[:, None]).round()
        return {"values": whole.to(torch.int8).view(-1)[: len(values)].numpy(),
                "scale": scale.numpy()}  # fmt: skip

    def decode(self, payload: Payload, size: int) -> Tensor:
        scale = torch.from_numpy(payload["scale"]).repeat_interleave(_BLOCK)[:size]
        return torch.from_numpy(payload["values"]).float() * scale


@dataclass(frozen=True)
class TopK(Encoding):
    """Only the largest share of the changes, with their places; the rest waits.

    Changes are ranked by two or three digits (bfloat16), and of equals the first is sent: weights
    that read the same constant pixels change alike but for rounding, which would decide otherwise.
    A change at the edge of a rank can still fall on either side of it on engines that round
    differently; it is then sent a round later.

    >>> TopK(0.5).through(torch.tensor([1.0, -3.0, 0.5, 2.0]))
    (tensor([ 0., -3.,  0.,  2.]), 16)
    """

    share: float
    changes = True
    whole = False
    beside = False

    def encode(self, values: Tensor) -> Payload:
        count = min(max(math.ceil(self.share * len(values)), 1), len(values))
        # What is not a number must arrive, so that it is refused.
        rank = values.abs().bfloat16().float().nan_to_num(nan=math.inf, posinf=math.inf)
        least = rank.topk(count).values[-1]
        above = (rank > least).nonzero()[:, 0]
        equal = (rank == least).nonzero()[: count - len(above), 0]
        at = torch.cat([above, equal]).sort().values
        return {"values": values[at].numpy(), "at": at.numpy().astype(np.uint32)}

    def decode(self, payload: Payload, size: int) -> Tensor:
        out = torch.zeros(size)
        out[torch.from_numpy(payload["at"].astype(np.int64))] = torch.from_numpy(payload["values"])
        return out


def encoding(spec: str) -> Encoding:
    """The encoding that a word describes.

    >>> encoding("topk:0.01")
    TopK(share=0.01)
    """
    known: dict[str, Encoding] = {"fp32": Float32(), "fp16": Float16(), "int8": Int8()}
    name, _, share = spec.partition(":")
    if spec in known:
        return known[spec]
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    if name == "topk" and 0 < value <= 1:
        return TopK(value)
    hint = "" if name == "topk" else nearest(name, (*known, "topk"))
    raise FedloomError(
        f"'{spec}' is not an encoding. {hint}Valid: {ENCODINGS}, with a share above 0 and up to 1."
    )
