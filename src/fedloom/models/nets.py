"""The built-in networks: small, plain modules whose layer names make good part names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import FedloomError
from fedloom.models.norm import norm2d

Shape = tuple[int, int, int]


def _whole(name: str, value: int | Sequence[int]) -> list[int]:
    """Sizes as a list of whole numbers above 0; a single one may be given bare."""
    sizes = [value] if isinstance(value, int) else list(value) if _is_list(value) else [0]
    if not all(type(n) is int and n > 0 for n in sizes):
        raise FedloomError(
            f"{name}={value!r} is not valid: give whole numbers above 0, such as 200 or [200, 100]."
        )
    return sizes


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


class MLP(nn.Module):
    """Flatten → Linear → ReLU → … → Linear; S1's MNIST net is 784-100-10."""

    def __init__(self, shape: Shape, classes: int, hidden: int | Sequence[int] = (100,)) -> None:
        super().__init__()
        widths = [shape[0] * shape[1] * shape[2], *_whole("hidden", hidden)]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x)

    def exit_blocks(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Flatten(), layer, nn.ReLU()) for layer in self.hidden]


class LeNet(nn.Module):
    """S1's CIFAR-10 net: two 5×5 convolutions (6, 16) with pooling, then 120-84-classes."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        c, h, w = shape
        side = [((n - 4) // 2 - 4) // 2 for n in (h, w)]
        if min(side) < 1:
            raise FedloomError(
                f"lenet needs images of at least 16×16 pixels; these are {h}×{w}. Use --model mlp."
            )
        self.conv1 = nn.Conv2d(c, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side[0] * side[1], 120)
        self.fc2 = nn.Linear(120, 84)
        self.out = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Pooling before the ReLU gives the same and leaves a quarter of the work to it.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.out(x)

    def exit_blocks(self) -> list[nn.Module]:
        convolutions = (self.conv1, self.conv2)
        return [
            *(nn.Sequential(conv, nn.MaxPool2d(2), nn.ReLU()) for conv in convolutions),
            *(nn.Sequential(nn.Flatten(), fc, nn.ReLU()) for fc in (self.fc1, self.fc2)),
        ]


class ConvBlock(nn.Module):
    """Convolution, norm, pooling where wanted, ReLU."""

    def __init__(self, c_in: int, c_out: int, norm: str, pool: bool) -> None:
        super().__init__()
        self.pool = pool
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm = norm2d(norm, c_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.relu(F.max_pool2d(x, 2) if self.pool else x)


class Conv4(nn.Module):
    """S2's 4-block CNN: (conv, norm, ReLU, pool) ×4, linear. A map of one pixel is not pooled, and
    of a larger one that is left in the end the mean is taken."""

    def __init__(
        self,
        shape: Shape,
        classes: int,
        channels: Sequence[int] = (64, 128, 256, 512),
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if min(shape[1:]) < 8:
            raise FedloomError(
                f"conv4 needs images of at least 8×8 pixels; these are {shape[1]}×{shape[2]}. "
                "Use --model mlp."
            )
        widths = [shape[0], *_whole("channels", channels)]
        side = min(shape[1:])
        self.blocks = nn.ModuleList(
            ConvBlock(a, b, norm, pool=side >> i > 1) for i, (a, b) in enumerate(pairwise(widths))
        )
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))

    def exit_blocks(self) -> list[nn.Module]:
        return list(self.blocks)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016, the basic block)."""

    def __init__(self, c_in: int, c_out: int, stride: int, norm: str) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=bias)
        self.norm1 = norm2d(norm, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=bias)
        self.norm2 = norm2d(norm, c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=bias), norm2d(norm, c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of basic blocks; small images (up to 64 pixels) get the 3×3 CIFAR stem."""

    def __init__(
        self,
        shape: Shape,
        classes: int,
        depths: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        (width,) = _whole("width", width)
        small = max(shape[1:]) <= 64
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv = nn.Conv2d(shape[0], width, kernel, stride, kernel // 2, bias=norm == "none")
        self.norm = norm2d(norm, width)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        c_in = width
        for i, depth in enumerate(depths):
            c_out = width * 2**i
            blocks = [
                ResidualBlock(c_in if j == 0 else c_out, c_out, 2 if i and j == 0 else 1, norm)
                for j in range(depth)
            ]
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            c_in = c_out
        self.stages = len(depths)
        self.out = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        for i in range(self.stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.out(torch.mean(x, (2, 3)))

    def exit_blocks(self) -> list[nn.Module]:
        stages = [self.get_submodule(f"layer{i + 1}") for i in range(self.stages)]
        return [nn.Sequential(self.conv, self.norm, nn.ReLU(), self.pool, stages[0]), *stages[1:]]


class TextGRU(nn.Module):
    """Tokens, one by one, through a GRU: an answer at `each` place (what follows), or one at the
    end (what the text is)."""

    def __init__(
        self,
        shape: Shape,
        classes: int,
        vocabulary: int,
        each: bool = False,
        embed: int = 32,
        hidden: int = 96,
    ) -> None:
        super().__init__()
        (embed,), (hidden,) = _whole("embed", embed), _whole("hidden", hidden)
        self.each = each
        self.embed = nn.Embedding(vocabulary, embed)
        self.gru = nn.GRU(embed, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(x.flatten(1)))
        return self.out(states if self.each else states[:, -1])


class UNet(nn.Module):
    """A small U-Net: two convolutions, two more on half the pixels, and both together for every
    pixel."""

    def __init__(self, shape: Shape, classes: int, width: int = 16, norm: str = "none") -> None:
        super().__init__()
        (width,) = _whole("width", width)
        if min(shape[1:]) < 2 or shape[1] % 2 or shape[2] % 2:
            raise FedloomError(
                "unet halves images, so they need an even number of pixels a side; these have "
                f"{shape[1]}×{shape[2]}. Give another data_options.size, or a model of your own."
            )
        self.down1 = ConvBlock(shape[0], width, norm, pool=False)
        self.down2 = ConvBlock(width, width, norm, pool=False)
        self.low1 = ConvBlock(width, 2 * width, norm, pool=False)
        self.low2 = ConvBlock(2 * width, 2 * width, norm, pool=False)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join = ConvBlock(2 * width, width, norm, pool=False)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down2(self.down1(x))
        coarse = self.low2(self.low1(F.max_pool2d(fine, 2)))
        return self.out(self.join(torch.cat([fine, self.up(coarse)], 1)))
