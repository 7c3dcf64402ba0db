"""The bit/s budget: what a message costs on the wire, and when the next one may leave. [pure]

A rate is a promise about the line, so everything is charged that crosses it: frames with ZeroMQ's
and TCP's overhead, control messages, and the acknowledgements of what is received. Control is
charged but never waits; data waits until the debt is paid.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from narrows.proto.codec import STATE_CODEC, codec, codecs_of
from narrows.proto.limits import PAYLOAD_BYTES_MAX
from narrows.proto.messages import RunSettings
from narrows.proto.timing import MESSAGE_S, RATE_BURST_S, RATE_PAUSE_BURST_S, RATE_WINDOW_S

SEGMENT_BYTES: Final = 1448
"""Payload of a full TCP segment on Ethernet, with time stamps."""

SEGMENT_OVERHEAD_BYTES: Final = 66
"""Ethernet 14, IPv4 20, TCP 20, time stamps 12. (Preamble, checksum and gap, 24 more, are not
seen by interface counters, nor sold by providers.)"""

FRAME_OVERHEAD_BYTES: Final = 9
"""ZMTP 3.1: one byte of flags, up to eight of length."""

ACKNOWLEDGED_BYTES: Final = 2 * SEGMENT_BYTES
"""TCP acknowledges every second full segment, and the end of a message by itself."""

SHARE_USED: Final = 0.985
"""Share of a rate that is used in the long run: the rest is room for retransmissions, which nobody
here sees."""

WINDOW_SHARE: Final = 0.995
"""In no window of RATE_WINDOW_S more than this share of the rate leaves, however late a sender
was."""

BIN_S: Final = 0.01
"""Time is counted in such bins for the window."""

BACK_SHARE: Final = 0.5
"""Share of a rate that the acknowledgements of what is received may take."""

MESSAGE_BYTES_MIN: Final = 4096
"""Below 3.3 Mbit/s a message takes longer: smaller ones would be mostly header."""

MESSAGE_OVERHEAD_BYTES: Final = 512
"""Room for topic, header and scales within a message."""

CUT: Final = 256
"""Elements that the quantised codecs pack together: a chunk has a multiple of them."""


def wire_bytes(*frames: int) -> int:
    """Bytes on the wire of a message whose frames have these sizes."""
    size = sum(frames) + len(frames) * FRAME_OVERHEAD_BYTES
    return size + SEGMENT_OVERHEAD_BYTES * math.ceil(size / SEGMENT_BYTES)


def message_bytes(*rates_bits_per_s: float) -> int:
    """The largest payload for a line with these rates (0: no limit), in bytes."""
    rates = [rate for rate in rates_bits_per_s if rate]
    if not rates:
        return PAYLOAD_BYTES_MAX
    return max(MESSAGE_BYTES_MIN, min(PAYLOAD_BYTES_MAX, int(min(rates) * MESSAGE_S / 8)))


def chunk_elements(settings: RunSettings, codec_name: str) -> int:
    """Elements of a regular chunk under this codec, so that no message exceeds its bytes."""
    sample = 1 << 16
    bytes_per_element = codec(codec_name).payload_bytes_max(sample, 1) / sample
    room = max(settings.message_bytes - MESSAGE_OVERHEAD_BYTES, MESSAGE_BYTES_MIN // 2)
    fitting = int(room / bytes_per_element) // CUT * CUT
    return min(settings.chunk_elements, max(CUT, fitting))


def least_chunk_elements(settings: RunSettings) -> int:
    """The smallest regular chunk of any transfer to the broker."""
    names = (*codecs_of(settings.push_codec), STATE_CODEC)
    return min(chunk_elements(settings, name) for name in names)


@dataclass
class Budget:
    """A rate that holds in every window: a token bucket that may go into debt by one message, and
    a sliding window over it. Times are seconds on the caller's monotonic clock.
    """

    bits_per_s: float = 0.0
    """0: no limit."""
    _free_at: float = -math.inf
    """When all that was charged is paid for."""
    _bins: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])
    """(number, bytes) of the bins of the last window, oldest first."""
    _window_bytes: float = 0.0
    _largest_bytes: float = 0.0
    """Size of the largest message: the next one may be as large."""
    _back_at: float = -math.inf
    _paused: bool = False

    def is_open(self, now: float) -> bool:
        """Whether a message may leave."""
        return not self.bits_per_s or self.opens_at(now) <= now

    def opens_at(self, now: float) -> float:
        """When the next message may leave; `now` or a moment in the past: now."""
        if not self.bits_per_s:
            return now
        self._forget(now)
        excess = self._window_bytes - (self._per_window_bytes - self._largest_bytes)
        if excess <= 0:
            return self._free_at
        gone_at = now
        for number, size_bytes in self._bins:
            if excess <= 0:
                break
            excess -= size_bytes
            gone_at = (number + 1) * BIN_S + RATE_WINDOW_S
        return max(self._free_at, gone_at)

    def send(self, size_bytes: float, now: float) -> None:
        """A message that waited is leaving."""
        if self._has_room_for(size_bytes):
            self._largest_bytes = max(self._largest_bytes, size_bytes)
        self.charge(size_bytes, now)

    @property
    def _per_window_bytes(self) -> float:
        return self.bits_per_s / 8 * WINDOW_SHARE * RATE_WINDOW_S

    def _has_room_for(self, size_bytes: float) -> bool:
        """False for a message that was cut for a larger rate: if room were kept in each window for
        another one like it, control messages alone would hold it back for ever."""
        return size_bytes <= self._per_window_bytes / 2

    def receive(self, size_bytes: float, now: float) -> None:
        """TCP acknowledges a message that arrived on the line that we send on. At most half of the
        rate is charged: where more comes than that, nobody could send at all."""
        if self.bits_per_s:
            most = self.bits_per_s / 8 * BACK_SHARE * min(now - self._back_at, RATE_WINDOW_S)
            self._back_at = now
            acknowledgements = math.ceil(size_bytes / ACKNOWLEDGED_BYTES)
            self.charge(min(acknowledgements * SEGMENT_OVERHEAD_BYTES, most), now)

    def charge(self, size_bytes: float, now: float) -> None:
        """So many bytes are leaving that do not wait."""
        if not self.bits_per_s:
            return
        start = max(self._free_at, now - (RATE_PAUSE_BURST_S if self._paused else RATE_BURST_S))
        self._paused = False
        self._free_at = start + 8 * size_bytes / (self.bits_per_s * SHARE_USED)
        number = math.floor(now / BIN_S)
        self._window_bytes += size_bytes
        if self._bins and self._bins[-1][0] == number:
            size_bytes += self._bins.pop()[1]
        self._bins.append((number, size_bytes))

    def pause(self) -> None:
        """Nothing waits to be sent."""
        self._paused = True

    def _forget(self, now: float) -> None:
        while self._bins and (self._bins[0][0] + 1) * BIN_S + RATE_WINDOW_S <= now:
            self._window_bytes -= self._bins.popleft()[1]

    def set_rate(self, bits_per_s: float, now: float) -> None:
        """The debt stays in bytes: it takes longer to pay at a lower rate."""
        if bits_per_s and self.bits_per_s and self._free_at > now:
            self._free_at = now + (self._free_at - now) * self.bits_per_s / bits_per_s
        if not bits_per_s:
            self._bins.clear()
            self._window_bytes = 0.0
        self.bits_per_s = bits_per_s
        if not self._has_room_for(self._largest_bytes):
            self._largest_bytes = 0.0
