"""The server of `narrows page`: asks one broker, and tells all viewers what has changed.

A thread asks, because a broker may be silent for seconds; all else happens on the event loop. Each
answer becomes one event, packed once for all viewers. A viewer that has missed one gets everything
again, so none can make the server keep what it has not fetched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from narrows.broker.page.history import History
from narrows.broker.page.metrics import StatusCollector
from narrows.proto.config import Address
from narrows.proto.messages import Status

STATIC: Final = Path(__file__).parent / "static"
POLL_S: Final = 1.0
POLL_LARGE_S: Final = 2.0
LEARNERS_LARGE: Final = 200
"""A run of more learners is asked every POLL_LARGE_S: its status is some 100 kB."""
IDLE_S: Final = 15.0
"""A stream without an event gets a comment so often: proxies close one that says nothing."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Each answer has them."""

_log: Final = logging.getLogger("narrows.page")


class Watcher:
    """Asks the broker again and again, and wakes the viewers."""

    def __init__(self, ask: Callable[[], Status], history: Callable[[], History]) -> None:
        """`ask` raises NarrowsError; `history` begins one, for each run anew."""
        self.history = history()
        self.number = 0
        """Events so far; viewers know by it whether they have missed one."""
        self.event = b""
        """The newest, packed."""
        self._all = (-1, b"")
        """The number of events that were in everything when it was packed, and that."""
        self.changed = asyncio.Condition()
        self._ask = ask
        self._begin = history

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            began = time.monotonic()
            await self.poll()
            status = self.history.status
            is_large = status is not None and len(status.learners) > LEARNERS_LARGE
            pause_s = POLL_LARGE_S if is_large else POLL_S
            await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))

    async def poll(self) -> None:
        """Asks once."""
        try:
            await self._take(await asyncio.to_thread(self._ask))
        except Exception as error:
            # Whatever it is: an old sentence must not stand there as if it was the newest.
            _log.debug("the broker could not be asked", exc_info=True)
            self.history.failed(error, time.time())
        # A viewer that has missed an event gets everything.
        self.number += 2 if self.history.is_reshaped else 1
        self.event = packed("change", self.history.change())
        async with self.changed:
            self.changed.notify_all()

    async def _take(self, status: Status) -> None:
        known = self.history.status
        if known is not None and known.run_id != status.run_id:
            self.history = await asyncio.to_thread(self._begin)
            self.number += 1
        self.history.take(status, time.time())

    async def events(self) -> AsyncGenerator[bytes]:
        """The events that one viewer receives."""
        seen = self.number
        yield self._everything()
        while True:
            while self.number == seen:
                try:
                    async with asyncio.timeout(IDLE_S), self.changed:
                        await self.changed.wait()
                except TimeoutError:
                    yield b": nothing new\n\n"
            has_missed = self.number > seen + 1
            seen = self.number  # Before the yield, which lasts as long as the viewer's line.
            if has_missed:
                yield self._everything()
            else:
                yield self.event

    def _everything(self) -> bytes:
        """For a viewer that knows nothing; packed once for all who ask at the same time."""
        if self._all[0] != self.number:
            self._all = (self.number, packed("all", self.history.everything()))
        return self._all[1]


def packed(kind: str, value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(value))


class Guard:
    """Adds HEADERS to each answer, and answers those alone who ask for this machine.

    A name of another site may lead here as well, and its scripts would read the page (DNS
    rebinding). Behind a proxy any name will do: the proxy asks for a password.
    """

    def __init__(self, app: ASGIApp, *, behind_proxy: bool) -> None:
        self._app = app
        self._behind_proxy = behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(HEADERS)
            await send(message)

        app = self._app
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not self._behind_proxy and not _is_here(host):
                app = PlainTextResponse("ask for http://127.0.0.1, or give --behind-proxy\n", 403)
        await app(scope, receive, send_guarded)


def _is_here(host: str) -> bool:
    """Whether the Host of a request names this machine alone."""
    try:
        return Address(urlsplit(f"//{host}").hostname or "", 0).is_loopback
    except ValueError:  # It is no host at all.
        return False


def application(watcher: Watcher, *, behind_proxy: bool = False) -> Starlette:
    """The routes of the page. All are read only."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: watcher.history))

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def events(request: Request) -> Response:
        headers = {"X-Accel-Buffering": "no"}  # A proxy must not collect events.
        return StreamingResponse(watcher.events(), media_type="text/event-stream", headers=headers)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(request: Request) -> Response:
        status = 200 if watcher.history.is_answering or watcher.history.has_ended else 503
        return PlainTextResponse(f"{watcher.history.verdict.text}\n", status)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        task = asyncio.create_task(watcher.run())
        yield
        task.cancel()

    routes = [
        Route("/", page),
        Route("/events", events),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(Guard, behind_proxy=behind_proxy)
    return Starlette(routes=routes, lifespan=lifespan, middleware=[guard])
