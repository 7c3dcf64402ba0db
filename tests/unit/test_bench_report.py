"""The report: missing files are named, text is escaped, the tables of texts are replaced."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from narrows.bench.everything import bench as everything
from narrows.bench.everything.bench import BenchPart, long, small
from narrows.bench.report.bench import run_report, sections_of
from narrows.bench.report.figures import figures_of
from narrows.bench.report.files import BENCHES, ResultFile, read_folder
from narrows.bench.report.markdown import HEADLINES, full_table, headline_table
from narrows.proto.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "docs/results"

MACHINE = {"processor": "<b>x</b>", "cores": 2, "python": "3.11", "system": "Linux"}


def exchange(system: str, **more: Any) -> dict[str, Any]:
    told = {"system": system, "variant": "f32", "rate_mbit_per_s": 100.0, "round_trip_ms": 0}
    cell = {**told, "params": 1 << 24, "learners": 2, "streams": 4, "window_bytes": 0}
    return {"kind": "Cell", "cell": cell, "name": system, "line": "100 Mbit/s", **more}


MEASURED = {
    "exchange_s_median": 0.5, "exchange_s_p95": 0.6, "cpu_s_per_exchange": 0.1, "summary": "0.5 s",
    "up_wire_bytes_per_exchange": 1e6, "down_wire_bytes_per_exchange": 1e6,
    "up_peak_bits_per_s": 1e7, "down_peak_bits_per_s": 1e7, "control_round_trip_s_p99": None,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [exchange("narrows", **MEASURED), exchange("torchft", skipped="no <wheel>")]
    result = {"bench": "wan", "commit": "abc", "machine": MACHINE, "rows": rows}
    (tmp_path / "wan.json").write_text(json.dumps(result))
    return tmp_path


def test_what_is_missing_is_named_and_text_is_escaped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_report(folder, folder / "page.html")
    page, said = (folder / "page.html").read_text(), capsys.readouterr().out
    assert "<b>x</b>" not in page and "&lt;b&gt;x" in page
    assert "no &lt;wheel&gt;" in page
    for bench in BENCHES:
        assert bench in page
        assert (f"{bench}: no file" in said) == (bench != "wan")


@pytest.mark.parametrize("text", ["readme", "results"])
def test_the_table_of_a_text_is_replaced_and_stays_so(folder: Path, text: str) -> None:
    path = folder / "text.md"
    path.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    run_report(folder, folder / "page.html", **{text: path})
    once = path.read_text()
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    run_report(folder, folder / "page.html", **{text: path})
    assert path.read_text() == once


def test_a_text_without_a_place_for_the_table_is_left_as_it_is(folder: Path) -> None:
    path = folder / "text.md"
    path.write_text("no comments")
    with pytest.raises(ConfigError, match="add these two lines"):
        run_report(folder, folder / "page.html", readme=path)
    assert path.read_text() == "no comments"


def test_the_documents_have_the_tables_of_the_newest_results() -> None:
    sections, unread = sections_of(read_folder(RESULTS), None)
    assert unread == []
    readme, results = RESULTS.parents[1] / "README.md", RESULTS.parent / "results.md"
    assert headline_table(sections, RESULTS, readme) in readme.read_text()
    assert full_table(sections, RESULTS, results) in results.read_text()


def test_every_headline_is_found_and_its_link_leads_to_a_heading() -> None:
    sections, _ = sections_of(read_folder(RESULTS), None)
    rows = headline_table(sections, RESULTS, RESULTS.parents[1] / "README.md").splitlines()[2:]
    assert len(rows) == len(HEADLINES) <= 10
    for row in rows:
        path, _, anchor = row.rsplit("](", 1)[1].removesuffix(") |").partition("#")
        lines = (RESULTS.parents[1] / path).read_text().splitlines()
        heads = [line.lstrip("# ").lower().replace(" ", "-") for line in lines if line[:1] == "#"]
        assert not anchor or anchor in heads


def test_a_file_that_is_no_result_is_said_so(folder: Path) -> None:
    (folder / "chaos.json").write_text("{")
    run_report(folder, folder / "page.html")
    assert "chaos.json" in (folder / "page.html").read_text()


STRANGE: list[dict[str, Any]] = [
    {"bench": "chaos", "machine": "mine", "rows": []},
    {"bench": "chaos", "rows": ["no row"]},
    {"bench": "chaos", "rows": 3},
    {"bench": "chaos", "rows": [{}]},
]


@pytest.mark.parametrize("strange", STRANGE)
def test_a_file_of_another_shape_is_left_out(
    folder: Path, strange: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chaos.json").write_text(json.dumps(strange))
    run_report(folder, folder / "page.html")
    assert "left out: chaos.json" in capsys.readouterr().out


def test_steps_kept_are_shown_with_what_was_merged(folder: Path) -> None:
    shown = json.loads((RESULTS / "chaos.json").read_text())
    (figure, *_) = figures_of(ResultFile("chaos.json", "chaos", shown))
    (row,) = shown["rows"]
    steps, merged = row["throughput_kept_percent"], row["merged_kept_percent"]
    assert f"{steps:.1f}% of the steps, {merged:.1f}% of the merged tokens" in figure.ours


@pytest.mark.parametrize("killed", [True, False])
def test_a_demo_without_a_kill_is_not_shown_as_one_with(killed: bool) -> None:
    shown = json.loads((RESULTS / "demo.json").read_text()) | {"killed": killed}
    (figure, *_) = figures_of(ResultFile("demo.json", "demo", shown))
    assert ("killed" in figure.what) == killed


def parts_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int]
) -> tuple[list[str], list[str]]:
    """Names of the parts that were run, and of those that failed."""
    ran: list[str] = []

    def run(part: BenchPart, folder: Path) -> dict[str, object]:
        ran.append(part.name)
        (folder / f"{part.name}.json").write_text("{}")
        told = {"part": part.name, "arguments": list(part.arguments), "commit": "abc"}
        return {**told, "exit_code": codes.get(part.name, 0), "seconds": 1.0}

    monkeypatch.setattr(everything, "_run", run)
    parts = [BenchPart(name, 1, ("bench", name)) for name in ("codec", "loop", "merge")]
    failed = everything.run_parts(parts, folder, Console(file=io.StringIO()))
    return ran, failed


def test_what_failed_or_changed_is_run_again_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = parts_run(folder, monkeypatch, {"loop": 1})
    assert first == (["codec", "loop", "merge"], ["loop"])
    (folder / "merge.json").unlink()
    assert parts_run(folder, monkeypatch, {}) == (["loop", "merge"], [])
    assert parts_run(folder, monkeypatch, {}) == ([], [])


def test_the_small_selection_fits_and_every_part_is_reported() -> None:
    assert sum(part.minutes for part in small()) <= 20
    assert {part.name for part in long()} == set(BENCHES)
