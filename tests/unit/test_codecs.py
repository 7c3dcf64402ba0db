"""Codecs by example: sizes, rounding, clamping, edges, and what is refused before sending."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest
import zstandard
from coding import FLOATS, QUANTISED, bounds_of, encode, f32, half, refused, values_of

from narrows.proto.codec.codecs import codec, codec_names
from narrows.proto.codec.kernels import F32, I64
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from narrows.proto.limits import CHUNK_ELEMENTS_MAX, PAYLOAD_BYTES_MAX

# The registry.


def test_codec_names() -> None:
    assert codec_names() == ("raw32", "f32-blosc2", "bf16", "int8-zstd", "int4-zstd")
    assert [codec(name).name for name in codec_names()] == list(codec_names())
    quantised = [codec(name).quantised for name in codec_names()]
    assert quantised == [False, False, False, True, True]


@pytest.mark.parametrize("name", ["", "RAW32", "int4", "x" * 10_000, "a\nb"])
def test_unknown_codecs_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        RemoteProtocolError, match="raw32, f32-blosc2, bf16, int8-zstd, int4-zstd"
    ) as caught:
        codec(name)
    assert caught.value.code is ErrorCode.UNKNOWN_CODEC
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1024


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("count", [1, 2, 255, 65_536, CHUNK_ELEMENTS_MAX])
def test_payload_bytes_max_bounds_even_incompressible_codes(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.uniform(-127, 127, count).astype(np.float32)
    scale = f32(1.0 if name == "int8-zstd" else 20.0)
    payload, _ = encode(name, values, bounds_of(0, count), scale)
    assert len(payload) <= codec(name).payload_bytes_max(count, 1) <= PAYLOAD_BYTES_MAX


def test_sizes_of_float_payloads_are_exact() -> None:
    assert codec("raw32").payload_bytes_max(5, 3) == 20
    assert codec("bf16").payload_bytes_max(5, 3) == 10


@pytest.mark.parametrize("name", QUANTISED)
def test_the_largest_chunk_fits_a_message_with_many_spans(name: str) -> None:
    assert codec(name).payload_bytes_max(CHUNK_ELEMENTS_MAX, 1 << 19) <= PAYLOAD_BYTES_MAX


# Encoding by example.


def test_int4_codes_pair_elements_half_a_run_apart() -> None:
    values = f32(1, -2, 3, -4, 5)
    payload, reconstructed = encode("int4-zstd", values, bounds_of(0, 5), f32(1))
    chunk = codec("int4-zstd").decode(payload, bounds_of(0, 5))
    assert reconstructed.tolist() == values.tolist()
    assert chunk.codes.tolist() == [0xC1, 0x5E, 0x03]
    assert chunk.square_sums().tolist() == [55.0]
    assert payload[:2] == half(1)
    assert zstandard.get_frame_parameters(payload[2:]).content_size == 3


def test_int8_codes_are_bytes() -> None:
    payload, _ = encode("int8-zstd", f32(1, -200, 126.6), bounds_of(0, 1, 3), f32(0.5, 1))
    chunk = codec("int8-zstd").decode(payload, bounds_of(0, 1, 3))
    assert chunk.codes.tolist() == [2, -127, 127]
    assert values_of(chunk) == [1.0, -127.0, 127.0]
    assert chunk.square_sums().tolist() == [1.0, 2 * 127.0**2]


@pytest.mark.parametrize("name", QUANTISED)
def test_halves_are_rounded_to_even(name: str) -> None:
    values = f32(0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 0.50000006)
    _, reconstructed = encode(name, values, bounds_of(0, 8), f32(1))
    assert reconstructed.tolist() == [0, 2, 2, 0, -2, -2, 0, 1]
    assert not np.signbit(reconstructed[[0, 3, 6]]).any()


@pytest.mark.parametrize(("name", "limit"), [("int8-zstd", 127), ("int4-zstd", 7)])
def test_values_beyond_the_range_are_clamped(name: str, limit: int) -> None:
    values = f32(limit, limit + 0.5, -limit - 0.5, 1e38, -3.4e38)
    _, reconstructed = encode(name, values, bounds_of(0, 5), f32(1))
    assert reconstructed.tolist() == [limit, limit, -limit, limit, -limit]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_zero_scale_sends_zeros_only(name: str) -> None:
    payload, reconstructed = encode(name, f32(5, -3e38, 1), bounds_of(0, 2, 3), f32(0, 1))
    assert reconstructed.tobytes() == f32(0, 0, 1).tobytes()
    assert codec(name).decode(payload, bounds_of(0, 2, 3)).square_sums().tolist() == [0, 1]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_products_are_exact_and_finite_at_both_ends(name: str, scale: float) -> None:
    steps = f32(-7, -1, 0, 1, 7)
    payload, reconstructed = encode(name, steps * np.float32(scale), bounds_of(0, 5), f32(scale))
    assert reconstructed.tolist() == [-7 * scale, -scale, 0, scale, 7 * scale]
    assert codec(name).decode(payload, bounds_of(0, 5)).square_sums().tolist() == [100 * scale**2]


@pytest.mark.parametrize("name", codec_names())
def test_an_empty_chunk_is_an_empty_payload(name: str) -> None:
    payload, _ = encode(name, f32(), bounds_of(0), f32())
    assert payload == b"" and codec(name).payload_bytes_max(0, 0) == 0
    chunk = codec(name).decode(payload, bounds_of(0))
    assert (values_of(chunk), chunk.square_sums().tolist()) == ([], [])
    assert refused(name, b"\0", bounds_of(0)) is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("count", [1, 2, 3, 255, 256, 257, 258, 511, 513])
def test_odd_lengths(name: str, count: int) -> None:
    values = (np.arange(count) % 15 - 7).astype(np.float32)
    payload, reconstructed = encode(name, values, bounds_of(0, count), f32(1))
    assert reconstructed.tolist() == values.tolist()
    assert values_of(codec(name).decode(payload, bounds_of(0, count))) == values.tolist()


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_encoders_refuse_values_that_are_not_finite(name: str, bad: float, scale: float) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode(name, f32(1, bad, 2), bounds_of(0, 3), f32(scale))
    assert caught.value.code is ErrorCode.NOT_FINITE


def test_bf16_refuses_values_that_would_round_to_infinity() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode("bf16", f32(3.4e38), bounds_of(0, 1), f32(1))
    assert caught.value.code is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("name", FLOATS)
def test_float_codecs_keep_negative_zero_and_ignore_scales(name: str) -> None:
    payload, reconstructed = encode(name, f32(-0.0, 1), bounds_of(0, 2), f32())
    assert reconstructed.tobytes() == f32(-0.0, 1).tobytes()
    assert codec(name).decode(payload, bounds_of(0, 2)).scales.tolist() == [1]


@pytest.mark.parametrize(
    "scale", [-1.0, -0.0, np.nan, np.inf, 2.0**-101, 2.0**101, 1.0 + 2.0**-8, 1e-45]
)
def test_encoders_refuse_scales_that_decoders_would(scale: float) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode("int4-zstd", f32(1), bounds_of(0, 1), f32(scale))
    assert caught.value.code is ErrorCode.MISUSE


@pytest.mark.parametrize(
    "bounds",
    [
        bounds_of(),
        bounds_of(1, 3),
        bounds_of(0, 2, 2, 3),
        bounds_of(0, 3, 2),
        bounds_of(0, 2),
        np.array([0, 3], np.int32),
        np.array([[0, 3]], np.int64),
    ],
)
@pytest.mark.parametrize("name", codec_names())
def test_bounds_that_do_not_fit_are_misuse(name: str, bounds: I64) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode(name, f32(1, 2, 3), bounds, np.ones(max(bounds.size - 1, 0), np.float32))
    assert caught.value.code is ErrorCode.MISUSE


def test_arrays_that_do_not_fit_are_misuse() -> None:
    values, bounds, scales = f32(1, 2, 3), bounds_of(0, 3), f32(1)
    frozen = np.empty_like(values)
    frozen.setflags(write=False)
    wide = cast(F32, np.empty(3, np.float64))
    chunk = codec("int4-zstd").decode(encode("int4-zstd", values, bounds, scales)[0], bounds)
    for out in (np.empty(2, np.float32), np.empty(6, np.float32)[::2], frozen, wide):
        with pytest.raises(LocalProtocolError, match="reconstructed"):
            codec("int4-zstd").encode(values, bounds, scales, out)
        with pytest.raises(LocalProtocolError, match="out"):
            chunk.values(out)
    with pytest.raises(LocalProtocolError, match="scales"):
        codec("int4-zstd").encode(values, bounds, f32(1, 1), np.empty_like(values))


@pytest.mark.parametrize("name", codec_names())
def test_inputs_may_be_strided_and_read_only(name: str) -> None:
    values = np.repeat(f32(1, -2, 3), 2)[::2]
    values.setflags(write=False)
    payload, reconstructed = encode(name, values, bounds_of(0, 3), f32(1))
    assert reconstructed.tolist() == [1, -2, 3]
    # A payload in the middle of a message stands at any address.
    shifted = memoryview(b"x" + payload)[1:]
    assert values_of(codec(name).decode(shifted, bounds_of(0, 3))) == [1, -2, 3]


@pytest.mark.parametrize("name", codec_names())
def test_a_chunk_does_not_refer_to_the_payload(name: str) -> None:
    payload = bytearray(encode(name, f32(1, -2, 3), bounds_of(0, 3), f32(1))[0])
    chunk = codec(name).decode(memoryview(payload), bounds_of(0, 3))
    payload[:] = bytes(len(payload))
    assert values_of(chunk) == [1, -2, 3]
    assert not chunk.codes.flags.writeable and not chunk.scales.flags.writeable


def test_square_sums_of_floats_are_in_16_lanes() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    payload, _ = encode("raw32", values, bounds_of(0, 1000), f32(1))
    lanes = [0.0] * 16
    for index, value in enumerate(values.tolist()):
        lanes[index % 16] += value * value
    expected = 0.0
    for lane in lanes:
        expected += lane
    assert codec("raw32").decode(payload, bounds_of(0, 1000)).square_sums().tolist() == [expected]


def test_threads_encode_the_same_bytes() -> None:
    values = np.random.default_rng(0).normal(size=(40, 5000)).astype(np.float32)
    bounds, scales = bounds_of(0, 5000), f32(0.5)

    def there_and_back(row: int) -> tuple[bytes, bool]:
        payload, reconstructed = encode("int4-zstd", values[row], bounds, scales)
        chunk = codec("int4-zstd").decode(payload, bounds)
        return payload, values_of(chunk) == reconstructed.tolist()

    alone = [there_and_back(row) for row in range(len(values))]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(there_and_back, range(len(values))))
    assert together == alone
    assert all(exact for _, exact in alone)
