"""One file over HTTP: streamed, resumed where it stopped, and never half there.

Bytes go to `NAME.part`; the file takes its name when the last one has arrived. A later call goes
on from the part if the server can (HTTP Range) and starts again if it cannot.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path

Progress = Callable[[str, int, int | None], None]  # label, bytes done, bytes in all if known

TIMEOUT = 10  # seconds without an answer
_BLOCK = 1 << 18
_BEYOND_THE_END = 416  # HTTP's answer to a range that starts where the file ends, or later


class UnavailableError(Exception):
    """One way to get the files did not work; its text says why in a few words."""


def download(url: str, target: Path, progress: Progress | None = None) -> None:
    """Bring `url` to `target`; raises `UnavailableError` if the server does not give all of it."""
    part = target.with_name(target.name + ".part")
    done = part.stat().st_size if part.exists() else 0
    with _open(url, done) as response:
        if response.status != 206:  # the server sends the whole file
            done = 0
        left = response.headers.get("Content-Length")
        total = done + int(left) if left else None
        with part.open("ab" if done else "wb") as out:
            for block in _blocks(response):
                out.write(block)
                done += len(block)
                if progress:
                    progress(target.name, done, total)
    if total is not None and done != total:
        raise UnavailableError(
            f"{target.name} stopped at {done} of {total} bytes; fetch again to continue"
        )
    os.replace(part, target)


def _open(url: str, start: int) -> HTTPResponse:
    headers = {"User-Agent": "fedloom"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _BEYOND_THE_END and start:
            return _open(url, 0)
        raise UnavailableError(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no connection ({error.reason})") from None
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"no connection ({error})") from None


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    """The body in blocks. Only reading is guarded: a full disk is not the server's fault."""
    while True:
        try:
            block = response.read(_BLOCK)
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"connection lost ({error}); fetch again to continue") from None
        if not block:
            return
        yield block
