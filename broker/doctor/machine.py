"""Checks of the broker's own machine: state directory, disk, clock."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from narrows.broker.cli.plan import STATE_BYTES
from narrows.broker.doctor.findings import Check, Finding, failed, ok, unknown
from narrows.broker.store import History
from narrows.broker.store.history import DATABASE
from narrows.proto.units import Duration, Size, counted

SYNCS: Final = 100
"""Writes of which the slowest but one is told."""
SYNCS_S: Final = 2.0
"""No more of them are begun after this long."""
SLOW_S: Final = 0.2
"""A disk that is slower holds up commits: a round waits for two such writes."""
SPARE_BYTES: Final = 1 << 30
"""Room that a journal should have beside the next snapshot."""
CLOCK_S: Final = 1.0
"""Seconds by which the clock on the wall may go another way than the monotonic one meanwhile, and
by which the newest round may lie in the future."""


@dataclass
class Machine:
    """The place of a broker, whether it runs or not."""

    folder: Path
    """The state directory."""
    began: tuple[float, float]
    """Clock on the wall and monotonic clock, as the checks began."""
    params: int = 0
    """Parameters of the run's model, once it is known."""
    newest_at: float = -math.inf
    """When the newest round became durable, in seconds since 1970."""


def state_directory(machine: Machine) -> Finding:
    """The state directory holds a run."""
    folder = machine.folder
    file = folder / DATABASE
    if not file.exists() or not file.stat().st_size:
        return unknown(
            f"{folder} holds no run: a broker that starts here begins one. Should there be one, "
            "then its volume is not mounted, or --state-dir is another"
        )
    with closing(History(folder)) as history:
        run = history.run
        (newest,) = history.query("SELECT max(version) AS version, max(at) AS at FROM rounds")
    if run.layout is None:
        return unknown(f"{folder} holds run {run.run_id}, which has no version 0 yet")
    machine.params = sum(math.prod(entry.shape) for entry in run.layout.entries)
    machine.newest_at = newest["at"]
    return ok(f"{folder} holds run {run.run_id}, {run.phase}, at version {newest['version']}")


def room(machine: Machine) -> Finding:
    """The disk has room for the next snapshot."""
    folder = machine.folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = STATE_BYTES * machine.params + SPARE_BYTES
    text = f"{Size(free).text()} are free, {Size(needed).text()} are needed for the next snapshot"
    if free < needed:
        return failed(text, f"make room on the disk of {folder}; `narrows plan` says how much")
    return ok(text)


def disk(machine: Machine) -> Finding:
    """Writes are durable soon."""
    times: list[float] = []
    until = time.monotonic() + SYNCS_S
    try:
        with tempfile.TemporaryFile(dir=machine.folder) as file:
            while len(times) < SYNCS and (begun := time.monotonic()) < until:
                os.pwrite(file.fileno(), os.urandom(4096), 4096 * len(times))
                os.fdatasync(file.fileno())
                times.append(time.monotonic() - begun)
    except FileNotFoundError:
        return unknown("there is no state directory yet")
    except OSError as error:
        return failed(
            f"{machine.folder} takes no writes ({error.strerror})",
            "make room, or type this as the user of the broker; while it is so nothing is "
            "published, and learners train on alone",
        )
    slowest = sorted(times)[-1 - len(times) // 100]
    text = f"of {counted(len(times), 'write')} 99% are durable in {Duration(slowest).text()}"
    if slowest > SLOW_S:
        return failed(
            text,
            "is something else busy on this disk, or is it a network's? A round "
            "waits for two such writes: choose a local disk for --state-dir",
        )
    return ok(text)


def clock(machine: Machine) -> Finding:
    """The clock goes, and was not set back."""
    wall, monotonic = machine.began
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    ahead = machine.newest_at - time.time()
    remedy = "let the machine's clock be set by NTP, and look at what else sets it; if the machine "
    remedy += "is virtual, was it suspended?"
    if abs(drift) > CLOCK_S:
        return failed(f"the clock went {drift:+.1f} s beside its course meanwhile", remedy)
    if ahead > CLOCK_S:
        return failed(f"the newest round is {ahead:.0f} s in the future: it was set back", remedy)
    return ok("it goes, and no round lies in its future")


CHECKS: Final = (
    Check("state directory", state_directory),
    Check("room", room),
    Check("disk", disk),
    Check("clock", clock),
)
