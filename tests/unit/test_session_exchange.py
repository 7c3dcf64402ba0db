"""Pushes and adoptions of a learner, fragment by fragment."""

from __future__ import annotations

import pytest
from seat import DILOCO, joined, waiting

from narrows.learner.effects import Adopt, SendChunks, Snapshot
from narrows.proto import messages as msg
from narrows.proto.messages import DataKind


def test_a_round_is_answered_on_the_version_that_it_builds_on_and_no_other() -> None:
    seat = joined()
    seat.told(heads=(1, 0), collecting=(0,))
    seat.step()
    assert not seat.take(Snapshot), "that version is not here yet"
    seat.publish(0, 1)
    seat.step()
    assert [type(each) for each in seat.take((Adopt, Snapshot))] == [Adopt, Snapshot]
    seat.publish(0, 2)
    seat.step()
    assert not seat.take(Adopt), "it waits until the push is coded"
    seat.session.encoded(0, 1, seat.now)
    seat.publish(0, 3, 1)
    for _ in range(2):
        seat.step()
    # The Beat of the round's launch is still the newest when its version has been adopted.
    assert seat.take(Adopt) and not seat.take(Snapshot)
    seat.told(heads=(3, 0), collecting=(0,))
    seat.step()
    assert seat.take(Snapshot) == [Snapshot(0, 2, 3)]


def test_an_adoption_keeps_half_and_says_whether_the_push_is_merged() -> None:
    seat = waiting()
    seat.told(collecting=(1,))
    seat.step()
    seat.encode()
    seat.publish(0, 1, 1)
    seat.publish(1, 1)
    seat.step()
    assert seat.take(Adopt) == [
        Adopt(0, 1, 1, 0.5, merged=True, overwrite=False),
        Adopt(1, 1, 2, 0.5, merged=False, overwrite=False),
    ]
    assert [part.push_id for part in seat.session.parts] == [0, 2]
    assert (seat.session.merged_tokens, seat.session.lost_tokens) == (4, 0), "half of the model"
    seat.publish(1, 2, 2)
    seat.step()
    assert seat.take(Adopt) == [Adopt(1, 2, 2, 0.5, merged=True, overwrite=False)]


def test_no_round_is_open_as_far_as_a_learner_knows_that_is_cut_off() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.session.lost(seat.now)
    seat.step()
    assert not seat.take(Snapshot)
    seat.welcome(heads=(0, 0), collecting=(0,))
    seat.step()
    assert len(seat.take(Snapshot)) == 1


def test_a_slow_learner_pushes_at_every_boundary_and_keeps_everything() -> None:
    seat = joined()
    for step_s in (1.0, 1.0, 2.0, 2.0):
        assert not seat.take(Snapshot), "half a period is not slow"
        seat.step(after_s=step_s)
        seat.told(period_s=3.0)
    assert len(seat.encode()) == 2
    seat.publish(0, 1)
    seat.publish(0, 2, 1)
    seat.step(after_s=2.0)
    # Two versions behind at each of its steps, and that is no absence.
    assert seat.take(Adopt) == [Adopt(0, 2, 1, 1.0, merged=True, overwrite=False)]
    assert [each.base for each in seat.take(Snapshot) if each.fragment == 0] == [2]


def test_work_of_an_absence_is_given_up_but_its_waiting_push_is_not() -> None:
    seat = waiting()
    seat.step(9)
    for absence in (1, 2):
        seat.told(heads=(2 * absence, 2 * absence))
        for fragment in range(2):
            for version in (2 * absence - 1, 2 * absence):
                seat.publish(fragment, version)
            seat.step(10)
        assert seat.noted() == ["given_up"], "once for an absence, whatever the fragments"
    first = seat.take(Adopt)[0]
    assert first == Adopt(0, 2, 1, 0.0, merged=False, overwrite=False)
    assert seat.session.parts[0].push_id == 1 and seat.session.parts[0].lost_tokens > 9 + 10


def test_nothing_is_kept_in_the_ramp_of_a_newcomer() -> None:
    seat = joined()
    seat.session.ramp_steps = 1
    seat.publish(0, 1)
    seat.step()
    seat.publish(0, 2)
    seat.step()
    assert [each.keep for each in seat.take(Adopt)] == [0.0, 0.5]
    assert not seat.noted(), "it is meant so"


@pytest.mark.parametrize("how", ["refused", "not coded"])
def test_the_work_of_a_push_that_fails_counts_as_unpushed_again(how: str) -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step(8)
    if how == "refused":
        seat.encode()
        seat.refuse("bad_payload", 0, 1)
    else:
        seat.fail()
    assert seat.session.parts[0].push is None
    seat.step(9)
    assert seat.take(Snapshot) == [Snapshot(0, 2, 0)]
    seat.session.encoded(0, 2, seat.now)
    seat.step()
    assert seat.sent(msg.Push)[-1] == msg.Push(0, 2, 0, 17, 2)


@pytest.mark.parametrize("passed_by", [False, True])
def test_a_lockstep_learner_pushes_after_its_steps_and_waits_for_the_version(
    passed_by: bool,
) -> None:
    seat = joined(DILOCO)
    for _ in range(4):
        assert not seat.take(Snapshot) and not seat.session.must_wait(seat.now)
        seat.step()
    assert len(seat.encode()) == 2 and seat.session.must_wait(seat.now)
    for fragment in range(2):
        seat.publish(fragment, 1, *() if passed_by else (fragment + 1,))
    seat.rest()
    assert [each[3:5] for each in seat.take(Adopt)] == 2 * [(0.0, not passed_by)]
    if not passed_by:
        assert seat.session.must_wait(seat.now), "no Beat has said that the run goes on"
    seat.told(heads=(1, 1))
    for _ in range(4):
        assert not seat.session.must_wait(seat.now)
        seat.step()
    assert seat.session.must_wait(seat.now)


def test_waiting_pushes_are_announced_at_every_welcome_and_sent_again_to_a_new_life() -> None:
    seat = waiting()
    (push,) = seat.sent(msg.Push)
    seat.welcome()
    assert seat.sent(msg.Push) == [push] and not seat.take(SendChunks)
    seat.restart()
    seat.welcome()
    assert seat.sent(msg.Push) == [push]
    assert seat.take(SendChunks) == [SendChunks(DataKind.PUSH, 0, 1)]
    seat.publish(0, 1, 1)
    seat.welcome(heads=(1, 0))
    assert not seat.sent(msg.Push), "a version that is here holds it"


def test_the_broker_gets_chunks_of_waiting_pushes_only() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    ask = msg.Fetch(DataKind.PUSH, 0, 0, 1, ((2, 1),))
    seat.hear(ask)
    assert not seat.take(SendChunks)  # Not coded yet.
    seat.encode()
    seat.hear(ask)
    assert seat.take(SendChunks) == [SendChunks(DataKind.PUSH, 0, 1, ((2, 1),))]
    for kind, fragment, push_id in (
        (DataKind.PUSH, 0, 7), (DataKind.PUSH, 9, 1), (DataKind.SEED, 0, 0),
    ):  # fmt: skip
        seat.hear(msg.Fetch(kind, fragment, 0, push_id, ((2, 1),)))
    assert not seat.take(SendChunks)
