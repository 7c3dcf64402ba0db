"""Some hundred connections; `make chaos-connections` makes ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import connections


@pytest.mark.slow
def test_connections_leave_nothing_behind(tmp_path: Path) -> None:
    result = connections.run(400, tmp_path, samples=4)
    assert result.exit_code == 0
    assert result.descriptors_grown <= 2 * connections.SLACK
    assert result.bytes_per_connection < 20_000
