"""`narrows bench wan --budget`: whether the budget holds on the wire, and whether it is used.

The line has at least twice the budget, so that the bench sees the budget and not the line. Work is
always waiting: every learner answers every round at once, with raw float32. A fragment on its way
up is missing on its way down, so a mean only describes the narrower direction. So each direction is
limited alone, and rows with both limited show that both hold. On a line with exactly the budget
only the control messages matter. Windows are one second, ten per second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from narrows.bench.kit import machine
from narrows.bench.kit.cells import Row, outcome, run_missing
from narrows.bench.kit.lab import Direction, Lab, check_able, congestion_control
from narrows.bench.wan import cells as wan_cells
from narrows.bench.wan.bench import WAYS
from narrows.bench.wan.cells import MILLION
from narrows.bench.wan.run import NarrowsRun, line
from narrows.broker.cli.tables import Table, show, terminal
from narrows.proto.errors import NarrowsError
from narrows.proto.units import format_bits_per_s

PEAK_MAX: Final = 1.02
MEAN_MIN: Final = 0.95
CONTROL_P99_MAX_S: Final = 0.25

SETTLE_S: Final = 5.0
"""Seconds that are not counted: queues fill, TCP finds its window."""

MEASURE_S: Final = 20.0
WORK_S: Final = 3.0
CAPS_MBIT_PER_S: Final = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
EXACT_MBIT_PER_S: Final = (10.0, 100.0, 1000.0)
SHORT_MBIT_PER_S: Final = 100.0


@dataclass(frozen=True)
class BudgetCell:
    """One budget on one line."""

    cap_mbit_per_s: float
    """Budget in each direction: of the one learner, or of all together."""
    learners: int
    ways: tuple[Direction, ...] = WAYS
    """Directions with a budget."""
    line_factor: float = 2.0
    """Rate of the line, in units of the budget."""

    @property
    def name(self) -> str:
        learners = f"{self.learners} learner" + ("s share" if self.learners > 1 else "")
        return f"{learners}, {' and '.join(self.ways)}"

    @property
    def line(self) -> str:
        rate = format_bits_per_s(1e6 * self.cap_mbit_per_s * self.line_factor)
        return f"{format_bits_per_s(1e6 * self.cap_mbit_per_s)} on a line of {rate}"

    @property
    def settings(self) -> list[str]:
        """Settings of the broker."""
        scope = "" if self.learners == 1 else "total_"
        rate = f"{self.cap_mbit_per_s:g}Mbit/s"
        return [w for way in self.ways for w in ("--set", f"wan.{scope}{way}={rate}")]

    @property
    def params(self) -> int:
        """Parameters for some seconds of work, in 16 fragments of which all but one or two wait."""
        wanted = int(1e6 * self.cap_mbit_per_s * WORK_S / 32 / self.learners)
        return min(max(wanted, 1 << 16), 16 * MILLION)


def run_budget_bench(rows_file: Path, json_file: Path | None, *, short: bool) -> None:
    """Runs the cells that `rows_file` does not have, prints the table. Raises ConfigError.

    `short`: one budget of one learner alone.
    """
    check_able()
    console = terminal()
    chosen = [each for each in cells() if not short or _is_short(each)]
    rows = run_missing(chosen, rows_file, run_cell, console.print)
    show(console, table(rows))
    machine.write_result(json_file, "wan-budget", {"rows": rows})


def cells() -> list[BudgetCell]:
    """Each budget for one learner and for four; the smallest budgets also on a line of their
    size."""
    shares = [BudgetCell(cap, learners) for cap in CAPS_MBIT_PER_S for learners in (1, 4)]
    single = [replace(cell, ways=(way,)) for cell in shares for way in WAYS]
    both = [cell for cell in shares if cell.cap_mbit_per_s in EXACT_MBIT_PER_S]
    return [*single, *both, *(BudgetCell(cap, 1, line_factor=1.0) for cap in EXACT_MBIT_PER_S)]


def _is_short(cell: BudgetCell) -> bool:
    alone = cell.learners == 1 and len(cell.ways) == 1
    return alone and cell.cap_mbit_per_s == SHORT_MBIT_PER_S


def run_cell(cell: BudgetCell) -> Row:
    """Measures one budget, or marks it as failed with the reason."""
    line_bits_per_s = 1e6 * cell.cap_mbit_per_s * cell.line_factor
    lab = Lab(cell.learners, line_bits_per_s, hub_rate_bits_per_s=line_bits_per_s)
    run_of = wan_cells.WanCell(
        "narrows", "raw32", line_bits_per_s / 1e6, 0, cell.params, cell.learners, streams=4
    )
    founding_s = 2 * cell.params * 32 * cell.learners / (1e6 * cell.cap_mbit_per_s)
    limit_s = SETTLE_S + MEASURE_S + founding_s
    try:
        with line(lab, limit_s) as at:
            run = NarrowsRun(run_of, at)
            run.start(*cell.settings, endless=True)
            time.sleep(SETTLE_S)
            first = len(run.probes())
            with lab.meter() as meter:
                time.sleep(MEASURE_S)
            run.check()
            trips = run.probes()[first:]
            # The hub sends the bytes that learners receive.
            ways: dict[str, tuple[str, Direction]] = {"up": ("hub", "down"), "down": ("hub", "up")}
            rates = {way: meter.rates(*place) for way, place in ways.items()}
    except NarrowsError as error:
        return {"failed": str(error)}
    cap = 1e6 * cell.cap_mbit_per_s
    row: Row = {"congestion_control": congestion_control(), "seconds": MEASURE_S}
    for way, rate in rates.items():
        row[f"{way}_peak_over_cap"] = rate.peak_bits_per_s / cap
        row[f"{way}_mean_over_cap"] = rate.mean_bits_per_s / cap
        row[f"{way}_windows"] = len(rate.windows_bits_per_s)
    p99_s = float(np.percentile(trips, 99)) if trips else None
    row["control_probes"], row["control_round_trip_s_p99"] = len(trips), p99_s
    row["holds"] = all(row[f"{way}_peak_over_cap"] <= PEAK_MAX for way in cell.ways)
    # Of two directions one waits for the other: only a direction limited alone is always busy.
    if len(cell.ways) == 1:
        row["uses"] = row[f"{cell.ways[0]}_mean_over_cap"] >= MEAN_MIN
    row["control_in_time"] = p99_s is not None and p99_s <= CONTROL_P99_MAX_S
    row["summary"] = ", ".join(
        f"{way} {row[f'{way}_mean_over_cap']:.3f} (peak {row[f'{way}_peak_over_cap']:.3f})"
        for way in rates
    )
    return row


def table(rows: Sequence[Row]) -> Table:
    """A table of all budgets."""
    headings = ("budget", "", "up mean", "peak", "down mean", "peak", "control p99 ms", "holds")
    title = "shares of the budget, one-second windows"
    shown = Table(headings, keys=2, title=title)
    for row in rows:
        if "holds" not in row:
            shown.add(row["line"], row["name"], note=outcome(row))
            continue
        shares = [
            f"{row[f'{w}_{k}_over_cap']:.3f}" for w in ("up", "down") for k in ("mean", "peak")
        ]
        p99_s = row["control_round_trip_s_p99"]
        missed = [word for word in ("holds", "uses", "control_in_time") if not row.get(word, True)]
        verdict = "not: " + ", ".join(missed) if missed else ""
        p99 = "-" if p99_s is None else f"{1000 * p99_s:.0f}"
        shown.add(row["line"], row["name"], *shares, p99, "no" if missed else "yes", note=verdict)
    return shown
