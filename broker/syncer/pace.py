"""The pace of inner steps as the broker sees it: time that passed, steps that were pushed. [pure]

The time between two messages is the broker's own. Only the number of steps is claimed. A learner's
word on the duration of its steps (Report.step_s) is shown to operators and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from narrows.broker.syncer.member import STEP_S_MIN, Member

SAMPLES: Final = 8
"""A learner's step time is the lower median of so many pushes: a pause for an evaluation, or the
compilation of a first step, does not move it."""

DISAGREE_RATIO: Final = 4.0
"""Two learners whose step times differ by more than this contradict each other: one of them may
claim anything."""


@dataclass
class RunPace:
    """Seconds per inner step of each name, and of the run."""

    _samples: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])
    _agreed: float = 0.0
    """The run's last step time that no second learner contradicted; 0: none yet."""

    def pushed(self, member: Member, fragment: int, steps: int, now: float) -> None:
        """A learner has announced a push of so many steps since it adopted the fragment."""
        assert steps >= 1
        since, before = member.copies.adopted_at[fragment], 0
        if since is None or member.stepping is None:
            return
        if member.stepping.first_at > since:
            # The base was there before its first step, which took as long as a compilation does.
            before, since = member.stepping.first_steps, member.stepping.first_at
        if steps <= before or now <= since:
            return
        samples = self._samples.setdefault(member.name, deque(maxlen=SAMPLES))
        samples.append(max((now - since) / (steps - before), STEP_S_MIN))

    def settle(self, ready: Sequence[Member]) -> None:
        """Notes the pace that the ready learners agree on."""
        times = self._times(ready)
        is_lone = len(times) == 1 and (len(self._samples) == 1 or not self._agreed)
        if is_lone or len(times) >= 3 or (len(times) == 2 and not _contradict(times)):
            self._agreed = median_low(times)

    def forget(self, name: str) -> None:
        self._samples.pop(name, None)

    def of(self, name: str) -> float:
        """Seconds per inner step of one learner; 0: unknown."""
        samples = self._samples.get(name)
        return median_low(samples) if samples else 0.0

    def step_s(self, ready: Sequence[Member]) -> float:
        """Seconds per inner step of the run, xi_step; 0: nobody has made two steps yet.

        It is the lower median over the ready learners that have contributed. Of two that contradict
        each other nobody can say which is right: the pace stays where it was before, as far as it
        lies between theirs. Before the first contribution it is the lower median of what can be
        seen of the ready learners: the time since the first report of a step, by steps since then.
        """
        times = self._times(ready)
        if not times:
            seen = [member.stepping.step_s for member in ready if member.stepping is not None]
            seen = [step_s for step_s in seen if step_s > 0.0]
            return median_low(seen) if seen else 0.0
        if len(times) == 2 and _contradict(times):
            return min(max(self._agreed or times[0], times[0]), times[1])
        return median_low(times)

    def _times(self, ready: Sequence[Member]) -> list[float]:
        return sorted(self.of(member.name) for member in ready if self._samples.get(member.name))


def _contradict(times: Sequence[float]) -> bool:
    return times[-1] > DISAGREE_RATIO * times[0]
