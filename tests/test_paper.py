"""The claims of the paper that are used, one per test: readable as a summary of the algorithm.

Decoupled DiLoCo (arXiv 2604.21428) and its predecessor Streaming DiLoCo (arXiv 2501.18512). The
full text of the former was not at hand. Claims that derivatives report, but the authors do not
print, are marked as such.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from machines import SETTINGS, Desk, Seat, one, only, open_round

from narrows.broker.config import BrokerConfig
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.weights import token_weights
from narrows.broker.syncer import events as bev
from narrows.broker.syncer.quorum import QuorumRule
from narrows.learner.session import events as lev
from narrows.proto import messages as msg
from narrows.proto.fragments import build_table
from narrows.proto.schedule import snapshot_step


def test_eq_3_grace_is_a_safe_share_of_the_slack() -> None:
    """xi_slack = tau * xi_step - (xi_quorum + xi_sync); xi_grace = gamma * xi_slack, gamma < 1."""
    rule = QuorumRule(
        quorum=1,
        everybody=False,
        closing=False,
        overlap_steps=2,
        grace_fraction=0.9,
        grace_max_s=math.inf,
        wait_fraction=0.0,
        sync_period_steps=24,
    )
    assert rule.grace_s(step_s=10.0, quorum_s=1.0, sync_s=3.0) == pytest.approx(0.9 * 16.0)
    assert rule.grace_s(step_s=1.0, quorum_s=1.0, sync_s=3.0) == 0.0
    assert BrokerConfig().merge.grace_fraction < 1


def test_a_quorum_of_one_is_enough() -> None:
    """Sec. 3: K = 1 keeps the run going whatever happens to the other learners."""
    assert BrokerConfig().merge.quorum == 1
    desk = Desk().running("a", "b")
    effects = desk.contribute("a", steps=11)  # One per second since version 0.
    for _ in range(20):
        desk.say("a", msg.Alive(0))
        effects += desk.say("b", msg.Alive(0), after_s=0.5)
    merge = one(effects, bev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a"]


def test_a_learner_that_misses_a_round_contributes_more_to_the_next() -> None:
    """Sec. 3: late work is omitted, not lost: it is merged when the fragment is due again."""
    seat = Seat().joined()
    for _ in range(5):
        seat.step(tokens=100)
    seat.beat((0, 0), open_round(0, 0))
    push = one(seat.step(tokens=100), msg.Push)
    assert (push.tokens, push.steps) == (600, 6)


def test_sec_3_2_weights_are_quantity_times_quality() -> None:
    """w = c_tokens * (c_tokens / c_steps): tokens, times tokens per step."""
    weights = token_weights([(400, 4), (400, 2)], rule="tokens")
    assert weights == pytest.approx([1 / 3, 2 / 3])
    weights = token_weights([(100, 1), (200, 2)], rule="tokens")
    assert weights == pytest.approx([1 / 3, 2 / 3])


def test_adoption_overwrites_and_resets_the_counters() -> None:
    """Sec. 3: theta <- Theta without blending, whether or not the push was merged; c <- 0."""
    seat = Seat().joined()
    seat.step(tokens=100)
    seat.receive(0, 1)
    effects = seat.do(lev.BoundaryReached())
    assert one(effects, lev.Adopt) == lev.Adopt(0, 1)
    account = seat.session.fragments[0].account
    assert (account.tokens, account.steps) == (0, 0)
    other = seat.session.fragments[1].account
    assert (other.tokens, other.steps) == (100, 1)


def test_learners_never_wait_for_the_syncer() -> None:
    """Sec. 3: the loop neither blocks on the syncer nor on peers."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    for _ in range(200):
        seat.step()
        assert not seat.session.view().must_wait(seat.now)


def test_a_push_is_made_against_what_was_adopted() -> None:
    """Known pitfall: a request that overtakes the broadcast would be answered on a stale base."""
    seat = Seat().joined()
    seat.step()
    assert not only(seat.beat((1, 0), open_round(0, 1)), lev.Snapshot)
    assert not only(seat.step(), lev.Snapshot)
    seat.receive(0, 1)
    seat.do(lev.BoundaryReached())
    assert one(seat.step(), lev.Snapshot).base_version == 1


def test_the_launch_floor_keeps_the_effective_period() -> None:
    """Known pitfall: a fast network shrinks H, and outer momentum over-drives. The launch interval
    is at least H * xi_step / P."""
    desk = Desk(fragments__sync_period_steps=20).running("a")
    first_at, first = desk.now, desk.round.fragment
    desk.contribute("a", first, steps=11)  # One per second since version 0.
    desk.do(bev.Merged(first, 1, 1, 0))
    launched_at = desk.syncer.scheduler.launched_at
    assert launched_at <= first_at
    while not desk.state.open_rounds():
        desk.say("a", msg.Alive(0), after_s=0.25)
    assert desk.now - launched_at >= 20 * 1.0 / 2
    assert desk.now - launched_at < 20 * 1.0 / 2 + 0.5
    assert desk.round.fragment != first


def test_two_fragments_are_in_flight_round_robin() -> None:
    """Sec. 3: "double buffering"; each fragment comes once per period."""
    assert BrokerConfig().merge.rounds_in_flight == 2
    desk = Desk(fragments__count=1).running("a", "b")
    assert len(desk.state.open_rounds()) == 1
    desk = Desk().running("a", "b")
    for _ in range(30):
        desk.say("a", msg.Alive(0))
        desk.say("b", msg.Alive(0), after_s=1.0)
    assert [round_.fragment for round_ in desk.state.open_rounds()] == [0, 1]


def test_versions_are_the_vector_clock() -> None:
    """Sec. 3: one counter per fragment; a learner that comes back asks for what it lacks."""
    desk = Desk().running("a")
    desk.contribute("a")
    desk.do(bev.Merged(0, 1, 1, 0))
    assert desk.state.versions == (1, 0)
    seat = Seat().joined()
    seat.hear(msg.Bye(""))
    effects = seat.welcome((3, 0))
    assert only(effects, msg.Fetch) == [msg.Fetch(0, 0)]


def test_app_c_fragments_are_balanced() -> None:
    """App. C: largest first into the smallest fragment; deterministic."""
    layout = tuple(
        msg.LayoutEntry(f"t{i}", (rows, 8), "float32", "rda") for i, rows in enumerate((9, 7, 6, 5))
    )
    table = build_table(layout, 2)
    sizes = [fragment.elements for fragment in table]
    assert max(sizes) <= 4 / 3 * sum(sizes) / 2
    assert [f.pieces for f in build_table(layout, 2)] == [f.pieces for f in table]


def test_the_outer_optimizer_is_nesterov() -> None:
    """b <- mu b + d; Theta <- Theta - rate (d + mu b): gain 1 + mu at first, 1 / (1 - mu) later.
    The paper prints neither rate nor momentum."""
    optimizer = outer_optimizer("nesterov", lr=1.0, momentum=0.5)
    params, momentum = np.zeros(1, np.float32), np.zeros(1, np.float32)
    steps: list[float] = []
    for _ in range(30):
        before = float(params[0])
        params, momentum = optimizer.step(params, momentum, np.ones(1, np.float32))
        steps.append(before - float(params[0]))
    assert steps[0] == pytest.approx(1.5)
    assert steps[-1] == pytest.approx(2.0)


def test_streaming_spreads_the_fragments_over_the_period() -> None:
    """Streaming DiLoCo, Sec. 2: each fragment is due every H steps, the fragments H / P apart."""
    due = [snapshot_step(SETTINGS, fragment, 0) for fragment in (0, 1)]
    assert due == [2, 4]
    assert snapshot_step(SETTINGS, 0, 3) - snapshot_step(SETTINGS, 0, 2) == 4
