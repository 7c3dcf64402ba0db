"""Values with units: the accepted texts, the refusals with their remedy, the printed texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from narrows.proto import units
from narrows.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5s", 1.5),
        ("200ms", 0.2),
        ("2min", 120),
        ("1h", 3600),
        ("2 d", 172800),
        ("5us", 5e-6),
        ("0", 0),
        ("1e3ms", 1),
        (" 3s ", 3),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 << 20),
        ("2GB", 2 * 10**9),
        ("512B", 512),
        ("0", 0),
        ("1.5KiB", 1536),
        # Both spellings of a thousand bytes.
        ("3kB", 3000),
        ("3KB", 3000),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    value = units.parse_bytes(text)
    assert value == size_bytes and isinstance(value, int)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("2Gbit/s", 2e9), ("800kbit/s", 8e5), ("0", 0), ("0.5 Mbit/s", 5e5), ("9bit/s", 9)],
)
def test_bit_rates(text: str, bits_per_s: float) -> None:
    assert units.parse_bits_per_s(text) == bits_per_s


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12e9", 12 * 10**9),
        ("1.5M", 1_500_000),
        ("300", 300),
        ("3B", 3 * 10**9),
        ("0.1k", 100),
        # Exact beyond the 53 bits of a float.
        ("9007199254740993", 9007199254740993),
        ("1.000000000000000001e18", 10**18 + 1),
    ],
)
def test_counts(text: str, count: int) -> None:
    value = units.parse_count(text)
    assert value == count and isinstance(value, int)


@pytest.mark.parametrize(("count", "text"), [(0, "0 starts"), (1, "1 start"), (2, "2 starts")])
def test_one_is_not_a_plural(count: int, text: str) -> None:
    assert units.counted(count, "start") == text


REFUSED: list[tuple[Callable[[str], float], str, str]] = [
    (units.parse_duration_s, "10", "without a unit"),
    (units.parse_duration_s, "10 parsecs", "unknown unit"),
    (units.parse_duration_s, "-1s", "not a duration"),
    (units.parse_duration_s, "", "not a duration"),
    (units.parse_duration_s, "s", "not a duration"),
    (units.parse_duration_s, "nan", "not a duration"),
    (units.parse_duration_s, "1e999s", "not a duration"),
    (units.parse_duration_s, "1s 2s", "not a duration"),
    (units.parse_duration_s, "\N{ARABIC-INDIC DIGIT ONE}s", "not a duration"),
    (units.parse_bytes, "64", "without a unit"),
    (units.parse_bytes, "0.5B", "not a whole number"),
    (units.parse_bits_per_s, "2GB", "unknown unit"),
    (units.parse_count, "1.5", "not a whole number"),
    (units.parse_count, "12 gallons", "unknown unit"),
    (units.parse_count, "1e50k", "a count beyond 1e50"),
]


@pytest.mark.parametrize(("parse", "text", "message"), REFUSED)
def test_refused(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert caught.value.expected and caught.value.got == repr(text)


@pytest.mark.parametrize("unit", ["s", "B", "bit/s", ""])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_that_no_float_can_be_is_refused(unit: str, digits: int) -> None:
    kind = {"s": "duration", "B": "bytes", "bit/s": "bits_per_s", "": "count"}[unit]
    with pytest.raises(ConfigError, match=r"^config: not a"):
        units.PARSERS[kind]("9" * digits + unit)


@pytest.mark.parametrize(("kind", "unit"), [("duration", "s"), ("bytes", "TiB"), ("count", "T")])
def test_the_largest_value_is_read_as_it_is_written(kind: str, unit: str) -> None:
    value = units.PARSERS[kind]("1" + "0" * 35 + unit)
    assert units.PARSERS[kind](units.written(kind, value)) == value


def test_a_unit_in_the_wrong_case_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bits_per_s("2gbit/s")
    assert caught.value.remedy == "write 2Gbit/s"


@pytest.mark.parametrize(
    ("parse", "text", "remedy"),
    [
        # Whoever writes 64M for a size means one of two numbers: which, only they know.
        (units.parse_bytes, "64M", "write 64MB or 64MiB"),
        (units.parse_bytes, "4k", "write 4kB or 4KiB"),
        (units.parse_bytes, "4K", "write 4kB or 4KiB"),
        (units.parse_bytes, "2Gi", "write 2GiB"),
        (units.parse_bytes, "64mib", "write 64MiB"),
        (units.parse_bytes, "10 bytes", "write 10B"),
        (units.parse_duration_s, "5m", "write 5ms or 5min"),
        (units.parse_duration_s, "5sec", "write 5s"),
        (units.parse_duration_s, "2hours", "write 2h"),
        (units.parse_count, "3K", "write 3k"),
        (units.parse_count, "12 billion", "write 12B"),
        # Bits are not bytes: no such guess.
        (units.parse_bits_per_s, "2GB", ""),
        (units.parse_bytes, "2Gbit/s", ""),
        (units.parse_duration_s, "3 parsecs", ""),
    ],
)
def test_the_nearest_units_are_named(parse: Callable[[str], float], text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="unknown unit") as caught:
        parse(text)
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("bytes", 64 << 20, "64MiB"),
        ("bytes", 500 * 10**6, "500MB"),
        ("bytes", 65537, "65537B"),
        ("bytes", 1 << 40, "1TiB"),
        ("bytes", 0, "0"),
        ("duration", 3600.0, "1h"),
        ("duration", 0.02, "20ms"),
        ("duration", 1.5, "1.5s"),
        ("duration", 2.0, "2s"),
        ("bits_per_s", 2e9, "2Gbit/s"),
        ("bits_per_s", 1e15, "1000Tbit/s"),
        ("count", 12 * 10**9, "12B"),
        ("count", 12_345, "12345"),
    ],
)
def test_values_are_written_exactly(kind: str, value: float, text: str) -> None:
    assert units.written(kind, value) == text
    assert units.PARSERS[kind](text) == value


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (units.format_bytes, 1.9e9, "1.9 GB"),
        (units.format_bytes, 999.7e6, "1.0 GB"),
        (units.format_bytes, 512, "512 B"),
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 3e18, "3000000 TB"),
        (units.format_bytes, -2e6, "-2.0 MB"),
        (units.format_bits_per_s, 3.2e6, "3.2 Mbit/s"),
        (units.format_bits_per_s, 41.3e6, "41 Mbit/s"),
        (units.format_duration_s, 41, "41 s"),
        (units.format_duration_s, 1.5, "1.5 s"),
        (units.format_duration_s, 9.97, "10 s"),
        (units.format_duration_s, 0.2, "200 ms"),
        (units.format_duration_s, 2e-9, "0.0 us"),
        (units.format_duration_s, 150, "2.5 min"),
        (units.format_duration_s, 86400 * 10, "10 d"),
        (units.format_duration_s, float("inf"), "inf s"),
        (units.format_duration_s, 86400e300, f"{1e300:.0f} d"),
        (units.format_count, 1_500_000, "1.5M"),
        (units.format_count, 950, "950"),
        (units.format_count, 12e9, "12B"),
    ],
)
def test_formats(write: Callable[[float], str], value: float, text: str) -> None:
    assert write(value) == text
