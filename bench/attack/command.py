"""`narrows bench attack`: its commands and options. What they need is loaded when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from narrows.bench.kit.torch_needed import need_torch

bench_attack = cyclopts.App(
    name="attack", help="Attack a run on the wire and through its gradients, and measure the cost."
)


@bench_attack.command
def wire(
    *,
    attack: Annotated[list[str], Parameter(negative="")] | None = None,
    seconds: float = 60.0,
    params: int = 1 << 16,
    step: str = "50ms",
    setting: Annotated[list[str], Parameter(name=["--set", "-s"], negative="")] | None = None,
    keep: Path | None = None,
    json: Path | None = None,
) -> None:
    """Attack a broker with keys that two honest learners use; measure what the run loses.

    Inner steps are timed waits, so that two cores carry all; broker, exchange, journal and
    attackers are real. Exit code 1 if an attack got further than it should.

    Parameters
    ----------
    attack
        An attack by its name (default: all); repeatable.
    seconds
        Duration of each attack. The time before and after it is measured as well.
    params
        Parameters of the model; a multiple of 16,384.
    step
        Duration of an inner step.
    setting
        A setting of the broker as KEY=VALUE, such as run.mode=diloco; repeatable.
    keep
        Folder for logs, events, journal (default: a temporary one).
    json
        File for the result.
    """
    need_torch()
    from narrows.bench.attack.stage import Scene
    from narrows.bench.attack.wire import run_wire
    from narrows.proto.units import parse_duration_s

    scene = Scene(params, parse_duration_s(step), tuple(setting or ()))
    if not run_wire(attack or (), seconds=seconds, scene=scene, keep=keep, json_file=json):
        sys.exit(1)


@bench_attack.command
def revoke(
    *, seconds: float = 20.0, params: int = 1 << 16, step: str = "50ms", json: Path | None = None
) -> None:
    """Revoke the key of one of three learners; measure when it is cut, and what the others lose.

    Parameters
    ----------
    seconds
        Time that is watched before the revocation, and after it.
    params
        Parameters of the model; a multiple of 16,384.
    step
        Duration of an inner step.
    json
        File for the result.
    """
    need_torch()
    from narrows.bench.attack.revocation import run_revocation
    from narrows.bench.attack.stage import Scene
    from narrows.proto.units import parse_duration_s

    scene = Scene(params, parse_duration_s(step))
    if not run_revocation(seconds=seconds, scene=scene, json_file=json):
        sys.exit(1)


@bench_attack.command
def poison(
    *,
    rows: Path = Path("runs/attack-poison.jsonl"),
    json: Path | None = None,
    steps: int = 300,
    seeds: tuple[int, ...] = (12, 13),
    groups: tuple[str, ...] = (),
    workers: int = 1,
) -> None:
    """Measure the loss that a learner with poisoned pushes costs, and how soon it is named.

    Small models are trained in one process; the merge is the real one. About 15 seconds a run.

    Parameters
    ----------
    rows
        File that each run is added to. A run that it has is not repeated.
    json
        File for the table.
    steps
        Steps of a run.
    seeds
        Seeds of the runs.
    groups
        Only these groups: attacks, robust, tokens, unequal.
    workers
        Processes.
    """
    need_torch()
    from narrows.bench.attack.poison import run_poison_bench

    run_poison_bench(rows, json, steps=steps, seeds=seeds, groups=groups, workers=workers)
