"""Other systems on the line of `narrows bench wan`: uniform scripts in their own environments.

`PYTHON scripts/NAME_exchange.py --rank R --world M --address HOST:PORT --params N --exchanges K
--warmup W --variant V [--coordinator]` prints a JSON line per exchange and rank: rank, exchange,
seconds, cpu_s. The coordinator takes no part in the average; it runs at the hub.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from narrows.bench.peers import envs as peer_envs
from narrows.bench.wan.cells import WARM_UP, WanCell
from narrows.bench.wan.run import ExchangeTimes, ShapedLine, SiteProcesses
from narrows.proto.errors import NarrowsError

PORT: Final = 29500
ENVIRONMENTS: Final = {"ddp_gloo": "ddp", "torchft": "torchft", "hivemind": "hivemind"}


def python_of(system: str) -> Path:
    """The interpreter of the system's environment, which is built if it is missing. Raises
    NarrowsError."""
    return peer_envs.environment(ENVIRONMENTS[system])


def why_not(cell: WanCell) -> str:
    """Reason why a cell of another system cannot be run; "" if it can."""
    if cell.round_trip_ms:
        return "the delay comes from a proxy, which can stand in front of our three ports only"
    try:
        python_of(cell.system)
    except NarrowsError as error:
        return str(error)
    return ""


def run_peer(cell: WanCell, line: ShapedLine, limit_s: float) -> list[ExchangeTimes]:
    """Runs one cell: seconds of the slowest member, processor seconds of all members."""

    def command(rank: int) -> list[str]:
        return [
            str(python_of(cell.system)), str(peer_envs.SCRIPTS / f"{cell.system}_exchange.py"),
            "--rank", str(rank), "--world", str(cell.learners),
            "--address", f"{line.lab.hub.address}:{PORT}", "--params", str(cell.params),
            "--exchanges", str(cell.exchanges), "--warmup", str(WARM_UP),
            "--variant", cell.variant,
        ]  # fmt: skip

    line.hub.start_command("coordinator", *command(0), "--coordinator")
    for rank, (site, processes) in enumerate(line.learners):
        processes.start_command(site.name, *command(rank))
    deadline = time.monotonic() + limit_s
    for site, processes in line.learners:
        processes.wait(site.name, max(1.0, deadline - time.monotonic()))
        processes.check(site.name)
    rows = [row for site, processes in line.learners for row in _rows(processes, site.name)]
    of_each = [[row for row in rows if row["exchange"] == i] for i in range(cell.exchanges)]
    return [
        ExchangeTimes(max(row["seconds"] for row in rows), sum(row["cpu_s"] for row in rows))
        for rows in of_each
    ]


def _rows(processes: SiteProcesses, name: str) -> list[dict[str, Any]]:
    text = (processes.folder / f"{name}.log").read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
