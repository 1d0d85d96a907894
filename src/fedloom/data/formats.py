"""Readers of the file formats in which image data sets are published.

Each takes a path and gives uint8 images (N, C, H, W) and their labels as the file numbers them.
A file that is not what it should be is refused with its name and what is wrong with it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fedloom.errors import FedloomError

if TYPE_CHECKING:
    from PIL import Image

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_CIFAR_SHAPE = (3, 32, 32)
_TINY_SHAPE = (3, 64, 64)


class Folder(NamedTuple):
    """Images read from a folder; the test part is empty where the folder has none."""

    x: Bytes
    y: Numbers
    x_test: Bytes
    y_test: Numbers
    classes: tuple[str, ...]


def read_idx(path: Path) -> Bytes:
    """An IDX file of bytes, the format of MNIST and its kin, plain or gzipped."""
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise FedloomError(f"{path} is not an IDX file of bytes.")
    header = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:header], ">u4").tolist())
    if len(content) != header + math.prod(shape):
        raise FedloomError(
            f"{path} should hold {header + math.prod(shape)} bytes for its shape {shape}; "
            f"it has {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_cifar10(path: Path) -> tuple[Bytes, Bytes]:
    """Images and labels of one CIFAR-10 binary batch: records of a label byte and the image."""
    labels, images = _cifar_records(path, 1)
    return images, labels[:, 0]


def read_cifar100(path: Path) -> tuple[Bytes, Bytes, Bytes]:
    """Images, coarse and fine labels of a CIFAR-100 binary file: two label bytes a record."""
    labels, images = _cifar_records(path, 2)
    return images, labels[:, 0], labels[:, 1]


def _cifar_records(path: Path, label_bytes: int) -> tuple[Bytes, Bytes]:
    record = label_bytes + math.prod(_CIFAR_SHAPE)
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % record:
        raise FedloomError(
            f"{path} is not a CIFAR binary file: its {len(content)} bytes are not a whole "
            f"number of {record}-byte records."
        )
    rows = content.reshape(-1, record)
    return rows[:, :label_bytes], rows[:, label_bytes:].reshape(-1, *_CIFAR_SHAPE)


def read_image_folder(root: Path, size: tuple[int, int] | None = None) -> Folder:
    """Images as root/CLASS/image, or root/train/CLASS/image with root/test (or root/val).

    Images are grey if all of them are, else RGB. They must be of one size (height, width)
    unless `size` is given, to which they are then scaled.
    """
    train, test = root, None
    if _subfolders(root / "train"):  # else "train" may be a class, with pictures of trains
        train = root / "train"
        test = next((root / part for part in ("test", "val") if _subfolders(root / part)), None)
    classes = [folder.name for folder in _subfolders(train)]
    if not classes:
        raise FedloomError(f"{root} has no class folders. Expected {root}/CLASS/image.png.")
    files, y = _labelled(train, classes)
    test_files, y_test = _labelled(test, classes) if test else ([], y[:0])
    shape = _common_shape([*files, *test_files], size)
    return Folder(_decode(files, shape), y, _decode(test_files, shape), y_test, tuple(classes))


def read_images(
    pictures: Sequence[Path | Image.Image], size: tuple[int, int] | None = None
) -> Bytes:
    """Pictures, in files or opened by Pillow already: grey if all of them are, else RGB."""
    return _decode(pictures, _common_shape(pictures, size))


def class_folders(root: Path) -> tuple[list[Path], list[str]]:
    """The images in root/CLASS/image, and their classes."""
    classes = [folder.name for folder in _subfolders(root)]
    if not classes:
        raise FedloomError(f"{root} has no class folders. Expected {root}/CLASS/image.png.")
    files, y = _labelled(root, classes)
    return files, [classes[label] for label in y]


def read_tiny_imagenet(root: Path) -> Folder:
    """The folder tiny-imagenet-200; its validation images are the test part."""
    try:
        ids = (root / "wnids.txt").read_text().split()
        word_lines = (root / "words.txt").read_text().splitlines()
        notes = (root / "val" / "val_annotations.txt").read_text().splitlines()
    except FileNotFoundError as error:
        raise FedloomError(f"{root} is not Tiny ImageNet: {error.filename} is missing.") from None
    groups = [_images_in(root / "train" / wnid / "images") for wnid in ids]
    y = np.repeat(np.arange(len(ids)), [len(group) for group in groups])
    test = [note.split("\t")[:2] for note in notes if note]  # file, wnid, and a box we leave
    number = {wnid: label for label, wnid in enumerate(ids)}
    words = dict(line.split("\t", 1) for line in word_lines if line)
    return Folder(
        _decode([file for group in groups for file in group], _TINY_SHAPE),
        y,
        _decode([root / "val" / "images" / file for file, _ in test], _TINY_SHAPE),
        np.array([number[wnid] for _, wnid in test], np.int64),
        tuple(words.get(wnid, wnid) for wnid in ids),
    )


def _subfolders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))


def _images_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise FedloomError(f"{folder} holds no images ({', '.join(IMAGE_SUFFIXES)}).")
    return files


def _labelled(root: Path, classes: list[str]) -> tuple[list[Path], Numbers]:
    files: list[Path] = []
    labels: list[int] = []
    for folder in _subfolders(root):
        if folder.name not in classes:
            raise FedloomError(f"{folder} is a class that has no training images.")
        images = _images_in(folder)
        files += images
        labels += [classes.index(folder.name)] * len(images)
    return files, np.array(labels, np.int64)


def _common_shape(
    files: Sequence[Path | Image.Image], size: tuple[int, int] | None
) -> tuple[int, int, int]:
    """(C, H, W) for all these images: grey if all are, and their one size unless it is given."""
    sizes: dict[tuple[int, int], Path | Image.Image] = {}
    modes: set[str] = set()
    for file in files:
        with _opened(file) as image:
            modes.add(image.mode)
            sizes.setdefault(image.size, file)
    if size is None and len(sizes) > 1:
        (one, first), (two, second), *_ = sizes.items()
        raise FedloomError(
            f"{first} is {one[0]}x{one[1]} but {second} is {two[0]}x{two[1]} (width x height). "
            "Give the option size, such as size=32, to scale all images."
        )
    width, height = next(iter(sizes))
    if size is not None:
        height, width = size
    return (1 if modes <= {"1", "L", "LA"} else 3), height, width


def _decode(files: Sequence[Path | Image.Image], shape: tuple[int, int, int]) -> Bytes:
    channels, height, width = shape
    try:
        what = f"{len(files)} images of {width}x{height} and {channels} channel(s)"
        check_memory(what, len(files) * math.prod(shape))
    except ValueError as error:
        advice = "Give the option size, such as size=32, to scale all images."
        raise FedloomError(f"{error} {advice}") from None
    images = np.empty((len(files), *shape), np.uint8)
    for row, file in zip(images, files, strict=True):
        with _opened(file) as image:
            pixels = image.convert("L" if channels == 1 else "RGB")
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height))
        row[:] = np.asarray(pixels).reshape(height, width, channels).transpose(2, 0, 1)
    return images


@contextmanager
def _opened(file: Path | Image.Image) -> Iterator[Image.Image]:
    from PIL import Image

    if isinstance(file, Image.Image):
        yield file
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(file)
        with image:
            if image.mode.startswith(("I", "F")):
                raise FedloomError(f"{file} has more than 8 bits a pixel. Convert it to 8 bits.")
            yield image
    except FedloomError:
        raise
    except Exception as error:  # Pillow has many errors for damage and false headers
        giant = isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError)
        why = (
            f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels, which is the limit. Make it "
            "smaller."
            if giant
            else reason(error)
        )
        raise FedloomError(f"Cannot read the image {file}: {why}") from None


def reason(error: Exception) -> str:
    """What a reader complains of, as the end of a sentence that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        text = "there is no such file"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror[:1].lower() + error.strerror[1:]
    elif isinstance(error, json.JSONDecodeError):
        text = f"it is not valid JSON from line {error.lineno}, column {error.colno} on"
    elif isinstance(error, UnicodeDecodeError):
        text = "it is not text"
    return (text if len(text) <= 240 else f"{text[:240]}...").rstrip(".") + "."


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a NumPy .npz file; nothing in it is ever run.

    What is wrong with a file is a `ValueError` or `OSError`. Headers are read before arrays: one
    that asks for more than there is costs no memory.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError("it is not a .npz file, as numpy.savez writes them.")
    held = {}
    try:
        with zipfile.ZipFile(path) as file:
            for entry in file.infolist():
                name, ending = os.path.splitext(entry.filename)
                if ending != ".npy":
                    continue
                with file.open(entry) as member:
                    _check_header(name, member, entry.file_size)
                with file.open(entry) as member:
                    held[name] = np.lib.format.read_array(member, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy have many errors
        raise ValueError(reason(error)) from None
    return held


def _check_header(name: str, member: IO[bytes], size: int) -> None:
    """Refuse an array that its file can't hold, or the machine."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0
    shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(member)
    if dtype.hasobject:
        raise ValueError(f"its array {name} holds Python objects, not numbers or text.")
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or wanted > size - member.tell():
        raise ValueError(
            f"its array {name} should have shape {shape} and type {dtype}, {wanted} bytes, but "
            f"there are {size}: the file is damaged."
        )
    check_memory(f"its array {name} of shape {shape} and type {dtype}", wanted)


def check_memory(what: str, size: int) -> None:
    """Refuse what could never fit into memory, before any of it is allocated."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that doesn't say
        return
    if size > there:
        raise ValueError(
            f"{what} needs {size / 1e9:.3g} GB of memory, and this machine has {there / 1e9:.3g}."
        )
