"""Tables for terminals of any width and for files. No cell is cut, no column is dropped.

Where the columns do not fit, the rest of them follows in another table below, which begins with the
columns that name a row. Where these columns are too wide, they stand above the others. Where even
that does not fit, every row becomes a block. A file gets all columns side by side.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

GAP: Final = "  "
INDENT: Final = "    "
TEXT_COLUMNS_MIN: Final = 24
"""Columns that a text needs beside its label. With fewer it goes below the label."""


class TextLine(NamedTuple):
    """One line as it is printed, unbroken."""

    text: str
    style: str = ""


class Row(NamedTuple):
    """A row of a table."""

    cells: tuple[str, ...]
    note: str = ""
    """A sentence below the row, such as the reason why it has no figures."""
    style: str = ""


@dataclass
class Table:
    """Rows under headings. The first `keys` columns name the row."""

    headings: Sequence[str]
    keys: int = 1
    left: Sequence[str] = ()
    """Headings, beside the keys, of columns that hold words and are flush left."""
    title: str = ""
    rows: list[Row] = field(default_factory=list[Row])

    def add(self, *cells: str, note: str = "", style: str = "") -> None:
        """Adds a row, which may end early. A cell may have several lines."""
        missing = len(self.headings) - len(cells)
        assert missing >= 0, f"{len(cells)} cells under {len(self.headings)} headings"
        self.rows.append(Row((*cells, *[""] * missing), note, style))

    def lines(self, width: int | None) -> Iterator[TextLine]:
        """The lines for a terminal of `width` columns; None: as wide as necessary."""
        if self.title:
            yield from (TextLine(text, "bold") for text in wrapped(self.title, width))
        keys = range(self.keys)
        if width is None:
            layout = [[*keys, *self._values()]]
        else:
            layout = self._groups(width, keys)
        is_stacked = not layout and width is not None
        if is_stacked and width is not None:
            layout = self._groups(width - len(INDENT), ())
        if not layout:
            yield from self._blocks(width)
        for number, group in enumerate(layout):
            if number:
                yield TextLine("")
            yield from self._grid(group, width, is_first=number == 0, is_stacked=is_stacked)

    def _values(self) -> range:
        return range(self.keys, len(self.headings))

    def _groups(self, width: int, keys: Sequence[int]) -> list[list[int]]:
        """Groups of columns, each with the keys in front; none if a column is too wide."""
        sizes = self._sizes()
        groups: list[list[int]] = [[*keys]]
        for column in self._values():
            if _width(sizes, [*groups[-1], column]) > width and len(groups[-1]) > len(keys):
                groups.append([*keys])
            groups[-1].append(column)
        fits = all(_width(sizes, group) <= width for group in groups)
        return groups if fits else []

    def _sizes(self) -> list[int]:
        texts = [self.headings, *(row.cells for row in self.rows)]
        return [
            max(len(line) for cells in texts for line in cells[column].split("\n"))
            for column in range(len(self.headings))
        ]

    def _grid(
        self, group: Sequence[int], width: int | None, *, is_first: bool, is_stacked: bool
    ) -> Iterator[TextLine]:
        """The columns of a group; if they are stacked, below the keys of each row."""
        sizes, indent = self._sizes(), INDENT if is_stacked else ""

        def line(cells: Sequence[str]) -> str:
            texts = [self._aligned(cells[c], c, sizes[c]) for c in group]
            return (indent + GAP.join(texts)).rstrip()

        def above(cells: Sequence[str], style: str) -> Iterator[TextLine]:
            text = GAP.join(cell for cell in cells[: self.keys] if cell) if is_stacked else ""
            yield from (TextLine(each, style) for each in wrapped(text, width))

        if any(self.headings):
            yield from above(self.headings, "bold")
            yield TextLine(line(self.headings), "bold")
        for row in self.rows:
            has_values = any(row.cells[c] for c in self._values())
            if row.note and not is_first and not has_values:
                continue  # The note of such a row stands in the first group already.
            yield from above(row.cells, row.style)
            split = [cell.split("\n") for cell in row.cells]
            for depth in range(max(len(split[c]) for c in group)):
                text = line([c[depth] if depth < len(c) else "" for c in split])
                if text:
                    yield TextLine(text, row.style)
            if is_first:
                yield from (TextLine(t, row.style) for t in wrapped(row.note, width, indent=INDENT))

    def _aligned(self, text: str, column: int, size: int) -> str:
        words = column < self.keys or self.headings[column] in self.left
        return text.ljust(size) if words else text.rjust(size)

    def _blocks(self, width: int | None) -> Iterator[TextLine]:
        for number, row in enumerate(self.rows):
            if number:
                yield TextLine("")
            for column, (heading, cell) in enumerate(zip(self.headings, row.cells, strict=True)):
                text = f"{heading}: {cell}" if heading and cell else cell
                indent = GAP if column >= self.keys else ""
                yield from (TextLine(t, row.style) for t in wrapped(text, width, indent=indent))
            yield from (TextLine(t, row.style) for t in wrapped(row.note, width, indent=GAP))


def _width(sizes: Sequence[int], columns: Sequence[int]) -> int:
    return sum(sizes[column] for column in columns) + len(GAP) * (len(columns) - 1)


@dataclass
class Facts:
    """Labels with a text each."""

    title: str = ""
    rows: list[Row] = field(default_factory=list[Row])

    def add(self, label: str, text: str, style: str = "") -> None:
        """One fact."""
        self.rows.append(Row((label, text), style=style))

    def lines(self, width: int | None) -> Iterator[TextLine]:
        """The lines for a terminal of `width` columns; None: one line each."""
        if self.title:
            yield from (TextLine(text, "bold") for text in wrapped(self.title, width))
        size = max((len(row.cells[0]) for row in self.rows), default=0)
        below = width is not None and width - size - len(GAP) < TEXT_COLUMNS_MIN
        for row in self.rows:
            label, text = row.cells
            if below:
                yield TextLine(label, row.style)
                yield from (TextLine(t, row.style) for t in wrapped(text, width, indent=INDENT))
            else:
                first, *more = wrapped(text, width, indent=" " * (size + len(GAP))) or [""]
                yield TextLine((label.ljust(size) + GAP + first.lstrip()).rstrip(), row.style)
                yield from (TextLine(t, row.style) for t in more)


def wrapped(text: str, width: int | None, *, indent: str = "", more: str = "") -> list[str]:
    """A text in lines of `width` columns, broken at blanks only, so that a path can be copied.

    All lines are indented; all but the first are indented by `more` as well.
    """
    if width is None:
        return [indent + line for line in text.splitlines()]
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line, max(width, len(indent) + len(more) + 1), initial_indent=indent,
            subsequent_indent=indent + more, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


def terminal() -> Console:
    """Standard output. Brackets are no markup, since peers choose some texts. A file's lines are
    not broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.soft_wrap = not console.is_terminal
    return console


def width_of(console: Console) -> int | None:
    """Columns of a terminal; None: a file, whose lines may be of any length."""
    return console.width if console.is_terminal else None


def show(console: Console, table: Table | Facts) -> None:
    """Prints a table for this terminal or file."""
    show_lines(console, table.lines(width_of(console)))


def show_lines(console: Console, lines: Iterable[TextLine]) -> None:
    """Prints lines without breaking them again."""
    for line in lines:
        console.print(Text(line.text, line.style), soft_wrap=True)
