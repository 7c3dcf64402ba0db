"""The demo's live display: learners, losses, bytes, and what just happened."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from narrows.bench.demo.story import DemoOptions, DemoStory
from narrows.broker.cli.tables import Table
from narrows.proto.messages import Status
from narrows.proto.units import counted, format_bytes, format_count, format_duration_s

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COUNT = 20
STYLES = {"lost": "bold red", "late": "yellow", "joining": "yellow"}
"""Style of a learner's row by its state."""
PLAIN_S = 5.0
"""Interval of the lines that stand in for a live display."""


class View:
    """Shows the run while it lasts; use as a context manager."""

    def __init__(
        self, console: Console, options: DemoOptions, story: DemoStory, *, live: bool
    ) -> None:
        self._console, self._options, self._story = console, options, story
        is_live = live and console.is_terminal
        self._live = Live(console=console, refresh_per_second=4) if is_live else None
        self._told_at = 0.0
        self.moment: Group | None = None
        """The display while a learner was dead, for the picture."""
        self._losses: dict[str, deque[float]] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status, alone: dict[str, Any]) -> None:
        """Reads a new status."""
        for learner in status.learners:
            if learner.loss is not None:
                losses = self._losses.setdefault(learner.name, deque(maxlen=400))
                if not losses or losses[-1] != learner.loss:
                    losses.append(learner.loss)
        if self._story.killed_at is not None and self._story.returned_at is None:
            self.moment = self._picture(status, alone)
        if self._live is not None:
            self._live.update(self._picture(status, alone))
        elif time.monotonic() - self._told_at >= PLAIN_S:
            self._told_at = time.monotonic()
            self._console.print(self._line(status))

    def _line(self, status: Status) -> str:
        share = status.run_tokens / self._options.goal_tokens
        live = sum(learner.state == "live" for learner in status.learners)
        losses = [learner.loss for learner in status.learners if learner.loss is not None]
        loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
        return (
            f"{share:4.0%}  {counted(live, 'learner')} live  loss {loss}  "
            f"{counted(status.merges, 'merge')} of {status.mean_contributors_per_merge:.2f}  "
            f"wire {format_bytes(status.up_bytes + status.down_bytes)}   {self._story.chapter}"
        ).rstrip()

    def _picture(self, status: Status, alone: dict[str, Any]) -> Group:
        share = min(status.run_tokens / self._options.goal_tokens, 1.0)
        elapsed_s = time.monotonic() - self._story.started_at
        left = f", about {format_duration_s(elapsed_s / share - elapsed_s)} left" if share else ""
        head = Text.assemble(
            ("narrows demo  ", "bold"),
            f"{len(status.learners)} learners, 1 broker, real processes  "
            f"{share:4.0%}  {format_duration_s(elapsed_s)}{left}",
        )
        parts: list[Any] = [head, ProgressBar(total=1.0, completed=share, width=72), Text("")]
        parts.append(self._table(status, alone))
        parts.append(self._totals(status))
        event = self._story.chapter
        parts.append(Text(event or status.waiting_for, style="bold yellow" if event else "dim"))
        return Group(*parts)

    def _table(self, status: Status, alone: dict[str, Any]) -> Text:
        table = Table(
            ("learner", "state", "step", "loss", "its course", "merged", "up", "down"), keys=2,
            left=("its course",),
        )  # fmt: skip
        for learner in status.learners:
            loss = "-" if learner.loss is None else f"{learner.loss:.3f}"
            table.add(
                learner.name,
                learner.state,
                str(learner.step),
                loss,
                sparkline(list(self._losses.get(learner.name, ()))),
                str(learner.contributions),
                format_bytes(learner.up_bytes),
                format_bytes(learner.down_bytes),
                style=STYLES.get(learner.state, ""),
            )
        if alone:
            loss = f"{alone['train_loss']:.3f}" if "train_loss" in alone else "-"
            table.add("(one alone)", "", str(alone.get("step", "")), loss, style="dim")
        lines = table.lines(self._console.width)
        return Text("\n").join([Text(line.text, line.style) for line in lines])

    def _totals(self, status: Status) -> Text:
        versions = f"{min(status.versions)}..{max(status.versions)}" if status.versions else "-"
        return Text(
            f"\nversions {versions}   {counted(status.merges, 'merge')}, "
            f"{status.mean_contributors_per_merge:.2f} contributors each   "
            f"{format_count(status.tokens_per_s)} tokens/s   wire: up "
            f"{format_bytes(status.up_bytes)}, down {format_bytes(status.down_bytes)}"
        )


def sparkline(values: list[float]) -> str:
    """The course of a loss in SPARK_COUNT characters; each is the mean of its share."""
    if len(values) < 2:
        return ""
    count = min(SPARK_COUNT, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)
