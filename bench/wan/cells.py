"""The cells of `narrows bench wan`: systems, lines, sizes, and the arithmetic of a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

MILLION: Final = 1 << 20
"""Parameters of "1 M": powers of two give tensors of equal width."""

FRAGMENTS: Final = 16
"""Fragments of one exchange. The last one's way down cannot overlap with any way up: a
sixteenth."""

WARM_UP: Final = 3
"""Exchanges that are not counted: memory pools fill, TCP finds its window."""

EXCHANGES: Final = 20
EXCHANGE_MAX_S: Final = 60.0
"""Cells that take longer per exchange are computed, and marked so."""

FRAME_BYTES: Final = 1514 / 1448
"""Bytes on the wire per byte handed to TCP: Ethernet, IPv4, TCP with timestamps."""

SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    # With the journal on, raw32 would be the speed of a disk: 64 MB per million and learner.
    "raw32": {"codec.push": "raw32", "codec.publish": "raw32", "broker.journal": "off"},
    "int8-zstd": {"codec.push": "int8-zstd", "codec.publish": "int8-zstd",
                  "codec.push_rho": "0.25", "codec.publish_rho": "0.25"},
    "int4-zstd": {"codec.push": "int4-zstd", "codec.publish": "int4-zstd"},
}  # fmt: skip
"""Settings of the variants of Narrows; all others are the defaults."""

BITS: Final[Mapping[str, float]] = {
    "raw32": 32, "int8-zstd": 4.1, "int4-zstd": 3.1, "f32": 32, "bf16": 16, "none": 32, "fp16": 16,
    "uniform8bit": 8,
}  # fmt: skip
"""Bits per parameter, for cells that are computed and not measured."""

PEERS: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp_gloo": ("f32", "bf16"),
    "torchft": ("f32",),
    "hivemind": ("none", "fp16", "uniform8bit"),
}


@dataclass(frozen=True)
class WanCell:
    """One system on one line."""

    system: str
    variant: str
    rate_mbit_per_s: float
    """Rate of each learner's link and direction; 0: unlimited. The hub's rate is that of all
    links."""
    round_trip_ms: float
    params: int
    learners: int = 2
    streams: int = 0
    """Streams of Narrows; 0 for other systems."""
    window_bytes: int = 0
    """Bytes in flight per connection at most, as with a congestion window; 0: no limit of ours."""
    exchanges: int = EXCHANGES

    @property
    def name(self) -> str:
        streams = f", {self.streams} streams" if self.streams else ""
        return f"{self.system} {self.variant}{streams}"

    @property
    def line(self) -> str:
        """The common part of all systems that are compared: line, size and learners."""
        rate = f"{self.rate_mbit_per_s:g} Mbit/s" if self.rate_mbit_per_s else "unlimited"
        window = f", window {self.window_bytes >> 10} KiB" if self.window_bytes else ""
        return (
            f"{self.params / MILLION:g} M, {rate}, {self.round_trip_ms:g} ms,"
            f" {self.learners} learners{window}"
        )

    @property
    def line_s(self) -> float:
        """Seconds that the bytes alone take, by arithmetic; 0 on an unlimited line."""
        if not self.rate_mbit_per_s:
            return 0.0
        bits = self.params * BITS[self.variant] * FRAME_BYTES
        if self.system == "narrows":
            share = 1 + 1 / FRAGMENTS
        else:  # All-reduce: each sends its share to the others and the sum of its own to them.
            share = 2 * (self.learners - 1) / self.learners
        return bits * share / (1e6 * self.rate_mbit_per_s)


def small() -> list[WanCell]:
    """Ten minutes: one size on two lines beside the others, and the effect of several streams."""
    cells: list[WanCell] = []
    for rate in (100.0, 1000.0):
        narrows = WanCell("narrows", "int4-zstd", rate, 0, 4 * MILLION, streams=4)
        cells += [replace(narrows, variant=variant) for variant in ("int4-zstd", "raw32")]
        cells += _peers(narrows)
    long = WanCell("narrows", "int4-zstd", 100, 100, 4 * MILLION, streams=4, window_bytes=128 << 10)
    return [*cells, long, replace(long, streams=1)]


def short() -> list[WanCell]:
    """A look in minutes: the same systems at 1 M parameters on one line."""
    return [
        replace(cell, params=MILLION)
        for cell in small()
        if (cell.rate_mbit_per_s, cell.round_trip_ms) == (100.0, 0.0)
    ]


def full() -> list[WanCell]:
    """The grid. Lines are the outer loops, so that systems alternate on each."""
    cells: list[WanCell] = []
    rates, trips, sizes = (10.0, 100.0, 20.0, 1000.0, 0.0), (0.0, 20.0, 100.0), (1, 4, 16, 64)
    for rate, trip, size, learners in product(sorted(rates), trips, sizes, (2, 4)):
        narrows = WanCell("narrows", "", rate, trip, size * MILLION, learners)
        cells += [
            replace(narrows, variant=variant, streams=streams)
            for variant, streams in product(SETTINGS, (1, 4, 16))
        ]
        cells += _peers(narrows)
    window = WanCell("narrows", "int4-zstd", 1000, 100, 16 * MILLION, window_bytes=1 << 20)
    return [*cells, *(replace(window, streams=streams) for streams in (1, 4, 16))]


def _peers(line: WanCell) -> list[WanCell]:
    return [
        replace(line, system=system, variant=variant, streams=0)
        for system, variants in PEERS.items()
        for variant in variants
    ]
