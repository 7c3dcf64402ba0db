"""Makes the generated parts of PROTOCOL.md: an exchange byte by byte, and worked numbers.

All bytes and numbers come from the encoders that run for real. `python tests/protocol_page.py`
writes them into the page; test_protocol_document.py compares the page with them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

import msgpack
import msgspec
import numpy as np
from protocol_exchange import (
    BASE,
    EPOCH,
    FRAGMENT,
    INCARNATION,
    LOCAL,
    Round,
    decoded,
    exchange,
    header,
    hello,
    welcome,
)

from narrows.proto import frames
from narrows.proto import messages as msg
from narrows.proto.codec import transfer
from narrows.proto.fragments import build_table
from narrows.proto.frames import ENVELOPE_BYTES, downlink_topic, encode_control, encode_header

PAGE: Final = Path(frames.__file__).with_name("PROTOCOL.md")

# Worked numbers.


def worked() -> str:
    """The round as a table, element by element."""
    made = exchange()
    head = ["element", *map(str, range(BASE.size))]
    rows: list[tuple[str, Iterable[Any]]] = [
        ("span", [0] * 6 + [1]),
        ("published copy, version 0", BASE),
        ("local of `a`", LOCAL),
        ("outer gradient of `a` = copy - local", made.ours.outer_grad),
        (f"codes of `a`, scales {_listed(made.ours.scales)}", made.ours.codes),
        ("values of `a` = scale · code", made.ours.values),
        ("residual of `a` = outer gradient - values", made.ours.residual),
        (f"codes of `b`, scales {_listed(made.other.scales)}", made.other.codes),
        ("values of `b`", made.other.values),
        ("mean d = 0.6 · values of `a` + 0.4 · values of `b`", made.mean),
        ("parameters p = copy - 0.4 · (d + 0.6 · b), momentum b = d", made.params),
        ("p - copy", made.params - BASE),
        (f"codes of the publication, scales {_step_scales(made)}", made.step_codes),
        ("published copy, version 1", made.copy),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [f"| {name} | " + " | ".join(map(_number, row)) + " |" for name, row in rows]
    return "\n".join(lines)


def _step_scales(made: Round) -> str:
    return _listed(decoded(made.publication).scales)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(_number, values))


def _number(value: object) -> str:
    """The shortest text of a whole number or a float32."""
    return str(value).removesuffix(".0")


def table() -> str:
    """How a small layout is cut into two fragments."""
    shapes = {"emb": (5, 4), "w": (3, 2), "s": ()}
    layout = [msg.LayoutEntry(name, shape, "float32", "mean") for name, shape in shapes.items()]
    lines = [
        "| fragment | pieces: tensor[first element, count] at offset | elements |",
        "|---|---|---|",
    ]
    for part in build_table(layout, 2):
        pieces = ", ".join(
            f"{layout[p.tensor].name}[{p.start}, {p.count}] at {p.offset}" for p in part.pieces
        )
        lines.append(f"| {part.index} | {pieces} | {part.elements} |")
    return "\n".join(lines)


# Bytes.

Line: TypeAlias = tuple[bytes, str]
HEX_BYTES: Final = 16
PLAIN_HEX_BYTES: Final = 56
JSON_COLUMNS: Final = 112


def dump() -> str:
    """The exchange, message by message."""
    made = exchange()
    push, publication = made.ours.chunk, made.publication
    state = next(
        transfer.encode_fragment(
            FRAGMENT, BASE, codec_name=transfer.STATE_CODEC, rho=1.0,
            chunk_elements=BASE.size, reconstructed=np.empty_like(BASE),
        )
    )  # fmt: skip
    heads = transfer.digest_of(BASE), transfer.digest_of(made.copy)
    received = len(state.payload) + len(publication.payload)
    beat = msg.Beat(
        EPOCH, msg.Phase.RUNNING, (0,), (msg.OpenRound(0, 0, 1, -1),), 0, 0.0, (0,), 0.0
    )
    announced = msg.Push(0, 0, 1, 1, BASE.size, 48, 3)
    ledger = msg.TokenLedger(logged=64, merged=48, overwritten=16)
    parts = [
        _control("→", hello()),
        _brief("←", welcome(heads[0])),
        _brief("→", msg.Fetch(0, -1), "The learner holds nothing yet."),
        _section("← STATE of version 0, payload frame (topic and header as in message 10)",
                 _blosc2_lines(state.payload)),
        _brief("→", msg.Adopted(0, 0)),
        _brief("←", beat, "The round is open: fragment 0, base version 0, attempt 1."),
        _brief("→", announced),
        _data("→ uplink", b"u", header(msg.DataKind.PUSH, 0, 1, push, 0, push), push, _fields),
        _brief("←", msg.Progress((len(push.payload),))),
        _data("← downlink", downlink_topic("a", INCARNATION, 0),
              header(msg.DataKind.PUBLICATION, 1, 1, publication, heads[1], state), publication,
              _plain),
        _brief("→", msg.Report(4, 64, 0.5, 1.5, (received,), ledger, 0.0)),
    ]  # fmt: skip
    return "\n\n".join(f"**{number}** {part}" for number, part in enumerate(parts, 1))


def _control(arrow: str, message: msg.ControlMessage, text: str = "") -> str:
    frame = encode_control(message)
    title = f"{arrow} {type(message).__name__}, one frame of {len(frame)} bytes. {text}".rstrip()
    return _section(title, [*_envelope(frame), *_map_lines(frame[ENVELOPE_BYTES:])])


def _brief(arrow: str, message: msg.ControlMessage, text: str = "") -> str:
    frame = encode_control(message)
    fields = _json(msgspec.to_builtins(message)).replace(":", ": ")
    title = f"{arrow} {type(message).__name__}, one frame of {len(frame)} bytes. {text}".rstrip()
    shown = textwrap.wrap(fields, JSON_COLUMNS, break_on_hyphens=False)
    return f"{title}\n\n{_plain(frame, shown)}"


def _data(
    arrow: str, topic: bytes, head: msg.Header, chunk: transfer.EncodedChunk,
    shown: Callable[[bytes], str],
) -> str:  # fmt: skip
    frame = encode_header(head)
    sizes = f"{len(topic)}, {len(frame)} and {len(chunk.payload)} bytes"
    parts = [
        f"{arrow}: {head.kind.name}, frames of {sizes}. Topic `{topic.decode()}`, header:",
        shown(frame),
        "payload:",
        _block(_int4_lines(chunk)),
    ]
    return "\n\n".join(parts)


def _fields(frame: bytes) -> str:
    """A header, a line per field."""
    return _block([*_envelope(frame), *_array_lines(frame[ENVELOPE_BYTES:])])


def _plain(frame: bytes, told: Sequence[str] = ()) -> str:
    """A frame in hexadecimal, without its fields: for a form that was shown before."""
    starts = range(0, len(frame), PLAIN_HEX_BYTES)
    lines = [frame[start : start + PLAIN_HEX_BYTES].hex() for start in starts]
    return "\n".join(["```text", *told, *lines, "```"])


def _section(title: str, lines: Sequence[Line]) -> str:
    return f"{title}\n\n{_block(lines)}"


def _block(lines: Sequence[Line]) -> str:
    text, offset = list[str](), 0
    for data, meaning in lines:
        for start in range(0, len(data), HEX_BYTES):
            part = data[start : start + HEX_BYTES].hex()
            row = f"{offset + start:4} {part:<{2 * HEX_BYTES}}  {'' if start else meaning}"
            text.append(row.rstrip())
        offset += len(data)
    return "\n".join(["```text", *text, "```"])


def _envelope(frame: bytes) -> list[Line]:
    return [(frame[:12], "magic, protocol, digest of the body")]


class Unpacker(Protocol):
    """The part of msgpack.Unpacker that is used."""

    def feed(self, data: bytes) -> None: ...
    def tell(self) -> int: ...
    def unpack(self) -> object: ...
    def read_map_header(self) -> int: ...
    def read_array_header(self) -> int: ...


def _unpacker(body: bytes) -> Unpacker:
    unpacker = cast(Unpacker, msgpack.Unpacker())
    unpacker.feed(body)
    return unpacker


def _map_lines(body: bytes, indent: str = "") -> list[Line]:
    """A map: its head, then one line for each key with its value; maps inside are opened."""
    unpacker = _unpacker(body)
    count = unpacker.read_map_header()
    lines: list[Line] = [(body[: unpacker.tell()], f"{indent}map of {count}")]
    for _ in range(count):
        start = unpacker.tell()
        key = unpacker.unpack()
        middle = unpacker.tell()
        value = unpacker.unpack()
        end = unpacker.tell()
        if isinstance(value, dict):
            lines.append((body[start:middle], f"{indent}{key}:"))
            lines += _map_lines(body[middle:end], indent + "  ")
        else:
            lines.append((body[start:end], f"{indent}{key}: {_json(value)}"))
    return lines


def _array_lines(body: bytes) -> list[Line]:
    """The data header: its values in order, with the names of the fields."""
    unpacker = _unpacker(body)
    count = unpacker.read_array_header()
    lines: list[Line] = [(body[: unpacker.tell()], f"array of {count}")]
    for name in msg.Header.__struct_fields__:
        start = unpacker.tell()
        value = unpacker.unpack()
        lines.append((body[start : unpacker.tell()], f"{name}: {_json(value)}"))
    return lines


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode().replace(",", ", ")


def _int4_lines(chunk: transfer.EncodedChunk) -> list[Line]:
    payload = chunk.payload
    packed_bytes = (chunk.count + 1) // 2
    assert payload[4:8] == b"\x28\xb5\x2f\xfd" and len(payload) == 13 + packed_bytes
    scales = _listed(decoded(chunk).scales)
    return [
        (payload[:4], f"scales of spans 0 and 1, bfloat16: {scales}"),
        (payload[4:8], "zstd: magic"),
        (payload[8:9], "zstd: descriptor, content size in one byte, no checksum"),
        (payload[9:10], f"zstd: content size {payload[9]}"),
        (payload[10:13], "zstd: block header, last, stored, 4 bytes"),
        (payload[13:], f"packed codes: {_listed(decoded(chunk).whole_codes())}"),
    ]


def _blosc2_lines(payload: bytes) -> list[Line]:
    return [
        (payload[:2], "formats"),
        (payload[2:3], "flags"),
        (payload[3:4], "bytes per item"),
        (payload[4:8], "bytes of the content"),
        (payload[8:12], "bytes of a block"),
        (payload[12:16], "bytes of the chunk"),
        (payload[16:31], "filter 1 (shuffle), codec 5 (zstd)"),
        (payload[31:32], "no special content"),
        (payload[32:], f"the values: {_listed(BASE)}"),
    ]


# The page.

PARTS: Final = {"fragments": table, "worked": worked, "exchange": dump}


def generated(page: str) -> str:
    """The page with its generated parts as they should be."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}"

    pattern = r"(<!-- generated: (\w+) -->)\n.*?\n?(<!-- end -->)"
    return with_sections(re.sub(pattern, fill, page, flags=re.DOTALL))


def with_sections(page: str) -> str:
    """The page with the numbers of the sections that use a constant, in the table of constants."""
    parts = re.split(r"(?m)^## (\d+)\. (.*)$", page)[1:]
    sections = [each for each in zip(*[iter(parts)] * 3, strict=True) if each[1] != "Constants"]

    def fill(match: re.Match[str]) -> str:
        places = [place for place, _, text in sections if re.search(rf"\b{match[2]}\b", text)]
        return f"{match[1]} {', '.join(places)} |"

    return re.sub(r"(?m)^(\| `([A-Z_]+)` \| [^|]+ \| [^|]+ \|)[^|]*\|$", fill, page)


def parts_of(page: str) -> Iterator[str]:
    """Names of the generated parts that a page has."""
    return (match[1] for match in re.finditer(r"<!-- generated: (\w+) -->", page))


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
