"""Scales on the wire: bfloat16, 0 or within bounds that keep scale * code exact and finite."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codec.kernels import F32, U16, check_inputs, read_only
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError

SCALE_MIN: Final = 2.0**-100
"""Smallest scale but 0. Below it, products with codes could be subnormal, hence inexact."""

SCALE_MAX: Final = 2.0**100
"""Largest scale. 127 times it is finite, and no honest outer gradient comes near it."""

_MIN_BITS: Final = 27 << 7
_MAX_BITS: Final = 227 << 7
"""SCALE_MIN and SCALE_MAX as bfloat16 bit patterns."""

_EXPONENT_BITS: Final = 0x7F80


def upper_halves(values: F32) -> U16:
    """(n,) bfloat16 bit patterns of `values` (n,), exact if they are bfloat16 numbers."""
    assert values.dtype == np.float32, values.dtype
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def widened(halves: U16) -> F32:
    """(n,) float32 values of bfloat16 bit patterns."""
    assert halves.dtype == np.uint16, halves.dtype
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_scales(scales: F32, spans: int) -> bytes:
    """2 bytes per scale. Raises LocalProtocolError MISUSE unless there are `spans` valid ones."""
    check_inputs(spans, scales=scales)
    halves = upper_halves(scales)
    if not np.array_equal(widened(halves), scales) or not _valid(halves).all():
        raise LocalProtocolError(
            ErrorCode.MISUSE, "scales", expected="bfloat16, 0 or 2**-100 to 2**100", got=str(scales)
        )
    return halves.tobytes()


def decode_scales(head: memoryview) -> F32:
    """The scales (s,) in 2 * s bytes, read-only.

    Raises RemoteProtocolError: NOT_FINITE, or BAD_PAYLOAD for a negative one (-0.0 included) and
    one outside the bounds.
    """
    assert head.nbytes % 2 == 0, f"{head.nbytes} bytes are no scales"
    halves = np.frombuffer(head, np.uint16)
    wrong = halves[~_valid(halves)]
    if wrong.size:
        finite = (wrong[0] & _EXPONENT_BITS) != _EXPONENT_BITS
        raise RemoteProtocolError(
            ErrorCode.BAD_PAYLOAD if finite else ErrorCode.NOT_FINITE,
            "scale",
            expected="0 or 2**-100 to 2**100",
            got=str(widened(wrong)[0]),
        )
    return read_only(widened(halves))


def _valid(halves: U16) -> NDArray[np.bool_]:
    # Bit patterns of positive floats have the order of integers. Those of negative numbers and of
    # NaN are larger, so two comparisons refuse everything wrong.
    valid: NDArray[np.bool_] = (halves == 0) | ((halves >= _MIN_BITS) & (halves <= _MAX_BITS))
    return valid
