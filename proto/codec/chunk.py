"""The checked content of one payload, and the errors of payloads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codec import kernels
from narrows.proto.codec.buffers import empty_u8
from narrows.proto.codec.kernels import (
    F32,
    F64,
    I8,
    I64,
    RUN,
    check_inputs,
    check_outputs,
    read_only,
)
from narrows.proto.codec.scales import widened
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError


@dataclass(frozen=True, eq=False, slots=True)
class DecodedChunk:
    """The checked content of a payload; scale * code is the value.

    It stays as compact as it came: the broker holds the chunks of many pushes at once.
    """

    codec: str
    bounds: I64
    """(s + 1,), from 0 to `count`."""
    scales: F32
    """(s,); 1 for codecs that are not quantised."""
    codes: NDArray[np.generic]
    """int8 (n,), uint8 ((n + 1) // 2,) packed nibbles, uint16 (n,) bfloat16, or float32 (n,)."""

    def __post_init__(self) -> None:
        # Decoders have checked the payload, so a misfit is an error of theirs.
        assert self.scales.size == self.bounds.size - 1, f"{self.scales.size} scales"
        assert self.codes.size in (self.count, (self.count + 1) // 2), f"{self.codes.size} codes"

    @property
    def count(self) -> int:
        """Elements of the chunk."""
        return int(self.bounds[-1])

    @property
    def quantised(self) -> bool:
        """Whether `codes` are whole multiples of a scale."""
        return self.codes.itemsize == 1

    def values(self, out: F32) -> None:
        """out (n,) = scale * code, exact: equal to the encoder's `reconstructed`."""
        check_outputs(self.count, out=out)
        if self.quantised:
            kernels.scale_codes(self.whole_codes(), self.bounds, self.scales, out)
        else:
            out[:] = self.floats()

    def add_to(self, base: F32, out: F32) -> None:
        """out (n,) = base + the values, in float32; where a value is 0, the bits of base.

        The product scale * code is exact, so the sum is rounded once, with or without a fused
        multiply-add, and every machine gets the same bits. The rule for 0 keeps -0.0, which the
        sum -0.0 + 0.0 would not.
        """
        check_inputs(self.count, base=base)
        check_outputs(self.count, out=out)
        if self.quantised:
            spans = self.bounds, self.scales
            kernels.add_codes(read_only(base), self.whole_codes(), *spans, out)
        else:
            kernels.add_nonzero(read_only(base), read_only(self.floats()), out)

    def square_sums(self) -> F64:
        """(s,) sums of value**2 per span.

        Quantised: exact, the integer sum of code**2 times scale**2 (at most 34 + 16 bits).
        Otherwise float64, in lanes (kernels.float_square_sums).
        """
        if self.quantised:
            # No more than 34 bits: 127**2 times CHUNK_ELEMENTS_MAX. So nothing can overflow.
            integers = np.empty(self.scales.size, np.int64)
            kernels.code_square_sums(self.whole_codes(), self.bounds, integers)
            return integers * self.scales.astype(np.float64) ** 2
        return float_square_sums(self.floats(), self.bounds)

    def whole_codes(self) -> I8:
        """The codes (n,), one byte each."""
        return self.codes_of(0, self.count, empty_u8(self.count).view(np.int8))

    def codes_of(self, first: int, end: int, scratch: I8) -> I8:
        """The codes first..end, one byte each, read-only; they may lie in `scratch`.

        `first` is a multiple of RUN, because packed codes can be cut there only. So is `end`,
        unless it is `count`.
        """
        assert 0 <= first <= end <= self.count, f"{first} to {end} of {self.count}"
        assert first % RUN == 0, f"{first} cuts a run of packed codes"
        if self.codes.dtype == np.int8:
            return read_only(self.codes.view(np.int8)[first:end])
        codes = scratch[: end - first]
        kernels.unpack(self.codes.view(np.uint8)[first // 2 : (end + 1) // 2], codes)
        return read_only(codes)

    def floats(self, first: int = 0, end: int | None = None) -> F32:
        """The values first..end of a codec that is not quantised."""
        assert not self.quantised, self.codec
        if self.codes.dtype == np.float32:
            return self.codes.view(np.float32)[first:end]
        return widened(self.codes.view(np.uint16)[first:end])


def float_square_sums(values: F32, bounds: I64) -> F64:
    """(s,) sums of value**2 of the spans of `values` (n,), in float64, in lanes."""
    assert bounds[-1] == values.size, f"bounds to {bounds[-1]} of {values.size} values"
    sums = np.empty(bounds.size - 1, np.float64)
    lanes = np.empty(kernels.LANES, np.float64)
    kernels.float_square_sums(read_only(values), read_only(bounds), lanes, sums)
    return sums


def check_size(name: str, payload: memoryview, bytes_min: int, bytes_max: int) -> None:
    """Raises RemoteProtocolError TOO_LARGE or BAD_PAYLOAD unless the size is within bounds."""
    assert 0 <= bytes_min <= bytes_max, (bytes_min, bytes_max)
    if not bytes_min <= payload.nbytes <= bytes_max:
        too_large = payload.nbytes > bytes_max
        code = ErrorCode.TOO_LARGE if too_large else ErrorCode.BAD_PAYLOAD
        raise bad_payload(
            name, "size", f"{bytes_min} to {bytes_max} bytes", str(payload.nbytes), code
        )


def bad_payload(
    name: str, what: str, expected: str, got: str, code: ErrorCode = ErrorCode.BAD_PAYLOAD
) -> RemoteProtocolError:
    """The error of a decoder for a payload that no encoder writes."""
    return RemoteProtocolError(code, f"{name} payload: {what}", expected=expected, got=got)


def not_finite(what: str) -> LocalProtocolError:
    """The error of an encoder for values that nobody could use."""
    return LocalProtocolError(
        ErrorCode.NOT_FINITE,
        f"{what}: not finite, or too large",
        remedy="training has diverged here, and nothing of it is merged: start this learner again, "
        "with a lower learning rate if it was not the data",
    )
