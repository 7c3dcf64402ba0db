"""Lent memory for large arrays that come and go.

The first touch of new memory costs more than most of the work on it, and numpy asks the system for
new memory for each array of some 100 kB. An array from here gives its memory back by itself, once
nobody refers to it or to a view of it.
"""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np

from narrows.proto.codec.kernels import F32, U8

IDLE_BYTES_MAX: Final = 512 << 20
"""Bytes of idle memory that are kept. What comes back beyond them is freed."""

STEPS: Final = 8
"""Sizes between two powers of two. A size is rounded up to one, so at most 1/8 is wasted."""

# Threads share it without a lock: pop and append of a list are atomic.
_idle: dict[int, list[U8]] = {}


def empty_f32(count: int) -> F32:
    """An uninitialised float32 array (count,)."""
    return empty_u8(4 * count).view(np.float32)


def empty_u8(count: int) -> U8:
    """An uninitialised uint8 array (count,)."""
    assert count >= 0, count
    # Rounded up, so that arrays of about one size share memory.
    step = max(64, 1 << max(0, count.bit_length() - STEPS.bit_length()))
    size = max(step, -(-count // step) * step)
    try:
        memory = _idle[size].pop()
    except (KeyError, IndexError):
        memory = np.empty(size, np.uint8)
    # Through a memoryview: a view of the array would keep `memory` alive beyond the lease.
    lease = np.frombuffer(memory.data, np.uint8, count)
    weakref.finalize(lease, _give_back, memory).atexit = False
    return lease


def idle_bytes() -> int:
    """Bytes of memory that nobody uses."""
    return sum([size * len(waiting) for size, waiting in list(_idle.items())])


def _give_back(memory: U8) -> None:
    if idle_bytes() + memory.nbytes > IDLE_BYTES_MAX:
        # Arrays of other sizes are freed first: those that a state transfer left behind must not
        # keep out the ones that every round needs.
        for size in [size for size in list(_idle) if size != memory.nbytes]:
            _idle.pop(size, None)
    if idle_bytes() + memory.nbytes <= IDLE_BYTES_MAX:
        _idle.setdefault(memory.nbytes, []).append(memory)
