"""`narrows bench wan`: seconds per exchange over a line of a given rate and delay, beside others.

An exchange runs from the first snapshot to the last learner's last adoption, fragments pipelined;
no launch floor, no grace. Bytes are what the line's queues counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from narrows.bench import machine, wan_cells, wan_peers
from narrows.bench.lab import Lab, Meter, check_able, congestion_control
from narrows.bench.rows import Row, outcome, run_missing
from narrows.bench.wan_cells import WARM_UP, Cell
from narrows.bench.wan_run import NarrowsRun, laboratory
from narrows.proto.errors import NarrowsError

TABLE_COLUMNS: Final = 150


def run_wan_bench(rows_file: Path, json_file: Path | None, *, full: bool) -> None:
    """Runs the cells that `rows_file` does not have, prints them, and writes what was asked for.

    Raises ConfigError without root. A cell that fails is told as such and run again next time.
    """
    check_able()
    cells = wan_cells.full() if full else wan_cells.small()
    console = wide_console()
    rows = run_missing(cells, rows_file, run_cell, console.print)
    for line in dict.fromkeys(row["line"] for row in rows):
        console.print(_table(line, [row for row in rows if row["line"] == line]))
    write_result(json_file, "wan", rows)


def wide_console() -> Console:
    """One whose tables are not folded when they go to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=TABLE_COLUMNS, highlight=False)


def write_result(path: Path | None, bench: str, rows: Sequence[Row]) -> None:
    """The rows as the JSON of a bench, if there is a `path`."""
    if path is not None:
        result = machine.describe() | {"bench": bench, "rows": list(rows)}
        path.write_text(json.dumps(result, indent=1) + "\n")


def run_cell(cell: Cell) -> Row:
    """Measures one cell, or says that it is computed, skipped or failed."""
    if cell.line_s > wan_cells.EXCHANGE_MAX_S:
        summary = f"{cell.line_s:.0f} s (computed)"
        return {"computed": True, "exchange_s_median": cell.line_s, "summary": summary}
    peer = cell.system != "narrows"
    if peer and (reason := wan_peers.why_not(cell)):
        return {"skipped": reason}
    limit_s = 4 * (cell.exchanges + WARM_UP) * max(cell.line_s, 1.0)
    lab = Lab(cell.learners, cell.rate_mbit_per_s * 1e6)
    try:
        with laboratory(lab, limit_s) as processes, lab.meter() as meter:
            if peer:
                told = wan_peers.run_peer(cell, lab, processes, limit_s)
            else:
                told = NarrowsRun(cell, lab, processes).measure()
            return _figures(cell, lab, meter, told)
    except NarrowsError as error:
        return {"failed": str(error)}


def _figures(cell: Cell, lab: Lab, meter: Meter, told: list[Row]) -> Row:
    seconds = [each["seconds"] for each in told]
    row: Row = {
        "summary": f"{np.median(seconds):.3f} s",
        "congestion_control": congestion_control(),
        "exchange_s": seconds,
        "exchange_s_median": float(np.median(seconds)),
        "exchange_s_p95": float(np.percentile(seconds, 95)),
        "cpu_s_per_exchange": float(np.mean([each["cpu_s"] for each in told])),
    }
    span = {}
    if "started_s" in told[0]:
        span = {"since_s": told[0]["started_s"] - 0.1, "until_s": told[-1]["ended_s"] + 0.2}
    up, down = (meter.rates(lab.learners[0].name, way, **span) for way in ("up", "down"))
    # The others say no times: their bytes are those of all exchanges, the first ones too.
    count = cell.exchanges if span else cell.exchanges + WARM_UP
    row |= {
        "up_wire_bytes_per_exchange": up.wire_bytes / count,
        "down_wire_bytes_per_exchange": down.wire_bytes / count,
        "up_peak_bits_per_s": up.peak_bits_per_s,
        "down_peak_bits_per_s": down.peak_bits_per_s,
    }
    if cell.rate_mbit_per_s:
        bits = 8 * max(up.wire_bytes, down.wire_bytes) / count
        row["line_s_per_exchange"] = bits / (cell.rate_mbit_per_s * 1e6)
    if "probes" in told[0]:
        trips = told[-1]["probes"][len(told[0]["probes"]) :]
        row["control_probes"] = len(trips)
        row["control_round_trip_s_p99"] = float(np.percentile(trips, 99)) if trips else None
    return row


def _table(line: str, rows: Sequence[Row]) -> Table:
    table = Table(title=line, box=None, pad_edge=False)
    headings = ("", "s/exchange", "p95", "bytes/rate", "MB up", "MB down", "peak Mbit/s", "cpu s",
                "control p99 ms")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading))
    for row in rows:
        if "cpu_s_per_exchange" not in row:
            table.add_row(row["name"], outcome(row))
            continue
        peak = max(row["up_peak_bits_per_s"], row["down_peak_bits_per_s"])
        p99_s = row.get("control_round_trip_s_p99")
        table.add_row(
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
    return table
