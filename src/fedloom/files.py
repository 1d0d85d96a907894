"""Files that are either whole or absent: atomic writes, and one writer at a time.

A file or folder is written under a temporary name beside its target and renamed when it is
complete, so a full disk or Ctrl-C never leaves half a file that a later run takes for whole. What
has to survive a power cut as well is synced.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def sync(path: Path) -> None:
    """Return once the file, or the names in the folder, are on the disk itself."""
    folder = path.is_dir()
    if folder and sys.platform == "win32":
        return  # Windows has no such call for folders
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as e:
        if not folder or e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks
            raise
    finally:
        os.close(handle)


def slug(text: str) -> str:
    """A text as the name of a file.

    >>> slug("fedavg@lr=0.1, twice")
    'fedavg-lr=0.1-twice'
    """
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", text)


def state_folder() -> Path:
    """What is kept for this user: in $FEDLOOM_STATE, else in the platform's place."""
    if chosen := os.environ.get("FEDLOOM_STATE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "fedloom"


def is_temporary(path: Path) -> bool:
    """Whether this is what `atomic_file` leaves behind if the process is killed."""
    return _TEMPORARY.fullmatch(path.name) is not None


@contextmanager
def atomic_file(target: Path, *, synced: bool = False) -> Iterator[Path]:
    """A temporary path to write to; it becomes `target` if the block ends well.

    With `synced`, a power cut after the block does not lose it either. An error that names the
    temporary path names the target instead, which is what was asked for.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if synced:
            sync(temporary)
        os.replace(temporary, target)
        if synced:
            sync(target.parent)
    except OSError as e:
        if str(e.filename) == str(temporary):
            e.filename, e.filename2 = str(target), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder, gone when the block ends; what a killed process left there goes first.

    The name is fixed, so hold `locked` around this.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A fresh folder to fill; it becomes `target`, in place of an older one, if all goes well.

    A folder cannot be renamed over another in one step, so hold `locked` around this.
    """
    with scratch_folder(target.with_name(f".{target.name}.tmp")) as scratch:
        fresh, old = scratch / "new", scratch / "old"
        fresh.mkdir()
        yield fresh
        if target.exists():
            os.replace(target, old)
        os.replace(fresh, target)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Wait until no other process holds the lock file `path`, then hold it.

    With `wait=False` a lock that is held raises `BlockingIOError`. The operating system frees the
    lock when its holder ends, however it ends, so a killed process leaves nothing to clean up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as handle:
        if sys.platform == "win32":
            import msvcrt

            handle.seek(0)
            while True:
                try:
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                    break
                except OSError:  # LK_LOCK gives up after ten seconds; we do not
                    if not wait:
                        raise BlockingIOError(f"{path} is locked") from None
            try:
                yield
            finally:
                handle.seek(0)
                msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield  # closing the file frees the lock


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file `path`. Nothing is written; the look itself holds a
    shared lock for some microseconds."""
    try:
        with path.open("rb") as handle:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
                msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)
            else:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except PermissionError:  # on Windows, what says that it is locked
        return sys.platform == "win32"
    except BlockingIOError:
        return True
    return False
