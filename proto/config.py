"""Frozen dataclasses as configuration: read from TOML, overridden by flags, checked strictly.

The dataclass is the truth. Every field has a default. Its type says what a file may hold:

- `bool`, `int`, `float`, `str`, a `Literal` or a `StrEnum`: the TOML value of that type;
- a type of `units` such as `Duration`: a text with a unit ("1.5s"), or 0;
- `Annotated[..., Range(low, high)]`: bounds, both included;
- `Annotated[str, Choice(names)]`: one of these texts;
- a `Section`: a table of its own.

Values are checked whenever a Section is made, not only when it is read from a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from narrows.proto.errors import ConfigError
from narrows.proto.units import PARSERS, written

_KINDS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
}
_EXAMPLES: Final = {"duration": '"1.5s"', "bytes": '"64MiB"', "bits_per_s": '"2Gbit/s"'}
_BASE_UNITS: Final = {"duration": "s", "bytes": "B", "bits_per_s": "bit/s"}
_TAKES: Final = {
    "duration": "a duration", "bytes": "a size", "bits_per_s": "a bit rate", "count": "a count",
}  # fmt: skip


INTEGER_BITS_MAX: Final = 64
"""Bits of a whole number. TOML has no longer ones, and beyond 1024 there is no float for it."""

ENDLESS: Final = 1e16
"""A bound beyond this only keeps a number within 64 bits, so its digits are not printed."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.high, self

    def text(self, unit: str) -> str:
        """Both bounds in the units of the setting: "4KiB to 1TiB"."""
        return " to ".join(_bound(n, unit) for n in (self.low, self.high))


@dataclass(frozen=True)
class Choice:
    """Values of a text, where a `Literal` cannot name them: another module makes the list."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.names and len(set(self.names)) == len(self.names), self.names


def check_choice(key: str, value: str, names: Sequence[str]) -> None:
    """Raises ConfigError, naming the nearest of `names`, unless `value` is one of them."""
    if value not in names:
        raise ConfigError(
            f"{key}: unknown value",
            expected=f"one of {', '.join(names)}",
            got=repr(value),
            remedy=nearest(value, names),
        )


def _bound(number: float, unit: str) -> str:
    if unit and number < ENDLESS:
        return written(unit, number)
    return str(int(number)) if number == int(number) and number < ENDLESS else f"{number:.3g}"


@dataclass(frozen=True)
class Section:
    """Base of everything configurable; subclasses are frozen dataclasses, all with defaults.

    A configuration that exists is valid: nobody who gets one has to check it again.
    """

    def __post_init__(self) -> None:
        """Checks the type and the range of every field. Raises ConfigError, naming the field."""
        for name, (kind, notes) in _fields(type(self)).items():
            value = getattr(self, name)
            if not _is(value, kind):
                raise ConfigError(f"{name}: wrong type", expected=_expected(kind), got=_show(value))
            for note in notes:
                # A range is written so that NaN is outside of it.
                if isinstance(note, Range) and not note.low <= value <= note.high:
                    unit = _unit(notes)
                    got = written(unit, value) if unit and value >= 0 else _show(value)
                    raise ConfigError(f"{name}: out of range", expected=note.text(unit), got=got)
                if isinstance(note, Choice):
                    check_choice(name, value, note.names)


AnySection = TypeVar("AnySection", bound=Section)


def override(instance: AnySection, values: Mapping[str, object], *, source: str = "") -> AnySection:
    """A copy of `instance` with other values: {"merge.quorum": 2} or {"merge": {"quorum": 2}}.

    Values are those of a TOML file: a duration is a text with a unit. Relations between the
    fields of one section are checked when all of its values are in place. Raises ConfigError,
    naming `source` (a file, "flags", ...) and the key.
    """
    try:
        return _apply(instance, values, type(instance), "")
    except ConfigError as error:
        raise _behind(f"{source}: " if source else "", error) from error


def read_table(path: Path) -> dict[str, object]:
    """The nested tables of a TOML file. Raises ConfigError if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # tomllib itself raises for numbers of thousands of digits, and for deep nesting.
        raise ConfigError(f"{path}: not a TOML file", got=str(error)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot be read", got=reason) from error


def flatten(instance: Section, prefix: str = "") -> dict[str, object]:
    """All values by dotted key, in the order of the fields, for logs, digests and `--help`."""
    assert not prefix or prefix.endswith("."), prefix
    flat: dict[str, object] = {}
    for name in _fields(type(instance)):
        value = getattr(instance, name)
        if isinstance(value, Section):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def described(cls: type[Section], prefix: str = "") -> list[tuple[str, str, str]]:
    """Dotted key, default and possible values of every setting; the default as `--set` reads it."""
    rows: list[tuple[str, str, str]] = []
    defaults = cls()
    for name, (kind, notes) in _fields(cls).items():
        value = getattr(defaults, name)
        if isinstance(value, Section):
            rows += described(type(value), f"{prefix}{name}.")
        else:
            rows.append((prefix + name, _as_set(value, _unit(notes)), _takes(kind, notes)))
    return rows


def _as_set(value: object, unit: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if unit:
        return written(unit, cast(float, value))
    return str(value) or '""'


def _takes(kind: object, notes: tuple[object, ...]) -> str:
    unit = _unit(notes)
    bounds = [note.text(unit) for note in notes if isinstance(note, Range)]
    if bounds and not unit:
        return bounds[0]
    named = [name for note in notes if isinstance(note, Choice) for name in note.names]
    if not named and (unit or kind in _KINDS):
        return ", ".join([_TAKES[unit] if unit else _KINDS[kind], *bounds])
    *names, last = named or _choices(kind)
    return f"{', '.join(names)} or {last}"


def _unit(notes: tuple[object, ...]) -> str:
    return next((note for note in notes if isinstance(note, str)), "")


def nearest(name: str, names: Sequence[str]) -> str:
    """A remedy that names the most similar of `names`; "" if nothing is similar."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {matches[0]}?" if matches else ""


def _apply(
    instance: AnySection, values: Mapping[str, object], root: type[Section], prefix: str
) -> AnySection:
    fields = _fields(type(instance))
    changes: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        name, dot, rest = key.partition(".")
        is_section = name in fields and _is_section(fields[name][0])
        if name not in fields or (dot and not is_section):
            raise _unknown(prefix + key, root)
        if not is_section:
            changes[name] = _convert(value, *fields[name], prefix + name)
        elif dot:
            tables.setdefault(name, {})[rest] = value
        elif isinstance(value, Mapping):
            tables.setdefault(name, {}).update(cast(Mapping[str, object], value))
        else:
            raise ConfigError(f"{prefix}{name}: wrong type", expected="a table", got=_show(value))
    for name, table in tables.items():
        changes[name] = _apply(getattr(instance, name), table, root, f"{prefix}{name}.")
    try:
        return dataclasses.replace(instance, **changes)
    except ConfigError as error:
        raise _behind(prefix, error) from error


def _behind(prefix: str, error: ConfigError) -> ConfigError:
    """The same error with the place that it is about in front of its message."""
    return ConfigError(
        prefix + error.message, expected=error.expected, got=error.got, remedy=error.remedy
    )


def _convert(value: object, kind: object, notes: tuple[object, ...], key: str) -> object:
    """A value as the field holds it; the checks of Section see the result."""
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        expected = f"a number of {INTEGER_BITS_MAX} bits"
        got = f"{value.bit_length()} bits"
        raise ConfigError(f"{key}: too large", expected=expected, got=got)
    unit = _unit(notes)
    if unit and isinstance(value, str):
        try:
            return PARSERS[unit](value)
        except ConfigError as error:
            raise _behind(f"{key}: ", error) from error
    if unit in _EXAMPLES and value != 0:
        expected = f"a text with a unit, such as {_EXAMPLES[unit]}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        remedy = f'write "{value}{_BASE_UNITS[unit]}"' if is_number else ""
        raise ConfigError(
            f"{key}: without a unit", expected=expected, got=_show(value), remedy=remedy
        )
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        if value not in list(kind):
            names = [str(name) for name in kind]
            raise ConfigError(
                f"{key}: unknown value", expected=_expected(kind), got=_show(value),
                remedy=nearest(value, names),
            )  # fmt: skip
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _is(value: object, kind: object) -> bool:
    """Whether a value has a type, strictly: a bool is no int, and no number is NaN or infinite.

    An int may stand for a float. NaN would pass every comparison with a bound.
    """
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _expected(kind: object) -> str:
    return _KINDS[kind] if kind in _KINDS else "one of " + ", ".join(_choices(kind))


def _choices(kind: object) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)
    return [str(name) for name in get_args(kind)]


def _show(value: object) -> str:
    try:
        return repr(str(value)) if isinstance(value, str) else str(value)[:64]
    except ValueError:  # Python does not print such a number.
        return "thousands of digits"


def _unknown(key: str, root: type[Section]) -> ConfigError:
    """The error for an unknown key, with the nearest known one.

    The whole key is compared first, then its last word: `quorum` alone finds `merge.quorum`.
    """
    keys = list(_keys(root))
    remedy = nearest(key, keys)
    if not remedy:
        by_last = {known.rpartition(".")[2]: known for known in keys}
        matches = difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1, cutoff=0.6)
        remedy = f"did you mean {by_last[matches[0]]}?" if matches else ""
    return ConfigError(f"{key}: unknown key", remedy=remedy)


def _keys(cls: type[Section], prefix: str = "") -> Iterator[str]:
    for name, (kind, _) in _fields(cls).items():
        if _is_section(kind):
            yield prefix + name
            yield from _keys(cast(type[Section], kind), f"{prefix}{name}.")
        else:
            yield prefix + name


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


_INSPECTED: Final[dict[type[Section], dict[str, tuple[object, tuple[object, ...]]]]] = {}
"""Results of `_fields`, by class: to look once more takes longer than all else here."""


def _fields(cls: type[Section]) -> dict[str, tuple[object, tuple[object, ...]]]:
    """Bare type and annotations of every field, by its name."""
    if cls not in _INSPECTED:
        _INSPECTED[cls] = _inspected(cls)
    return _INSPECTED[cls]


def _inspected(cls: type[Section]) -> dict[str, tuple[object, tuple[object, ...]]]:
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, tuple[object, tuple[object, ...]]] = {}
    for field in dataclasses.fields(cls):
        hint, notes = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            notes = tuple(rest)
        fields[field.name] = (hint, notes)
        has_default = field.default is not dataclasses.MISSING
        assert has_default or field.default_factory is not dataclasses.MISSING, field.name
    return fields
