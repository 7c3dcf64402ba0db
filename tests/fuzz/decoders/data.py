"""Data messages: topic, header and payload, and the chunk that the header claims to describe.

The first byte of an input chooses: 0 a header as it stands, 1 one in a valid envelope, 2 the rest
is cut into any number of frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import msgspec
from any_messages import any_of, mutated, seal
from fuzz.target import Target
from fuzz.tree import altered_msgpack
from hypothesis import strategies as st

from narrows.proto import messages as msg
from narrows.proto.codec import decode_chunk
from narrows.proto.errors import NarrowsError, RemoteProtocolError
from narrows.proto.fragments import build_table
from narrows.proto.frames import ENVELOPE_BYTES, decode_data, digest, encode_header, topic_name
from narrows.proto.limits import PROTOCOL

GOLDEN = Path(__file__).parents[2] / "golden/messages.json"
PAYLOAD = b"Narrows"
"""The payload of the golden header."""

LAYOUT = (
    msg.LayoutEntry("weight", (8, 4), "float32", "rda"),
    msg.LayoutEntry("bias", (3,), "float32", "mean"),
)
TABLE = build_table(LAYOUT, 1)


def frames_of(data: bytes) -> list[bytes]:
    """The frames that an input stands for."""
    kind, rest = data[0] % 3 if data else 0, data[1:]
    if kind == 2:
        return rest.split(b"\0\0")
    return [b"u", seal(rest) if kind else rest, PAYLOAD]


def run(data: bytes) -> None:
    frames = frames_of(data)
    name = topic_name(frames[0])
    assert name is None or frames[0].startswith(f"{name}/".encode())
    try:
        header, payload = decode_data(frames)
    except RemoteProtocolError:
        return
    assert payload == frames[2]
    assert decode_data([b"", encode_header(header), frames[2]]) == (header, payload)
    try:
        chunk = decode_chunk(TABLE[0], header.codec, header.offset, header.count, payload)
    except NarrowsError:
        return
    assert chunk.count == header.count <= TABLE[0].elements


def seeds() -> list[bytes]:
    frame = bytes.fromhex(json.loads(GOLDEN.read_text(encoding="utf-8"))["Header"])
    whole = b"\2" + b"\0\0".join((b"u", frame, PAYLOAD))
    return [b"\0" + frame, b"\1" + frame[ENVELOPE_BYTES:], whole]


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_msgpack(data[1:], random) if data[:1] == b"\1" else None
    return None if changed is None else b"\1" + changed


_headers: st.SearchStrategy[bytes] = any_of(msg.Header).map(
    lambda header: encode_header(
        msgspec.structs.replace(header, protocol=PROTOCOL, payload_digest=digest(PAYLOAD))
    )[ENVELOPE_BYTES:]
)
EXAMPLES = (_headers | mutated(_headers)).map(lambda body: b"\1" + body)

TARGET = Target("data", run, seeds, EXAMPLES, mutate)
