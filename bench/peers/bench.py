"""`narrows bench peers`: other systems and Narrows train the same model; one process is killed.

Every line of the rows file is one run of one system. A run that is in the file is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from narrows.bench.kit import machine
from narrows.bench.kit.names import check_names
from narrows.bench.kit.rows import append_row, end_last_line, rows_by_key
from narrows.bench.peers.envs import PEERS, PeerAbsent, requirements
from narrows.bench.peers.run import EVENTS, run_event
from narrows.bench.peers.systems import PeerPlan
from narrows.broker.cli.tables import Table, show, terminal
from narrows.learner.reference.gpt import preset
from narrows.proto.errors import ConfigError, NarrowsError
from narrows.proto.units import format_bytes

SYSTEMS: Final = ("narrows", *PEERS)


def run_peers_bench(
    rows_file: Path, json_file: Path | None, plan: PeerPlan, *, systems: Sequence[str]
) -> None:
    """Runs the missing runs, prints a table, and writes the requested files.

    `systems` empty: all. Raises ConfigError for an unknown system, and for a plan that not every
    system can follow. A system that cannot be had, or does not start, gets a row with `skipped`,
    and is tried again the next time.
    """
    names = chosen(systems)
    check(plan)
    console = terminal()
    known = rows_by_key(rows_file, key_of)
    end_last_line(rows_file)
    rows: list[dict[str, Any]] = []
    for event in EVENTS:
        # Event by event, system after system: a drift of the machine hits all systems.
        for name in names:
            labels = {"system": name, "version": version_of(name), "event": event} | asdict(plan)
            row = known.get(key_of(labels))
            if row is None:
                try:
                    row = machine.describe() | labels | run_event(name, plan, event)
                    append_row(rows_file, row)
                except NarrowsError as error:
                    row = labels | {"skipped": str(error)}
                console.print(progress_line(row))
            rows.append(row)
    show(console, table_of(rows))
    machine.write_result(json_file, "peers", {"seed": 0, "rows": rows})


def chosen(systems: Sequence[str]) -> Sequence[str]:
    """These systems, or all. Raises ConfigError for an unknown one."""
    check_names("system", systems, SYSTEMS)
    return systems or SYSTEMS


def check(plan: PeerPlan) -> None:
    """Raises ConfigError for a plan that is not possible, before any environment is built."""
    preset(plan.preset)
    for flag, right, expected in (
        ("members", plan.members > 1, "2 or more: one of them is killed"),
        ("sync-steps", plan.sync_steps > 0, "1 or more"),
        ("step-wait-s", plan.step_wait_s >= 0, "0 or more"),
    ):
        if not right:
            raise ConfigError(f"--{flag} is out of range", expected=expected)
    if plan.steps < 1 or plan.steps % plan.sync_steps:
        raise ConfigError(
            "--steps is out of range",
            expected=f"a multiple of --sync-steps, {plan.sync_steps}",
            got=str(plan.steps),
        )


def version_of(name: str) -> str:
    """The pinned version of a system; "" for a system without pins of its own."""
    try:
        pins = requirements(name).read_text().splitlines()
    except PeerAbsent:
        return ""
    (pin,) = [line for line in pins if line.startswith(f"{name}==")]
    return pin.partition("==")[2]


def key_of(row: Mapping[str, Any]) -> str:
    """The key of a run: everything that makes it another run."""
    names = ("system", "version", "event", *PeerPlan.__dataclass_fields__)
    return json.dumps([row[name] for name in names])


def progress_line(row: Mapping[str, Any]) -> str:
    """One line of progress."""
    head = f"{row['system']}, {row['event']}: "
    if "skipped" in row:
        return f"{head}skipped: {row['skipped']}"
    loss = "no model" if row["loss"] is None else f"loss {row['loss']:.4f}"
    return f"{head}{loss}, {row['seconds']:.1f} s, {format_bytes(row['bytes'])}"


COLUMNS: Final = {
    "loss": "loss",
    "seconds": "s",
    "went_on": "went on",
    "recovered_after_s": "recovered after s",
    "rejoined_after_s": "all back after s",
    "longest_pause_s": "longest pause s",
}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Losses in nats per byte of validation text; bytes on the loopback interface."""
    table = Table(("system", "event", *COLUMNS.values(), "bytes"), keys=2)
    for row in rows:
        keys = f"{row['system']} {row['version']}".rstrip(), row["event"]
        if "skipped" in row:
            table.add(*keys, note=f"skipped: {row['skipped']}")
            continue
        cells = [_cell(row.get(name)) for name in COLUMNS]
        table.add(*keys, *cells, format_bytes(row["bytes"]), note=row["note"])
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
