"""Some thousand names; `make chaos-names` has a hundred thousand come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import connections, names

from narrows.broker.syncer.forgetting import GONE_MAX


@pytest.mark.slow
def test_what_is_kept_does_not_grow_with_the_names() -> None:
    found = names.run(3000, samples=6)
    last, middle = found[-1], found[len(found) // 2]
    assert last.members == GONE_MAX + 1
    assert last.merged_pushes <= GONE_MAX * 2
    for what in ("members", "merged_pushes", "status_bytes", "manifest_bytes"):
        assert getattr(last, what) == getattr(middle, what), what


@pytest.mark.slow
def test_names_leave_nothing_behind_in_a_real_broker(tmp_path: Path) -> None:
    """Beyond those that are remembered: the last quarter of the connections adds nothing."""
    result = connections.run(4 * (GONE_MAX + 100), tmp_path, samples=4, names=1 << 20)
    assert result.exit_code == 0
    assert result.descriptors_grown <= 2 * connections.SLACK
    *_, before, last = result.samples
    grown = last.resident_bytes - before.resident_bytes
    assert grown / (last.connections - before.connections) < 5_000
