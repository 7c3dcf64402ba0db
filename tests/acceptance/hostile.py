"""Bytes that no honest peer sends, by what is wrong with them, and the code that answers them."""

from __future__ import annotations

import math
import random
from typing import Any, Final

import zstandard
from acceptance.raw import greeting, packed, ready, sealed

ASK: Final = packed(type="askstatus")
RANDOM: Final = random.Random(1).randbytes(5000)


NO_HANDSHAKES: Final[dict[str, bytes]] = {
    "nothing": b"",
    "garbage": RANDOM,
    "zeros": bytes(5000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n" * 20,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + RANDOM,
    "half a greeting": greeting()[:30],
    "ZMTP 1": b"\x01\x00" + RANDOM,
    "ZMTP 9": greeting(major=9) + ready(b"SUB") + RANDOM,
    "unknown mechanism": greeting(b"GSSAPI") + RANDOM,
    "keys at an open broker": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + RANDOM[:192],
    "no READY": greeting() + b"\x00\x04body",
    "other socket": greeting() + ready(b"REP"),
    "no such socket": greeting() + ready(b"\xff" * 90),
    "READY without an end": greeting() + b"\x04\x0a\x05READY\x0bSoc",
    "property of 4 GiB": greeting() + b"\x04\x13\x05READY\x04Type" + b"\xff" * 8,
    "READY of 2^63 bytes": greeting() + b"\x06" + (1 << 63).to_bytes(8, "big") + RANDOM,
}
"""Bytes that a TCP connection may bring instead of a ZMTP handshake."""

NO_FRAMES: Final[dict[str, bytes]] = {
    "frame of 2^63 bytes": b"\x02" + (1 << 63).to_bytes(8, "big") + RANDOM,
    "frame of 2^64 - 1 bytes": b"\x02" + b"\xff" * 8 + RANDOM,
    "frame of 2^62 bytes": b"\x03" + (1 << 62).to_bytes(8, "big") + RANDOM,
    "reserved flags": b"\xf8\x10" + RANDOM,
    "unfinished message": b"\x01\x04part" * 50,
    "unfinished frame": b"\x00\xff" + RANDOM[:100],
    "unknown command": b"\x04\x08\x07UNKNOWN",
    "garbage": RANDOM,
}
"""Bytes that may follow the handshake instead of ZMTP frames."""

FRAMES: Final[dict[str, tuple[bytes, str]]] = {
    "garbage": (RANDOM[:400], "bad_frame"),
    "empty": (b"", "bad_frame"),
    "envelope cut": (ASK[:11], "bad_frame"),
    "body cut": (ASK[:-1], "bad_checksum"),
    "one bit": (ASK[:-1] + bytes([ASK[-1] ^ 1]), "bad_checksum"),
    "other protocol": (sealed(ASK[12:], 2), "protocol_version"),
    "more after the body": (sealed(ASK[12:] + b"\0"), "bad_message"),
    "no body": (sealed(b""), "bad_message"),
    "no msgpack": (sealed(b"\xc1"), "bad_message"),
    "no map": (sealed(b"\x93\1\2\3"), "bad_message"),
    "no UTF-8": (sealed(b"\x81\xa4type\xa2\xff\xfe"), "bad_message"),
    "array of 2^32": (sealed(b"\xdd\xff\xff\xff\xff"), "bad_message"),
    "map of 2^32": (sealed(b"\xdf\xff\xff\xff\xff"), "bad_message"),
    "text of 2^32": (sealed(b"\x81\xa4type\xdb\xff\xff\xff\xff"), "bad_message"),
    "nested 900 deep": (sealed(b"\x91" * 900), "bad_message"),
    "unknown type": (packed(type="exec", command="true"), "bad_message"),
    "unknown field": (packed(type="bye", reason="", more=1), "bad_message"),
    "field missing": (packed(type="bye"), "bad_message"),
    "no type": (packed(reason=""), "bad_message"),
    "text for a number": (packed(type="alive", nonce="1"), "bad_message"),
    "truth for a number": (packed(type="alive", nonce=True), "bad_message"),
    "fraction for a number": (packed(type="alive", nonce=1.5), "bad_message"),
    "number for a text": (packed(type="bye", reason=7), "bad_message"),
    "negative": (packed(type="alive", nonce=-1), "bad_message"),
    "2^63": (packed(type="alive", nonce=1 << 63), "bad_message"),
    "long text": (packed(type="bye", reason="x" * 1025), "bad_message"),
    "a stranger's message": (packed(type="alive", nonce=1), "unknown_session"),
    "nested 60,000 deep": (sealed(b"\x91" * 60_000), "bad_message"),
    "64 kB of garbage": (RANDOM * 13, "bad_frame"),
}
"""Frames that are no message to a broker, with the code that answers them on the control port."""

LEDGER: Final = [0] * 7

HELLOS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "other protocol": ({"protocol": 1}, "protocol_version"),
    "no name": ({"name": ""}, "bad_name"),
    "path for a name": ({"name": "../../etc/passwd"}, "bad_name"),
    "control characters": ({"name": "a\x1b[2J\n"}, "bad_name"),
    "long name": ({"name": "n" * 65}, "bad_name"),
    "incarnation": ({"incarnation": "1"}, "bad_name"),
    "other run": ({"run_id": "0" * 16}, "wrong_run"),
    "future term": ({"epoch": [5, 0, 0]}, "wrong_epoch"),
    "codecs": ({"codecs": ["raw32", "lz4"]}, "unknown_codec"),
    "other layout": ({"fingerprint": "0" * 32}, "layout_mismatch"),
    "no layout": ({"fingerprint": ""}, "bad_message"),
    "huge name": ({"name": "n" * 10_000}, "bad_message"),
}

NONSENSE: Final[list[dict[str, Any]]] = [
    {"type": "adopted", "fragment": 99, "version": 0},
    {"type": "adopted", "fragment": 0, "version": 1 << 53},
    {"type": "decline", "fragment": 9, "base_version": 9, "attempt": 9, "reason": "x"},
    {"type": "fetch", "fragment": 1 << 62, "have_version": 0},
    {"type": "fetch", "fragment": 0, "have_version": -(1 << 63)},
    {"type": "missing", "kind": 3, "fragment": 0, "version": 1 << 53, "push_id": 0,
     "ranges": [[0, 1 << 48]] * 256},
    {"type": "missing", "kind": 4, "fragment": 77, "version": 0, "push_id": 0, "ranges": []},
    {"type": "report", "step": 0, "tokens": 0, "step_s": 1e9, "loss": math.nan,
     "received": [1 << 62] * 64, "ledger": LEDGER, "up_bits_per_s": 0.0},
    {"type": "alive", "nonce": 1 << 62},
]  # fmt: skip
"""Messages in good form that say nothing sensible; they are not answered."""


def announcements(elements: int, newest: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Wrong announcements of a push of fragment 0, the only one, which has so many elements."""
    return {
        "fragment one past": ({"fragment": 1}, "bad_fragment"),
        "version one ahead": ({"base_version": newest + 1}, "future_base"),
        "element too few": ({"elements": elements - 1}, "bad_range"),
        "element too many": ({"elements": elements + 1}, "bad_range"),
        "2^48 elements": ({"elements": 1 << 48}, "bad_range"),
        "no tokens": ({"tokens": 0}, "bad_tokens"),
        "no steps": ({"steps": 0}, "bad_tokens"),
        "id 0": ({"push_id": 0}, "bad_message"),
        "negative tokens": ({"tokens": -9}, "bad_message"),
    }


def chunks(elements: int, newest: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Wrong headers of a chunk of that fragment."""
    return {
        "other run": ({"run_id": "0" * 16}, "wrong_run"),
        "other epoch": ({"epoch": [1, 1, 7]}, "wrong_epoch"),
        "fragment one past": ({"fragment": 1}, "bad_fragment"),
        "far fragment": ({"fragment": 1 << 62}, "bad_fragment"),
        "element one past": ({"offset": elements, "count": 1}, "bad_range"),
        "element too many": ({"offset": 0, "count": elements + 1}, "bad_range"),
        "last elements and one": ({"offset": elements - 4, "count": 5}, "bad_range"),
        "far beyond": ({"offset": 1 << 48}, "bad_range"),
        "codec not agreed": ({"codec": "raw32"}, "unknown_codec"),
        "no codec": ({"codec": "lz4"}, "unknown_codec"),
        "a publication": ({"kind": 3}, "bad_message"),
        "version one ahead": ({"version": newest + 1}, "future_base"),
    }


UNTOLD: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "other protocol": ({"protocol": 1}, "protocol_version"),
    "nobody": ({"learner": "nobody"}, "old_incarnation"),
    "other incarnation": ({"incarnation": "0" * 32}, "old_incarnation"),
    "no elements": ({"count": 0}, "bad_range"),
    "huge chunk": ({"count": (1 << 20) + 1}, "bad_range"),
    "other digest": ({"payload_digest": 7}, "bad_checksum"),
    "negative offset": ({"offset": -1}, "bad_message"),
    "NaN for an offset": ({"offset": math.nan}, "bad_message"),
    "stream 64": ({"stream": 64}, "bad_message"),
    "negative position": ({"position": -1}, "bad_message"),
}
"""Headers that name no push which could be refused: they are dropped and counted."""


def payloads(elements: int) -> dict[str, tuple[bytes, str]]:
    """Wrong payloads (int4-zstd) of all elements of that fragment, which has two pieces."""

    def coded(count: int) -> bytes:
        return zstandard.compress(bytes(-(-count // 2)), 1)

    scales, right = b"\x80\x3e" * 2, coded(elements)
    return {
        "empty": (b"", "bad_payload"),
        "cut": (scales + right[:-1], "bad_payload"),
        "longer": (scales + right + b"\0", "bad_payload"),
        "much longer": (scales + right + bytes(4096), "too_large"),
        "codes too many": (scales + coded(elements + 1), "bad_payload"),
        "codes too few": (scales + coded(elements - 2), "bad_payload"),
        "NaN scale": (b"\xc0\x7f" + scales[2:] + right, "not_finite"),
        "infinite scale": (b"\x80\x7f" + scales[2:] + right, "not_finite"),
        "negative scale": (b"\x80\xbf" + scales[2:] + right, "bad_payload"),
        "code -8": (scales + zstandard.compress(b"\x88" * -(-elements // 2), 1), "bad_payload"),
        "zstd bomb": (
            scales + b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(9),
            "bad_payload",
        ),
    }
