"""`narrows bench wan`: seconds per exchange over a line of a given rate and delay, beside others.

An exchange runs from the first snapshot to the last learner's last adoption, fragments pipelined;
no launch floor, no grace. Bytes are what the line's queues counted.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from narrows.bench import machine, wan_cells, wan_peers
from narrows.bench.lab import Lab, Meter, check_able, congestion_control
from narrows.bench.processes import Processes
from narrows.bench.rows import append_row, end_last_line, read_rows
from narrows.bench.wan_cells import WARM_UP, Cell, key_of, key_of_cell
from narrows.bench.wan_run import NarrowsRun
from narrows.proto.errors import NarrowsError

START_S: Final = 240.0
"""Beyond the exchanges themselves a cell may take so long: processes start, version 0 travels."""

TABLE_COLUMNS: Final = 150


def run_wan_bench(rows_file: Path, json_file: Path | None, *, full: bool) -> None:
    """Runs the cells that `rows_file` does not have, prints them, and writes what was asked for.

    Raises ConfigError without root. A cell that fails is told as such and run again next time.
    """
    check_able()
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    rows = run_cells(wan_cells.full() if full else wan_cells.small(), rows_file, console)
    for line in dict.fromkeys(row["line"] for row in rows):
        console.print(_table(line, [row for row in rows if row["line"] == line]))
    if json_file is not None:
        result = machine.describe() | {"bench": "wan", "rows": rows}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def run_cells(cells: Sequence[Cell], path: Path, console: Console) -> list[dict[str, Any]]:
    """The rows of all cells; those that `path` has already are not run again."""
    known = {key_of(row): row for row in read_rows(path) if "failed" not in row}
    end_last_line(path)
    for number, cell in enumerate(cells, 1):
        if key_of_cell(cell) in known:
            continue
        row = machine.describe() | asdict(cell) | {"line": cell.line} | run_cell(cell)
        known[key_of_cell(cell)] = row
        append_row(path, row)
        console.print(f"{number}/{len(cells)} {cell.line}: {cell.name}: {_outcome(row)}")
    return [known[key_of_cell(cell)] for cell in cells]


def run_cell(cell: Cell) -> dict[str, Any]:
    """Measures one cell, or says that it is computed, skipped or failed."""
    if cell.line_s > wan_cells.EXCHANGE_MAX_S:
        return {"computed": True, "exchange_s_median": cell.line_s}
    peer = cell.system != "narrows"
    if peer and (reason := wan_peers.why_not(cell)):
        return {"skipped": reason}
    limit_s = START_S + 4 * (cell.exchanges + WARM_UP) * max(cell.line_s, 1.0)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            lab = stack.enter_context(Lab(cell.learners, cell.rate_mbit_per_s * 1e6))
            processes = stack.enter_context(Processes(folder))
            watch = threading.Timer(limit_s, processes.stop_all)
            watch.start()
            stack.callback(watch.cancel)
            meter = stack.enter_context(lab.meter())
            told = (
                wan_peers.run_peer(cell, lab, processes, limit_s)
                if peer
                else NarrowsRun(cell, lab, processes).measure()
            )
            return _figures(cell, lab, meter, told)
    except NarrowsError as error:
        return {"failed": str(error)}


def _figures(cell: Cell, lab: Lab, meter: Meter, told: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [each["seconds"] for each in told]
    row: dict[str, Any] = {
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


def _outcome(row: dict[str, Any]) -> str:
    for word in ("failed", "skipped"):
        if word in row:
            return f"{word}: {row[word]}"
    if "computed" in row:
        return f"{row['exchange_s_median']:.0f} s (computed)"
    return f"{row['exchange_s_median']:.3f} s"


def _table(line: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=line, box=None, pad_edge=False)
    headings = ("", "s/exchange", "p95", "bytes/rate", "MB up", "MB down", "peak Mbit/s", "cpu s",
                "control p99 ms")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading))
    for row in rows:
        streams = f", {row['streams']} streams" if row["streams"] else ""
        name = f"{row['system']} {row['variant']}{streams}"
        if "cpu_s_per_exchange" not in row:
            table.add_row(name, _outcome(row))
            continue
        peak = max(row["up_peak_bits_per_s"], row["down_peak_bits_per_s"])
        p99_s = row.get("control_round_trip_s_p99")
        table.add_row(
            name,
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
