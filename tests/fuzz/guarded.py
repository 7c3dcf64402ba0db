"""Memory that ends at a page which nobody may touch: one byte read too many ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

PAGE: Final = mmap.PAGESIZE
PROT_NONE: Final = 0


class Guarded:
    """Room for up to `bytes_max` bytes, whose end is the end of what can be read and written."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = -(-bytes_max // PAGE) * PAGE
        self._memory = mmap.mmap(-1, self.size_bytes + PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        behind = ctypes.c_void_p(self.address + self.size_bytes)
        failed = libc.mprotect(behind, ctypes.c_size_t(PAGE), PROT_NONE)
        assert not failed, f"mprotect: {ctypes.get_errno()}"

    def end(self, count: int) -> memoryview:
        """The last `count` bytes before the page, to be written and read."""
        assert 0 <= count <= self.size_bytes, count
        return memoryview(self._memory)[self.size_bytes - count : self.size_bytes]

    def holding(self, data: bytes) -> memoryview:
        """The same with these bytes in it."""
        view = self.end(len(data))
        view[:] = data
        return view
