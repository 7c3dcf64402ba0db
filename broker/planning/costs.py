"""The costs of a parameter on the wire, in time and in memory. [pure]

Sizes follow from the formats. Times were measured on two virtual cores (docs/lab-notes.md): expect
other machines to differ by a factor.
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
"""Factor for Ethernet, IP and TCP headers on full packets."""

TOPIC_BYTES: Final = 35
"""Bytes of a downlink topic. Uplink topics are shorter."""

ENCODE_NS: Final = 1.5
DECODE_NS: Final = 0.75
"""Nanoseconds per parameter: to encode a push with its residual; to decode a payload to checked
codes or onto a copy."""

MERGE_NS: Final = 0.5
"""Nanoseconds per parameter and contribution."""

OUTER_STEP_NS: Final = 5.0
"""Nanoseconds per parameter and round: norms, outer optimizer, coding of the publication."""

BITS_PER_CORE_S: Final = 1e9
"""Bits per second that one core carries through a broker or a learner, both directions together,
with all its other work."""

CORES_OF_A_BROKER: Final = 4
"""Cores that one broker can use: the loop, two workers and the disk's thread."""

DECODERS: Final = 2
"""Threads of a broker that decode payloads."""

MERGED_BITS: Final = 16
"""Bits per parameter and round of a merged outer gradient in the journal: bfloat16."""

CODE_BYTES: Final[Mapping[str, float]] = {
    "raw32": 4.0, "bf16": 2.0, "f32-blosc2": 4.0, "int8-zstd": 1.0, "int4-zstd": 0.5,
}  # fmt: skip
"""Bytes per parameter of a contribution that waits for its merge, by codec."""

FIRST_COPY_BYTES: Final = 3.4
"""Bytes per parameter of a joiner's first copy, which travels without loss."""

STATE_BYTES: Final = 12
"""Bytes per parameter at the broker: global parameters, momentum, published copy."""

MERGE_BYTES: Final = 20
"""Bytes per parameter of the fragment that is merged: mean, direction, new state."""

LEARNER_FLIGHT_BYTES: Final = 16
"""Bytes per parameter of a fragment in flight at a learner: snapshot, base, residual, new copy."""

GENERATIONS_MAX: Final = 3
"""Checkpoints on the disk while the newest is written."""


def payload_bits(codec: str, rho: float, bits: float) -> float:
    """Bits per parameter of a payload.

    That is the target of an automatic codec, the width of a float, or the entropy of Gaussian data
    in steps of `rho` times their rms, which zstd nearly reaches.
    """
    if codec == AUTO:
        return bits
    if not codecs.codec(codec).quantised:
        return 8.0 * CODE_BYTES[codec]
    return gaussian_bits(rho)


@cache
def gaussian_bits(rho: float) -> float:
    """Entropy in bits of a standard normal value rounded to whole multiples of `rho`."""
    assert rho > 0, rho
    # Beyond twelve deviations a share is 0 in double precision.
    reach = math.ceil(12 / rho)
    edges = [math.erf((code - 0.5) * rho / math.sqrt(2)) for code in range(-reach, reach + 2)]
    shares = [(high - low) / 2 for low, high in pairwise(edges)]
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-9), "shares of a distribution sum to 1"
    return -sum(share * math.log2(share) for share in shares if share > 0)


def frame_bits(bits: float, fragment_params: float, chunk_elements: int) -> float:
    """Bits per parameter of the ZeroMQ frames of one exchange: payload, header, topic."""
    assert bits >= 0 and fragment_params > 0 and chunk_elements > 0, (bits, fragment_params)
    count = max(1, int(fragment_params))
    header_bytes = TOPIC_BYTES + _header_bytes(count, min(count, chunk_elements))
    return bits + 8 * header_bytes * math.ceil(count / chunk_elements) / count


def _header_bytes(params: int, chunk: int) -> int:
    """Bytes of a typical header in such a fragment; run and incarnation have 32 digits.

    A real header is encoded, so that the figure follows every change of the format.
    """
    digits, digest = "0" * 32, (1 << 64) - 1
    return len(
        encode_header(
            Header(
                PROTOCOL, digits, (1, 1, 1 << 62), DataKind.PUBLICATION, "learner", digits, 100,
                1000, 1000, params, chunk, "int4-zstd", digest, digest, 0, params,
            )
        )
    )  # fmt: skip
