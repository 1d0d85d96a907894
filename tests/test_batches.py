"""From stored images to batches: the right samples, however many there are and in any shape."""

import numpy as np
import pytest
import torch

from fedloom.engine import batches
from fedloom.engine.batches import Augment, Shelf, Source


def source(channels_last=False):
    """Eight images of two channels and three pixels, each value another."""
    x = np.arange(48, dtype=np.uint8).reshape(8, 2, 1, 3)
    return Source(x, np.arange(8) % 3, (0.5, 0.25), (0.5, 2.0), torch.device("cpu"), channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("at_once", [10**6, 0], ids=["read once", "read by batch"])
def test_a_batch_holds_the_clients_samples_normalised_by_channel(
    monkeypatch, at_once, channels_last
):
    monkeypatch.setattr(batches, "_AT_ONCE", at_once)
    shelf = Shelf(source(channels_last), np.array([6, 1, 4]), Augment(), None)
    assert len(shelf) == 3
    assert (shelf.raw is None) == (at_once == 0)
    batch = shelf.batch(np.array([2, 0]))
    raw = torch.arange(48.0).view(8, 2, 1, 3)[[4, 6]] / 255
    mean, std = torch.tensor([0.5, 0.25]).view(2, 1, 1), torch.tensor([0.5, 2.0]).view(2, 1, 1)
    assert torch.allclose(batch.x, (raw - mean) / std, atol=1e-6)
    assert batch.y.tolist() == [4 % 3, 6 % 3]
    again = shelf.batch(np.array([2, 0]))  # normalising leaves what is stored alone
    assert torch.equal(again.x, batch.x)


def test_rows_of_positions_are_several_batches():
    shelf = Shelf(source(), np.array([6, 1, 4, 3]), Augment(), None)
    both = shelf.batch(np.array([[0, 1], [3, 2]]))
    uneven = shelf.batch(np.array([[0, 1], [3, -1]]))
    for several, rows in ((both, ([0, 1], [3, 2])), (uneven, ([0, 1], [3]))):
        for found, positions in zip(several.rows(), rows, strict=True):
            one = shelf.batch(np.array(positions))
            assert torch.equal(found.x, one.x)
            assert torch.equal(found.y, one.y)


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_flipped_sideways_and_cropped_in_place(channels_last):
    shelf = Shelf(source(channels_last), np.arange(8), Augment(flip=True), np.random.default_rng(0))
    plain = Shelf(source(channels_last), np.arange(8), Augment(), None).batch(np.arange(8)).x
    flipped = shelf.batch(np.arange(8)).x
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, plain, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, plain, strict=True)]
    assert [a != b for a, b in zip(turned, kept, strict=True)] == [True] * 8
    assert 0 < sum(turned) < 8


def test_a_crop_is_a_window_of_the_padded_image():
    image = torch.arange(1.0, 10).view(1, 1, 3, 3)

    class Lowest:
        def integers(self, low, high, size):
            return np.array([[0], [2]])  # from the top, from the left

    cropped = Augment(crop=1).apply(image, Lowest())
    assert cropped[0, 0].tolist() == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]
