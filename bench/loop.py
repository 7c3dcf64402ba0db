"""`narrows bench loop`: rounds per second over loopback, and what a round costs at either end.

Two toys push as fast as the broker merges. CPU is read from the kernel by thread, and divided by
the parameters of the merged fragments: nanoseconds per parameter and round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from narrows.bench.kit.rows import Column, Row, bench
from narrows.bench.kit.run import PACKAGE, TENSORS, WIDTH, Run, Toy, thread_cpu_s
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
    package: str = PACKAGE


def loop(
    *,
    short: bool = False,
    json_: Annotated[Path | None, Parameter(name="--json")] = None,
    params: int = 1 << 24,
    package: str = PACKAGE,
) -> None:
    """Measure rounds per second, seconds per exchange, and CPU by stage at broker and learner.

    Parameters
    ----------
    short
        No limit and 1 Gbit/s only, 5 seconds each instead of 15.
    json_
        File for the rows.
    params
        Parameters of the model, a multiple of 4,096.
    package
        Python package whose broker and learner are measured.
    """
    if params < 1 or params % (FRAGMENTS * TENSORS * WIDTH):
        raise ConfigError("--params", expected="a multiple of 4096", got=str(params))
    rates = ("0", "1Gbit/s") if short else ("0", "1Gbit/s", "100Mbit/s")
    modes = ("decoupled", "diloco")
    seconds = 5.0 if short else 15.0
    cells = [Cell(mode, rate, params, seconds, package) for mode in modes for rate in rates]
    bench("loop", cells, measure, COLUMNS, headline, json=json_)


def measure(cell: Cell) -> Row:
    """One run of a broker and two toys; rates over `seconds` or longer, in whole rounds."""
    settings: dict[str, object] = {
        "run.learners_at_start": LEARNERS,
        "merge.quorum": LEARNERS,
        "run.mode": cell.mode,
    }
    if cell.mode == "decoupled":
        # A period far shorter than a round takes, so that a learner always has something to push.
        settings |= {"fragments.count": FRAGMENTS, "fragments.sync_period_steps": 4}
        settings |= {"fragments.overlap_steps": 1}
    else:
        settings |= {"fragments.sync_period_steps": 1}
    if BitRate.parse(cell.rate):
        settings |= {"wan.up": cell.rate, "wan.down": cell.rate}
    # In lockstep every push must say something everywhere, else codes would be mostly zeros.
    moved = 1 if cell.mode == "decoupled" else TENSORS
    toys = [Toy(f"toy-{index}", cell.params, moved=moved, seed=index) for index in range(LEARNERS)]
    fragments = FRAGMENTS if cell.mode == "decoupled" else 1
    with Run(package=cell.package) as run:
        run.broker(settings)
        for toy in toys:
            run.toy(toy)
        _await_rounds(run, ROUNDS_BEFORE * fragments)
        rounds, before = len(run.merges()), _look(run, toys)
        run.wait(cell.seconds)
        _await_rounds(run, rounds + fragments)
        merges, after = run.merges()[rounds:], _look(run, toys)
    spent = {key: after[key] - before[key] for key in before}
    return figures(merges, spent, fragments, cell.params)


def figures(
    merges: Sequence[dict[str, Any]], spent: dict[str, float], fragments: int, params: int
) -> Row:
    """Rates and costs of the rounds that were merged while `spent` was, see `_look`."""
    rounds, seconds = len(merges), spent["time_s"]
    pushes = sum(len(each["contributors"]) for each in merges)
    elements = rounds * params / fragments
    up = sum(_bytes_of(each, "pushed_bytes") for each in merges)
    down = LEARNERS * sum(_bytes_of(each, "published_bytes") for each in merges)
    row: Row = {
        "rounds_per_s": rounds / seconds,
        "exchange_s": seconds * fragments / rounds,
        "pushes_per_round": pushes / rounds,
        "payload_up_gbit_per_s": 8e-9 * up / seconds,
        "payload_down_gbit_per_s": 8e-9 * down / seconds,
    }
    ns = {key: 1e9 * value / elements for key, value in spent.items() if key.endswith("_cpu_s")}
    return row | {
        key.removesuffix("_cpu_s") + "_ns": value / (LEARNERS if "learner" in key else 1)
        for key, value in ns.items()
    }


def _bytes_of(merge: dict[str, Any], key: str) -> int:
    """Payload bytes of a merge; 0 for a package that does not tell them."""
    return int(merge.get(key, 0))


def headline(rows: Sequence[Row]) -> list[str]:
    """The first row of each mode: without a limit."""
    lines: list[str] = []
    for mode, what in (("decoupled", "free running"), ("diloco", "in lockstep")):
        mine = [row for row in rows if row["mode"] == mode]
        if mine:
            row = mine[0]
            broker = sum(row[f"broker_{each}_ns"] for each in ("loop", "workers", "zeromq"))
            learner = sum(
                row[f"learner_{each}_ns"] for each in ("training", "background", "zeromq")
            )
            lines.append(
                f"{what}: {row['rounds_per_s']:.1f} rounds/s, {row['exchange_s']:.3f} s per "
                f"exchange of {row['params'] / 1e6:.1f} M parameters; CPU ns per parameter and "
                f"round: broker {broker:.1f}, learner {learner:.1f}"
            )
    return lines


def _await_rounds(run: Run, count: int) -> None:
    run.wait_until(lambda: len(run.merges()) >= count, f"{count} rounds", *run.running)


def _look(run: Run, toys: Sequence[Toy]) -> dict[str, float]:
    """Time, and CPU seconds so far by stage; those of all learners together."""
    broker = thread_cpu_s(run.running["broker"].pid)
    learners = [thread_cpu_s(run.running[toy.name].pid) for toy in toys]
    return {
        "time_s": time.monotonic(),
        "broker_loop_cpu_s": broker["main"],
        "broker_workers_cpu_s": broker["others"],
        "broker_zeromq_cpu_s": broker["zeromq"],
        "learner_training_cpu_s": sum(run.facts(toy.name)["boundary_cpu_s"] for toy in toys),
        "learner_background_cpu_s": sum(each["others"] for each in learners),
        "learner_zeromq_cpu_s": sum(each["zeromq"] for each in learners),
    }
