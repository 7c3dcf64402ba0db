"""Joining: founding, contested names, coming back."""

from __future__ import annotations

from typing import Any

import pytest
from machines import ELEMENTS, EPOCH, LAYOUT, RUN, SECRET, Desk, hello, incarnation_of, one, only

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.machine import Resumed, Syncer
from narrows.broker.syncer.run_secret import RunSecret
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.config import override
from narrows.proto.errors import ErrorCode
from narrows.proto.layout import split_layout
from narrows.proto.messages import Phase, Role

FOUND = msg.DataKind.FOUND


def test_the_first_learner_founds_the_others_wait() -> None:
    desk = Desk()
    assert one(desk.say("b", hello("b")), msg.Welcome).role is Role.FOUND
    welcome = one(desk.say("a", hello("a")), msg.Welcome)
    assert (welcome.role, welcome.fragments) == (Role.WAIT, ())


def test_version_0_is_handed_out_only_once_it_is_durable() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    for fragment in (0, 1):
        effects = desk.chunk("a", fragment, kind=FOUND, codec=STATE_CODEC)
    assert one(effects, ev.Found).handles == ((1,), (2,))
    effects = desk.do(ev.Founded((7, 8)))
    assert only(effects, ev.WriteCheckpoint) and not only(effects, msg.Welcome)
    assert one(desk.say("b", hello("b")), msg.Welcome).fragments == ()
    assert not only(desk.say("b", msg.Fetch(0, -1)), ev.Publish)
    welcomes = only(desk.do(ev.CheckpointWritten(0)), msg.Welcome)
    assert [w.fragments for w in welcomes] == [(msg.FragmentHead(0, 7), msg.FragmentHead(0, 8))] * 2


def test_a_failed_first_checkpoint_is_tried_again() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    for fragment in (0, 1):
        desk.chunk("a", fragment, kind=FOUND, codec=STATE_CODEC)
    desk.do(ev.Founded((7, 8)))
    assert not only(desk.do(ev.CheckpointFailed("disk full")), ev.WriteCheckpoint)
    desk.say("a", msg.Alive(0), after_s=9.0)
    assert only(desk.wait(1.0), ev.WriteCheckpoint)
    assert desk.state.phase.stored is Phase.FOUNDING


def test_learners_at_start_are_waited_for() -> None:
    desk = Desk(run__learners_at_start=2)
    desk.say("a", hello("a"))
    for fragment in (0, 1):
        desk.chunk("a", fragment, kind=FOUND, codec=STATE_CODEC)
    desk.do(ev.Founded((7, 8)))
    assert not only(desk.do(ev.CheckpointWritten(0)), msg.Welcome)
    assert not desk.state.open_rounds()
    roles = [w.role for w in only(desk.say("b", hello("b")), msg.Welcome)]
    assert roles == [Role.WAIT, Role.ADOPT, Role.ADOPT]
    assert desk.state.phase.stored is Phase.RUNNING


def test_the_next_learner_founds_if_the_founder_is_gone() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.say("b", hello("b"))
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC, count=500)
    effects = desk.do(ev.PeerLost(b"a"))
    assert one(effects, ev.Drop).handles == (1,)
    assert one(effects, msg.Welcome).role is Role.FOUND


def test_founding_goes_on_without_the_founder_once_everything_is_here() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.say("b", hello("b"))
    for fragment in (0, 1):
        desk.chunk("a", fragment, kind=FOUND, codec=STATE_CODEC)
    assert not only(desk.do(ev.PeerLost(b"a")), msg.Welcome)
    desk.do(ev.Founded((7, 8)))
    assert one(desk.do(ev.CheckpointWritten(0)), msg.Welcome).role is Role.ADOPT


def test_version_0_is_of_one_process_though_its_name_was_taken_over() -> None:
    """The new process has parameters of its own: a version 0 of halves would be no model at all."""
    desk = Desk()
    desk.say("a", hello("a"))
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC)
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    effects = desk.wait(2.1)
    assert one(effects, msg.Welcome).role is Role.FOUND
    assert one(effects, ev.Drop).handles == (1,)
    for fragment in (1, 0):
        effects = desk.chunk(
            "a", fragment, incarnation=incarnation_of("a", 2), kind=FOUND, codec=STATE_CODEC
        )
    assert one(effects, ev.Found).handles == ((3,), (2,))


def test_a_founder_that_cuts_anew_and_sends_the_last_fragment_whole_has_founded() -> None:
    """Rates that are raised in the middle of it make messages, and so chunks, larger."""
    desk = Desk()
    desk.say("a", hello("a"))
    desk.chunk("a", 1, kind=FOUND, codec=STATE_CODEC)
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC, count=500)
    effects = desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC)
    assert only(effects, ev.Drop) == [ev.Drop((2,))]
    assert one(effects, ev.Found).handles == ((3,), (1,))


def test_a_repeated_hello_of_the_founder_does_not_start_over() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC)
    effects = desk.say("a", hello("a"))
    assert not only(effects, ev.Drop) and not only(effects, ev.Admit)
    assert only(desk.chunk("a", 1, kind=FOUND, codec=STATE_CODEC), ev.Found)
    assert one(desk.say("a", hello("a")), msg.Welcome).role is Role.WAIT
    assert not only(desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC), ev.Found)


def test_missing_chunks_of_version_0_are_asked_for_after_a_while() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC, count=400)
    missing = only(desk.wait(2.5), msg.Missing)
    assert missing[:2] == [
        msg.Missing(FOUND, 0, 0, 0, ((400, ELEMENTS[0] - 400),)),
        msg.Missing(FOUND, 1, 0, 0, ((0, ELEMENTS[1]),)),
    ]


def test_a_founder_whose_version_0_cannot_be_made_is_refused_the_others_start_again() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.say("b", hello("b"))
    desk.chunk("a", 0, kind=FOUND, codec=STATE_CODEC)
    effects = desk.do(ev.FoundingFailed("not finite"))
    codes = [refuse.code for refuse in only(effects, msg.Refuse)]
    assert codes == [ErrorCode.LAYOUT_MISMATCH, ErrorCode.UNKNOWN_SESSION]
    assert one(effects, ev.Drop).handles == (1,)
    assert one(desk.say("b", hello("b")), msg.Welcome).role is Role.FOUND


def test_a_founder_whose_chunk_does_not_decode_is_refused_and_the_next_one_founds() -> None:
    """It would send the same bytes again, and the run would never begin."""
    desk = Desk()
    desk.say("a", hello("a"))
    desk.say("b", hello("b"))
    desk.chunk("a", 1, kind=FOUND, codec=STATE_CODEC)
    header = desk.header("a", 0, kind=FOUND, codec=STATE_CODEC)
    assert only(desk.do(ev.ChunkArrived(header, 50)), ev.Unpack)
    effects = desk.do(ev.ChunkDamaged(header, 50, ErrorCode.BAD_PAYLOAD, "no"))
    codes = [refuse.code for refuse in only(effects, msg.Refuse)]
    assert codes == [ErrorCode.BAD_PAYLOAD, ErrorCode.UNKNOWN_SESSION]
    assert sorted(h for drop in only(effects, ev.Drop) for h in drop.handles) == [1, 50]
    assert one(desk.say("b", hello("b")), msg.Welcome).role is Role.FOUND


def test_one_connection_speaks_for_one_learner() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    refuse = one(desk.say("a", hello("b")), msg.Refuse)
    assert (refuse.code, refuse.expected, refuse.got) == (ErrorCode.BAD_NAME, "a", "b")
    assert desk.state.roster.get("b") is None
    assert one(desk.say("a", hello("a")), msg.Welcome).role is Role.FOUND


def test_a_model_whose_learners_have_all_left_binds_nobody() -> None:
    desk = Desk()
    other = (msg.LayoutEntry("other", (50, 50), "float32", "mean"),)
    desk.say("a", hello("a", layout=other))
    assert one(desk.say("b", hello("b")), msg.Refuse).code == ErrorCode.LAYOUT_MISMATCH
    desk.say("a", msg.Bye("a mistake"))
    assert one(desk.say("b", hello("b")), msg.Welcome).role is Role.FOUND


def test_learners_at_start_are_waited_for_after_a_restart_too() -> None:
    desk = Desk(run__learners_at_start=2)
    desk.found("a")
    assert desk.state.phase.stored is Phase.FOUNDING
    state = desk.state
    resumed = Resumed(state.layout, state.frozen_digest, tuple(state.heads), 0, Phase.FOUNDING)
    desk = Desk(run__learners_at_start=2, resumed=resumed)
    assert one(desk.say("a", hello("a")), msg.Welcome).role is Role.WAIT
    desk.say("a", msg.Bye("for now"))
    assert desk.state.layout
    desk.say("a", hello("a"))
    roles = [w.role for w in only(desk.say("b", hello("b")), msg.Welcome)]
    assert roles == [Role.WAIT, Role.ADOPT, Role.ADOPT]


def test_in_lockstep_a_joiner_that_cannot_adopt_is_not_waited_for_for_ever() -> None:
    desk = Desk("streaming")
    desk.found("a")
    assert only(desk.contribute("a", 0, 1), ev.StartMerge)
    desk.say("c", hello("c"))
    desk.do(ev.Merged(0, 1, 1001, 0))
    desk.adopt("a")
    assert status_of(desk.syncer, {}, desk.now).waiting_for == "c to adopt the fragments"
    for _ in range(29):
        for name in "ac":
            desk.say(name, msg.Alive(0), after_s=1.0)
    assert 0 not in desk.state.rounds
    for _ in range(2):
        for name in "ac":
            desk.say(name, msg.Alive(0), after_s=1.0)
    assert 0 in desk.state.rounds


def test_outside_lockstep_nobody_waits_for_a_joiner_to_adopt() -> None:
    desk = Desk().running("a")
    desk.say("c", hello("c"))
    assert desk.syncer.scheduler.adopting == []
    assert "adopt" not in status_of(desk.syncer, {}, desk.now).waiting_for


def test_version_0_from_a_file_needs_no_founder() -> None:
    config = override(BrokerConfig(), {"fragments.count": 2})
    syncer = Syncer(config, run_id=RUN, epoch=EPOCH, secret=SECRET, now=0.0, from_file=True)
    effects = syncer.handle(ev.Received(b"a", hello("a")), now=0.0)
    assert one(effects, msg.AskLayout).first == 0 and not only(effects, msg.Welcome)
    (part,) = split_layout(LAYOUT, 0)
    effects = syncer.handle(ev.Received(b"a", part), now=0.0)
    assert one(effects, ev.Found).handles is None
    assert one(effects, msg.Welcome).role is Role.WAIT
    effects = syncer.handle(ev.FoundingFailed("another shape"), now=1.0)
    assert one(effects, msg.Refuse).code == ErrorCode.LAYOUT_MISMATCH


def test_a_silent_holder_loses_its_name_after_the_probe() -> None:
    desk = Desk().running("a")
    newcomer = hello("a", incarnation=incarnation_of("a", 2))
    assert only(desk.say("x", newcomer), msg.Probe)
    assert not only(desk.wait(1.9), msg.Welcome)
    assert one(desk.wait(0.2), msg.Welcome).role is Role.ADOPT
    member = desk.state.roster.get("a")
    assert member is not None and member.incarnation == newcomer.incarnation


def test_a_holder_whose_connection_closes_loses_its_name_at_once() -> None:
    desk = Desk().running("a")
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    assert only(desk.do(ev.PeerLost(b"a")), msg.Welcome)


def test_a_holder_that_comes_back_on_another_connection_is_probed_there() -> None:
    desk = Desk().running("a")
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    effects = desk.say("y", hello("a"))
    probe = [send for send in only(effects, ev.Send) if isinstance(send.message, msg.Probe)]
    assert [send.peer for send in probe] == [b"y"]
    message = probe[0].message
    assert isinstance(message, msg.Probe)
    refuse = one(desk.say("y", msg.Alive(message.nonce)), msg.Refuse)
    assert refuse.code == ErrorCode.NAME_IN_USE


def test_a_newcomer_that_joined_under_another_name_meanwhile_does_not_get_both() -> None:
    """One connection would speak for two learners."""
    desk = Desk().running("a")
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    assert only(desk.say("x", hello("b")), msg.Welcome)
    refuse = one(desk.do(ev.PeerLost(b"a")), msg.Refuse)
    assert refuse.code == ErrorCode.BAD_NAME
    assert [member.name for member in desk.state.roster.connected()] == ["b"]


def test_the_newcomer_is_answered_where_it_asked_last() -> None:
    desk = Desk().running("a")
    newcomer = hello("a", incarnation=incarnation_of("a", 2))
    desk.say("x", newcomer)
    desk.say("y", newcomer)
    effects = desk.wait(2.1)
    welcomes = [s for s in only(effects, ev.Send) if isinstance(s.message, msg.Welcome)]
    assert [send.peer for send in welcomes] == [b"y"]


def test_a_name_taken_over_frees_what_the_old_process_had_begun() -> None:
    desk = Desk().running("a", "b")
    desk.push("a")
    desk.chunk("a", 0, count=500)
    handle = desk.handle
    desk.do(ev.PeerLost(b"a"))
    assert not desk.round.incoming
    desk.chunk("a", 0, count=500)
    effects = desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    assert handle != desk.handle
    assert one(effects, ev.Drop).handles == (desk.handle,)


def test_the_same_process_comes_back_with_all_that_it_has() -> None:
    desk = Desk().running("a")
    desk.do(ev.PeerLost(b"a"))
    effects = desk.say("x", hello("a", run_id=RUN, epoch=EPOCH, tokens=200))
    assert one(effects, ev.Admit).incarnation == incarnation_of("a")
    member = desk.state.roster.get("a")
    assert member is not None and member.ready and member.peer == b"x"


def test_a_resumed_run_welcomes_with_its_versions() -> None:
    before = Desk().running("a")
    heads = (msg.FragmentHead(3, 30), msg.FragmentHead(2, 20))
    resumed = Resumed(before.state.layout, 0, heads, 5000, Phase.RUNNING)
    desk = Desk(resumed=resumed)
    welcome = one(desk.say("a", hello("a", run_id=RUN, epoch=(0, 0, 0), tokens=900)), msg.Welcome)
    assert (welcome.fragments, welcome.run_tokens) == (heads, 5000)
    # Publications of the old epoch are gone: whoever lacks one gets the state.
    publish = one(desk.say("a", msg.Fetch(0, 2)), ev.Publish)
    assert (publish.kind, publish.version) == (msg.DataKind.STATE, 3)


def test_a_broker_that_was_replaced_stops_serving() -> None:
    """Two brokers of one run would make two models."""
    desk = Desk().running("a")
    epoch = (desk.state.epoch[0] + 1, 1, 1)
    proof = SECRET.proof(RUN, epoch)
    newer = hello("b", run_id=RUN, epoch=epoch, epoch_proof=proof)
    effects = desk.do(ev.Received(b"b", newer))
    assert any(
        note.level == "error" and "serves this run" in note.text for note in only(effects, ev.Note)
    )
    assert {type(send.message) for send in only(effects, ev.Send)} >= {msg.Refuse, msg.Bye}
    assert not desk.do(ev.Received(b"c", hello("c")))
    other_run = hello("b", run_id="f" * 16, epoch=epoch, epoch_proof=proof)
    desk = Desk().running("a")
    desk.do(ev.Received(b"b", other_run))
    assert not desk.syncer.lifecycle.stopping


WILD_EPOCHS = [(1, 0, 0), (1, 1, 7), (2**62, 2**62, 2**62), (0, 2, 7), (0, 2**62, 0), (0, 1, 8)]


@pytest.mark.parametrize("epoch", WILD_EPOCHS)
@pytest.mark.parametrize(
    "proof", ["", "0" * 64, "another epoch's", "another run's", "another key's"]
)
def test_an_epoch_that_is_claimed_without_its_proof_does_nothing(
    epoch: msg.Epoch, proof: str
) -> None:
    """An insider knows the run, and the proof of the epoch that it was admitted to."""
    desk = Desk().running("a")
    shown = {
        "another epoch's": desk.state.epoch_proof,
        "another run's": SECRET.proof("other", epoch),
        "another key's": RunSecret(b"k" * 32).proof(RUN, epoch),
    }.get(proof, proof)
    effects = desk.say("b", hello("b", run_id=RUN, epoch=epoch, epoch_proof=shown))
    assert not [note for note in only(effects, ev.Note) if note.level != "info"] or epoch[0]
    assert not only(effects, msg.Bye) and not only(effects, ev.Finish)
    assert not desk.syncer.lifecycle.stopping
    if epoch[0] > desk.state.epoch[0]:
        refuse = one(effects, msg.Refuse)
        assert refuse.code == ErrorCode.WRONG_EPOCH
        assert "does not prove" in refuse.message and "start the learner again" in refuse.remedy
    else:
        assert one(effects, msg.Welcome).epoch_proof == desk.state.epoch_proof


def test_the_secret_is_in_no_text() -> None:
    desk = Desk().running("a")
    for told in (repr(desk.state), str(desk.state.secret), repr(desk.state.secret)):
        assert str(SECRET.key) not in told and SECRET.key.hex() not in told


def resumed_at(*versions: int, **settings: Any) -> Desk:
    """A broker that begins its life with these versions."""
    before = Desk().running("a")
    heads = tuple(msg.FragmentHead(version, 10 * version) for version in versions)
    resumed = Resumed(before.state.layout, 0, heads, 5000, Phase.RUNNING)
    return Desk("decoupled", resumed=resumed, **settings)


def returns(desk: Desk, name: str, epoch: msg.Epoch, versions: tuple[int, ...]) -> list[ev.Note]:
    """The lines that the return of a learner writes; it is admitted."""
    effects = desk.say(
        name,
        hello(
            name,
            run_id=RUN,
            epoch=epoch,
            epoch_proof=SECRET.proof(RUN, epoch),
            versions=versions,
        ),
    )
    assert one(effects, msg.Welcome).epoch == desk.state.epoch
    return [note for note in only(effects, ev.Note) if note.text.startswith("history_lost: ")]


@pytest.mark.parametrize("epoch", [(0, 1, 8), (0, 5, 8)], ids=["number again", "higher number"])
def test_a_restored_copy_is_named_with_what_is_lost(epoch: msg.Epoch) -> None:
    desk = resumed_at(6, 5)
    (note,) = returns(desk, "a", epoch, (31, 30))
    assert note.level == "warning"
    assert "restored from an older copy" in note.text
    assert f"does not know the epoch 0.{epoch[1]} that a has followed" in note.text
    assert "fragment 0 by 25 (31, here 6), of fragment 1 by 25 (30, here 5)" in note.text
    assert "versions lost: 50." in note.text and "disk" not in note.text
    # Once is enough, unless more was lost than was known.
    assert not returns(desk, "b", epoch, (31, 29))
    (more,) = returns(desk, "c", epoch, (33, 3))
    assert "fragment 0 by 27 (33, here 6); versions lost: 27." in more.text


def test_a_copy_that_lacks_no_version_is_named_too() -> None:
    desk = resumed_at(6, 5)
    (note,) = returns(desk, "a", (0, 1, 8), (6, 5))
    assert "restored from an older copy" in note.text and "no newer version" in note.text
    assert not returns(desk, "b", (0, 1, 8), (6, 5))


def test_a_life_before_this_one_lost_its_end() -> None:
    """An older copy, or a disk that has lost what it said was written: nobody can tell."""
    desk = resumed_at(6, 5)
    assert not returns(desk, "a", (0, 0, 8), (6, 5))
    (note,) = returns(desk, "b", (0, 0, 8), (6, 6))
    assert note.level == "error"
    assert "older copy, or the disk has lost the end of the journal" in note.text
    assert "fragment 1 by 1 (6, here 5); versions lost: 1." in note.text


def test_without_a_journal_what_came_after_the_checkpoint_is_lost() -> None:
    desk = resumed_at(6, 5, broker__journal="off")
    (note,) = returns(desk, "a", (0, 0, 8), (9, 5))
    assert note.level == "warning" and "there is no journal" in note.text


def test_versions_that_are_claimed_without_proof_are_no_loss_and_hide_none() -> None:
    desk = resumed_at(6, 5)
    claim = hello("x", run_id=RUN, epoch=(0, 0, 8), epoch_proof="", versions=(1 << 53, 1 << 53))
    assert not [n for n in only(desk.say("x", claim), ev.Note) if n.level != "info"]
    (note,) = returns(desk, "b", (0, 0, 8), (6, 6))
    assert "versions lost: 1." in note.text


def test_a_copy_from_before_version_0_has_lost_everything() -> None:
    desk = Desk()
    (note,) = returns(desk, "a", (0, 1, 8), (3, 3))
    assert "(3, here none)" in note.text and "versions lost: 8." in note.text


def test_a_learner_of_this_life_or_of_another_run_has_lost_nothing() -> None:
    desk = resumed_at(6, 5)
    assert not returns(desk, "a", EPOCH, (6, 5))
    effects = desk.say("x", hello("x", run_id="f" * 16, epoch=(0, 9, 9), versions=(9, 9)))
    assert one(effects, msg.Refuse).code == ErrorCode.WRONG_RUN


def test_a_push_of_another_life_with_the_same_number_is_never_merged() -> None:
    """Its base has the broker's version and other bytes."""
    desk = Desk().running("a", "b")
    other = (desk.state.epoch[0], desk.state.epoch[1], desk.state.epoch[2] + 1)
    desk.push("a")
    refuse = one(desk.chunk("a", 0, epoch=other), msg.Refuse)
    assert (refuse.code, refuse.push_id) == (ErrorCode.WRONG_EPOCH, 1)
    assert not desk.round.contributed and not desk.round.incoming
