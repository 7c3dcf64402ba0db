"""An attacker of a state directory who lacks the seal key, and computes every digest again."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from narrows.broker.storage.segments import (
    SEALED_RECORD_HEADER_BYTES,
    SEALED_SEGMENT_HEADER_BYTES,
)


def places(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Start, body and end of each record of a sealed segment, and its number."""
    at, number = SEALED_SEGMENT_HEADER_BYTES, int.from_bytes(content[20:28], "little")
    while content[at : at + 4] == bytes.fromhex("9d524543"):
        body = at + SEALED_RECORD_HEADER_BYTES
        end = body + int.from_bytes(content[at + 4 : at + 12], "little")
        yield at, body, end, number
        at, number = end, number + 1


def digested(content: bytes) -> bytes:
    """The same segment with every digest computed again."""
    target = bytearray(content)
    end = SEALED_SEGMENT_HEADER_BYTES - 8
    struct.pack_into("<Q", target, end, xxh3_64_intdigest(bytes(target[:end])))
    salt = int.from_bytes(target[36:44], "little")
    for at, body, end, _ in places(content):
        struct.pack_into("<Q", target, at + 28, xxh3_64_intdigest(bytes(target[body:end])))
        head = bytes(target[at : body - 8])
        struct.pack_into("<Q", target, body - 8, xxh3_64_intdigest(head, salt))
    return bytes(target)


def digest_again(path: Path) -> None:
    """Computes the digests of an altered file again, and those of a checkpoint in its manifest."""
    if path.suffix == ".log":
        path.write_bytes(digested(path.read_bytes()))
    elif path.name in ("run.json", "run.copy.json", "manifest.json"):
        _digest_json(path)
    elif path.suffix == ".safetensors":
        _digest_arrays(path)


def _digest_json(path: Path, **changes: object) -> None:
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # It is no JSON any more: there is no digest to compute.
    fields |= {**changes, "digest": ""}
    fields["digest"] = xxh3_64_hexdigest(msgspec.json.encode(fields))
    path.write_bytes(msgspec.json.encode(fields))


def _digest_arrays(path: Path) -> None:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8:start])
        entries = json.loads((path.parent / "manifest.json").read_bytes())["fragments"]
        for name, digest in entries[int(path.name[9:14])]["digests"].items():
            first, last = header[name]["data_offsets"]
            again = xxh3_64_hexdigest(content[start + first : start + last])
            entries[int(path.name[9:14])]["digests"][name] = again
            assert len(digest) == len(again)
    except (ValueError, KeyError, MemoryError):
        return  # The header was altered.
    _digest_json(path.parent / "manifest.json", fragments=entries)


def sealed_files(state: Path) -> list[Path]:
    """Every file of a state directory whose bytes matter."""
    return sorted(path for path in state.rglob("*") if path.is_file() and path.name != "lock")


def samples(path: Path) -> list[int]:
    """Places in a file: some in each region, and all of the first bytes."""
    content = path.read_bytes()
    if path.suffix == ".log":
        found = [*range(0, SEALED_SEGMENT_HEADER_BYTES - 8, 9)]
        for at, body, end, _ in places(content):
            found += [at, at + 5, at + 13, at + 21, at + 37, at + 69, body, (body + end) // 2]
            found.append(end - 1)
        return found
    return [*range(0, len(content), max(1, len(content) // 24)), len(content) - 1]
