"""Files that are damaged, or claim to hold what they don't: a sentence, and no memory taken."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.data.catalog import load
from fedloom.data.partition import Partition
from fedloom.errors import FedloomError


def npy_header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    """The beginning of a NumPy array of this shape, without the array."""
    out = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()


def npz_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + body + chunk(b"IEND", b"")


def images_in(root: Path, content: bytes) -> Path:
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True, exist_ok=True)
        (root / label / "1.png").write_bytes(content)
    return root


@pytest.mark.parametrize("shape", [(10**12, 28, 28), (2**70,), (-1, 4), (10, 5)])
def test_an_array_that_its_file_cannot_hold_is_refused_by_its_header(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    file = npz_of(tmp_path / "x.npz", {"x": npy_header(shape) + bytes(40)})
    with pytest.raises(FedloomError, match=r"array x should have shape \(.*damaged"):
        load(file)
    with pytest.raises(FedloomError, match=r"Cannot read the partition .* should have shape"):
        Partition.load(file)


def test_what_could_never_fit_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = npz_of(tmp_path / "x.npz", {"x": npy_header((5, 1000)) + bytes(20_000)})
    out = io.BytesIO()
    Image.new("RGB", (100, 100)).save(out, "PNG")
    images = images_in(tmp_path / "pets", out.getvalue())
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2))
    with pytest.raises(FedloomError, match=r"array x of shape .* GB of memory, and this machine"):
        load(arrays)
    with pytest.raises(FedloomError, match=r"2 images of 100x100 .* Give the option size"):
        load(images)
    assert load(images, options={"size": 8}).shape == (3, 8, 8)


@pytest.mark.parametrize("side", [10_000, 200_000])
def test_an_image_that_says_it_is_giant_is_refused(tmp_path: Path, side: int) -> None:
    root = images_in(tmp_path, png_header(side, side))
    with pytest.raises(FedloomError, match=r"the image .*png: it has more than [\d,]+ pixels"):
        load(root, options={"size": 8})


def test_arrays_of_python_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2)), y=np.array([{}, 1], object))
    with pytest.raises(FedloomError, match="array y holds Python objects"):
        load(tmp_path / "x.npz")


def test_damage_of_any_kind_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Files cut short, and with wrong bytes anywhere: no other error, and no long one."""
    rng = random.Random(0)
    arrays, image = io.BytesIO(), io.BytesIO()
    np.savez_compressed(arrays, x=np.ones((20, 4)), y=np.arange(20) % 2)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(image, "PNG")
    told: list[str] = []
    for i in range(150):
        whole = (arrays if i % 2 else image).getvalue()
        content = bytearray(whole[: rng.randrange(len(whole))] if i % 3 == 0 else whole)
        for _ in range(4):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / "x.npz").write_bytes(content)
        try:
            load(tmp_path / "x.npz" if i % 2 else images_in(tmp_path / "pets", bytes(content)))
        except FedloomError as error:
            told.append(str(error))
    assert len(told) > 100
    assert max(map(len, told)) < 300 + 2 * len(str(tmp_path))


@pytest.mark.parametrize("content", ["[" * 100_000, "[[" + "9" * 5000 + "]]", "\x00", "[[1e3]]"])
def test_a_partition_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(FedloomError, match="Cannot read the partition"):
        Partition.load(tmp_path / "p.json")
