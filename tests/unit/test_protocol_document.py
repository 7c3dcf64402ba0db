"""PROTOCOL.md says what the code does: its tables are read and compared, so that it cannot rot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from typing import get_args

import msgspec
import numpy as np
import protocol_exchange
import protocol_page
import pytest
from protocol_tables import DOCUMENT, number, table

from narrows.broker.config import BrokerConfig
from narrows.proto import limits, messages, terms
from narrows.proto.codec import transfer
from narrows.proto.codec.codecs import codec, codec_names
from narrows.proto.codec.zstd_frame import frame_bytes_max
from narrows.proto.errors import RETRYABLE, ErrorCode
from narrows.proto.frames import ENVELOPE_BYTES, MAGIC
from narrows.proto.quotas import BYTES_BURST_S, CONTROL_UNIT_BYTES, RETURN_COST, Ask, quotas

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
    assert {name for name, arrow in arrows.items() if arrow == "↔"} == {
        "Missing",
        "AskLayout",
        "LayoutPart",
        "Bye",
    }
    down = {name for name, arrow in arrows.items() if arrow == "←"}
    assert down == {"Enrolled", "Welcome", "Beat", "Progress", "Refuse", "Probe", "Status"}
    assert set(arrows.values()) == {"→", "←", "↔"}


@pytest.mark.parametrize("enum", [messages.Mode, messages.Phase, messages.Role])
def test_words_of_an_enumeration(enum: type[Enum]) -> None:
    assert words_of(enum.__name__) == [member.value for member in enum]


@pytest.mark.parametrize("name", ["MergeRule", "DtypeName"])
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


#: Types of bounded length.
UP_TO = (
    "Text", "Codec", "Positions", "Ranges", "Versions", "Codecs", "Shape", "LayoutEntries",
    "Heads", "OpenRounds", "LearnerStatuses",
)  # fmt: skip


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
    for name, meta in metas.items():
        if meta and isinstance(meta[0], msgspec.Meta) and meta[0].pattern is not None:
            assert f"string that matches `{meta[0].pattern}`" in meanings[name], name
    for name in UP_TO:
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


def test_settings_with_their_defaults() -> None:
    for name, value, _ in table("setting", "default", "meaning"):
        actual: object = BrokerConfig()
        for part in name.strip("`").split("."):
            actual = getattr(actual, part)
        assert actual == (value if isinstance(actual, str) else number(value)), name


def test_generated_parts() -> None:
    """`python tests/protocol_page.py` writes them."""
    assert list(protocol_page.parts_of(DOCUMENT)) == list(protocol_page.PARTS)
    assert protocol_page.generated(DOCUMENT) == DOCUMENT


def test_the_example_of_a_payload() -> None:
    """Bytes, codes and values of the example are those of the exchange."""
    example = DOCUMENT[DOCUMENT.index("**Example.** Message 8") :].partition("## 9.")[0]
    push = protocol_exchange.exchange().ours
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
    assert [(place, title) for place, title, _ in listed] == sections
    for place, title, anchor in listed:
        assert anchor == f"{place}-{title.lower().replace(',', '').replace(' ', '-')}"


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


def test_quotas_of_a_key() -> None:
    """Every quota stands in the table, as it is for a few runs of other sizes."""
    rows = {row[0]: row[1:] for row in table("kind", "at once", "per second", "per version")}
    assert list(rows) == list(Ask)
    burst_s, _, chunk = rows.pop(Ask.BYTES)[0].partition(" s of the rate told + ")
    assert float(burst_s) == BYTES_BURST_S
    assert chunk == f"{limits.PAYLOAD_BYTES_MAX / 2**20:.2f} MiB"
    for chunks in ([1], [3, 5], [7, 2, 40, 1]):
        sizes = {"P": len(chunks), "sum C(f)": sum(chunks), "max C(f)": max(chunks)}
        made = quotas(chunks, len(chunks))
        assert sorted(rows) == sorted(made)
        for kind, told in rows.items():
            quota = made[Ask(kind)]
            amounts = [sum_told(cell, sizes) for cell in told[:3]]
            assert amounts == pytest.approx([quota.burst, quota.per_s, quota.per_version]), kind
    assert f"one that returns {Fraction(RETURN_COST)}" in rows[Ask.JOINS][3]
    assert f"1 per {CONTROL_UNIT_BYTES >> 10} KiB" in rows[Ask.CONTROL][3]


def sum_told(cell: str, sizes: Mapping[str, int]) -> float:
    """A cell such as `20 + 2 max C(f)`, `6/60` or `1/(8 P)`; an empty one is 0."""
    total = 0.0
    for term in cell.split(" + ") if cell else ():
        above, _, below = term.partition("/")
        total += product_told(above, sizes) / (product_told(below.strip("()"), sizes) or 1.0)
    return total


def product_told(text: str, sizes: Mapping[str, int]) -> float:
    """`2 max C(f)`, `4 P` or a number; nothing is 0."""
    factor, _, name = text.partition(" ")
    return float(factor or 0) * (sizes[name] if name else 1)


def test_envelope() -> None:
    rows = table("bytes", "content")
    assert rows[0][1] == f"`{MAGIC.decode()}` ({MAGIC.hex(' ')})"
    assert rows[-1][0] == f"{ENVELOPE_BYTES}–"  # noqa: RUF001


def test_the_state_codec() -> None:
    codecs = {row[0]: row[1] for row in table("kind", "codec")}
    assert codecs["FOUND, STATE"] == f"`{transfer.STATE_CODEC}`, always"


def test_the_version_on_the_title() -> None:
    assert DOCUMENT.startswith(f"# The Narrows wire format, version {limits.PROTOCOL}\n")


def test_lines_are_at_most_120_columns() -> None:
    """Rows of tables cannot be broken. No merge has left its markers either."""
    lines = [line for line in DOCUMENT.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []
    assert not re.search(r"^(<{7}|={7}|>{7})", DOCUMENT, re.MULTILINE)
