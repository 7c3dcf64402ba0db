"""Pushes and adoptions of a learner, fragment by fragment."""

from __future__ import annotations

import pytest
from seat import DILOCO, joined

from narrows.learner.effects import Adopt, Forget, Note, SendChunks, Snapshot
from narrows.learner.session import Ledger
from narrows.proto import messages as msg
from narrows.proto.messages import DataKind, Phase


def test_a_learner_pushes_what_an_open_round_asks_for_once() -> None:
    seat = joined()
    seat.step(8)
    assert not seat.take(Snapshot)
    seat.told(collecting=(1,))
    seat.step(9)
    assert seat.take(Snapshot) == [Snapshot(1, 1, 0)]
    assert not seat.sent(msg.Push)  # Announced when it is coded: chunks follow at once.
    seat.session.encoded(1, 1, seat.now)
    seat.step(8)
    assert seat.sent(msg.Push) == [msg.Push(1, 1, 0, 17, 2)]
    assert seat.take(SendChunks) == [SendChunks(DataKind.PUSH, 1, 1, None)]
    assert not seat.take(Snapshot)


def test_a_round_that_is_over_is_not_answered() -> None:
    """The Beat of the round's launch is still the newest when its version has been adopted."""
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.encode()
    seat.publish(0, 1, 1)
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [1]
    seat.step()
    assert not seat.take(Snapshot)
    seat.told(heads=(1, 0), collecting=(0,))
    seat.step()
    assert seat.take(Snapshot) == [Snapshot(0, 2, 1)]


def test_a_round_on_a_version_that_is_not_here_yet_is_answered_after_its_adoption() -> None:
    seat = joined()
    seat.told(heads=(1, 0), collecting=(0,))
    seat.step()
    assert not seat.take(Snapshot)
    seat.publish(0, 1)
    seat.step()
    assert [type(each) for each in seat.log if isinstance(each, Adopt | Snapshot)] == [
        Adopt,
        Snapshot,
    ]
    assert seat.take(Snapshot) == [Snapshot(0, 1, 1)]


def test_an_adoption_keeps_half_and_says_whether_the_push_is_merged() -> None:
    seat = joined()
    seat.told(collecting=(0, 1))
    seat.step()
    seat.encode()
    seat.publish(0, 1, 1)
    seat.publish(1, 1)
    seat.step()
    assert seat.take(Adopt) == [
        Adopt(0, 1, 1, 0.5, merged=True, overwrite=False),
        Adopt(1, 1, 2, 0.5, merged=False, overwrite=False),
    ]
    assert seat.take(Forget) == [Forget(0, 1)]
    assert seat.session.ledger == Ledger(16, 4, 0)  # Half of the model's share of 8 tokens.
    seat.publish(1, 2, 2)
    seat.step()
    assert seat.take(Adopt) == [Adopt(1, 2, 2, 0.5, merged=True, overwrite=False)]


def test_an_adoption_waits_until_the_push_is_coded() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.publish(0, 1)
    seat.step()
    assert not seat.take(Adopt)
    seat.encode()
    seat.step()
    assert seat.take(Adopt) == [Adopt(0, 1, 1, 0.5, merged=False, overwrite=False)]


def test_a_slow_learner_pushes_at_every_boundary_and_keeps_everything() -> None:
    seat = joined()
    for _ in range(3):
        seat.step(after_s=2.0)
        seat.told(period_s=3.0)
        seat.encode()
    seat.take(Adopt)
    seat.publish(0, 1)
    seat.publish(0, 2, 1)
    seat.step(after_s=2.0)
    # Two versions behind at each of its steps, and that is no absence.
    assert seat.take(Adopt) == [Adopt(0, 2, 1, 1.0, merged=True, overwrite=False)]
    assert [each.base for each in seat.take(Snapshot) if each.fragment == 0] == [2]


def test_a_step_of_less_than_half_a_period_is_not_slow() -> None:
    seat = joined()
    for _ in range(3):
        seat.step(after_s=1.0)
        seat.told(period_s=3.0)
    assert not seat.take(Snapshot)


def test_work_of_an_absence_is_not_kept_but_its_waiting_push_is() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step(8)
    seat.encode()
    seat.step(9)
    seat.publish(0, 1)
    seat.publish(0, 2)
    seat.step(10)
    assert seat.take(Adopt) == [Adopt(0, 2, 1, 0.0, merged=False, overwrite=False)]
    assert not seat.take(Forget)
    assert seat.session.ledger.lost == (9 + 10) // 2


def test_nothing_is_kept_in_the_ramp_of_a_newcomer() -> None:
    seat = joined()
    seat.session.ramp_steps = 1
    seat.publish(0, 1)
    seat.step()
    seat.publish(0, 2)
    seat.step()
    assert [each.keep for each in seat.take(Adopt)] == [0.0, 0.5]


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
    assert seat.take(Forget) == [Forget(0, 1)]
    seat.step(9)
    assert seat.take(Snapshot) == [Snapshot(0, 2, 0)]
    seat.session.encoded(0, 2, seat.now)
    seat.step()
    assert seat.sent(msg.Push)[-1] == msg.Push(0, 2, 0, 17, 2)


def test_parameters_that_are_not_finite_are_set_back_to_the_base() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.fail(finite=False)
    assert [each.event for each in seat.take(Note)] == ["encode_failed"]
    seat.step()
    (adopt,) = seat.take(Adopt)
    assert (adopt.fragment, adopt.version, adopt.overwrite) == (0, 0, True)
    seat.step()
    assert [each.fragment for each in seat.take(Snapshot)] == [0]


def test_a_lockstep_learner_pushes_after_its_steps_and_waits_for_the_version() -> None:
    seat = joined(DILOCO)
    for _ in range(3):
        seat.step()
        assert not seat.take(Snapshot) and not seat.session.must_wait(seat.now)
    seat.step()
    assert len(seat.take(Snapshot)) == 2
    assert seat.session.must_wait(seat.now)
    for fragment in range(2):
        seat.session.encoded(fragment, fragment + 1, seat.now)
        seat.publish(fragment, 1, fragment + 1)
    seat.rest()
    assert [(each.keep, each.merged) for each in seat.take(Adopt)] == [(0.0, True), (0.0, True)]
    assert seat.session.must_wait(seat.now), "no Beat has said that the run goes on"
    seat.told(heads=(1, 1))
    assert not seat.session.must_wait(seat.now)


def test_a_lockstep_learner_that_was_passed_by_waits_before_its_next_push() -> None:
    seat = joined(DILOCO)
    for _ in range(4):
        seat.step()
    seat.encode()
    for fragment in range(2):
        seat.publish(fragment, 1)
    seat.told(heads=(1, 1))
    seat.rest()
    for _ in range(4):
        assert not seat.session.must_wait(seat.now)
        seat.step()
    assert seat.session.must_wait(seat.now)


def test_waiting_pushes_are_announced_at_every_welcome_and_sent_again_to_a_new_life() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.encode()
    (push,) = seat.sent(msg.Push)
    seat.welcome()
    assert seat.sent(msg.Push) == [push] and not seat.take(SendChunks)
    seat.restart()
    seat.welcome()
    assert seat.sent(msg.Push) == [push]
    assert seat.take(SendChunks) == [SendChunks(DataKind.PUSH, 0, 1, None)]


def test_a_push_that_is_already_in_the_copy_is_not_announced_again() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.encode()
    seat.publish(0, 1, 1)
    seat.sent(msg.Push)
    seat.welcome(heads=(1, 0))
    assert not seat.sent(msg.Push)


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
    seat.hear(msg.Fetch(DataKind.PUSH, 0, 0, 7, ((2, 1),)))
    seat.hear(msg.Fetch(DataKind.PUSH, 9, 0, 1, ((2, 1),)))
    seat.hear(msg.Fetch(DataKind.SEED, 0, 0, 0, ((2, 1),)))
    assert not seat.take(SendChunks)


def test_the_state_tells_whether_it_holds_the_waiting_push() -> None:
    for held, merged in ((0, False), (1, True)):
        seat = joined()
        seat.told(collecting=(0,))
        seat.step()
        seat.encode()
        seat.told(heads=(20, 0))
        seat.state(0, 20, push_id=held)
        seat.step()
        assert seat.take(Adopt) == [Adopt(0, 20, 1, 0.0, merged=merged, overwrite=False)]


def test_no_step_of_a_run_that_ends_is_halved() -> None:
    seat = joined()
    seat.step()
    seat.publish(0, 1)
    seat.told(phase=Phase.ENDING)
    seat.rest()
    assert seat.take(Adopt) == [Adopt(0, 1, 0, 1.0, merged=False, overwrite=False)]
    assert len(seat.take(Snapshot)) == 2
