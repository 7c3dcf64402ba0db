"""The dissector's tables are those of PROTOCOL.md, and nothing in it comes from our own structs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from protocol_tables import DOCUMENT, table

from narrows.broker.merging.policy import Policy
from narrows.broker.storage import records
from narrows.proto.dissector import chunks, tables, zmtp
from narrows.proto.dissector.tables import Structure

FOLDER = Path(tables.__file__).parent

#: The journal's structs by the names that the dissector has from their tags.
RECORDS: dict[str, type[msgspec.Struct]] = {
    "Began": records.LifeRecord,
    "Committed": records.RoundRecord,
    "Fate": records.FateRecord,
    "Sealed": records.SealRecord,
    "Contributor": records.ContributorRecord,
    "Policy": Policy,
    "Vector": records.VectorRecord,
}

CONSTANTS = {row[0].strip("`"): row[1] for row in table("constant", "value", "unit", "sections")}


def structures(head: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Name, arrow and (field, type) of each structure of a table."""
    name, arrow, fields = "", "", list[tuple[str, str]]()
    for first, names, kind, _ in table(head, "field", "type", "meaning"):
        named = re.fullmatch(r"\*\*(\w+)\*\* ?(\S?)", first)
        if named:
            if name:
                yield name, arrow, fields
            name, arrow, fields = named[1], named[2], []
        fields += [(each.strip(), kind) for each in names.split(",") if each]
    yield name, arrow, fields


def ours(structure: Structure) -> list[tuple[str, str]]:
    return [
        (member.name, f"{member.type} = {member.default}" if member.default else member.type)
        for member in structure.members
    ]


def test_control_messages() -> None:
    told = {name: (arrow, fields) for name, arrow, fields in structures("message")}
    assert len(told) == 20
    assert told == {name: (each.arrow, ours(each)) for name, each in tables.CONTROL.items()}
    assert all(each.is_map and each.is_tagged for each in tables.CONTROL.values())


def test_structures_and_the_header() -> None:
    told = {
        name: fields for head in ("structure", "header") for name, _, fields in structures(head)
    }
    assert told == {name: ours(each) for name, each in tables.STRUCTURES.items()}
    maps = {name for name, each in tables.STRUCTURES.items() if each.is_map}
    assert maps == {next(structures("structure"))[0], "LearnerStatus"}
    assert "The first is a map, the others are arrays" in DOCUMENT
    assert "**LearnerStatus** is a map" in DOCUMENT
    assert f"an array of these {len(tables.HEADER.members)} values" in DOCUMENT


def test_types() -> None:
    meanings = {name: meaning for name, meaning in table("type", "meaning")}
    told = {
        **{name: f"integer, {a} to {b}" for name, (a, b) in tables.INTEGERS.items()},
        **{name: f"float, {a:g} to {b:g}" for name, (a, b) in tables.FLOATS.items()},
    }
    assert told.pop("int") == f"integer, {-(2**63)} to {2**64 - 1}"  # All that msgpack has.
    for name, text in told.items():
        assert numbers(meanings.pop(name))[:2] == numbers(text), name
    assert numbers(meanings.pop("Text")) == [tables.TEXT_CHARACTERS_MAX]
    assert numbers(meanings.pop("Codec")) == [tables.CODEC_CHARACTERS_MAX]
    for name, pattern in tables.PATTERNS.items():
        assert f"string that matches `{pattern}`" in meanings.pop(name)
    for name, (item, least, most) in tables.LISTS.items():
        if least == 0:
            meaning = meanings.pop(name)
            assert numbers(meaning)[0] == most
            assert item == "Range" if name == "Ranges" else f"_MAX {item}" in meaning
    assert tables.LISTS["Epoch"] == ("Count", 3, 3)
    assert meanings.pop("Epoch").startswith("array of three Count:")
    assert list(meanings) == ["int, float, str, bool", "[X], {str: X}"]


def numbers(text: str) -> list[float]:
    """The numbers in a text, the constants and differences in it worked out."""
    for name in sorted(CONSTANTS, key=len, reverse=True):
        text = text.replace(name, CONSTANTS[name])
    text = re.sub(r"(\d+) \u2212 1", lambda found: str(int(found[1]) - 1), text)
    return [
        float(base) ** int(power or 1)
        for base, power in re.findall(r"(-?[0-9.]+(?:e\+?[0-9]+)?)(?:\^([0-9]+))?", text)
    ]


def test_enumerations() -> None:
    paragraph = next(each for each in DOCUMENT.split("\n\n") if each.startswith("Enumerations:"))
    *words, kinds = paragraph.removeprefix("Enumerations: ").replace("\n", " ").split("·")
    told = {each.split()[0]: tuple(re.findall(r"`(\w+)`", each)) for each in words}
    assert told == tables.WORDS
    numbered = re.findall(r"(\d) ([A-Z]+) \(", kinds)
    assert numbered == [(str(i), name) for i, name in enumerate(tables.DATA_KINDS, 1)]


def test_limits() -> None:
    for name in (
        "PROTOCOL", "CONTROL_BYTES_MAX", "HEADER_BYTES_MAX", "TOPIC_BYTES_MAX",
        "CHUNK_ELEMENTS_MAX", "PAYLOAD_BYTES_MAX", "TEXT_CHARACTERS_MAX",
        "CODEC_CHARACTERS_MAX",
    ):  # fmt: skip
        assert int(CONSTANTS[name]) == getattr(tables, name), name
    assert int(CONSTANTS["ZSTD_WINDOW_BYTES_MAX"]) == chunks.WINDOW_BYTES_MAX


def test_what_the_page_says_of_payloads() -> None:
    flags = re.search(r"\| 2 \| flags: ([^|]*)", DOCUMENT)
    assert flags is not None
    told = {int(each, 16) for each in re.findall(r"0x[0-9a-f]{2}", flags[1])}
    assert told == set(chunks.BLOSC2_FLAGS)
    low, high = chunks.SCALE_BITS
    assert f"from SCALE_MIN (0x{low:04x}) to SCALE_MAX (0x{high:04x})" in DOCUMENT
    assert f"begins with {chunks.ZSTD_MAGIC.hex(' ')}" in DOCUMENT
    assert f"FOUND, STATE | `{tables.STATE_CODEC}`" in DOCUMENT
    formula = "F(b) = b + ⌊b/256⌋ + (b < 131072 ? ⌊(131072 - b)/2048⌋ : 0)"
    assert formula in DOCUMENT and chunks.frame_bytes_max(4096) == 4096 + 16 + 62
    assert CONSTANTS["ZSTD_BLOCK_BYTES_MIN"] == "1024"


@pytest.mark.parametrize("name", tables.JOURNAL)
def test_heads_of_the_journal(name: str) -> None:
    """They are no part of the page: the structs are their description."""
    if name == "Chunk":
        assert ours(tables.JOURNAL[name]) == [(n, "int") for n in ("offset", "elements",
                                                                   "payload_bytes")]  # fmt: skip
        assert "(offset, elements, payload bytes)" in Path(records.__file__).read_text()
        return
    struct = RECORDS[name]
    told = [
        (f.encode_name, words_of(str(struct.__annotations__[f.name])) + default_of(f))
        for f in msgspec.structs.fields(struct)
    ]
    assert told == ours(tables.JOURNAL[name])
    assert tables.JOURNAL[name].is_map == (not struct.__struct_config__.array_like)
    assert tables.JOURNAL[name].is_tagged == (struct.__struct_config__.tag is not None)
    if tables.JOURNAL[name].is_tagged:
        assert struct.__struct_config__.tag == name.lower()


def default_of(field: msgspec.structs.FieldInfo) -> str:
    return "" if field.default is msgspec.NODEFAULT else f" = {field.default}"


def words_of(annotation: str) -> str:
    """A type of a record in the words of the table."""
    found = re.sub(r"Literal\[.*\]", "str", annotation).replace("Record", "")
    found = found.replace("float | None", "float or nil").replace("Robust", "str")
    found = re.sub(r"tuple\[tuple\[int, int, int\], \.\.\.\]", "[Chunk]", found)
    return re.sub(r"tuple\[(\w+), (?:\.\.\.|int, int)\]", r"[\1]", found)


def test_no_frame_is_kept_that_is_longer_than_any_may_be() -> None:
    assert zmtp.FRAME_BYTES_MAX >= max(tables.CONTROL_BYTES_MAX, tables.PAYLOAD_BYTES_MAX)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_shares_no_code_with_the_other_reader(path: Path) -> None:
    allowed = {
        "__future__", "blosc2", "collections", "contextlib", "dataclasses", "functools", "json",
        "math", "msgpack", "numpy", "re", "struct", "textwrap", "typing", "xxhash", "zstandard",
    }  # fmt: skip
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            is_own = name.startswith("narrows.proto.dissector.")
            assert is_own or name.split(".")[0] in allowed, f"{path.name} imports {name}"
