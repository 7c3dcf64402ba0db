"""Failures of a line and of a run, planted for `narrows doctor`, which must name each of them.

`make test-doctor` runs them: a broker and learners as processes in two network namespaces, so they
need root. Those that need no second machine stand in tests/unit/test_doctor.py.
"""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from narrows.bench.kit.line import Line, available, ip
from narrows.bench.kit.processes import wait_until
from narrows.bench.kit.run import Deployment, Toy

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not available(), reason="needs root, and the command ip"),
]

SETTINGS = {"fragments.count": 2, "fragments.sync_period_steps": 10, "fragments.overlap_steps": 1}
TOY = Toy("site-a", params=1 << 16, step_s=0.02)
HEARD_IN_VAIN_S = 25.0
"""The broker gives a hint after 10 s without data; before that a learner may train for a while."""


@contextmanager
def running(line: Line) -> Generator[Deployment]:
    """A broker at the hub and a toy at the site that has contributed."""
    with line, Deployment(line=line) as run:
        run.broker(SETTINGS)
        run.toy(TOY)
        wait_until(run.merges, "a merge", *run.children)
        yield run


def examined(run: Deployment, *more: str) -> dict[str, str]:
    """The failures that the doctor finds at the site, each with its text."""
    given = ["--broker", run.address, "--name", TOY.name, "--timeout-s", "2", "--json", *more]
    child = run.command("doctor", "doctor", *given)
    child.ends(0, 1)
    rows = json.loads(child.log)
    ills = {row["check"]: row["text"] for row in rows if row["verdict"] == "failed"}
    assert child.exitcode == bool(ills), child.log
    return ills


def close(line: Line, port: int) -> None:
    """Drops what the hub sends from a port, from now on."""
    ip("-n", line.hub, "rule", "add", "ipproto", "tcp", "sport", str(port), "blackhole")


def open_again(line: Line, port: int) -> None:
    ip("-n", line.hub, "rule", "delete", "ipproto", "tcp", "sport", str(port), "blackhole")


def test_ports_that_are_closed_before_and_in_the_run() -> None:
    """Each port by name; with data ports closed, the broker blames the line of the learner, too."""
    line = Line()
    with running(line) as run:
        assert examined(run) == {}
        close(line, 7070)
        assert [*examined(run)] == ["control port"]
        open_again(line, 7070)
        close(line, 7071)
        found = examined(run)
        assert "uplink port" in found and "downlink port" not in found, found
        wait_until(lambda: "data" in examined(run), "a hint", timeout_s=HEARD_IN_VAIN_S)
        assert "uplink" in examined(run)["data"]
        open_again(line, 7071)
        wait_until(lambda: examined(run) == {}, "the uplink's return")
        close(line, 7072)
        found = examined(run)
        assert "downlink port" in found and "uplink port" not in found, found
        wait_until(lambda: "data" in examined(run), "a hint", timeout_s=HEARD_IN_VAIN_S)
        assert "downlink" in examined(run)["data"]


@pytest.mark.parametrize(("end", "ill"), [("hub", "packet size"), ("site", "answer")])
def test_full_packets_that_are_lost(end: str, ill: str) -> None:
    """One end announces large packets, and its device drops them."""
    line = Line()
    with running(line) as run:
        namespace = {"hub": line.hub, "site": line.site}[end]
        ip("-n", namespace, "link", "set", "eth0", "mtu", "600")
        ip("-n", namespace, "route", "replace", "10.77.0.0/24", "dev", "eth0", "advmss", "1460")
        found = examined(run)
    assert next(iter(found)) == ill, found


def test_a_line_that_is_too_slow_for_the_run() -> None:
    with running(Line(400e3)) as run:
        wait_until(lambda: run.ask("status", run.address, "--json")["period_s"], "a period")
        found = examined(run)
    assert {"line up"} <= found.keys() <= {"line up", "line down", "data"}, found


def test_two_processes_with_one_name() -> None:
    with running(Line()) as run:
        twin = ["--broker", run.address, "--name", TOY.name, "--preset", "nano"]
        run.command("twin", "learner", *twin)
        wait_until(lambda: "kept out" in examined(run), "the twin to knock")
        assert "another process is site-a" in examined(run)["kept out"]


def test_an_empty_state_directory_at_the_old_address() -> None:
    with running(Line()) as run:
        run.running["broker"].kill()
        shutil.rmtree(run.state)
        run.broker(SETTINGS)
        wait_until(lambda: "kept out" in examined(run), "the learner to knock")
        assert "state directory of that run" in examined(run)["kept out"]
