"""Small data sets, files in the published formats, and a web server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.dataset import Dataset, from_arrays
from fedloom.data.sources import IDX_FILES, Source, convert_mnist


@pytest.fixture
def small() -> Dataset:
    """Ten classes of 40 training and 10 test images, 1x4x4."""
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (n, 1, 4, 4), np.uint8) for n in (400, 100))
    return from_arrays(x, np.arange(400) % 10, x_test, np.arange(100) % 10, name="small")


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def to_idx() -> Callable[[np.ndarray], bytes]:
    return idx_bytes


@dataclass
class Toy:
    """A data set like MNIST but tiny: its arrays, its plain files and a source for them."""

    x: np.ndarray
    y: np.ndarray
    files: dict[str, bytes]

    def source(self, **changes: object) -> Source:
        made: dict[str, object] = {
            "name": "toy",
            "files": {name: md5(content) for name, content in self.files.items()},
            "convert": lambda folder: convert_mnist(folder, "toy", tuple("0123")),
        }
        return Source(**(made | changes))  # type: ignore[arg-type]

    def gzipped(self) -> dict[str, bytes]:
        return {f"{name}.gz": gzip.compress(content) for name, content in self.files.items()}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def toy() -> Toy:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (24, 40, 40), np.uint8)
    y = (np.arange(24) % 4).astype(np.uint8)
    parts = (x[:16], y[:16], x[16:], y[16:])
    return Toy(x, y, {f: idx_bytes(part) for f, part in zip(IDX_FILES, parts, strict=True)})


@dataclass
class Web:
    """What the server offers, how it misbehaves, and what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None  # drop the connection after so many bytes of a body
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        body = self.files.get(request.path.lstrip("/"))
        if body is None:
            request.send_error(404)
            return
        start = 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                request.send_error(416)
                return
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        request.wfile.write(body[start:][: self.cut_after])


@pytest.fixture
def web() -> Iterator[Web]:
    served = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that is the default one."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDLOOM_DATA", str(folder))
    monkeypatch.setenv("no_proxy", "*")
    return folder
