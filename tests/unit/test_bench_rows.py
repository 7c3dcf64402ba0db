"""Files of the benches: no result is lost to a missing folder, a foreign row or a cut line."""

from __future__ import annotations

import io
import json
import subprocess
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from running import wait_until

from narrows.bench.kit import machine
from narrows.bench.kit.rows import append_row, end_last_line, read_rows
from narrows.bench.kit.runner import run_missing
from narrows.proto.errors import ConfigError


def doubled(number: int) -> dict[str, Any]:
    return {"number": number, "twice": 2 * number}


def run(path: Path, numbers: list[int], *, workers: int = 1) -> dict[str, dict[str, Any]]:
    return run_missing(
        {str(number): (number,) for number in numbers}, doubled, path,
        key_of=lambda row: str(row["number"]), say=str, workers=workers,
        console=Console(file=io.StringIO()),
    )  # fmt: skip


def test_a_result_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    machine.write_result(path, "x", {"rows": []})
    told = json.loads(path.read_text())
    assert told["bench"] == "x" and {"commit", "machine", "rows"} < told.keys()


def test_a_line_that_was_cut_off_is_left_out_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    path.write_text('{"a": 1}\n{"a": ')
    end_last_line(path)
    append_row(path, {"a": 2})
    assert read_rows(path) == [{"a": 1}, {"a": 2}]


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xff\xfe\n5\n[]\nnull\n{"a": 1}\n')
    assert read_rows(path) == [{"a": 1}]


def test_rows_of_another_bench_are_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"system": "of another bench, or of an older version"})
    append_row(path, {"number": 3, "twice": "in the file already"})
    assert run(path, [3])["3"]["twice"] == "in the file already"


def test_an_interruption_ends_what_is_under_way(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def interrupt(row: dict[str, Any]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(
            {"1": ("{'number': 1}",), "2": ("__import__('signal').pause()",)}, eval, path,
            key_of=lambda row: str(row["number"]), say=interrupt, workers=1,
            console=Console(file=io.StringIO()),
        )  # fmt: skip
    assert [row["number"] for row in read_rows(path)] == [1]
    wait_until(lambda: not active_children(), "the end of the workers")


def test_an_interruption_of_the_start_ends_what_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, submitted = ProcessPoolExecutor.submit, list[str]()

    def interrupt(pool: ProcessPoolExecutor, work: Any, job: str) -> Future[Any]:
        submitted.append(job)
        if len(submitted) == 2:
            raise KeyboardInterrupt
        return submit(pool, work, job)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupt)
    pause = "__import__('signal').pause()"
    with pytest.raises(KeyboardInterrupt):
        run_missing(
            {"1": (pause,), "2": (pause,)}, eval, tmp_path / "rows.jsonl", key_of=str, say=str,
            workers=2, console=Console(file=io.StringIO()),
        )  # fmt: skip
    wait_until(lambda: not active_children(), "the end of the workers")


def test_workers_are_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers"):
        run(tmp_path / "rows.jsonl", [1], workers=-1)


def test_a_result_names_the_commit_of_the_checkout_that_it_was_made_in() -> None:
    root = Path(__file__).parents[2]
    command = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert machine.describe()["commit"] == told.stdout.strip() != ""
