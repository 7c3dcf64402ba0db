"""The documents: links lead somewhere, lines are short, and the table of codes is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from narrows.proto.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "proto" / "PROTOCOL.md"]
COLUMNS = 100

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODES = re.compile(
    r"^\| code \| meaning \| remedy \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE
)


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have as targets of links, as GitHub makes them."""
    headings = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_every_link_of_a_document_leads_somewhere() -> None:
    links = 0
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            if link.startswith(("https://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path).resolve()
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            links += 1
    assert links > 20


def test_no_line_of_a_document_is_too_long() -> None:
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= COLUMNS, f"{page.name}:{number}"


def test_the_table_of_error_codes_is_that_of_the_code() -> None:
    rows = [
        f"| `{each}` | {each.meaning} | {each.remedy or 'as the message says'} |"
        for each in ErrorCode
    ]
    found = CODES.search((ROOT / "docs" / "operations.md").read_text())
    assert found, "docs/operations.md has no table of codes"
    assert found[1].splitlines() == rows, "the table should be:\n" + "\n".join(rows)
