"""Values with units as people write them ("1.5s", "64MiB", "2Gbit/s", "12e9"), both ways.

kB, MB, GB are powers of ten, KiB, MiB, GiB powers of two. A bare K, M or G is refused for sizes:
for a disk it means a power of ten, for memory a power of two. Values are computed as fractions, so
that no unit loses a digit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Final, TypeAlias

from narrows.proto.errors import ConfigError

Duration: TypeAlias = Annotated[float, "duration"]
"""Seconds, written with a unit of time."""

Size: TypeAlias = Annotated[int, "bytes"]
"""Bytes, written with a unit of size."""

BitRate: TypeAlias = Annotated[float, "bits_per_s"]
"""Bits per second, written as such."""

Amount: TypeAlias = Annotated[int, "count"]
"""A whole number of things, written with or without a suffix for large numbers."""

SECONDS: Final[Mapping[str, int | Fraction]] = {
    "us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": 1, "min": 60, "h": 3600, "d": 86400,
}  # fmt: skip
BYTES: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
BITS_PER_S: Final = {
    "bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12,
}  # fmt: skip
ALIASES: Final = {"KB": "kB"}
COUNTS: Final = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_WORDS: Final[tuple[tuple[Mapping[str, int | Fraction], Mapping[str, str]], ...]] = (
    (BYTES, {"byte": "B"}),
    (SECONDS, {"sec": "s", "second": "s", "minute": "min", "hr": "h", "hour": "h", "day": "d"}),
    (COUNTS, {"thousand": "k", "million": "M", "billion": "B", "trillion": "T"}),
)
"""Words that people write instead of a unit, without a plural's s."""

CHARACTERS_MAX, VALUE_MAX = 64, 10**50
"""Characters and size of a value: each is a float, and its text in any unit can be read again."""

# Two digits of exponent are enough, and keep a short text from asking for a gigabyte of digits.
_VALUE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/]*)\s*")


def parse_duration_s(text: str) -> float:
    """Seconds in "1.5s", "200ms", "2min", "1h", "3d" or "0". Raises ConfigError."""
    return float(_parse(text, SECONDS, "a duration", "1.5s"))


def parse_bytes(text: str) -> int:
    """Bytes in "64MiB", "2GB", "512B" or "0": one meaning for each unit, wherever a size is read.

    Raises ConfigError, also for fractions of a byte.
    """
    return _whole(text, _parse(text, BYTES, "a size", "64MiB"), "a whole number of bytes")


def parse_bits_per_s(text: str) -> float:
    """Bits per second in "2Gbit/s", "800kbit/s" or "0". Raises ConfigError."""
    return float(_parse(text, BITS_PER_S, "a bit rate", "2Gbit/s"))


def parse_count(text: str) -> int:
    """The whole number in "12e9", "1.5M", "3B" or "300". Raises ConfigError."""
    return _whole(text, _parse(text, COUNTS, "a count", "1.5M"), "a whole number")


PARSERS: Final[Mapping[str, Callable[[str], float]]] = {
    "duration": parse_duration_s,
    "bytes": parse_bytes,
    "bits_per_s": parse_bits_per_s,
    "count": parse_count,
}
"""How a text becomes a value, by the name that stands in the annotation of a field."""


def _parse(text: str, units: Mapping[str, int | Fraction], what: str, example: str) -> Fraction:
    """The exact value of `text` in the unit whose factor is 1."""
    match = _VALUE.fullmatch(text) if len(text) <= CHARACTERS_MAX else None
    expected = f'{what} such as "{example}"; units: {", ".join(filter(None, units))}'
    if match is None:
        raise ConfigError(f"not {what}", expected=expected, got=repr(text[:64]))
    number, unit = Fraction(match[1]), ALIASES.get(match[2], match[2])
    assert number >= 0, "the pattern has no sign"
    if unit in units and number * units[unit] <= VALUE_MAX:
        return number * units[unit]
    if unit in units:
        raise ConfigError(f"{what} beyond 1e50", expected=expected, got=repr(text[:64]))
    if not unit and number == 0:
        return number
    message = f"{what} with an unknown unit" if unit else f"{what} without a unit"
    near = " or ".join(match[1] + name for name in _near(unit, units))
    remedy = f"write {near}" if near else ""
    raise ConfigError(message, expected=expected, got=repr(text[:64]), remedy=remedy)


def _near(unit: str, units: Mapping[str, int | Fraction]) -> list[str]:
    """The units that somebody may have meant; none for a unit of another kind.

    Bits where bytes are asked for are a wrong idea, not a wrong spelling.
    """
    others = (kind for kind in (SECONDS, BYTES, BITS_PER_S) if kind is not units)
    if not unit or any(unit in kind for kind in others):
        return []
    low = unit.lower()
    same = [name for name in units if name.lower() == low]
    word = next((words.get(low.removesuffix("s")) for kind, words in _WORDS if kind is units), None)
    begun = [name for name in units if name.lower().startswith(low)]
    return same or ([word] if word else begun)


def _whole(text: str, value: Fraction, expected: str) -> int:
    if value.denominator != 1:
        raise ConfigError("not a whole number", expected=expected, got=repr(text[:64]))
    return value.numerator


# Writing: texts that `PARSERS` read again as the same value.

_UNITS: Final[Mapping[str, Mapping[str, int | Fraction]]] = {
    "duration": SECONDS, "bytes": BYTES, "bits_per_s": BITS_PER_S, "count": COUNTS,
}  # fmt: skip


def written(kind: str, value: float) -> str:
    """The shortest text that is read as exactly this value: "64MiB", "1.5s", "0".

    `kind` as in the annotation of a field; `value` is finite and not negative.
    """
    assert kind in _UNITS, kind
    assert 0 <= value < math.inf, f"{value} has no such text"
    if value == 0:
        return "0"
    exact, texts = Fraction(repr(value)), list[str]()
    for unit, size in _UNITS[kind].items():
        number = exact / size
        whole = number.denominator == 1
        texts.append(f"{number.numerator if whole else repr(float(number))}{unit}")
    return min((text for text in texts if _is_read_as(kind, text, value)), key=len)


def _is_read_as(kind: str, text: str, value: float) -> bool:
    try:
        return PARSERS[kind](text) == value
    except ConfigError:  # Fractions of a byte.
        return False


# Formatting: (unit, its size, the number from which on the next unit is used).
Scale: TypeAlias = tuple[tuple[str, float, float], ...]

_DURATIONS: Final[Scale] = (
    (" us", 1e-6, 1000), (" ms", 1e-3, 1000), (" s", 1, 120), (" min", 60, 120), (" h", 3600, 48),
    (" d", 86400, math.inf),
)  # fmt: skip


def _decimal_scale(units: Mapping[str, int], space: str) -> Scale:
    names = [name for name in units if "i" not in name or "/" in name]
    return tuple(
        (space + name, units[name], math.inf if name == names[-1] else 1000) for name in names
    )


_SIZES: Final = _decimal_scale(BYTES, " ")
_BIT_RATES: Final = _decimal_scale(BITS_PER_S, " ")
_COUNTS: Final = _decimal_scale(COUNTS, "")


def format_duration_s(seconds: float) -> str:
    """A short form: "41 s", "1.5 s", "200 ms", "3.2 h"."""
    return _format(seconds, _DURATIONS)


def format_bytes(size_bytes: float) -> str:
    """A short form in powers of ten, as networks count: "1.9 GB"."""
    return _format(size_bytes, _SIZES)


def format_bits_per_s(bits_per_s: float) -> str:
    """A short form: "3.2 Mbit/s"."""
    return _format(bits_per_s, _BIT_RATES)


def format_count(count: float) -> str:
    """A short form: "950", "1.5M", "12B"."""
    return _format(count, _COUNTS)


def counted(count: int, thing: str) -> str:
    """A number and the thing that it counts: "1 learner", "2 learners"."""
    assert count >= 0, f"{count} {thing}s"
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _format(value: float, scale: Scale) -> str:
    """Two significant digits below ten, whole numbers from ten on; base units exact if whole."""
    assert scale[-1][2] == math.inf, "the last unit has no limit"
    base = next(unit for unit, size, _ in scale if size == 1)
    if value < 0:
        return "-" + _format(-value, scale)
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}{base}"
    for unit, size, limit in scale:
        number = value / size
        if not math.isfinite(number):
            continue  # So many microseconds are beyond what a float can be.
        # Rounded first: 999.7 MB is 1.0 GB, not 1000 MB.
        if round(number) < limit:
            exact = size == 1 and value == round(value)
            return f"{number:.0f}{unit}" if exact or number >= 9.95 else f"{number:.1f}{unit}"
    raise AssertionError("the last unit has no limit")
