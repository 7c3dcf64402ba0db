"""A rate in bit/s that holds on the line: what a message costs, and when the next one may leave.

A budget is charged with everything that crosses the line: frames with the overhead of ZeroMQ and
TCP, control messages, acknowledgements of received data. Control is charged and never waits; data
waits until the debt is paid. In no second more than 1.02 of the rate leaves, and a sender that
always has data waiting uses at least 0.95 of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
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
The rest is for TCP's retransmissions and control messages to single learners, which no budget
counts, and for messages that the threads of ZeroMQ send some time after they took them."""
WINDOW_S: Final = 1.0
BIN_S: Final = 0.01
"""The window counts time in such bins."""
LATE_S: Final = 0.1
"""A sender that was late may make up for so many seconds of its rate: on a busy machine a loop may
wait for its core longer than a few milliseconds."""
RESUME_S: Final = 0.02
"""The same when work begins after a pause: a longer burst would overrun the queue of a line that
has just this rate."""
BACK_SHARE: Final = 0.5
"""Largest share of a rate that acknowledgements of received data take: where more comes than that,
nobody could send at all."""


def wire_bytes(frame_sizes: Iterable[int], curve: bool) -> int:
    """Bytes on the line of one message, from the sizes of its frames."""
    size = 0
    for frame in frame_sizes:
        if curve:
            frame += CURVE_OVERHEAD_BYTES
        size += frame + FRAME_OVERHEAD_BYTES[frame > 255]
    return size + SEGMENT_OVERHEAD_BYTES * math.ceil(size / SEGMENT_BYTES)


@dataclass(eq=False)
class Budget:
    """A token bucket that may go into debt by one message, and a window of one second over it.

    The bucket makes the mean, the window keeps the promise: a burst that makes up for lateness
    stays within the second. Rates are bit/s, 0: no limit. Times are seconds on the caller's
    monotonic clock.

    `opens_at`: the window counts bytes in bins of BIN_S. A message that finds it full waits until
    the oldest bins, which hold at least the excess, have left it::

        bytes of the bins    3  4     2     1        room 9, a message of 4: excess 5 = 10 + 4 - 9
        oldest to newest    |--|--|--|--|--|--| now
                                  ^ 3 + 4 >= 5: it opens WINDOW_S after the end of this bin

    `acknowledge`: TCP acknowledges every second segment at once, and a last odd one when all that
    came has been read. What a loop reads at one `now` came together; what it reads at a later one
    came after everything before was read::

        messages at the same `now`   |= pair =|= pair =|= odd     the odd one waits for the next
        a message at a later `now`   |= pair =|= odd |            the odd one counts at once
    """

    bits_per_s: float = 0.0
    _paid_at: float = -math.inf
    """When all that was charged is paid for."""
    _bins: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """(number, bytes) of the bins of the last second, oldest first."""
    _window_bytes: int = 0
    """Sum of the bins."""
    _acknowledged_at: float = -math.inf
    """When the charged acknowledgements would have left at BACK_SHARE of the rate."""
    _received_at: float = -math.inf
    """The newest time at which bytes came from the line."""
    _unacknowledged_bytes: int = 0
    """Bytes of a segment, or nearly two, that came then and were not charged."""

    def opens_at(self, size_bytes: int, now: float) -> float:
        """When a message of so many bytes on the line may leave; `now` or earlier: now."""
        if not self.bits_per_s:
            return now
        self._forget(now)
        room_bytes = self.bits_per_s / 8 * RATE_SHARE * WINDOW_S
        excess_bytes = self._window_bytes - room_bytes
        # A message that was cut for a larger rate leaves when the window is not full: if it waited
        # for room of its own size, control messages alone could hold it back for ever.
        if size_bytes <= room_bytes / 2:
            excess_bytes += size_bytes
        opens_at = self._paid_at
        for number, bin_bytes in self._bins:
            if excess_bytes <= 0:
                break
            excess_bytes -= bin_bytes
            opens_at = max(opens_at, (number + 1) * BIN_S + WINDOW_S)
        return opens_at

    def loses_from(self) -> float:
        """The time from which rate is lost for good if nothing leaves: charges made until then
        still make up for the pause."""
        return self._paid_at + LATE_S if self.bits_per_s else -math.inf

    def charge(self, size_bytes: int, now: float) -> None:
        """So many bytes on the line leave now, whether they waited or not."""
        if not self.bits_per_s:
            return
        start = max(self._paid_at, now - LATE_S)
        self._paid_at = start + 8 * size_bytes / (self.bits_per_s * RATE_SHARE)
        self._window_bytes += size_bytes
        number = math.floor(now / BIN_S)
        if self._bins and self._bins[-1][0] >= number:
            number, before_bytes = self._bins.pop()
            size_bytes += before_bytes
        self._bins.append((number, size_bytes))

    def resume(self, now: float) -> None:
        """Data begins to wait after a pause in which none did."""
        self._paid_at = max(self._paid_at, now - RESUME_S)

    def acknowledge(self, size_bytes: int, now: float) -> None:
        """So many bytes have come from the line: their acknowledgements leave."""
        if not self.bits_per_s:
            return
        self._unacknowledged_bytes += size_bytes
        count, self._unacknowledged_bytes = divmod(self._unacknowledged_bytes, 2 * SEGMENT_BYTES)
        if self._unacknowledged_bytes and now > self._received_at:
            count += 1
            self._unacknowledged_bytes = 0
        self._received_at = now
        # An allowance that refills, up to one second of it. A late loop reads at one moment what
        # was acknowledged while it came, and this costs as much as messages read one by one.
        bytes_per_s = self.bits_per_s / 8 * BACK_SHARE
        start = max(self._acknowledged_at, now - WINDOW_S)
        charged_bytes = min(count * SEGMENT_OVERHEAD_BYTES, int((now - start) * bytes_per_s))
        self._acknowledged_at = start + charged_bytes / bytes_per_s
        self.charge(charged_bytes, now)

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
        """Takes out the bins that have left the window."""
        while self._bins and (self._bins[0][0] + 1) * BIN_S + WINDOW_S <= now:
            self._window_bytes -= self._bins.popleft()[1]
