"""Invitations: one line of text, as it stands or around any body with a check that fits.

The first byte of an input chooses: 0 the line, 1 the body.
"""

from __future__ import annotations

import base64
from random import Random

import msgspec
import xxhash
from fuzz.decoders.keys import PUBLIC, SECRET
from fuzz.target import Target
from fuzz.tree import altered_msgpack
from hypothesis import strategies as st

from narrows.proto.errors import ConfigError
from narrows.proto.keys import Invitation, pair_of_secret, read_invitation
from narrows.proto.keys.invitation import PREFIX


def line_of(body: bytes) -> str:
    """The line around a body."""
    check = xxhash.xxh3_64_digest(body)[:4]
    return PREFIX + base64.urlsafe_b64encode(body + check).decode().rstrip("=")


def run(data: bytes) -> None:
    if data[:1] == b"\1":
        text = line_of(data[1:])
    else:
        text = data[1:].decode("utf-8", "surrogateescape")
    try:
        found = read_invitation(text)
    except ConfigError as error:
        assert SECRET not in str(error)
        return
    assert read_invitation(str(found)) == found
    assert found.token.secret not in repr(found) or found.server == found.token.secret


def seeds() -> list[bytes]:
    token = pair_of_secret(SECRET, "a token")
    line = str(Invitation("tcp://broker:7070", PUBLIC, "site-a", token, 1 << 31))
    body = base64.urlsafe_b64decode(line.removeprefix(PREFIX) + "==")[:-4]
    return [b"\0" + line.encode(), b"\0" + f" {line[:40]}\n{line[40:]} ".encode(), b"\1" + body]


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_msgpack(data[1:], random) if data[:1] == b"\1" else None
    return None if changed is None else b"\1" + changed


_texts = st.text(max_size=20) | st.sampled_from((PUBLIC, SECRET, "tcp://broker:1", "#" * 40))
_bodies = st.tuples(_texts, _texts, _texts, _texts, st.integers(-1, 1 << 41))
EXAMPLES = _bodies.map(lambda parts: b"\1" + msgspec.msgpack.encode(parts))

TARGET = Target("invitations", run, seeds, EXAMPLES, mutate, bytes_max=1024)
