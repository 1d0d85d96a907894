"""Data by name, by path and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.data.catalog import _scikit_digits, describe, load, names
from fedloom.data.dataset import Dataset
from fedloom.errors import FedloomError


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data, (_, y) = load("digits"), load_digits(return_X_y=True)
    assert np.array_equal(np.bincount(data.y) + np.bincount(data.y_test), np.bincount(y))
    assert np.array_equal(_scikit_digits()[0], load_digits().data)


def test_digits_needs_no_download_and_never_changes() -> None:
    data = load("digits")
    assert (len(data.x), len(data.x_test)) == (1438, 359)
    assert (data.shape, data.n_classes, data.x.dtype) == ((1, 8, 8), 10, np.uint8)
    assert data.x[slice(None)].max() == 255
    assert np.array_equal(load("digits").y_test, data.y_test)


HERE = {"digits", "breast-cancer", "wine", "diabetes", "harbour", "synthetic"}


def test_published_sets_are_never_downloaded_by_loading(cache: Path) -> None:
    for name in set(names()) - HERE:
        with pytest.raises(FedloomError, match=f"Run: fedloom data fetch {name}"):
            load(name)
    assert not cache.exists()


def test_the_catalogue_lists_every_name(cache: Path) -> None:
    rows = describe()
    assert tuple(row["name"] for row in rows) == names()
    assert names()[0] == "digits"
    here = {row["name"] for row in rows if row["here"] == "yes"}
    assert here == HERE
    assert next(row["size"] for row in rows if row["name"] == "cifar10") == "184 MB"


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(FedloomError, match=r"Did you mean 'mnist'.*path of a .csv, .parquet"):
        load("mnits")


@pytest.mark.parametrize("source", ["nowhere.npz", "./nowhere", "a/b"])
def test_a_path_that_is_not_there_is_told(source: str) -> None:
    with pytest.raises(FedloomError, match="There is no file or folder"):
        load(source)


def test_other_files_and_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.pdf").write_text("hello")
    with pytest.raises(FedloomError, match=r"neither a table .*nor a folder of images"):
        load(tmp_path / "notes.pdf")
    with pytest.raises(FedloomError, match="not int"):
        load(5)


@pytest.mark.parametrize("suffix", ["", "_train"])
def test_npz_files_with_either_names(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "mine.npz"
    arrays = {f"x{suffix}": np.zeros((10, 4, 4), np.uint8), f"y{suffix}": np.array(list("ab") * 5)}
    np.savez(path, **arrays)
    data = load(path, options={"test_share": "0.4"})
    assert (data.name, data.classes, len(data.held_out)) == ("mine", ("a", "b"), 4)
    np.savez(path, **arrays, x_test=np.zeros((2, 4, 4), np.uint8), y_test=np.array(["b", "b"]))
    assert load(str(path)).y_test.tolist() == [1, 1]


def test_npz_files_without_data_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", z=np.zeros(3))
    with pytest.raises(FedloomError, match="has the arrays z; it needs x and y"):
        load(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK nothing")
    with pytest.raises(FedloomError, match="Cannot read"):
        load(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.zeros(3), y=np.array([{}, 1, 2], object))
    with pytest.raises(FedloomError, match="Cannot read"):
        load(tmp_path / "c.npz")


def test_a_folder_of_images_with_names_of_classes(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (6, 6), (i, i, i)).save(tmp_path / "pets" / label / f"{i}.png")
    data = load(tmp_path / "pets", options={"size": 3})
    assert (data.name, data.classes, data.shape) == ("pets", ("cat", "dog"), (3, 3, 3))
    assert (len(data.x), len(data.held_out)) == (10, 2)
    with pytest.raises(FedloomError, match=r"Unknown option of a folder of images 'sise'.*'size'"):
        load(tmp_path / "pets", options={"sise": 3})


def test_arrays_and_data_sets_are_taken_as_they_are(small: Dataset) -> None:
    assert load(small) is small
    data = load((np.zeros((10, 2)), np.arange(10) % 2))
    assert (len(data.x), len(data.held_out)) == (10, 2)
    data = load((np.zeros((10, 2)), np.arange(10) % 2, np.zeros((3, 2)), [0, 1, 1]))
    assert len(data.x_test) == 3
    with pytest.raises(FedloomError, match="3 arrays were given"):
        load((1, 2, 3))
    with pytest.raises(FedloomError, match="Unknown option of a Dataset 'seed'"):
        load(small, options={"seed": 1})
