"""What a data set promises, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.dataset import Dataset, from_arrays
from fedloom.data.images import Joined, channel_scale, laid_out, positions
from fedloom.errors import FedloomError


@pytest.mark.parametrize(
    ("given_shape", "kept_shape"),
    [((10, 3, 4, 5), (3, 4, 5)), ((10, 4, 5), (1, 4, 5)), ((10, 7), (1, 1, 7))],
)
def test_images_rows_and_vectors_are_all_accepted(
    given_shape: tuple[int, ...], kept_shape: tuple[int, ...]
) -> None:
    data = from_arrays(np.zeros(given_shape), np.arange(10) % 2)
    assert data.shape == kept_shape


@pytest.mark.parametrize(
    ("dtype", "kept"), [("uint8", "uint8"), ("i8", "i4"), ("u2", "i4"), ("f8", "f4"), ("?", "f4")]
)
def test_bytes_and_integers_are_kept_and_other_numbers_become_float32(
    dtype: str, kept: str
) -> None:
    assert from_arrays(np.ones((10, 3), dtype), np.arange(10) % 2).x.dtype == np.dtype(kept)
    test = np.ones((2, 3), np.uint8), [0, 1]
    joined = from_arrays(np.ones((10, 3), dtype), np.arange(10) % 2, *test)
    assert joined.x.dtype == joined.x_test.dtype == np.dtype(kept)


def test_integers_beyond_32_bits_become_float32() -> None:
    assert from_arrays(np.full((10, 3), 2**40), np.arange(10) % 2).x.dtype == np.float32


def test_labels_of_any_kind_are_numbered_in_order_and_named() -> None:
    data = from_arrays(np.zeros((4, 2)), ["dog", "cat", "dog", "eel"], test_share=0)
    assert data.classes == ("cat", "dog", "eel")
    assert data.y.tolist() == [1, 0, 1, 2]
    assert data.y.dtype == np.int64
    mixed = from_arrays(np.zeros((3, 2)), [3, "three", (3,)], test_share=0)
    assert sorted(mixed.classes) == ["(3,)", "3", "three"]


def test_test_labels_share_the_numbers_of_training_labels() -> None:
    data = from_arrays(np.zeros((2, 2)), ["b", "a"], np.zeros((2, 2)), ["c", "b"])
    assert data.classes == ("a", "b", "c")
    assert (data.y.tolist(), data.y_test.tolist()) == ([1, 0], [2, 1])


def test_a_stratified_share_is_held_out_and_the_seed_decides_which() -> None:
    x, y = np.arange(100)[:, None], np.repeat([0, 1], [80, 20])
    data = from_arrays(x, y, test_share=0.25, seed=1)
    assert np.bincount(data.y[data.held_out]).tolist() == [20, 5]
    assert sorted([*data.held_out, *data.training_rows]) == list(range(100))
    again, other = (from_arrays(x, y, test_share=0.25, seed=s) for s in (1, 2))
    assert np.array_equal(again.held_out, data.held_out)
    assert not np.array_equal(other.held_out, data.held_out)


def test_rows_keep_their_order_held_out_or_pooled() -> None:
    x, y = np.arange(100, dtype=np.uint8)[:, None], np.repeat([0, 1], [80, 20])
    data = from_arrays(x, y)
    for each in (data, data.pooled()):
        assert np.array_equal(each.x[slice(None)].ravel(), x.ravel())
        assert np.array_equal(each.y, y)
    assert len(data.pooled().held_out) == len(data.pooled().x_test) == 0


def test_held_out_rows_do_not_count_in_mean_and_std() -> None:
    x, y = np.random.default_rng(0).normal(size=(50, 1, 2, 2)), np.arange(50) % 2
    data = from_arrays(x, y)
    rest = from_arrays(x[data.training_rows], y[data.training_rows], test_share=0)
    assert (data.mean, data.std) == (rest.mean, rest.std)


def test_holding_out_never_takes_the_last_image_of_a_class() -> None:
    data = from_arrays(np.zeros((3, 2)), ["a", "b", "b"], test_share=0.99)
    assert np.bincount(data.y[data.training_rows]).tolist() == [1, 1]


def test_columns_of_a_table_have_a_mean_and_std_of_their_own() -> None:
    """Also where columns are of quite different units, or constant."""
    rng = np.random.default_rng(0)
    units, shifts = np.array([1.0, 1e-9, 1e6, 0.0]), np.array([0.0, 0.0, 1e8, 7.0])
    table = rng.normal(size=(200, 4)) * units + shifts
    data = from_arrays(table, np.arange(200) % 2, test_share=0)
    assert len(data.mean) == len(data.std) == 4
    fed = (data.x[slice(None)][:, 0, 0] - np.array(data.mean)) / np.array(data.std)
    np.testing.assert_allclose(fed.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(fed.std(0), [1, 1, 1, 0], atol=1e-5)
    assert len(from_arrays(table[:, None, :], np.arange(200) % 2).mean) == 1  # an image


@pytest.mark.parametrize("y", [[0.0, 1.0, 2.0, 1.0], np.array([0, 1, 2, 1], np.float32)])
def test_whole_floats_are_classes(y: object) -> None:
    data = from_arrays(np.zeros((4, 2)), y, test_share=0)  # type: ignore[arg-type]
    assert (data.classes, data.y.tolist()) == (("0", "1", "2"), [0, 1, 2, 1])


def test_mean_and_std_normalise_the_training_images() -> None:
    rng = np.random.default_rng(0)
    for x in (rng.integers(0, 256, (50, 3, 4, 4), np.uint8), rng.normal(7, 3, (50, 3, 4, 4))):
        data = from_arrays(x, np.arange(50) % 2, test_share=0)
        unit = 255 if data.x.dtype == np.uint8 else 1
        mean, std = np.array(data.mean)[:, None, None], np.array(data.std)[:, None, None]
        fed = (data.x[slice(None)] / unit - mean) / std
        np.testing.assert_allclose(fed.mean(axis=(0, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(fed.std(axis=(0, 2, 3)), 1, atol=1e-5)


def test_a_constant_channel_is_centred_and_not_divided_by_zero() -> None:
    assert channel_scale(np.full((5, 1, 2, 2), 51, np.uint8)) == ((0.2,), (1.0,))


def test_pooling_joins_train_and_test_without_copying(small: Dataset) -> None:
    pooled = small.pooled()
    assert isinstance(pooled.x, Joined)
    assert (len(pooled.x), len(pooled.x_test), len(pooled.y)) == (500, 0, 500)
    at = np.array([0, 499, 400, 399, 0])
    whole = np.concatenate([small.x[slice(None)], small.x_test[slice(None)]])
    assert np.array_equal(pooled.x[at], whole[at])
    assert np.array_equal(pooled.y[at], np.concatenate([small.y, small.y_test])[at])
    assert pooled.pooled() is pooled


@settings(deadline=None)
@given(st.lists(st.integers(-7, 6)), st.integers(0, 7))
def test_joined_images_index_like_one_array(at: list[int], cut: int) -> None:
    whole = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1)
    joined = Joined(whole[:cut], whole[cut:])
    index = np.array(at, np.int64)
    assert np.array_equal(joined[index], whole[index])
    assert np.array_equal(joined[slice(1, None, 2)], whole[1::2])
    assert np.array_equal(joined[np.arange(7) % 2 == 0], whole[::2])  # type: ignore[index]


def test_an_index_outside_the_images_is_an_error() -> None:
    with pytest.raises(IndexError, match="outside a set of 3 images"):
        positions(np.array([0, 3]), 3)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), [0, 1], "number 2, but there are 3 samples"),
        (np.zeros((0, 2)), [], "no training samples"),
        (np.zeros((2, 2, 2, 2, 2)), [0, 1], "give .N, C, H, W."),
        (np.zeros(2), [0, 1], "give .N, C, H, W."),
        (np.array([[0.0, np.nan], [0, 0]]), [0, 1], "NaN or infinity, first in sample 0"),
        (np.array([[0.0, 0], [0, 1e300]]), [0, 1], "NaN or infinity, first in sample 1"),
        (np.array([["a"], ["b"]]), [0, 1], "must be numbers"),
        (np.zeros((2, 2)), np.eye(2), r"argmax\(1\)"),
        (np.zeros((2, 2)), [0.0, np.nan], "labels are NaN"),
        (np.zeros((2, 2)), [1, np.inf], "not whole numbers, such as inf"),
        (np.zeros((2, 2)), [{}, {}], "must be numbers or names"),
        (np.zeros((2, 2)), [[0, 1], [0]], "one per sample"),
        (np.zeros(()), [0], "give .N, C, H, W."),
        (np.zeros((2, 0)), [0, 1], "give .N, C, H, W."),
    ],
)
def test_arrays_that_are_no_data_are_refused(x: np.ndarray, y: object, message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        from_arrays(x, y, test_share=0)  # type: ignore[arg-type]


def test_half_a_test_set_is_refused() -> None:
    with pytest.raises(FedloomError, match="both x_test and y_test"):
        from_arrays(np.zeros((2, 2)), [0, 1], x_test=np.zeros((2, 2)))


def test_a_share_of_everything_is_refused() -> None:
    with pytest.raises(FedloomError, match="test_share is 1"):
        from_arrays(np.zeros((2, 2)), [0, 1], test_share=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.full(400, 10)}, "go up to 10, but there are 10 classes"),
        ({"y": np.full(400, -1)}, "go down to -1"),
        ({"y": np.zeros(400)}, "must be integers"),
        ({"x": np.zeros((400, 1, 4, 4))}, "give uint8, int32 or float32"),
        ({"x_test": np.zeros((100, 1, 4, 5), np.uint8)}, "differ: 1x4x4 uint8 and 1x4x5 uint8"),
        ({"std": (0.0,)}, "positive std"),
        ({"std": (np.inf,)}, "positive std"),
        ({"mean": (np.nan,)}, "positive std"),
        ({"held_out": np.array([1])}, "no rows can be held out"),
        ({"mean": (0.0, 0.0)}, "1 channel"),
    ],
)
def test_a_dataset_checks_itself(small: Dataset, change: dict[str, object], message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        dataclasses.replace(small, **change)  # type: ignore[arg-type]


def test_images_are_put_on_other_scales() -> None:
    x = np.array([[[[0, 255]]], [[[51, 255]]], [[[102, 255]]]], np.uint8)
    data = from_arrays(x, [0, 1, 0], x, [0, 1, 0])

    def fed(scale: str) -> list[list[float]]:
        found = data.normalised(scale)
        mean, std = (laid_out(v, found.shape) for v in (found.mean, found.std))
        return ((x / 255 - mean) / std)[:, 0, 0].round(3).tolist()

    assert fed("unit") == [[0.0, 1.0], [0.2, 1.0], [0.4, 1.0]]
    assert fed("half") == [[-1.0, 1.0], [-0.6, 1.0], [-0.2, 1.0]]
    spread = np.std([0, 51, 102]) + 0.001  # S1's; the second pixel is the same in all images
    assert fed("pixel") == [[round(v / spread, 3), 0.0] for v in (-51, 0, 51)]
    assert data.normalised("standard") is data
    with pytest.raises(FedloomError, match="Did you mean 'pixel'"):
        data.normalised("pixels")


def test_pixels_of_pooled_data_are_measured_on_all_of_it() -> None:
    x = np.arange(8, dtype=np.uint8).reshape(4, 1, 1, 2)
    data = from_arrays(x[:2], [0, 1], x[2:], [0, 1]).pooled().normalised("pixel")
    assert data.mean == pytest.approx((3 / 255, 4 / 255))


def test_held_out_rows_have_no_say_in_the_scale_of_pixels() -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 1, 2, 2)).astype(np.uint8)
    data = from_arrays(x, np.arange(40) % 2)
    rows = np.delete(np.arange(40), data.held_out)
    assert data.normalised("pixel").mean == pytest.approx((x[rows].mean(0) / 255).ravel())
