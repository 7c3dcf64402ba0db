"""Metrics of a run for Prometheus, made of the newest Status when somebody scrapes.

Labels are bounded: `learner` by the names that a broker remembers, `fragment` by the layout, the
others by fixed lists of words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from narrows.broker.page.history import History
from narrows.proto.messages import LearnerState, LearnerStatus, Phase, Status

PREFIX: Final = "narrows"


class StatusCollector(Collector):
    """Tells what the page's history holds. While the broker does not answer, it tells
    narrows_up 0 alone: old figures would look like new ones."""

    def __init__(self, history: Callable[[], History]) -> None:
        self._history = history

    def collect(self) -> Iterable[Metric]:
        history = self._history()
        yield gauge("up", "1 while the broker answers, else 0.", float(history.is_answering))
        if history.is_answering and history.status is not None:
            yield from run_metrics(history.status)
            yield from learner_metrics(history.status)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def run_metrics(status: Status) -> Iterator[Metric]:
    """The run, the broker's line, disk and process."""
    info = GaugeMetricFamily(
        f"{PREFIX}_broker_info", "1, with what the broker is.", labels=("version", "mode")
    )
    info.add_metric((status.narrows, status.settings.mode), 1)
    yield info
    phase = GaugeMetricFamily(f"{PREFIX}_phase", "1 for the run's phase.", labels=("state",))
    for each in Phase:
        phase.add_metric((each.value,), float(each.value == status.phase))
    yield phase
    yield gauge("uptime_seconds", "Seconds since the broker's start.", status.uptime_s)
    yield counter("run_tokens", "Tokens that the run has learned.", status.run_tokens)
    yield gauge("goal_tokens", "Tokens at which the run ends; 0: no goal.", status.goal_tokens)
    yield counter("merges", "Rounds merged since the broker's start.", status.merges)
    yield counter("merged_pushes", "Pushes in these rounds.", status.contributions)
    if status.last_merge is not None:
        yield gauge("last_merge_age_seconds", "Since the last merge.", status.last_merge.ago_s)
    yield gauge("period_seconds", "Seconds between two rounds of a fragment.", status.period_s)
    yield gauge("sync_seconds", "Mean seconds from due to durable.", status.sync_s)

    version = GaugeMetricFamily(
        f"{PREFIX}_fragment_version", "Newest durable version.", labels=("fragment",)
    )
    for index, fragment in enumerate(status.fragments):
        version.add_metric((str(index),), fragment.version)
    yield version
    line = CounterMetricFamily(
        f"{PREFIX}_line_bytes", "Bytes on the broker's line.", labels=("direction",)
    )
    line.add_metric(("up",), status.line.up_bytes)
    line.add_metric(("down",), status.line.down_bytes)
    yield line
    limit = GaugeMetricFamily(
        f"{PREFIX}_line_limit_bits_per_second", "Budget; 0: none.", labels=("direction",)
    )
    limit.add_metric(("up",), status.line.total_up_limit)
    limit.add_metric(("down",), status.line.total_down_limit)
    yield limit
    refused = CounterMetricFamily(
        f"{PREFIX}_refused", "Refusals since the broker's start.", labels=("code",)
    )
    for code, count in status.refusals.items():
        refused.add_metric((code,), count)
    yield refused

    disk = status.disk
    if disk.free_bytes is not None:
        yield gauge("disk_free_bytes", "Room for the state directory.", disk.free_bytes)
    yield gauge("disk_journal_bytes", "Size of the journal.", disk.journal_bytes)
    yield gauge("disk_failing", "1 while the disk refuses a write.", float(bool(disk.error)))
    yield gauge(
        "disk_commit_p99_seconds", "p99 of the last 256 commits.", disk.commit_p99_ms / 1000
    )
    process = status.process
    yield gauge("broker_resident_bytes", "Memory of the broker.", process.rss_bytes)
    yield counter("broker_cpu_seconds", "Processor time of the broker.", process.cpu_s)
    yield gauge("broker_workers_queue", "Work that waits for a worker.", process.queue)


def learner_metrics(status: Status) -> Iterator[Metric]:
    """Seven series of each learner, and its state."""
    state = GaugeMetricFamily(
        f"{PREFIX}_learner_state", "1 for the learner's state.", labels=("learner", "state")
    )
    known = [each.value for each in LearnerState]
    for name, learner in status.learners.items():
        word = learner.state if learner.state in known else "unknown"
        state.add_metric((name, word), 1)
    yield state

    gauges: dict[str, tuple[str, Callable[[LearnerStatus], float | None]]] = {
        "loss": ("Newest training loss.", lambda each: each.loss),
        "versions_behind": ("Versions it has not adopted.", lambda each: each.versions_behind),
        "silence_seconds": ("Seconds since its last message.", lambda each: each.heard_s),
    }
    counters: dict[str, tuple[str, Callable[[LearnerStatus], float]]] = {
        "steps": ("Steps of this incarnation.", lambda each: each.steps),
        "logged_tokens": ("Tokens it has trained on.", lambda each: each.logged_tokens),
        "merged_tokens": ("Those in the model.", lambda each: each.merged_tokens),
        "lost_tokens": ("Those that never will be.", lambda each: each.lost_tokens),
    }
    for key, (text, read) in gauges.items():
        family = GaugeMetricFamily(f"{PREFIX}_learner_{key}", text, labels=("learner",))
        for name, learner in status.learners.items():
            value = read(learner)
            if value is not None:
                family.add_metric((name,), value)
        yield family
    for key, (text, read_count) in counters.items():
        totals = CounterMetricFamily(f"{PREFIX}_learner_{key}", text, labels=("learner",))
        for name, learner in status.learners.items():
            totals.add_metric((name,), read_count(learner))
        yield totals
