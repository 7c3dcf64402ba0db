"""Errors of another thread, raised on the loop's thread: a worker must not fail in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def guarded(
    work: Callable[[], None], post: Callable[[Callable[[], NoReturn]], None]
) -> Callable[[], None]:
    """`work` for a pool's thread; an unexpected error of it goes through `post` and ends the loop.

    A pool keeps an error in a future that nobody reads: the round would just never come.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            post(raising(error))

    return run


def raising(error: Exception) -> Callable[[], NoReturn]:
    """A function that raises `error`, to be called on the thread that shall see it."""

    def fail() -> NoReturn:
        raise error

    return fail
