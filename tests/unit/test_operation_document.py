"""docs/operation.md explains every code that an operator sees, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

from narrows.broker.storage import FateRecord
from narrows.proto.errors import ErrorCode

DOCS = Path(__file__).resolve().parents[2] / "docs"
PROTOCOL = DOCS.parent / "proto/PROTOCOL.md"


def codes_told_to(text: str, *, user: bool) -> list[str]:
    """Codes of the error table of PROTOCOL.md, which is compared with the code elsewhere."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    known = list(map(str, ErrorCode))
    return [code for code, who in rows if code in known and (who.strip() == "the user") is user]


def test_every_printed_code_is_explained_in_order() -> None:
    text = (DOCS / "operation.md").read_text(encoding="utf-8")
    section = text.partition("## Codes")[2]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    explained = [row[0].strip().strip("`") for row in rows]
    fates = [str(fate) for fate in get_args(get_type_hints(FateRecord)["what"])]
    refusals = codes_told_to(PROTOCOL.read_text(encoding="utf-8"), user=False)
    assert {"no_round", "stale_base"} <= set(refusals)
    assert sorted(explained[: len(fates)]) == sorted(fates)
    assert explained[len(fates) :] == refusals
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
