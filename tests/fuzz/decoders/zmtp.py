"""Bytes of a connection: the dissector's ZMTP parser, and all that it finds in them.

An input is 1 byte for the size of the pieces in which they come, and the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from any_messages import mutated
from fuzz.target import Target
from hypothesis import strategies as st

from narrows.proto.dissector import capture
from narrows.proto.dissector.text import FrameCounts
from narrows.proto.dissector.zmtp import Stream, StreamPiece

GOLDEN = Path(__file__).parents[2] / "golden/messages.json"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
COMMANDS = (
    b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0", b"\5ERROR\3why", b"\4PING\0\1abc",
    b"\4PONGabc", b"\x09SUBSCRIBEtopic", b"\6CANCELtopic",
)  # fmt: skip
PIECES_MAX = 64


def run(data: bytes) -> None:
    size = (data[0] if data else 0) % PIECES_MAX + 1
    content = data[1:]
    pieces = fed([content[at : at + size] for at in range(0, len(content), size)])
    assert pieces == fed([content])
    reader, counts = capture.CaptureReader(), FrameCounts()
    for each in pieces:
        assert each.at + len(each.body) <= len(content) and len(each.why) < 500
        if each.sort in capture.SORTS:
            frame = capture.Captured(each.sort, "up", 1, 0.0, each.body, each.index, each.has_more)
            counts.add(reader.take(frame), "up")
    assert list(counts.lines())


def fed(parts: list[bytes]) -> list[StreamPiece]:
    stream = Stream()
    return [piece for part in parts for piece in stream.feed(part)]


def framed(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = more + 4 * command
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags + 2]) + len(body).to_bytes(8, "big") + body


def seeds() -> list[bytes]:
    stored: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    frames = {name: bytes.fromhex(text) for name, text in stored.items()}
    header = frames.pop("Header")
    start = GREETING + framed(COMMANDS[0], command=True)
    found = [GREETING + framed(each, command=True) for each in COMMANDS]
    found += [start + framed(frame) for frame in frames.values()]
    data = framed(b"u", more=True) + framed(header, more=True) + framed(b"Narrows")
    found += [start + data, start + framed(b"\1" + b"0" * 32 + b"/00"), start + framed(b"x" * 300)]
    return [bytes([63]) + each for each in found]


EXAMPLES = mutated(st.sampled_from(seeds()))

TARGET = Target("zmtp", run, seeds, EXAMPLES, bytes_max=1024)
