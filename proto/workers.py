"""Threads off the loop: the real Pool of both processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import RLock
from typing import Any

from narrows.proto.ports import Done


class Workers:
    """Threads whose results come back to the loop through a queue and a wake pipe.

    The loop polls `wake_fd` and calls `finish`.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._finished: SimpleQueue[tuple[Future[Any], Done]] = SimpleQueue()
        self._closing = RLock()
        self.wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Runs `work` on a thread, then `done(result or exception, now)` in `finish`."""

        def hand_over(future: Future[Any]) -> None:
            self._finished.put((future, done))
            self.wake()

        with suppress(RuntimeError):  # It is closed: nobody waits for the result.
            self._threads.submit(work).add_done_callback(hand_over)

    def spread(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Within a work: `call` of each item, by its thread and by all that are idle. The results
        are in the order of items. Raises the error of the first item that has one; no item that
        comes after it begins any more, unless it has begun."""
        given = list(items)
        turns = iter(range(len(given)))  # One for all threads: to take the next turn is atomic.
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def share() -> None:
            for turn in turns:
                try:
                    results[turn] = call(given[turn])
                except BaseException as error:
                    errors[turn] = error
                    for _ in turns:  # Nobody takes another one.
                        pass

        helpers: list[Future[None]] = []
        with suppress(RuntimeError):  # It is closed: this thread does all.
            for _ in range(min(self._count, len(given)) - 1):
                helpers.append(self._threads.submit(share))
        share()
        for helper in helpers:
            # One that has not begun waits behind other work, and there is nothing left for it.
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors[min(errors)]
        return [results[turn] for turn in range(len(given))]

    def wake(self) -> None:
        """Makes the loop's poll return. Safe from any thread and from signal handlers."""
        # Reentrant: a signal handler may come while this thread holds it.
        with self._closing:
            if self._write_fd >= 0:
                with suppress(BlockingIOError):  # The pipe is full of wakes already.
                    os.write(self._write_fd, b"\0")

    def finish(self, now: float) -> None:
        """On the loop: calls `done` for all work that has ended."""
        with suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        while not self._finished.empty():  # Nobody else takes from it.
            future, done = self._finished.get()
            if not future.cancelled():
                done(future.exception() or future.result(), now)

    def drain(self) -> None:
        """Waits for running work and drops the rest; `finish` still calls `done` for the former."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Drains, and closes the wake pipe. A second call is harmless."""
        self.drain()
        with self._closing:
            write_fd = self._write_fd
            # First: a signal handler that wakes the loop may come between any two lines.
            self._write_fd = -1
            if write_fd >= 0:
                os.close(self.wake_fd)
                os.close(write_fd)
