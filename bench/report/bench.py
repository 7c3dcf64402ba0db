"""`narrows bench report`: the results of all benches on one page, and those of the README."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from narrows.bench.report.figures import BEGIN, END, Figure, figures_of, markdown, rewritten
from narrows.bench.report.files import Folder, read_folder
from narrows.bench.report.page import NEXT_STEP, PageSection, page
from narrows.bench.report.pictures import draw
from narrows.bench.report.tables import tables_of
from narrows.broker.cli.tables import terminal
from narrows.proto.errors import ConfigError
from narrows.proto.units import counted

OLD: Final = "its rows are not those of this version"


def run_report(folder: Path, html: Path, pictures: Path | None, readme: Path | None) -> None:
    """Writes the page, the pictures as files if there is a folder for them, and the README's part.

    Says what is missing. Raises ConfigError without the folder, or without the README's comments.
    """
    console = terminal()
    found = read_folder(folder)
    with tempfile.TemporaryDirectory() as scratch:
        place = pictures or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        drawn = find_spec("matplotlib") is not None
        sections, unread = sections_of(found, place if drawn else None)
    if not drawn:
        console.print("no pictures: pip install '.[bench]' in the checkout", markup=False)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(sections, found.missing, unread))
    if readme is not None:
        rewrite(readme, [figure for section in sections for figure in section.figures])
    for section in sections:
        console.print(f"{section.result.file}: {section.result.origin}", markup=False)
    for bench in found.missing:
        console.print(f"{bench}: no file; {NEXT_STEP}", markup=False)
    for line in unread:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{counted(len(sections), 'file')}, written to {html}", markup=False)


def sections_of(found: Folder, pictures: Path | None) -> tuple[list[PageSection], list[str]]:
    """What each file says, and the files that cannot be shown with the reason.

    `pictures`: where they are written; None: there are none.
    """
    sections, unread = list[PageSection](), list(found.unread)
    for result in found.results:
        try:
            figures, tables = figures_of(result), tables_of(result)
            svg = draw(result, pictures) if pictures else None
        except (LookupError, TypeError, ValueError) as error:
            unread.append(f"{result.file}: {OLD}: {type(error).__name__} {error}")
            continue
        sections.append(PageSection(result, figures, tables, svg.read_text() if svg else ""))
    return sections, unread


def rewrite(readme: Path, figures: Sequence[Figure]) -> None:
    """Replaces the table of results in it. Raises ConfigError."""
    text = rewritten(readme.read_text(), markdown(figures))
    if text is None:
        raise ConfigError(
            f"{readme} has no place for the results",
            expected=f"{BEGIN} and {END}",
            remedy="add these two lines where the table shall be",
        )
    readme.write_text(text)
