"""`narrows demo`: real processes train one model; one of them is killed on the way and returns.

The demo starts them as a user would, asks the broker for its status, and in the end reads what they
leave: events, and the summary of each learner.
"""

from __future__ import annotations

import io
import itertools
import json as json_text
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, Self, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrows.bench.reference.worker import need_torch
from narrows.broker.cli.status import ask_status
from narrows.proto.errors import BrokerUnreachable, ConfigError, ErrorCode, NarrowsError

PRESET: Final = "tiny"
STEP_TOKENS: Final = 4 * 64
"""Tokens of an inner step of one learner: batch and context of the preset."""
SYNC_PERIOD_STEPS: Final = 16

KILL_AT: Final = 0.4
RETURN_AT: Final = 0.6
"""Shares of the run at which a learner is killed and started again."""
ROOM: Final = 1.5
"""It is started sooner if the rest of the run is shorter than so many times the start of a run."""
DEAD_S: Final = 1.0
"""It is dead for this long at least, so that somebody can see it."""

POLL_S: Final = 0.25
TELL_S: Final = 5.0
"""Time between two lines where no live table can be shown."""
PATIENCE_S: Final = 120.0
"""Longest time for a process to start, to answer and to end."""

SPARKS: Final = "▁▂▃▄▅▆▇█"
SPARKS_MAX: Final = 16

Facts: TypeAlias = dict[str, Any]


def demo(
    *,
    learners: int = 4,
    steps: int = 1500,
    keep: Path | None = None,
    json: Path | None = None,
    picture: Path | None = None,
    plain: bool = False,
) -> None:
    """Train one model with several learners on this machine, one of them killed on the way.

    Parameters
    ----------
    learners
        Number of learner processes, 2 to 26.
    steps
        Inner steps per learner; the default takes about two minutes on two cores.
    keep
        New folder for logs, events and the broker's state (default: a temporary one).
    json
        File for the results.
    picture
        SVG file for the table while a learner was dead, and the results.
    plain
        Print lines instead of a live table.
    """
    need_torch()
    if not 2 <= learners <= 26 or steps < 1:
        expected, got = "2 to 26 learners, 1 step or more", f"{learners} and {steps}"
        raise ConfigError("--learners and --steps", expected=expected, got=got)
    if keep is not None and keep.exists():
        raise ConfigError(f"{keep} exists", remedy="name a new folder with --keep")
    names = [f"site-{chr(ord('a') + index)}" for index in range(learners)]
    console = Console(highlight=False)
    console.print("Compiling the kernels (once per machine) ...")
    _warm_up()
    with TemporaryDirectory(prefix="narrows-demo-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        story = Story(names[1], steps * STEP_TOKENS * learners, time.monotonic())
        view = View(console, story, live=console.is_terminal and not plain)
        with Children(folder) as children:
            run(children, names, story, view)
            console.print("The run has ended; the learners measure the model ...")
            for name in names:
                children.wait(name, is_needed=name != story.victim or story.is_back)
        facts = collect(folder, names, steps, story)
    if json is not None:
        json.write_text(json_text.dumps(facts, indent=2) + "\n")
    console.print(report(facts, keep))
    if picture is not None:
        paper = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
        paper.print(view.moment, report(facts, keep))
        paper.save_svg(str(picture), title="narrows demo")


def _warm_up() -> None:
    """Else every process of a fresh machine would compile the same kernels at the same time."""
    from narrows.broker.merging import warm_up as warm_up_broker
    from narrows.proto.codec import warm_up as warm_up_learner

    warm_up_broker()
    warm_up_learner()


class Children:
    """Processes by name, their output in FOLDER/NAME.log; leaving the block ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.running.values():
            each.terminate()
        for each in self.running.values():
            try:
                each.wait(3.0)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def start(self, name: str, *arguments: str) -> None:
        """Runs `narrows ARGUMENTS` with one thread: all of them share a few cores."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "narrows", *arguments]
        command += ["--events", str(self.folder / f"{name}.jsonl")]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **threads}
            )

    def start_broker(self, goal_tokens: int, settings: Sequence[str]) -> str:
        """The broker's address, once it serves."""
        ready, state = self.folder / "broker.ready", self.folder / "state"
        self.start(
            "broker", "broker", "--listen", "tcp://127.0.0.1:0", "--state-dir", str(state),
            "--ready-file", str(ready), "--goal-tokens", str(goal_tokens),
            *itertools.chain(*(("--set", each) for each in settings)),
        )  # fmt: skip
        until = time.monotonic() + PATIENCE_S
        while not ready.exists():
            self.check("broker")
            if time.monotonic() > until:
                raise self._failure("broker", "does not serve")
            time.sleep(0.02)
        return ready.read_text().strip()

    def start_learner(self, name: str, broker: str) -> None:
        """A learner; one of this name may have lived before."""
        summary = str(self.folder / f"{name}.json")
        self.start(
            name, "learner", "--broker", broker, "--name", name, "--preset", PRESET,
            "--json", summary,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """Ends it without a chance to say anything."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def check(self, *names: str) -> None:
        """Raises NarrowsError if one of them has failed."""
        for name in names:
            if code := self.running[name].poll():
                raise self._failure(name, f"ended with code {code}")

    def wait(self, name: str, *, is_needed: bool) -> None:
        """Waits for an end in order, or ends it if nobody needs it. Raises NarrowsError."""
        if not is_needed:
            self.kill(name)
            return
        try:
            self.running[name].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise self._failure(name, f"still runs after {PATIENCE_S:.0f} s") from None
        self.check(name)

    def _failure(self, name: str, what: str) -> NarrowsError:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        said = lines[-1][:300] if lines else "no output"
        remedy = "`narrows demo --keep FOLDER` keeps the logs of all processes"
        return NarrowsError(ErrorCode.UNFINISHED, f"{name} {what}", got=said, remedy=remedy)


def run(children: Children, names: Sequence[str], story: Story, view: View) -> None:
    """Starts everybody and watches the run to its end; kills the victim and brings it back.

    Raises NarrowsError if a process fails.
    """
    settings = (
        f"run.learners_at_start={len(names)}",
        f"run.tokens_per_run_step={STEP_TOKENS * len(names)}",
        f"fragments.sync_period_steps={SYNC_PERIOD_STEPS}",
    )
    broker = children.start_broker(story.goal_tokens, settings)
    for name in names:
        children.start_learner(name, broker)
    answered_at = time.monotonic()
    with view:
        while children.running["broker"].poll() is None:
            children.check(*(name for name in names if name != story.victim))
            now = time.monotonic()
            try:
                status = ask_status(broker, None, timeout_s=1.0)
            except BrokerUnreachable:  # It may have ended just now, or the machine is busy.
                if now > answered_at + PATIENCE_S:
                    raise
                continue
            answered_at = now
            match story.hear(status, now):
                case "kill":
                    children.kill(story.victim)
                case "return":
                    children.start_learner(story.victim, broker)
            view.update(status)
            time.sleep(POLL_S)
    children.check("broker")
    story.hear(_final(children.folder), time.monotonic())


@dataclass
class Story:
    """Decides when the victim dies and returns, and remembers when it did. It has no clock."""

    victim: str
    goal_tokens: int
    started_at: float
    begun_at: float | None = None
    """All learners had joined."""
    killed_at: float | None = None
    returned_at: float | None = None
    rejoin_s: float | None = None
    """Seconds from the start of the new process to its first merged push."""
    is_back: bool = False
    """The broker knows the new process."""
    ended_at: float = 0.0
    _incarnation: str = ""

    def hear(self, status: Facts, now: float) -> Literal["kill", "return"] | None:
        """Reads a status; says what is to be done to the victim now, once each."""
        self.ended_at = now
        if status["phase"] == "seeding":
            return None
        self.begun_at = self.begun_at or now
        share, victim = self.share(status), status["learners"].get(self.victim, {})
        if self.killed_at is None:
            self._incarnation = victim.get("incarnation", "")
            if share < KILL_AT or status["phase"] == "ended":
                return None
            self.killed_at = now
            return "kill"
        if self.returned_at is None:
            left_s = (now - self.begun_at) * (1 / share - 1)
            has_room = left_s > ROOM * (self.begun_at - self.started_at)
            if now < self.killed_at + DEAD_S or (share < RETURN_AT and has_room):
                return None
            self.returned_at = now
            return "return"
        self.is_back = victim.get("incarnation", "") not in ("", self._incarnation)
        if self.is_back and victim["merged_tokens"] and self.rejoin_s is None:
            self.rejoin_s = now - self.returned_at
        return None

    def share(self, status: Facts) -> float:
        """Share of the goal that is reached, 0 to 1."""
        return min(1.0, float(status["run_tokens"]) / self.goal_tokens)

    def tell(self) -> str:
        """How far the victim's story is, in words; "" before it is killed."""
        if self.killed_at is None:
            return ""
        if self.returned_at is None:
            return f"{self.victim} was killed (SIGKILL); the others train on"
        if self.rejoin_s is not None:
            return f"{self.victim} contributes again after {self.rejoin_s:.1f} s"
        return f"{self.victim} is {'back, warming up' if self.is_back else 'starting again'}"


@dataclass
class View:
    """A live table, or a line now and then; use as a context manager."""

    console: Console
    story: Story
    live: bool
    moment: Group = field(default_factory=Group)
    """The table while a learner was dead, for the picture."""

    def __post_init__(self) -> None:
        self._live = Live(console=self.console, refresh_per_second=4)
        self._losses: dict[str, list[float]] = {}
        self._told_at = 0.0

    def __enter__(self) -> None:
        if self.live:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, status: Facts) -> None:
        """Shows a new status."""
        for name, learner in status["learners"].items():
            if learner["loss"] is not None and learner["state"] == "training":
                self._losses.setdefault(name, []).append(learner["loss"])
        table = self._table(status)
        if self.story.killed_at is not None and self.story.returned_at is None:
            self.moment = table
        if self.live:
            self._live.update(table)
        elif time.monotonic() > self._told_at + TELL_S:
            self._told_at = time.monotonic()
            losses = [values[-1] for values in self._losses.values()]
            loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
            line = f"{self._head(status)}  loss {loss}  {self._now(status)}"
            self.console.print(line, soft_wrap=True)

    def _head(self, status: Facts) -> str:
        wire = f"up {_size(status['up_bytes'])}, down {_size(status['down_bytes'])}"
        return f"{self.story.share(status):4.0%}  {status['merges']} merges  {wire}"

    def _now(self, status: Facts) -> str:
        return self.story.tell() or "; ".join(status["waiting_for"])

    def _table(self, status: Facts) -> Group:
        story = self.story
        table = Table(
            "learner",
            "state",
            "step",
            "loss",
            "its course",
            "merged",
            box=None,
            padding=(0, 1, 0, 0),
        )
        for name, learner in sorted(status["learners"].items()):
            state, losses = learner["state"], self._losses.get(name, [])
            if name == story.victim and story.killed_at is not None and not story.is_back:
                # The broker notices a silence after seconds; the demo knows.
                state = "killed" if story.returned_at is None else "starting"
            table.add_row(
                name,
                f"{state:<9}",
                f"{learner['steps']:6,}",
                f"{losses[-1]:.3f}" if losses else "-",
                f"{sparkline(losses):<{SPARKS_MAX}}",
                f"{learner['contributions']:6,}",
                style={"training": "", "killed": "bold red"}.get(state, "yellow"),
            )
        share, elapsed_s = story.share(status), time.monotonic() - story.started_at
        return Group(
            Text(f"{elapsed_s:.0f} s {self._head(status)}", style="bold"),
            Padding(ProgressBar(total=1.0, completed=share, width=58), 0),  # Ends its line.
            table,
            Text(self._now(status), style="bold yellow" if story.killed_at else "dim"),
        )


def sparkline(values: Sequence[float]) -> str:
    """The course of a loss in at most SPARKS_MAX characters; each is the mean of its share."""
    count = min(SPARKS_MAX, len(values))
    edges = [len(values) * index // max(1, count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def collect(folder: Path, names: Sequence[str], steps: int, story: Story) -> Facts:
    """The results, from what the processes have left. Losses are nats per byte of validation text.

    Data parallelism is a bfloat16 ring all-reduce in every step: each of M learners sends and
    receives 2 (M - 1) / M of the model.
    """
    final = _final(folder)
    merges = [each for each in _events(folder, "broker") if each["event"] == "merged"]
    digests = {(each["fragment"], each["version"]): each["digest"] for each in merges}
    copies = [
        digests[each["fragment"], each["version"]] == each["digest"]
        for name in names
        for each in _events(folder, name)
        if each["event"] == "installed" and (each["fragment"], each["version"]) in digests
    ]
    files = [folder / f"{name}.json" for name in names]
    summaries = [json_text.loads(file.read_text()) for file in files if file.exists()]
    parameters = summaries[0]["parameters"]
    pushed = sum(each["elements"] * len(each["contributors"]) for each in merges)
    published = sum(each["elements"] for each in merges)
    return {
        "bench": "demo",
        "learners": len(names),
        "steps": steps,
        "parameters": parameters,
        "tokens": final["run_tokens"],
        "loss_global": summaries[0]["validation_loss"],
        "up_bits_per_param": 8 * sum(each["pushed_bytes"] for each in merges) / pushed,
        "down_bits_per_param": 8 * sum(each["published_bytes"] for each in merges) / published,
        "up_bytes": final["up_bytes"],
        "down_bytes": final["down_bytes"],
        "data_parallel_bytes": 8 * (len(names) - 1) * parameters * steps,
        "merges": final["merges"],
        "contributions": final["contributions"],
        "killed": story.killed_at is not None,
        "rejoin_s": story.rejoin_s,
        "held_up": sum(each["stats"]["code_s"] for each in summaries)
        / sum(each["loop_s"] for each in summaries),
        "digests_compared": len(copies),
        "digests_differing": copies.count(False),
        "wall_s": story.ended_at - story.started_at,
    }


def _final(folder: Path) -> Facts:
    """The last status of the broker."""
    *_, last = (each["status"] for each in _events(folder, "broker") if each["event"] == "final")
    return dict(last)


def _events(folder: Path, name: str) -> Iterator[Facts]:
    """The events that a process has written; a killed one may have left half a line."""
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        try:
            yield json_text.loads(line)
        except json_text.JSONDecodeError:
            continue


def report(facts: Facts, kept: Path | None) -> Group:
    """The last table, how few bits it took, and what to do next. Fits into 60 columns."""
    moved, parallel = facts["up_bytes"] + facts["down_bytes"], facts["data_parallel_bytes"]
    if facts["rejoin_s"] is not None:
        fate = f"merged again {facts['rejoin_s']:.1f} s after its start"
    elif facts["killed"]:
        fate = "back too late to be merged again"
    else:
        fate = "none: the run was too short"
    table = Table("Results", "", box=None)
    up, down = (
        f"{facts[f'{way}_bits_per_param']:.2f} bits per parameter" for way in ("up", "down")
    )
    rows = {
        "learners": f"{facts['learners']}",
        "parameters": f"{facts['parameters'] / 1e6:.2f} M",
        "tokens": f"{facts['tokens'] / 1e6:.2f} M in {facts['wall_s']:.0f} s",
        "validation loss": f"{facts['loss_global']:.4f} nats per byte",
        "merges": f"{facts['merges']} of {facts['contributions'] / facts['merges']:.2f} learners",
        "killed learner": fate,
        "up": f"{_size(facts['up_bytes'])}, {up}",
        "down": f"{_size(facts['down_bytes'])}, {down}",
        "data parallel": f"{_size(parallel)}, a bf16 ring in every step",
        "held training up": f"{facts['held_up']:.1%} of the time",
        "copies compared": f"{facts['digests_compared']}",
        "copies that differ": f"{facts['digests_differing']}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    bits = (
        f"{8 * moved / 1e9:.2f} Gbit went over the wire; data parallel would have needed"
        f" {8 * parallel / 1e9:.0f} Gbit: {parallel / moved:.0f} times as much."
    )
    look = f"narrows journal show {kept}/state" if kept else "narrows demo --keep demo-run"
    steps = (
        f"Next: `{look}` {'lists every merge' if kept else 'keeps journal, logs and events'};"
        f" `examples/train.py` is a loop of your own in ten lines."
    )
    return Group("", table, "", Text(bits, style="bold"), Text(steps))


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
