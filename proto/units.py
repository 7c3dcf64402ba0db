"""Values with units as people write them: "1.5s", "2Gbit/s", "12e9", "3B"; both ways.

Each kind is a float in its base unit (seconds, bits per second, things), so that code computes with
it as with any number. A plain number is taken to be in the base unit already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Final, Self, TypeAlias

from narrows.proto.errors import ConfigError

Units: TypeAlias = Mapping[str, int | Fraction]
"""Sizes of the units in the base unit, rising."""

CHARACTERS_MAX: Final = 64

# Two digits of exponent are enough, and keep a short text from asking for a gigabyte of digits.
_VALUE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/]*)\s*")


class Quantity(float):
    """A number with a unit: from 0 to `MAXIMUM` of the base unit. The subclasses name the units."""

    KIND: ClassVar[str]
    """With its article, for errors: "a duration"."""
    EXAMPLE: ClassVar[str]
    UNITS: ClassVar[Units]
    MAXIMUM: ClassVar[float]
    WHOLE: ClassVar[bool] = False
    """Only whole numbers of the base unit mean anything."""

    @classmethod
    def parse(cls, value: object, place: str = "") -> Self:
        """A text with a unit, or a plain number in the base unit.

        Raises ConfigError, which begins with `place`, for anything else, for a unit of another
        kind, and outside the range.
        """
        text, got = str(value), repr(value)[:64]
        expected = (
            f'{cls.KIND} such as "{cls.EXAMPLE}" (units: {", ".join(filter(None, cls.UNITS))})'
        )
        match = _VALUE.fullmatch(text) if len(text) <= CHARACTERS_MAX else None
        if match is None:
            raise ConfigError(f"{place}not {cls.KIND}", expected=expected, got=got)
        unit = match[2]
        if unit and unit not in cls.UNITS:
            near = [name for name in cls.UNITS if name.lower() == unit.lower()]
            remedy = f'write "{match[1]}{near[0]}"' if near else ""
            what = f"{place}{cls.KIND} with an unknown unit"
            raise ConfigError(what, expected=expected, got=got, remedy=remedy)
        # A fraction, so that no unit loses a digit.
        number = Fraction(match[1]) * cls.UNITS.get(unit, 1)
        if number > cls.MAXIMUM:
            base = next(unit for unit, size in cls.UNITS.items() if size == 1)
            reach = f"0 to {cls.MAXIMUM:g}{base}"
            raise ConfigError(f"{place}{cls.KIND} out of range", expected=reach, got=got)
        if cls.WHOLE and number.denominator != 1:
            raise ConfigError(f"{place}not a whole number", expected=expected, got=got)
        return cls(number)

    def text(self) -> str:
        """A short form that `parse` reads: "1.5s", "200ms", "2Gbit/s", "12B", "0"."""
        if not self:
            return "0"
        # Rounded first: 999.97 Mbit/s is 1Gbit/s and not 1000Mbit/s.
        rounded = float(f"{float(self):.4g}")
        fitting = [unit for unit, size in self.UNITS.items() if rounded >= float(size)]
        unit = fitting[-1] if fitting else next(iter(self.UNITS))
        return f"{rounded / float(self.UNITS[unit]):.4g}{unit}"


class Duration(Quantity):
    """Seconds."""

    KIND = "a duration"
    EXAMPLE = "1.5s"
    UNITS: ClassVar[Units] = {
        "us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": 1, "min": 60, "h": 3600, "d": 86400
    }  # fmt: skip
    MAXIMUM = 1e9


class BitRate(Quantity):
    """Bits per second."""

    KIND = "a bit rate"
    EXAMPLE = "2Gbit/s"
    UNITS: ClassVar[Units] = {
        "bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12
    }  # fmt: skip
    MAXIMUM = 1e18


class Size(Quantity):
    """Bytes."""

    KIND = "a size"
    EXAMPLE = "2GB"
    UNITS: ClassVar[Units] = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    MAXIMUM = 1e18


class Amount(Quantity):
    """A whole number of things, such as tokens."""

    KIND = "a count"
    EXAMPLE = "12e9"
    UNITS: ClassVar[Units] = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    MAXIMUM = float(1 << 62)
    WHOLE = True
