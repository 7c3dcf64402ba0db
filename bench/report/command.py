"""`narrows bench report`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


def bench_report(
    folder: Path = Path("docs/results"),
    *,
    html: Path | None = None,
    pictures: Path | None = None,
    readme: Path | None = None,
    results: Path | None = None,
) -> None:
    """Put the JSON files of all benches on one page, beside published figures.

    A bench without a file is named on the page. Machine and commit of each file stand there, too.

    Parameters
    ----------
    folder
        Folder with what benches wrote with --json.
    html
        The page (default: runs/report.html).
    pictures
        Folder for the plots as SVG and PNG (needs the extra `bench`).
    readme
        Text file that gets the headlines, between its comments "results" and "/results".
    results
        Text file that gets every figure, between the same comments.
    """
    from narrows.bench.report.bench import run_report

    page = html or Path("runs/report.html")
    run_report(folder, page, pictures, readme=readme, results=results)
