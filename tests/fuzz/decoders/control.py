"""Control frames, both ways: decoded, sent again, refused, shown, and read by the dissector.

The dissector is in Python throughout, so its branches guide the fuzzer; our decoder's are in C. The
first byte of an input is odd if a valid envelope goes around the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from any_messages import controls, mutated, seal
from fuzz.target import Target
from fuzz.tree import altered_msgpack
from hypothesis import strategies as st

from narrows.broker.cli.status import headline, learner_table
from narrows.broker.syncer import refusal
from narrows.proto.dissector import envelope
from narrows.proto.errors import RemoteProtocolError, printable
from narrows.proto.frames import ENVELOPE_BYTES, decode_control, encode_control
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import ControlMessage, Enrol, Hello, Status

TWICE = ("each field once", "each key once")
GOLDEN = Path(__file__).parents[2] / "golden/messages.json"


def frame_of(data: bytes) -> bytes:
    """The frame that an input stands for."""
    return seal(data[1:]) if data[:1] and data[0] & 1 else data[1:]


def run(data: bytes) -> None:
    frame = frame_of(data)
    try:
        message = decode_control(frame)
    except RemoteProtocolError as error:
        # What the peer gets to hear must be a message that it can read.
        assert decode_control(encode_control(refusal(error))) == refusal(error)
        assert printable(str(error)).isprintable()
        assert dissected(frame)[0] == error.code
        return
    # Which protocol a peer names, the decoder leaves to the broker. Of a key that comes twice,
    # which no sender makes, our decoder takes the last value.
    code, expected = dissected(frame)
    is_other = isinstance(message, Hello | Enrol) and message.protocol != PROTOCOL
    assert expected in TWICE or code == ("protocol_version" if is_other else "")
    # Compared as bytes: NaN is a legal loss and does not equal itself.
    again = encode_control(message)
    assert encode_control(decode_control(again)) == again
    shown(message)


def dissected(frame: bytes) -> tuple[str, str]:
    """The code of the dissector's first fault and what it expected; empty if there is none."""
    faults = envelope.control(frame).faults
    return (faults[0].code, faults[0].expected) if faults else ("", "")


def shown(message: ControlMessage) -> None:
    """A status becomes a table at any width."""
    if isinstance(message, Status):
        assert all(headline(message))
        for width in (None, 40, 200):
            assert list(learner_table(message.learners).lines(width))


def seeds() -> list[bytes]:
    stored: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    frames = [bytes.fromhex(text) for name, text in stored.items() if name != "Header"]
    return [b"\0" + frame for frame in frames] + [b"\1" + f[ENVELOPE_BYTES:] for f in frames]


def mutate(data: bytes, random: Random) -> bytes | None:
    body = data[1:] if data[:1] == b"\1" else data[1 + ENVELOPE_BYTES :]
    changed = altered_msgpack(body, random)
    return None if changed is None else b"\1" + changed


_frames = controls.map(encode_control)
_bodies = _frames.map(lambda frame: frame[ENVELOPE_BYTES:])
EXAMPLES: st.SearchStrategy[bytes] = st.one_of(
    _frames.map(lambda frame: b"\0" + frame),
    mutated(_frames).map(lambda frame: b"\0" + frame),
    _bodies.map(lambda body: b"\1" + body),
    mutated(_bodies).map(lambda body: b"\1" + body),
)

TARGET = Target("control", run, seeds, EXAMPLES, mutate)
