"""docs/house.md says what the tree is: the files, the doors and the arrows of today."""

from __future__ import annotations

from house import BEGIN, END, HOUSE, by_district, generated, reached, reduced, written
from test_architecture import MAY_IMPORT, ROOT


def test_the_document_is_the_tree() -> None:
    text = HOUSE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert written(text) == text, "run `make house`"


def test_every_file_and_every_rule_is_in_the_document() -> None:
    text = generated()
    for district, modules in by_district().items():
        for module in modules:
            assert module.path.endswith("__init__.py") or f"(../{module.path})" in text
        assert district.endswith("*") or f"### {district}\n" in text


def test_arrows_that_are_not_drawn_follow_from_those_that_are() -> None:
    drawn: dict[str, set[str]] = {}
    for start, end in reduced(MAY_IMPORT):
        assert end in MAY_IMPORT[start]
        drawn.setdefault(start, set()).add(end)
    for start, ends in MAY_IMPORT.items():
        assert ends <= reached(drawn, start)
    assert sum(map(len, drawn.values())) < sum(map(len, MAY_IMPORT.values()))


def test_files_that_moved_exist_under_the_new_name_only() -> None:
    rows = HOUSE.read_text(encoding="utf-8").partition("## Moved files")[2].splitlines()
    cells = [line.strip("| ").split(" | ") for line in rows if line.startswith("| `")]
    assert len(cells) > 150
    for old, new in cells:
        assert not (ROOT / old.strip("`")).is_file()
        assert all((ROOT / path.strip("`")).is_file() for path in new.split(", "))
