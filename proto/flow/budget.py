"""A rate in bit/s that holds on the line: what a message costs, and when the next one may leave.

Everything is charged that crosses the line: frames with the overhead of ZeroMQ and TCP, control
messages, acknowledgements of what is received. Control is charged and never waits; data waits
until the debt is paid. In no second more than 1.02 of the rate leaves, and a sender that always has
data waiting uses at least 0.95 of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import Final

SEGMENT_BYTES: Final = 1448
"""Payload of a full TCP segment on Ethernet, with time stamps."""
SEGMENT_OVERHEAD_BYTES: Final = 66
"""Ethernet 14, IPv4 20, TCP 20, time stamps 12. Preamble, checksum and gap, 24 more, are seen by no
interface counter and sold by no provider."""
FRAME_OVERHEAD_BYTES: Final = (2, 9)
"""ZMTP 3.1: one byte of flags, and one of length up to 255, else eight."""
CURVE_OVERHEAD_BYTES: Final = 33
"""Bytes that CURVE adds to a frame: command name 8, nonce 8, authenticator 16, flags 1."""

RATE_SHARE: Final = 0.985
"""Share of the rate that leaves, in the long run and in any second, however late the sender was.
The rest is for TCP's retransmissions and for control messages to single learners, which nobody here
counts, and for what the threads of ZeroMQ send later than they took it."""
WINDOW_S: Final = 1.0
BIN_S: Final = 0.01
"""The window counts time in such bins."""
LATE_S: Final = 0.1
"""A sender that was late may make up for so many seconds of its rate: on a busy machine a loop is
kept from its core for longer than a few milliseconds."""
RESUME_S: Final = 0.02
"""The same when work begins after a pause: a burst of more than two messages would overrun the
queue of a line of just this rate."""
BACK_SHARE: Final = 0.5
"""Largest share of a rate that acknowledgements of received data take: where more comes than that,
nobody could send at all."""


def wire_bytes(frame_sizes: Iterable[int], curve: bool) -> int:
    """Bytes on the line of one message, from the sizes of its frames."""
    size = 0
    for frame in frame_sizes:
        body = frame + CURVE_OVERHEAD_BYTES if curve else frame
        size += body + FRAME_OVERHEAD_BYTES[body > 255]
    return size + SEGMENT_OVERHEAD_BYTES * math.ceil(size / SEGMENT_BYTES)


class Budget:
    """A token bucket that may go into debt by one message, and a window of one second over it.

    The bucket makes the mean, the window the promise: a burst that makes up for lateness still
    stays within the second. Rates are bit/s, 0: no limit. Times are seconds on the caller's
    monotonic clock.
    """

    def __init__(self, bits_per_s: float = 0.0) -> None:
        self.bits_per_s = bits_per_s
        self._paid_at = -math.inf
        """When all that was charged is paid for."""
        self._bins: deque[tuple[int, int]] = deque()
        """(number, bytes) of the bins of the last second, oldest first."""
        self._window_bytes = 0
        self._acknowledged_at = -math.inf
        """When the acknowledgements that were charged would have left at BACK_SHARE of the rate."""
        self._received_at, self._unacknowledged_bytes = -math.inf, 0
        """The newest bytes from the line, and those for which no acknowledgement was charged."""

    def copy(self) -> Budget:
        """Another budget of the same rate and history."""
        twin = copy(self)
        twin._bins = self._bins.copy()
        return twin

    def opens_at(self, size_bytes: int, now: float) -> float:
        """When a message of so many bytes on the line may leave; `now` or earlier: now."""
        if not self.bits_per_s:
            return now
        self._forget(now)
        room = self.bits_per_s / 8 * RATE_SHARE * WINDOW_S
        # A message that was cut for a larger rate leaves when the window is not full: if it waited
        # for room of its own size, control messages alone could hold it back for ever.
        excess = self._window_bytes - room + (size_bytes if size_bytes <= room / 2 else 0)
        opens_at = self._paid_at
        for number, bin_bytes in self._bins:
            if excess <= 0:
                break
            excess -= bin_bytes
            opens_at = max(opens_at, (number + 1) * BIN_S + WINDOW_S)
        return opens_at

    def loses_from(self) -> float:
        """From when on rate is lost for good if nothing leaves: until then it is made up for."""
        return self._paid_at + LATE_S if self.bits_per_s else -math.inf

    def charge(self, size_bytes: int, now: float) -> None:
        """So many bytes on the line leave now, whether they waited or not."""
        if not self.bits_per_s:
            return
        start = max(self._paid_at, now - LATE_S)
        self._paid_at = start + 8 * size_bytes / (self.bits_per_s * RATE_SHARE)
        number = math.floor(now / BIN_S)
        self._window_bytes += size_bytes
        if self._bins and self._bins[-1][0] >= number:
            number, before = self._bins.pop()
            size_bytes += before
        self._bins.append((number, size_bytes))

    def resume(self, now: float) -> None:
        """Data begins to wait after a pause in which none did."""
        self._paid_at = max(self._paid_at, now - RESUME_S)

    def acknowledge(self, size_bytes: int, now: float) -> None:
        """So many bytes have come from the line: TCP acknowledges every second segment, and what is
        less once it is read. What comes later than at the newest `now` found all read."""
        if not self.bits_per_s:
            return
        self._unacknowledged_bytes += size_bytes
        count, rest = divmod(self._unacknowledged_bytes, 2 * SEGMENT_BYTES)
        if rest and now > self._received_at:
            count, rest = count + 1, 0
        self._received_at, self._unacknowledged_bytes = now, rest
        # An allowance that refills, up to a second of it: what a late loop reads at one moment has
        # been acknowledged while it came, and costs as much as what is read one by one.
        bytes_per_s = self.bits_per_s / 8 * BACK_SHARE
        start = max(self._acknowledged_at, now - WINDOW_S)
        charged = min(count * SEGMENT_OVERHEAD_BYTES, int((now - start) * bytes_per_s))
        self._acknowledged_at = start + charged / bytes_per_s
        self.charge(charged, now)

    def set_rate(self, bits_per_s: float, now: float) -> None:
        """Changes the rate. A debt stays one of bytes: at a lower rate it takes longer to pay."""
        if bits_per_s and self.bits_per_s and self._paid_at > now:
            self._paid_at = now + (self._paid_at - now) * self.bits_per_s / bits_per_s
        self.bits_per_s = bits_per_s

    def in_window(self, now: float) -> int:
        """Bytes that have left in the last second."""
        self._forget(now)
        return self._window_bytes

    def _forget(self, now: float) -> None:
        while self._bins and (self._bins[0][0] + 1) * BIN_S + WINDOW_S <= now:
            self._window_bytes -= self._bins.popleft()[1]
