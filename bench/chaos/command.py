"""`narrows bench chaos`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_chaos(
    *,
    learners: int = 32,
    seconds: float = 600.0,
    fault_every: str = "29s",
    down_max: str = "60s",
    broker_kills: int = 0,
    step: str = "500ms",
    params: int = 1 << 17,
    seed: int = 0,
    keep: Path | None = None,
    json: Path | None = None,
) -> None:
    """Kill, stop and cut off learner processes on a schedule; measure what that costs (Linux).

    Inner steps are timed waits, so that two cores carry 32 learners; broker, exchange, journal
    and failures are real. A quiet fifth of the time comes first: its throughput is 100%.

    Parameters
    ----------
    learners
        Number of learner processes, at most 254.
    seconds
        How long faults go on.
    fault_every
        A duration: one learner fails in each.
    down_max
        No fault lasts longer; without this limit a killed learner is started again after 5 to 20
        seconds, one that is stopped or cut off is let go after 5 to 60.
    broker_kills
        So many times the broker is killed as well.
    step
        Duration of an inner step.
    params
        Parameters of the model; a multiple of 16,384.
    seed
        Another tape of faults.
    keep
        Folder for logs, events, journal (default: a temporary one).
    json
        File for the result.
    """
    need_torch()
    from narrows.bench.chaos.bench import run_chaos_bench
    from narrows.bench.chaos.run import ChaosOptions
    from narrows.proto.units import parse_duration_s

    every_s, down_max_s, step_s = map(parse_duration_s, (fault_every, down_max, step))
    run_chaos_bench(
        ChaosOptions(
            learners, seconds, every_s, down_max_s, broker_kills, step_s, params, seed, keep, json
        )
    )
