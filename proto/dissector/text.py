"""Dissected frames as text for 100 columns, or as JSON; and the counts at the end."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from narrows.proto.dissector.findings import Dissected, Field, FrameFault, Plain
from narrows.proto.dissector.parts import Direction

COLUMNS: Final = 100
PLACE_COLUMNS: Final = 10
NAME_COLUMNS: Final = 28
INLINE_PARTS_MAX: Final = 8
"""A structure of no more members stands on one line."""

ITEMS_MAX: Final = 32
"""Most items of a list that are printed; JSON has all of them."""

CHARACTERS_MAX: Final = 600
"""Longest text that is printed, in characters; JSON has all of it."""


def block(found: Dissected, origin: str) -> Iterator[str]:
    """The lines of one frame; `origin` says where it came from."""
    start = f"{origin}  " if origin else ""
    size = f"{found.size_bytes} byte{'' if found.size_bytes == 1 else 's'}"
    yield f"{start}{found.kind}  {size}" + (f"  {found.title}" if found.title else "")
    for each in found.fields:
        yield from _field(each, 0)
    for index, fault in enumerate(found.faults):
        yield from wrapped(f"{'!! ' if index == 0 else '!! also '}{fault_text(fault)}", "  ")
        if index == 0 and found.near:
            yield f"     {found.near}"


def fault_text(fault: FrameFault) -> str:
    """A fault in one sentence."""
    where = f" ({escaped(fault.path)})" if fault.path else ""
    expected, got = escaped(fault.expected), escaped(fault.got)
    return f"byte {fault.at}{where}: {fault.code}: expected {expected}, got {got}"


def as_json(found: Dissected, origin: Mapping[str, Plain]) -> str:
    """One frame as a line of JSON."""
    fields: list[Plain] = [
        {"field": each.name, "at": each.at, "end": each.end, "value": each.plain}
        for each in found.fields
    ]
    faults: list[Plain] = [
        {"at": f.at, "field": f.path, "code": f.code, "expected": f.expected, "got": f.got}
        for f in found.faults
    ]
    return json_line(
        {
            **origin, "kind": found.kind, "bytes": found.size_bytes, "fields": fields,
            "faults": faults,
        }
    )  # fmt: skip


def json_line(content: Mapping[str, Plain]) -> str:
    """One line of JSON."""
    return json.dumps(_strict(dict(content)))


def escaped(text: str) -> str:
    """Text of a peer for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most 100 columns, all but the first indented by two more."""
    return textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}   ",
        break_on_hyphens=False,
    )  # fmt: skip


def _field(found: Field, depth: int) -> Iterator[str]:
    name = escaped(found.name)
    start = f"{found.at:>{PLACE_COLUMNS}}  {'  ' * depth}{name:<{NAME_COLUMNS - 2 * depth}}  "
    if found.parts is None or _is_short(found):
        yield from _value(start, _inline(found))
        return
    shown = found.parts[:ITEMS_MAX]
    yield f"{start}{found.type} of {len(found.parts)}".rstrip()
    for part in shown:
        yield from _field(part, depth + 1)
    if len(found.parts) > len(shown):
        yield f"{' ' * len(start)}and {len(found.parts) - len(shown)} more, see --json"


def _value(start: str, text: str) -> Iterator[str]:
    indent = " " * min(len(start), PLACE_COLUMNS + NAME_COLUMNS + 4)
    lines = textwrap.wrap(text, COLUMNS - len(indent), break_on_hyphens=False) or [""]
    yield (start + lines[0]).rstrip()
    for line in lines[1:]:
        yield indent + line


def _is_short(found: Field) -> bool:
    parts = found.parts or []
    if not found.is_map:
        return all(part.parts is None for part in parts)
    plain = all(part.parts is None or _is_short(part) for part in parts)
    return plain and len(parts) <= INLINE_PARTS_MAX


def _inline(found: Field, *, is_digest: bool = False) -> str:
    is_digest = is_digest or "digest" in found.name
    if found.parts is None:
        note = f"  ({found.note})" if found.note else ""
        return _scalar(found, is_digest=is_digest) + note
    if found.is_map:
        return ", ".join(f"{escaped(part.name)} {_inline(part)}" for part in found.parts) or "none"
    shown = ", ".join(_inline(part, is_digest=is_digest) for part in found.parts[:ITEMS_MAX])
    more = len(found.parts) - ITEMS_MAX
    return f"[{shown}, and {more} more, see --json]" if more > 0 else f"[{shown}]"


def _scalar(found: Field, *, is_digest: bool) -> str:
    value = found.value
    if isinstance(value, int) and is_digest:
        return f"{value:016x}"
    if isinstance(value, str):
        text = escaped(value)
        cut = text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}..."
        return f'"{cut}"' if found.type in ("Text", "str") else cut
    return "nil" if value is None else str(value)


def _strict(value: Plain) -> Plain:
    """The same without numbers that JSON does not have."""
    if isinstance(value, list):
        return [_strict(each) for each in value]
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass
class FrameCounts:
    """Frames and their bytes, by kind and direction; and faults."""

    counts: dict[tuple[str, str], tuple[int, int]] = field(
        default_factory=dict[tuple[str, str], tuple[int, int]]
    )
    faulty: int = 0

    def add(self, found: Dissected, direction: Direction | None = None) -> None:
        """Counts a frame."""
        self.faulty += bool(found.faults)
        key = found.kind, direction or ""
        frames, size_bytes = self.counts.get(key, (0, 0))
        self.counts[key] = frames + 1, size_bytes + found.size_bytes

    def lines(self) -> Iterator[str]:
        """A table; the last line counts what is faulty."""
        if self.counts:
            yield f"{'kind':<16}{'direction':<12}{'frames':>10}{'bytes':>16}"
        for (kind, direction), (frames, size_bytes) in sorted(self.counts.items()):
            yield f"{kind:<16}{direction:<12}{frames:>10}{size_bytes:>16}"
        total = sum(frames for frames, _ in self.counts.values())
        yield f"{total} in all, {self.faulty} of them faulty"

    def as_json(self) -> str:
        """The same as a line of JSON."""
        rows: list[Plain] = [
            {"kind": kind, "direction": direction, "frames": frames, "bytes": size_bytes}
            for (kind, direction), (frames, size_bytes) in sorted(self.counts.items())
        ]
        return json_line({"summary": rows, "faulty": self.faulty})
