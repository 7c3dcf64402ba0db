"""Decision when to merge a round: quorum, adaptive grace window, predicted arrivals. [pure]

This module decides and gives the reason. It keeps no state and changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Kinds of decision about a round."""

    WAIT = "wait"
    """The quorum is not met, or (lockstep modes) somebody has not answered."""
    GRACE = "grace"
    """The quorum is met; waiting until `until` can still add contributions."""
    MERGE = "merge"
    CLOSE = "close"
    """Nobody will contribute: close the round without a merge."""


@dataclass(frozen=True)
class Decision:
    """Decision about a round, with its reason; `until` (s) is set for GRACE."""

    verdict: Verdict
    reason: str
    until: float | None = None

    def __post_init__(self) -> None:
        assert self.reason
        assert (self.until is not None) is (self.verdict is Verdict.GRACE)


@dataclass(frozen=True)
class Awaited:
    """A learner whose contribution has not arrived and may still come."""

    name: str
    announced: bool
    late: bool
    """Nothing was heard from it for a while (the yellow state)."""
    predicted_s: float | None
    """Seconds from the opening of a round to its contribution, mean + 3 deviations."""
    mean_s: float = 0.0
    """The mean alone."""
    here: bool = False
    """All of its push has arrived and is being decoded."""


@dataclass(frozen=True)
class QuorumRule:
    """Settings of the decision. Times in seconds."""

    quorum: int
    everybody: bool
    """Every live learner must answer: in the lockstep modes, and at the end, where waiting costs no
    work."""
    closing: bool
    """The end of the run: below the quorum a round is closed, nobody new will come."""
    overlap_steps: int
    grace_fraction: float
    grace_max_s: float
    wait_fraction: float
    """Longest wait for predicted arrivals after the quorum, in units of H * step time."""
    sync_period_steps: int

    def grace_s(self, *, step_s: float, quorum_s: float, sync_s: float) -> float:
        """Grace window: gamma * (tau*xi_step - xi_quorum - xi_sync), clamped to [0, max].

        Source: Decoupled DiLoCo (arXiv 2604.21428), Eq. 3.
        """
        assert quorum_s >= 0.0 and sync_s >= 0.0
        # Learners train for the overlap in any case: waiting within it costs them nothing.
        slack_s = self.overlap_steps * step_s - quorum_s - sync_s
        return min(max(self.grace_fraction * slack_s, 0.0), self.grace_max_s)

    def decide(
        self,
        now: float,
        *,
        opened_at: float,
        quorum_at: float | None,
        complete: int,
        awaited: Sequence[Awaited],
        step_s: float,
        sync_s: float,
        declined: Sequence[str] = (),
    ) -> Decision:
        """The decision for one round.

        `quorum_at` is the time at which the K-th contribution was complete. `declined` names the
        live learners that have declined, with the reason; below the quorum the round waits for
        them, since they push when they can.
        """
        assert opened_at <= now and complete >= 0
        assert (quorum_at is not None) is (complete >= self.quorum)
        if not awaited:
            if complete >= self.quorum:
                return Decision(Verdict.MERGE, f"all {complete} expected contributions are here")
            if self.closing or not (complete or declined):
                return Decision(Verdict.CLOSE, "no learner has anything to contribute")
            others = ", ".join(declined) or "nobody else is here"
            have = f"{complete} of {self.quorum} contributions"
            return Decision(Verdict.WAIT, f"{have}; {others}")
        # A lockstep merge without one learner would be another algorithm.
        if self.everybody:
            names = ", ".join(learner.name for learner in awaited)
            return Decision(Verdict.WAIT, f"waits for {names}: every live learner must answer")
        if complete < self.quorum or quorum_at is None:
            return Decision(Verdict.WAIT, f"{complete} of {self.quorum} contributions")
        grace = self.grace_s(step_s=step_s, quorum_s=quorum_at - opened_at, sync_s=sync_s)
        # The longest wait counts from the quorum, not from the opening: a line on which every push
        # takes longer would merge one contribution at a time.
        longest = quorum_at + self.wait_fraction * self.sync_period_steps * step_s
        until = max([quorum_at + grace, *(self._arrival(w, opened_at, longest) for w in awaited)])
        missing = ", ".join(learner.name for learner in awaited)
        if any(learner.here for learner in awaited):
            # If decoding takes long, the broker is late. Its own delay would shut out learners
            # that were in time, and on a busy machine all but the first.
            return Decision(Verdict.WAIT, f"{complete} contributions; being decoded: {missing}")
        if now >= until:
            return Decision(
                Verdict.MERGE, f"{complete} contributions; waited long enough: {missing}"
            )
        return Decision(
            Verdict.GRACE, f"{complete} contributions; may still come: {missing}", until
        )

    def _arrival(self, learner: Awaited, opened_at: float, longest: float) -> float:
        """Time until which waiting for this learner pays.

        A learner that has gone quiet without announcing is not waited for beyond the grace
        window; one without history gets the longest wait, because the first rounds of a run
        with one contributor each are what hurts most (K = 1 without grace).
        """
        if learner.late and not learner.announced:
            return opened_at
        if learner.predicted_s is None:
            return longest
        if opened_at + learner.mean_s > longest:
            return opened_at  # It would most likely come too late anyway.
        return min(opened_at + learner.predicted_s, longest)
