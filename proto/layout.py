"""The layout of a model: which tensors travel, checked, counted, compared.

Layouts are compared entry by entry, not by a digest, so that a refusal can name the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import (
    DIMENSIONS_MAX,
    ELEMENTS_MAX,
    TENSOR_NAME_CHARACTERS_MAX,
    TENSORS_MAX,
)
from narrows.proto.messages import LayoutEntry


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
    for field in ("shape", "dtype", "rule"):
        expected, got = getattr(ours, field), getattr(theirs, field)
        if expected != got:
            yield f"{ours.name!r}: {field} {got}, expected {expected}"
