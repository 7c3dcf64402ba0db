"""A few hundred made-up connections to a real broker; `ports.py` makes them for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.ports import ROUND, Siege


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
def test_a_broker_serves_on(tmp_path: Path, keys: bool) -> None:
    figures = Siege(tmp_path, keys=keys).run(seconds=300.0, rounds_max=3)
    assert figures.inputs == 3 * ROUND
    log = (tmp_path / "broker.log").read_text()
    sender = "insider" if keys else "fuzz-"
    assert "refused" in log and sender in log, "nothing has come behind the handshake"
    assert "Traceback" not in log
