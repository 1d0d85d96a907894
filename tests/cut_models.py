"""Models that sub-models are cut out of in tests: what people bring, small."""

import torch
from torch import nn
from torch.nn import functional as F


class ViT(nn.Module):
    """A Vision Transformer: patches, a class token, positions, blocks of torch's own attention."""

    def __init__(self, shape, classes, width=16, heads=4, depth=2, patch=4):
        super().__init__()
        count = (shape[1] // patch) * (shape[2] // patch)
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) / 4)
        self.positions = nn.Parameter(torch.randn(1, count + 1, width) / 4)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True,
                                           norm_first=True)  # fmt: skip
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.out(self.norm(self.blocks(x)[:, 0]))


class OwnAttention(nn.Module):
    """Attention as timm writes it: one product for queries, keys and values, then a reshape."""

    def __init__(self, width, size):
        super().__init__()
        self.size = size
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, -1, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.size**-0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """The rows of an image as positions; attention of one's own, and a gated MLP."""

    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.into = nn.Linear(shape[0] * shape[2], width)
        self.look, self.first = OwnAttention(width, 4), nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 48), nn.Linear(24, width)
        self.second, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.into(x.transpose(1, 2).flatten(2))
        x = x + self.look(self.first(x))
        x = x + self.back(F.glu(self.wide(self.second(x))))
        return self.out(x.mean(1))


class DenseNet(nn.Module):
    """A dense block: every layer reads all that was made before it."""

    def __init__(self, shape, classes, growth=6, layers=3):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 8, 3, padding=1)
        sizes = [8 + growth * i for i in range(layers + 1)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in sizes)
        self.convs = nn.ModuleList(nn.Conv2d(n, growth, 3, padding=1) for n in sizes[:-1])
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.out(F.relu(self.norms[-1](x)).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by pixel shuffling, and a skip; instance norm."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 8, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.down = nn.Conv2d(8, 32, 3, 2, 1)
        self.up = nn.PixelShuffle(2)
        self.join = nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        y = self.up(F.relu(self.down(x)))
        return self.out(F.relu(self.join(torch.cat([x, y], 1))).mean((2, 3)))


class Shuffle(nn.Module):
    """ShuffleNet's unit: half of the channels pass, the others are convolved; then a shuffle."""

    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 16, 3, padding=1)
        self.branch = nn.Sequential(
            nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1),
        )  # fmt: skip
        self.shuffle = nn.ChannelShuffle(2)
        self.grouped = nn.Conv2d(16, 8, 1, groups=2)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        left, right = F.relu(self.stem(x)).chunk(2, 1)
        x = self.shuffle(torch.cat([left, self.branch(right)], 1))
        return self.out(F.relu(self.grouped(x)).mean((2, 3)))


class Inception(nn.Module):
    """Branches of different widths side by side, flattened."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Conv2d(shape[0], 6, 1), nn.Conv2d(shape[0], 10, 3, padding=1)
        self.join = nn.Conv2d(16, 8, 3, 4, 1)
        side = [(n - 1) // 4 + 1 for n in shape[1:]]
        self.out = nn.Linear(8 * side[0] * side[1] + 6, classes)

    def forward(self, x):
        a, b = F.relu(self.a(x)), F.relu(self.b(x))
        x = F.relu(self.join(torch.cat([a, b], 1))).flatten(1)
        return self.out(torch.cat([x, a.mean((2, 3))], 1))


class Recurrent(nn.Module):
    """The rows of an image as time; the last hidden state, or the mean of all outputs."""

    kind, layers, both = nn.LSTM, 1, False

    def __init__(self, shape, classes, hidden=12):
        super().__init__()
        self.into = nn.Linear(shape[0] * shape[2], 10)
        self.cells = self.kind(10, hidden, self.layers, batch_first=True, bidirectional=self.both)
        self.out = nn.Linear(hidden * (1 + self.both), classes)

    def forward(self, x):
        outputs, state = self.cells(F.relu(self.into(x.transpose(1, 2).flatten(2))))
        if self.both:
            return self.out(outputs.mean(1))
        return self.out((state[0] if isinstance(state, tuple) else state)[-1])


class GRU(Recurrent):
    kind, layers, both = nn.GRU, 2, True


class Tokens(nn.Module):
    """Pixels as words."""

    def __init__(self, shape, classes):
        super().__init__()
        self.words = nn.Embedding(256, 12)
        self.cells = nn.LSTM(12, 8, batch_first=True)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.cells(self.words(x.flatten(1)))[0].mean(1))


MODELS = {
    "a ViT": ViT, "a transformer of one's own": Transformer, "a DenseNet": DenseNet,
    "a U-Net": UNet, "a ShuffleNet": Shuffle, "an Inception": Inception, "an LSTM": Recurrent,
    "a GRU": GRU,
}  # fmt: skip
