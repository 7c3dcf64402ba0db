"""The layout of a model: which tensors travel, checked, counted, compared.

Peers compare fingerprints. Where they differ, layouts are compared entry by entry, so that a
refusal can name the difference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import (
    DIMENSIONS_MAX,
    ELEMENTS_MAX,
    LAYOUT_PART_BYTES_MAX,
    LAYOUT_PARTS_MAX,
    TENSOR_NAME_CHARACTERS_MAX,
    TENSORS_MAX,
)
from narrows.proto.messages import LayoutEntry, LayoutPart


def element_count(entry: LayoutEntry) -> int:
    """Elements of a tensor; 1 for a scalar. A Python int, which cannot wrap."""
    return math.prod(entry.shape)


def check_layout(layout: Sequence[LayoutEntry]) -> None:
    """Raises RemoteProtocolError BAD_MESSAGE for a layout that no model has.

    At least one tensor, unique printable names, dimensions of at least 1, and sizes within
    limits.py.
    """
    _check(0 < len(layout) <= TENSORS_MAX, "tensors", f"1 to {TENSORS_MAX}", str(len(layout)))
    names: set[str] = set()
    elements = 0
    for entry in layout:
        _check_entry(entry)
        _check(entry.name not in names, "tensor names", "unique ones", f"{entry.name!r} twice")
        names.add(entry.name)
        elements += element_count(entry)
    _check(elements <= ELEMENTS_MAX, "elements", f"at most {ELEMENTS_MAX}", str(elements))


def fingerprint(layout: Sequence[LayoutEntry], frozen_digest: int) -> str:
    """BLAKE2b with 16 bytes of digest over [frozen_digest, layout] as the shortest msgpack."""
    told = msgspec.msgpack.encode((frozen_digest, layout))
    return hashlib.blake2b(told, digest_size=16).hexdigest()


def split_layout(layout: Sequence[LayoutEntry], frozen_digest: int) -> tuple[LayoutPart, ...]:
    """A checked layout as it travels. Raises RemoteProtocolError TOO_LARGE for one of too many
    parts."""
    groups, room = list[list[LayoutEntry]](), 0
    for entry in layout:
        size = len(msgspec.msgpack.encode(entry))
        if size > room:
            groups.append([])
            room = LAYOUT_PART_BYTES_MAX
        groups[-1].append(entry)
        room -= size
    if len(groups) > LAYOUT_PARTS_MAX:
        raise RemoteProtocolError(
            ErrorCode.TOO_LARGE,
            "layout",
            expected=f"at most {LAYOUT_PARTS_MAX} parts of {LAYOUT_PART_BYTES_MAX} bytes",
            got=f"{len(groups)} parts",
        )
    return tuple(
        LayoutPart(index, len(groups), frozen_digest, tuple(group))
        for index, group in enumerate(groups)
    )


@dataclass
class JoinedLayout:
    """A layout that comes in parts, in order. What does not fit is refused, so it is bounded."""

    entries: list[LayoutEntry] = field(default_factory=list[LayoutEntry])
    frozen_digest: int = 0
    next_part: int = 0
    """The first part that is missing."""
    _count: int = 0

    @property
    def complete(self) -> bool:
        return 0 < self._count == self.next_part

    def take(self, part: LayoutPart) -> bool:
        """Takes the next part in. Returns False for any other one, which is not wanted.

        Raises RemoteProtocolError BAD_MESSAGE for a part that contradicts those before.
        """
        if part.index != self.next_part or self.complete:
            return False
        told = (part.count, part.frozen_digest)
        known = (self._count, self.frozen_digest) if self._count else told
        _check(told == known, "parts", f"{known[0]} of one layout", f"{told[0]} of another one")
        _check(part.index < part.count, "parts", f"at most {part.count}", str(part.index + 1))
        _check(bool(part.entries), f"part {part.index}", "a tensor at least", "none")
        tensors = len(self.entries) + len(part.entries)
        _check(tensors <= TENSORS_MAX, "tensors", f"at most {TENSORS_MAX}", str(tensors))
        self.entries += part.entries
        (self._count, self.frozen_digest), self.next_part = told, self.next_part + 1
        return True


def differences(
    ours: Sequence[LayoutEntry], theirs: Sequence[LayoutEntry], limit: int = 5
) -> list[str]:
    """The first `limit` differences of two checked layouts, one readable line each.

    Empty if they are equal.
    """
    assert limit > 0, limit
    return list(islice(_differences(ours, theirs), limit))


def _check_entry(entry: LayoutEntry) -> None:
    name_is_fine = 0 < len(entry.name) <= TENSOR_NAME_CHARACTERS_MAX and entry.name.isprintable()
    _check(
        name_is_fine,
        "tensor name",
        f"1 to {TENSOR_NAME_CHARACTERS_MAX} printable characters",
        f"{len(entry.name)} characters: {entry.name[:40]!r}",
    )
    what = f"shape of {entry.name!r}"
    _check(
        len(entry.shape) <= DIMENSIONS_MAX,
        what,
        f"at most {DIMENSIONS_MAX} dimensions",
        str(len(entry.shape)),
    )
    _check(all(size >= 1 for size in entry.shape), what, "sizes of at least 1", str(entry.shape))


def _check(condition: bool, what: str, expected: str, got: str) -> None:
    if not condition:
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE, f"layout: {what}", expected=expected, got=got
        )


def _differences(ours: Sequence[LayoutEntry], theirs: Sequence[LayoutEntry]) -> Iterator[str]:
    our_entries = {entry.name: entry for entry in ours}
    their_entries = {entry.name: entry for entry in theirs}
    for name, entry in our_entries.items():
        if name not in their_entries:
            yield f"{name!r} is missing"
        elif entry != their_entries[name]:
            yield from _entry_differences(entry, their_entries[name])
    yield from (f"{name!r} is not in the run" for name in their_entries if name not in our_entries)
    if our_entries.keys() == their_entries.keys():
        yield from (
            f"tensor {index} is {other.name!r}, expected {mine.name!r}"
            for index, (mine, other) in enumerate(zip(ours, theirs, strict=False))
            if mine.name != other.name
        )


def _entry_differences(ours: LayoutEntry, theirs: LayoutEntry) -> Iterator[str]:
    for name in ("shape", "dtype", "rule"):
        expected, got = getattr(ours, name), getattr(theirs, name)
        if expected != got:
            yield f"{ours.name!r}: {name} {got}, expected {expected}"
