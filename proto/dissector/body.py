"""Decodes one msgpack value against its type, and keeps the byte offset of every part of it.

The decoder is msgpack's own Unpacker. Before each value the type says which families of values may
come, so an unexpected one is never decoded: no bytes, no extension types, no timestamps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

import msgpack

from narrows.proto.dissector.findings import Field, FrameFault, Wrong
from narrows.proto.dissector.tables import (
    CONTROL_BYTES_MAX,
    AnyOf,
    Array,
    Bool,
    Mapped,
    Number,
    String,
    Structure,
    Type,
    type_of,
)

SHOWN_CHARACTERS: Final = 40
"""Longest excerpt of a value in a fault, in characters."""


class _Unpacker(Protocol):
    def feed(self, data: bytes | memoryview) -> None: ...
    def unpack(self) -> Any: ...
    def skip(self) -> None: ...
    def read_array_header(self) -> int: ...
    def read_map_header(self) -> int: ...
    def tell(self) -> int: ...


_make = cast(Callable[..., _Unpacker], msgpack.Unpacker)
_OutOfData = cast(type[Exception], msgpack.OutOfData)
_UnpackException = cast(type[Exception], msgpack.UnpackException)


def _refuse(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _unpacker(data: bytes | memoryview) -> _Unpacker:
    most = max(len(data), CONTROL_BYTES_MAX)
    unpacker = _make(
        raw=False, strict_map_key=True, unicode_errors="strict", ext_hook=_refuse,
        max_buffer_size=most, max_str_len=most, max_bin_len=0, max_ext_len=0,
        max_array_len=most, max_map_len=most,
    )  # fmt: skip
    unpacker.feed(data)
    return unpacker


_FIXED: Final = {
    0xC0: "nil", 0xC1: "never used", 0xC2: "bool", 0xC3: "bool", 0xCA: "float", 0xCB: "float",
    0xDC: "array", 0xDD: "array", 0xDE: "map", 0xDF: "map",
}  # fmt: skip
_SPANS: Final = (
    (0x00, 0x7F, "integer"), (0x80, 0x8F, "map"), (0x90, 0x9F, "array"), (0xA0, 0xBF, "string"),
    (0xC4, 0xC6, "bytes"), (0xC7, 0xC9, "extension"), (0xCC, 0xD3, "integer"),
    (0xD4, 0xD8, "extension"), (0xD9, 0xDB, "string"), (0xE0, 0xFF, "integer"),
)  # fmt: skip
_STRING_HEAD_BYTES: Final = {0xD9: 2, 0xDA: 3, 0xDB: 5}


def family_of(byte: int) -> str:
    """The family of the msgpack value that begins with this byte."""
    return _FIXED.get(byte) or next(name for low, high, name in _SPANS if low <= byte <= high)


class Body:
    """A value at offset `base` of a frame. `fields` holds the parts that were read so far."""

    def __init__(self, data: bytes | memoryview, base: int) -> None:
        self.fields: list[Field] = []
        self._data, self._base = data, base
        self._unpacker = _unpacker(data)
        self._path: list[str] = []

    @property
    def place(self) -> int:
        """Offset of the next value in the frame."""
        return self._base + self._unpacker.tell()

    def tagged(self, structures: Mapping[str, Structure]) -> tuple[str, FrameFault | None]:
        """Reads a map whose key `type` names its structure. Returns that name, or "" if it
        is unknown, and the fault, if there is one."""
        tag = ""
        try:
            self._expect("map", "a map")
            tag = self._find_tag(structures)
            self._map(structures[tag], self.fields)
            self._end()
        except Wrong as wrong:
            return tag, wrong.fault(".".join(self._path))
        return tag, None

    def untagged(self, structure: Structure) -> FrameFault | None:
        """Reads an array of this structure's members, and returns the fault, if there is one."""
        try:
            self._array(structure, self.fields)
            self._end()
        except Wrong as wrong:
            return wrong.fault(".".join(self._path))
        return None

    def _find_tag(self, structures: Mapping[str, Structure]) -> str:
        """The value of `type`, which may stand anywhere in the map."""
        scout, value, at = _unpacker(self._data), cast(object, None), self.place
        try:
            for _ in range(scout.read_map_header()):
                key = scout.unpack()
                at, value = self._base + scout.tell(), None
                if key == "type":
                    value = scout.unpack()
                    break
                scout.skip()
            else:
                raise Wrong(self.place, "the field type", "a map without it")
        except _OutOfData:
            raise self._cut("the field type") from None
        except (_UnpackException, ValueError, TypeError) as error:
            raise Wrong(at, "the field type", str(error) or "no msgpack") from None
        if isinstance(value, str) and value in structures:
            return value
        raise Wrong(at, f"one of {', '.join(structures)}", _shown(value))

    def _read(self, kind: Type, name: str, into: list[Field]) -> None:
        match kind:
            case Number():
                self._scalar(kind, name, into, _check_number)
            case AnyOf():
                self._scalar(kind, name, into, _check_choice)
            case String():
                self._scalar(kind, name, into, _check_string)
            case Bool():
                self._scalar(kind, name, into, _check_bool)
            case Structure(is_map=True):
                with self._container(kind.name, name, into, is_map=True) as parts:
                    self._map(kind, parts)
            case Structure():
                with self._container(kind.name, name, into, is_map=True) as parts:
                    self._array(kind, parts)
            case Array():
                with self._container(kind.name, name, into) as parts:
                    self._list(kind, parts)
            case Mapped():
                with self._container(kind.name, name, into, is_map=True) as parts:
                    self._mapped(kind, parts)

    @contextmanager
    def _container(
        self, kind: str, name: str, into: list[Field], *, is_map: bool = False
    ) -> Generator[list[Field]]:
        parts: list[Field] = []
        found = Field(name, self.place, self.place, kind, parts=parts, is_map=is_map)
        into.append(found)
        yield parts
        found.end = self.place

    def _map(self, kind: Structure, into: list[Field]) -> None:
        at, count = self._count("map", kind.name)
        members = {member.name: member for member in kind.members}
        extra = int(kind.is_tagged)
        self._check_count(at, count, kind.required + extra, len(members) + extra, kind.name)
        for _ in range(count):
            key_at, key = self.place, self._key(kind.name)
            if key in (each.name for each in into):
                raise Wrong(key_at, "each field once", f"{key} again")
            if key == "type" and kind.is_tagged:
                self._scalar(String("str"), key, into, _check_string)
            elif key in members:
                self._member(members[key].type, key, into)
            else:
                raise Wrong(key_at, f"a field of {kind.name}", _shown(key))
        names = {each.name for each in into}
        missing = [m.name for m in kind.members if m.name not in names and not m.default]
        if missing:
            raise Wrong(at, f"the field {missing[0]}", f"{count} others")

    def _array(self, kind: Structure, into: list[Field]) -> None:
        at, count = self._count("array", kind.name)
        self._check_count(at, count, kind.required, len(kind.members), kind.name)
        for member in kind.members[:count]:
            self._member(member.type, member.name, into)

    def _list(self, kind: Array, into: list[Field]) -> None:
        at, count = self._count("array", kind.name)
        most = kind.most if kind.most >= 0 else count
        self._check_count(at, count, kind.least, most, kind.name)
        for index in range(count):
            self._path.append(str(index))
            self._read(kind.item, str(index), into)
            self._path.pop()

    def _mapped(self, kind: Mapped, into: list[Field]) -> None:
        _, count = self._count("map", kind.name)
        seen: set[str] = set()
        for _ in range(count):
            key_at, key = self.place, self._key(kind.name)
            if key in seen:
                raise Wrong(key_at, "each key once", f"{key} again")
            seen.add(key)
            self._path.append(key)
            self._read(kind.item, key, into)
            self._path.pop()

    def _member(self, kind: str, name: str, into: list[Field]) -> None:
        # Only success takes the name away again: a fault tells the path on which it lies.
        self._path.append(name)
        self._read(type_of(kind), name, into)
        self._path.pop()

    def _check_count(self, at: int, count: int, least: int, most: int, what: str) -> None:
        if not least <= count <= most:
            number = str(least) if least == most else f"{least} to {most}"
            raise Wrong(at, f"{what} of {number} values", str(count))

    def _count(self, family: str, what: str) -> tuple[int, int]:
        """Where a container begins, and how many values its head announces."""
        at, name = self.place, f"{what}, {'an array' if family == 'array' else 'a map'}"
        self._expect(family, name)
        read = self._unpacker.read_array_header if family == "array" else (
            self._unpacker.read_map_header
        )  # fmt: skip
        try:
            count = read()
        except (_UnpackException, ValueError) as error:
            if isinstance(error, _OutOfData):
                raise self._cut(name) from None
            raise Wrong(at, name, str(error)) from None
        left = len(self._data) - self._unpacker.tell()
        if count * (2 if family == "map" else 1) > left:
            raise Wrong(at, f"{name} that fits", f"{count} values in {left} bytes")
        return at, count

    def _key(self, what: str) -> str:
        name = f"a field of {what}"
        self._expect("string", name)
        return str(self._unpack(name))

    def _scalar(
        self, kind: Type, name: str, into: list[Field], check: Callable[[Any, Any], str]
    ) -> None:
        at, expected = self.place, described(kind)
        self._expect(_families(kind), expected)
        value = self._unpack(expected)
        if not check(kind, value):
            raise Wrong(at, expected, _shown(value))
        note = check(kind, value) if isinstance(kind, AnyOf) and kind.is_number else ""
        into.append(Field(name, at, self.place, kind.name, value, note=note))

    def _expect(self, families: str, expected: str) -> None:
        index = self._unpacker.tell()
        if index >= len(self._data):
            raise self._cut(expected)
        byte = self._data[index]
        if family_of(byte) not in families:
            raise Wrong(self.place, expected, f"{family_of(byte)} ({byte:02x})")

    def _unpack(self, expected: str) -> Any:
        at, index = self.place, self._unpacker.tell()
        try:
            return self._unpacker.unpack()
        except _OutOfData:
            raise self._cut(f"the rest of {expected}, begun at byte {at},") from None
        except UnicodeDecodeError as error:
            bad = index + _STRING_HEAD_BYTES.get(self._data[index], 1) + error.start
            got = f"{self._data[bad]:02x}" if bad < len(self._data) else "less"
            raise Wrong(self._base + bad, "UTF-8", got) from None
        except (_UnpackException, ValueError) as error:
            raise Wrong(at, expected, str(error) or "no msgpack") from None

    def _end(self) -> None:
        left = len(self._data) - self._unpacker.tell()
        if left:
            raise Wrong(self.place, "the end of the frame", f"{left} more bytes")

    def _cut(self, expected: str) -> Wrong:
        return Wrong(self._base + len(self._data), expected, "the end of the frame")


def _families(kind: Type) -> str:
    match kind:
        case Number(is_float=True):
            return "integer float nil" if kind.or_nil else "integer float"
        case Number() | AnyOf(is_number=True):
            return "integer"
        case Bool():
            return "bool"
        case _:
            return "string"


def described(kind: Type) -> str:
    """A type in words, with its bounds."""
    match kind:
        case Number() if kind.unbounded:
            return kind.name
        case Number():
            least, most = (f"{x:g}" if kind.is_float else str(x) for x in (kind.least, kind.most))
            return f"{kind.name}, {least} to {most}"
        case AnyOf(is_number=True):
            return f"{kind.name}, 1 to {len(kind.words)}"
        case AnyOf():
            return f"{kind.name}, {' or '.join(kind.words)}"
        case String() if kind.characters_max >= 0:
            return f"{kind.name}, up to {kind.characters_max} characters"
        case String() if kind.pattern:
            return f"{kind.name}, {kind.pattern}"
        case _:
            return kind.name


# Each returns "" for a value that is not of the type, else what to say beside it.


def _check_number(kind: Number, value: float | None) -> str:
    if value is None or kind.unbounded:
        return "ok"
    return "ok" if kind.least <= value <= kind.most else ""


def _check_choice(kind: AnyOf, value: object) -> str:
    if kind.is_number:
        assert isinstance(value, int)
        return kind.words[value - 1] if 1 <= value <= len(kind.words) else ""
    return str(value) if value in kind.words else ""


def _check_string(kind: String, value: str) -> str:
    return "ok" if kind.fits(value) else ""


def _check_bool(_: Bool, __: object) -> str:
    return "ok"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
