"""What a parameter costs on the wire, in time and in memory; measured where arithmetic ends. [pure]

Times were measured on two virtual cores (docs/lab-notes.md): expect other machines to differ by a
factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Final

from narrows.proto.codec import AUTO, codecs
from narrows.proto.flow import SEGMENT_BYTES, SEGMENT_OVERHEAD_BYTES
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Header

PACKET_FACTOR: Final = 1 + SEGMENT_OVERHEAD_BYTES / SEGMENT_BYTES
"""Ethernet, IP and TCP headers on full packets."""

TOPIC_BYTES: Final = 35
"""Of a downlink topic; uplink topics are shorter."""

ENCODE_NS: Final = 1.5
DECODE_NS: Final = 0.75
"""Per parameter: a push with its residual; a payload to checked codes, or onto a copy."""

MERGE_NS: Final = 0.5
"""Per parameter and contribution."""

OUTER_STEP_NS: Final = 5.0
"""Per parameter and round: norms, outer optimizer, coding of the publication."""

BITS_PER_CORE_S: Final = 1e9
"""Through a broker or a learner, both directions together, all else that it does included."""

CORES_OF_A_BROKER: Final = 4
"""The loop, two workers and the disk's thread: more cores do not help one broker."""

DECODERS: Final = 2

MERGED_BITS: Final = 16
"""Per parameter and round of a merged outer gradient in the journal."""

CODE_BYTES: Final[Mapping[str, float]] = {
    "raw32": 4.0, "bf16": 2.0, "f32-blosc2": 4.0, "int8-zstd": 1.0, "int4-zstd": 0.5,
}  # fmt: skip
"""Per parameter of a contribution that waits for its merge."""

FIRST_COPY_BYTES: Final = 3.4
"""Per parameter: what a joiner is sent, without loss."""

STATE_BYTES: Final = 12
"""Per parameter at the broker: global parameters, momentum, published copy."""

MERGE_BYTES: Final = 20
"""Per parameter of the fragment that is merged: mean, direction, new state."""

LEARNER_FLIGHT_BYTES: Final = 16
"""Per parameter of a fragment in flight at a learner: snapshot, base, residual, new copy."""

GENERATIONS_MAX: Final = 3
"""Checkpoints on the disk while the newest is written."""


def payload_bits(codec: str, rho: float, bits: float) -> float:
    """Bits per parameter of a payload: what the codec is told to aim at, its width, or the entropy
    of Gaussian data in steps of `rho` times their rms, which zstd comes close to from above."""
    if codec == AUTO:
        return bits
    if not codecs.codec(codec).quantised:
        return 8.0 * CODE_BYTES[codec]
    return gaussian_bits(rho)


@cache
def gaussian_bits(rho: float) -> float:
    """Entropy in bits of a standard normal value rounded to whole multiples of `rho`."""
    reach = math.ceil(12 / rho)
    edges = [math.erf((code - 0.5) * rho / math.sqrt(2)) for code in range(-reach, reach + 2)]
    shares = [(high - low) / 2 for low, high in pairwise(edges)]
    return -sum(share * math.log2(share) for share in shares if share > 0)


def frame_bits(bits: float, fragment_params: float, chunk_elements: int) -> float:
    """Bits per parameter of the ZeroMQ frames of one exchange: payload, header, topic."""
    count = max(1, int(fragment_params))
    header_bytes = TOPIC_BYTES + _header_bytes(count, min(count, chunk_elements))
    return bits + 8 * header_bytes * math.ceil(count / chunk_elements) / count


def _header_bytes(params: int, chunk: int) -> int:
    """Of a typical header in such a fragment; run and incarnation have 32 digits."""
    digits, digest = "0" * 32, (1 << 64) - 1
    return len(
        encode_header(
            Header(
                PROTOCOL, digits, (1, 1, 1 << 62), DataKind.PUBLICATION, "learner", digits, 100,
                1000, 1000, params, chunk, "int4-zstd", digest, digest, 0, params,
            )
        )
    )  # fmt: skip
