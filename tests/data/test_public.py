"""Public sets: what is set aside, from whom, and what is in them."""

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.catalog import load
from fedloom.data.public import Wish, public_set
from fedloom.data.split import federate
from fedloom.errors import FedloomError


def dealt(public, **more):
    given = {"spec": "dirichlet:0.5", "clients": 12, "seed": 3, **more}
    return federate(load("digits"), public=public, **given)


def test_a_share_leaves_the_clients_and_says_from_whom():
    plain, federation = dealt("none"), dealt("share:0.1")
    public = public_set("share:0.1", federation)
    before, after = plain.partition, federation.partition
    assert len(public) == len(public.y) == len(before.indices) - len(after.indices)
    assert len(public) == pytest.approx(0.1 * len(before.indices), rel=0.05)
    assert public.taken.tolist() == (before.sizes - after.sizes).tolist()
    for client in range(12):
        assert set(after[client]) <= set(before[client])
    counts = np.bincount(public.y, minlength=10) / np.bincount(plain.dataset.y[before.indices])
    assert counts.min() > 0.08
    assert f"{len(public)} of the clients' {len(before.indices)} images" in public.note


def test_images_are_normalised_as_in_training():
    federation = dealt("share:0.3")
    public = public_set("share:0.3", federation)
    assert public.x.dtype == torch.float32
    assert abs(public.x.mean()) < 0.05
    assert abs(public.x.std() - 1) < 0.05


def test_public_images_keep_their_labels_and_are_drawn_from_all():
    federation = dealt("share:0.1")
    public, data = public_set("share:0.1", federation), federation.dataset
    at = np.setdiff1d(federation.dealt.indices, federation.partition.indices)
    assert public.y.tolist() == data.y[at].tolist()
    mean, std = data.mean[0], data.std[0]
    assert np.allclose(public.x, (data.x[at] / 255 - mean) / std, atol=1e-5)
    for label in range(10):  # not the first of its class
        place = np.flatnonzero(data.y[federation.dealt.indices] == label)
        taken = np.isin(federation.dealt.indices[place], at)
        assert taken[len(place) // 2 :].any()


def test_some_images_of_another_set_are_drawn_from_all_of_it(in_tmp):
    x = np.arange(200, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    np.savez("other.npz", x=x, y=np.arange(200) % 3, x_test=x[:9], y_test=np.arange(9) % 3)
    federation = dealt("none")
    public, data = public_set("other.npz:40", federation), federation.dataset
    shade = np.rint((public.x[:, 0, 0, 0] * data.std[0] + data.mean[0]) * 255)
    assert len(set(shade.tolist())) == 40
    assert shade.max() > 150


def test_no_client_is_emptied():
    federation = dealt("share:0.9", spec="quantity:zipf", clients=200)
    assert federation.partition.sizes.min() >= 1


def test_a_share_is_drawn_by_the_seed():
    once, again, other = (dealt("share:0.1", seed=s).partition.indices for s in (3, 3, 4))
    assert once.tolist() == again.tolist()
    assert once.tolist() != other.tolist()


def test_noise_has_no_labels_and_takes_nothing():
    federation = dealt("noise:30")
    public = public_set("noise:30", federation)
    assert public.x.shape == (30, 1, 8, 8)
    assert public.y is None
    assert public.taken is None
    assert federation.partition.indices.tolist() == dealt("none").partition.indices.tolist()


def test_another_set_has_labels_where_its_classes_are_those_of_the_run(in_tmp):
    federation = dealt("none")
    digits = load("digits")
    np.savez("ten.npz", x=digits.x[:200], y=digits.y[:200])
    same = public_set("ten.npz:100", federation)
    assert (len(same), same.y is not None) == (100, True)
    x = np.random.default_rng(0).integers(0, 255, (40, 8, 8)).astype(np.uint8)
    np.savez("own.npz", x=x, y=np.arange(40) % 3)
    own = public_set("own.npz", federation)
    assert len(own) == 31  # without those that are held out for a test
    assert own.y is None
    assert "not those of this run" in own.note
    np.savez("large.npz", x=np.zeros((9, 9, 9), np.uint8), y=np.arange(9) % 3)
    with pytest.raises(FedloomError, match="same shape"):
        public_set("large.npz", federation)
    with pytest.raises(FedloomError, match="more images than there are"):
        public_set("ten.npz:99999", federation)
    np.savez("same.npz", x=digits.x, y=digits.y, x_test=digits.x_test, y_test=digits.y_test)
    with pytest.raises(FedloomError, match="all data that the clients train on"):
        public_set("same.npz:50", federation)


def test_a_run_says_what_was_public(quick):
    result = quick("fedavg", public="share:0.1", rounds=1)
    assert "of the clients' 1438 images" in result.public
    assert quick("fedavg", rounds=1).public is None
    assert result.clients["train_samples"].sum() < quick(rounds=1).clients["train_samples"].sum()


@pytest.mark.parametrize(
    ("spec", "why"),
    [("share:2", "leaves no data"), ("share:x", "must be a number"), ("share", "must be a number"),
     ("noise:0", "at least 1"), ("noise:1.5", "whole number"), ("", "not valid"),
     ("share:0.000001", "larger share"), ("digits", "share:0.01"), ("digits:50", "share:0.01"),
     ("fashon-mnist", "Did you mean 'fashion-mnist'")],
)  # fmt: skip
def test_wrong_wishes_are_refused(quick, spec, why):
    with pytest.raises(FedloomError, match=why):
        fedloom.run("fedavg", clients=5, rounds=1, public=spec)


def test_words_become_wishes():
    assert Wish.parse("none").kind == "none"
    assert Wish.parse("a/b.npz") == Wish("data", source="a/b.npz")
