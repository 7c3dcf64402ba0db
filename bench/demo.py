"""`narrows demo`: real processes train one model; one of them is killed on the way and returns.

The demo starts them as a user would, with keys. It asks the broker for its status, and in the end
reads what the processes leave: events, and the summary of each learner.
"""

from __future__ import annotations

import io
import itertools
import time
import webbrowser
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrows.bench.kit.rows import shown, write
from narrows.bench.kit.run import PATIENCE_S, Deployment, payload_bits
from narrows.broker import merging
from narrows.broker.cli.status import ask_status
from narrows.proto import codec
from narrows.proto.errors import BrokerUnreachable, ConfigError
from narrows.proto.keys import read_site_key
from narrows.proto.wire import plain

PRESET: Final = "tiny"
STEP_TOKENS: Final = 4 * 64
"""Tokens of an inner step of one learner: batch and context of the preset."""
SYNC_PERIOD_STEPS: Final = 16

KILL_AT: Final = 0.4
RETURN_AT: Final = 0.6
"""Shares of the run at which a learner is killed and started again."""
ROOM: Final = 1.5
"""If the rest of the run is shorter than so many times the start of a run, the killed learner is
started before RETURN_AT: later it would not be back before the end."""
DEAD_S: Final = 1.0
"""It stays dead so long at least, so that somebody can see it."""

POLL_S: Final = 0.25
TELL_S: Final = 5.0
"""Time between two lines where no live table can be shown."""

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
    page: bool = False,
) -> None:
    """Train one model with several learners on this machine, one of them killed on the way.

    Parameters
    ----------
    learners
        Number of learner processes, 2 to 26.
    steps
        Inner steps per learner; the default takes a minute or two on two cores.
    keep
        New folder for logs, events, keys and the broker's state (default: a temporary one).
    json
        File for the results.
    picture
        SVG file for the table while a learner was dead, and the results.
    plain
        Print lines instead of a live table.
    page
        Show the run in a browser, too.
    """
    if not 2 <= learners <= 26 or steps < 1:
        raise ConfigError(
            "--learners and --steps",
            expected="2 to 26 learners, 1 step or more",
            got=f"{learners} and {steps}",
        )
    if keep is not None and keep.exists():
        raise ConfigError(f"{keep} exists", remedy="name a new folder with --keep")
    names = [f"site-{chr(ord('a') + index)}" for index in range(learners)]
    console = Console(highlight=False)
    console.print("Compiling the kernels (once per machine) ...")
    # Without this every process of a fresh machine would compile the same ones at the same time.
    codec.warm_up()
    merging.warm_up()

    story = Story(names[1], steps * STEP_TOKENS * learners, time.monotonic())
    view = View(console, story, is_live=console.is_terminal and not plain)
    with Deployment(folder=keep) as run:
        run.remedy = "`narrows demo --keep FOLDER` keeps the logs of all processes"
        play(run, names, story, view, page=page)
        wall_s = time.monotonic() - story.started_at
        console.print("The run has ended; the learners measure the model ...")
        for name in names:
            if name != story.victim or story.is_back:
                run.running[name].ends(0)
        facts = collect(run, names, steps, story) | {"wall_s": wall_s}

    if json is not None:
        write(json, "demo", [facts], seed=0)
    console.print(report(facts, keep))
    if picture is not None:
        paper = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
        paper.print(view.moment, report(facts, keep))
        paper.save_svg(str(picture), title="narrows demo")


def play(
    run: Deployment, names: Sequence[str], story: Story, view: View, *, page: bool = False
) -> None:
    """Starts everybody and watches the run to its end; kills the victim and brings it back.

    Raises NarrowsError if a process fails.
    """
    run.make_keys(names)
    run.broker(
        {
            "run.goal_tokens": story.goal_tokens,
            "run.learners_at_start": len(names),
            "run.tokens_per_run_step": STEP_TOKENS * len(names),
            "fragments.sync_period_steps": SYNC_PERIOD_STEPS,
        }
    )
    for name in names:
        run.learner(name, PRESET)
    key_file = run.folder / f"{names[0]}.key"
    if page:
        address = run.page("--key", str(key_file))
        print(f"The page of this run is at {address}")
        webbrowser.open(address)
    key = read_site_key(key_file)
    answered_at = time.monotonic()
    with view.shown:
        while run.running["broker"].exitcode is None:
            for name in names:
                if name != story.victim and run.running[name].exitcode:
                    run.running[name].ends(0)  # It has failed, and this raises.
            now = time.monotonic()
            try:
                status = plain(ask_status(run.address, key, timeout_s=1.0))
            except BrokerUnreachable:  # It may have ended just now, or the machine is busy.
                if now > answered_at + PATIENCE_S:
                    raise
                continue
            answered_at = now
            match story.hear(status, now):
                case "kill":
                    run.kill(story.victim)
                case "return":
                    run.learner(story.victim, PRESET)
            view.update(status)
            time.sleep(POLL_S)
    run.running["broker"].ends(0)
    story.hear(run.final(), time.monotonic())


@dataclass
class Story:
    """Decides when the victim dies and returns, and remembers when it did. It has no clock: all
    times are arguments."""

    victim: str
    goal_tokens: int
    started_at: float
    begun_at: float | None = None
    """Then all learners had joined."""
    killed_at: float | None = None
    returned_at: float | None = None
    """Then the victim was started again."""
    rejoin_s: float | None = None
    """Seconds from the start of the new process to its first merged push."""
    is_back: bool = False
    """The broker knows the new process."""
    _incarnation: str = ""
    """The victim's incarnation before it was killed."""

    def hear(self, status: Facts, now: float) -> Literal["kill", "return"] | None:
        """Reads a status; returns what is to be done to the victim now, each once."""
        if status["phase"] == "seeding":
            return None
        if self.begun_at is None:
            self.begun_at = now
        share = self.share(status)
        victim = status["learners"].get(self.victim, {})

        if self.killed_at is None:
            self._incarnation = victim.get("incarnation", "")
            if share < KILL_AT or status["phase"] == "ended":
                return None
            self.killed_at = now
            return "kill"

        if self.returned_at is None:
            # At the pace so far the rest of the run takes this long.
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
        """The share of the goal that the run has reached, 0 to 1."""
        return min(1.0, float(status["run_tokens"]) / self.goal_tokens)

    def tell(self) -> str:
        """Tells what has happened to the victim, in words; "" before it is killed."""
        if self.killed_at is None:
            return ""
        if self.returned_at is None:
            return f"{self.victim} was killed (SIGKILL); the others train on"
        if self.rejoin_s is not None:
            return f"{self.victim} contributes again after {self.rejoin_s:.1f} s"
        what = "back, warming up" if self.is_back else "starting again"
        return f"{self.victim} is {what}"


class View:
    """Shows the run as a live table, or else as a line now and then. Enter `shown` first."""

    def __init__(self, console: Console, story: Story, *, is_live: bool) -> None:
        self._story = story
        self._live = Live(console=console, refresh_per_second=4)
        self._is_live = is_live
        self.shown: AbstractContextManager[object] = self._live if is_live else nullcontext()
        self.moment = Group()
        """The last table while a learner was dead, for the picture."""
        self._losses = defaultdict[str, list[float]](list)
        """By learner: each loss that the broker told, oldest first."""
        self._told = ""
        self._told_at = 0.0

    def update(self, status: Facts) -> None:
        """Shows a new status."""
        story = self._story
        for name, learner in status["learners"].items():
            if learner["loss"] is not None and learner["state"] == "training":
                self._losses[name].append(learner["loss"])

        line = status["line"]
        wire = f"up {_size(line['up_bytes'])}, down {_size(line['down_bytes'])}"
        head = f"{story.share(status):4.0%}  {status['merges']} merges  {wire}"
        news = story.tell() or "; ".join(status["waiting_for"])
        table = self._table(status, head, news)
        if story.killed_at is not None and story.returned_at is None:
            self.moment = table
        if self._is_live:
            self._live.update(table)
            return

        if story.tell() != self._told:
            self._told = story.tell()
            self._live.console.print(news)
        if time.monotonic() > self._told_at + TELL_S:
            self._told_at = time.monotonic()
            losses = [values[-1] for values in self._losses.values() if values]
            if losses:
                news = f"loss {fmean(losses):.3f}"
            self._live.console.print(f"{head}  {news}")

    def _table(self, status: Facts, head: str, news: str) -> Group:
        story = self._story
        table = Table(
            "learner", "state", "step", "loss", "its course", "merged",
            box=None, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for name, learner in sorted(status["learners"].items()):
            state = learner["state"]
            losses = self._losses[name]
            if name == story.victim and story.killed_at is not None and not story.is_back:
                # The broker notices a silence only after seconds; the demo knows at once.
                state = "killed" if story.returned_at is None else "starting"
            table.add_row(
                name,
                f"{state:<9}",
                f"{learner['steps']:6,}",
                shown(next(reversed(losses), None), "{:.3f}"),
                f"{sparkline(losses):<{SPARKS_MAX}}",
                f"{learner['contributions']:6,}",
                style={"training": "", "killed": "bold red"}.get(state, "yellow"),
            )
        elapsed_s = time.monotonic() - story.started_at
        return Group(
            Text(f"{elapsed_s:.0f} s {head}", style="bold"),
            # The padding makes the bar end its line.
            Padding(ProgressBar(total=1.0, completed=story.share(status), width=58), 0),
            table,
            Text(news, style="bold yellow" if story.killed_at else "dim"),
        )


def sparkline(values: Sequence[float]) -> str:
    """The course of a loss in at most SPARKS_MAX characters, each for the mean of its part."""
    count = min(SPARKS_MAX, len(values))
    edges = [len(values) * index // max(1, count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means, default=0.0)
    # A course without any rise or fall shows the lowest character.
    spread = max(max(means, default=0.0) - low, 1e-9)
    return "".join(SPARKS[round((mean - low) / spread * (len(SPARKS) - 1))] for mean in means)


def collect(run: Deployment, names: Sequence[str], steps: int, story: Story) -> Facts:
    """The results, from what the processes have left. Losses are nats per byte of validation text.

    Data parallelism would make a bfloat16 ring all-reduce in every step: each of M learners sends
    and receives 2 (M - 1) / M of the model.
    """
    final = run.final()
    merges = run.merges()
    merged = {(each["fragment"], each["version"]): each["digest"] for each in merges}
    copies = [
        (each["digest"], merged.get((each["fragment"], each["version"])))
        for name in names
        for each in run.installed(name)
        if each["version"] > 0
    ]
    # A learner that was killed and did not return leaves no summary.
    summaries = list(filter(None, map(run.summary, names)))
    parameters = summaries[0]["parameters"]
    up_bits, down_bits = payload_bits(merges)
    loop_s = sum(each["loop_s"] for each in summaries)
    return {
        "learners": len(names),
        "steps": steps,
        "parameters": parameters,
        "tokens": final["run_tokens"],
        "loss_global": summaries[0]["validation_loss"],
        "up_bits_per_param": up_bits,
        "down_bits_per_param": down_bits,
        "up_bytes": final["line"]["up_bytes"],
        "down_bytes": final["line"]["down_bytes"],
        "data_parallel_bytes": 8 * (len(names) - 1) * parameters * steps,
        "merges": final["merges"],
        "contributions": final["contributions"],
        "killed": story.killed_at is not None,
        "rejoin_s": story.rejoin_s,
        "held_up": sum(each["stats"]["code_s"] for each in summaries) / loop_s,
        "digests_compared": len(copies),
        "digests_differing": sum(held != made for held, made in copies),
    }


def report(facts: Facts, kept: Path | None) -> Group:
    """The last table, how few bits it took, and what to do next. Fits into 60 columns."""
    moved = facts["up_bytes"] + facts["down_bytes"]
    parallel = facts["data_parallel_bytes"]
    fate = "back too late to be merged again"
    if not facts["killed"]:
        fate = "none: the run was too short"
    elif facts["rejoin_s"] is not None:
        fate = f"merged again {facts['rejoin_s']:.1f} s after its start"
    rows = {
        "learners": f"{facts['learners']}",
        "parameters": f"{facts['parameters'] / 1e6:.2f} M",
        "tokens": f"{facts['tokens'] / 1e6:.2f} M in {facts['wall_s']:.0f} s",
        "validation loss": f"{facts['loss_global']:.4f} nats per byte",
        "merges": f"{facts['merges']} of {facts['contributions'] / facts['merges']:.2f} learners",
        "killed learner": fate,
        "up": f"{_size(facts['up_bytes'])}, {facts['up_bits_per_param']:.2f} bits per parameter",
        "down": f"{_size(facts['down_bytes'])},"
        f" {facts['down_bits_per_param']:.2f} bits per parameter",
        "data parallel": f"{_size(parallel)}, a bf16 ring in every step",
        "held training up": f"{facts['held_up']:.1%} of the time",
        "copies compared": f"{facts['digests_compared']}",
        "copies that differ": f"{facts['digests_differing']}",
    }
    table = Table("Results", "", box=None)
    for what, value in rows.items():
        table.add_row(what, value)
    bits = (
        f"{8 * moved / 1e9:.2f} Gbit went over the wire; data parallel would have needed"
        f" {8 * parallel / 1e9:.0f} Gbit: {parallel / moved:.0f} times as much."
    )
    look = "`narrows demo --keep demo-run` keeps journal, logs and events"
    if kept is not None:
        look = f"`narrows journal show {kept}/state` lists every merge"
    steps = f"Next: {look}; `examples/train.py` is a program with a loop of its own."
    return Group("", table, "", Text(bits, style="bold"), Text(steps))


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
