"""The units: systemd reads them, gives them a good mark, and lets a broker do what it does."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from acceptance.kit import Site

from narrows.bench.kit.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
NARROWS = Path(sys.executable).parent / "narrows"

EXPOSURE_MAX = 2.0
"""The mark of `systemd-analyze security`: from 0, nothing is exposed, to 10."""

AS_ROOT = {"fchown"}
"""Calls of SQLite that it makes for root alone."""

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")


def run(*command: object) -> str:
    """The output of a program, which must end with 0."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units, with the program that is installed here: systemd looks for it."""
    made = []
    for unit in UNITS.glob("*.service"):
        made.append(tmp_path / unit.name)
        made[-1].write_text(unit.read_text().replace("/opt/narrows/bin/narrows", str(NARROWS)))
    assert len(made) == 2
    return made


@analyze
def test_systemd_finds_nothing_wrong_with_the_units(units: list[Path]) -> None:
    assert run("systemd-analyze", "verify", *units) == ""


@analyze
def test_the_units_expose_little(units: list[Path]) -> None:
    for unit in units:
        told = run("systemd-analyze", "security", "--offline=yes", unit)
        mark = re.search(r"exposure level for \S+: ([0-9.]+)", told)
        assert mark is not None and float(mark[1]) <= EXPOSURE_MAX, told


def allowed_calls(unit: str) -> set[str]:
    """The system calls that the filter of a unit lets pass."""
    sets: dict[str, list[str]] = {}
    for line in run("systemd-analyze", "syscall-filter").splitlines():
        if line.startswith("@"):
            sets[line] = []
        elif re.match(r" +[@a-z]", line):
            sets[list(sets)[-1]].append(line.strip())

    def members(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return {call for each in sets[name] for call in members(each)}

    calls = members("@default")
    for sign, name in re.findall(r"^SystemCallFilter=(~?)(\S+)$", unit, re.MULTILINE):
        calls = calls - members(name) if sign else calls | members(name)
    return calls


@analyze
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_broker_makes_no_call_that_its_unit_forbids(site: Site, tmp_path: Path) -> None:
    unit = (UNITS / "narrows.service").read_text()
    trace, ready = tmp_path / "trace", tmp_path / "ready"
    broker = site.shell(
        "broker", "strace", "-f", "-qq", "-o", str(trace), str(NARROWS), "broker",
        "--listen", site.address, "--state-dir", "state", "--ready-file", str(ready),
        "--goal-tokens", "4000", "--set", "fragments.sync_period_steps=4",
    )  # fmt: skip
    wait_until(ready.exists, "a broker that serves", broker, timeout_s=90)
    site.learner("site-a").ends(0)
    broker.ends(0)
    text = trace.read_text()
    calls = set(re.findall(r"^[0-9]+ +([a-z0-9_]+)\(", text, re.MULTILINE))
    assert {"fdatasync", "epoll_wait", "bind"} <= calls
    assert calls - AS_ROOT <= allowed_calls(unit)
    families = re.search(r"^RestrictAddressFamilies=(.*)$", unit, re.MULTILINE)
    assert families is not None
    assert set(re.findall(r"socket\((AF_[A-Z0-9]+)", text)) <= set(families[1].split())
