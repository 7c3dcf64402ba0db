"""Values with units as people write them: "1.5s", "2Gbit/s", "12e9", "3B"; both ways.

Each kind is a float in its base unit (seconds, bits per second, things), so that code computes with
it as with any number. A plain number is taken to be in the base unit already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final, Self, TypeAlias

from narrows.proto.errors import ConfigError

Units: TypeAlias = Mapping[str, int | Fraction]
"""Sizes of the units in the base unit, rising."""

# Number and unit, in 64 characters at most. Two digits of exponent are enough, and keep a short
# text from asking for a gigabyte of digits.
_VALUE: Final = re.compile(
    r"(?=.{0,64}\Z)\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/]*)\s*", re.DOTALL
)


@dataclass(frozen=True)
class Kind:
    """A kind of quantity: what its errors say, its units, its range."""

    name: str
    """With its article, for errors: "a duration"."""
    example: str
    units: Units
    maximum: float
    whole: bool = False
    """Only whole numbers of the base unit mean anything."""


class Quantity(float):
    """A number with a unit: from 0 to the maximum of its kind. The subclasses name the kinds."""

    kind: ClassVar[Kind]

    @classmethod
    def parse(cls, value: object, place: str = "") -> Self:
        """A text with a unit, or a plain number in the base unit.

        Raises ConfigError, which begins with `place`, for anything else, for a unit of another
        kind, and outside the range.
        """
        kind = cls.kind
        got = repr(value)[:64]
        units = ", ".join(filter(None, kind.units))
        expected = f'{kind.name} such as "{kind.example}" (units: {units})'
        match = _VALUE.fullmatch(str(value))
        if match is None:
            raise ConfigError(f"{place}not {kind.name}", expected=expected, got=got)
        number, unit = match.groups()
        if unit and unit not in kind.units:
            meant = [name for name in kind.units if name.lower() == unit.lower()]
            raise ConfigError(
                f"{place}{kind.name} with an unknown unit",
                expected=expected,
                got=got,
                remedy=f'write "{number}{meant[0]}"' if meant else "",
            )
        # A fraction, so that no unit loses a digit.
        amount = Fraction(number) * kind.units.get(unit, 1)
        if amount > kind.maximum:
            base_unit = next(unit for unit, size in kind.units.items() if size == 1)
            raise ConfigError(
                f"{place}{kind.name} out of range",
                expected=f"0 to {kind.maximum:g}{base_unit}",
                got=got,
            )
        if kind.whole and amount.denominator != 1:
            raise ConfigError(f"{place}not a whole number", expected=expected, got=got)
        return cls(amount)

    def text(self) -> str:
        """A short form that `parse` reads: "1.5s", "200ms", "2Gbit/s", "12B", "0"."""
        if not self:
            return "0"
        # Rounded first: 999.97 Mbit/s is 1Gbit/s and not 1000Mbit/s.
        rounded = float(f"{float(self):.4g}")
        units = self.kind.units
        fitting = [unit for unit, size in units.items() if rounded >= float(size)]
        unit = fitting[-1] if fitting else next(iter(units))
        return f"{rounded / float(units[unit]):.4g}{unit}"


class Duration(Quantity):
    """Seconds."""

    kind = Kind(
        "a duration",
        "1.5s",
        {
            "us": Fraction(1, 10**6),
            "ms": Fraction(1, 10**3),
            "s": 1,
            "min": 60,
            "h": 3600,
            "d": 86400,
        },
        maximum=1e9,
    )


class BitRate(Quantity):
    """Bits per second."""

    kind = Kind(
        "a bit rate",
        "2Gbit/s",
        {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12},
        maximum=1e18,
    )


class Size(Quantity):
    """Bytes."""

    kind = Kind(
        "a size",
        "2GB",
        {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
        maximum=1e18,
    )


class Amount(Quantity):
    """A whole number of things, such as tokens."""

    kind = Kind(
        "a count",
        "12e9",
        {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12},
        maximum=float(1 << 62),
        whole=True,
    )


def counted(count: int, thing: str) -> str:
    """A number of things in words: "no keys", "1 key", "2 keys"."""
    return f"{count or 'no'} {thing}{'' if count == 1 else 's'}"
