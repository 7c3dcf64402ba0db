"""Units: what is printed can be read again, and is close; what is read is exact."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto import units
from narrows.proto.errors import ConfigError

PAIRS: list[tuple[Callable[[float], str], Callable[[str], float]]] = [
    (units.format_duration_s, units.parse_duration_s),
    (units.format_bytes, units.parse_bytes),
    (units.format_bits_per_s, units.parse_bits_per_s),
    (units.format_count, units.parse_count),
]


@pytest.mark.parametrize(("write", "read"), PAIRS)
@given(value=st.integers(0, 10**15))
def test_printed_values_can_be_read_and_are_close(
    write: Callable[[float], str], read: Callable[[str], float], value: int
) -> None:
    # The worst case is 1.05 printed as 1.0 or 1.1.
    assert abs(read(write(value)) - value) <= 0.0501 * value


@pytest.mark.parametrize(("write", "read"), PAIRS)
@given(low=st.integers(0, 10**15), high=st.integers(0, 10**15))
def test_printing_keeps_the_order(
    write: Callable[[float], str], read: Callable[[str], float], low: int, high: int
) -> None:
    low, high = sorted((low, high))
    assert read(write(low)) <= read(write(high))


@given(
    whole=st.integers(0, 10**12),
    digits=st.text("0123456789", max_size=6),
    unit=st.sampled_from(sorted(units.SECONDS)),
)
def test_reading_is_exact(whole: int, digits: str, unit: str) -> None:
    exact = Fraction(f"{whole}.{digits}0") * units.SECONDS[unit]
    assert units.parse_duration_s(f"{whole}.{digits}{unit}") == float(exact)


@pytest.mark.parametrize("kind", ["bytes", "count"])
@given(value=st.integers(0, 1 << 62))
def test_whole_numbers_are_written_as_they_are_read(kind: str, value: int) -> None:
    again = units.PARSERS[kind](units.written(kind, value))
    assert again == value and isinstance(again, int)


@pytest.mark.parametrize("kind", ["duration", "bits_per_s"])
@given(value=st.floats(0, 1e18, allow_subnormal=False).filter(lambda v: v == 0 or v > 1e-90))
def test_times_and_rates_are_written_as_they_are_read(kind: str, value: float) -> None:
    assert units.PARSERS[kind](units.written(kind, value)) == value


@given(
    number=st.integers(1, 10**6),
    unit=st.sampled_from(sorted(units.BYTES)),
    spelled=st.text("kKMGTibBytes/", min_size=1, max_size=6),
)
def test_sizes_have_one_meaning_or_none(number: int, unit: str, spelled: str) -> None:
    size = units.parse_bytes(f"{number}{unit}")
    assert size == number * units.BYTES[unit]
    assert (size // number) % (1024 if "i" in unit else 10) == (1 if unit == "B" else 0)
    try:
        units.parse_bytes(f"{number}{spelled}")
    except ConfigError as error:
        # A remedy can be followed.
        for each in error.remedy.removeprefix("write ").split(" or ") if error.remedy else []:
            assert units.parse_bytes(each) > 0
    else:
        assert spelled in (*units.BYTES, "KB")


@given(text=st.text(max_size=40), pair=st.sampled_from(PAIRS))
def test_any_text_is_a_value_or_a_configuration_error(
    text: str, pair: tuple[Callable[[float], str], Callable[[str], float]]
) -> None:
    try:
        assert pair[1](text) >= 0
    except ConfigError as error:
        assert error.expected
