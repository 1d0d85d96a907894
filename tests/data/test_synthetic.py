"""Pictures made on demand are the same pictures whenever they are made."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.catalog import load
from fedloom.data.dataset import Dataset
from fedloom.data.synthetic import MODES
from fedloom.errors import FedloomError


def make(**options: int | float | str) -> Dataset:
    return load("synthetic", options=options)


@settings(deadline=None)
@given(st.lists(st.integers(0, 19_999), min_size=1, max_size=30))
def test_an_image_depends_on_its_index_alone(at: list[int]) -> None:
    images = _DEFAULT.x[np.array(at)]
    for index, image in zip(at, images, strict=True):
        assert np.array_equal(_DEFAULT.x[slice(index, index + 1)][0], image)


_DEFAULT = make()


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert (len(_DEFAULT.x), len(_DEFAULT.x_test)) == (20_000, 4_000)
    assert (_DEFAULT.shape, _DEFAULT.n_classes) == ((1, 8, 8), 10)
    assert np.bincount(_DEFAULT.y).tolist() == [2_000] * 10


def test_a_linear_model_does_well_but_not_perfectly() -> None:
    def features(x: np.ndarray) -> np.ndarray:
        return np.c_[x.reshape(len(x), -1) / 32.0 - 4, np.ones(len(x))]

    for shape in ("1x8x8", "3x12x12"):
        data = make(shape=shape, samples=4_000, test_samples=1_000)
        target = np.eye(10)[data.y]
        seen = features(data.x[slice(None)])
        weights = np.linalg.solve(seen.T @ seen + np.eye(seen.shape[1]), seen.T @ target)
        guess = (features(data.x_test[slice(None)]) @ weights).argmax(axis=1)
        assert 0.7 < (guess == data.y_test).mean() < 0.93


def test_without_noise_a_class_is_its_prototypes() -> None:
    clean = make(noise=0, samples=300)
    for label in range(10):
        assert len(np.unique(clean.x[np.flatnonzero(clean.y == label)], axis=0)) == MODES


def test_no_pixel_wraps_around() -> None:
    images = make(samples=2_000, shape="1x16x16").x[slice(None)].astype(int)
    steps = np.abs(np.diff(images, axis=3))  # the patterns are smooth, so a wrap would be a cliff
    assert 0 < images.min() < images.max() <= 255
    assert steps.max() < 128


def test_train_and_test_images_differ_and_so_do_seeds() -> None:
    first, other = make(samples=500, test_samples=500), make(samples=500, seed=1)
    train = {image.tobytes() for image in first.x[slice(None)]}
    assert len(train) > 495
    assert not any(image.tobytes() in train for image in first.x_test[slice(None)])
    assert not any(image.tobytes() in train for image in other.x[slice(None)])


def test_ten_million_samples_cost_only_their_labels() -> None:
    tracemalloc.start()
    data = make(samples=10_000_000, shape="1x28x28")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.1 * data.y.nbytes
    assert data.x[np.array([0, 9_999_999])].shape == (2, 1, 28, 28)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be a number of at least 1"),
        ({"classes": 1}, "classes must be a number of at least 2"),
        ({"noise": -1}, "noise must be a number of at least 0"),
        ({"noise": "loud"}, "not 'loud'"),
        ({"shape": "28x28"}, "3 sizes such as 1x28x28"),
        ({"shape": "1x0x3"}, "shape must be"),
        ({"shape": 8}, "3 sizes"),
        ({"shape": None}, "shape must be"),
        ({"sample": 5}, "Did you mean 'samples'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        make(**options)
