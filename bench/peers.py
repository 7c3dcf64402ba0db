"""`narrows bench peers`: Narrows and other systems on the same shaped line.

exchange: the seconds that two members need to average their parameters over the line. The other
systems average in one call, between one member at each end. Narrows runs its broker at one end and
both learners at the other, so its line has the rate once for each of them. `lockstep` waits for the
new version as the others do, inner step included; `decoupled` trains on, and exchanges without a
pause.

computing: the share of the time in which learners compute when they exchange every H steps. A step
is a timed wait, so the share is their steps per second over those of the same learners without any
exchange. Beside it stands what diloco-measured published for blocking DiLoCo in float32 with four
replicas. A decoupled learner never waits; on a narrow line it exchanges less often than every H
steps, and `steps/exchange` says how often.

Root alone can build the line. torchft and hivemind need environments of their own, made by hand;
the row of a system without one says how.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import IO, Final

from narrows.bench import loop
from narrows.bench.kit.line import HUB_ADDRESS, SITE_ADDRESS, Line
from narrows.bench.kit.rows import Column, Json, Row, Short, bench, shown
from narrows.bench.kit.run import Deployment, Toy
from narrows.proto.units import BitRate

OURS: Final = {"lockstep": "diloco", "decoupled": "decoupled"}
"""The run's mode, by the name that Narrows has here."""
SYSTEMS: Final = (*OURS, "gloo", "torchft", "hivemind")
EXCHANGES: Final = 10
"""Exchanges of another system that are counted. Narrows is measured for a time instead."""
NEVER_STEPS: Final = 1_000_000
"""An H so long that nothing is ever exchanged."""
SHORT_PARAMS: Final = 1 << 20

PUBLISHED_PERCENT: Final = {
    128: {"50Mbit/s": 11.6, "200Mbit/s": 36.1, "1Gbit/s": 71.5, "5Gbit/s": 87.0},
    32: {"50Mbit/s": 2.4, "200Mbit/s": 10.0, "1Gbit/s": 36.0, "5Gbit/s": 68.1},
}
"""Share of the time computing by H and rate of each replica's link: github.com/Adnan082/
diloco-measured, August 2026, 4 x L40S, its runs of 180 counted steps."""
PUBLISHED_PARAMS: Final = 30_846_976
"""Its model has 30,846,720; a toy needs a multiple of 1,024."""
PUBLISHED_STEP_S: Final = 0.027
"""Its median step without exchange."""

PINS: Final = {"torchft": "torchft==0.2.0", "hivemind": "hivemind==1.1.12 numpy==1.26.4"}
"""Requirements of each system beside torch, whose version constraints-torch.txt has."""
ENVIRONMENTS: Final = Path.home() / ".cache" / "narrows" / "peers"
EXCHANGE_S_MAX: Final = 300.0
LOOK_S: Final = 0.05
SCRIPT: Final = Path(__file__).resolve().parent / "peers_exchange.py"

COLUMNS: Final = (
    Column("what", "what"),
    Column("system", "system"),
    Column("H", "sync_period_steps"),
    Column("rate", "rate"),
    Column("s/exchange", "exchange_s", "{:.3f}"),
    Column("steps/exchange", "steps_per_exchange", "{:.0f}"),
    Column("computing %", "computing_percent", "{:.1f}"),
    Column("published %", "published_percent", "{:.1f}"),
    Column("note", "note"),
)


@dataclass(frozen=True)
class PeersCell:
    """One system on one line."""

    what: str
    """exchange or computing."""
    system: str
    rate: str
    """Rate of each learner in each direction."""
    params: int
    seconds: float
    """Narrows is measured so long, or a little longer."""
    sync_period_steps: int | None = None
    """H, for computing."""


def peers(*, short: Short = False, json: Json = None, system: tuple[str, ...] = ()) -> None:
    """Measure seconds per exchange and the share of time computing on a line, beside others.

    Parameters
    ----------
    system
        Names of systems (lockstep, decoupled, gloo, torchft, hivemind); all without it. Repeatable.
    """
    if short:
        cells = _cells(
            seconds=5.0,
            params=SHORT_PARAMS,
            rates=["100Mbit/s"],
            computing_params=SHORT_PARAMS,
            computing_rates={32: ["50Mbit/s"]},
        )
    else:
        cells = _cells(
            seconds=20.0,
            params=1 << 24,
            rates=["1Gbit/s", "100Mbit/s"],
            computing_params=PUBLISHED_PARAMS,
            computing_rates=PUBLISHED_PERCENT,
        )
    chosen = [cell for cell in cells if not system or cell.system in system]
    bench("peers", chosen, measure, COLUMNS, headline, json=json)


def _cells(
    *,
    seconds: float,
    params: int,
    rates: Sequence[str],
    computing_params: int,
    computing_rates: Mapping[int, Iterable[str]],
) -> list[PeersCell]:
    """Exchanges of all systems at `rates`, and Narrows computing at rates by their H."""
    exchange = [
        PeersCell("exchange", system, rate, params, seconds) for rate in rates for system in SYSTEMS
    ]
    computing = [
        PeersCell("computing", system, rate, computing_params, seconds, period_steps)
        for period_steps, rates_of_period in computing_rates.items()
        for rate in rates_of_period
        for system in OURS
    ]
    return exchange + computing


def measure(cell: PeersCell) -> Row:
    """One cell. A system that is not installed, or fails, has a row that says why.

    Raises NarrowsError for a line that cannot be built.
    """
    if cell.system in OURS:
        return narrows(cell)
    if cell.system == "gloo":
        return averaged(cell, Path(sys.executable))
    folder = ENVIRONMENTS / cell.system
    python = folder / "bin" / "python"
    if not python.exists():
        return {
            "exchange_s": None,
            "note": f"not installed: python -m venv {folder};"
            f" {folder}/bin/pip install torch {PINS[cell.system]}",
        }
    return averaged(cell, python)


def headline(rows: Sequence[Row]) -> list[str]:
    """Seconds of each system by rate, and the share that Narrows computes, beside others'."""
    lines = []
    exchanges = [row for row in rows if row["what"] == "exchange"]
    for rate in dict.fromkeys(row["rate"] for row in exchanges):
        mine = [row for row in exchanges if row["rate"] == rate]
        told = ", ".join(f"{row['system']} {shown(row['exchange_s'], '{:.2f}')}" for row in mine)
        lines.append(f"s per exchange of {mine[0]['params'] / 1e6:.1f} M at {rate}: {told}")
    return lines + [
        f"H {row['sync_period_steps']} at {row['rate']}: {row['system']} computes"
        f" {row['computing_percent']:.1f}%, published {shown(row['published_percent'], '{}')}"
        for row in rows
        if row["what"] == "computing"
    ]


# Narrows.


def narrows(cell: PeersCell) -> Row:
    """Seconds per exchange. With an H also the share of the time in which a learner computes: its
    steps per second over those of the same learners that exchange nothing."""
    mode = OURS[cell.system]
    if cell.sync_period_steps is None:
        # One step for each fragment, so that something always waits to be sent.
        period_steps = loop.FRAGMENTS_BY_MODE[mode]
        toy = Toy("toy", cell.params, moved=loop.MOVED_BY_MODE[mode])
    else:
        period_steps = cell.sync_period_steps
        toy = Toy("toy", cell.params, PUBLISHED_STEP_S)
    settings = {"fragments.sync_period_steps": period_steps}
    with (
        Line(loop.LEARNERS * float(BitRate.parse(cell.rate))) as line,
        Deployment(line=line) as run,
    ):
        made = loop.exchanging(run, mode, settings, toy, cell.seconds)
    row: Row = {"exchange_s": made["exchange_s"], "note": ""}
    if cell.sync_period_steps is None:
        return row

    undisturbed = undisturbed_steps_per_s(cell.params, cell.seconds)
    published = PUBLISHED_PERCENT[period_steps][cell.rate]
    return row | {
        "steps_per_exchange": made["steps_per_s"] * made["exchange_s"],
        "computing_percent": 100 * made["steps_per_s"] / undisturbed,
        "published_percent": published if cell.params == PUBLISHED_PARAMS else None,
    }


@cache
def undisturbed_steps_per_s(params: int, seconds: float) -> float:
    """Steps per second of a learner while nobody exchanges anything."""
    with Deployment() as run:
        run.broker(
            {
                "run.learners_at_start": loop.LEARNERS,
                "fragments.sync_period_steps": NEVER_STEPS,
            }
        )
        names = run.toys(Toy("toy", params, PUBLISHED_STEP_S), loop.LEARNERS)
        run.wait_until(lambda: all(map(run.facts, names)), "all to join")
        began_s = time.monotonic()
        steps = fmean(map(run.steps, names))
        run.wait(seconds)
        return (fmean(map(run.steps, names)) - steps) / (time.monotonic() - began_s)


# Other systems.


def averaged(cell: PeersCell, python: Path) -> Row:
    """Median seconds of an exchange, each taken at its slower member; or a note why there are none.

    `python` is the interpreter of the system's own environment.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    members = list[subprocess.Popen[bytes]]()
    logs = list[IO[str]]()
    with Line(float(BitRate.parse(cell.rate))) as line, ExitStack() as stack:
        ends = ((line.hub, HUB_ADDRESS), (line.site, SITE_ADDRESS))
        for rank, (namespace, address) in enumerate(ends):
            command = [
                "ip", "netns", "exec", namespace, str(python), "-P", str(SCRIPT), cell.system,
                str(rank), str(len(ends)), HUB_ADDRESS, address, str(cell.params), str(EXCHANGES),
            ]  # fmt: skip
            logs.append(stack.enter_context(TemporaryFile("w+", errors="replace")))
            # A member ends when its standard input does, that is with this process.
            member = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=logs[-1], stderr=logs[-1], env=environ,
                start_new_session=True,
            )  # fmt: skip
            members.append(member)
            stack.callback(_end, member)

        # A member that fails leaves the other one waiting: the first failure ends the measurement.
        limit = time.monotonic() + EXCHANGE_S_MAX
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < limit:
            time.sleep(LOOK_S)
            codes = [member.poll() for member in members]
        told = [_lines(log) for log in logs]

    if any(code != 0 for code in codes):
        note = f"not finished: exit codes {codes}"
        failed = max(range(len(codes)), key=lambda rank: abs(codes[rank] or 0))
        if told[failed]:
            note = f"{note}, said {told[failed][-1][:200]!r}"
        return {"exchange_s": None, "note": note}
    of_each = [
        [json.loads(line)["seconds"] for line in lines if line.startswith('{"')] for lines in told
    ]
    return {"exchange_s": median(map(max, zip(*of_each, strict=True))), "note": ""}


def _lines(log: IO[str]) -> list[str]:
    """All that was written so far."""
    log.seek(0)
    return log.read().splitlines()


def _end(member: subprocess.Popen[bytes]) -> None:
    """Ends a member with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(member.pid, signal.SIGKILL)
    member.communicate()
