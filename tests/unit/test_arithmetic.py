"""Arithmetic whose bits are promised: scales, addition, rounding; and how it is compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import numpy as np
import pytest
from coding import QUANTISED, add_values, bounds_of, encode, f32

from narrows.proto.codec import kernels
from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.codecs import (
    RMS_SAMPLES_MAX,
    Codec,
    codec,
    codec_names,
    piece_scales,
    warm_up,
)
from narrows.proto.codec.kernels import F32, I64
from narrows.proto.errors import ErrorCode, LocalProtocolError

# Scales.


def test_scales_are_rho_times_rms_in_bfloat16() -> None:
    values = f32(3, -3, 3, 4, 0, 0, 1e-35)
    scales = piece_scales(values, bounds_of(0, 3, 6, 7), 0.5)
    assert scales.tolist() == [1.5, 2.0, 0.0]


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
    values = np.full((1024, 512), 1e-6, np.float32)
    values[:, 17] = 1.0
    assert values.size > 16 * RMS_SAMPLES_MAX
    (scale,) = piece_scales(values.reshape(-1), bounds_of(0, values.size), 1.0).tolist()
    assert scale == pytest.approx(512**-0.5, rel=0.2)


def test_the_step_is_one_for_what_is_not_zero() -> None:
    """An embedding of which few rows were used."""
    values = np.zeros((1024, 512), np.float32)
    values[::64] = np.random.default_rng(0).standard_normal((16, 512))
    (scale,) = piece_scales(values.reshape(-1), bounds_of(0, values.size), 1.0).tolist()
    assert scale == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("place", [12345, 1_999_999])
def test_what_no_sample_sees_still_gets_a_step(place: int) -> None:
    values = np.zeros(2_000_000, np.float32)
    values[place] = 0.75
    assert piece_scales(values, bounds_of(0, values.size), 1.0).tolist() == [0.75]


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


@pytest.mark.parametrize("module", ["codec.codecs", "fragments"])
def test_importing_neither_compiles_nor_needs_torch(module: str) -> None:
    script = (
        f"import sys, narrows.proto.{module}\n"
        "assert not {'torch', 'zmq'} & set(sys.modules)\n"
        "kernels = sys.modules.get('narrows.proto.codec.kernels')\n"
        "compiled = [f for f in vars(kernels or sys).values() if getattr(f, 'signatures', None)]\n"
        "assert not compiled, compiled\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
