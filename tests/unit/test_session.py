"""The learner's session: joining, boundaries, outages, lockstep, the end."""

from __future__ import annotations

import msgspec
import pytest
from machines import EPOCH, NEXT_EPOCH, SETTINGS, Seat, digest, one, only, open_round

from narrows.learner.session import events as ev
from narrows.learner.session.dialer import Connection
from narrows.proto import messages as msg
from narrows.proto.messages import Mode, Phase, Role

LOCKSTEP = msgspec.structs.replace(SETTINGS, mode=Mode.STREAMING)
DILOCO = msgspec.structs.replace(
    SETTINGS, mode=Mode.DILOCO, fragment_count=1, overlap_steps=0, sync_period_steps=4
)


def test_hello_is_repeated_with_back_off_until_somebody_answers() -> None:
    seat = Seat()
    start = seat.now
    times: list[float] = []
    seat.do(ev.DeadlineReached())
    while len(times) < 7:
        deadline = seat.session.next_deadline()
        assert deadline is not None
        seat.now = deadline
        one(seat.do(ev.DeadlineReached()), msg.Hello)
        times.append(seat.now - start)
    assert times == [0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75]


def test_the_first_hello_claims_no_run_and_no_epoch() -> None:
    """A learner that claimed an epoch would be refused by a broker that is younger, or would take
    its first Welcome for another life of a broker that it has never met."""
    hello = one(Seat().do(ev.DeadlineReached()), msg.Hello)
    assert (hello.run_id, hello.epoch, hello.versions) == ("", (0, 0, 0), ())


def test_a_new_connection_is_greeted_and_begins_the_back_off_again() -> None:
    seat = Seat()
    seat.wait(30)
    one(seat.do(ev.Connected(), after_s=0.1), msg.Hello)
    assert seat.session.next_deadline() == seat.now + 0.25
    seat.welcome()
    assert not only(seat.do(ev.Connected()), msg.Hello)


def redials(seat: Seat, seconds: float) -> list[float]:
    """Seconds from now at which the session has everything dialled anew."""
    start, times = seat.now, list[float]()
    while (deadline := seat.session.next_deadline()) is not None and deadline <= start + seconds:
        seat.now = max(seat.now, deadline)
        effects = seat.do(ev.DeadlineReached())
        kinds = [type(e.message) if isinstance(e, ev.Send) else type(e) for e in effects]
        if ev.Redial in kinds:
            assert kinds.index(ev.Redial) < kinds.index(msg.Hello)
            times.append(seat.now - start)
    seat.now = start + seconds
    return times


def test_a_connection_without_answers_is_given_up_ever_more_patiently() -> None:
    seat = Seat().joined()
    assert redials(seat, 200) == [11.75, 21.75, 41.75, 81.75, 141.75]
    seat.hear(msg.Refuse("over_capacity", "full"))
    assert redials(seat, 9) == [6.75], "any answer says that this connection works"
    seat.welcome()
    assert redials(seat, 3.9) == []


def test_a_new_connection_has_its_own_time_to_answer() -> None:
    seat = Seat().joined()
    seat.wait(10)
    seat.do(ev.Connected())
    assert redials(seat, 4.9) == []
    assert len(redials(seat, 10)) == 1


def test_a_joiner_fetches_adopts_and_is_ready() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    effects = seat.welcome((4, 7))
    assert [f.have_version for f in only(effects, msg.Fetch)] == [-1, -1]
    for index, version in ((0, 4), (1, 7)):
        effects = seat.receive(index, version, kind=msg.DataKind.STATE)
        assert one(effects, ev.Install).version == version
    assert not seat.session.fragments.ready
    effects = seat.do(ev.BoundaryReached())
    assert [(a.fragment, a.version) for a in only(effects, ev.Adopt)] == [(0, 4), (1, 7)]
    assert [(a.fragment, a.version) for a in only(effects, msg.Adopted)] == [(0, 4), (1, 7)]
    assert seat.session.fragments.ready


def test_a_founder_sends_every_fragment_once_per_epoch() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())

    def founded() -> list[ev.SendFounding]:
        return only(seat.do(ev.BoundaryReached()), ev.SendFounding)

    assert not only(seat.welcome((), role=Role.FOUND), ev.SendFounding)  # Not at a boundary.
    assert founded() == [ev.SendFounding(0), ev.SendFounding(1)]
    seat.welcome((), role=Role.FOUND)
    assert not founded()
    seat.hear(msg.Missing(msg.DataKind.FOUND, 1, 0, 0, ((5, 6),)))
    assert founded() == [ev.SendFounding(1, ((5, 6),))]
    seat.restarted((), role=Role.FOUND)
    assert len(founded()) == 2


def test_the_broker_counts_as_gone_only_when_what_came_is_read() -> None:
    seat = Seat().joined()
    seat.now += 60
    seat.step()  # The training thread's events come before the sockets are read.
    assert seat.session.online
    seat.beat((0, 0))
    seat.do(ev.DeadlineReached())
    assert seat.session.online
    seat.now += 60
    seat.do(ev.DeadlineReached())
    assert not seat.session.online


@pytest.mark.parametrize("code", ["bad_message", "too_large", "layout_mismatch"])
def test_every_refusal_of_the_first_hello_is_final(code: str) -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    assert str(one(seat.hear(msg.Refuse(code, "no")), ev.Fail).error).startswith(code)


def test_why_a_learner_is_not_admitted_yet_is_remembered() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    for _ in range(2):
        seat.hear(msg.Refuse("over_capacity", "the run is full"))
    assert "the run is full" in str(seat.session.view().not_admitted)
    seat.welcome((0, 0))
    assert seat.session.view().not_admitted is None


def test_a_probe_is_answered() -> None:
    assert one(Seat().joined().hear(msg.Probe(5)), msg.Alive).nonce == 5


def test_a_round_is_answered_at_the_next_boundary_and_once() -> None:
    seat = Seat().joined()
    seat.step()
    assert not only(seat.beat((0, 0), open_round(0, 0)), ev.Snapshot)
    effects = seat.step(tokens=50)
    assert one(effects, ev.Snapshot) == ev.Snapshot(0, 0, 1)
    push = one(effects, msg.Push)
    assert (push.tokens, push.steps, push.push_id) == (150, 2, 1)
    assert not only(seat.step(), ev.Snapshot)


def test_a_round_is_answered_only_once_its_base_is_adopted() -> None:
    seat = Seat().joined()
    seat.step()
    seat.beat((1, 0), open_round(0, 1))
    assert not only(seat.step(), ev.Snapshot)
    seat.receive(0, 1)
    effects = seat.step()
    assert one(effects, ev.Adopt).version == 1
    assert not only(effects, ev.Snapshot)  # No step since it adopted.
    assert one(seat.step(), ev.Snapshot).base_version == 1


def test_a_step_without_tokens_is_no_work_to_push() -> None:
    """A push of no tokens would be refused; the step counts with the next one that has some."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    effects = seat.step(tokens=0)
    assert not only(effects, ev.Snapshot) and not only(effects, msg.Decline)
    push = one(seat.step(tokens=5), msg.Push)
    assert (push.tokens, push.steps) == (5, 2)


def test_a_new_attempt_is_answered_with_all_the_work_since_the_base() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.beat((0, 0), open_round(0, 0, attempt=2))
    effects = seat.step()
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=False)
    assert (one(effects, msg.Push).tokens, one(effects, msg.Push).push_id) == (200, 2)


def test_a_newcomer_declines_until_it_is_warm_and_then_answers() -> None:
    seat = Seat(warm_up_steps=2).joined((1, 1))
    effects = seat.beat((1, 1), open_round(0, 1))
    assert one(effects, msg.Decline).reason == "warming up, 0 of 2 steps"
    effects = seat.step()
    assert not only(effects, msg.Decline) and not only(effects, msg.Push)
    assert one(seat.step(), msg.Push).fragment == 0


def test_a_round_declined_while_joining_is_answered_where_everybody_starts_at_0() -> None:
    seat = Seat(warm_up_steps=5)
    seat.do(ev.DeadlineReached())
    seat.welcome((0, 0))
    seat.receive(0, 0, kind=msg.DataKind.STATE)
    seat.do(ev.BoundaryReached())
    declined = seat.beat((0, 0), open_round(0, 0))
    assert one(declined, msg.Decline).reason == "warming up, 0 of 5 steps"
    seat.receive(1, 0, kind=msg.DataKind.STATE)
    seat.do(ev.BoundaryReached())
    assert one(seat.step(), msg.Push).fragment == 0


def test_a_lockstep_round_for_a_step_that_has_passed_is_declined_without_work() -> None:
    """After a broker's older state a fragment may be behind the others: its round wants a snapshot
    at a step that this learner has made, and lockstep lets it make no other."""
    seat = Seat(settings=LOCKSTEP).joined((10, 9))
    for _ in range(40):
        seat.step()
    seat.receive(0, 11, kind=msg.DataKind.STATE)
    seat.do(ev.BoundaryReached())
    late = seat.beat((11, 9), open_round(0, 11, at_step=0))
    assert one(late, msg.Decline).fragment == 0


def test_a_lockstep_round_is_not_declined_where_a_step_will_come() -> None:
    seat = Seat(settings=LOCKSTEP).joined((10, 10))
    assert not only(seat.beat((10, 10), open_round(0, 10, at_step=0)), msg.Decline)


def test_a_pause_declines_with_its_reason_and_ends() -> None:
    seat = Seat().joined()
    seat.step()
    seat.do(ev.Paused("evaluating"))
    assert one(seat.beat((0, 0), open_round(0, 0)), msg.Decline).reason == "evaluating"
    seat.do(ev.Continued())
    assert one(seat.step(), ev.Snapshot).fragment == 0


def test_the_time_of_a_pause_is_no_step_time() -> None:
    seat = Seat().joined()
    for _ in range(3):
        seat.step(after_s=1.0)
    seat.do(ev.Paused("evaluating"))
    seat.do(ev.Continued(), after_s=3.0)
    seat.step()
    report = one(seat.step(after_s=1.0), msg.Report)
    assert report.step_s == 1.0


def test_reports_are_thinned_and_never_stop() -> None:
    seat = Seat().joined()
    seat.step()
    reports = [r for _ in range(20) for r in only(seat.step(after_s=0.01), msg.Report)]
    assert 1 <= len(reports) <= 3
    idle = only(seat.wait(3.5), msg.Report)
    assert len(idle) in (3, 4)
    assert idle[-1].step == 21


def test_received_bytes_are_acknowledged_soon() -> None:
    seat = Seat().joined()
    seat.beat((0, 0))
    seat.data(0, 1, count=10, position=2 << 20)
    assert one(seat.wait(0.11), msg.Report).received == (2 << 20,)


def test_silence_of_the_broker_means_hello_again() -> None:
    seat = Seat().joined()
    effects = seat.wait(4.0)
    assert only(effects, msg.Hello)
    assert seat.session.connection is Connection.JOINING
    assert not seat.session.view().must_wait(seat.now)


def test_a_broker_that_is_gone_is_told_to_the_user() -> None:
    for effects, text in (
        (Seat().joined().wait(4.0), "nothing heard from the broker for 4 s; joining again"),
        (Seat().joined().hear(msg.Bye("update")), "the broker said Bye (update); joining again"),
        (Seat().joined().hear(msg.Alive(1)), "unexpected Alive from the broker"),
    ):
        note = one(effects, ev.Note)
        assert note.level == "warning" and note.text.startswith(text)


def test_training_pauses_only_after_max_offline() -> None:
    seat = Seat().joined()
    seat.wait(3590.0)
    assert not seat.session.view().must_wait(seat.now)
    seat.wait(20.0)
    assert seat.session.view().must_wait(seat.now)


def test_a_new_epoch_in_a_beat_means_hello() -> None:
    seat = Seat().joined()
    assert one(seat.beat((0, 0), epoch=NEXT_EPOCH), msg.Hello).epoch == EPOCH


def test_a_rejoin_tells_the_open_push_and_what_is_adopted_again() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.hear(msg.Bye("stopped"))
    effects = seat.welcome((0, 0))
    assert one(effects, msg.Push).push_id == 1
    assert [(a.fragment, a.version) for a in only(effects, msg.Adopted)] == [(0, 0), (1, 0)]


def test_a_restarted_broker_with_the_same_versions_is_told_what_is_adopted() -> None:
    seat = Seat().joined((3, 3))
    effects = seat.restarted((3, 3))
    assert not only(effects, msg.Fetch)
    assert [a.version for a in only(effects, msg.Adopted)] == [3, 3]


def test_a_restarted_broker_with_older_versions_rolls_back() -> None:
    seat = Seat().joined((3, 3))
    seat.step(tokens=70)
    effects = seat.restarted((2, 3))
    assert one(effects, msg.Fetch) == msg.Fetch(0, -1)
    seat.receive(0, 2, kind=msg.DataKind.STATE)
    assert one(seat.step(tokens=30), ev.Adopt) == ev.Adopt(0, 2)
    assert seat.session.fragments.ledger.total().rolled_back == 100


@pytest.mark.parametrize("epoch", [(0, 1, 8), (0, 0, 9)], ids=["number again", "lower number"])
def test_a_restored_broker_is_followed_and_what_it_lacks_is_rolled_back(epoch: msg.Epoch) -> None:
    """It counts its lives on from an older state; only the nonce tells that it is another one."""
    seat = Seat().joined((3, 3))
    seat.beat((3, 3), open_round(0, 3))
    push = one(seat.step(tokens=70), msg.Push)
    seat.receive(0, 4, push_id=push.push_id)
    seat.do(ev.BoundaryReached())
    assert seat.session.fragments.ledger.total().merged == 70
    effects = seat.restarted((2, 3), epoch=epoch)
    assert seat.session.epoch == epoch
    assert one(effects, msg.Fetch) == msg.Fetch(0, -1)
    seat.beat((2, 3), open_round(0, 2), epoch=epoch)
    assert not only(seat.step(tokens=30), msg.Push)
    seat.receive(0, 2, kind=msg.DataKind.STATE)
    assert one(seat.do(ev.BoundaryReached()), ev.Adopt) == ev.Adopt(0, 2)
    total = seat.session.fragments.ledger.total()
    assert (total.merged, total.rolled_back) == (0, 100)
    assert one(seat.step(), msg.Push).base_version == 2


def test_an_equal_version_of_another_history_is_given_up() -> None:
    """No push may be made on it: the broker could not tell it from its own."""
    seat = Seat().joined((3, 3))
    heads = (msg.FragmentHead(3, 12345), msg.FragmentHead(3, digest(1, 3)))
    effects = seat.restarted(epoch=(0, 1, 8), fragments=heads, rounds=(open_round(0, 3),))
    assert one(effects, msg.Fetch) == msg.Fetch(0, -1)
    assert not only(seat.step(), ev.Snapshot)


def test_what_another_life_left_behind_only_makes_the_learner_ask_again() -> None:
    """Messages of two connections are not read in the order in which they were sent."""
    seat = Seat().joined((3, 3))
    seat.restarted((3, 3))
    effects = seat.welcome((0, 0), epoch=EPOCH)
    assert one(effects, msg.Hello).epoch == NEXT_EPOCH
    assert not only(effects, ev.Identify)
    effects = seat.welcome((3, 3), epoch=NEXT_EPOCH)
    assert seat.session.online and not only(effects, msg.Fetch)
    assert seat.session.fragments.ledger.total().rolled_back == 0
    effects = seat.beat((9, 9), epoch=EPOCH)
    assert one(effects, msg.Hello).epoch == NEXT_EPOCH
    assert [each.known for each in seat.session.fragments] == [3, 3]


def test_a_lower_term_is_never_followed() -> None:
    seat = Seat()
    seat.do(ev.DeadlineReached())
    seat.welcome(epoch=(2, 1, 7))
    for epoch in ((1, 9, 9), (0, 9, 9)):
        seat.restarted((0, 0), epoch=epoch)
        assert not seat.session.online and seat.session.epoch == (2, 1, 7)


def test_a_broker_restored_from_before_version_0_is_given_one_again() -> None:
    seat = Seat().joined((3, 3))
    seat.step(tokens=50)
    seat.restarted((), epoch=(0, 1, 8), role=Role.FOUND, phase=Phase.FOUNDING)
    assert [each.held for each in seat.session.fragments] == [-1, -1]
    assert len(only(seat.do(ev.BoundaryReached()), ev.SendFounding)) == 2
    effects = seat.welcome((0, 0), epoch=(0, 1, 8))
    assert only(effects, msg.Fetch) == [msg.Fetch(0, -1), msg.Fetch(1, -1)]
    for index in (0, 1):
        seat.receive(index, 0, kind=msg.DataKind.STATE)
    assert len(only(seat.do(ev.BoundaryReached()), ev.Adopt)) == 2
    assert seat.session.fragments.ledger.total().rolled_back == 100


def test_another_fragment_count_ends_the_session() -> None:
    seat = Seat().joined()
    effects = seat.welcome(settings=msgspec.structs.replace(SETTINGS, fragment_count=1))
    assert "now has 1 fragment" in one(effects, ev.Fail).error.message


def test_the_runs_clock_is_extrapolated_and_never_falls() -> None:
    seat = Seat().joined()
    seat.hear(msg.Beat(EPOCH, Phase.RUNNING, (0, 0), (), 1000, 100.0, (), 0.0))
    assert seat.session.view().run_tokens(seat.now + 5.0) == 1500.0
    assert seat.session.view().run_tokens(seat.now + 500.0) == 7000.0
    seat.now += 5.0
    seat.hear(msg.Beat(EPOCH, Phase.RUNNING, (0, 0), (), 1400, 10.0, (), 0.0))
    assert seat.session.view().run_tokens(seat.now) == 1500.0
    assert seat.session.view().run_tokens(seat.now + 20.0) == 1600.0


def test_diloco_takes_its_snapshot_at_the_named_step_and_waits() -> None:
    seat = Seat(settings=DILOCO)
    seat.do(ev.DeadlineReached())
    seat.welcome((0,))
    seat.receive(0, 0, kind=msg.DataKind.STATE, count=2000)
    seat.do(ev.BoundaryReached())
    seat.beat((0,), open_round(0, 0, at_step=4))
    for _ in range(3):
        assert not only(seat.step(), ev.Snapshot)
        assert not seat.session.view().must_wait(seat.now)
    assert only(seat.step(), ev.Snapshot)
    assert seat.session.view().must_wait(seat.now)
    seat.receive(0, 1, count=2000, push_id=1)
    assert seat.session.view().must_wait(seat.now)
    seat.do(ev.BoundaryReached())
    assert not seat.session.view().must_wait(seat.now)


def test_in_lockstep_a_joiner_starts_at_the_step_of_the_versions() -> None:
    seat = Seat(settings=LOCKSTEP).joined((10, 9))
    # Fragment 1 is due at 9 * 4 + 4 = 40, fragment 0 at 10 * 4 + 2 = 42.
    seat.beat((10, 9), open_round(1, 9, at_step=40))
    assert not only(seat.step(), ev.Snapshot)
    assert one(seat.step(), ev.Snapshot).fragment == 1


def test_in_lockstep_a_roll_back_does_not_block_for_ever() -> None:
    seat = Seat(settings=LOCKSTEP).joined((10, 10))
    for _ in range(3):
        seat.step()
    seat.restarted((2, 2))
    for index in (0, 1):
        seat.receive(index, 2, kind=msg.DataKind.STATE)
    seat.do(ev.BoundaryReached())
    assert not seat.session.view().must_wait(seat.now)


def test_lockstep_has_no_warm_up() -> None:
    seat = Seat(settings=LOCKSTEP, warm_up_steps=100).joined()
    effects = seat.beat((0, 0), open_round(0, 0, at_step=2))
    assert not only(effects, msg.Decline)


def test_at_the_goal_open_rounds_are_answered_without_a_step() -> None:
    seat = Seat().joined()
    seat.step()
    seat.beat((0, 0), open_round(0, 0), phase=Phase.ENDING)
    assert seat.session.should_stop
    seat.do(ev.LoopEnded())
    assert one(seat.do(ev.BoundaryReached()), ev.Snapshot).fragment == 0


def test_at_the_goal_rounds_without_work_are_declined() -> None:
    seat = Seat().joined()
    effects = seat.beat((0, 0), open_round(0, 0), phase=Phase.ENDING)
    assert one(effects, msg.Decline).reason == "no step since it adopted"


def test_bye_only_with_the_final_model_adopted() -> None:
    seat = Seat().joined()
    seat.beat((1, 0), phase=Phase.ENDED)
    assert not only(seat.do(ev.LoopEnded()), msg.Bye)
    assert not only(seat.receive(0, 1), msg.Bye)
    assert not only(seat.do(ev.BoundaryReached()), msg.Bye)
    effects = seat.do(ev.BoundaryReached())
    kinds = [type(effect) for effect in effects]
    assert one(effects, msg.Bye).reason == "the run has ended"
    assert kinds[-1] is ev.Left
    assert seat.session.connection is Connection.LEFT
    assert seat.do(ev.BoundaryReached()) == []


def test_a_step_after_the_last_round_is_undone_before_leaving() -> None:
    """It was under way when the run ended; the run's model is what is published."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0), phase=Phase.ENDING)
    seat.step(tokens=7)
    seat.beat((0, 0), phase=Phase.ENDED)
    assert not only(seat.do(ev.LoopEnded()), msg.Bye)
    effects = seat.do(ev.BoundaryReached())
    assert [(a.fragment, a.version) for a in only(effects, ev.Adopt)] == [(0, 0), (1, 0)]
    assert not only(effects, msg.Bye)
    effects = seat.do(ev.BoundaryReached())
    assert one(effects, msg.Report).ledger.overwritten == 14
    assert one(effects, msg.Bye).reason == "the run has ended"


def test_a_loop_that_ends_early_waits_for_the_outcome_of_its_push() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    assert not only(seat.do(ev.LoopEnded()), msg.Bye)
    effects = seat.receive(0, 1, push_id=1)
    assert one(effects, msg.Bye)
    # The last Report knows what became of its tokens.
    assert one(effects, msg.Report).ledger.merged == 100


def test_without_a_broker_a_loop_ends_at_once() -> None:
    seat = Seat().joined()
    seat.wait(10.0)
    effects = seat.do(ev.LoopEnded())
    assert one(effects, ev.Left) and not only(effects, msg.Bye)


def test_what_arrives_after_the_end_is_dropped() -> None:
    seat = Seat().joined()
    seat.do(ev.LoopEnded())
    assert one(seat.data(0, 1), ev.Drop)


@pytest.mark.parametrize("code", ["stale_base", "bad_payload"])
def test_a_refused_push_counts_as_refused_once_adopted(code: str) -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step(tokens=60)
    seat.step(tokens=40)
    effects = seat.hear(msg.Refuse(code, "no", fragment=0, push_id=1))
    assert one(effects, ev.SettlePush) == ev.SettlePush(1, merged=False)
    seat.receive(0, 1)
    seat.do(ev.BoundaryReached())
    total = seat.session.fragments.ledger.total()
    assert (total.refused, total.overwritten, total.pending) == (60, 40, 100)


def test_a_push_whose_announcement_is_missing_is_announced_again() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    push = one(seat.step(), msg.Push)
    effects = seat.hear(msg.Missing(msg.DataKind.PUSH, 0, 0, push.push_id, ()))
    assert one(effects, msg.Push) == push
