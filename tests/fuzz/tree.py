"""One change somewhere in a tree of lists, maps and plain values, such as a decoded message."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

ODD: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0,
    1e-320, 1e308, float("inf"), float("nan"), "", "x" * 1025, "\x00", "\x1b[2J", "é" * 40, b"",
    b"\xff" * 9, list[object](), dict[str, object](), [1], {"": 0},
)  # fmt: skip
"""Values at which bounds, types and loops break."""


def altered(value: Any, random: Random) -> Any:
    """The same tree but for one place, where something is changed, doubled, swapped or gone."""
    goes_deeper = bool(value) and random.random() < 0.9
    if goes_deeper and isinstance(value, dict):
        return _altered_map(value, random)
    if goes_deeper and isinstance(value, list):
        return _altered_list(value, random)
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.5:
        return value + random.choice((-1, 1, -256, 256, 1 << 32, -value, -2 * value))
    return random.choice(ODD)


def _altered_map(fields: dict[Any, Any], random: Random) -> dict[Any, Any]:
    key = random.choice(list(fields))
    match random.randrange(8):
        case 0:
            del fields[key]
        case 1:
            fields[random.choice(("", "type", "x", "digest"))] = fields[key]
        case 2:
            other = random.choice(list(fields))
            fields[key], fields[other] = fields[other], fields[key]
        case _:
            fields[key] = altered(fields[key], random)
    return fields


def _altered_list(items: list[Any], random: Random) -> list[Any]:
    at = random.randrange(len(items))
    match random.randrange(8):
        case 0:
            del items[at]
        case 1:
            items.insert(at, items[random.randrange(len(items))])
        case 2:
            items *= random.choice((2, 8, 64))
        case _:
            items[at] = altered(items[at], random)
    return items[:4096]


def altered_msgpack(body: bytes, random: Random) -> bytes | None:
    """A body of MessagePack with such a change; None if it is none, or cannot be one any more."""
    try:
        return msgspec.msgpack.encode(altered(msgspec.msgpack.decode(body), random))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError):
        return None


def altered_json(text: bytes, random: Random) -> bytes | None:
    """The same for JSON."""
    try:
        return msgspec.json.encode(altered(msgspec.json.decode(text), random))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError):
        return None
