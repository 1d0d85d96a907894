"""From stored images to batches: picked by index, augmented, normalised, on the device.

Images stay uint8 (or memory-mapped) until a batch of them is used. A small client's are read
once a round; larger sets batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Images
from fedloom.data.images import laid_out, unit_of
from fedloom.errors import FedloomError, nearest
from fedloom.local.rule import Batch
from fedloom.native.net import Pictures, can_read
from fedloom.tasks import CLASSES, Task

SCORE_BATCH = 256  # samples that are scored together

_AT_ONCE = 128 * 2**20  # values of one client that are read at once

AUGMENTS = "none | flip | crop:PIXELS | flip+crop:PIXELS"


@dataclass(frozen=True)
class Augment:
    """Random horizontal flips, and random crops of the zero-padded image.

    >>> Augment.parse("flip+crop:4")
    Augment(flip=True, crop=4)
    """

    flip: bool = False
    crop: int = 0

    @staticmethod
    def parse(spec: str) -> Augment:
        flip, crop = False, 0
        for word in spec.split("+"):
            name, _, pixels = word.strip().partition(":")
            if name == "flip" and not pixels:
                flip = True
            elif name == "crop" and pixels.isdigit() and int(pixels) > 0:
                crop = int(pixels)
            elif spec != "none":
                hint = "" if name in ("flip", "crop") else nearest(name, ("none", "flip", "crop"))
                raise FedloomError(f"'{spec}' is not an augmentation. {hint}Valid: {AUGMENTS}.")
        return Augment(flip, crop)

    def __bool__(self) -> bool:
        return self.flip or self.crop > 0

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Of n images: which are flipped, and where they are cut out, (top and left) × n."""
        flipped = rng.random(n) < 0.5 if self.flip else None
        return flipped, rng.integers(0, 2 * self.crop + 1, (2, n)) if self.crop else None

    def apply(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        n, _, h, w = x.shape
        flip, offset = self.draw(n, rng)
        if flip is not None:
            flipped = torch.from_numpy(flip).to(x.device)
            x = torch.where(flipped[:, None, None, None], x.flip(3), x)
        if offset is not None:
            p = self.crop
            padded = torch.nn.functional.pad(x, (p, p, p, p))
            top, left = torch.from_numpy(offset).to(x.device)
            rows = (top[:, None] + torch.arange(h, device=x.device))[:, None, :, None]
            cols = (left[:, None] + torch.arange(w, device=x.device))[:, None, None, :]
            image = torch.arange(n, device=x.device)[:, None, None, None]
            channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
            x = padded[image, channel, rows, cols]
        return x


class Source:
    """One array of images with labels, and how to normalise it; `tokens` are left as they are.

    Raw images travel as flat rows, in the order in which the model wants their values in memory:
    with `channels_last`, colour by colour of each pixel, as convolutions on CPUs like it.
    """

    def __init__(
        self,
        x: Images,
        y: np.ndarray,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        channels_last: bool = False,
        tokens: bool = False,
        task: Task = CLASSES,
    ) -> None:
        self.x, self.y, self.device, self.task = x, y, device, task
        self._shape, self._channels_last = tuple(x.shape[1:]), channels_last
        self._tokens = tokens
        per_unit = unit_of(x.dtype)
        scale = self._image([1 / (per_unit * s) for s in std])
        shift = self._image([m / s for m, s in zip(mean, std, strict=True)])
        self._scale, self._shift = self.flat(scale)[0], self.flat(shift)[0]
        self._stored = scale.reshape(-1), shift.reshape(-1)  # in the order of the stored images

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Raw images as flat rows, and labels."""
        x = torch.from_numpy(np.ascontiguousarray(self.x[indices])).to(self.device)
        return self.flat(x), self.labels(indices).to(self.device)

    def flat(self, images: Tensor) -> Tensor:
        if self._channels_last:
            images = images.permute(0, 2, 3, 1)
        return images.flatten(1)

    def images(self, flat: Tensor) -> Tensor:
        """The same values, as (N, C, H, W)."""
        c, h, w = self._shape
        if self._channels_last:
            return flat.view(-1, h, w, c).permute(0, 3, 1, 2)
        return flat.view(-1, c, h, w)

    def normalise(self, flat: Tensor) -> Tensor:
        if self._tokens:
            return self.images(flat.to(torch.int64))
        values = flat.to(torch.float32)
        values = values * self._scale if values is flat else values.mul_(self._scale)
        return self.images(values.sub_(self._shift))

    def pictures(self, indices: np.ndarray) -> Pictures:
        """The same images for fedloom's own kernels, which fetch and normalise them themselves."""
        if can_read(self.x):
            return Pictures(self.x, indices.astype(np.int64), *self._stored)
        taken = np.ascontiguousarray(self.x[indices])
        taken = taken if can_read(taken) else taken.astype(np.float32)  # other integers
        return Pictures(taken, np.arange(len(indices)), *self._stored)

    def labels(self, indices: np.ndarray) -> Tensor:
        y = self.y[indices]
        return torch.from_numpy(y if y.dtype == np.float32 else y.astype(np.int64))

    def batches(self, indices: np.ndarray) -> Iterator[Tensor]:
        """Normalised images, a few hundred at a time."""
        for at in range(0, len(indices), SCORE_BATCH):
            yield self.batch(indices[at : at + SCORE_BATCH]).x

    def batch(self, indices: np.ndarray) -> Batch:
        x, y = self.take(indices)
        return Batch(self.normalise(x), y, task=self.task)

    def _image(self, values: list[float]) -> Tensor:
        """A scale's values, as a batch of one image of them."""
        laid = torch.from_numpy(laid_out(values, self._shape).astype(np.float32))
        return laid.to(self.device).unsqueeze(0).expand(1, *self._shape).contiguous()


class Shelf:
    """One client's data part, ready to be cut into batches by position."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        augment: Augment,
        rng: np.random.Generator | None,
    ) -> None:
        self.source, self._indices, self._augment, self._rng = source, indices, augment, rng

    @cached_property
    def raw(self) -> tuple[Tensor, Tensor] | None:
        """All of it, if that is little enough."""
        size = len(self._indices) * int(np.prod(self.source.x.shape[1:]))
        return self.source.take(self._indices) if size <= _AT_ONCE else None

    def pictures(self, steps: Sequence[np.ndarray]) -> tuple[Pictures, Tensor]:
        """The batches at these positions, concatenated as the kernels take them."""
        where = self._indices[np.concatenate(steps)]
        pictures = self.source.pictures(where)
        if self._augment and self._rng is not None:
            drawn = [self._augment.draw(len(step), self._rng) for step in steps]
            flips, offsets = ([part for part in parts if part is not None]
                              for parts in zip(*drawn, strict=True))  # fmt: skip
            pictures = replace(
                pictures,
                flip=np.concatenate(flips).astype(np.uint8) if flips else None,
                offset=np.concatenate(offsets, 1).T.astype(np.int32, order="C")
                if offsets
                else None,
                crop=self._augment.crop,
            )
        return pictures, self.source.labels(where)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def whole(self) -> tuple[Tensor, Tensor] | None:
        """All raw rows and labels, if batches are no more than some of them."""
        return None if self._augment else self.raw

    def batch(self, positions: np.ndarray) -> Batch:
        """Images and labels at these positions; rows of positions give several batches."""
        if positions.ndim == 2:
            there = positions >= 0
            flat = self.batch(positions[there])
            return replace(flat, lengths=tuple(there.sum(1).tolist()))
        if self.raw is not None:
            at = torch.from_numpy(positions).to(self.source.device)
            x, y = self.raw[0].index_select(0, at), self.raw[1].index_select(0, at)
        else:
            x, y = self.source.take(self._indices[positions])
        if self._augment and self._rng is not None:
            x = self.source.flat(self._augment.apply(self.source.images(x), self._rng))
        return Batch(self.source.normalise(x), y, task=self.source.task)


class PublicShelf:
    """The public images, ready to be cut into batches; a batch tells which of them it has."""

    whole = None  # they are not of the clients' source

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __len__(self) -> int:
        return len(self._x)

    def batch(self, positions: np.ndarray) -> Batch:
        at = torch.from_numpy(positions).to(self._x.device)
        return Batch(self._x[at], torch.zeros(len(at), dtype=torch.int64, device=at.device), at=at)
