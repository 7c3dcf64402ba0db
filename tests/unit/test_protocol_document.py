"""PROTOCOL.md says what the code does: its tables are read and compared, so that it cannot rot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import protocol_page
import pytest

from narrows.broker import forgetting, merge, run_clock, shares
from narrows.broker.config import BrokerConfig
from narrows.learner import links
from narrows.proto import (
    budget,
    codecs,
    delivery,
    kernels,
    limits,
    messages,
    outbox,
    patience,
    scales,
    socket_options,
    terms,
    timing,
    transfer,
    zstd_frame,
)
from narrows.proto.codecs import codec, codec_names
from narrows.proto.errors import RETRYABLE, ErrorCode
from narrows.proto.frames import ENVELOPE_BYTES, MAGIC
from narrows.proto.zstd_frame import frame_bytes_max

DOCUMENT = Path(transfer.__file__).with_name("PROTOCOL.md").read_text(encoding="utf-8")

#: Structures that the document describes besides the control messages.
PARTS: tuple[type[msgspec.Struct], ...] = (
    messages.RunSettings,
    messages.LayoutEntry,
    messages.FragmentHead,
    messages.OpenRound,
    messages.TokenLedger,
    messages.LearnerStatus,
    messages.Header,
)


def tables(text: str) -> Iterator[list[list[str]]]:
    """Every table: its rows of cells, the head first."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("|"):
            rows = [line, *takewhile(lambda each: each.startswith("|"), lines)]
            yield [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def table(*head: str) -> list[list[str]]:
    """The rows of the only table whose head begins so."""
    found = [rows[2:] for rows in tables(DOCUMENT) if tuple(rows[0][: len(head)]) == head]
    assert len(found) == 1, f"{len(found)} tables with the head {head}"
    assert all(len(row) == len(found[0][0]) for row in found[0])
    return found[0]


def described(head: str) -> dict[str, list[tuple[str, str]]]:
    """(field, type) in order, by message."""
    fields: dict[str, list[tuple[str, str]]] = {}
    current = ""
    for first, names, kind, _ in table(head, "field", "type", "meaning"):
        named = re.match(r"\*\*(\w+)\*\*", first)
        current = named[1] if named else current
        rows = fields.setdefault(current, [])
        rows += [(name.strip(), kind) for name in names.split(",") if name]
    return fields


def declared(struct: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """The same of a struct, in the words of the document."""
    fields: list[tuple[str, str]] = []
    for field in msgspec.structs.fields(struct):
        kind = str(struct.__annotations__[field.name])
        kind = re.sub(r"tuple\[(\w+), \.\.\.\]", r"[\1]", kind)
        kind = re.sub(r"dict\[(\w+), (\w+)\]", r"{\1: \2}", kind)
        kind = kind.replace("float | None", "float or nil")
        if field.default is not msgspec.NODEFAULT:
            kind += f' = "{field.default}"' if field.default == "" else f" = {field.default}"
        fields.append((field.name, kind))
    return fields


CONTROL: tuple[type[msgspec.Struct], ...] = get_args(messages.ControlMessage)


def test_every_control_message_is_described() -> None:
    assert sorted(described("message")) == sorted(each.__name__ for each in CONTROL)


@pytest.mark.parametrize("struct", CONTROL, ids=lambda each: each.__name__)
def test_control_message(struct: type[msgspec.Struct]) -> None:
    assert described("message")[struct.__name__] == declared(struct)


@pytest.mark.parametrize("struct", PARTS, ids=lambda each: each.__name__)
def test_structure(struct: type[msgspec.Struct]) -> None:
    everything = described("structure") | described("header")
    assert sorted(everything) == sorted(each.__name__ for each in PARTS)
    assert everything[struct.__name__] == declared(struct)


def test_maps_are_told_from_arrays() -> None:
    maps = {each.__name__ for each in PARTS if not each.__struct_config__.array_like}
    assert maps == {next(iter(described("structure"))), "LearnerStatus"}
    assert "The first is a map, the others are arrays" in DOCUMENT
    assert "**LearnerStatus** is a map" in DOCUMENT


def test_directions() -> None:
    told = [re.match(r"\*\*(\w+)\*\* (.)", row[0]) for row in table("message", "field")]
    arrows = {match[1]: match[2] for match in told if match}
    assert {name for name, arrow in arrows.items() if arrow == "↔"} == {"Missing", "Bye"}
    down = {name for name, arrow in arrows.items() if arrow == "←"}
    assert down == {"Welcome", "Beat", "Progress", "Refuse", "Probe", "Status"}
    assert set(arrows.values()) == {"→", "←", "↔"}


@pytest.mark.parametrize("enum", [messages.Mode, messages.Phase, messages.Role])
def test_words_of_an_enumeration(enum: type[Enum]) -> None:
    assert words_of(enum.__name__) == [member.value for member in enum]


@pytest.mark.parametrize("name", ["MergeLaw", "DtypeName"])
def test_words_of_a_literal(name: str) -> None:
    assert words_of(name) == list(get_args(getattr(terms, name)))


def words_of(name: str) -> list[str]:
    """The words after the name of an enumeration."""
    paragraph = next(each for each in DOCUMENT.split("\n\n") if each.startswith("Enumerations:"))
    entry = next(each for each in paragraph.split("·") if re.search(rf"\b{name}\b", each))
    return re.findall(r"`(\w+)`", entry)


def test_data_kinds_and_their_numbers() -> None:
    paragraph = next(each for each in DOCUMENT.split("\n\n") if each.startswith("Enumerations:"))
    told = [(int(number), name) for number, name in re.findall(r"(\d) ([A-Z]+) \(", paragraph)]
    assert told == [(kind.value, kind.name) for kind in messages.DataKind]


def bound(text: str) -> float:
    """A number, the name of a limit, or the number below one."""
    name, _, less = text.partition(" − ")  # noqa: RUF001
    value = getattr(limits, name) if name.isupper() else number(name)
    return float(value) - float(less or 0)


def test_bounds_of_the_types() -> None:
    meanings = {row[0]: row[1] for row in table("type", "meaning")}
    told = {
        name: (bound(match[1]), bound(match[2]))
        for name, meaning in meanings.items()
        if (match := re.match(r"(?:integer|float), (\S+) to ([^,;]+)", meaning))
    }
    metas = {name: get_args(kind)[1:] for name, kind in vars(terms).items() if get_args(kind)}
    bounds = {
        name: (meta[0].ge, meta[0].le)
        for name, meta in metas.items()
        if meta and isinstance(meta[0], msgspec.Meta) and meta[0].ge is not None
    }
    assert told == bounds
    for name in ("Text", "Positions", "Ranges"):
        match = re.search(r"up to ([A-Z_]+)", meanings[name])
        assert match and bound(match[1]) == get_args(getattr(terms, name))[1].max_length, name


def test_every_error_code_is_listed_in_order() -> None:
    rows = table("code", "meaning", "who is told", "session")
    assert [row[0].strip("`") for row in rows] == list(ErrorCode)
    assert all(all(row) for row in rows)


def test_what_is_tried_again_after_a_refusal() -> None:
    rows = table("code", "meaning", "who is told", "session")
    again = {row[0].strip("`") for row in rows if row[3].startswith("Hello again")}
    assert again == set(RETRYABLE)


def number(text: str) -> float:
    """`4096`, `2^48`, `2^-100`, `0.25 s`."""
    base, _, exponent = text.removesuffix(" s").partition("^")
    return int(base) ** int(exponent) if exponent else float(base)


#: Constants that are neither a limit nor a time, by the name that the document gives them.
AMOUNTS: dict[str, object] = {
    "KEEPALIVE_PROBES": socket_options.COMMON["TCP_KEEPALIVE_CNT"],
    "FETCHES_MAX": links.FETCHES_MAX,
    "GONE_MAX": forgetting.GONE_MAX,
    "MERGED_PUSHES_MAX": forgetting.MERGED_PUSHES_MAX,
    "PATIENCE_ROUNDS": patience.ROUNDS,
    "PATIENCE_FACTOR": patience.SLOWER,
    "PATIENCE_SAMPLES": patience.SAMPLES,
    "STATE_ELEMENT_BYTES": patience.STATE_BYTES,
    "RATE_RATIO_MAX": run_clock.RATE_RATIO_MAX,
    "FIRST_REPORTS": run_clock.FIRST_REPORTS,
    "FIRST_TOKENS_MAX": run_clock.FIRST_TOKENS_MAX,
    "ACKNOWLEDGE_BYTES": delivery.ACKNOWLEDGE_BYTES,
    "STREAM_WINDOW_BYTES": socket_options.STREAM_WINDOW_BYTES,
    "WINDOW_START_BYTES": delivery.WINDOW_START_BYTES,
    "WINDOW_MIN_BYTES": delivery.WINDOW_MIN_BYTES,
    "STATE_FLOOR": outbox.STATE_FLOOR,
    "LATE_FACTOR": outbox.LATE_FACTOR,
    "SHARE_USED": budget.SHARE_USED,
    "WINDOW_SHARE": budget.WINDOW_SHARE,
    "BACK_SHARE": budget.BACK_SHARE,
    "IDLE_SHARE": shares.IDLE_SHARE,
    "MESSAGE_BYTES_MIN": budget.MESSAGE_BYTES_MIN,
    "MESSAGE_OVERHEAD_BYTES": budget.MESSAGE_OVERHEAD_BYTES,
    "CUT": budget.CUT,
    "SEGMENT_BYTES": budget.SEGMENT_BYTES,
    "SEGMENT_OVERHEAD_BYTES": budget.SEGMENT_OVERHEAD_BYTES,
    "FRAME_OVERHEAD_BYTES": budget.FRAME_OVERHEAD_BYTES,
    "RMS_SAMPLES_MAX": codecs.RMS_SAMPLES_MAX,
    "RUN": kernels.RUN,
    "ZSTD_WINDOW_BYTES_MAX": zstd_frame.WINDOW_BYTES_MAX,
    "ZSTD_BLOCK_BYTES_MIN": zstd_frame.BLOCK_CONTENT_BYTES_MIN,
    "SCALE_MIN": scales.SCALE_MIN,
    "SCALE_MAX": scales.SCALE_MAX,
    "LANES": kernels.LANES,
    "NORM_MIN": merge.NORM_MIN,
    "DIRECTION_MIN": merge.DIRECTION_MIN,
    "CLIP_CONTRIBUTORS_MIN": merge.CLIP_CONTRIBUTORS_MIN,
}


def constants() -> dict[str, object]:
    """Every constant of the protocol: limits, times, and other amounts."""
    found: dict[str, object] = {}
    for module in (limits, timing):
        found |= {name: value for name, value in vars(module).items() if name.isupper()}
    return found | AMOUNTS


def test_every_constant_with_its_value() -> None:
    told = {row[0].strip("`"): row[1] for row in table("constant", "value", "unit", "meaning")}
    assert list(told) == list(constants())
    for name, actual in constants().items():
        value = told[name]
        assert actual == (value.strip("`") if isinstance(actual, str) else number(value)), name


def test_times_are_in_seconds() -> None:
    units = {row[0].strip("`"): row[2] for row in table("constant", "value", "unit", "meaning")}
    assert all(units[name] == "s" for name in vars(timing) if name.isupper())


def test_names_of_constants_in_the_text() -> None:
    """The text uses every constant by its name, and no name that the table lacks."""
    before, _, after = DOCUMENT.partition("| constant | value | unit | meaning |")
    text = before + after.partition("\n\n")[2]
    used = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text))
    assert used - constants().keys() == NOT_CONSTANTS
    unused = {name for name in constants() if not re.search(rf"\b{name}\b", text)}
    assert not unused


#: Options of ZeroMQ sockets and a file, which look like constants.
NOT_CONSTANTS = {
    "CONNECT_TIMEOUT",
    "HANDSHAKE_IVL",
    "README_CHUNK_FORMAT",
    "RECONNECT_IVL",
    "RECONNECT_IVL_MAX",
    "ROUTER_MANDATORY",
    "TCP_KEEPALIVE",
    "TCP_MAXRT",
    "XPUB_VERBOSER",
}


def test_settings_with_their_defaults() -> None:
    for name, value, _ in table("setting", "default", "meaning"):
        actual: object = BrokerConfig()
        for part in name.strip("`").split("."):
            actual = getattr(actual, part)
        assert actual == (value if isinstance(actual, str) else number(value)), name


def test_generated_parts() -> None:
    """`python tests/protocol_page.py` writes them."""
    assert sorted(protocol_page.parts_of(DOCUMENT)) == sorted(protocol_page.PARTS)
    assert protocol_page.generated(DOCUMENT) == DOCUMENT


def test_the_example_of_a_payload() -> None:
    """Bytes, codes and values of the example are those of the exchange."""
    example = DOCUMENT[DOCUMENT.index("**Example.** Message 8") :].partition("## 9.")[0]
    push = protocol_page.exchange().ours
    rows = example.splitlines()
    payload = next(row for row in rows if row.startswith("payload"))
    assert bytes.fromhex(payload.removeprefix("payload")) == push.chunk.payload
    codes = re.findall(r"->((?: +-?\d+)+)", example)
    assert [int(code) for part in codes for code in part.split()] == push.codes.tolist()
    values = next(row for row in rows if row.startswith("values")).removeprefix("values")
    assert [float(each) for each in values.replace("|", " ").split()] == push.values.tolist()


def test_contents() -> None:
    """The table of contents names every section, in order."""
    listed = re.findall(r"^(\d+)\. \[(.*)\]\(#(.*)\)$", DOCUMENT, re.MULTILINE)
    sections = re.findall(r"^## (\d+)\. (.*)$", DOCUMENT, re.MULTILINE)
    assert [(number, title) for number, title, _ in listed] == sections
    for number, title, anchor in listed:
        assert anchor == f"{number}-{title.lower().replace(',', '').replace(' ', '-')}"


def test_every_codec_with_its_largest_payload() -> None:
    told = {row[0].strip("`"): row[2] for row in table("codec", "bytes", "largest payload")}
    assert list(told) == list(codec_names())
    size = np.random.default_rng(5)
    for n, s in [(1, 1), (255, 3), (65536, 2), *size.integers(1, 1 << 20, (20, 2)).tolist()]:
        sizes = {
            "4n, exactly": 4 * n,
            "4n + 32": 4 * n + 32,
            "2n, exactly": 2 * n,
            "2s + F(n)": 2 * s + frame_bytes(n),
            "2s + F(⌈n/2⌉)": 2 * s + frame_bytes(-(-n // 2)),
        }
        for name, formula in told.items():
            assert codec(name).payload_bytes_max(n, s) == sizes[formula]


def frame_bytes(b: int) -> int:
    """F(b) as the document writes it."""
    formula = re.search(r"F\(b\) = (.*) bounds a zstd frame", DOCUMENT)
    assert formula
    assert formula[1] == "b + ⌊b/256⌋ + (b < 131072 ? ⌊(131072 - b)/2048⌋ : 0)"
    value = b + b // 256 + ((131072 - b) // 2048 if b < 131072 else 0)
    assert value == frame_bytes_max(b)
    return value


def test_envelope() -> None:
    rows = table("bytes", "content")
    assert rows[0][1] == f"`{MAGIC.decode()}` ({MAGIC.hex(' ')})"
    assert rows[-1][0] == f"{ENVELOPE_BYTES}–"  # noqa: RUF001


def test_the_state_codec() -> None:
    assert f"FOUND, STATE: `{transfer.STATE_CODEC}`" in DOCUMENT


def test_the_version_on_the_title() -> None:
    assert DOCUMENT.startswith(f"# The Narrows wire format, version {limits.PROTOCOL}\n")
