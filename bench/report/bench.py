"""`narrows bench report`: the results of all benches on one page, and as Markdown."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from narrows.bench.report.figures import figures_of
from narrows.bench.report.files import Folder, read_folder
from narrows.bench.report.markdown import full_table, headline_table, rewrite
from narrows.bench.report.page import NEXT_STEP, PageSection, page
from narrows.bench.report.pictures import draw
from narrows.bench.report.tables import tables_of
from narrows.broker.cli.tables import terminal
from narrows.proto.units import counted

OLD: Final = "its rows are not those of this version"


def run_report(
    folder: Path,
    html: Path,
    pictures: Path | None = None,
    *,
    readme: Path | None = None,
    results: Path | None = None,
) -> None:
    """Writes the page, pictures as files if `pictures` is a folder, and the tables of two texts.

    `readme` gets the headlines, `results` every figure. Prints which files are missing.
    Raises ConfigError without `folder`, or if a text lacks the two comments.
    """
    console = terminal()
    contents = read_folder(folder)
    with tempfile.TemporaryDirectory() as scratch:
        place = pictures or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        drawn = find_spec("matplotlib") is not None
        sections, unread = sections_of(contents, place if drawn else None)
    if not drawn:
        console.print("no pictures: pip install '.[bench]' in the checkout", markup=False)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(sections, contents.missing, unread))
    if readme is not None:
        rewrite(readme, headline_table(sections, folder, readme))
    if results is not None:
        rewrite(results, full_table(sections, folder, results))
    for section in sections:
        console.print(f"{section.result.file}: {section.result.origin}", markup=False)
    for bench in contents.missing:
        console.print(f"{bench}: no file; {NEXT_STEP}", markup=False)
    for line in unread:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{counted(len(sections), 'file')}, written to {html}", markup=False)


def sections_of(contents: Folder, pictures: Path | None) -> tuple[list[PageSection], list[str]]:
    """A section per file that can be shown, and a line per file that cannot, with the reason.

    `pictures`: the folder that gets the pictures; None: draw none.
    """
    sections, unread = list[PageSection](), list(contents.unread)
    for result in contents.results:
        try:
            figures, tables = figures_of(result), tables_of(result)
            svg = draw(result, pictures) if pictures else None
        except (LookupError, TypeError, ValueError) as error:
            unread.append(f"{result.file}: {OLD}: {type(error).__name__} {error}")
            continue
        sections.append(PageSection(result, figures, tables, svg.read_text() if svg else ""))
    return sections, unread
