"""Failures on the real state machines: a simulated run whose learners follow courses.

The simulator's clock is slower than the tape: one second of the machines is one inner step and
stands for `step_s` seconds of the tape. This makes a tape of a day affordable. The machines' own
delays (joining, beats, latency, merging) weigh `step_s` times as much as they would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from narrows.bench.goodput.stall_model import NEVER, Course, full_course, uptime
from narrows.bench.sim.broker import SimulatedRound
from narrows.bench.sim.learner import LearnerSpec, SimulatedLearner
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import BrokerConfig
from narrows.proto.codec import F64
from narrows.proto.config import override

STEP_S: Final = 20.0
"""Seconds of the tape per inner step, as in Streaming DiLoCo (arXiv 2501.18512) for DeepSeek-V3."""

LEAD_S: Final = 10.0
"""Seconds of the machines before the tape begins, in which everybody joins."""

TOKENS_PER_STEP: Final = 1_000_000

SETTINGS: Final[Mapping[str, object]] = {"broker.checkpoint_versions": 1_000_000}
"""Settings beside the defaults. The simulated broker does not fail here, so checkpoints would be
for nobody."""


@dataclass(frozen=True)
class MachinePlan:
    """One learner: its course, and the times at which its process is absent."""

    course: Course
    absences_s: F64 = field(default_factory=lambda: NEVER)
    """(n, 2), in order: the process is killed at the beginning of each and started at its end."""
    lent: bool = False
    """True if its chips belong to somebody else while it is absent. Otherwise that time is lost."""
    pace: float = 1.0
    """Length of its steps, in units of the run's."""
    ramp_steps: int = 0
    """Steps before a process contributes, unless it is the learner's first."""


class PlannedLearner(SimulatedLearner):
    """One incarnation. An inner step that a stall interrupts goes on after the stall."""

    def __init__(self, run: PlannedRun, spec: LearnerSpec) -> None:
        super().__init__(run.clock, run.random, run.faults, run, spec, run.layout)
        self._run, self._plan = run, run.plans[spec.name]
        self.begun_s = 0.0
        """Time on the tape at which its newest step began."""

    def step_lasts_s(self) -> float:
        self.begun_s = self._run.tape_s
        wanted_s = super().step_lasts_s() * self._run.step_s
        return _when_trained(self._plan.course, self.begun_s, wanted_s) / self._run.step_s

    def step_tokens(self) -> int:
        begun_s = self.begun_s
        course = self._plan.course
        share = float(course.share[_segment(course, begun_s)])
        tokens = round(share * self.spec.tokens_per_step)
        self._run.steps[self.spec.name].append((begun_s, self._run.tape_s, tokens))
        return tokens


def _when_trained(course: Course, begun_s: float, wanted_s: float) -> float:
    """Seconds from `begun_s` until `wanted_s` seconds have been trained; nothing stalls outside the
    course's span."""
    segment = _segment(course, begun_s)
    at_s, left_s = begun_s, wanted_s
    while segment < len(course.times_s):
        last = segment + 1 == len(course.times_s)
        end_s = course.span_s if last else float(course.times_s[segment + 1])
        room_s = max(end_s - at_s, 0.0) if course.up[segment] else 0.0
        if room_s >= left_s:
            break
        at_s, left_s, segment = max(at_s, end_s), left_s - room_s, segment + 1
    return at_s + left_s - begun_s


def _segment(course: Course, at_s: float) -> int:
    """Index of the segment that holds a time. The first segment also holds the time before it."""
    return max(0, int(np.searchsorted(course.times_s, at_s, side="right")) - 1)


class PlannedRun(Simulation):
    """A decoupled run on a tape. `steps` are (begin, end, tokens) by learner, in times of the
    tape."""

    def __init__(
        self,
        plans: Sequence[MachinePlan],
        span_s: float,
        seed: int,
        settings: Mapping[str, object],
        *,
        step_s: float = STEP_S,
    ) -> None:
        self.span_s, self.step_s = span_s, step_s
        self.plans = {f"learner-{i:02}": plan for i, plan in enumerate(plans)}
        self.steps: dict[str, list[tuple[float, float, int]]] = {name: [] for name in self.plans}
        self.commits: list[SimulatedRound] = []
        at_start = sum(not _is_absent_at_first(plan) for plan in plans)
        own = {"run.learners_at_start": at_start, **SETTINGS, **settings}
        specs = [
            LearnerSpec(name, plan.pace, TOKENS_PER_STEP, self._joins_at_s(plan))
            for name, plan in self.plans.items()
        ]
        super().__init__(override(BrokerConfig(), own), seed, Faults(), specs)
        for name, plan in self.plans.items():
            for begin_s, end_s in plan.absences_s.tolist():
                if begin_s > 0:
                    kill = partial(self.kill_learner, name, (end_s - begin_s) / step_s)
                    self.clock.at(LEAD_S + begin_s / step_s, kill)

    @property
    def tape_s(self) -> float:
        return (self.clock.now - LEAD_S) * self.step_s

    def _joins_at_s(self, plan: MachinePlan) -> float:
        absent = _is_absent_at_first(plan)
        return LEAD_S + float(plan.absences_s[0, 1]) / self.step_s if absent else 0.0

    def make_learner(self, spec: LearnerSpec) -> SimulatedLearner:
        if self.clock.now > 0:
            plan = self.plans[spec.name]
            spec = replace(spec, contribute_after_steps=plan.ramp_steps)
        return PlannedLearner(self, spec)

    def record(self, record: object) -> None:
        """Keeps only the merges within the tape: a run this long has too many other records."""
        if isinstance(record, SimulatedRound) and self.tape_s > 0:
            self.commits.append(record)

    def play(self) -> None:
        """Runs to the end of the tape."""
        self.run(LEAD_S + self.span_s / self.step_s)

    # Results.

    def goodput(self, edges_s: F64) -> F64:
        """Useful share of the allocated time between each two edges.

        A step counts where it ends, at its usual length and by its tokens.
        """
        made_s, allocated_s = np.zeros(len(edges_s) - 1), np.zeros(len(edges_s) - 1)
        for name, plan in self.plans.items():
            ends_s = [end_s for _, end_s, _ in self.steps[name]]
            tokens = np.array([tokens for *_, tokens in self.steps[name]])
            full_steps = np.histogram(ends_s, edges_s, weights=tokens / TOKENS_PER_STEP)[0]
            made_s += full_steps * plan.pace * self.step_s
            gone_s = plan.absences_s if plan.lent else NEVER
            allocated_s += np.diff(full_course(self.span_s, gone_s).up_s(edges_s))
        shares: F64 = made_s / allocated_s
        return shares

    def uptime(self, edges_s: F64) -> F64:
        """Share of the time in which at least one learner was in a step and not stalled."""
        return uptime([self.measured_course(name) for name in self.plans], edges_s)

    def measured_course(self, name: str) -> Course:
        """When a learner trained: its stalls, and whatever lay between two of its steps."""
        ends_s = [0.0, *(end_s for _, end_s, _ in self.steps[name])]
        begins_s = [*(begin_s for begin_s, *_ in self.steps[name]), self._in_step_since(name)]
        pauses_s = [(e, b) for e, b in zip(ends_s, begins_s, strict=True) if b > e]
        planned = self.plans[name].course
        stalled = planned.up == 0
        stops_s = np.append(planned.times_s[1:], planned.span_s)
        stalls_s = np.stack((planned.times_s[stalled], stops_s[stalled]), axis=1)
        return full_course(self.span_s, np.concatenate((stalls_s, np.reshape(pauses_s, (-1, 2)))))

    def _in_step_since(self, name: str) -> float:
        """When the step began that a learner is in now; the end of the tape if it is in none."""
        learner, steps = self.learners.get(name), self.steps[name]
        begun_s = learner.begun_s if isinstance(learner, PlannedLearner) else self.span_s
        return begun_s if not steps or begun_s >= steps[-1][1] else self.span_s

    def merged_tokens(self) -> tuple[F64, F64]:
        """Times and tokens of the merges, a fragment's tokens as its share of the model's."""
        count = self.config.fragments.count
        tokens = [sum(each.tokens for each in commit.contributors) for commit in self.commits]
        return self._commit_times_s(), np.array(tokens) / count

    def merged_share(self) -> float:
        """Share of the tokens trained that a merge took in."""
        made = sum(tokens for steps in self.steps.values() for *_, tokens in steps)
        return float(self.merged_tokens()[1].sum()) / made

    def contributions(self) -> dict[str, int]:
        """Merges that each learner contributed to."""
        counts = dict.fromkeys(self.plans, 0)
        for commit in self.commits:
            for contributor in commit.contributors:
                counts[contributor.learner] += 1
        return counts

    def longest_gap_s(self) -> float:
        """Longest time without a new version, seconds of the tape."""
        times_s = np.concatenate(([0.0], self._commit_times_s(), [self.span_s]))
        return float(np.diff(times_s).max())

    def _commit_times_s(self) -> F64:
        return (np.array([commit.at_s for commit in self.commits]) - LEAD_S) * self.step_s


def _is_absent_at_first(plan: MachinePlan) -> bool:
    return bool(len(plan.absences_s)) and float(plan.absences_s[0, 0]) <= 0
