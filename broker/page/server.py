"""The server of `narrows page`: asks one broker, and tells all viewers what has changed.

A thread asks, because a broker may be silent for seconds; all else happens on the event loop. Each
answer becomes one event, packed once for all viewers. A viewer that has missed one gets everything
again, so none can make the server keep what it has not fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from narrows.broker.page.history import History
from narrows.broker.page.metrics import StatusCollector
from narrows.proto.errors import NarrowsError
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


class Watcher:
    """Asks the broker again and again, and wakes the viewers."""

    def __init__(self, ask: Callable[[], Status], history: Callable[[], History]) -> None:
        """`ask` raises NarrowsError; `history` begins one, for each run anew."""
        self.history = history()
        self.number = 0
        """Events so far; viewers know by it whether they have missed one."""
        self.event = b""
        """The newest, packed."""
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
            self._take(await asyncio.to_thread(self._ask))
        except NarrowsError as error:
            self.history.failed(error.message, time.time())
        # A viewer that has missed an event gets everything.
        self.number += 2 if self.history.is_reshaped else 1
        self.event = packed("change", self.history.change())
        async with self.changed:
            self.changed.notify_all()

    def _take(self, status: Status) -> None:
        known = self.history.status
        if known is not None and known.run_id != status.run_id:
            self.history = self._begin()
            self.number += 1
        self.history.take(status, time.time())

    async def events(self) -> AsyncGenerator[bytes]:
        """The events that one viewer receives."""
        seen = self.number
        yield packed("all", self.history.everything())
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
                yield packed("all", self.history.everything())
            else:
                yield self.event


def packed(kind: str, value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(value))


def application(watcher: Watcher) -> Starlette:
    """The routes of the page. All are read only."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: watcher.history))

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    async def events(request: Request) -> Response:
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(watcher.events(), media_type="text/event-stream", headers=headers)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(request: Request) -> Response:
        status = 200 if watcher.history.is_answering else 503
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
    return Starlette(routes=routes, lifespan=lifespan)
