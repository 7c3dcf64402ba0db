"""Codecs by example: edges of the arithmetic, sizes, and payloads that no encoder writes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pytest
import zstandard

from narrows.proto import kernels, zstd_frame
from narrows.proto.codecs import (
    RMS_SAMPLES_MAX,
    Codec,
    DecodedChunk,
    add_values,
    codec,
    codec_names,
    piece_scales,
    round_to_dtype,
    warm_up,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from narrows.proto.kernels import F32, I64
from narrows.proto.limits import CHUNK_ELEMENTS_MAX, PAYLOAD_BYTES_MAX

QUANTISED = ["int8-zstd", "int4-zstd"]
FLOATS = ["raw32", "bf16"]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def bounds_of(*bounds: int) -> I64:
    return np.array(bounds, np.int64)


def encode(name: str, values: F32, bounds: I64, scales: F32) -> tuple[bytes, F32]:
    reconstructed = np.full_like(values, np.nan)
    return codec(name).encode(values, bounds, scales, reconstructed), reconstructed


def values_of(chunk: DecodedChunk) -> list[float]:
    out = np.full(chunk.count, np.nan, np.float32)
    chunk.values(out)
    return out.tolist()


def half(value: float) -> bytes:
    """A bfloat16 number, little-endian."""
    return (f32(value).view(np.uint32) >> 16).astype("<u2").tobytes()


def raw_frame(
    content: bytes, *, size: int | None = None, dictionary: int = 0, window: int | None = None
) -> bytes:
    """A hand-made zstd frame of one raw block; `size` is what it declares.

    Without `window`, a descriptor byte of RFC 8878, the frame is a single segment.
    """
    flags = 0x80 | (0x20 if window is None else 0) | (3 if dictionary else 0)
    head = zstd_frame.MAGIC + bytes([flags]) + (b"" if window is None else bytes([window]))
    head += dictionary.to_bytes(4, "little") if dictionary else b""
    head += (len(content) if size is None else size).to_bytes(4, "little")
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def repeated_frame(length: int, *, size: int) -> bytes:
    """A frame whose one block repeats a zero byte `length` times and that declares `size`."""
    head = zstd_frame.MAGIC + bytes([0xA0]) + size.to_bytes(4, "little")
    return head + (length << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"


def refused(name: str, payload: bytes, bounds: I64) -> ErrorCode:
    with pytest.raises(RemoteProtocolError) as caught:
        codec(name).decode(payload, bounds)
    assert len(str(caught.value)) < 1024
    return caught.value.code


# The registry.


def test_codec_names() -> None:
    assert codec_names() == ("raw32", "bf16", "int8-zstd", "int4-zstd")
    assert [codec(name).name for name in codec_names()] == list(codec_names())
    assert [codec(name).quantised for name in codec_names()] == [False, False, True, True]


@pytest.mark.parametrize("name", ["", "RAW32", "int4", "x" * 10_000, "a\nb"])
def test_unknown_codecs_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="raw32, bf16, int8-zstd, int4-zstd") as caught:
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
    assert chunk.nbytes == 3 + 2 * 4 + 3 * 8


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
    wide: F32 = np.empty(3, np.float64)
    for out in (np.empty(2, np.float32), np.empty(6, np.float32)[::2], frozen, wide):
        with pytest.raises(LocalProtocolError, match="reconstructed"):
            codec("int4-zstd").encode(values, bounds, scales, out)
        with pytest.raises(LocalProtocolError, match="out"):
            add_values(values, values, out)
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


def test_square_sums_of_floats_are_in_element_order() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    payload, _ = encode("raw32", values, bounds_of(0, 1000), f32(1))
    expected = 0.0
    for value in values.tolist():
        expected += value * value
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


# Payloads that no encoder writes.


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("raw32", f32(1, np.nan).tobytes()),
        ("raw32", f32(-np.inf, 1).tobytes()),
        ("bf16", half(1) + half(np.nan)),
        ("bf16", half(-np.inf) + half(1)),
        ("int8-zstd", half(np.nan) + raw_frame(b"\1\2")),
        ("int4-zstd", half(np.inf) + raw_frame(b"\x11")),
        ("int4-zstd", half(-np.inf) + raw_frame(b"\x11")),
    ],
)
def test_nan_and_infinity_are_refused(name: str, payload: bytes) -> None:
    assert refused(name, payload, bounds_of(0, 2)) is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("scale", [-1.0, -0.0, 2.0**-101, 1e-45, 2.0**101, 3e38])
def test_scales_out_of_bounds_are_refused(name: str, scale: float) -> None:
    payload = (b"\1\0" if scale == 1e-45 else half(scale)) + raw_frame(b"\1")
    assert refused(name, payload, bounds_of(0, 1)) is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("name", "count", "codes"),
    [
        ("int8-zstd", 3, b"\x01\x80\x02"),
        ("int4-zstd", 4, b"\x11\x18"),
        ("int4-zstd", 4, b"\x81\x11"),
        ("int4-zstd", 3, b"\x11\x11"),
        ("int4-zstd", 3, b"\x11\x81"),
        ("int4-zstd", 1, b"\x10"),
    ],
)
def test_codes_without_a_twin_and_used_padding_are_refused(
    name: str, count: int, codes: bytes
) -> None:
    payload = half(1) + raw_frame(codes)
    assert refused(name, payload, bounds_of(0, count)) is ErrorCode.BAD_PAYLOAD


def test_a_hand_made_frame_is_accepted() -> None:
    for frame in (raw_frame(b"\x21\x03"), raw_frame(b"\x21\x03", window=0x68)):
        chunk = codec("int4-zstd").decode(half(2) + frame, bounds_of(0, 3))
        assert values_of(chunk) == [2.0, 6.0, 4.0]


GOOD = raw_frame(b"\x21\x03")
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x21\x03")
SKIPPABLE = bytes.fromhex("502a4d1802000000") + b"\x21\x03"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(zstd_frame.MAGIC, id="magic only"),
        pytest.param(GOOD[1:], id="no magic"),
        pytest.param(UNSIZED, id="no content size"),
        pytest.param(raw_frame(b"\x21\x03", size=1), id="declares less"),
        pytest.param(raw_frame(b"\x21\x03", size=3), id="declares more"),
        pytest.param(raw_frame(b"\x21"), id="is shorter"),
        pytest.param(raw_frame(b"\x21", size=2), id="holds less than declared"),
        pytest.param(raw_frame(b"\x21\x03\x01", size=2), id="holds more than declared"),
        pytest.param(repeated_frame(128 << 10, size=2), id="bomb that declares the right size"),
        pytest.param(repeated_frame(128 << 10, size=128 << 10), id="bomb"),
        pytest.param(bytes.fromhex("28b52ffde06c06060663636363"), id="bomb of 7 exabytes"),
        pytest.param(raw_frame(b"\x21\x03", window=0x69), id="window beyond 8 MiB"),
        pytest.param(raw_frame(b"\x21\x03", window=0xA0), id="window of 1 GiB"),
        pytest.param(raw_frame(b"\x21\x03", dictionary=7), id="dictionary"),
        pytest.param(GOOD + b"\0", id="trailing byte"),
        pytest.param(GOOD + GOOD, id="two frames"),
        pytest.param(GOOD + SKIPPABLE, id="skippable frame after"),
        pytest.param(SKIPPABLE + GOOD, id="skippable frame before"),
        pytest.param(SKIPPABLE, id="skippable frame only"),
    ],
)
def test_bad_frames_are_refused(frame: bytes) -> None:
    assert refused("int4-zstd", half(2) + frame, bounds_of(0, 3)) is ErrorCode.BAD_PAYLOAD


def test_a_large_bomb_is_refused_before_it_is_decompressed() -> None:
    bomb = half(1) + zstandard.ZstdCompressor().compress(bytes(64 << 20))
    bounds = bounds_of(0, 1 << 16)
    assert len(bomb) <= codec("int8-zstd").payload_bytes_max(1 << 16, 1)
    assert refused("int8-zstd", bomb, bounds) is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize("name", codec_names())
def test_payloads_beyond_the_largest_are_too_large(name: str) -> None:
    size_bytes = codec(name).payload_bytes_max(3, 1)
    assert refused(name, bytes(size_bytes + 1), bounds_of(0, 3)) is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("name", codec_names())
def test_every_truncation_is_refused(name: str) -> None:
    payload, _ = encode(name, f32(1, -2, 3, 4), bounds_of(0, 1, 4), f32(1, 2))
    for length in range(len(payload)):
        assert refused(name, payload[:length], bounds_of(0, 1, 4)) is ErrorCode.BAD_PAYLOAD


def test_decoding_goes_on_after_a_damaged_frame() -> None:
    values = (np.arange(1000) % 15 - 7).astype(np.float32)
    payload, _ = encode("int4-zstd", values, bounds_of(0, 1000), f32(1))
    damaged = bytearray(payload)
    damaged[-3:] = b"\xff\xff\xff"
    for _ in range(3):
        refused("int4-zstd", bytes(damaged[:-1]), bounds_of(0, 1000))
        assert values_of(codec("int4-zstd").decode(payload, bounds_of(0, 1000))) == values.tolist()


# Scales.


def test_scales_are_rho_times_rms_in_bfloat16() -> None:
    values = f32(3, -3, 3, 4, 0, 0, 1e-35)
    scales = piece_scales(values, bounds_of(0, 3, 6, 7), 0.5)
    assert scales.tolist() == [1.5, 1.15625, 0.0]


def test_the_smallest_scales_are_zero() -> None:
    values = f32(2.0**-100, 2.0**-101, 0.0)
    assert piece_scales(values, bounds_of(0, 1, 2, 3), 1.0).tolist() == [2.0**-100, 0, 0]
    assert piece_scales(f32(), bounds_of(0), 1.0).tolist() == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_scales_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        piece_scales(f32(1, 2, bad), bounds_of(0, 2, 3), 0.5)
    assert caught.value.code is ErrorCode.NOT_FINITE


def test_a_matrix_with_one_loud_column_is_sampled_fairly() -> None:
    # A constant stride through 512 columns would see the loud one always or never.
    values = np.zeros((1024, 512), np.float32)
    values[:, 17] = 1.0
    assert values.size > 16 * RMS_SAMPLES_MAX
    (scale,) = piece_scales(values.reshape(-1), bounds_of(0, values.size), 1.0).tolist()
    assert scale == pytest.approx(512**-0.5, rel=0.2)


def test_the_subsample_is_close_to_the_whole() -> None:
    values = np.random.default_rng(0).standard_t(5, 1_000_003).astype(np.float32)
    (scale,) = piece_scales(values, bounds_of(0, values.size), 1.0).tolist()
    assert scale == pytest.approx(float(np.sqrt(np.mean(values**2))), rel=0.03)


# Addition and rounding.


def test_a_zero_value_leaves_the_bits_of_the_base() -> None:
    base, values = f32(-0.0, -0.0, 0.0, 1.0), f32(0.0, -0.0, -0.0, 2.0)
    out = np.empty_like(base)
    add_values(base, values, out)
    assert out.tobytes() == f32(-0.0, -0.0, 0.0, 3.0).tobytes()


def test_sums_that_cancel_are_positive_zero() -> None:
    base = f32(-1.0, 1.0)
    add_values(base, f32(1.0, -1.0), base)
    assert base.tobytes() == f32(0.0, 0.0).tobytes()


def test_subnormal_numbers_are_not_flushed() -> None:
    base = f32(1e-45)
    add_values(base, f32(2e-45), base)
    assert base.view(np.uint32).tolist() == [2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_equals_torch(dtype: Literal["float32", "bfloat16", "float16"]) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 100_000, np.uint32)
    # Ties, overflow to infinity, subnormals of the target, zeros, infinities.
    edges = np.array(
        [
            0x3F808000,
            0x3F818000,
            0x7F7F8000,
            0x477FF000,
            0x33000000,
            0x33000001,
            0x00008000,
            0x80000000,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
        ],
        np.uint32,
    )
    values = np.concatenate([bits, edges]).view(np.float32)
    out = np.empty_like(values)
    round_to_dtype(values, dtype, out)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    is_nan = np.isnan(values)
    assert np.array_equal(np.isnan(out), is_nan)
    assert out[~is_nan].tobytes() == expected[~is_nan].tobytes()
    round_to_dtype(values, dtype, values)
    assert values.tobytes() == out.tobytes()


@pytest.mark.parametrize("name", QUANTISED)
def test_reconstruction_equals_torch_in_one_rounding(name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    base = rng.normal(size=4096).astype(np.float32)
    scales = piece_scales(base, bounds_of(0, 4096), 0.3)
    payload, _ = encode(name, base, bounds_of(0, 4096), scales)
    values, out = np.empty_like(base), np.empty_like(base)
    codec(name).decode(payload, bounds_of(0, 4096)).values(values)
    add_values(base, values, out)
    codes = torch.from_numpy(np.rint(values / scales[0]))
    fused = torch.addcmul(
        torch.from_numpy(base).double(), codes.double(), torch.tensor(scales[0]).double()
    )
    assert out.tobytes() == fused.float().numpy().tobytes()


# Compilation.


def signatures() -> dict[str, int]:
    """Compiled variants per kernel."""
    found = {name: getattr(item, "signatures", None) for name, item in vars(kernels).items()}
    return {name: len(compiled) for name, compiled in found.items() if compiled is not None}


def test_warm_up_compiles_every_kernel_for_the_only_types_used() -> None:
    warm_up()
    before = signatures()
    assert len(before) >= 11 and set(before.values()) == {1}, before
    values = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    values.setflags(write=False)
    out, bounds = np.empty_like(values), bounds_of(0, 1000, 3000)
    bounds.setflags(write=False)
    for each in map(codec, codec_names()):
        use(each, values, bounds, out)
    round_to_dtype(values[::2], "bfloat16", out[:1500])
    assert signatures() == before


def use(each: Codec, values: F32, bounds: I64, out: F32) -> None:
    payload = each.encode(values, bounds, piece_scales(values, bounds, 1.0), out)
    for form in (payload, memoryview(payload), memoryview(bytearray(b"x" + payload))[1:]):
        chunk = each.decode(form, bounds)
        chunk.values(out)
        chunk.square_sums()
    add_values(values, out, out)


@pytest.mark.parametrize("module", ["codecs", "fragments"])
def test_importing_neither_compiles_nor_needs_torch(module: str) -> None:
    script = (
        f"import sys, narrows.proto.{module}\n"
        "assert not {'torch', 'zmq'} & set(sys.modules)\n"
        "kernels = sys.modules.get('narrows.proto.kernels')\n"
        "compiled = [f for f in vars(kernels or sys).values() if getattr(f, 'signatures', None)]\n"
        "assert not compiled, compiled\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
