"""Bytes that no honest peer sends, by what is wrong with them, and the code that answers them."""

from __future__ import annotations

import math
import random
from typing import Any, Final

import zstandard
from acceptance.raw import ENVELOPE, greeting, packed, ready

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


def body(text: bytes) -> list[bytes]:
    """Any body behind a valid envelope."""
    return [ENVELOPE, text]


FRAMES: Final[dict[str, tuple[list[bytes], str]]] = {
    "garbage": ([RANDOM[:400]], "bad_message"),
    "one empty frame": ([b""], "bad_message"),
    "no body": ([ENVELOPE], "bad_message"),
    "envelope cut": ([ENVELOPE[:3], ASK], "bad_message"),
    "envelope longer": ([ENVELOPE + b"\0", ASK], "bad_message"),
    "other magic": ([b"NRX\1", ASK], "bad_message"),
    "other protocol": ([b"NRW\2", ASK], "protocol_version"),
    "a frame too many": ([ENVELOPE, ASK, b""], "bad_message"),
    "a thousand frames": ([ENVELOPE, *[b""] * 999], "bad_message"),
    "body cut": (body(ASK[:-1]), "bad_message"),
    "more after the body": (body(ASK + b"\0"), "bad_message"),
    "empty body": (body(b""), "bad_message"),
    "no msgpack": (body(b"\xc1"), "bad_message"),
    "no map": (body(b"\x93\1\2\3"), "bad_message"),
    "no UTF-8": (body(b"\x81\xa4type\xa2\xff\xfe"), "bad_message"),
    "array of 2^32": (body(b"\xdd\xff\xff\xff\xff"), "bad_message"),
    "map of 2^32": (body(b"\xdf\xff\xff\xff\xff"), "bad_message"),
    "text of 2^32": (body(b"\x81\xa4type\xdb\xff\xff\xff\xff"), "bad_message"),
    "nested 900 deep": (body(b"\x91" * 900), "bad_message"),
    "map nested deep": (
        body(b"\x82\xa4type\xa6status\xa6status" + b"\x81\xa1x" * 30_000 + b"\xc0"),
        "bad_message",
    ),
    "unknown type": (body(packed(type="exec", command="true")), "bad_message"),
    "unknown field": (body(packed(type="bye", reason="", more=1)), "bad_message"),
    "field missing": (body(packed(type="bye")), "bad_message"),
    "no type": (body(packed(reason="")), "bad_message"),
    "text for a number": (body(packed(type="push", fragment="1")), "bad_message"),
    "truth for a number": (body(packed(type="push", fragment=True)), "bad_message"),
    "fraction for a number": (body(packed(type="push", fragment=1.5)), "bad_message"),
    "number for a text": (body(packed(type="bye", reason=7)), "bad_message"),
    "negative": (body(packed(type="push", fragment=-1)), "bad_message"),
    "2^63": (body(packed(type="push", fragment=1 << 63)), "bad_message"),
    "long text": (body(packed(type="bye", reason="x" * 1025)), "bad_message"),
    "nested 60,000 deep": (body(b"\x91" * 60_000), "bad_message"),
    "64 kB of garbage": (body(RANDOM * 13), "bad_message"),
    "beyond the bound": (body(bytes(140_000)), "too_large"),
}
"""Frames that are no message to a broker, with the code that answers them on the control port."""

HELLOS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "other protocol": ({"protocol": 2}, "protocol_version"),
    "no name": ({"name": ""}, "bad_message"),
    "path for a name": ({"name": "../../etc/passwd"}, "bad_message"),
    "control characters": ({"name": "a\x1b[2J\n"}, "bad_message"),
    "long name": ({"name": "n" * 65}, "bad_message"),
    "huge name": ({"name": "n" * 10_000}, "bad_message"),
    "a line after the name": ({"name": "eve\n"}, "bad_message"),
    "incarnation": ({"incarnation": "1"}, "bad_message"),
    "incarnation of another": ({"incarnation": "good.00000001"}, "bad_name"),
    "another name": ({"name": "good"}, "bad_name"),
    "other run": ({"run_id": "0" * 16}, "wrong_run"),
    "no epoch": ({"epoch": "5"}, "bad_message"),
    "other layout": ({"fingerprint": "0" * 32}, "layout_differs"),
    "no layout": ({"fingerprint": ""}, "bad_message"),
    "a fragment too many": ({"held": [[0, 0]] * 2}, "wrong_run"),
    "5,000 fragments": ({"held": [[0, 0]] * 5000}, "bad_message"),
    "version -2": ({"held": [[-2, 0]]}, "bad_message"),
}

NONSENSE: Final[list[dict[str, Any]]] = [
    {"type": "report", "steps": 0, "tokens": 0, "loss": math.nan, "held": [-1]},
    {"type": "report", "steps": 1 << 62, "tokens": 1 << 62, "loss": -math.inf, "held": [1 << 53]},
    {"type": "report", "steps": 0, "tokens": 1 << 62, "loss": 1e308, "held": [0],
     "paused": "\x1b[2J", "finished": [4095] * 4096},
    {"type": "report", "steps": 1 << 40, "tokens": 0, "loss": None, "held": [-1]},
]  # fmt: skip
"""Messages in good form that say nothing sensible; they are not answered."""

FROM_A_BROKER: Final[list[dict[str, Any]]] = [
    {"type": "status", "status": {"learners": {}}},
    {"type": "refuse", "code": "bad_name", "message": "leave"},
    {"type": "beat", "epoch": "9-00000000", "phase": "ended", "heads": [9], "collecting": [],
     "period_s": 0.0, "run_tokens": 0, "tokens_per_s": 0.0, "up_bits_per_s": 0.0},
]  # fmt: skip
"""Messages that only a broker sends."""


def requests(newest: int) -> dict[str, dict[str, Any]]:
    """Wrong requests of a run of one fragment in one chunk; each is refused."""
    state = {"type": "fetch", "kind": 3, "fragment": 0, "version": 0, "push_id": 0}
    one = {"chunks": [[0, 1]]}
    return {
        "far fragment": state | one | {"fragment": 4095},
        "no such fragment": state | one | {"fragment": 1 << 62},
        "future version": state | one | {"version": newest + 1000},
        "publication of version 0": state | one | {"kind": 2},
        "a push": state | one | {"kind": 0},
        "no such kind": state | one | {"kind": 9},
        "far chunk": state | {"chunks": [[1, 1]]},
        "2^48 chunks": state | {"chunks": [[0, 1 << 48]]},
        "no chunks": state | {"chunks": []},
        "empty range": state | {"chunks": [[0, 0]]},
        "the same chunk 256 times and more": state | {"chunks": [[0, 1]] * 257},
        "negative chunk": state | {"chunks": [[-1, 2]]},
    }


def announcements(newest: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Wrong announcements of a push of fragment 0, the only one."""
    return {
        "fragment one past": ({"fragment": 1}, "bad_message"),
        "version far ahead": ({"base": newest + 1000}, "bad_message"),
        "2^60 tokens": ({"tokens": 1 << 60}, "bad_message"),
        "no steps": ({"steps": 0}, "bad_message"),
        "id 0": ({"push_id": 0}, "bad_message"),
        "id 2^60": ({"push_id": 1 << 60}, "bad_message"),
        "negative tokens": ({"tokens": -9}, "bad_message"),
    }


CHUNKS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "fragment one past": ({"fragment": 1}, "bad_message"),
    "last fragment": ({"fragment": 4095}, "bad_message"),
    "chunk one past": ({"chunk": 1}, "bad_chunk"),
    "far beyond": ({"chunk": 1 << 48}, "bad_chunk"),
    "codec not agreed": ({"codec": "f32-blosc2"}, "bad_chunk"),
}
"""Wrong headers of a chunk of that fragment; its push is refused on control."""

UNTOLD: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no incarnation": ({"learner": "nobody"}, "bad_message"),
    "nobody": ({"learner": ""}, "bad_message"),
    "long name": ({"learner": "n" * 81}, "bad_message"),
    "a publication": ({"kind": 2}, "bad_message"),
    "a state": ({"kind": 3}, "bad_message"),
    "no such kind": ({"kind": 5}, "bad_message"),
    "no such fragment": ({"fragment": 1 << 62}, "bad_message"),
    "negative chunk": ({"chunk": -1}, "bad_message"),
    "NaN for a chunk": ({"chunk": math.nan}, "bad_message"),
    "no codec": ({"codec": "lz4"}, "bad_message"),
    "id 2^60": ({"push_id": 1 << 60}, "bad_message"),
    "negative digest": ({"payload_digest": -1}, "bad_message"),
    "no epoch": ({"epoch": [1, 2]}, "bad_message"),
    "2,000 contributors": ({"contributors": [["good.00000001", 1]] * 2000}, "bad_message"),
    "a seed of codes": ({"kind": 1}, "bad_chunk"),
    "a layout of codes": ({"kind": 4}, "bad_chunk"),
    "other digest": ({"payload_digest": 7}, "bad_digest"),
}
"""Headers that name no push which could be refused, and a chunk that is damaged on its way: they
are dropped and noted."""

SILENT: Final[dict[str, dict[str, Any]]] = {
    "other epoch": {"epoch": "1-00000000"},
    "nobody here": {"learner": "nobody.00000001"},
    "other incarnation": {"learner": "mallory.00000000"},
    "a seed that nobody asked for": {"kind": 1, "codec": "f32-blosc2"},
    "a layout that nobody asked for": {"kind": 4, "codec": "f32-blosc2"},
}
"""Headers of what an honest learner may have on its way when a life ends: they are dropped."""


def payloads(elements: int) -> dict[str, tuple[bytes, str]]:
    """Wrong payloads (int4-zstd) of all elements of that fragment, which has two pieces."""

    def coded(count: int) -> bytes:
        return zstandard.compress(bytes(-(-count // 2)), 1)

    scales, right = b"\x80\x3e" * 2, coded(elements)
    return {
        "empty": (b"", "bad_payload"),
        "scales cut": (scales[:3], "bad_payload"),
        "cut": (scales + right[:-1], "bad_payload"),
        "longer": (scales + right + b"\0", "bad_payload"),
        "a second frame": (scales + right + right, "bad_payload"),
        "much longer": (scales + right + bytes(4096), "too_large"),
        "codes too many": (scales + coded(elements + 2), "bad_payload"),
        "codes too few": (scales + coded(elements - 2), "bad_payload"),
        "NaN scale": (b"\xc0\x7f" + scales[2:] + right, "not_finite"),
        "infinite scale": (b"\x80\x7f" + scales[2:] + right, "not_finite"),
        "negative scale": (b"\x80\xbf" + scales[2:] + right, "bad_payload"),
        "scale -0": (b"\x00\x80" + scales[2:] + right, "bad_payload"),
        "code -8": (scales + zstandard.compress(b"\x88" * -(-elements // 2), 1), "bad_payload"),
        "zstd bomb": (
            scales + b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(9),
            "bad_payload",
        ),
    }
