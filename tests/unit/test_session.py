"""Joining, silence, refusals, repair, epochs, reports and the end of a learner's session."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from seat import CHUNKS, EPOCH, EPOCH_2, SETTINGS, Seat, joined

from narrows.learner.effects import Adopt, Assemble, Forget, Note, SendChunks, SendLayout
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.messages import DataKind, Phase, Role

PUBLICATION, STATE = DataKind.PUBLICATION, DataKind.STATE
WHOLE = ((0, CHUNKS),)


# Joining.


def test_a_learner_says_hello_once_when_its_first_connection_is_there() -> None:
    """A Hello that is said sooner waits in a queue, and is followed by another one."""
    seat = Seat(is_connected=False)
    seat.rest()
    seat.wait(5.0)
    assert not seat.sent(msg.Hello) and seat.session.deadline(seat.now) == math.inf
    seat.session.lost(seat.now)
    seat.done()
    seat.wait(0.5)
    assert len(seat.sent(msg.Hello)) == 1


def test_a_learner_says_hello_each_second_until_it_is_welcome() -> None:
    seat = Seat()
    (hello,) = seat.sent(msg.Hello)
    assert (hello.run_id, hello.epoch, hello.held) == ("", "", ())
    seat.wait(0.5)
    assert not seat.sent(msg.Hello)
    assert seat.session.deadline(seat.now) == 101.0
    seat.wait(0.5)
    assert len(seat.sent(msg.Hello)) == 1
    seat.welcome(Role.WAIT, heads=())
    seat.wait(2.0)
    assert not seat.sent(msg.Hello) and not seat.session.joined


def test_a_joiner_fetches_the_states_and_adopts_them_outright() -> None:
    seat = Seat()
    seat.welcome(heads=(3, 5))
    assert seat.sent(msg.Fetch) == [
        msg.Fetch(STATE, 0, 3, 0, WHOLE), msg.Fetch(STATE, 1, 5, 0, WHOLE),
    ]  # fmt: skip
    seat.state(0, 3)
    seat.rest()
    assert not seat.session.joined
    seat.state(1, 5)
    seat.rest()
    assert seat.session.joined
    assert [(each.version, each.overwrite) for each in seat.take(Adopt)] == [(3, True), (5, True)]
    assert seat.sent(msg.Report)[-1].held == (3, 5)


def test_the_seeding_learner_sends_layout_and_parameters_and_then_adopts_them() -> None:
    seat = Seat()
    seat.welcome(Role.SEED, heads=())
    assert seat.take(SendLayout) == [SendLayout()]
    assert [each[:2] for each in seat.take(SendChunks)] == [(DataKind.SEED, 0), (DataKind.SEED, 1)]
    seat.hear(msg.Fetch(DataKind.SEED, 1, 0, 0, ((1, 2),)))
    assert seat.take(SendChunks) == [SendChunks(DataKind.SEED, 1, 0, ((1, 2),))]
    seat.hear(msg.Fetch(DataKind.LAYOUT, 0, 0, 0, ((0, 1),)))
    assert seat.take(SendLayout) == [SendLayout()]
    seat.told(heads=(0, 0))
    assert len(seat.sent(msg.Fetch)) == 2


def test_no_step_is_made_while_a_run_is_seeded_anew() -> None:
    """Fragments of version 0 are read one after the other: they would be some steps apart."""
    seat = joined()
    seat.restart(heads=())
    assert not seat.session.must_wait(seat.now), "it trains on while it is offline"
    seat.welcome(Role.SEED, heads=(), go_back=(0, 1))
    assert len(seat.take(SendChunks)) == 2
    seat.session.lost(seat.now)
    assert seat.session.must_wait(seat.now), "also while its connection is made anew"
    seat.welcome(heads=(0, 0))
    assert not seat.session.must_wait(seat.now)


def test_a_model_that_cannot_be_cut_so_often_is_refused_with_the_remedy() -> None:
    seat = Seat(msg.RunSettings(fragments=100))
    seat.welcome()
    assert seat.session.refused is not None
    assert "fragments.count" in seat.session.refused.remedy
    assert seat.session.deadline(seat.now) == math.inf


@pytest.mark.parametrize("field", ["chunk_elements", "state_chunk_elements"])
def test_chunks_that_are_no_power_of_two_are_refused_with_the_remedy(field: str) -> None:
    seat = Seat(replace(SETTINGS, **{field: 300}))
    seat.welcome()
    assert seat.session.refused is not None and not seat.session.parts
    assert "300" in seat.session.refused.got and seat.session.refused.remedy


# Refusals.


def test_a_name_in_use_is_waited_out_for_ten_seconds() -> None:
    seat = Seat()
    for _ in range(10):
        seat.refuse("name_in_use")
        assert seat.session.refused is None
        seat.wait(1.0)
    assert len(seat.sent(msg.Hello)) == 11
    seat.refuse("name_in_use")
    assert seat.session.refused is not None
    assert seat.session.refused.code is ErrorCode.NAME_IN_USE
    assert seat.session.refused.remedy == "do so"
    assert len(seat.take(Note)) == 1


def test_a_name_that_becomes_free_in_time_is_no_error() -> None:
    seat = Seat()
    seat.refuse("name_in_use")
    seat.wait(9.0)
    seat.welcome()
    seat.refuse("name_in_use")
    seat.wait(5.0)
    seat.refuse("name_in_use")
    assert seat.session.refused is None


@pytest.mark.parametrize("code", ["layout_differs", "wrong_run", "key_name", "protocol_version"])
def test_a_refusal_that_time_does_not_heal_is_raised_at_once(code: str) -> None:
    seat = joined()
    seat.refuse(code)
    assert seat.session.refused is not None and seat.session.refused.code == code
    assert not seat.session.must_wait(seat.now)


@pytest.mark.parametrize("code", ["bad_chunk", "from_another_version"])
def test_a_refused_message_is_noted_and_nothing_else(code: str) -> None:
    seat = joined()
    seat.refuse(code)
    assert seat.session.refused is None and seat.session.connected
    assert len(seat.take(Note)) == 1


# Silence.


def test_silence_of_three_seconds_leads_to_hello_and_a_welcome_ends_it() -> None:
    seat = joined(version=4)
    seat.wait(2.9)
    assert not seat.sent(msg.Hello)
    seat.wait(0.1)
    (hello,) = seat.sent(msg.Hello)
    assert hello.epoch == EPOCH and hello.run_id == "run"
    assert hello.held == (msg.Held(4, 1004), msg.Held(4, 1004))
    seat.sent(msg.Report)
    seat.step()
    assert not seat.sent(msg.Report)  # Nobody listens.
    seat.welcome()
    assert len(seat.sent(msg.Report)) == 1


@pytest.mark.parametrize("sign", ["bye", "broken connection", "beat of another life"])
def test_a_sign_that_the_connection_is_gone_leads_to_hello_at_once(sign: str) -> None:
    seat = joined()
    seat.wait(1.0)
    if sign == "bye":
        seat.hear(msg.Bye("another life"))
    elif sign == "broken connection":
        seat.session.lost(seat.now)
        seat.done()
    else:
        seat.told(epoch=EPOCH_2)
    assert len(seat.sent(msg.Hello)) == 1
    seat.told()  # A late Beat of the old connection is no Welcome.
    seat.wait(1.0)
    assert len(seat.sent(msg.Hello)) == 1


def test_a_learner_that_is_cut_off_for_too_long_pauses_until_it_is_back() -> None:
    seat = joined()
    seat.wait(SETTINGS.max_offline_s)
    assert not seat.session.must_wait(seat.now)
    seat.wait(1.0)
    assert seat.session.must_wait(seat.now) and seat.session.must_wait(seat.now)
    seat.wait(0.0)
    assert [each.event for each in seat.take(Note)] == ["offline", "paused"]
    seat.welcome()
    assert not seat.session.must_wait(seat.now)


# Reports.


def test_reports_go_out_at_boundaries_each_second_and_at_once_after_a_welcome() -> None:
    seat = joined()
    seat.welcome()
    assert len(seat.sent(msg.Report)) == 1
    for _ in range(25):
        seat.step(after_s=0.125)
        seat.wait(0.0)
        seat.told()
    assert [each.steps for each in seat.sent(msg.Report)] == [8, 16, 24]


def test_a_learner_between_two_long_steps_reports_too() -> None:
    seat = joined()
    seat.step(after_s=5.0)
    seat.step(after_s=5.0)
    seat.welcome()
    seat.sent(msg.Report)
    seat.wait(1.0)
    assert not seat.sent(msg.Report)  # A boundary would be exact; it may come yet.
    seat.wait(1.0)
    assert [each.steps for each in seat.sent(msg.Report)] == [2]


def test_a_pause_is_told_at_once_and_is_no_step_time() -> None:
    seat = joined()
    for _ in range(3):
        seat.step(after_s=0.1)
    seat.session.pause("evaluating")
    seat.done()
    assert seat.sent(msg.Report)[-1].paused == "evaluating"
    seat.now += 2.0
    seat.session.pause(None)
    seat.done()
    assert seat.sent(msg.Report)[-1].paused is None
    seat.step(after_s=0.1)
    seat.told(period_s=1.0)
    seat.step(after_s=0.1)
    assert not seat.take(Forget) and seat.session.parts[0].push is None  # Not slow.


# Publications, states, repair.


def test_publications_are_assembled_in_order_whatever_their_arrival() -> None:
    seat = joined()
    for chunk in range(CHUNKS):
        assert seat.chunk(PUBLICATION, 0, 2, chunk)
    assert not seat.take(Assemble)
    for chunk in range(CHUNKS):
        assert seat.chunk(PUBLICATION, 0, 1, chunk)
        assert not seat.chunk(PUBLICATION, 0, 1, chunk)
    assert seat.take(Assemble) == [Assemble(PUBLICATION, 0, 1)]
    seat.session.assembled(seat.header(PUBLICATION, 0, 1), seat.now, agrees=True)
    seat.done()
    assert seat.take(Assemble) == [Assemble(PUBLICATION, 0, 2)]


@pytest.mark.parametrize(
    "what",
    [
        "old epoch",
        "another learner's",
        "no such fragment",
        "no such chunk",
        "old",
        "far ahead",
        "kind",
    ],
)
def test_a_chunk_that_cannot_be_used_is_not_wanted(what: str) -> None:
    seat = joined(version=3)
    seat.epoch = EPOCH_2 if what == "old epoch" else EPOCH
    kind = DataKind.PUSH if what == "kind" else PUBLICATION
    fragment = 2 if what == "no such fragment" else 0
    version = {"old": 3, "far ahead": 20}.get(what, 4)
    header = seat.header(kind, fragment, version, CHUNKS if what == "no such chunk" else 0)
    header = replace(header, incarnation="site-b.0000000b" if "another" in what else "")
    assert not seat.session.chunk(header, seat.now)


def test_a_live_publication_has_a_second_before_its_rest_is_fetched() -> None:
    seat = joined()
    seat.chunk(PUBLICATION, 0, 1, 2)
    seat.wait(0.9)
    assert not seat.sent(msg.Fetch)
    seat.wait(0.1)
    assert seat.sent(msg.Fetch) == [msg.Fetch(PUBLICATION, 0, 1, 0, ((0, 2), (3, 1)))]


def test_a_version_that_only_a_beat_tells_of_is_fetched_after_a_second() -> None:
    seat = joined()
    seat.told(heads=(2, 0))
    assert not seat.sent(msg.Fetch)
    seat.wait(1.0)
    assert seat.sent(msg.Fetch) == [
        msg.Fetch(PUBLICATION, 0, 1, 0, WHOLE), msg.Fetch(PUBLICATION, 0, 2, 0, WHOLE),
    ]  # fmt: skip


def test_what_was_on_a_broken_connection_is_fetched_at_once() -> None:
    seat = joined()
    seat.welcome(heads=(1, 0))
    assert seat.sent(msg.Fetch) == [msg.Fetch(PUBLICATION, 0, 1, 0, WHOLE)]


def test_beyond_eight_versions_the_state_is_fetched() -> None:
    for head, kind in ((8, PUBLICATION), (9, STATE)):
        seat = joined()
        seat.told(heads=(head, 0))
        seat.wait(1.0)
        assert {each.kind for each in seat.sent(msg.Fetch)} == {kind}


@pytest.mark.parametrize("answer", [15, 25])
def test_the_broker_may_answer_with_another_version_of_the_state(answer: int) -> None:
    seat = joined()
    seat.told(heads=(20, 0))
    assert seat.sent(msg.Fetch) == [msg.Fetch(STATE, 0, 20, 0, WHOLE)]
    assert seat.chunk(STATE, 0, answer, 0)
    assert seat.sent(msg.Fetch) == [msg.Fetch(STATE, 0, answer, 0, ((1, 3),))]
    for chunk in range(1, CHUNKS):
        seat.chunk(STATE, 0, answer, chunk)
    seat.assemble()
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [answer]


def test_a_state_in_place_of_a_publication_that_is_no_longer_kept() -> None:
    seat = joined()
    seat.welcome(heads=(1, 0))
    seat.sent(msg.Fetch)
    assert seat.chunk(STATE, 0, 1, 0)
    assert seat.sent(msg.Fetch) == [msg.Fetch(STATE, 0, 1, 0, ((1, 3),))]
    assert not seat.chunk(PUBLICATION, 0, 1, 0)


def test_publications_that_come_beside_a_state_lead_on_from_it() -> None:
    seat = joined()
    seat.told(heads=(20, 0))
    for version in (21, 22):
        for chunk in range(CHUNKS):
            assert seat.chunk(PUBLICATION, 0, version, chunk)
    seat.state(0, 20)
    seat.assemble()
    seat.assemble()
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [22]


def test_a_digest_that_differs_leads_to_the_state() -> None:
    seat = joined()
    for chunk in range(CHUNKS):
        seat.chunk(PUBLICATION, 0, 1, chunk)
    seat.assemble(agrees=False)
    assert seat.sent(msg.Fetch) == [msg.Fetch(STATE, 0, 1, 0, WHOLE)]
    assert [each.event for each in seat.take(Note)] == ["digest_differs"]
    seat.state(0, 1)
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [1]


def test_all_fragments_together_ask_for_one_window() -> None:
    seat = Seat(replace(SETTINGS, window_messages=4))
    seat.welcome(heads=(0, 0))
    assert [each.fragment for each in seat.sent(msg.Fetch)] == [0]
    for chunk in range(CHUNKS):
        seat.chunk(STATE, 0, 0, chunk)
    assert sum(count for f in seat.sent(msg.Fetch) for _, count in f.chunks) == CHUNKS


# Epochs.


def test_a_new_life_goes_on_from_what_is_held() -> None:
    seat = joined(version=3)
    seat.restart()
    seat.welcome(heads=(4, 3))
    assert seat.sent(msg.Fetch) == [msg.Fetch(PUBLICATION, 0, 4, 0, WHOLE)]
    seat.publish(0, 4)
    seat.step()
    assert seat.take(Adopt) == [Adopt(0, 4, 0, 0.5, merged=False, overwrite=False)]


def test_a_learner_of_another_history_goes_back_and_says_so() -> None:
    seat = joined(version=3)
    seat.told(collecting=(0,))
    seat.step(8)
    seat.encode()
    seat.restart(heads=(1, 3))
    seat.welcome(go_back=(0,))
    assert seat.take(Forget) == [Forget(0, 1)]
    assert [each.event for each in seat.take(Note)] == ["offline", "online", "went_back"]
    assert seat.sent(msg.Report)[-1].held == (-1, 3)
    seat.step(8)
    seat.state(0, 1)
    seat.step(8)
    assert seat.take(Adopt) == [Adopt(0, 1, 0, 0.0, merged=False, overwrite=True)]
    assert seat.session.ledger.lost == (8 + 8 + 8) // 2


def test_within_one_life_a_publication_may_overtake_a_welcome() -> None:
    seat = joined()
    seat.publish(0, 1)
    seat.welcome(heads=(0, 0), go_back=(0,))
    seat.step()
    assert [(each.version, each.overwrite) for each in seat.take(Adopt)] == [(1, False)]


def test_a_copy_of_the_old_life_is_not_taken_after_the_new_one_has_spoken() -> None:
    seat = joined()
    for chunk in range(CHUNKS):
        seat.chunk(PUBLICATION, 0, 1, chunk)
    header = seat.header(PUBLICATION, 0, 1)
    seat.restart()
    seat.welcome(heads=(1, 0))
    for chunk in range(CHUNKS):
        assert seat.chunk(PUBLICATION, 0, 1, chunk)  # The new life's, which is being made too.
    assert not seat.session.assembled(header, seat.now, agrees=True)
    assert seat.session.parts[0].tip == 0


def test_a_copy_that_was_completed_after_the_hello_is_compared_by_another_one() -> None:
    seat = joined()
    for chunk in range(CHUNKS):
        seat.chunk(PUBLICATION, 0, 1, chunk)
    seat.session.lost(seat.now)
    seat.done()
    seat.assemble()
    seat.sent(msg.Hello)
    seat.epoch = EPOCH_2
    seat.welcome(heads=(0, 0))
    (hello,) = seat.sent(msg.Hello)
    assert hello.held[0].version == 1 and hello.epoch == EPOCH
    seat.welcome(heads=(0, 0), go_back=(0,))
    assert seat.session.epoch == EPOCH_2 and seat.session.parts[0].tip == -1


# The end.


def test_a_learner_ends_with_the_final_model_and_says_bye() -> None:
    seat = joined()
    seat.step(8)
    seat.told(phase=Phase.ENDING)
    assert seat.session.stopping
    seat.rest()
    seat.encode()
    assert [each.fragment for each in seat.sent(msg.Push)] == [0, 1]
    assert not seat.sent(msg.Report)  # Nothing is finished, and nobody has said else.
    seat.publish(0, 1, 1)
    assert seat.sent(msg.Report)[-1].finished == (0,)
    seat.publish(1, 1, 2)
    seat.rest()
    assert seat.sent(msg.Report)[-1].finished == (0, 1)
    seat.take(Adopt)
    seat.told(phase=Phase.ENDED, heads=(2, 1))
    seat.rest()
    assert seat.take(Adopt) == [Adopt(1, 1, 0, 0.0, merged=False, overwrite=True)]
    seat.publish(0, 2)
    seat.rest()
    assert seat.take(Adopt) == [Adopt(0, 2, 0, 0.0, merged=False, overwrite=True)]
    assert seat.sent(msg.Report)[-1].held == (2, 1)
    assert seat.sent(msg.Bye) == [msg.Bye("the run has ended")]
    assert seat.session.ended and seat.session.final


def test_a_learner_that_leaves_pushes_what_is_left_and_waits_for_the_outcome() -> None:
    seat = joined()
    seat.step(8)
    seat.leave()
    assert seat.session.paused == "leaving" and not seat.session.ended
    seat.rest()
    seat.encode()
    seat.publish(0, 1, 1)
    assert not seat.session.ended
    seat.publish(1, 1, 2)
    assert seat.session.ended and seat.sent(msg.Bye) == [msg.Bye("the loop has ended")]


def test_a_learner_gives_up_when_nothing_moves() -> None:
    seat = joined()
    seat.step(8)
    seat.leave()
    seat.rest()
    seat.now += 10.0
    seat.session.sent(seat.now)  # A slow line is no standstill; what others push is no progress.
    for version in range(1, 30):
        seat.wait(1.0)
        seat.told()
        seat.publish(0, version)
    assert not seat.session.ended
    seat.wait(1.0)
    (bye,) = seat.sent(msg.Bye)
    assert seat.session.ended and "last pushes, of fragments [0, 1]" in bye.reason


def test_in_a_run_that_ends_the_broker_decides_how_long_it_takes() -> None:
    seat = joined()
    seat.leave()
    assert seat.session.ended  # Nothing is left to wait for in a run that goes on.
    seat = joined()
    seat.told(phase=Phase.ENDING)
    seat.leave()
    for _ in range(100):
        seat.wait(1.0)
        seat.told(phase=Phase.ENDING)
    assert not seat.session.ended
    seat.wait(30.0)
    assert seat.sent(msg.Bye) == [msg.Bye("leaves without the run's final model")]
    assert seat.session.ended


def test_the_run_clock_goes_on_between_beats_and_never_falls() -> None:
    seat = joined()
    seat.told(run_tokens=1000, tokens_per_s=10.0)
    assert seat.session.run_tokens(seat.now + 5.0) == 1050.0
    seat.told(run_tokens=1020, tokens_per_s=10.0)
    assert seat.session.run_tokens(seat.now) == 1050.0
    assert seat.session.run_tokens(seat.now + 1000.0) == 1120.0
