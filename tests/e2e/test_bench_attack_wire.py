"""The bench of attacks on the wire: its harness runs, and a planted breach is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrows.bench.attack import catalogue, outsiders
from narrows.bench.attack.stage import Scene
from narrows.bench.attack.wire import AttackRow, run_wire
from narrows.proto.errors import ConfigError

ROW = AttackRow("x", 1, 8.0, 1.0, 1.0, 0.8, 0, 0.0, 1.0, "")


@pytest.mark.slow
def test_a_stranger_and_an_insider_attack_a_real_broker(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    names = ("null_client", "names")
    run_wire(names, seconds=3.0, scene=Scene(params=1 << 15), keep=None, json_file=file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["attack"] for row in rows] == list(names)
    for row in rows:
        assert row["attempts"] > 0 and row["versions_per_s_before"] > 0 and not row["breach"]


def test_an_attack_that_nobody_knows_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="names"):
        run_wire(["nams"], seconds=1.0, scene=Scene(), keep=None, json_file=None)


@pytest.mark.parametrize(
    "change",
    [
        {"breach": "it reads"},
        {"during_ratio": 0.79},
        {"rss_growth_bytes": 200_000_001},
        {"records_bytes_per_s": 10_001.0},
    ],
)
def test_a_row_holds_only_within_every_bound(change: dict[str, object]) -> None:
    from dataclasses import replace

    assert ROW.holds
    assert not replace(ROW, **change).holds  # type: ignore[arg-type]


def test_every_attack_says_what_it_does() -> None:
    assert catalogue.ATTACKS["null_client"].run is outsiders.null_client
    assert all(attack.description.endswith(".") for attack in catalogue.ATTACKS.values())
