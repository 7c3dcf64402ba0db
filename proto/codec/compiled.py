"""The compilation of kernels: strict, at the first call, kept on disk where possible.

Strict means without fast-math and without reordering: the same source must give the same bits on
every machine, or the copies of the model would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

_njit: Callable[..., Callable[[object], object]] = numba.njit
_uncached: set[str] = set()


def kernel(function: Function) -> Function:
    """Compiles a strict loop at its first call, and keeps the result on disk if it can."""
    # The numpy error model lets loops with a division vectorise: no check for a zero divisor.
    strict = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        compile_lazily = _njit(cache=True, **strict)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        # A folder of our own below /tmp would be worse than none: numba's cache is pickle, and
        # whoever was there first could have this process run anything.
        _uncached.add(function.__module__)
        compile_lazily = _njit(**strict)(function)
    return cast(Function, compile_lazily)


def uncached_advice() -> str:
    """The advice to a user whose kernels cannot be kept on disk; "" if they can."""
    if not _uncached:
        return ""
    return (
        "compiled code is not kept: neither the installation nor a home directory can be written. "
        "Each start compiles anew, some ten seconds of a core; NUMBA_CACHE_DIR may name a folder "
        "that can be written, but by nobody else"
    )
