"""A few hundred made-up connections to a real broker; `ports.py` makes them for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.ports import ROUND, besiege


@pytest.mark.slow
def test_a_broker_serves_on(tmp_path: Path) -> None:
    figures = besiege(tmp_path, seconds=300.0, rounds_max=3)
    assert figures.inputs == 3 * ROUND
    log = (tmp_path / "broker.log").read_text()
    assert "refused" in log and "fuzz-" in log, "nothing has come behind the handshake"
    assert "Traceback" not in log
