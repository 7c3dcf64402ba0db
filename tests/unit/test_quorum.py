"""The time at which a round is merged: the quorum, the grace window, predicted arrivals, the
end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from narrows.bench.sim.broker import SimulatedRound
from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import load_config
from narrows.broker.syncer.quorum import Awaited, Decision, QuorumRule, Verdict


def rule(*, quorum: int = 1, everybody: bool = False, closing: bool = False) -> QuorumRule:
    return QuorumRule(
        quorum=quorum,
        everybody=everybody,
        closing=closing,
        overlap_steps=4,
        grace_fraction=0.5,
        grace_max_s=30.0,
        wait_fraction=0.25,
        sync_period_steps=20,
    )


def waiting(
    *, announced: bool = True, late: bool = False, predicted_s: float | None = None
) -> Awaited:
    return Awaited("b", announced, late, predicted_s)


def decide(
    now: float,
    awaited: Sequence[Awaited],
    *,
    complete: int = 1,
    declined: Sequence[str] = (),
    **fields: bool,
) -> Decision:
    """The round was opened at 0, its first contribution was complete at 1; steps take 1 s."""
    quorum_at = 1.0 if complete else None
    return rule(**fields).decide(
        now,
        opened_at=0.0,
        quorum_at=quorum_at,
        complete=complete,
        awaited=awaited,
        step_s=1.0,
        sync_s=0.5,
        declined=declined,
    )


@pytest.mark.parametrize(
    ("quorum_s", "sync_s", "grace_s"),
    [(0.0, 0.0, 2.0), (1.0, 1.0, 1.0), (3.0, 3.0, 0.0)],
)
def test_grace_is_a_share_of_the_slack_and_never_negative(
    quorum_s: float, sync_s: float, grace_s: float
) -> None:
    assert rule().grace_s(step_s=1.0, quorum_s=quorum_s, sync_s=sync_s) == grace_s


def test_grace_is_capped() -> None:
    assert rule().grace_s(step_s=1000.0, quorum_s=0.0, sync_s=0.0) == 30.0


def test_all_here_is_merged_at_once() -> None:
    assert decide(1.0, []).verdict is Verdict.MERGE


def test_nobody_and_nothing_closes_the_round() -> None:
    assert decide(1.0, [], complete=0).verdict is Verdict.CLOSE


def test_below_the_quorum_the_round_waits_whatever_the_time() -> None:
    assert decide(1e9, [waiting()], complete=0).verdict is Verdict.WAIT


def test_after_the_quorum_the_grace_window_is_open() -> None:
    # slack 4 - 1 - 0.5 = 2.5 s, half of it after the quorum at 1 s.
    decision = decide(1.5, [waiting(announced=False, late=True)])
    assert (decision.verdict, decision.until) == (Verdict.GRACE, 2.25)
    assert "b" in decision.reason


def test_grace_ends_at_its_deadline() -> None:
    assert decide(2.25, [waiting(announced=False, late=True)]).verdict is Verdict.MERGE


def test_a_predicted_arrival_is_waited_for_beyond_the_grace() -> None:
    assert decide(2.25, [waiting(predicted_s=4.0)]).until == 4.0


def test_a_prediction_is_waited_for_a_quarter_period_at_most() -> None:
    assert decide(2.25, [waiting(predicted_s=60.0)]).until == 6.0


def test_a_learner_without_history_gets_the_longest_wait() -> None:
    assert decide(2.25, [waiting(predicted_s=None)]).until == 6.0


def test_a_late_learner_whose_push_is_announced_is_waited_for() -> None:
    assert decide(2.25, [waiting(late=True, predicted_s=4.0)]).until == 4.0


def test_in_lockstep_everybody_is_waited_for_without_a_deadline() -> None:
    decision = decide(1e9, [waiting()], everybody=True)
    assert (decision.verdict, decision.until) == (Verdict.WAIT, None)


def test_in_lockstep_the_quorum_holds_too() -> None:
    decision = rule(quorum=2, everybody=True).decide(
        9.0, opened_at=0.0, quorum_at=None, complete=1, awaited=[], step_s=1.0, sync_s=0.0
    )
    assert decision.verdict is Verdict.WAIT


def test_short_of_the_quorum_the_round_waits_for_who_declined_until_the_end() -> None:
    declined = ("b declined (evaluating)",)
    decision = decide(9.0, [], complete=0, declined=declined)
    assert decision == Decision(Verdict.WAIT, "0 of 1 contributions; b declined (evaluating)")
    assert decide(9.0, [], complete=0, declined=declined, closing=True).verdict is Verdict.CLOSE


def test_contributions_below_the_quorum_are_given_up_at_the_end_only() -> None:
    for closing, verdict in ((False, Verdict.WAIT), (True, Verdict.CLOSE)):
        decision = rule(quorum=2, closing=closing).decide(
            9.0, opened_at=0.0, quorum_at=None, complete=1, awaited=[], step_s=1.0, sync_s=0.0
        )
        assert decision.verdict is verdict


def test_what_is_being_decoded_is_waited_for_whatever_the_time() -> None:
    awaited = Awaited("b", True, True, 2.0, here=True)
    assert decide(1000.0, [awaited]).verdict is Verdict.WAIT
    assert decide(1000.0, [waiting(predicted_s=2.0)]).verdict is Verdict.MERGE


@pytest.mark.parametrize("latency_s", [1.0, 2.0, 10.0])
def test_on_a_long_line_learners_are_merged_together(latency_s: float) -> None:
    flags = {"run.goal_tokens": 400 * 200, "run.learners_at_start": 4, "fragments.count": 2}
    faults = Faults(until_s=0.0, latency_s=(latency_s, latency_s))
    learners = [LearnerSpec(name, step_s=1.0) for name in "abcd"]
    run = Simulation(load_config(None, flags), 1, faults, learners)
    run.run(220.0)
    merges = [record for record in run.trace if isinstance(record, SimulatedRound)]
    assert len(merges) > 8 and fmean(len(merge.contributors) for merge in merges) > 3.5
