"""Fetching: verified, resumed, whole or not at all, and in the right order of sources."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import io
import os
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.data import store
from fedloom.data.catalog import load
from fedloom.data.download import UnavailableError
from fedloom.data.fetch import cache_dir, fetch, fetch_source
from fedloom.data.packages import DebianPackage, NpmPackage
from fedloom.data.sources import EMNIST_CLASSES, Archive, Source, emnist_files, source
from fedloom.errors import FedloomError


def digest(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"some/folder/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return packed.getvalue()


def place(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@dataclasses.dataclass
class FakePackage:
    """A package source that needs no registry."""

    files: dict[str, bytes]
    label: str = "fake package"
    asked: int = 0

    def bring(self, folder: Path) -> Path:
        self.asked += 1
        place(folder / "deep" / "inside", self.files)
        return folder


@dataclasses.dataclass
class NoPackage:
    label: str = "no package"

    def bring(self, folder: Path) -> Path:
        raise UnavailableError("no such package")


def test_a_fetched_set_is_what_was_published(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()
    seen: list[tuple[str, int, int | None]] = []
    folder = fetch_source(toy.source(mirrors=(web.url,)), progress=lambda *step: seen.append(step))
    data = store.read(folder)
    assert folder == cache / "toy"
    assert np.array_equal(data.x[slice(None)][:, 0], toy.x[:16])
    assert np.array_equal(data.y_test, toy.y[16:])
    assert isinstance(data.x, np.memmap)
    for name, content in web.files.items():
        assert (name, len(content), len(content)) in seen
    assert not (cache / "raw").exists()


def test_what_is_here_is_not_fetched_again_unless_forced(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()
    for force, requests in ((False, 4), (False, 4), (True, 8)):
        fetch_source(toy.source(mirrors=(web.url,)), force=force)
        assert len(web.asked) == requests


@pytest.mark.parametrize("ranges", [True, False])
def test_a_stopped_download_goes_on_or_starts_again(
    toy: Any, web: Any, cache: Path, ranges: bool
) -> None:
    web.files, web.ranges = toy.gzipped(), ranges
    name, content = next(iter(web.files.items()))
    place(cache / "raw" / "toy", {f"{name}.part": content[:1000]})
    fetch_source(toy.source(mirrors=(web.url,)))
    assert (f"/{name}", "bytes=1000-") in web.asked
    assert np.array_equal(store.read(cache / "toy").x[slice(None)][:, 0], toy.x[:16])


def test_a_part_longer_than_the_file_is_started_again(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()
    name, content = next(iter(web.files.items()))
    place(cache / "raw" / "toy", {f"{name}.part": content + b"more"})
    fetch_source(toy.source(mirrors=(web.url,)))
    assert [wanted for path, wanted in web.asked if path == f"/{name}"] == [
        f"bytes={len(content) + 4}-",
        None,
    ]


def test_a_lost_connection_keeps_what_came_for_the_next_time(
    toy: Any, web: Any, cache: Path
) -> None:
    web.files, web.cut_after = toy.gzipped(), 2000
    with pytest.raises(FedloomError, match=r"stopped at 2000 of .* fetch again to"):
        fetch_source(toy.source(mirrors=(web.url,)))
    assert [file.name for file in (cache / "raw" / "toy").iterdir()] == [
        "train-images-idx3-ubyte.gz.part"
    ]
    web.cut_after = None
    fetch_source(toy.source(mirrors=(web.url,)))
    assert ("/train-images-idx3-ubyte.gz", "bytes=2000-") in web.asked


def test_a_damaged_file_is_deleted_and_told(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped() | {"t10k-labels-idx1-ubyte.gz": b"\x1f\x8b not really gzip"}
    with pytest.raises(FedloomError, match=r"t10k-labels-idx1-ubyte.gz was damaged .* deleted"):
        fetch_source(toy.source(mirrors=(web.url,)))
    assert not (cache / "toy").exists()
    assert not (cache / "raw" / "toy" / "t10k-labels-idx1-ubyte.gz").exists()


def test_a_wrong_file_is_found_by_its_md5(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()
    web.files["t10k-labels-idx1-ubyte.gz"] = web.files["train-labels-idx1-ubyte.gz"]
    with pytest.raises(FedloomError, match=r"damaged \(MD5 \w{32}, not \w{32}\)"):
        fetch_source(toy.source(mirrors=(web.url,)))


def test_the_next_mirror_brings_only_what_is_missing(toy: Any, web: Any, cache: Path) -> None:
    good = toy.gzipped()
    web.files = {f"bad/{name}": content for name, content in good.items()}
    web.files |= {f"good/{name}": content for name, content in good.items()}
    web.files["bad/t10k-labels-idx1-ubyte.gz"] = good["train-labels-idx1-ubyte.gz"]
    fetch_source(toy.source(mirrors=(f"{web.url}bad/", f"{web.url}good/")))
    second = [path for path, _ in web.asked if path.startswith("/good/")]
    assert second == ["/good/t10k-labels-idx1-ubyte.gz"]


def test_a_package_is_asked_last(toy: Any, web: Any, cache: Path) -> None:
    package = FakePackage(toy.files)
    asks = toy.source(mirrors=(f"{web.url}none/", web.url), package=package)
    fetch_source(asks)
    assert [path.rsplit("/", 1)[0] for path, _ in web.asked] == ["/none", ""]
    assert package.asked == 1
    web.files = toy.gzipped()
    fetch_source(asks, force=True)
    assert package.asked == 1


@pytest.mark.parametrize("packed", [False, True])
def test_files_placed_by_hand_are_verified_and_used(
    toy: Any, web: Any, cache: Path, packed: bool
) -> None:
    place(cache / "raw" / "toy" / "unpacked", toy.gzipped() if packed else toy.files)
    fetch_source(toy.source(mirrors=(web.url,)))
    assert web.asked == []
    assert (cache / "raw" / "toy" / "unpacked").exists()  # what a user placed stays


def test_a_wrong_file_placed_by_hand_is_not_used(toy: Any, cache: Path) -> None:
    place(cache / "raw" / "toy", toy.files | {"t10k-labels-idx1-ubyte": b"wrong"})
    with pytest.raises(FedloomError, match="t10k-labels-idx1-ubyte was damaged"):
        fetch_source(toy.source())


def test_when_all_fails_everything_tried_is_listed(toy: Any, web: Any, cache: Path) -> None:
    gone = "http://127.0.0.1:9/"
    with pytest.raises(FedloomError) as caught:
        fetch_source(toy.source(mirrors=(gone, web.url), package=NoPackage()))
    text = str(caught.value)
    for part in (
        f"{gone}: no connection",
        f"{web.url}: HTTP 404",
        "no package: no such package",
        "place train-images-idx3-ubyte.gz, ",
        str(cache / "raw" / "toy"),
        "run: fedloom data fetch toy",
    ):
        assert part in text


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_files_come_out_of_a_verified_archive(
    toy: Any, web: Any, cache: Path, pack: Callable[[dict[str, bytes]], bytes]
) -> None:
    web.files = {"all": pack(toy.gzipped())}
    unknown_md5 = dict.fromkeys(toy.files)
    archive = Archive("all", digest(web.files["all"]))
    fetch_source(toy.source(mirrors=(web.url,), files=unknown_md5, archive=archive))
    assert np.array_equal(store.read(cache / "toy").y, toy.y[:16])
    wrong = dataclasses.replace(archive, md5="0" * 32)
    with pytest.raises(FedloomError, match=r"all was damaged .MD5"):
        fetch_source(toy.source(mirrors=(web.url,), archive=wrong), force=True)


def test_a_file_without_an_md5_is_taken_only_from_its_archive(toy: Any, cache: Path) -> None:
    place(cache / "raw" / "toy", toy.files)
    archive = Archive("all.tar.gz", "0" * 32)
    with pytest.raises(FedloomError, match=r"not there: all.tar.gz"):
        fetch_source(toy.source(files=dict.fromkeys(toy.files), archive=archive))


def test_a_shared_archive_is_kept_for_the_other_sets(toy: Any, web: Any, cache: Path) -> None:
    web.files = {"all.zip": zip_of(toy.files)}
    archive = Archive("all.zip", digest(web.files["all.zip"]), shared=True)
    for split in ("one", "two"):
        fetch_source(toy.source(mirrors=(web.url,), archive=archive, split=split))
    assert len(web.asked) == 1
    assert store.holds(cache / "toy-one")
    assert store.holds(cache / "toy-two")


def test_ctrl_c_leaves_no_half_file(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()

    def interrupt(label: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_source(toy.source(mirrors=(web.url,)), progress=interrupt)
    assert all(file.suffix == ".part" for file in (cache / "raw" / "toy").iterdir())
    fetch_source(toy.source(mirrors=(web.url,)))
    assert store.holds(cache / "toy")


def test_a_full_disk_is_told_and_leaves_nothing(
    toy: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(cache / "raw" / "toy", toy.files)
    real = np.save

    def full(file: Path, array: np.ndarray) -> None:
        real(file, array)
        if file.name == "y.npy":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(FedloomError, match="The disk is full"):
            fetch_source(toy.source())
    assert sorted(file.name for file in cache.iterdir()) == [".toy.lock", "raw"]
    fetch_source(toy.source())
    assert store.holds(cache / "toy")


def test_a_forced_fetch_that_fails_keeps_the_old_set(toy: Any, cache: Path) -> None:
    place(cache / "raw" / "toy", toy.files)
    fetch_source(toy.source())

    def broken(folder: Path) -> Any:
        raise FedloomError("cannot convert")

    with pytest.raises(FedloomError, match="cannot convert"):
        fetch_source(toy.source(convert=broken), force=True)
    assert np.array_equal(store.read(cache / "toy").y, toy.y[:16])


def test_two_fetches_at_once_download_once(toy: Any, web: Any, cache: Path) -> None:
    web.files = toy.gzipped()
    fetching = [
        threading.Thread(target=fetch_source, args=(toy.source(mirrors=(web.url,)),))
        for _ in range(4)
    ]
    for thread in fetching:
        thread.start()
    for thread in fetching:
        thread.join()
    assert len(web.asked) == 4
    assert np.array_equal(store.read(cache / "toy").y, toy.y[:16])


def test_a_damaged_cache_says_how_to_mend_it(toy: Any, cache: Path) -> None:
    place(cache / "raw" / "toy", toy.files)
    folder = fetch_source(toy.source())
    (folder / "x.npy").write_bytes(b"")
    with pytest.raises(FedloomError, match=r"corrupted .* fetch toy --force"):
        store.read(folder)


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path, toy: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FedloomError, match="Set FEDLOOM_DATA"):
        fetch_source(toy.source(), cache=tmp_path / "file" / "cache")


def published(name: str, files: dict[str, bytes], pack: Callable[..., bytes]) -> Source:
    """A real source, but with an archive of small files in the place of the official one."""
    real = source(name)
    assert real.archive is not None
    packed = pack(files)
    place(cache_dir() / "raw" / name, {real.archive.name: packed})
    return dataclasses.replace(
        real, mirrors=(), archive=dataclasses.replace(real.archive, md5=digest(packed))
    )


def test_cifar100_has_fine_and_coarse_labels(cache: Path) -> None:
    image = bytes(3072)
    rows = [(1, 0), (0, 1), (1, 2)]  # coarse, fine
    files = {
        "train.bin": b"".join(bytes(row) + image for row in rows),
        "test.bin": bytes(rows[1]) + image,
        "fine_label_names.txt": b"apple\nbear\ncloud\n",
        "coarse_label_names.txt": b"animal\nother\n",
    }
    fetch_source(published("cifar100", files, tar_of))
    fine, coarse = load("cifar100"), load("cifar100", options={"labels": "coarse"})
    assert (fine.classes, fine.y.tolist()) == (("apple", "bear", "cloud"), [0, 1, 2])
    assert (coarse.classes, coarse.y.tolist()) == (("animal", "other"), [1, 0, 1])
    assert coarse.y_test.tolist() == [0]
    with pytest.raises(FedloomError, match="Did you mean 'coarse'"):
        load("cifar100", options={"labels": "corse"})


def test_emnist_is_turned_upright_and_letters_start_at_zero(
    cache: Path, to_idx: Callable[[np.ndarray], bytes]
) -> None:
    upright = np.arange(6).reshape(1, 2, 3)
    on_its_side = upright.transpose(0, 2, 1)
    contents = (on_its_side, np.array([1]), on_its_side, np.array([26]))
    files = {
        f"gzip/{name}.gz": gzip.compress(to_idx(array))
        for name, array in zip(emnist_files("letters"), contents, strict=True)
    }
    packed = zip_of(files)
    place(cache / "raw" / "emnist", {"gzip.zip": packed})
    real = source("emnist", "letters")
    fetch_source(dataclasses.replace(real, mirrors=(), archive=Archive("gzip.zip", digest(packed))))
    data = load("emnist", options={"split": "letters"})
    assert np.array_equal(data.x[slice(None)][:, 0], upright)
    assert (data.classes[data.y[0]], data.classes[data.y_test[0]]) == ("a", "z")
    with pytest.raises(FedloomError, match="Run: fedloom data fetch emnist --split balanced"):
        load("emnist")


def test_the_emnist_splits_have_the_official_numbers_of_classes() -> None:
    assert {split: len(classes) for split, classes in EMNIST_CLASSES.items()} == {
        "balanced": 47,
        "byclass": 62,
        "bymerge": 47,
        "digits": 10,
        "letters": 26,
        "mnist": 10,
    }


def test_tiny_imagenet_comes_as_one_zip(cache: Path) -> None:
    def jpeg(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (value, value, value)).save(out, "JPEG")
        return out.getvalue()

    top = "tiny-imagenet-200"
    files = {
        f"{top}/wnids.txt": b"n1\n",
        f"{top}/words.txt": b"n1\tcat\n",
        f"{top}/train/n1/images/n1_0.JPEG": jpeg(10),
        f"{top}/val/images/val_0.JPEG": jpeg(20),
        f"{top}/val/val_annotations.txt": b"val_0.JPEG\tn1\t0\t0\t1\t1\n",
    }
    fetch_source(published("tiny-imagenet", files, zip_of))
    data = load("tiny-imagenet")
    assert data.classes == ("cat",)
    assert data.shape == (3, 64, 64)
    assert int(data.x_test[np.array([0])].mean()) in range(18, 23)


def test_a_name_that_cannot_be_fetched_is_refused(cache: Path) -> None:
    with pytest.raises(FedloomError, match="Did you mean 'mnist'"):
        fetch("mnits")
    with pytest.raises(FedloomError, match="split of mnist"):
        fetch("mnist", split="letters")
    with pytest.raises(FedloomError, match="'digits' is bundled"):
        fetch("digits")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a shell script in the place of a package client."""
    if sys.platform == "win32":
        pytest.skip("needs a shell")
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def test_npm_packs_by_name_and_the_files_are_taken_out(
    toy: Any, cache: Path, tmp_path: Path, clients: Callable[[str, str], None]
) -> None:
    (tmp_path / "made.tgz").write_bytes(tar_of(toy.files))
    clients("npm", f'echo "$@" > {tmp_path}/said; cp {tmp_path}/made.tgz toy-1.0.0.tgz')
    fetch_source(toy.source(package=NpmPackage("toy@1.0.0")))
    assert (tmp_path / "said").read_text().split()[:2] == ["pack", "toy@1.0.0"]
    assert np.array_equal(store.read(cache / "toy").y, toy.y[:16])


def test_debian_packages_are_unpacked_not_installed(
    toy: Any, cache: Path, tmp_path: Path, clients: Callable[[str, str], None]
) -> None:
    place(tmp_path / "made", toy.gzipped())
    clients("apt-get", '[ "$1 $2" = "download toy" ] && touch toy_1_all.deb')
    clients("dpkg-deb", f'[ "$1" = -x ] && mkdir -p "$3/usr" && cp {tmp_path}/made/* "$3/usr"')
    fetch_source(toy.source(package=DebianPackage("toy")))
    assert np.array_equal(store.read(cache / "toy").y, toy.y[:16])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'warn old'; echo 'E404 no such package' >&2; exit 1", "npm failed: E404 no such"),
        ("exit 7", "npm failed: 7"),
        ("true", "left 0 .*tgz files"),
        ("echo junk > toy.tgz", "toy.tgz was damaged"),
    ],
)
def test_what_went_wrong_with_a_client_is_told(
    toy: Any, cache: Path, clients: Callable[[str, str], None], script: str, reason: str
) -> None:
    clients("npm", script)
    with pytest.raises(FedloomError, match=f"npm pack toy: .*{reason}"):
        fetch_source(toy.source(package=NpmPackage("toy")))


def test_a_missing_client_is_told(toy: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FedloomError, match="npm is not installed"):
        fetch_source(toy.source(package=NpmPackage("toy")))


def test_the_cache_is_where_the_user_or_the_platform_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("FEDLOOM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("LOCALAPPDATA", "/y")
    for platform, expected in (
        ("linux", Path("/x/fedloom")),
        ("darwin", Path.home() / "Library" / "Caches" / "fedloom"),
        ("win32", Path("/y/fedloom")),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_dir() == expected
