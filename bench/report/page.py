"""The report as one page of HTML that needs no other file. Only this module escapes text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Final

from narrows.bench.report.figures import Figure
from narrows.bench.report.files import ResultFile
from narrows.bench.report.tables import ReportTable

LONG_ROWS: Final = 24
"""Tables with more rows are folded."""

PAGE: Final = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Narrows: results</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8884;
  vertical-align: top }
.wide { overflow-x: auto; margin: .5rem 0 1.5rem }
.nature, .origin { color: #777; font-size: 13px }
svg { max-width: 100%; height: auto; background: white }
summary { cursor: pointer }
</style>
<h1>Narrows: results</h1>
<p>Every figure stands in the row of the file that is named beside it. What each means, how it is
repeated and what fell short: docs/benchmarks.md.</p>
<nav>$contents</nav>
<h2 id="figures">Ours beside published figures and other systems</h2>
$figures
$sections
<h2 id="missing">Missing</h2>
$missing
</html>
""")

NEXT_STEP: Final = "run `narrows bench all`, or this bench with --json"


@dataclass(frozen=True)
class PageSection:
    """One file with its figures, tables and picture."""

    result: ResultFile
    figures: Sequence[Figure]
    tables: Sequence[ReportTable]
    svg: str = ""
    """The picture, as matplotlib wrote it."""


def page(sections: Sequence[PageSection], missing: Sequence[str], unread: Sequence[str]) -> str:
    """The whole page. `missing`: benches without a file; `unread`: files, each with the reason."""
    figures = [figure for section in sections for figure in section.figures]
    absent = [f"{bench}: no file; {NEXT_STEP}" for bench in missing]
    return PAGE.substitute(
        contents=" · ".join(_link(section.result) for section in sections),
        figures=_wide(_figures(figures)),
        sections="\n".join(map(_section, sections)),
        missing=_list([*absent, *unread]),
    )


def _link(result: ResultFile) -> str:
    return f'<a href="#{escape(result.file)}">{escape(result.file)}</a>'


def _figures(figures: Sequence[Figure]) -> str:
    headings = ("what", "ours", "published or other systems", "", "file and row")
    rows = [(each.what, each.ours, each.other, each.nature, each.source) for each in figures]
    return table(headings, rows)


def _section(section: PageSection) -> str:
    result = section.result
    head = f'<h2 id="{escape(result.file)}">{escape(result.title)}</h2>'
    origin = f'<p class="origin">{escape(result.file)}: {escape(result.origin)}</p>'
    return "\n".join([head, origin, _inline(section.svg), *map(_table, section.tables)])


def _inline(svg: str) -> str:
    """Without what only a file of its own may begin with."""
    return svg[svg.find("<svg") :] if "<svg" in svg else ""


def _table(shown: ReportTable) -> str:
    nature = f'<p class="nature">{escape(shown.nature)}</p>'
    body = _wide(table(shown.headings, shown.rows))
    if len(shown.rows) > LONG_ROWS:
        body = f"<details><summary>{len(shown.rows)} rows</summary>{body}</details>"
    return f"<h3>{escape(shown.title)}</h3>\n{nature}\n{body}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML; the cells are plain text."""
    lines = [_row(headings, "th"), *(_row(row, "td") for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _wide(body: str) -> str:
    return f'<div class="wide">{body}</div>'


def _list(lines: Sequence[str]) -> str:
    if not lines:
        return "<p>Nothing.</p>"
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
