"""Results of a dissection: fields with their byte offsets, and faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


@dataclass
class Field:
    """One value, at the bytes `at` to `end` of its frame or file."""

    name: str
    at: int
    end: int
    type: str
    """As the tables have it, "" for what is no msgpack value."""
    value: Plain = None
    parts: list[Field] | None = None
    """Parts of a list or structure, in the order of their bytes."""
    is_map: bool = False
    """Whether the parts have names."""
    note: str = ""
    """A remark beside the value, for people."""

    @property
    def plain(self) -> Plain:
        """The value, with its parts as lists and dictionaries."""
        if self.parts is None:
            return self.value
        if self.is_map:
            return {part.name: part.plain for part in self.parts}
        return [part.plain for part in self.parts]


@dataclass(frozen=True)
class FrameFault:
    """The first byte that is wrong, with the code that PROTOCOL.md has for it."""

    at: int
    code: str
    expected: str
    got: str
    path: str = ""
    """The field that it belongs to."""


class Wrong(Exception):
    """A fault that ends the reading of a frame."""

    def __init__(self, at: int, expected: str, got: str, code: str = "bad_message") -> None:
        super().__init__(f"byte {at}: expected {expected}, got {got}")
        self.at, self.expected, self.got, self.code = at, expected, got, code

    def fault(self, path: str = "") -> FrameFault:
        """The fault, at this field."""
        return FrameFault(self.at, self.code, self.expected, self.got, path)


@dataclass
class Dissected:
    """One frame, record or chunk."""

    kind: str
    """In lower case; `--only` takes these."""
    size_bytes: int
    fields: list[Field] = field(default_factory=list[Field])
    faults: list[FrameFault] = field(default_factory=list[FrameFault])
    """In the order in which a receiver checks: the first one is what it refuses."""
    near: str = ""
    """The bytes around the first fault."""
    title: str = ""

    def get(self, name: str) -> Plain:
        """The value of a field; None: not there."""
        return next((each.plain for each in self.fields if each.name == name), None)

    def at(self, name: str) -> int:
        """Where a field begins."""
        return next(each.at for each in self.fields if each.name == name)


def near(data: bytes | memoryview, at: int, base: int = 0) -> str:
    """Up to 16 bytes around place `at`, which is marked; the data begins at place `base`."""
    index = at - base
    start = max(0, index - 8)
    pieces = [f"{byte:02x}" for byte in bytes(data[start : start + 16])]
    if 0 <= index - start < len(pieces):
        pieces[index - start] = f"[{pieces[index - start]}]"
    else:
        pieces.append("[end]")
    return f"from byte {start + base}: {' '.join(pieces)}"
