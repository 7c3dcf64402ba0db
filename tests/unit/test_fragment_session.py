"""One fragment at a learner: publications in order, gaps, states, outcomes of pushes."""

from __future__ import annotations

import pytest
from machines import Seat, digest, one, only, open_round

from narrows.learner.session import events as ev
from narrows.learner.session.arriving import AHEAD_MAX
from narrows.proto import messages as msg
from narrows.proto.limits import PUBLICATIONS_KEPT

STATE = msg.DataKind.STATE


def test_a_publication_in_chunks_is_applied_when_complete() -> None:
    seat = Seat().joined()
    assert not only(seat.data(0, 1, count=600), ev.Apply)
    apply = one(seat.data(0, 1, offset=600, count=400), ev.Apply)
    assert apply.handles == (seat.handle - 1, seat.handle)
    effects = seat.do(ev.Applied(0, 1, digest(0, 1)))
    assert one(effects, ev.Drop).handles == apply.handles


def test_publications_that_overtake_each_other_are_applied_in_order() -> None:
    seat = Seat().joined()
    assert not only(seat.data(0, 2), ev.Apply)
    assert one(seat.data(0, 1), ev.Apply).version == 1
    assert one(seat.do(ev.Applied(0, 1, digest(0, 1))), ev.Apply).version == 2


def test_a_gap_is_asked_for_although_later_publications_arrive() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    asked: list[msg.Fetch] = []
    for version in range(2, 8):
        seat.beat((version, 0))
        seat.data(0, version)
        asked += only(seat.wait(0.4), msg.Fetch)
    assert asked and asked[0] == msg.Fetch(0, 0)


def test_a_joiner_asks_for_its_state_although_publications_arrive() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome((5, 0))
    asked: list[msg.Fetch] = []
    for version in range(6, 16):
        seat.beat((version, 0))
        seat.data(0, version)
        asked += [fetch for fetch in only(seat.wait(0.4), msg.Fetch) if fetch.fragment == 0]
    assert len(asked) >= 2 and {fetch.have_version for fetch in asked} == {-1}


def test_what_misses_of_a_started_transfer_is_asked_for_by_range() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    seat.data(0, 1, offset=100, count=200)
    asked = only(seat.wait(3.0), msg.Missing)
    expected = ((0, 100), (300, 700))
    assert asked[0] == msg.Missing(msg.DataKind.PUBLICATION, 0, 1, 0, expected)


def test_what_arrives_by_itself_is_not_asked_for() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    effects = seat.wait(0.45)
    seat.receive(0, 1)
    effects += seat.wait(3.0)
    assert not only(effects, msg.Fetch) and not only(effects, msg.Missing)


def test_questions_come_twice_as_late_each_time() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    times: list[float] = []
    start = seat.now
    while len(times) < 5:
        seat.beat((1, 0))
        if only(seat.wait(0.25), msg.Fetch):
            times.append(seat.now - start)
    assert times == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_a_state_beats_the_publications_below_it() -> None:
    seat = Seat().joined()
    seat.beat((9, 0))
    seat.data(0, 5)
    effects = seat.receive(0, 9, kind=STATE)
    assert one(effects, ev.Install).version == 9
    assert not any(each.held_handles() for each in seat.session.fragments)


def test_a_state_that_is_cut_anew_begins_again_with_the_new_chunks() -> None:
    """The broker cuts anew when its rate changes; of both cuts together nothing could be made."""
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome((5, 0))
    seat.data(0, 5, kind=STATE, count=600)
    effects = seat.data(0, 5, kind=STATE, count=500, payload_digest=77)
    assert one(effects, ev.Drop).handles == (1,)
    assert not only(effects, ev.Note)
    apply = one(seat.data(0, 5, kind=STATE, offset=500, count=500), ev.Apply)
    assert apply.handles == (2, 3)


def test_publications_wait_for_the_state_below_them() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome((5, 0))
    seat.data(0, 6)
    seat.beat((6, 0))
    effects = seat.receive(0, 5, kind=STATE)
    assert one(effects[-1:], ev.Apply).version == 6


def test_publications_kept_for_a_state_are_bounded() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome((0, 0))
    for version in range(1, 3 * AHEAD_MAX):
        seat.beat((version, 0))
        seat.data(0, version)
    assert len(seat.session.fragments[0].held_handles()) <= AHEAD_MAX + 1


def test_another_digest_means_fetching_the_state() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    one(seat.data(0, 1), ev.Apply)
    effects = seat.do(ev.ApplyFailed(0, 1, digest(0, 1)))
    assert one(effects, msg.Fetch) == msg.Fetch(0, -1)
    assert not only(seat.step(), ev.Adopt)
    seat.receive(0, 1, kind=STATE)
    assert one(seat.step(), ev.Adopt).version == 1


def test_nothing_is_pushed_from_a_copy_that_is_not_to_be_trusted() -> None:
    """After a failed digest the base may be the one that is wrong, and an outer gradient is only
    right against the base that the broker has."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    one(seat.data(0, 1), ev.Apply)
    seat.do(ev.ApplyFailed(0, 1, digest(0, 1)))
    assert seat.session.fragments[0].round == open_round(0, 0)
    assert not only(seat.step(), ev.Snapshot)
    seat.receive(0, 1, kind=STATE)
    seat.beat((1, 0), open_round(0, 1))
    seat.step()
    assert one(seat.step(), ev.Snapshot).base_version == 1


def test_a_duplicate_while_it_is_applied_is_dropped() -> None:
    seat = Seat().joined()
    apply = one(seat.data(0, 1), ev.Apply)
    for result in (digest(0, 1), 7):
        effects = seat.data(0, 1, result_digest=result)
        assert one(effects, ev.Drop).handles == (seat.handle,)
    effects = seat.do(ev.Applied(0, 1, digest(0, 1)))
    assert one(effects, ev.Drop).handles == apply.handles


def test_a_result_from_before_a_restart_is_ignored() -> None:
    seat = Seat().joined()
    seat.data(0, 1)
    seat.restarted((0, 0))
    assert not only(seat.do(ev.Applied(0, 1, digest(0, 1))), ev.Install)
    assert seat.session.fragments[0].held == 0


def test_only_versions_that_may_be_needed_are_kept() -> None:
    """A version that is held already, or is beyond all that the broker could send, would stay for
    ever."""
    seat = Seat().joined((3, 3))
    for version in (2, 3, 3 + PUBLICATIONS_KEPT + 1):
        assert one(seat.data(0, version, count=10), ev.Drop).handles == (seat.handle,)
    for version in (4, 3 + PUBLICATIONS_KEPT):
        assert not only(seat.data(0, version, count=10), ev.Drop)


def test_a_conflicting_chunk_is_dropped_with_a_note() -> None:
    seat = Seat().joined()
    seat.data(0, 1, count=600)
    effects = seat.data(0, 1, count=600, payload_digest=99)
    assert one(effects, ev.Drop).handles == (seat.handle,)
    assert one(effects, ev.Note).level == "warning"


@pytest.mark.parametrize(("told", "merged"), [(1, True), (0, False), (2, False)])
def test_the_publication_tells_whether_the_push_was_merged(told: int, merged: bool) -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step(tokens=60)
    seat.step(tokens=40)
    effects = seat.receive(0, 1, push_id=told)
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=merged)
    seat.do(ev.BoundaryReached())
    total = seat.session.fragments.ledger.total()
    assert total.merged == (60 if merged else 0)
    assert total.overwritten == (40 if merged else 100)


def test_a_state_far_ahead_tells_the_outcome_too() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.beat((20, 0))
    effects = seat.receive(0, 20, kind=STATE, push_id=1)
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=True)


def test_a_push_merged_but_not_adopted_before_a_restart_keeps_its_outcome() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.receive(0, 1, push_id=1)
    seat.restarted((1, 0))
    seat.do(ev.BoundaryReached())
    assert seat.session.fragments.ledger.total().merged == 100


@pytest.mark.parametrize(("told", "merged"), [(1, True), (0, False)])
def test_a_push_that_was_open_at_a_restart_learns_its_outcome_from_the_state(
    told: int, merged: bool
) -> None:
    """The broker was killed after it had made the round durable and before it published it."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    effects = seat.restarted((1, 0))
    assert not only(effects, ev.SettlePush)
    effects = seat.receive(0, 1, kind=STATE, push_id=told)
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=merged)
    seat.do(ev.BoundaryReached())
    assert seat.session.fragments.ledger.total().merged == (100 if merged else 0)


def test_a_push_that_was_open_at_a_restart_without_news_is_given_up() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    effects = seat.restarted((0, 0))
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=False)


def test_a_push_merged_and_lost_with_the_broker_is_rolled_back() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.receive(0, 1, push_id=1)
    seat.do(ev.BoundaryReached())
    assert seat.session.fragments.ledger.total().merged == 100
    seat.restarted((0, 0))
    seat.receive(0, 0, kind=STATE)
    total = seat.session.fragments.ledger.total()
    assert (total.merged, total.rolled_back) == (0, 100)


@pytest.mark.parametrize(("told", "merged"), [(0, 0), (1, 100), (2, 130)])
def test_what_was_merged_is_what_the_history_of_the_broker_holds(told: int, merged: int) -> None:
    """Even if that history is further by now than at the merge: others have gone on."""
    seat = Seat().joined()
    for push_id, tokens in ((1, 100), (2, 30)):
        seat.beat((push_id - 1, 0), open_round(0, push_id - 1))
        seat.step(tokens=tokens)
        seat.receive(0, push_id, push_id=push_id)
        if push_id == 1:
            seat.do(ev.BoundaryReached())
    seat.restarted((9, 0))
    seat.receive(0, 9, kind=STATE, push_id=told)
    seat.do(ev.BoundaryReached())
    total = seat.session.fragments.ledger.total()
    assert (total.merged, total.rolled_back + total.overwritten) == (merged, 130 - merged)


def test_a_failed_encoding_declines() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    effects = seat.do(ev.EncodeFailed(1, "not finite"))
    assert one(effects, msg.Decline).reason == "not finite"
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=False)


def test_a_snapshot_that_fails_declines_and_the_next_attempt_is_answered() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    copy = one(seat.step(), ev.Snapshot)
    effects = seat.do(ev.CopyFailed(copy, "MemoryError: full"))
    assert one(effects, msg.Decline).reason == "MemoryError: full"
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=False)
    assert not only(seat.step(), ev.Snapshot)
    seat.beat((0, 0), open_round(0, 0, attempt=2))
    assert one(seat.step(), ev.Snapshot) == ev.Snapshot(0, 0, 2)


def test_a_half_adopted_fragment_is_adopted_again_before_anything_is_pushed() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    seat.receive(0, 1)
    copy = one(seat.step(), ev.Adopt)
    seat.do(ev.CopyFailed(copy, "MemoryError: full"))
    seat.beat((1, 0), open_round(0, 1))
    assert seat.session.view().wants_boundary
    effects = seat.step()
    assert not only(effects, ev.Snapshot)
    assert one(effects, msg.Adopted) == msg.Adopted(0, 1)
    # With a round open, nobody waits for what cannot be pushed.
    effects = seat.do(ev.CopyFailed(one(effects, ev.Adopt), "MemoryError: full"))
    assert one(effects, msg.Decline).base_version == 1
    effects = seat.step()
    assert one(effects, ev.Adopt) == ev.Adopt(0, 1) and not only(effects, ev.Snapshot)
    effects = seat.step()  # With the whole copy in place it is answered after all.
    assert one(effects, ev.Snapshot).base_version == 1
    assert (one(effects, msg.Push).tokens, one(effects, msg.Push).steps) == (100, 1)


def test_a_half_adopted_fragment_takes_the_newer_version_that_has_come() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    seat.receive(0, 1)
    copy = one(seat.step(), ev.Adopt)
    seat.receive(0, 2)
    seat.do(ev.CopyFailed(copy, "MemoryError: full"))
    assert one(seat.step(), ev.Adopt) == ev.Adopt(0, 2)


def test_a_half_adopted_fragment_without_a_copy_waits_for_its_state() -> None:
    seat = Seat().joined()
    seat.beat((1, 0))
    seat.receive(0, 1)
    copy = one(seat.step(), ev.Adopt)
    one(seat.data(0, 2), ev.Apply)
    seat.do(ev.ApplyFailed(0, 2, digest(0, 2)))
    seat.do(ev.CopyFailed(copy, "MemoryError: full"))
    seat.beat((2, 0), open_round(0, 1))
    effects = seat.step()
    assert not only(effects, ev.Adopt) and not only(effects, ev.Snapshot)
    seat.receive(0, 2, kind=STATE)
    assert one(seat.step(), ev.Adopt) == ev.Adopt(0, 2)


def test_version_zero_that_cannot_be_read_is_read_at_the_next_boundary() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome((), role=msg.Role.FOUND)
    first, second = only(seat.do(ev.BoundaryReached()), ev.SendFounding)
    seat.do(ev.CopyFailed(second, "MemoryError: full"))
    assert only(seat.do(ev.BoundaryReached()), ev.SendFounding) == [second]
    assert not only(seat.do(ev.BoundaryReached()), ev.SendFounding)
    assert first != second


def test_what_cannot_be_applied_now_is_applied_later_and_not_sent_again() -> None:
    seat = Seat().joined()
    apply = one(seat.data(0, 1), ev.Apply)
    told = (0, 1, digest(0, 1))
    times: list[float] = []
    effects = seat.do(ev.ApplyFailed(*told, "MemoryError: full"))
    start = seat.now
    while len(times) < 5:
        if again := only(effects, ev.Apply):
            assert again == [apply]
            times.append(seat.now - start)
            effects = seat.do(ev.ApplyFailed(*told, "MemoryError: full"))
        else:
            seat.beat((1, 0))
            effects = seat.wait(0.25)
        assert not only(effects, msg.Fetch) and not only(effects, msg.Missing)
    assert times == [0.5, 1.0, 2.0, 4.0, 8.0]
    while not only(effects, ev.Apply):
        seat.beat((1, 0))
        effects = seat.wait(0.25)
    effects = seat.do(ev.Applied(*told))
    assert one(effects, ev.Install).version == 1
    assert one(seat.step(), ev.Adopt) == ev.Adopt(0, 1)


def test_a_lack_of_memory_is_told_once_until_a_push_is_merged_again() -> None:
    seat = Seat().joined()

    levels: list[str] = []

    def attempt(number: int) -> list[ev.Snapshot]:
        seat.beat((0, 0), open_round(0, 0, number), open_round(1, 0, number))
        return only(seat.step(), ev.Snapshot)

    def fail(copy: ev.Snapshot, reason: str) -> None:
        levels.append(one(seat.do(ev.CopyFailed(copy, reason)), ev.Note).level)

    for number in range(1, 4):
        for copy in attempt(number):
            fail(copy, f"MemoryError: {number} bytes")
    assert levels == ["error", "debug", "debug", "debug", "debug", "debug"]
    fail(attempt(4)[0], "not_finite: something else")
    assert levels.pop() == "error"
    for copy in attempt(5):
        seat.receive(copy.fragment, 1, push_id=copy.push_id)
    seat.do(ev.BoundaryReached())
    seat.beat((1, 1), open_round(0, 1))
    fail(one(seat.step(), ev.Snapshot), "MemoryError: again")
    assert levels.pop() == "error"


def test_missing_chunks_of_the_open_push_are_sent_again() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    missing = msg.Missing(msg.DataKind.PUSH, 0, 0, 1, ((5, 6),))
    assert one(seat.hear(missing), ev.Resend) == ev.Resend(1, ((5, 6),))
    other = msg.Missing(msg.DataKind.PUSH, 0, 0, 9, ((5, 6),))
    assert not only(seat.hear(other), ev.Resend)


def test_a_decline_is_repeated_after_a_rejoin() -> None:
    seat = Seat().joined()
    seat.step()
    seat.do(ev.Paused("evaluating"))
    round_ = open_round(0, 0)
    assert one(seat.beat((0, 0), round_), msg.Decline).reason == "evaluating"
    assert not only(seat.beat((0, 0), round_), msg.Decline)
    seat.hear(msg.Bye("stopped"))
    assert one(seat.welcome((0, 0), rounds=(round_,)), msg.Decline).reason == "evaluating"
