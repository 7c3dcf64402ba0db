"""The messages of one direction of a connection, part by part: control, topic, header, payload."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from narrows.proto.dissector.chunks import Payload
from narrows.proto.dissector.envelope import control, digest, header
from narrows.proto.dissector.findings import Dissected, Field, FrameFault, near
from narrows.proto.dissector.tables import (
    CONTROL,
    DATA_KINDS,
    DOWN,
    PAYLOAD_BYTES_MAX,
    STATE_CODEC,
    TOPIC_BYTES_MAX,
    UP,
)

Direction: TypeAlias = Literal["up", "down"]
"""Up is the direction from the peer that dialled: from a learner to the broker."""

_TOPIC: Final = re.compile(rb"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/([0-9a-f]{32})/([0-9]{2})")
_ARROWS: Final = {name.lower(): each.arrow for name, each in CONTROL.items()}


class Parts:
    """Remembers the topic and header of the message, because the next parts depend on them."""

    def __init__(self, direction: Direction | None) -> None:
        self._direction = direction
        self._topic = b""
        self._header: Dissected | None = None

    def take(self, index: int, *, has_more: bool, frame: bytes) -> Dissected:
        """Dissects the next frame, which is part `index` of its message."""
        if index == 0:
            self._topic, self._header = frame, None
            if has_more:
                return self._take_topic(frame)
            return subscription(frame) if frame[:1] in (b"\0", b"\1") else self._control(frame)
        if index == 1:
            found = self._take_header(frame)
            if not has_more:
                self._blame(found, 0, "bad_frame", "a payload to follow", "the last part", frame)
            return found
        if index == 2:
            found = self._take_payload(frame)
        else:
            found = Dissected("part", len(frame))
        if has_more or index > 2:
            got = f"part {index} and more" if has_more else f"part {index}"
            self._blame(found, 0, "bad_frame", "a message of one part, or of three", got, frame)
        return found

    def _control(self, frame: bytes) -> Dissected:
        found = control(frame)
        arrow, wrong = _ARROWS.get(found.kind), {"up": DOWN, "down": UP}.get(self._direction or "")
        if arrow is not None and arrow == wrong:
            at = found.at("type") if found.get("type") else 0
            expected = f"a message that goes {self._direction}"
            self._blame(found, at, "bad_message", expected, found.kind, frame)
        return found

    def _take_topic(self, frame: bytes) -> Dissected:
        found = Dissected("topic", len(frame))
        if len(frame) > TOPIC_BYTES_MAX:
            expected = f"at most {TOPIC_BYTES_MAX} bytes"
            self._blame(found, TOPIC_BYTES_MAX, "too_large", expected, str(len(frame)), frame)
            return found
        found.fields.append(Field("topic", 0, len(frame), "", _text(frame)))
        if self._direction == "down" and not _TOPIC.fullmatch(frame):
            self._blame(found, 0, "bad_frame", "NAME/INCARNATION/ss", repr(_text(frame)), frame)
        return found

    def _take_header(self, frame: bytes) -> Dissected:
        self._header = found = header(frame)
        if not found.faults:
            self._check_kind(found, frame)
            self._check_topic(found, frame)
        return found

    def _check_kind(self, found: Dissected, frame: bytes) -> None:
        kind = found.get("kind")
        assert isinstance(kind, int)
        name = DATA_KINDS[kind - 1]
        goes: Direction = "up" if name in ("PUSH", "FOUND") else "down"
        if self._direction not in (None, goes):
            expected = f"a kind that goes {self._direction}"
            self._blame(found, found.at("kind"), "bad_message", expected, name, frame, "kind")
        if name in ("FOUND", "STATE"):
            self._check_field(found, "codec", STATE_CODEC, "unknown_codec", name, frame)
        if name == "FOUND":
            for field in ("version", "push_id"):
                self._check_field(found, field, 0, "bad_message", name, frame)
        if goes == "up":
            self._check_field(found, "result_digest", 0, "bad_message", name, frame)

    def _check_field(
        self, found: Dissected, field: str, expected: object, code: str, kind: str, frame: bytes
    ) -> None:
        got = found.get(field)
        if got != expected:
            told = f"{expected} for {kind}"
            self._blame(found, found.at(field), code, told, str(got), frame, field)

    def _check_topic(self, found: Dissected, frame: bytes) -> None:
        match = _TOPIC.fullmatch(self._topic)
        if self._direction != "down" or not match:
            return
        name, incarnation, stream = match[1].decode(), match[2].decode(), int(match[3])
        for field, told in (("learner", name), ("incarnation", incarnation), ("stream", stream)):
            self._check_field(found, field, told, "bad_message", "this topic", frame)

    def _take_payload(self, frame: bytes) -> Dissected:
        found = Dissected("payload", len(frame))
        told = self._header
        known = told.get("payload_digest") if told else None
        if len(frame) > PAYLOAD_BYTES_MAX:
            expected = f"at most {PAYLOAD_BYTES_MAX} bytes"
            self._blame(found, PAYLOAD_BYTES_MAX, "too_large", expected, str(len(frame)), frame)
        elif isinstance(known, int):
            computed = digest(frame)
            found.fields.append(Field("digest", 0, len(frame), "", f"{computed:016x}"))
            if computed != known:
                expected = f"a payload of digest {known:016x}, as the header says"
                self._blame(found, 0, "bad_checksum", expected, f"{computed:016x}", frame)
        if told and not told.faults:
            read_payload(found, frame, {each.name: each.plain for each in told.fields}, 0)
        return found

    def _blame(
        self, found: Dissected, at: int, code: str, expected: str, got: str, frame: bytes,
        path: str = "",
    ) -> None:  # fmt: skip
        found.near = found.near or near(frame, at)
        found.faults.append(FrameFault(at, code, expected, got, path))


def read_payload(
    found: Dissected, data: bytes | memoryview, header: Mapping[str, object], base: int
) -> None:
    """Adds the fields of a payload to `found`. The header gives its codec and count."""
    codec, count = header.get("codec"), header.get("count")
    if not isinstance(codec, str) or not isinstance(count, int):
        return
    payload = Payload(codec, count, data, base)
    wrong = payload.read()
    found.fields += payload.fields
    if wrong:
        found.faults.append(wrong.fault())
        found.near = found.near or near(data, wrong.at, base)


def subscription(frame: bytes) -> Dissected:
    """Dissects a subscription of ZMTP 3.0: a message of the byte 1 or 0 and the topic."""
    kind = "subscribe" if frame[:1] == b"\1" else "cancel"
    topic = Field("topic", 1, len(frame), "", _text(frame[1:]))
    return Dissected(kind, len(frame), [topic])


def _text(data: bytes) -> str:
    return data.decode("ascii", "backslashreplace")
