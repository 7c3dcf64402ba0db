"""`narrows bench wan`: seconds per exchange over a line of a given rate and delay, beside others.

An exchange runs from the first snapshot to the last learner's last adoption, with fragments
pipelined; there is no launch floor and no grace. Bytes are those that the line's queues counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from narrows.bench.kit import machine
from narrows.bench.kit.cells import Row, outcome, run_missing
from narrows.bench.kit.lab import Direction, Lab, Meter, check_able, congestion_control
from narrows.bench.wan import cells as wan_cells
from narrows.bench.wan import peers as wan_peers
from narrows.bench.wan.cells import WARM_UP, WanCell
from narrows.bench.wan.run import ExchangeTimes, NarrowsRun, line
from narrows.broker.cli.tables import Table, show, terminal
from narrows.proto.errors import NarrowsError

WAYS: Final[tuple[Direction, ...]] = ("up", "down")


def run_wan_bench(rows_file: Path, json_file: Path | None, *, full: bool, short: bool) -> None:
    """Runs the cells that `rows_file` does not have, prints them, and writes the requested files.

    Raises ConfigError without root. A cell that fails is marked, and run again next time.
    """
    check_able()
    selection = wan_cells.full() if full else wan_cells.small()
    cells = wan_cells.short() if short else selection
    console = terminal()
    rows = run_missing(cells, rows_file, run_cell, console.print)
    for title in dict.fromkeys(row["line"] for row in rows):
        show(console, table(title, [row for row in rows if row["line"] == title]))
    machine.write_result(json_file, "wan", {"rows": rows})


def run_cell(cell: WanCell) -> Row:
    """Measures one cell, or marks it as computed, skipped or failed."""
    if cell.line_s > wan_cells.EXCHANGE_MAX_S:
        summary = f"{cell.line_s:.0f} s (computed)"
        return {"computed": True, "exchange_s_median": cell.line_s, "summary": summary}
    peer = cell.system != "narrows"
    if peer and (reason := wan_peers.why_not(cell)):
        return {"skipped": reason}
    limit_s = 4 * (cell.exchanges + WARM_UP) * max(cell.line_s, 1.0)
    lab = Lab(cell.learners, cell.rate_mbit_per_s * 1e6)
    try:
        with line(lab, limit_s) as at:
            probes: list[float] = []
            with lab.meter() as meter:
                if peer:
                    exchanges = wan_peers.run_peer(cell, at, limit_s)
                else:
                    run = NarrowsRun(cell, at)
                    exchanges, probes = run.measure(meter), run.probes()
            return _figures(cell, meter, exchanges, probes)
    except NarrowsError as error:
        return {"failed": f"{cell.system}: {error}"}


def _figures(
    cell: WanCell, meter: Meter, exchanges: Sequence[ExchangeTimes], probes: Sequence[float]
) -> Row:
    """`probes`: round trips of control messages since the start, in seconds."""
    seconds = [each.seconds for each in exchanges]
    row: Row = {
        "summary": f"{np.median(seconds):.3f} s",
        "congestion_control": congestion_control(),
        "exchange_s": seconds,
        "exchange_s_median": float(np.median(seconds)),
        "exchange_s_p95": float(np.percentile(seconds, 95)),
        "cpu_s_per_exchange": float(np.mean([each.cpu_s for each in exchanges])),
    }
    # The other systems report no times: their bytes are those of all exchanges.
    since_s, until_s, count = 0.0, 1e18, cell.exchanges + WARM_UP
    first, last = exchanges[0], exchanges[-1]
    if first.span_s is not None and last.span_s is not None:
        since_s, until_s, count = first.span_s[0], last.span_s[1], cell.exchanges
    up, down = (meter.rates("l0", way, since_s=since_s, until_s=until_s) for way in WAYS)
    row |= {
        "up_wire_bytes_per_exchange": up.wire_bytes / count,
        "down_wire_bytes_per_exchange": down.wire_bytes / count,
        "up_peak_bits_per_s": up.peak_bits_per_s,
        "down_peak_bits_per_s": down.peak_bits_per_s,
    }
    if cell.rate_mbit_per_s:
        bits = 8 * max(up.wire_bytes, down.wire_bytes) / count
        row["line_s_per_exchange"] = bits / (cell.rate_mbit_per_s * 1e6)
    if first.probes is not None and last.probes is not None:
        trips = probes[first.probes : last.probes]
        row["control_probes"] = len(trips)
        row["control_round_trip_s_p99"] = float(np.percentile(trips, 99)) if trips else None
    return row


def table(title: str, rows: Sequence[Row]) -> Table:
    """The cells of one line."""
    shown = Table(
        ("", "s/exchange", "p95", "bytes/rate", "MB up", "MB down", "peak Mbit/s", "cpu s",
         "control p99 ms"),
        title=title,
    )  # fmt: skip
    for row in rows:
        if "cpu_s_per_exchange" not in row:
            shown.add(row["name"], note=outcome(row))
            continue
        peak = max(row["up_peak_bits_per_s"], row["down_peak_bits_per_s"])
        p99_s = row.get("control_round_trip_s_p99")
        shown.add(
            row["name"],
            f"{row['exchange_s_median']:.3f}",
            f"{row['exchange_s_p95']:.3f}",
            f"{row['line_s_per_exchange']:.3f}" if "line_s_per_exchange" in row else "-",
            f"{row['up_wire_bytes_per_exchange'] / 1e6:.2f}",
            f"{row['down_wire_bytes_per_exchange'] / 1e6:.2f}",
            f"{peak / 1e6:.0f}",
            f"{row['cpu_s_per_exchange']:.2f}",
            "-" if p99_s is None else f"{1000 * p99_s:.0f}",
        )
    return shown
