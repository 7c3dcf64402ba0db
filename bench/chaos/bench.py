"""`narrows bench chaos`: learners killed, stopped and cut off on a schedule, and the cost of it."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console

from narrows.bench.chaos import results as chaos_results
from narrows.bench.chaos.results import ChaosStory
from narrows.bench.chaos.run import FRAGMENTS, HOST, ChaosOptions, Run
from narrows.bench.kit import machine
from narrows.bench.kit.nursery import Nursery
from narrows.bench.kit.processes import Processes, free_ports, work_folder
from narrows.bench.kit.proxy import Proxy
from narrows.bench.loop.bench import TENSORS, WIDTH
from narrows.broker.cli.tables import terminal
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError

QUIET_SHARE: Final = 0.2
"""Length of the quiet time before the faults, as a share of the time with faults. Its throughput is
the 100%."""

PARAMS_UNIT: Final = TENSORS * WIDTH
LEARNERS_MAX: Final = 254
"""Limit of the loopback addresses: the learners' proxies listen at 127.77.0.1 and following."""

OUTPUTS: Final = ("keep", "json")
"""Options that do not change the run."""


def run_chaos_bench(options: ChaosOptions) -> None:
    """Runs broker and learners, plays the tape of faults, prints, and writes the requested files.

    Raises NarrowsError if something was lost, differs, or did not come back.
    """
    _check(options)
    console = terminal()
    with work_folder(options.keep, "chaos") as folder:
        story = _run(options, folder, console)
        row = chaos_results.collect(folder, story, fragments=FRAGMENTS)
    chaos_results.show(console, row)
    settings = {key: value for key, value in asdict(options).items() if key not in OUTPUTS}
    result = {"seed": options.seed, "settings": settings, "rows": [row]}
    machine.write_result(options.json, "chaos", result)
    harm = row["problems"] or row["digests_different"] or row["versions_lost"]
    if harm or not row["replay_equal"]:
        raise NarrowsError(
            ErrorCode.MISUSE,
            "the run did not come through its faults unharmed",
            remedy="run it again with --keep FOLDER and look at the logs",
        )


def _check(options: ChaosOptions) -> None:
    """Raises ConfigError for a run that is not possible."""
    if platform.system() != "Linux":
        raise ConfigError(
            "this bench needs Linux",
            expected="a machine to which all of 127.0.0.0/8 belongs",
            got=platform.system(),
        )
    for key, right, expected in (
        ("learners", 1 <= options.learners <= LEARNERS_MAX, f"1 to {LEARNERS_MAX}"),
        (
            "params",
            options.params > 0 and options.params % PARAMS_UNIT == 0,
            f"a multiple of {PARAMS_UNIT}",
        ),
        ("seconds", options.seconds > 0, "more than 0"),
        ("fault-every", options.fault_every_s > 0, "more than 0 s"),
        ("down-max", options.down_max_s > 0, "more than 0 s"),
        ("broker-kills", options.broker_kills >= 0, "0 or more"),
        ("step", options.step_s > 0, "more than 0 s"),
    ):
        if not right:
            raise ConfigError(f"--{key} is out of range", expected=expected)


def _run(options: ChaosOptions, folder: Path, console: Console) -> ChaosStory:
    names = tuple(f"learner-{index:02d}" for index in range(options.learners))
    # One loopback address per learner: a Welcome names the data ports, not the host.
    port = free_ports()
    ports = (port, port + 1, port + 2)
    lines = {name: Proxy(f"127.77.0.{index + 1}", HOST, ports) for index, name in enumerate(names)}
    nursery = Nursery(
        folder, "narrows.bench.chaos.learner",
        str(folder), str(options.params), str(options.step_s),
    )  # fmt: skip
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder))
        for proxy in lines.values():
            stack.enter_context(proxy)
        stack.enter_context(nursery)
        run = Run(options, folder, console, processes, lines, nursery, port)
        run.join()
        run.story.quiet = run.watch("quiet", options.seconds * QUIET_SHARE)
        run.story.chaos = run.watch("faults", options.seconds, run.tape())
        run.heal()
        run.end()
    return run.story
