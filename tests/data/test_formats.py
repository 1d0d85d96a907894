"""Readers of published formats, on small files in exactly these formats."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.data.formats import (
    read_cifar10,
    read_cifar100,
    read_idx,
    read_image_folder,
    read_tiny_imagenet,
)
from fedloom.errors import FedloomError


def save_image(
    path: Path, value: int | tuple[int, int, int], size: tuple[int, int] = (4, 3)
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(path)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_plain_or_gzipped(
    tmp_path: Path, to_idx: Callable[[np.ndarray], bytes], packed: bool
) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    content = to_idx(array)
    (tmp_path / "file").write_bytes(gzip.compress(content) if packed else content)
    assert np.array_equal(read_idx(tmp_path / "file"), array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "should hold 40 bytes .* it has 39"),
        (lambda content: content + b"x", "it has 41"),
        (lambda content: b"<html>not found</html>", "not an IDX file"),
        (lambda content: b"", "not an IDX file"),
    ],
)
def test_other_files_are_no_idx_files(
    tmp_path: Path,
    to_idx: Callable[[np.ndarray], bytes],
    change: Callable[[bytes], bytes],
    message: str,
) -> None:
    (tmp_path / "file").write_bytes(change(to_idx(np.zeros((2, 3, 4)))))
    with pytest.raises(FedloomError, match=message):
        read_idx(tmp_path / "file")


def test_cifar10_records_are_a_label_and_three_planes(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), np.uint8)
    labels = [7, 0, 9]
    records = (
        bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)
    )
    (tmp_path / "batch.bin").write_bytes(b"".join(records))
    x, y = read_cifar10(tmp_path / "batch.bin")
    assert np.array_equal(x, images)
    assert y.tolist() == labels


def test_cifar100_records_have_a_coarse_and_a_fine_label(tmp_path: Path) -> None:
    image = np.arange(3072).astype(np.uint8)
    (tmp_path / "train.bin").write_bytes(bytes([4, 99]) + image.tobytes())
    x, coarse, fine = read_cifar100(tmp_path / "train.bin")
    assert (coarse.tolist(), fine.tolist()) == ([4], [99])
    assert np.array_equal(x.ravel(), image)


@pytest.mark.parametrize("size", [0, 3072, 3073 + 1])
def test_a_cut_cifar_file_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "batch.bin").write_bytes(bytes(size))
    with pytest.raises(FedloomError, match="not a CIFAR binary file"):
        read_cifar10(tmp_path / "batch.bin")


def test_a_folder_for_every_class(tmp_path: Path) -> None:
    save_image(tmp_path / "dog" / "2.png", 20)
    save_image(tmp_path / "dog" / "1.png", 10)
    save_image(tmp_path / "cat" / "a.PNG", 30)
    (tmp_path / "dog" / "readme.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    read = read_image_folder(tmp_path)
    assert read.classes == ("cat", "dog")
    assert read.x.shape == (3, 1, 3, 4)
    assert read.x[:, 0, 0, 0].tolist() == [30, 10, 20]
    assert read.y.tolist() == [0, 1, 1]
    assert len(read.x_test) == 0


@pytest.mark.parametrize("part", ["test", "val"])
def test_a_train_and_a_test_folder(tmp_path: Path, part: str) -> None:
    for label in "ab":
        save_image(tmp_path / "train" / label / "1.png", 1)
    save_image(tmp_path / part / "b" / "1.png", 2)
    read = read_image_folder(tmp_path)
    assert (read.y.tolist(), read.y_test.tolist()) == ([0, 1], [1])
    assert read.x_test[0, 0, 0, 0] == 2


def test_train_may_be_the_name_of_a_class(tmp_path: Path) -> None:
    for label in ("train", "tram"):
        save_image(tmp_path / label / "1.png", 1)
    assert read_image_folder(tmp_path).classes == ("train", "tram")


def test_one_coloured_image_makes_all_rgb(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", 9)
    save_image(tmp_path / "a" / "2.png", (1, 2, 3))
    read = read_image_folder(tmp_path)
    assert read.x[:, :, 0, 0].tolist() == [[9, 9, 9], [1, 2, 3]]


def test_images_of_several_sizes_need_the_option_size(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", 5, (4, 3))
    save_image(tmp_path / "a" / "2.png", 5, (8, 6))
    with pytest.raises(FedloomError, match=r"is 4x3 but .*2.png is 8x6.*size=32"):
        read_image_folder(tmp_path)
    assert read_image_folder(tmp_path, size=(2, 5)).x.shape == (2, 1, 2, 5)


def test_folders_that_are_no_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match="no class folders"):
        read_image_folder(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(FedloomError, match="holds no images"):
        read_image_folder(tmp_path)
    (tmp_path / "a" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(FedloomError, match=r"Cannot read the image .*1.png"):
        read_image_folder(tmp_path)
    Image.new("I;16", (4, 3)).save(tmp_path / "a" / "1.png")
    with pytest.raises(FedloomError, match="more than 8 bits"):
        read_image_folder(tmp_path)


def test_a_test_class_without_training_images_is_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "train" / "a" / "1.png", 1)
    save_image(tmp_path / "test" / "b" / "1.png", 1)
    with pytest.raises(FedloomError, match="no training images"):
        read_image_folder(tmp_path)


def test_tiny_imagenet_is_read_in_the_order_of_its_ids(tmp_path: Path) -> None:
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    (tmp_path / "words.txt").write_text("n00\tentity\nn01\tgoldfish, carp\nn02\tshark\n")
    for wnid, value in (("n01", (10, 0, 0)), ("n02", (20, 0, 0))):
        save_image(tmp_path / "train" / wnid / "images" / f"{wnid}_0.JPEG", value, (64, 64))
    save_image(tmp_path / "train" / "n01" / "images" / "n01_1.JPEG", 30, (64, 64))  # some are grey
    save_image(tmp_path / "val" / "images" / "val_0.JPEG", (40, 0, 0), (64, 64))
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t44\t43\n")
    read = read_tiny_imagenet(tmp_path)
    assert read.classes == ("shark", "goldfish, carp")
    assert (read.y.tolist(), read.y_test.tolist()) == ([0, 1, 1], [1])
    assert read.x.shape == (3, 3, 64, 64)
    assert np.allclose(read.x[:, 0, 5, 5], [20, 10, 30], atol=3)  # JPEG is not exact
    assert np.allclose(read.x_test[0, 0, 5, 5], 40, atol=3)


def test_another_folder_is_not_tiny_imagenet(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match=r"wnids.txt is missing"):
        read_tiny_imagenet(tmp_path)
