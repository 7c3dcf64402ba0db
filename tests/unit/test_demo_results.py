"""The demo's arithmetic: traffic of data parallelism, digests, sparklines."""

from __future__ import annotations

import json
from pathlib import Path

from narrows.bench.demo_results import data_parallel_bytes
from narrows.bench.demo_view import SPARKS, sparkline
from narrows.bench.evidence import Digests, compare_digests


def test_two_learners_send_and_receive_the_whole_model_per_step() -> None:
    # Ring over two: each sends 2 * 1/2 of the model in bf16 and receives as much.
    assert data_parallel_bytes(2, parameters=1000, steps=1) == 2 * (1000 * 2) * 2


def test_a_differing_copy_is_found(tmp_path: Path) -> None:
    published = {(0, 1): "aa", (0, 2): "bb"}
    records = [
        {"event": "installed", "fragment": 0, "version": 0, "digest": "zz"},
        {"event": "installed", "fragment": 0, "version": 1, "digest": "aa"},
        {"event": "installed", "fragment": 0, "version": 2, "digest": "cc"},
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + '\n{"event": "inst')
    assert compare_digests(published, [tmp_path / "a.jsonl"]) == Digests(2, 1, 1)


def test_a_falling_loss_makes_a_falling_line() -> None:
    line = sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert line == SPARKS[::-1]
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == SPARKS[0] * 2
