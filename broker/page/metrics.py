"""Metrics of a run for Prometheus, made of the newest Status when somebody scrapes.

Labels are bounded: `learner` by the names that a broker remembers, `fragment` by the layout, the
others by fixed lists of words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from narrows.broker.page.history import History
from narrows.proto.messages import LearnerState, LearnerStatus, Phase, Status

PREFIX: Final = "narrows"


class StatusCollector(Collector):
    """Tells what the page's history holds. While the broker does not answer, it tells
    that alone, and whether its run has ended: old figures would look like new ones."""

    def __init__(self, history: Callable[[], History]) -> None:
        self._history = history

    def collect(self) -> Iterable[Metric]:
        history = self._history()
        yield gauge("up", "1 while the broker answers, else 0.", float(history.is_answering))
        yield gauge("run_ended", "1 once the broker may go, else 0.", float(history.has_ended))
        if history.is_answering and history.status is not None:
            yield from run_metrics(history.status)
            yield from learner_metrics(history.status)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


GAUGES: Final[Mapping[str, tuple[str, Callable[[Status], float | None]]]] = {
    "uptime_seconds": ("Seconds since the broker's start.", lambda said: said.uptime_s),
    "goal_tokens": ("Tokens at which the run ends; 0: no goal.", lambda said: said.goal_tokens),
    "last_merge_age_seconds": (
        "Since the last merge.", lambda said: said.last_merge.ago_s if said.last_merge else None
    ),
    "period_seconds": ("Seconds between two rounds of a fragment.", lambda said: said.period_s),
    "sync_seconds": ("Mean seconds from due to durable.", lambda said: said.sync_s),
    "disk_free_bytes": ("Room for the state directory.", lambda said: said.disk.free_bytes),
    "disk_journal_bytes": ("Size of the journal.", lambda said: said.disk.journal_bytes),
    "disk_failing": (
        "1 while the disk refuses a write.",
        lambda said: float(bool(said.disk.error or said.disk.snapshot_error)),
    ),
    "disk_commit_p99_seconds": (
        "p99 of the last 256 commits.", lambda said: said.disk.commit_p99_ms / 1000
    ),
    "broker_resident_bytes": ("Memory of the broker.", lambda said: said.process.rss_bytes),
    "broker_workers_queue": ("Work that waits for a worker.", lambda said: said.process.queue),
}  # fmt: skip
"""Name -> what it tells, and its value; None: there is none now."""

COUNTERS: Final[Mapping[str, tuple[str, Callable[[Status], float]]]] = {
    "run_tokens": ("Tokens that the run has learned.", lambda said: said.run_tokens),
    "merges": ("Rounds merged since the broker's start.", lambda said: said.merges),
    "merged_pushes": ("Pushes in these rounds.", lambda said: said.contributions),
    "broker_cpu_seconds": ("Processor time of the broker.", lambda said: said.process.cpu_s),
}


def labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """A metric with one label."""
    family = kind(f"{PREFIX}_{name}", text, labels=(label,))
    for each, value in values.items():
        family.add_metric((each,), value)
    return family


def run_metrics(status: Status) -> Iterator[Metric]:
    """The run, the broker's line, disk and process."""
    info = GaugeMetricFamily(
        f"{PREFIX}_broker_info", "1, with what the broker is.", labels=("version", "mode")
    )
    info.add_metric((status.narrows, status.settings.mode), 1)
    yield info
    for name, (text, read) in GAUGES.items():
        if (value := read(status)) is not None:
            yield gauge(name, text, value)
    for name, (text, count) in COUNTERS.items():
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=count(status))
    line = status.line
    limits = {"up": line.total_up_limit, "down": line.total_down_limit}
    crossed = {"up": line.up_bytes, "down": line.down_bytes}
    phases = {each.value: float(each.value == status.phase) for each in Phase}
    versions = {str(index): each.version for index, each in enumerate(status.fragments)}
    one, many = GaugeMetricFamily, CounterMetricFamily
    yield labelled(one, "phase", "1 for the run's phase.", "state", phases)
    yield labelled(one, "fragment_version", "Newest durable version.", "fragment", versions)
    yield labelled(one, "line_limit_bits_per_second", "Budget; 0: none.", "direction", limits)
    yield labelled(many, "line_bytes", "Bytes on the broker's line.", "direction", crossed)
    yield labelled(many, "refused", "Refusals since the broker's start.", "code", status.refusals)


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
        read_all = {name: read(each) for name, each in status.learners.items()}
        told = {name: value for name, value in read_all.items() if value is not None}
        yield labelled(GaugeMetricFamily, f"learner_{key}", text, "learner", told)
    for key, (text, count) in counters.items():
        totals = {name: count(each) for name, each in status.learners.items()}
        yield labelled(CounterMetricFamily, f"learner_{key}", text, "learner", totals)
