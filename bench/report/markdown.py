"""The figures as Markdown: all of them by bench, and the headlines of the README.

Both tables stand between two comments in a text; what is between them is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from narrows.bench.report.figures import Figure
from narrows.bench.report.page import PageSection
from narrows.proto.errors import ConfigError

BEGIN: Final = "<!-- results -->"
END: Final = "<!-- /results -->"

ARTICLES: Final[Mapping[str, str]] = {
    "quality": "quality.md", "bandwidth": "benchmarks.md#bandwidth",
    "goodput": "benchmarks.md#goodput", "chaos": "benchmarks.md#chaos",
    "wan": "benchmarks.md#the-wide-area-line", "wan-training": "benchmarks.md#the-wide-area-line",
    "peers": "benchmarks.md#other-systems", "demo": "benchmarks.md#the-demo",
}  # fmt: skip
"""Texts that explain a headline, as links from the folder of documents."""


@dataclass(frozen=True)
class Headline:
    """One row of the README: which figure it shows, and its name there."""

    bench: str
    figure: str
    """The beginning of `Figure.what`; the first such figure is shown."""
    name: str


HEADLINES: Final = (
    Headline("quality", "test loss over data parallel: defaults (4 learners, 3000 steps",
             "Test loss above data parallelism at equal tokens; 4 learners, 3000 steps"),
    Headline("quality", "test loss over data parallel: defaults (4 learners, 1000 steps",
             "The same with 1000 steps"),
    Headline("bandwidth", "Gbit/s per site, 5 B parameters, 8 sites, H 24, rho 0.5",
             "Gbit/s per site; 5 B parameters, 8 sites"),
    Headline("goodput", "goodput of 1.2 M chips, decoupled, M = 8",
             "Useful share of 1.2 M failing chips; 8 learners, constants fitted"),
    Headline("chaos", "throughput kept, 32 learners",
             "Throughput kept; 32 learners, 20 faults in 10 minutes, steps are timed waits"),
    Headline("chaos", "a killed learner is merged again",
             "Time until a killed learner contributes again, median"),
    Headline("wan", "seconds per exchange: 16 M, 100 Mbit/s, 0 ms, 2 learners",
             "Seconds per exchange; 16 M parameters, 100 Mbit/s, 2 learners"),
    Headline("wan-training", "tokens per second while training: tiny, 2 learners, 60 s, 20 Mbit/s",
             "Tokens per second over 20 Mbit/s; 0.8 M parameters, 2 learners"),
    Headline("peers", "loss, bytes, seconds; SIGKILL of a member",
             "Loss, bytes, seconds of a run in which one member is killed"),
    Headline("demo", "demo: validation loss",
             "The demo: validation loss of the global model"),
)  # fmt: skip
"""The rows of the README, in their order."""


def headline_table(sections: Sequence[PageSection], folder: Path, text: Path) -> str:
    """The README's table. A headline without its figure is left out.

    `folder`: the JSON files; `text`: the file that gets the table, for its links.
    """
    heads = ("", "Narrows", "published, or other systems", "", "more")
    lines = [_line(heads), _line(["---"] * len(heads))]
    for headline in HEADLINES:
        for figure in _shown(headline, sections):
            article, _, heading = ARTICLES[headline.bench].partition("#")
            link = "#".join(filter(None, (_relative(folder.parent / article, text), heading)))
            more = f"[{Path(article).stem}]({link})"
            lines.append(_line((headline.name, figure.ours, figure.other, figure.nature, more)))
    return "\n".join(lines)


def _shown(headline: Headline, sections: Sequence[PageSection]) -> list[Figure]:
    """The one figure of a headline; [] if no file has it."""
    same = [section for section in sections if section.result.bench == headline.bench]
    figures = [figure for section in same for figure in section.figures]
    return [figure for figure in figures if figure.what.startswith(headline.figure)][:1]


def full_table(sections: Sequence[PageSection], folder: Path, text: Path) -> str:
    """Every figure: a table per file, with a link to it. Arguments as for headline_table."""
    shown = [section for section in sections if section.figures]
    return "\n\n".join(_section_table(section, folder, text) for section in shown)


def _section_table(section: PageSection, folder: Path, text: Path) -> str:
    heads = ("", "Narrows", "published, or other systems", "", "row")
    lines = [_line(heads), _line(["---"] * len(heads))]
    for figure in section.figures:
        row = figure.source.removeprefix(section.result.file).strip()
        lines.append(_line((figure.what, figure.ours, figure.other, figure.nature, _code(row))))
    name = section.result.file
    head = f"## {section.result.title}\n\n[{name}]({_relative(folder / name, text)})"
    return f"{head}: {section.result.origin}.\n\n" + "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _relative(target: Path, text: Path) -> str:
    return Path(os.path.relpath(target, text.parent)).as_posix()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rewrite(text: Path, table: str) -> None:
    """Replaces the table between the two comments. Raises ConfigError without them."""
    before, begin, rest = text.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(
            f"{text} has no place for the results",
            expected=f"{BEGIN} and {END}",
            remedy="add these two lines where the table shall be",
        )
    text.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
