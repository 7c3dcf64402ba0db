"""`narrows bench loop`: rounds per second over loopback, and what a round costs at either end.

Two toys push as fast as the broker merges. The kernel tells the CPU time of each thread; divided by
the parameters of the merged fragments it gives nanoseconds per parameter and round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import HURRY, TENSORS, Deployment, Toy, thread_cpu_s
from narrows.proto.units import BitRate

LEARNERS: Final = 2
FRAGMENTS: Final = 4
NAME_BY_MODE: Final = {"decoupled": "free running", "diloco": "in lockstep"}
FRAGMENTS_BY_MODE: Final = {"decoupled": FRAGMENTS, "diloco": 1}
MOVED_BY_MODE: Final = {"decoupled": 1, "diloco": TENSORS}
"""Tensors that a step of a toy moves. In lockstep a push holds one step, which must say something
everywhere: else its codes would be mostly zeros."""
PACE_BY_MODE: Final[Mapping[str, Mapping[str, object]]] = {
    "decoupled": HURRY,
    "diloco": {"fragments.sync_period_steps": 1},
}

PARAMS: Final = 1 << 24
RATES: Final = ("0", "1Gbit/s", "100Mbit/s")
ROUNDS_BEFORE: Final = 2
"""Rounds of every fragment before the clock starts: by then first copies have arrived, and caches
are warm."""

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
class LoopCell:
    """A mode and the rate of each learner's line, in each direction."""

    mode: str
    """decoupled: four fragments, rounds overlap. diloco: the whole model at once, in lockstep."""
    rate: str
    """As it stands in a setting: "1Gbit/s"; "0": no limit."""
    params: int
    seconds: float
    """Time that is measured."""


def loop(*, short: Short = False, json: Json = None) -> None:
    """Measure rounds per second, seconds per exchange, and CPU by stage at broker and learner."""
    rates = RATES[:2] if short else RATES
    seconds = 5.0 if short else 15.0
    cells = [LoopCell(mode, rate, PARAMS, seconds) for mode in FRAGMENTS_BY_MODE for rate in rates]
    bench("loop", cells, measure, COLUMNS, headline, json=json)


def measure(cell: LoopCell) -> Row:
    """A run over loopback, whose learners keep to the rate by themselves."""
    settings = PACE_BY_MODE[cell.mode]
    if BitRate.parse(cell.rate):
        settings = {**settings, "wan.up": cell.rate, "wan.down": cell.rate}
    toy = Toy("toy", cell.params, moved=MOVED_BY_MODE[cell.mode])
    with Deployment() as run:
        return exchanging(run, cell.mode, settings, toy, cell.seconds)


def exchanging(
    run: Deployment, mode: str, settings: Mapping[str, object], toy: Toy, seconds: float
) -> Row:
    """Runs a broker and two such toys; returns rates over `seconds` or longer, in whole rounds."""
    fragments = FRAGMENTS_BY_MODE[mode]
    run.broker(
        {
            "run.learners_at_start": LEARNERS,
            "run.mode": mode,
            "merge.quorum": LEARNERS,
            "fragments.count": fragments,
            **settings,
        }
    )
    toys = run.toys(toy, LEARNERS)
    run.wait_merges(ROUNDS_BEFORE * fragments)

    first = len(run.merges())
    before = _spent(run, toys)
    began_s = time.monotonic()
    run.wait(seconds)
    # The clock ends with a round, as it began.
    run.wait_merges(max(first + fragments, len(run.merges()) + 1))
    merges = run.merges()[first:]
    after = _spent(run, toys)
    took_s = time.monotonic() - began_s

    rounds = len(merges)
    elements = rounds * toy.params / fragments
    pushed = sum(each["pushed_bytes"] for each in merges)
    published = LEARNERS * sum(each["published_bytes"] for each in merges)
    spent = {what: after[what] - before[what] for what in after}
    return {
        "rounds_per_s": rounds / took_s,
        "exchange_s": took_s * fragments / rounds,
        "steps_per_s": spent.pop("steps") / took_s,
        "pushes_per_round": sum(len(each["contributors"]) for each in merges) / rounds,
        "payload_up_gbit_per_s": 8e-9 * pushed / took_s,
        "payload_down_gbit_per_s": 8e-9 * published / took_s,
        **{f"{stage}_ns": 1e9 * cpu_s / elements for stage, cpu_s in spent.items()},
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """A line for the first row of each mode, the one without a limit."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["mode"], row)
    return [
        f"{NAME_BY_MODE[mode]}: {row['rounds_per_s']:.1f} rounds/s, {row['exchange_s']:.3f} s per"
        f" exchange of {row['params'] / 1e6:.1f} M parameters; CPU ns per parameter and round:"
        f" broker {_total(row, 'broker_'):.1f}, learner {_total(row, 'learner_'):.1f}"
        for mode, row in first.items()
    ]


def _total(row: Row, stages: str) -> float:
    """The sum of the values whose keys begin so."""
    return float(sum(value for key, value in row.items() if key.startswith(stages)))


def _spent(run: Deployment, toys: Sequence[str]) -> dict[str, float]:
    """CPU seconds so far by stage, and steps; a learner's figures are the mean of all learners."""
    broker = thread_cpu_s(run.running["broker"].pid)
    learners = [thread_cpu_s(run.running[name].pid) for name in toys]
    return {
        "broker_loop": broker["main"],
        "broker_workers": broker["others"],
        "broker_zeromq": broker["zeromq"],
        "learner_training": fmean(run.facts(name)["boundary_cpu_s"] for name in toys),
        "learner_background": fmean(each["others"] for each in learners),
        "learner_zeromq": fmean(each["zeromq"] for each in learners),
        "steps": fmean(map(run.steps, toys)),
    }
