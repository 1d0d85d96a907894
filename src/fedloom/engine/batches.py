"""From stored images to batches: picked by index, augmented, normalised, on the device.

Images stay uint8 (or memory-mapped) until they are used. The whole of a small client's data is
normalised once; larger sets, and all augmented ones, batch by batch: the same values either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Images
from fedloom.errors import FedloomError
from fedloom.local.rule import Batch

_AT_ONCE = 32 * 2**20  # values of one client that are normalised at once (128 MB)

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
                raise FedloomError(f"'{spec}' is not an augmentation. Valid: {AUGMENTS}.")
        return Augment(flip, crop)

    def __bool__(self) -> bool:
        return self.flip or self.crop > 0

    def apply(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        n, _, h, w = x.shape
        if self.flip:
            flipped = torch.from_numpy(rng.random(n) < 0.5).to(x.device)
            x = torch.where(flipped[:, None, None, None], x.flip(3), x)
        if self.crop:
            p = self.crop
            padded = torch.nn.functional.pad(x, (p, p, p, p))
            top, left = torch.from_numpy(rng.integers(0, 2 * p + 1, (2, n))).to(x.device)
            rows = (top[:, None] + torch.arange(h, device=x.device))[:, None, :, None]
            cols = (left[:, None] + torch.arange(w, device=x.device))[:, None, None, :]
            image = torch.arange(n, device=x.device)[:, None, None, None]
            channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
            x = padded[image, channel, rows, cols]
        return x


class Source:
    """One array of images with labels, and how to normalise it."""

    def __init__(
        self,
        x: Images,
        y: np.ndarray,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
    ) -> None:
        self.x, self.y, self.device = x, y, device
        per_unit = 255.0 if x.dtype == np.uint8 else 1.0
        shape = (1, -1, 1, 1)
        self._scale = torch.tensor([1 / (per_unit * s) for s in std], device=device).view(shape)
        self._shift = torch.tensor(
            [m / s for m, s in zip(mean, std, strict=True)], device=device
        ).view(shape)

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Raw images and labels."""
        x = torch.from_numpy(np.ascontiguousarray(self.x[indices])).to(self.device)
        y = torch.from_numpy(self.y[indices].astype(np.int64)).to(self.device)
        return x, y

    def normalise(self, x: Tensor) -> Tensor:
        return x.to(torch.float32).mul_(self._scale).sub_(self._shift)

    def batch(self, indices: np.ndarray) -> Batch:
        x, y = self.take(indices)
        return Batch(self.normalise(x.clone() if x.dtype == torch.float32 else x), y)


class Shelf:
    """One client's data part, ready to be cut into batches by position."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        augment: Augment,
        rng: np.random.Generator | None,
    ) -> None:
        self._source, self._indices, self._augment, self._rng = source, indices, augment, rng
        self.whole: Batch | None = None  # all of it, normalised
        size = len(indices) * int(np.prod(source.x.shape[1:]))
        if not augment and size <= _AT_ONCE:
            self.whole = source.batch(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, positions: np.ndarray) -> Batch:
        if self.whole is not None:
            at = torch.from_numpy(positions).to(self._source.device)
            return Batch(self.whole.x[at], self.whole.y[at])
        x, y = self._source.take(self._indices[positions])
        if self._augment and self._rng is not None:
            x = self._augment.apply(x, self._rng)
        return Batch(self._source.normalise(x), y)
