"""A few kills of a real broker; `make chaos-broker` makes hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.broker_kills import run


@pytest.mark.slow
def test_nothing_that_a_learner_saw_is_lost(tmp_path: Path) -> None:
    result = run(12, 1, tmp_path)
    assert result.problems == []
    # A life that is killed before its first record leaves none: on a busy machine some are.
    assert result.kills == 11 and result.lives >= 6
    assert result.versions_seen >= result.kills and result.rounds >= result.versions_seen - 2
    assert result.versions_lost == 0
    assert result.pushes_merged_twice == 0
    assert result.final_equals_replay
