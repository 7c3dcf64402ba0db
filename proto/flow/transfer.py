"""One transfer at its receiver: which chunks are here, which to ask for, and when.

A transfer that the sender starts by itself (a publication, a push) begins with every chunk COMING,
a transfer that is pulled (a state) with every chunk MISSING. Silence turns COMING into MISSING, and
so does a later chunk of the same stream, because streams keep their order. The receiver asks for
MISSING chunks, no more at a time than it can take in.
"""

from __future__ import annotations

import math

from narrows.proto.messages import RANGES_MAX, Ranges
from narrows.proto.timing import REPAIR_MAX_S, REPAIR_S

_MISSING, _COMING, _ASKED, _HERE = range(4)
"""States of a chunk."""


class Transfer:
    """Bitmap of the chunks of one transfer. Times are seconds of the caller's monotonic clock.

    Its cost is one byte a chunk. `add` takes constant time; `ask` scans the bytes at the speed of
    memory, once in a quarter of a window.
    """

    def __init__(self, chunks: int, now: float, *, unasked: bool, streams: int = 0) -> None:
        """`unasked`: the sender sends every chunk by itself, chunk i on stream i modulo `streams`.
        With 0 streams, a hole says nothing."""
        assert chunks > 0, chunks
        self.chunks = chunks
        self.here = 0
        """Chunks that have come."""
        self.asked = 0
        """Chunks asked for and not here. A receiver of several transfers shares one window."""
        self._expected = list(range(streams)) if unasked else []
        """Per stream the next chunk that comes by itself."""
        self._state = bytearray([_COMING if unasked else _MISSING]) * chunks
        """One byte a chunk."""
        self._coming = self._state.count(_COMING)
        """Chunks that the sender sends by itself and that are not here."""
        self._window = 1
        self._wait_s = REPAIR_S
        self._moved_at = now
        """Time of the last new chunk or question."""

    @property
    def complete(self) -> bool:
        """Every chunk is here."""
        return self.here == self.chunks

    def add(self, chunk: int, now: float) -> bool:
        """Notes a chunk that has come. False: it was here before, or there is no such chunk."""
        if not 0 <= chunk < self.chunks or self._state[chunk] == _HERE:
            return False
        self._coming -= self._state[chunk] == _COMING
        self.asked -= self._state[chunk] == _ASKED
        self._state[chunk] = _HERE
        if streams := len(self._expected):
            # Chunks that should have come on this stream before this one were lost. An answer to a
            # question stands before what is expected, and says nothing.
            expected = self._expected[chunk % streams]
            for lost in range(expected, chunk, streams):
                if self._state[lost] == _COMING:
                    self._state[lost] = _MISSING
                    self._coming -= 1
            self._expected[chunk % streams] = max(expected, chunk + streams)
        self.here += 1
        self._moved_at = now
        self._wait_s = REPAIR_S
        return True

    def ask(self, now: float, heard_at: float, window: int) -> Ranges:
        """The chunks to ask for now, as (first, count); empty: none. Call it until it is empty.

        At most `window` chunks are asked for and not here, and a quarter of it is asked for at
        once, so that questions stay few. `heard_at` is the time of the last message of any kind
        from the peer: while it talks, a chunk that does not come was lost, and the wait is short.
        """
        self._window = window
        if not self.complete and now >= self._moved_at + self._wait_s:
            self._wait_s = min(2 * self._wait_s, REPAIR_MAX_S)
            if heard_at > self._moved_at:
                self._wait_s = REPAIR_S
            self._moved_at = now
            for each in (_COMING, _ASKED):
                self._state = self._state.replace(bytes([each]), bytes([_MISSING]))
            self._coming = self.asked = 0
            self._expected.clear()
        if not self._may_ask:
            return ()
        self._moved_at = now
        ranges: list[tuple[int, int]] = []
        first = self._state.find(_MISSING)
        while first >= 0 and self.asked < window and len(ranges) < RANGES_MAX:
            end = first + 1
            limit = min(first + window - self.asked, self.chunks)
            while end < limit and self._state[end] == _MISSING:
                end += 1
            self._state[first:end] = bytes([_ASKED]) * (end - first)
            self.asked += end - first
            ranges.append((first, end - first))
            first = self._state.find(_MISSING, end)
        return tuple(ranges)

    def deadline(self, now: float) -> float:
        """When `ask` may have chunks to ask for, if nothing comes; infinite: never again."""
        if self.complete:
            return math.inf
        return now if self._may_ask else self._moved_at + self._wait_s

    @property
    def _may_ask(self) -> bool:
        missing = self.chunks - self.here - self._coming - self.asked
        return missing > 0 and self.asked <= self._window - max(1, self._window // 4)
