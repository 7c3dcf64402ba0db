"""Texts of peers on their way into logs, tables, event lines and errors: none forges a line."""

from __future__ import annotations

import json

from fuzz.target import Target
from hypothesis import strategies as st

from narrows.broker.cli.tables import Facts, Table, wrapped
from narrows.proto.dissector.findings import Dissected, Field, FrameFault
from narrows.proto.dissector.text import as_json, block, escaped
from narrows.proto.errors import LOG_CHARACTERS_MAX, NarrowsError, describe, printable
from narrows.proto.errors import ErrorCode as Code

ESCAPE_MAX = 10
"""Characters of the longest escape, \\U0001f600."""


def run(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    line = printable(text)
    assert line.isprintable() and len(line) <= ESCAPE_MAX * LOG_CHARACTERS_MAX + 4
    assert escaped(text).isprintable()
    assert printable(describe(text, text, expected=text, got=text, remedy=text)).isprintable()
    error = NarrowsError(Code.BAD_MESSAGE, text, expected=text, got=text, remedy=text)
    assert printable(str(error)).isprintable()
    assert json.loads(json.dumps({"text": text}))["text"] == text
    dissected(text)
    tables(text)


def dissected(text: str) -> None:
    field = Field(text, 0, 1, "Text", text, note=escaped(text))
    nested = Field(text, 0, 1, "Array", parts=[field] * 2, is_map=True)
    found = Dissected("hello", 1, [field, nested], [FrameFault(0, "bad", text, text, text)])
    assert as_json(found, {"file": text}).isprintable()
    lines = [*block(found, "here")]
    assert all(line.isprintable() for line in lines), lines


def tables(text: str) -> None:
    """A name or an address of a peer in a table or among facts, at any width."""
    for width in (None, 20, 100):
        table, facts = Table(("name", "from"), left=("from",)), Facts()
        table.add(text, text, note=text)
        facts.add(text, text)
        assert list(table.lines(width)) and isinstance(list(facts.lines(width)), list)
        assert isinstance(wrapped(text, width, indent="  ", more=" "), list)


TEXTS = (
    "", "site-a", "\x1b[2Jforged", "a\nb\r\nc", "\u202eevil", "\ud800", "x" * 1500, "é ß 漢字",
    "[red]not markup[/red]", "%s %d {0}", "\u2028\u2029\x85\x1c", "\0", "word " * 300,
)  # fmt: skip


def seeds() -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in TEXTS]


EXAMPLES = st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass"))

TARGET = Target("texts", run, seeds, EXAMPLES, bytes_max=400)
