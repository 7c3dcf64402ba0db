"""Codecs for any chunk: exact reconstruction, error bounds, a numpy twin, hostile payloads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import zstandard
from coding import add_values
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from narrows.proto.codec import kernels
from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.codecs import RMS_SAMPLES_MAX, codec, codec_names, piece_scales
from narrows.proto.codec.kernels import F32, I8, I64, NOTHING, read_only
from narrows.proto.errors import RemoteProtocolError

# A first call compiles; a deadline would be a timed assertion anyway.
LIMITS = {"int8-zstd": 127, "int4-zstd": 7}
names = st.sampled_from(codec_names())
quantised_names = st.sampled_from(sorted(LIMITS))
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
scale_bits = st.just(0) | st.integers(27 << 7, 227 << 7)
near_one = st.integers(120 << 7, 134 << 7)


@dataclass(frozen=True)
class Chunk:
    """Arguments of an encoder."""

    values: F32
    bounds: I64
    scales: F32


@st.composite
def chunks(draw: st.DrawFn, least: int = 0) -> Chunk:
    lengths = draw(st.lists(st.integers(1, 300), min_size=least, max_size=5))
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    count = int(bounds[-1])
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    values = (rng.standard_t(3, count) * draw(st.sampled_from([1e-30, 1.0, 1e20]))).astype("f4")
    some = draw(st.lists(st.tuples(st.integers(0, max(count - 1, 0)), finite), max_size=10))
    for index, value in some if count else []:
        values[index] = value
    bits = draw(st.lists(scale_bits | near_one, min_size=len(lengths), max_size=len(lengths)))
    scales = (np.array(bits, np.uint32) << np.uint32(16)).view(np.float32)
    return Chunk(values, bounds, scales)


def same_bits(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()


# The twin: what the kernels compute, in plain numpy.


def twin_quantise(chunk: Chunk, limit: int) -> tuple[I8, F32]:
    scales = np.repeat(chunk.scales, np.diff(chunk.bounds))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        ratio = np.clip(chunk.values * inverse, np.float32(-limit), np.float32(limit))
    codes = np.rint(ratio).astype(np.int8)
    return codes, scales * codes.astype(np.float32)


def twin_pack(codes: I8) -> bytes:
    packed = bytearray()
    for start in range(0, codes.size, kernels.RUN):
        run = [int(code) & 15 for code in codes[start : start + kernels.RUN]]
        half = (len(run) + 1) // 2
        packed += bytes(low | high << 4 for low, high in zip(run, [*run[half:], 0], strict=False))[
            :half
        ]
    return bytes(packed)


def twin_mean_squares(values: F32, samples_max: int) -> float:
    width = -(-values.size // samples_max)
    hashed = [(i * 0x9E3779B1) % (1 << 32) >> 8 for i in range(values.size // width)]
    samples = [float(values[i * width + (h * width >> 24)]) for i, h in enumerate(hashed)]
    counted = [v for v in samples if v] or [v for v in values.tolist() if v]
    total = 0.0
    for value in counted:
        total += value**2
    return total / max(len(counted), 1)


def twin_bfloat16(values: F32) -> F32:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


@given(chunks(), st.sampled_from([1, 7, 127]))
def test_quantise_and_scale_codes_equal_their_twin(chunk: Chunk, limit: int) -> None:
    codes, out = np.empty(chunk.values.size, np.int8), np.empty_like(chunk.values)
    inputs = read_only(chunk.values), read_only(chunk.bounds), read_only(chunk.scales)
    largest = kernels.quantise(*inputs, np.float32(limit), codes)
    expected_codes, expected_out = twin_quantise(chunk, limit)
    assert codes.tolist() == expected_codes.tolist()
    magnitudes = np.abs(chunk.values).view(np.uint32)
    assert largest == (int(magnitudes.max()) if magnitudes.size else 0)
    kernels.scale_codes(read_only(codes), *inputs[1:], out)
    assert same_bits(out, expected_out)


@given(chunks(), quantised_names, st.data())
def test_encode_push_is_encode_of_the_difference_and_keeps_the_rest(
    chunk: Chunk, name: str, data: st.DataObject
) -> None:
    count = chunk.values.size
    small = hnp.arrays(np.float32, count, elements=st.floats(-1e3, 1e3, width=32))
    base, local = data.draw(small), data.draw(small)
    residual = data.draw(st.none() | small)
    values = base - local if residual is None else (base - local) + residual
    sent, next_residual = np.empty_like(values), np.empty_like(values)
    each, spans = codec(name), (chunk.bounds, chunk.scales)
    expected = each.encode(values, *spans, sent)
    assert each.encode_push(base, local, residual, *spans, next_residual) == expected
    np.testing.assert_array_equal(next_residual, values - sent)


@given(chunks(), names, st.data())
def test_encode_step_advances_as_the_receiver_does(
    chunk: Chunk, name: str, data: st.DataObject
) -> None:
    count = chunk.values.size
    small = hnp.arrays(np.float32, count, elements=st.floats(-1e3, 1e3, width=32))
    params, published = data.draw(small), data.draw(small)
    advanced, received = np.empty_like(params), np.empty_like(params)
    payload = codec(name).encode_step(params, published, chunk.bounds, chunk.scales, advanced)
    codec(name).decode(payload, chunk.bounds).add_to(published, received)
    assert same_bits(advanced, received)
    twin = np.empty_like(params)
    codec(name).decode(payload, chunk.bounds).values(twin)
    add_values(published, twin, twin)
    assert same_bits(received, twin)


@given(hnp.arrays(np.int8, st.integers(0, 800), elements=st.integers(-7, 7)))
def test_pack_equals_its_twin_and_unpack_inverts_it(codes: I8) -> None:
    packed, back = np.empty((codes.size + 1) // 2, np.uint8), np.empty_like(codes)
    kernels.pack(read_only(codes.view(np.uint8)), packed)
    assert packed.tobytes() == twin_pack(codes)
    kernels.unpack(read_only(packed), back)
    assert back.tolist() == codes.tolist()


@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-100, 100, width=32)),
    st.integers(1, 40),
)
def test_sampled_mean_squares_equal_their_twin(values: F32, samples_max: int) -> None:
    middle = values.size // 2
    cuts = sorted({0, middle, values.size})
    out = np.empty(len(cuts) - 1, np.float64)
    kernels.sampled_mean_squares(
        read_only(values), NOTHING, NOTHING, read_only(np.array(cuts, np.int64)), samples_max, out
    )
    parts = [values[a:b] for a, b in pairwise(cuts)]
    assert out.tolist() == [twin_mean_squares(part, samples_max) for part in parts]


def test_the_subsample_of_a_large_piece_equals_its_twin() -> None:
    values = np.random.default_rng(0).normal(size=1_000_003).astype(np.float32)
    out = np.empty(1, np.float64)
    bounds = np.array([0, values.size], np.int64)
    sources = read_only(values), NOTHING, NOTHING
    kernels.sampled_mean_squares(*sources, read_only(bounds), RMS_SAMPLES_MAX, out)
    assert out.tolist() == [twin_mean_squares(values, RMS_SAMPLES_MAX)]


@given(hnp.arrays(np.float32, st.integers(0, 50), elements=finite))
def test_bfloat16_rounding_equals_its_twin(values: F32) -> None:
    out = np.empty_like(values)
    round_to_dtype(values, "bfloat16", out)
    assert same_bits(out, twin_bfloat16(values))


@given(st.data())
def test_add_values_equals_its_twin(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 50))
    base = data.draw(hnp.arrays(np.float32, count, elements=finite))
    values = data.draw(
        hnp.arrays(np.float32, count, elements=finite | st.sampled_from([0.0, -0.0]))
    )
    with np.errstate(over="ignore"):
        expected = np.where(values == 0, base, base + values)
    out = np.empty_like(base)
    add_values(base, values, out)
    assert same_bits(out, expected)
    add_values(base, values, base)
    assert same_bits(base, expected)


# Round trips.


@given(names, chunks())
def test_the_decoder_gets_what_the_encoder_says(name: str, chunk: Chunk) -> None:
    values = np.clip(chunk.values, -1e38, 1e38)
    given_values = values.copy()
    reconstructed, out = np.full_like(values, np.nan), np.full_like(values, np.nan)
    payload = codec(name).encode(values, chunk.bounds, chunk.scales, reconstructed)
    assert same_bits(values, given_values)
    assert len(payload) <= codec(name).payload_bytes_max(values.size, chunk.scales.size)
    decoded = codec(name).decode(memoryview(payload), chunk.bounds)
    decoded.values(out)
    assert same_bits(out, reconstructed)
    assert (decoded.codec, decoded.count) == (name, values.size)
    expected_scales = chunk.scales if codec(name).quantised else np.ones_like(chunk.scales)
    assert same_bits(decoded.scales, expected_scales)


@given(quantised_names, chunks())
def test_quantised_errors_are_bounded(name: str, chunk: Chunk) -> None:
    reconstructed = np.empty_like(chunk.values)
    codec(name).encode(chunk.values, chunk.bounds, chunk.scales, reconstructed)
    scales = np.repeat(chunk.scales, np.diff(chunk.bounds)).astype(np.float64)
    in_range = np.clip(
        chunk.values.astype(np.float64), -LIMITS[name] * scales, LIMITS[name] * scales
    )
    # Half a step, and the rounding of value * (1 / scale) before it: two half ulps of 127.
    bound = scales * (0.5 + LIMITS[name] * 2.0**-22)
    assert np.all(np.abs(in_range - reconstructed) <= bound)


@given(chunks())
def test_float_codecs_lose_rounding_only(chunk: Chunk) -> None:
    values = np.clip(chunk.values, -1e38, 1e38)
    reconstructed = np.empty_like(values)
    codec("raw32").encode(values, chunk.bounds, chunk.scales, reconstructed)
    assert same_bits(reconstructed, values)
    codec("bf16").encode(values, chunk.bounds, chunk.scales, reconstructed)
    assert same_bits(reconstructed, twin_bfloat16(values))


@given(names, chunks())
def test_square_sums(name: str, chunk: Chunk) -> None:
    values = np.clip(chunk.values, -1e38, 1e38)
    reconstructed = np.empty_like(values)
    payload = codec(name).encode(values, chunk.bounds, chunk.scales, reconstructed)
    sums = codec(name).decode(payload, chunk.bounds).square_sums()
    for span, (start, end) in enumerate(zip(chunk.bounds, chunk.bounds[1:], strict=False)):
        # Exact for codes, whatever the order; in 16 lanes for floats.
        lanes = [0.0] * 16
        for index, value in enumerate(reconstructed[start:end].tolist()):
            lanes[index % 16] += value * value
        expected = 0.0
        for lane in lanes:
            expected += lane
        assert sums[span] == expected


@given(chunks(least=1), st.floats(0.01, 4.0))
def test_piece_scales_are_what_the_codecs_accept(chunk: Chunk, rho: float) -> None:
    values = np.clip(chunk.values, -1e20, 1e20)
    scales = piece_scales(values, chunk.bounds, rho)
    assert np.all(scales.view(np.uint32) & 0xFFFF == 0)
    assert np.all((scales == 0) | (scales >= 2.0**-100))
    for scale, start, end in zip(scales, chunk.bounds, chunk.bounds[1:], strict=False):
        part = values[start:end][values[start:end] != 0].astype(np.float64)
        exact = rho * np.sqrt(np.mean(part**2)) if part.size else 0.0
        assert abs(scale - exact) <= exact * 2.0**-8 or exact <= 2.0**-100
    reconstructed = np.empty_like(values)
    payload = codec("int8-zstd").encode(values, chunk.bounds, scales, reconstructed)
    assert same_bits(codec("int8-zstd").decode(payload, chunk.bounds).scales, scales)


@given(chunks(least=1))
def test_a_piece_has_the_same_scale_wherever_it_stands(chunk: Chunk) -> None:
    values = np.clip(chunk.values, -1e20, 1e20)
    together = piece_scales(values, chunk.bounds, 0.5)
    for piece, (start, end) in enumerate(zip(chunk.bounds, chunk.bounds[1:], strict=False)):
        alone = piece_scales(values[start:end].copy(), np.array([0, end - start]), 0.5)
        assert same_bits(alone, together[piece : piece + 1])


# Hostile payloads: refused, or decoded into something harmless; never anything else.


def check_decode(name: str, payload: bytes, bounds: I64) -> None:
    try:
        decoded = codec(name).decode(payload, bounds)
    except RemoteProtocolError:
        return
    out = np.full(int(bounds[-1]), np.nan, np.float32)
    decoded.values(out)
    assert np.isfinite(out).all()
    assert np.isfinite(decoded.square_sums()).all()
    assert len(payload) <= codec(name).payload_bytes_max(decoded.count, decoded.scales.size)
    if codec(name).quantised:
        scales = np.repeat(decoded.scales, np.diff(bounds))
        assert np.all(np.abs(out) <= LIMITS[name] * scales)


bounds_of_few = st.lists(st.integers(1, 40), max_size=3).map(
    lambda lengths: np.cumsum([0, *lengths], dtype=np.int64)
)


@given(names, st.binary(max_size=200), bounds_of_few)
@example("int4-zstd", bytes.fromhex("803f28b52ffde06c06060663636363"), np.array([0, 4]))
def test_arbitrary_payloads(name: str, payload: bytes, bounds: I64) -> None:
    check_decode(name, payload, bounds)


@given(quantised_names, st.lists(near_one, max_size=3), st.data())
def test_arbitrary_codes_in_a_good_frame(name: str, bits: list[int], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=len(bits), max_size=len(bits)))
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    size = int(bounds[-1]) if name == "int8-zstd" else (int(bounds[-1]) + 1) // 2
    body = data.draw(st.binary(min_size=size, max_size=size))
    frame = zstandard.ZstdCompressor().compress(body)
    check_decode(name, np.array(bits, "<u2").tobytes() + frame, bounds)


@given(names, chunks(least=1), st.data())
def test_damaged_payloads(name: str, chunk: Chunk, data: st.DataObject) -> None:
    values = np.clip(chunk.values, -1e38, 1e38)
    good = codec(name).encode(values, chunk.bounds, chunk.scales, np.empty_like(values))
    payload = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    tail = data.draw(st.binary(max_size=4))
    for damaged in (payload, payload[:cut], payload + tail, payload[cut:] + payload[:cut]):
        check_decode(name, bytes(damaged), chunk.bounds)


@given(names, chunks(least=1), st.data())
def test_cut_or_extended_payloads_are_always_refused(
    name: str, chunk: Chunk, data: st.DataObject
) -> None:
    values = np.clip(chunk.values, -1e38, 1e38)
    good = codec(name).encode(values, chunk.bounds, chunk.scales, np.empty_like(values))
    cut = data.draw(st.integers(0, len(good) - 1))
    for damaged in (good[:cut], good + data.draw(st.binary(min_size=1, max_size=9)), good + good):
        try:
            codec(name).decode(damaged, chunk.bounds)
        except RemoteProtocolError:
            continue
        raise AssertionError(f"{len(damaged)} bytes were accepted instead of {len(good)}")
