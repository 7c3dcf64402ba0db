"""Rate control: the bits that were asked for, within a few exchanges, whatever the data."""

from __future__ import annotations

import numpy as np
import pytest
from coding import QUANTISED

from narrows.bench.outer_grads import Data, drawn, recorded
from narrows.proto.codecs import codec_names
from narrows.proto.rate import AUTO, RateControl, codecs_of, rate_control, setting_names
from narrows.proto.transfer import encode_fragment


def bits(data: Data, control: RateControl) -> float:
    """What one exchange takes."""
    chunks = encode_fragment(
        data.fragment, data.values, codec_name=control.codec, rho=control.rho,
        chunk_elements=1 << 16, reconstructed=np.empty_like(data.values),
    )  # fmt: skip
    return 8 * sum(len(chunk.payload) for chunk in chunks) / data.values.size


@pytest.mark.parametrize("target", [1.5, 2.0, 3.0, 4.0, 5.5])
@pytest.mark.parametrize("name", ["gaussian", "laplace", "student_t", "recorded"])
def test_the_target_is_met_after_a_few_exchanges(name: str, target: float) -> None:
    data = recorded() if name == "recorded" else drawn(name, 1 << 16)
    control = rate_control(AUTO, rho=0.5, bits=target)
    taken: list[float] = []
    for _ in range(12):
        taken.append(bits(data, control))
        control.observe(taken[-1])
    assert taken[-4:] == pytest.approx([target] * 4, abs=0.1)
    assert control.codec == ("int8-zstd" if target >= 4 else "int4-zstd")


def test_it_begins_near_the_target_of_gaussian_data() -> None:
    data = drawn("gaussian", 1 << 18)
    for target in (2.0, 3.0, 5.0):
        control = rate_control(AUTO, rho=0.5, bits=target)
        assert bits(data, control) == pytest.approx(target, abs=0.25)


def test_one_wild_observation_moves_it_by_half_an_octave_at_most() -> None:
    control = rate_control(AUTO, rho=0.5, bits=3.0)
    before = control.rho
    control.observe(1000.0)
    assert control.rho == pytest.approx(before * 2**0.5)
    control.observe(0.0)
    assert control.rho == pytest.approx(before)


def test_a_fragment_of_zeros_and_noise_beyond_measure_stay_within_bounds() -> None:
    for taken in (0.0, 64.0):
        control = rate_control(AUTO, rho=0.5, bits=3.0)
        for _ in range(50):
            control.observe(taken)
            assert control.codec in QUANTISED
        assert 1 / 64 <= control.rho <= 4.0


def test_the_codec_does_not_alternate_between_its_bounds() -> None:
    control = rate_control(AUTO, rho=0.5, bits=3.3)
    control.set_rho(0.45)
    seen = control.codec
    for rho in (0.41, 0.47, 0.44):
        control.set_rho(rho)
        assert control.codec == seen


def test_a_named_codec_is_fixed() -> None:
    control = rate_control("int8-zstd", rho=0.25, bits=3.0)
    control.observe(7.0)
    assert (control.codec, control.rho) == ("int8-zstd", 0.25)
    assert codecs_of("int8-zstd") == {"int8-zstd"}
    assert codecs_of(AUTO) == set(QUANTISED)
    assert setting_names() == (*codec_names(), AUTO)
