"""The bench of attacks on the wire: its harness runs, and a planted breach is reported."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from narrows.bench.attack import catalogue, outsiders
from narrows.bench.attack.revocation import Revocation, run_revocation
from narrows.bench.attack.stage import Scene
from narrows.bench.attack.wire import AttackRow, run_wire
from narrows.bench.kit.connections import established
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


@pytest.mark.slow
def test_a_revoked_learner_is_cut_and_its_connections_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "revoke.json"
    run_revocation(seconds=3.0, scene=Scene(params=1 << 15), json_file=file)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["connections"] >= 3 and row["cut_s"] > 0 and row["remedy_s"] > 0
    assert row["rounds"] > 0 and set(row["rounds_lost"]) == {"site-a", "site-b"}


@pytest.mark.parametrize("change", [{"cut_s": 2.1}, {"rounds_lost": {"a": 2, "b": 0}}])
def test_a_revocation_that_is_late_or_costs_rounds_does_not_hold(
    change: dict[str, object],
) -> None:
    found = Revocation(9, 0.1, 0.2, 0.0, 80, {"a": 0, "b": 1}, 0.2, 0.1)
    assert found.holds
    assert not replace(found, **change).holds  # type: ignore[arg-type]


def test_connections_of_a_process_are_those_that_it_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = established(os.getpid())
        with socket.create_connection(server.getsockname()) as near, server.accept()[0]:
            both = established(os.getpid()) - before
            assert len(both) == 2 and {a for a, _ in both} == {b for _, b in both}
            assert f"{near.getsockname()[1]:04X}" in {a.partition(":")[2] for a, _ in both}
        assert not (established(os.getpid()) - before)


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
    assert ROW.holds
    assert not replace(ROW, **change).holds  # type: ignore[arg-type]


def test_every_attack_says_what_it_does() -> None:
    assert catalogue.ATTACKS["null_client"].run is outsiders.null_client
    assert all(attack.description.endswith(".") for attack in catalogue.ATTACKS.values())
