"""`narrows bench`: the commands that measure whole systems, ours and others; see commands."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.commands import bench, need_torch

commands = bench
"""All of them."""


@bench.command(name="bandwidth")
def bench_bandwidth(
    *, json: Path | None = None, plot: Path | None = None, wire: bool = True
) -> None:
    """Model the Gbit/s that a compute utilisation takes, beside the published table.

    Also what real runs put on the wire, model against measurement; about a minute.

    Parameters
    ----------
    json
        File for the rows.
    plot
        Picture of the model's cells against the published ones (needs the extra `bench`).
    wire
        Run broker and learners too; without it only the arithmetic, in seconds.
    """
    if wire:
        need_torch()
    from narrows.bench.bandwidth import run_bandwidth_bench

    run_bandwidth_bench(json, plot, wire=wire)


@bench.command(name="goodput")
def bench_goodput(
    *,
    rows: Path = Path("runs/goodput.jsonl"),
    json: Path | None = None,
    plot: Path | None = None,
    full: bool = False,
    short: bool = False,
    workers: int = 0,
) -> None:
    """Simulate the useful share of up to 2.4 million chips, each interrupted once a year.

    Failure tapes of two days on the real state machines in a simulation, and of three months on a
    model of what stalls whom, whose four constants are fitted to published figures: some ten
    minutes on two cores. What was interrupted goes on where it stopped.

    Parameters
    ----------
    rows
        File that gets one JSON line per cell; what is in it is not run again.
    json
        File for the cells: goodput and uptime in percent with 95% intervals.
    plot
        Picture of goodput by chips, and one of half an hour of failures beside it with
        -time-lines in its name (needs the extra `bench`).
    full
        Tapes of ten days on the state machines; takes five times as long.
    short
        Tapes of 20,000 s and no sweep: a minute; too short for their intervals to be trusted.
    workers
        Processes, one cell each at a time; 0: one per core.
    """
    from narrows.bench.goodput import run_goodput_bench

    run_goodput_bench(rows, json, plot, full=full, short=short, workers=workers)


@bench.command(name="chaos")
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
    from narrows.bench.chaos import run_chaos_bench
    from narrows.bench.chaos_run import ChaosOptions
    from narrows.proto.units import parse_duration_s

    every_s, down_max_s, step_s = map(parse_duration_s, (fault_every, down_max, step))
    run_chaos_bench(
        ChaosOptions(
            learners, seconds, every_s, down_max_s, broker_kills, step_s, params, seed, keep, json
        )
    )


@bench.command(name="wan")
def bench_wan(
    *,
    rows: Path = Path("runs/wan.jsonl"),
    json: Path | None = None,
    full: bool = False,
    short: bool = False,
    budget: bool = False,
    training: bool = False,
) -> None:
    """Measure exchanges over a line of a given rate and delay, beside other systems (root, Linux).

    Builds network namespaces whose links the kernel holds to a rate. About ten minutes on two
    cores, a day with --full. What was interrupted goes on where it stopped.

    Parameters
    ----------
    rows
        File that gets one JSON line per cell; what is in it is not run again.
    json
        File for the rows of this selection.
    full
        The whole grid: 10 Mbit/s to unlimited, 0 to 100 ms, 1 to 64 M parameters, 2 and 4 learners.
    short
        A few cells of the selection: two minutes.
    budget
        Instead: is the budget held on the wire and used, from 10 Mbit/s to 2 Gbit/s (30 minutes).
    training
        Instead: train over slow lines, beside data parallel over Gloo (20 minutes).
    """
    if budget:
        from narrows.bench.wan_budget import run_budget_bench

        run_budget_bench(rows, json, short=short)
    elif training:
        need_torch()
        from narrows.bench.wan_training import run_training_bench

        run_training_bench(rows, json, short=short)
    else:
        from narrows.bench.wan import run_wan_bench

        run_wan_bench(rows, json, full=full, short=short)


@bench.command(name="peers")
def bench_peers(
    *,
    rows: Path = Path("runs/peers.jsonl"),
    json: Path | None = None,
    members: int = 4,
    steps: int = 800,
    sync_steps: int = 20,
    preset: str = "nano",
    step_wait_s: float = 0.02,
    systems: str = "",
) -> None:
    """Measure other systems beside ours: loss, bytes, seconds, and what a SIGKILL does to them.

    Builds an environment for each other system once, in ~/.cache/narrows/peers or
    $NARROWS_PEER_CACHE; one that cannot be built is left out with the reason.

    Parameters
    ----------
    rows
        File that gets one JSON line per run; what is in it is not run again.
    json
        File for the rows of this selection.
    members
        Members of each run, besides the coordinator.
    steps
        Inner steps of each member.
    sync_steps
        H, inner steps between two exchanges; data parallel exchanges in every step.
    preset
        Size of the model, as for `narrows learner`.
    step_wait_s
        Seconds added to every inner step, so that few cores carry many members.
    systems
        Only these, separated by commas, such as "narrows,torchft" (default: all).
    """
    need_torch()
    from narrows.bench.peer_systems import Plan
    from narrows.bench.peers import run_peers_bench

    plan = Plan(members, steps, sync_steps, preset, step_wait_s)
    names = [name.strip() for name in systems.split(",") if name.strip()]
    run_peers_bench(rows, json, plan, systems=names)


@bench.command(name="report")
def bench_report(
    folder: Path = Path("docs/results"),
    *,
    html: Path | None = None,
    pictures: Path | None = None,
    readme: Path | None = None,
) -> None:
    """Put the JSON files of all benches on one page, beside published figures.

    A bench without a file is named on the page. Machine and commit of each file stand there, too.

    Parameters
    ----------
    folder
        Folder with what benches wrote with --json.
    html
        The page (default: runs/report.html).
    pictures
        Folder for the plots as SVG and PNG (needs the extra `bench`).
    readme
        Text file: the table of results between the comments "results" and "/results" is replaced.
    """
    from narrows.bench.report import run_report

    run_report(folder, html or Path("runs/report.html"), pictures, readme)


@bench.command(name="all")
def bench_all(*, folder: Path | None = None, full: bool = False) -> None:
    """Run a small selection of every bench, then the report: 20 minutes on two quiet cores.

    Each bench writes its JSON into the folder. What was interrupted goes on where it stopped; a
    bench that fails is told, the others run, and the command fails at the end.

    Parameters
    ----------
    folder
        For results, rows and report.html (default: runs/bench, with --full runs/bench-full).
    full
        What the documents report, and the demo with its baselines: half a day or more.
    """
    need_torch()
    from narrows.bench.everything import run_everything

    run_everything(folder or Path("runs/bench-full" if full else "runs/bench"), full=full)
