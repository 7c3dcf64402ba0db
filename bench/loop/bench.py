"""`narrows bench loop`: the whole exchange on loopback without a budget, at full speed."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from narrows.bench.kit import machine
from narrows.bench.kit.processes import Processes, work_folder
from narrows.bench.kit.site_keys import SiteKeys
from narrows.broker.cli.status import ask_status
from narrows.broker.cli.tables import Facts, show, terminal
from narrows.learner.transport import Client, ClientOptions
from narrows.proto.codec import F32
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.fragments import Fragment
from narrows.proto.keys import SiteKey, read_site_key
from narrows.proto.messages import LayoutEntry

TENSORS: Final = 16
WIDTH: Final = 1024
FRAGMENTS: Final = 4
STEP_S: Final = 0.002
"""Length of an inner step, which does nothing: only the exchange should take time."""

OPERATOR: Final = "bench"
"""Name of the key with which the bench reads the status."""

TOKENS_PER_STEP: Final = 1000
DRIFT: Final = np.float32(1e-3)


@dataclass(frozen=True)
class LoopResult:
    """Rates over the time in which all learners took part. Wire bytes are payloads and headers."""

    learners: int
    params: int
    seconds: float
    rounds_per_s: float
    params_merged_per_s: float
    """Parameters of merged fragments, not multiplied by the learners."""
    contributors_per_merge: float
    up_gbit_per_s: float
    down_gbit_per_s: float
    broker_cores: float
    """CPU seconds per second of the broker process."""
    learner_cores: float
    """The same of one learner, on average."""
    broker_gbit_per_core_s: float
    """Gbit per second of a core, both directions together."""
    learner_gbit_per_core_s: float


def run_loop_bench(
    *, learners: int, params: int, seconds: float, json_file: Path | None, keys: bool = False
) -> None:
    """Runs broker and learners as processes, prints, and writes the requested files."""
    with work_folder(None, "loop") as folder, Processes(folder) as processes:
        result = _measured(processes, learners, params, seconds, keys=keys)
    show(terminal(), facts(result))
    machine.write_result(json_file, "loop", asdict(result))


def facts(result: LoopResult) -> Facts:
    """Every figure with its name."""
    shown = Facts()
    for name, value in asdict(result).items():
        shown.add(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    return shown


def _measured(
    processes: Processes, learners: int, params: int, seconds: float, *, keys: bool
) -> LoopResult:
    names = [f"learner-{index}" for index in range(learners)]
    made = SiteKeys.make(processes.folder / "keys", (*names, OPERATOR)) if keys else None
    secure = ("--keys", str(made.directory), "--founder", names[0]) if made else ()
    address = processes.start_broker(
        "--listen", "tcp://127.0.0.1:0",
        "--state-dir", str(processes.folder / "state"),
        "--set", f"run.learners_at_start={learners}",
        "--set", f"merge.quorum={learners}",
        "--set", f"fragments.count={FRAGMENTS}",
        "--set", "fragments.sync_period_steps=4",
        "--set", "broker.checkpoint_versions=1000000",
        *secure,
    )  # fmt: skip
    own = read_site_key(made.write(OPERATOR, address)) if made else None
    for name in names:
        key_file = str(made.write(name, address)) if made else ""
        summary = str(processes.folder / f"{name}.json")
        processes.start(
            name, address, name, str(params), str(seconds), summary, key_file,
            module="narrows.bench.loop.bench",
        )  # fmt: skip
    # Only once all have joined: founding and joining move whole states.
    for name in names:
        _wait_for(processes.folder / f"{name}.joined", processes, name)
    before, before_s = ask_status(address, timeout_s=10, key=own), time.monotonic()
    broker_before_s = cpu_s_of(processes.running["broker"].pid)
    for name in names:
        processes.wait(name, seconds + 120)
    processes.check(*names)
    status = ask_status(address, timeout_s=10, key=own)
    span_s = time.monotonic() - before_s
    broker_s = cpu_s_of(processes.running["broker"].pid) - broker_before_s
    summaries = [json.loads((processes.folder / f"{name}.json").read_text()) for name in names]
    learner_s = sum(each["cpu_s"] for each in summaries) / learners
    merges = status.merges - before.merges
    up_bits, down_bits = (
        8 * (getattr(status, name) - getattr(before, name)) for name in ("up_bytes", "down_bytes")
    )
    return LoopResult(
        learners,
        params,
        span_s,
        merges / span_s,
        merges * params / FRAGMENTS / span_s,
        status.mean_contributors_per_merge,
        up_bits / span_s / 1e9,
        down_bits / span_s / 1e9,
        broker_s / span_s,
        learner_s / span_s,
        (up_bits + down_bits) / broker_s / 1e9,
        (up_bits + down_bits) / learners / learner_s / 1e9,
    )


def _wait_for(path: Path, processes: Processes, name: str) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        processes.check(name)
        if time.monotonic() > deadline:
            raise BrokerUnreachable(f"{name} has not joined within 120 s")
        time.sleep(0.05)


def cpu_s_of(pid: int) -> float:
    """User and system time of a running process, since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Drift:
    """Parameters that move a little between adoption and snapshot, tensors one after another."""

    def __init__(self, layout: tuple[LayoutEntry, ...]) -> None:
        sizes = [math.prod(entry.shape) for entry in layout]
        elements = sum(sizes)
        rng = np.random.default_rng(os.getpid())
        self._noise = DRIFT * rng.standard_normal(elements, np.float32)
        self._x = np.zeros(elements, np.float32)
        self._first = [*accumulate(sizes, initial=0)]

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """See ParameterHost."""
        for piece in fragment.pieces:
            first = self._first[piece.tensor] + piece.start
            place = slice(first, first + piece.count)
            own = slice(piece.offset, piece.offset + piece.count)
            np.subtract(self._x[place], self._noise[place], out=out[own])

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """See ParameterHost."""
        for piece in fragment.pieces:
            place = self._first[piece.tensor] + piece.start
            own = slice(piece.offset, piece.offset + piece.count)
            self._x[place : place + piece.count] = values[own]


def layout_of(params: int) -> tuple[LayoutEntry, ...]:
    """Matrices of WIDTH columns with `params` elements in all: a multiple of TENSORS * WIDTH."""
    shape = (params // TENSORS // WIDTH, WIDTH)
    return tuple(LayoutEntry(f"t{i}", shape, "float32", "rda") for i in range(TENSORS))


def work(
    address: str, name: str, params: int, seconds: float, summary: Path, key: SiteKey | None
) -> None:
    """One learner: steps that do nothing, until the time is over or the broker is gone."""
    layout = layout_of(params)
    learner = Client(
        ClientOptions(
            broker=address,
            name=name,
            layout=layout,
            frozen_digest=0,
            host=Drift(layout),
            key=key,
        )
    )
    try:
        learner.start()
        summary.with_suffix(".joined").touch()
        started, cpu_s = time.monotonic(), time.process_time()
        while time.monotonic() < started + seconds:
            time.sleep(STEP_S)
            learner.boundary(TOKENS_PER_STEP, 1.0)
        result = {
            "seconds": time.monotonic() - started,
            "cpu_s": time.process_time() - cpu_s,
        }
        summary.write_text(json.dumps(result))
        learner.abort()  # Not `finish`: the others may leave before the last round has its quorum.
    except BrokerUnreachable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    own_key = read_site_key(Path(sys.argv[6])) if sys.argv[6] else None
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]), own_key)
