"""`narrows bench loop`: rounds per second over loopback, and what a round costs at either end.

Two toys push as fast as the broker merges. CPU is read from the kernel by thread, and divided by
the parameters of the merged fragments: nanoseconds per parameter and round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import HURRY, TENSORS, WIDTH, Run, Toy, thread_cpu_s
from narrows.proto.errors import ConfigError
from narrows.proto.units import BitRate

LEARNERS: Final = 2
FRAGMENTS: Final = 4
ROUNDS_BEFORE: Final = 2
"""Rounds of every fragment before the clock starts: first copies and caches are over then."""

COLUMNS: Final = (
    Column("mode", "mode"),
    Column("rate", "rate"),
    Column("rounds/s", "rounds_per_s", "{:.2f}"),
    Column("s/exchange", "exchange_s", "{:.3f}"),
    Column("Gbit/s up", "payload_up_gbit_per_s", "{:.2f}"),
    Column("down", "payload_down_gbit_per_s", "{:.2f}"),
    Column("broker: loop", "broker_loop_ns", "{:.2f}"),
    Column("workers", "broker_workers_ns", "{:.2f}"),
    Column("zmq", "broker_zeromq_ns", "{:.2f}"),
    Column("learner: training", "learner_training_ns", "{:.2f}"),
    Column("other", "learner_background_ns", "{:.2f}"),
    Column("zmq", "learner_zeromq_ns", "{:.2f}"),
)
"""Costs by stage are CPU nanoseconds per parameter and round."""


@dataclass(frozen=True)
class Cell:
    """A mode and the rate of each learner's line, in each direction."""

    mode: str
    """decoupled: four fragments, rounds overlap. diloco: the whole model at once, in lockstep."""
    rate: str
    """As a setting: "1Gbit/s"; "0": no limit."""
    params: int
    seconds: float
    """Time that is measured."""


def loop(*, short: Short = False, json: Json = None, params: int = 1 << 24) -> None:
    """Measure rounds per second, seconds per exchange, and CPU by stage at broker and learner.

    Parameters
    ----------
    params
        Parameters of the model, a multiple of 4,096.
    """
    if params < 1 or params % (FRAGMENTS * TENSORS * WIDTH):
        raise ConfigError("--params", expected="a multiple of 4096", got=str(params))
    rates = ("0", "1Gbit/s") if short else ("0", "1Gbit/s", "100Mbit/s")
    modes = ("decoupled", "diloco")
    seconds = 5.0 if short else 15.0
    cells = [Cell(mode, rate, params, seconds) for mode in modes for rate in rates]
    bench("loop", cells, measure, COLUMNS, headline, json=json)


def measure(cell: Cell) -> Row:
    """One run of a broker and two toys; rates over `seconds` or longer, in whole rounds."""
    settings: dict[str, object] = {
        "run.learners_at_start": LEARNERS,
        "merge.quorum": LEARNERS,
        "run.mode": cell.mode,
    }
    if cell.mode == "decoupled":
        settings |= {"fragments.count": FRAGMENTS, **HURRY}
        fragments, moved = FRAGMENTS, 1
    else:  # In lockstep every push must say something everywhere, else codes would be mostly zeros.
        settings |= {"fragments.sync_period_steps": 1}
        fragments, moved = 1, TENSORS
    if BitRate.parse(cell.rate):
        settings |= {"wan.up": cell.rate, "wan.down": cell.rate}
    with Run() as run:
        run.broker(settings)
        toys = run.toys(Toy("toy", cell.params, moved=moved), LEARNERS)
        run.wait_merges(ROUNDS_BEFORE * fragments)
        first, before, began_s = len(run.merges()), _cpu_s(run, toys), time.monotonic()
        run.wait(cell.seconds)
        run.wait_merges(first + fragments)
        merges, after = run.merges()[first:], _cpu_s(run, toys)
        seconds = time.monotonic() - began_s
    rounds = len(merges)
    elements = rounds * cell.params / fragments
    pushed = sum(each["pushed_bytes"] for each in merges)
    published = LEARNERS * sum(each["published_bytes"] for each in merges)
    return {
        "rounds_per_s": rounds / seconds,
        "exchange_s": seconds * fragments / rounds,
        "pushes_per_round": sum(len(each["contributors"]) for each in merges) / rounds,
        "payload_up_gbit_per_s": 8e-9 * pushed / seconds,
        "payload_down_gbit_per_s": 8e-9 * published / seconds,
        **{f"{stage}_ns": 1e9 * (after[stage] - before[stage]) / elements for stage in after},
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """The first row of each mode: without a limit."""
    lines: list[str] = []
    for mode, what in (("decoupled", "free running"), ("diloco", "in lockstep")):
        for row in [each for each in rows if each["mode"] == mode][:1]:
            broker, learner = (
                sum(value for key, value in row.items() if key.startswith(who))
                for who in ("broker_", "learner_")
            )
            lines.append(
                f"{what}: {row['rounds_per_s']:.1f} rounds/s, {row['exchange_s']:.3f} s per "
                f"exchange of {row['params'] / 1e6:.1f} M parameters; CPU ns per parameter and "
                f"round: broker {broker:.1f}, learner {learner:.1f}"
            )
    return lines


def _cpu_s(run: Run, toys: Sequence[str]) -> dict[str, float]:
    """CPU seconds so far by stage; those of the learners are their mean."""
    broker = thread_cpu_s(run.running["broker"].pid)
    learners = [thread_cpu_s(run.running[toy].pid) for toy in toys]
    return {
        "broker_loop": broker["main"],
        "broker_workers": broker["others"],
        "broker_zeromq": broker["zeromq"],
        "learner_training": fmean(run.facts(toy)["boundary_cpu_s"] for toy in toys),
        "learner_background": fmean(each["others"] for each in learners),
        "learner_zeromq": fmean(each["zeromq"] for each in learners),
    }
