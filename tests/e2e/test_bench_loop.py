"""The loopback bench with real processes: small, but every part of it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrows.bench.loop.bench import run_loop_bench

pytestmark = pytest.mark.slow


def test_all_rates_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loop.json"
    run_loop_bench(learners=2, params=1 << 18, seconds=2.0, json_file=path)
    result = json.loads(path.read_text())
    assert result["contributors_per_merge"] == 2.0
    for key in ("params_merged_per_s", "broker_gbit_per_core_s", "learner_gbit_per_core_s"):
        assert result[key] > 0
    assert "rounds_per_s" in capsys.readouterr().out
