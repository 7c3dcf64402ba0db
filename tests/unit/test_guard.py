"""Errors of worker threads: they reach the loop, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from narrows.proto.shell import guarded, raising


def test_an_error_of_the_work_is_raised_where_it_is_posted_to() -> None:
    posted: list[Callable[[], NoReturn]] = []
    error = ValueError("broken")

    def work() -> None:
        raise error

    guarded(work, posted.append)()
    (fail,) = posted
    with pytest.raises(ValueError, match="broken") as caught:
        fail()
    assert caught.value is error


def test_work_that_succeeds_posts_nothing() -> None:
    posted: list[Callable[[], NoReturn]] = []
    seen: list[int] = []
    guarded(lambda: seen.append(1), posted.append)()
    assert (seen, posted) == ([1], [])


def test_raising_waits_until_it_is_called() -> None:
    fail = raising(KeyError("later"))
    with pytest.raises(KeyError, match="later"):
        fail()
