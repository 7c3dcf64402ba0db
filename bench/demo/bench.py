"""`narrows demo`: broker and learners as real processes, one killed and back, then a table."""

from __future__ import annotations

import io
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from narrows.bench.demo import results as demo_results
from narrows.bench.demo.keys import DemoKeys
from narrows.bench.demo.story import (
    PRESET,
    SYNC_PERIOD_STEPS,
    DemoOptions,
    DemoStory,
)
from narrows.bench.demo.view import View
from narrows.bench.kit import machine
from narrows.bench.kit.failures import ProcessFailed
from narrows.bench.kit.processes import Processes, work_folder
from narrows.broker.cli.status import ask_status
from narrows.broker.cli.tables import terminal
from narrows.broker.merging import warm_up
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.keys import SiteKey
from narrows.proto.messages import Phase, Status
from narrows.proto.quotas import STATUS

POLL_S = 0.25
"""Time between two looks at the run, without keys. A key has a quota of questions."""
END_TIMEOUT_S = 120.0


def run_demo(options: DemoOptions) -> None:
    """Runs the demo and prints the table. Raises NarrowsError if a process fails."""
    console = terminal()
    with work_folder(options.keep, "demo") as folder:
        console.print("Compiling the kernels (once per machine) ...")
        warm_up()
        story = DemoStory(victim=options.names[1])
        keys = DemoKeys(folder) if options.keys else None
        with Processes(folder) as processes:
            started = _start(options, processes, folder, keys)
            story.started_at = time.monotonic()
            with View(console, options, story, live=not options.plain) as view:
                _follow(options, processes, started, story, view)
            console.print("The run has ended; measuring the models ...")
            for name in [*options.names, "broker"]:
                processes.wait(name, END_TIMEOUT_S)
            processes.wait("alone", 10 * END_TIMEOUT_S)
            check_ended(processes, story, *options.names, "broker", "alone")
        results = demo_results.collect(options, story, folder)
        if options.baselines:
            steps = f"{results['learner_steps']:,} steps, as many as a learner made"
            console.print(f"Training data parallel for {steps} ...")
            results |= demo_results.data_parallel(options, results, say=console.print)
        machine.write_result(options.json, "demo", results)
        demo_results.show(console, results)
        if story.killed_at is None:
            console.print("The run was too short to kill a learner in it: --steps makes it longer.")
        if options.picture is not None:
            _draw(options, view, results, options.picture)


def check_ended(processes: Processes, story: DemoStory, *names: str) -> None:
    """Raises ProcessFailed if one of these processes has ended with a failure."""
    victim = story.victim
    if story.returned_at and story.live_at is None and processes.running[victim].poll():
        # Its own words would be of a broker that does not answer.
        why = f"the run ended before {victim} was back"
        raise ProcessFailed(victim, why, remedy="give it more --steps")
    processes.check(*names)


def _draw(options: DemoOptions, view: View, results: demo_results.Results, path: Path) -> None:
    """Writes an SVG of the display while a learner was dead, and of the last table."""
    paper = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    if view.moment is not None:
        paper.print(view.moment)
        paper.rule()
    demo_results.show(paper, results)
    paper.save_svg(str(path), title="make demo")


@dataclass(frozen=True)
class _Run:
    """The processes' run: its broker, its folder, and its keys if it has any."""

    address: str
    folder: Path
    keys: DemoKeys | None
    key: SiteKey | None
    """Key of the demo itself."""

    def status(self) -> Status:
        return ask_status(self.address, timeout_s=5.0, key=self.key)

    def start_learner(self, processes: Processes, name: str, *arguments: str) -> None:
        joins: tuple[str, ...] = ("--broker", self.address, "--name", name)
        if self.keys is not None:
            joins = ("--key", str(self.keys.file(name)))
        processes.start(
            name, "learner", *joins,
            "--preset", PRESET,
            "--events", str(self.folder / f"{name}.jsonl"),
            "--json", str(self.folder / f"{name}.json"),
            *arguments,
        )  # fmt: skip


def _start(options: DemoOptions, processes: Processes, folder: Path, keys: DemoKeys | None) -> _Run:
    """Starts broker and learners."""
    if keys is not None:
        keys.make(options.names)
    address = processes.start_broker(
        "--listen", "tcp://127.0.0.1:0",
        "--state-dir", str(folder / "broker"),
        "--events", str(folder / "broker.jsonl"),
        "--goal-tokens", str(options.goal_tokens),
        "--set", f"run.learners_at_start={options.learners}",
        "--set", f"fragments.sync_period_steps={SYNC_PERIOD_STEPS}",
        "--set", f"run.tokens_per_run_step={options.tokens_per_step * options.learners}",
        "--set", "broker.journal_keep=true",
        *(("--keys", str(keys.directory), "--founder", options.names[0]) if keys else ()),
    )  # fmt: skip
    run = _Run(address, folder, keys, keys.write(address) if keys else None)
    for name in options.names:
        recorder = options.record is not None and name == options.names[0]
        record = ("--record", str(options.record)) if recorder else ()
        run.start_learner(processes, name, *record)
    processes.start(
        "alone", "alone",
        "--steps", str(options.inner_steps),
        "--preset", PRESET,
        "--json", str(folder / "alone.json"),
        module="narrows.bench.quality.baselines",
    )  # fmt: skip
    return run


def _follow(
    options: DemoOptions,
    processes: Processes,
    run: _Run,
    story: DemoStory,
    view: View,
) -> None:
    """Watches the run to its end; kills the victim and brings it back on the way."""
    answered = time.monotonic()
    while True:
        processes.check(*options.names, "broker", but=story.victim)
        try:
            status = run.status()
        except BrokerUnreachable:
            if processes.running["broker"].poll() == 0:
                break
            if time.monotonic() - answered > END_TIMEOUT_S:
                raise
            continue  # It may be about to end: on a busy machine that takes a while.
        answered = now = time.monotonic()
        story.note(status, now)
        share = status.run_tokens / options.goal_tokens
        if story.is_to_kill(share, now):
            processes.kill(story.victim, signal.SIGKILL)
            story.killed_at = now
        if story.is_to_return(share, now):
            run.start_learner(processes, story.victim)
            story.returned_at = now
        view.update(status, _alone_progress(run.folder))
        if status.phase is Phase.ENDED:
            break
        time.sleep(POLL_S if run.key is None else 1 / STATUS.per_s)
    story.ended_at = time.monotonic()


def _alone_progress(folder: Path) -> dict[str, float]:
    """The newest progress line of the learner that trains alone."""
    path = folder / "alone.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except json.JSONDecodeError:
                continue  # The line is being written.
    return {}
