"""Some hundred connections; `make chaos-connections` makes ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.connections import run


@pytest.mark.slow
def test_connections_leave_nothing_behind(tmp_path: Path) -> None:
    result = run(400, tmp_path, samples=4)
    assert result.exit_code == 0
    assert abs(result.descriptors_grown) <= 4
    assert result.bytes_per_connection < 20_000
