"""Other systems on the line of `narrows bench wan`: scripts of one form in environments of theirs.

`PYTHON peer_scripts/NAME_exchange.py --rank R --world M --address HOST:PORT --params N
--exchanges K --warmup W --variant V [--coordinator]` prints a JSON line per exchange and rank:
rank, exchange, seconds, cpu_s.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from narrows.bench.lab import Lab
from narrows.bench.processes import Processes
from narrows.bench.wan_cells import WARM_UP, Cell
from narrows.proto.errors import ConfigError, NarrowsError

SCRIPTS: Final = Path(__file__).parent / "peer_scripts"
PORT: Final = 29500

COORDINATED: Final = frozenset({"torchft", "hivemind"})
"""They have a process that takes no part in the average; it runs at the hub."""

SETTLE_S: Final = 2.0
"""A coordinator gets so long to listen."""


def python_of(system: str) -> Path:
    """The interpreter of the system's environment, built if need be. Raises NarrowsError."""
    try:
        peers = importlib.import_module("narrows.bench.peer_envs")
    except ModuleNotFoundError:
        raise ConfigError(f"{system} has no environment here") from None
    environment = cast(Callable[[str], Path], peers.environment)
    return environment(system)


def why_not(cell: Cell) -> str:
    """Why a cell of another system cannot be run; "" if it can."""
    if cell.round_trip_ms:
        return "the delay comes from a proxy, which can stand in front of our three ports only"
    try:
        python_of(cell.system)
    except NarrowsError as error:
        return str(error)
    return ""


def run_peer(cell: Cell, lab: Lab, processes: Processes, limit_s: float) -> list[dict[str, Any]]:
    """Runs one cell; returns one dict per exchange: seconds of the slowest rank, cpu_s of all."""
    python = python_of(cell.system)
    coordinated = cell.system in COORDINATED
    host = lab.hub if coordinated else lab.learners[0]

    def command(rank: int) -> list[str]:
        return [
            "env", "GLOO_SOCKET_IFNAME=eth0",
            str(python), str(SCRIPTS / f"{cell.system}_exchange.py"),
            "--rank", str(rank), "--world", str(cell.learners),
            "--address", f"{host.address}:{PORT}", "--params", str(cell.params),
            "--exchanges", str(cell.exchanges), "--warmup", str(WARM_UP),
            "--variant", cell.variant,
        ]  # fmt: skip

    if coordinated:
        processes.launch("coordinator", [*lab.hub.under, *command(0), "--coordinator"])
        time.sleep(SETTLE_S)
    for rank, site in enumerate(lab.learners):
        processes.launch(site.name, [*site.under, *command(rank)])
    deadline = time.monotonic() + limit_s
    for site in lab.learners:
        processes.wait(site.name, max(1.0, deadline - time.monotonic()))
        processes.check(site.name)
    told = [row for site in lab.learners for row in _rows(processes, site.name)]
    exchanges = sorted({row["exchange"] for row in told})
    of_each = [[row for row in told if row["exchange"] == index] for index in exchanges]
    return [
        {
            "seconds": max(row["seconds"] for row in rows),
            "cpu_s": sum(row["cpu_s"] for row in rows),
        }
        for rows in of_each
    ]


def _rows(processes: Processes, name: str) -> list[dict[str, Any]]:
    text = (processes.folder / f"{name}.log").read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
