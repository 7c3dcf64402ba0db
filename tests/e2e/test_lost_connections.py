"""Connections that a firewall forgets, ports that it never opens: real processes on a router."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from routed_line import RoutedLine, needs_namespaces
from running import HANG_S, wait_until

from narrows.bench.kit.processes import Processes
from narrows.bench.kit.rows import read_rows

pytestmark = [pytest.mark.slow, needs_namespaces]

CONTROL, UPLINK, DOWNLINK = 7070, 7071, 7072


class Sites:
    """A broker and a learner, each at a site of its own."""

    def __init__(self, line: RoutedLine, folder: Path, data: Path) -> None:
        self.line, self.folder, self.data = line, folder, data
        self.far = Processes(folder, prefix=line.under(line.far))
        self.near = Processes(folder, prefix=line.under(line.near))

    def start(self, *arguments: str) -> None:
        self.far.start_broker(
            "--listen", f"tcp://{self.line.far_address}:{CONTROL}", "--insecure",
            "--state-dir", str(self.folder / "state"), "--events", str(self.folder / "far.jsonl"),
            "--set", "fragments.sync_period_steps=8",
        )  # fmt: skip
        self.start_learner(*arguments)

    def start_learner(self, *arguments: str) -> None:
        self.near.start(
            "a", "learner", "--broker", f"tcp://{self.line.far_address}:{CONTROL}", "--name", "a",
            "--preset", "nano", "--data", str(self.data), "--step-wait-s", "0.05",
            "--events", str(self.folder / "near.jsonl"), *arguments,
        )  # fmt: skip

    def merged_at(self) -> list[float]:
        """Times at which learner a's contributions were merged, on the system's clock."""
        rows = self.events("far")
        return [r["time_s"] for r in rows if r["event"] == "merged" and "a" in r["contributors"]]

    def installed_at(self) -> list[float]:
        """Times at which the learner got a new version."""
        return [row["time_s"] for row in self.events("near") if row["version"] > 0]

    def events(self, site: str) -> list[dict[str, Any]]:
        path = self.folder / f"{site}.jsonl"
        return [row for row in read_rows(path) if row["time_s"]] if path.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def sites(tmp_path: Path, data: Path) -> Generator[Sites]:
    with RoutedLine() as line:
        sites = Sites(line, tmp_path, data)
        with sites.far, sites.near:
            yield sites


@pytest.mark.parametrize(
    "ports", [(CONTROL, UPLINK, DOWNLINK), (CONTROL,), (UPLINK, DOWNLINK)], ids=str
)
def test_a_learner_comes_back_over_new_connections(
    sites: Sites, ports: tuple[int, ...], record_property: Any
) -> None:
    sites.start()
    wait_until(lambda: len(sites.installed_at()) > 3, "the first exchanges")
    assert sites.line.lose_connections(ports) >= len(ports)
    lost_at = time.time()
    if CONTROL in ports:
        wait_until(lambda: "back with the broker" in sites.log("a"), "a new session")
    # What was on its way still counts as before: a merge later than that needs all of the path.
    wait_until(lambda: any(at > lost_at + 1 for at in sites.merged_at()), "the next merge")
    merged_at = min(at for at in sites.merged_at() if at > lost_at + 1)
    wait_until(lambda: any(at > merged_at for at in sites.installed_at()), "its adoption")
    back_s = min(at for at in sites.installed_at() if at > merged_at) - lost_at
    record_property("back_s", round(back_s, 1))
    print(json.dumps({"ports": ports, "back_s": round(back_s, 1)}))


@pytest.mark.parametrize(
    ("port", "broker_says"),
    [
        (UPLINK, f"no data has come from a for .*port {UPLINK}"),
        (DOWNLINK, f"a has not subscribed .*port {DOWNLINK}"),
    ],
)
def test_a_blocked_data_port_is_named_by_both_sides(
    sites: Sites, port: int, broker_says: str
) -> None:
    sites.line.lose_port(port)
    sites.start("--join-timeout-s", "45")
    assert sites.near.wait("a", HANG_S) == 4, sites.near.tail("a", 20)
    told = sites.near.tail("a", 1)
    assert f"{port} (" in told and f"{UPLINK + DOWNLINK - port} (" not in told
    assert "no connection" in told and "firewall" in told
    warnings = [line for line in sites.log("broker").splitlines() if "WARNING" in line]
    assert sum(re.search(broker_says, line) is not None for line in warnings) == 1, warnings
