"""`narrows bench wan --training`: the reference worker over slow lines, beside data parallel.

Model, text, inner optimizer and tokens per learner and step are the same. Data parallel is torch's
over Gloo, float32 and with its bfloat16 hook. r is its communication time over its compute time:
where r is 19, a system with free communication is 20 times as fast.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from narrows.bench.kit import machine
from narrows.bench.kit.cells import Row, outcome, run_missing
from narrows.bench.kit.failures import ProcessFailed
from narrows.bench.kit.lab import Lab, check_able, congestion_control
from narrows.bench.kit.site_keys import SiteKeys
from narrows.bench.wan.run import PORT, ShapedLine, SiteProcesses, line
from narrows.broker.cli.tables import Table, show, terminal
from narrows.learner.reference.gpt import preset
from narrows.proto.errors import NarrowsError

LEARNERS: Final = 2
TOKENS_PER_STEP: Final = 1024
"""Tokens per step of each learner."""

TRAIN_S: Final = 60.0
END_S: Final = 120.0
"""Time to leave and to evaluate the model."""

RATES_MBIT_PER_S: Final = (20.0, 100.0, 1000.0, 0.0)
SHORT_S: Final = 10.0
SHORT_MBIT_PER_S: Final = (20.0, 0.0)
SYSTEMS: Final = ("narrows", "ddp f32", "ddp bf16")


@dataclass(frozen=True)
class TrainingCell:
    """One system on one line."""

    system: str
    rate_mbit_per_s: float
    """Rate of each link and direction; 0: unlimited."""
    model: str = "tiny"
    seconds: float = TRAIN_S

    @property
    def name(self) -> str:
        return self.system

    @property
    def line(self) -> str:
        rate = f"{self.rate_mbit_per_s:g} Mbit/s" if self.rate_mbit_per_s else "unlimited"
        return f"{self.model}, {LEARNERS} learners, {self.seconds:g} s, {rate}"

    @property
    def batch(self) -> int:
        """Windows per learner and step."""
        return max(1, TOKENS_PER_STEP // preset(self.model).context)


def run_training_bench(rows_file: Path, json_file: Path | None, *, short: bool) -> None:
    """Runs the cells that `rows_file` does not have, prints the table. Raises ConfigError.

    `short`: two of the lines, SHORT_S instead of TRAIN_S.
    """
    check_able()
    console = terminal()
    rates, seconds = (SHORT_MBIT_PER_S, SHORT_S) if short else (RATES_MBIT_PER_S, TRAIN_S)
    cells = [TrainingCell(system, rate, seconds=seconds) for rate in rates for system in SYSTEMS]
    rows = compared(run_missing(cells, rows_file, run_cell, console.print))
    show(console, table(rows))
    machine.write_result(json_file, "wan-training", {"rows": rows})


def run_cell(cell: TrainingCell) -> Row:
    """Trains for the cell's time; tokens per second of all learners, loss of the first one."""
    lab = Lab(LEARNERS, cell.rate_mbit_per_s * 1e6)
    run = _run_narrows if cell.system == "narrows" else _run_ddp
    try:
        with line(lab, cell.seconds + END_S) as at, lab.meter() as meter:
            summaries = run(cell, at)
            up = meter.rates("l0", "up")
    except NarrowsError as error:
        return {"failed": f"{cell.system}: {error}"}
    loop_s = fmean(each["loop_s"] for each in summaries)
    row: Row = {
        "congestion_control": congestion_control(),
        "parameters": summaries[0]["parameters"],
        "steps": summaries[0]["steps"],
        "tokens_per_s": sum(each["tokens_per_s"] for each in summaries),
        "validation_loss": summaries[0]["validation_loss"],
        "up_wire_bytes_per_step": up.wire_bytes / summaries[0]["steps"],
    }
    if "compute_s_per_step" in summaries[0]:
        compute_s = fmean(each["compute_s_per_step"] for each in summaries)
        row["compute_s_per_step"] = compute_s
        row["communication_over_compute"] = loop_s / summaries[0]["steps"] / compute_s - 1
    row["summary"] = f"{row['tokens_per_s']:,.0f} tokens/s, loss {row['validation_loss']:.3f}"
    return row


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with their references: Narrows without limit, data parallel beside it."""
    by_line = {(row["name"], row["cell"]["rate_mbit_per_s"]): row for row in rows}
    return [row | _ratios(row, by_line) for row in rows]


def _ratios(row: Row, by_line: Mapping[tuple[str, float], Row]) -> Row:
    rate = row["cell"]["rate_mbit_per_s"]
    unlimited, parallel = by_line.get(("narrows", 0.0), {}), by_line.get(("ddp f32", rate), {})
    if row["name"] != "narrows" or any("tokens_per_s" not in r for r in (row, unlimited, parallel)):
        return {}
    times = row["tokens_per_s"] / parallel["tokens_per_s"]
    r = parallel["communication_over_compute"]
    return {
        "of_its_own_unlimited_rate": row["tokens_per_s"] / unlimited["tokens_per_s"],
        "times_data_parallel": times,
        "times_data_parallel_over_1_plus_r": times / (1 + r),
    }


def _run_narrows(cell: TrainingCell, at: ShapedLine) -> list[dict[str, Any]]:
    keys = SiteKeys.make(at.hub.folder / "keys", [site.name for site, _ in at.learners])
    broker = at.hub.start_broker(
        "--listen", f"tcp://{at.lab.hub.address}:{PORT}", "--keys", str(keys.directory),
        "--founder", at.learners[0][0].name,
        "--state-dir", str(at.hub.folder / "state"),
        "--set", f"run.learners_at_start={LEARNERS}",
        "--set", f"run.tokens_per_run_step={TOKENS_PER_STEP * LEARNERS}",
    )  # fmt: skip
    for site, processes in at.learners:
        processes.start(
            site.name, "learner", "--key", str(keys.write(site.name, broker)),
            "--preset", cell.model, "--batch", str(cell.batch),
            "--json", str(processes.folder / f"{site.name}.json"),
        )  # fmt: skip
    for site, processes in at.learners:
        _await_text(processes, site.name, ": step ")
    time.sleep(cell.seconds)
    for site, processes in at.learners:
        processes.kill(site.name, signal.SIGTERM)
    return _summaries(at)


def _run_ddp(cell: TrainingCell, at: ShapedLine) -> list[dict[str, Any]]:
    for rank, (site, processes) in enumerate(at.learners):
        processes.start_command(
            site.name, "env", "GLOO_SOCKET_IFNAME=eth0",
            sys.executable, "-m", "narrows.bench.wan.ddp_train",
            "--rank", str(rank), "--world", str(LEARNERS),
            "--address", f"{at.lab.learners[0].address}:{PORT}", "--model", cell.model,
            "--batch", str(cell.batch), "--seconds", str(cell.seconds),
            "--gradients", cell.system.split()[1],
            "--json-file", str(processes.folder / f"{site.name}.json"),
        )  # fmt: skip
    return _summaries(at)


def _summaries(at: ShapedLine) -> list[dict[str, Any]]:
    for site, processes in at.learners:
        processes.wait(site.name, TRAIN_S + 2 * END_S)
        processes.check(site.name)
    return [json.loads((at.hub.folder / f"{s.name}.json").read_text()) for s, _ in at.learners]


def _await_text(processes: SiteProcesses, name: str, text: str) -> None:
    path = processes.folder / f"{name}.log"
    while text not in path.read_text():
        if processes.running[name].poll() is not None:
            said = processes.reason(name)
            raise ProcessFailed(name, f"{name} ended before its first step: {said}")
        time.sleep(0.1)


def table(rows: Sequence[Row]) -> Table:
    """A table of all lines and systems."""
    headings = (
        "line", "system", "tokens/s", "loss", "kB up/step", "r", "of unlimited", "x data parallel",
    )  # fmt: skip
    shown = Table(headings, keys=2)
    for row in rows:
        if "tokens_per_s" not in row:
            shown.add(row["line"], row["name"], note=outcome(row))
            continue

        def share(key: str, row: Row = row) -> str:
            return f"{row[key]:.2f}" if key in row else "-"

        shown.add(
            row["line"],
            row["name"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['validation_loss']:.3f}",
            f"{row['up_wire_bytes_per_step'] / 1e3:,.0f}",
            share("communication_over_compute"),
            share("of_its_own_unlimited_rate"),
            share("times_data_parallel"),
        )
    return shown
