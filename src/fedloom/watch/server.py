"""The server behind `fedloom watch`: a page, what it shows as JSON, and an event for every change.

It listens on the loopback; elsewhere only with a token, which comes in the address once and is a
cookie from then on. Names that are not this machine's are refused (a foreign site may let its name
point here), and so is everything that changes something unless our own page asks for it. Reports
may come from somebody else's folder: they are shown without access to this page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.errors import FedloomError
from fedloom.report.looks import COLOURS, STYLES, asset, finite, look
from fedloom.watch.follow import Follower, Run
from fedloom.watch.network import frames

_EVERY, _FIND_EVERY = 0.5, 2.0  # seconds between two looks at known runs, and for new ones
_ALIVE = 15.0  # seconds after which an event stream says that it is still there
_PATIENCE = 300  # seconds that writing a report may take
_LOOKS = len(COLOURS) * len(STYLES)
_OURS = "x-fedloom"  # a header that no form of another site can send
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; "
_POLICY += "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
_POLICY += "frame-ancestors 'none'"
# A report has inline scripts; sandboxed, it has an origin of its own and can't reach this page.
_SANDBOX = "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; "
_SANDBOX += "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Guard:
    """Who may ask: right names, right origin, and the token where there is one."""

    def __init__(self, app: ASGIApp, host: str, token: str | None, port: Callable[[], int]) -> None:
        self.app, self._token, self._port = app, token, port
        own = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._names = own - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._refusal(request)
        if answer is not None:
            await self._with_headers(answer, scope, receive, send)
            return
        await self._with_headers(self.app, scope, receive, send)

    async def _with_headers(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {key.lower() for key, _ in message["headers"]}
                more = {**_HEADERS, "content-security-policy": _POLICY}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items() if k.encode() not in there),
                ]
            await send(message)

        await app(scope, receive, add)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._known(host):
            return _said(f"This page is not called '{host}'. Open it by the machine's name.", 421)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            same = origin is None or urlsplit(origin).netloc.lower() == host.lower()
            if not same or _OURS not in request.headers:
                return _said("Only the page itself may ask for this.", 403)
        if self._token is None:
            return None
        cookie = f"fedloom-{self._port()}"
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            answer = RedirectResponse(request.url.path or "/", 303)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="lax", path="/")
            return answer
        if not _same(request.cookies.get(cookie, ""), self._token):
            return _said("Open the address with the token that `fedloom watch` printed.", 401)
        return None

    def _known(self, host: str) -> bool:
        """Whether a name is this machine's: an address, or one of its own names."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in self._names


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _said(text: str, status: int) -> PlainTextResponse:
    return PlainTextResponse(text, status)


class Watch:
    """One folder of runs, looked at by one thread for all pages."""

    def __init__(self, root: Path) -> None:
        self.follower = Follower(root)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="fedloom-watch-")
        self._writing = threading.Semaphore(2)  # reports at a time
        self._looker = threading.Thread(target=self._look, daemon=True, name="fedloom-watch")

    def start(self) -> None:
        self.follower.look()
        self._looker.start()

    def end(self) -> None:
        """Let event streams end, so that the server can."""
        self._stop.set()

    def close(self) -> None:
        self.end()
        self._looker.join(timeout=5)
        self._scratch.cleanup()

    @property
    def closing(self) -> bool:
        return self._stop.is_set()

    def _look(self) -> None:
        found = time.monotonic()
        while not self._stop.wait(_EVERY):
            find = time.monotonic() >= found + _FIND_EVERY
            with self._lock:
                self.follower.look(find=find)
            found = time.monotonic() if find else found

    def overview(self) -> dict[str, Any]:
        with self._lock:
            return {
                "root": str(self.follower.root),
                "groups": self.follower.groups,
                "runs": {run.id: run.summary() for run in self.follower.runs.values()},
            }

    def run(self, key: str) -> Run:
        found = self.follower.runs.get(key)
        if found is None:
            raise Gone
        return found

    def details(self, key: str, since: int) -> dict[str, Any]:
        with self._lock:
            return self.run(key).details(since)

    def network(self, key: str, first: int, last: int) -> dict[str, Any]:
        with self._lock:
            run = self.run(key)
        return frames(run, first, last)

    def stop(self, key: str) -> dict[str, Any]:
        with self._lock:
            run = self.run(key)
            if not run.folder.active:
                raise FedloomError(f"{run.name} is not running, so there is nothing to stop.")
            run.folder.ask_to_stop()
            run.look()
            return run.summary()

    def report(self, keys: Sequence[str]) -> Path:
        """The report of a run, of several, or of a comparison or study: the one that is there, or
        one that is written now."""
        paths, stamp = [], []
        for key in keys:
            folder = self.follower.group_path(key)
            if folder is not None:
                if (folder / "report.html").is_file():
                    return folder / "report.html"
                paths.append(folder)
                continue
            run = self.run(key)
            if len(keys) == 1 and run.report is not None:
                return run.report
            paths.append(run.folder.path)
            stamp.append(f"{run.done}")
        if not paths:
            raise Gone
        name = hashlib.sha256(" ".join([*keys, *stamp]).encode()).hexdigest()[:16]
        out = Path(self._scratch.name) / f"{name}.html"
        with self._writing:
            if not stamp or not out.exists():
                _write_report(paths, out)
        return out


class Gone(Exception):
    """There is no such run, or no longer."""


def _write_report(paths: list[Path], out: Path) -> None:
    """In a process of its own: this one stays small, and what is wrong with a run stays there."""
    words = [sys.executable, "-m", "fedloom", "report", *map(str, paths), "--out", str(out)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise FedloomError(f"The report took more than {_PATIENCE} s to write.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["fedloom report failed."]
        raise FedloomError(lines[-1].removeprefix("Error: "))


def application(
    watch: Watch, host: str = "127.0.0.1", token: str | None = None, port: Callable[[], int] = int
) -> Starlette:
    """The page and what it asks for."""

    async def page(request: Request) -> Response:
        return HTMLResponse(_asset("watch.html"))

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            return _said("There is no such file.", 404)
        where, kind = _FILES[name]
        return Response(where(name), media_type=kind)

    async def runs(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(watch.overview))

    async def one(request: Request) -> Response:
        since = _number(request, "since", 0)
        return _json(await run_in_threadpool(watch.details, request.path_params["key"], since))

    async def moving(request: Request) -> Response:
        first = max(_number(request, "from", 1), 1)
        last = _number(request, "to", first)
        found = await run_in_threadpool(watch.network, request.path_params["key"], first, last)
        return JSONResponse(found)

    async def stop(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(watch.stop, request.path_params["key"]), 202)

    async def report(request: Request) -> Response:
        keys = [key for key in request.path_params["keys"].split(",") if key]
        try:
            found = await run_in_threadpool(watch.report, keys)
        except FedloomError as e:
            return HTMLResponse(f"<!doctype html><title>No report</title><p>{escape(str(e))}", 409)
        headers = {"content-security-policy": _SANDBOX}
        return FileResponse(found, media_type="text/html", headers=headers)

    async def events(request: Request) -> Response:
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(_changes(watch), media_type="text/event-stream", headers=headers)

    async def gone(request: Request, error: Exception) -> Response:
        return _said("There is no such run, or no longer.", 404)

    async def refused(request: Request, error: Exception) -> Response:
        return _said(str(error), 409)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/assets/{name}", file),
            Route("/api/runs", runs),
            Route("/api/runs/{key}", one),
            Route("/api/runs/{key}/network", moving),
            Route("/api/runs/{key}/stop", stop, methods=["POST"]),
            Route("/api/events", events),
            Route("/report/{keys}", report),
        ],
        middleware=[Middleware(Guard, host=host, token=token, port=port)],
        exception_handlers={Gone: gone, FedloomError: refused, OSError: refused},
    )


async def _changes(watch: Watch) -> AsyncIterator[str]:
    """All runs at first, then those that change; `gone` names those that are not there any more."""
    known: dict[str, int] = {}
    groups: Mapping[str, Any] | None = None
    said = time.monotonic()
    while not watch.closing:
        now = await run_in_threadpool(watch.overview)
        stamps = {key: run["version"] for key, run in now["runs"].items()}
        changed = {k: run for k, run in now["runs"].items() if known.get(k) != stamps[k]}
        gone = [key for key in known if key not in stamps]
        if changed or gone or groups != now["groups"]:
            told = {"root": now["root"], "groups": now["groups"], "runs": changed, "gone": gone}
            yield f"data: {json.dumps(finite(told))}\n\n"
            known, groups, said = stamps, now["groups"], time.monotonic()
        elif time.monotonic() > said + _ALIVE:
            yield ": still here\n\n"
            said = time.monotonic()
        await asyncio.sleep(_EVERY)


def _json(value: Any) -> Response:
    return JSONResponse(finite(value))


def _number(request: Request, name: str, default: int) -> int:
    try:
        return max(int(request.query_params.get(name, default)), 0)
    except ValueError:
        return default


def _asset(name: str) -> str:
    return resources.files("fedloom.watch").joinpath("assets", name).read_text(encoding="utf-8")


def _looks(name: str) -> str:
    """The colours and dashes of curves, as the report has them."""
    return f"window.LOOKS = {json.dumps([look(i) for i in range(_LOOKS)])};"


_SCRIPT, _STYLE = "text/javascript", "text/css"
_FILES: dict[str, tuple[Callable[[str], str], str]] = {
    "uPlot.min.css": (asset, _STYLE),
    "uPlot.iife.min.js": (asset, _SCRIPT),
    "report.css": (asset, _STYLE),
    "curves.js": (asset, _SCRIPT),
    "watch.css": (_asset, _STYLE),
    "watch.js": (_asset, _SCRIPT),
    "looks.js": (_looks, _SCRIPT),
}


def serve(
    root: Path, host: str, port: int, token: str | None, ready: Callable[[str], None]
) -> None:
    """Serve the page until Ctrl-C; `ready` gets its address once it can be opened."""
    opened = _listen(host, port)
    number = opened.getsockname()[1]
    watch = Watch(root)
    app = application(watch, host, token, lambda: number)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1,
                            server_header=False, lifespan="off")  # fmt: skip
    server = _Server(config, watch)
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that reports are cleaned up
    watch.start()
    ready(f"http://{shown}:{number}/" + (f"?token={token}" if token else ""))
    try:
        server.run(sockets=[opened])
    except KeyboardInterrupt:
        pass
    finally:
        watch.close()
        opened.close()


class _Server(uvicorn.Server):
    """Uvicorn that ends its event streams when it is asked to end."""

    def __init__(self, config: uvicorn.Config, watch: Watch) -> None:
        super().__init__(config)
        self._watch = watch

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._watch.end()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    """An open port, or a sentence about why there is none."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise FedloomError(f"--host {host} is not a name or address of this machine.") from None
    opened = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(address)
        opened.listen(64)
    except OSError as e:
        opened.close()
        if e.errno is not None and os.strerror(e.errno) == "Address already in use":
            raise FedloomError(
                f"Port {port} is in use, perhaps by another `fedloom watch`. Give another one, or "
                "any that is free: --port 0."
            ) from None
        raise FedloomError(f"Can't listen on {host}, port {port}: {e.strerror or e}.") from None
    return opened


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
