"""Rate control: the requested bits within a few exchanges, and never at any price."""

from __future__ import annotations

import numpy as np
import pytest
from coding import QUANTISED

from narrows.bench.codec.bench import snr_db
from narrows.bench.kit.outer_grads import Data, drawn, recorded
from narrows.proto.codec.bit_control import (
    AUTO,
    BitControl,
    codecs_of,
    make_bit_control,
    setting_names,
)
from narrows.proto.codec.codecs import codec_names
from narrows.proto.codec.transfer import encode_fragment, error_ratio


def exchange(data: Data, control: BitControl) -> tuple[float, float]:
    """Bits and SNR (dB) of one exchange, which the control has observed."""
    sent = np.empty_like(data.values)
    chunks = list(
        encode_fragment(
            data.fragment, data.values, codec_name=control.codec, rho=control.rho,
            chunk_elements=1 << 16, reconstructed=sent,
        )
    )  # fmt: skip
    taken = 8 * sum(len(chunk.payload) for chunk in chunks) / data.values.size
    left = data.values - sent
    control.observe(taken, error_ratio(data.fragment, chunks, lambda places: left[places]))
    return taken, snr_db(data.values, sent) or 200.0


def data_of(name: str) -> Data:
    return recorded() if name == "recorded" else drawn(name, 1 << 18)


@pytest.mark.parametrize("target", [1.5, 2.0, 3.0, 4.0, 5.5])
@pytest.mark.parametrize("name", ["gaussian", "laplace", "recorded"])
def test_the_target_is_met_after_a_few_exchanges(name: str, target: float) -> None:
    data, control = data_of(name), make_bit_control(AUTO, rho=0.5, bits=target)
    taken = [exchange(data, control)[0] for _ in range(12)]
    assert taken[-4:] == pytest.approx([target] * 4, abs=0.1)
    assert control.codec == ("int8-zstd" if target >= 4 else "int4-zstd")


def fixed(data: Data, codec: str, rho: float) -> tuple[float, float]:
    return exchange(data, make_bit_control(codec, rho=rho, bits=0.0))


@pytest.mark.parametrize("target", [1.5, 3.0, 5.5, 8.0])
@pytest.mark.parametrize("name", ["gaussian", "laplace", "student_t", "sparse_rows", "recorded"])
def test_more_bits_are_never_worse_than_what_a_fixed_setting_gives(
    name: str, target: float
) -> None:
    """No fixed setting that takes no more bits has more than 3 dB less error."""
    data, control = data_of(name), make_bit_control(AUTO, rho=0.5, bits=target)
    seen = [exchange(data, control) for _ in range(40)][-8:]
    taken, snr = np.median(seen, axis=0).tolist()
    grid = [
        fixed(data, codec, rho)
        for codec in QUANTISED
        for rho in np.geomspace(1 / 64, 4, 17).tolist()
    ]
    best = max(quality for bits, quality in grid if bits <= min(taken, target) + 0.02)
    assert snr > best - 3.0
    assert taken < target + 0.25


def test_rare_large_values_get_the_wider_codec() -> None:
    data, control = data_of("student_t"), make_bit_control(AUTO, rho=0.5, bits=3.0)
    for _ in range(12):
        exchange(data, control)
    assert control.codec == "int8-zstd"


def test_it_begins_near_the_target_of_gaussian_data() -> None:
    data = drawn("gaussian", 1 << 18)
    for target in (2.0, 3.0, 5.0):
        control = make_bit_control(AUTO, rho=0.5, bits=target)
        assert exchange(data, control)[0] == pytest.approx(target, abs=0.25)


def test_one_wild_observation_moves_it_by_half_an_octave_at_most() -> None:
    control = make_bit_control(AUTO, rho=0.5, bits=3.0)
    before = control.rho
    control.observe(1000.0, 1.0)
    assert control.rho == pytest.approx(before * 2**0.5)
    control.observe(0.0, 1.0)
    assert control.rho == pytest.approx(before)


def test_a_fragment_of_zeros_and_noise_beyond_measure_stay_within_bounds() -> None:
    for taken, ratio in ((0.0, 0.0), (64.0, 1.0), (0.0, 1e300), (64.0, 1e300)):
        control = make_bit_control(AUTO, rho=0.5, bits=3.0)
        for _ in range(50):
            control.observe(taken, ratio)
            assert control.codec in QUANTISED
        assert 1 / 64 <= control.rho <= 4.0


def test_the_codec_does_not_alternate_between_its_bounds() -> None:
    control = make_bit_control(AUTO, rho=0.5, bits=3.3)
    control.set_rho(0.45)
    seen = control.codec
    for rho in (0.41, 0.47, 0.44):
        control.set_rho(rho)
        assert control.codec == seen


def test_a_named_codec_is_fixed() -> None:
    control = make_bit_control("int8-zstd", rho=0.25, bits=3.0)
    control.observe(7.0, 9.0)
    assert (control.codec, control.rho) == ("int8-zstd", 0.25)
    assert codecs_of("int8-zstd") == {"int8-zstd"}
    assert codecs_of(AUTO) == set(QUANTISED)
    assert setting_names() == (*codec_names(), AUTO)
