"""From a push to a version: collection, repair, late copies, merge, publication, the end."""

from __future__ import annotations

from machines import ELEMENTS, Desk, hello, incarnation_of, one, only
from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.errors import ErrorCode
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import Phase


def merged(desk: Desk, fragment: int = 0) -> list[ev.Effect]:
    version = desk.state.heads[fragment].version + 1
    return desk.do(ev.Merged(fragment, version, 1000 + version, 0))


def test_all_contributions_start_the_merge_in_name_order() -> None:
    desk = Desk().running("b", "a")
    assert not only(desk.contribute("b"), ev.StartMerge)
    merge = one(desk.contribute("a"), ev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a", "b"]
    assert (merge.fragment, merge.version) == (0, 1)
    assert not desk.state.open_rounds()


def test_nobody_waits_for_a_learner_that_declined() -> None:
    desk = Desk().running("a", "b")
    desk.say("a", msg.Decline(0, 0, 1, "evaluating"))
    assert only(desk.contribute("b"), ev.StartMerge)


def test_a_decline_of_an_earlier_attempt_means_nothing() -> None:
    desk = Desk().running("a", "b")
    desk.say("a", msg.Decline(0, 0, 0, "evaluating"))
    assert not only(desk.contribute("b"), ev.StartMerge)


def test_who_leaves_is_written_down_with_its_incarnation_and_the_reason() -> None:
    desk = Desk().running("a", "b")
    fate = one(desk.do(ev.PeerLost(b"a")), ev.LogFate)
    assert fate == ev.LogFate("left", "a", incarnation_of("a"), reason="its connection closed")
    fate = one(desk.say("b", msg.Bye("done")), ev.LogFate)
    assert fate == ev.LogFate("left", "b", incarnation_of("b"), reason="said Bye (done)")


def test_nobody_waits_for_a_learner_that_is_gone() -> None:
    desk = Desk().running("a", "b")
    desk.contribute("b")
    assert only(desk.do(ev.PeerLost(b"a")), ev.StartMerge)


def test_a_complete_contribution_outlives_its_learner() -> None:
    desk = Desk().running("a", "b")
    desk.contribute("a")
    desk.do(ev.PeerLost(b"a"))
    merge = one(desk.contribute("b"), ev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a", "b"]


def test_a_refused_push_is_not_waited_for_and_may_be_made_again() -> None:
    desk = Desk().running("a")
    desk.push("a")
    desk.do(ev.ChunkArrived(desk.header("a", 0), 5))
    desk.do(ev.ChunkDamaged(desk.header("a", 0), 5, ErrorCode.BAD_PAYLOAD, "no"))
    assert desk.round.declined == {"a": "its push was refused: bad_payload"}
    assert only(desk.contribute("a", push_id=2), ev.StartMerge)


def test_missing_chunks_are_asked_for_once_nothing_arrives() -> None:
    desk = Desk().running("a", "b")
    desk.push("a")
    desk.chunk("a", 0, count=600)
    asked = only(desk.wait(2.5), msg.Missing)
    assert asked[0] == msg.Missing(msg.DataKind.PUSH, 0, 0, 1, ((600, ELEMENTS[0] - 600),))


def test_what_is_missing_is_asked_for_twice_as_late_each_time() -> None:
    """A late chunk is not sent twice, and a slow line is not filled with repeats."""
    desk = Desk().running("a", "b")
    desk.push("a")
    desk.chunk("a", 0, count=600)
    begun, asked = desk.now, list[float]()
    for _ in range(100):
        effects = desk.say("a", msg.Alive(0)) + desk.say("b", msg.Alive(0), after_s=0.25)
        if only(effects, msg.Missing):
            asked.append(desk.now - begun)
    gaps = [later - earlier for earlier, later in zip([0.0, *asked], asked, strict=False)]
    # Whoever looks once a second is up to a second late.
    assert [int(gap) for gap in gaps[:4]] == [1, 2, 4, 8] and max(gaps) < 9.5
    desk.chunk("a", 0, offset=600, count=100)
    assert only(desk.wait(2.5), msg.Missing)  # Progress begins the count again.


def test_a_late_copy_of_a_contribution_is_dropped_without_a_refusal() -> None:
    desk = Desk().running("a", "b")
    desk.contribute("a")
    for effects in (desk.push("a"), desk.chunk("a", 0)):
        assert not only(effects, msg.Refuse)
    desk.contribute("b")
    assert not only(desk.chunk("a", 0), msg.Refuse)  # While it is merged.
    merged(desk)
    assert not only(desk.chunk("a", 0, version=0), msg.Refuse)  # And after.
    assert not only(desk.push("a", base_version=0), msg.Refuse)
    assert desk.state.tally.refused == {}


def test_a_duplicate_chunk_is_dropped() -> None:
    desk = Desk().running("a", "b")
    desk.chunk("a", 0, count=500)
    assert one(desk.chunk("a", 0, count=500), ev.Drop).handles == (desk.handle,)


def test_a_chunk_that_is_being_decoded_is_not_decoded_again() -> None:
    desk = Desk().running("a", "b")
    header = desk.header("a", 0)
    assert only(desk.do(ev.ChunkArrived(header, 50)), ev.Unpack)
    assert desk.do(ev.ChunkArrived(header, 51)) == [ev.Drop((51,))]
    desk.do(ev.ChunkUnpacked(header, 50))
    assert desk.do(ev.ChunkArrived(header, 52)) == [ev.Drop((52,))]


def test_a_push_that_is_being_decoded_is_not_left_out() -> None:
    # A broker that is short of CPU would else merge without what it has not looked at yet.
    desk = Desk().running("a", "b")
    desk.contribute("a")
    desk.push("b")
    header = desk.header("b", 0)
    assert only(desk.do(ev.ChunkArrived(header, 77)), ev.Unpack)
    assert not only(desk.wait(8.0), ev.StartMerge)
    merge = one(desk.do(ev.ChunkUnpacked(header, 77)), ev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a", "b"]


def test_a_push_of_which_a_part_is_missing_is_waited_for_no_longer_than_ever() -> None:
    desk = Desk().running("a", "b")
    desk.push("a", steps=11)  # In the eleven seconds since it adopted the fragment.
    desk.chunk("a", 0)
    desk.push("b", steps=11)
    half = desk.header("b", 0, count=desk.header("b", 0).count // 2)
    assert only(desk.do(ev.ChunkArrived(half, 77)), ev.Unpack)
    assert only(desk.wait(8.0), ev.StartMerge)


def test_a_flood_of_chunks_is_refused_before_it_is_decoded() -> None:
    desk = Desk().running("a", "b")
    first = desk.header("a", 0)
    effects: list[ev.Effect] = []
    for handle in range(ELEMENTS[0]):
        header = structs.replace(first, offset=handle, count=1, payload_digest=handle)
        effects += desk.do(ev.ChunkArrived(header, handle))
    most = desk.state.rounds[0].chunks_max
    assert len(only(effects, ev.Unpack)) == most < ELEMENTS[0]
    assert desk.state.tally.refused == {ErrorCode.BAD_RANGE: 1}


def test_a_chunk_whose_round_closed_while_it_was_decoded_is_dropped() -> None:
    desk = Desk().running("a", "b")
    header = desk.header("a", 0)
    desk.do(ev.ChunkArrived(header, 50))
    desk.contribute("b")
    desk.do(ev.PeerLost(b"a"))
    assert only(desk.do(ev.ChunkUnpacked(header, 50)), ev.Drop) == [ev.Drop((50,))]


def test_publication_names_each_learners_last_merged_push() -> None:
    desk = Desk().running("a", "b")
    desk.say("b", msg.Decline(0, 0, 1, "evaluating"))
    desk.contribute("a", push_id=3)
    published = {p.learner: p for p in only(merged(desk), ev.Publish)}
    assert (published["a"].push_id, published["b"].push_id) == (3, 0)
    assert desk.state.heads[0] == msg.FragmentHead(1, 1001)


def test_a_failed_merge_changes_nothing_and_the_round_comes_again() -> None:
    desk = Desk().running("a")
    desk.contribute("a")
    effects = desk.do(ev.MergeFailed(0, "not finite"))
    assert not only(effects, ev.Publish)
    assert desk.state.versions == (0, 0)
    assert not desk.state.rounds


def test_small_gaps_are_filled_with_publications_large_ones_with_the_state() -> None:
    desk = Desk().running("a")
    desk.state.heads[0] = msg.FragmentHead(20, 5)
    desk.state.rounds.clear()
    small = only(desk.say("a", msg.Fetch(0, 20 - PUBLICATIONS_KEPT)), ev.Publish)
    assert [p.version for p in small] == list(range(21 - PUBLICATIONS_KEPT, 21))
    large = one(desk.say("a", msg.Fetch(0, 19 - PUBLICATIONS_KEPT)), ev.Publish)
    assert (large.kind, large.version) == (msg.DataKind.STATE, 20)
    assert not only(desk.say("a", msg.Fetch(0, 20)), ev.Publish)


def test_missing_ranges_of_a_publication_are_sent_again() -> None:
    desk = Desk().running("a")
    desk.contribute("a")
    merged(desk)
    missing = msg.Missing(msg.DataKind.PUBLICATION, 0, 1, 0, ((900, 500), (30, 0), (5000, 1)))
    publish = one(desk.say("a", missing), ev.Publish)
    assert (publish.version, publish.ranges) == (1, ((900, 100),))


def test_goal_gives_each_fragment_one_last_round_of_everybody() -> None:
    desk = Desk(run__goal_tokens=1000).running("a", "b")
    desk.contribute("a")
    desk.count(1000)
    desk.say("b", msg.Alive(0))
    assert desk.state.phase.stored is Phase.ENDING
    assert sorted(desk.state.rounds) == [0, 1]
    # Beyond the grace window: at the end nobody has anything better to do than to wait.
    for _ in range(9):
        desk.say("a", msg.Alive(0))
        assert not only(desk.say("b", msg.Alive(0), after_s=1.0), ev.StartMerge)
    assert only(desk.contribute("b"), ev.StartMerge)


def at_the_goal(*names: str) -> Desk:
    """The last rounds are open."""
    desk = Desk(run__goal_tokens=1000).running(*names)
    desk.count(1000)
    desk.say(names[0], msg.Alive(0))
    assert desk.state.phase.stored is Phase.ENDING
    return desk


def decline_all(desk: Desk, *names: str) -> None:
    """The learners have no work for the last rounds; one that was open before comes again."""
    while desk.state.phase.stored is Phase.ENDING:
        for round_ in desk.state.open_rounds():
            decline = msg.Decline(round_.fragment, round_.base_version, round_.attempt, "")
            for name in names:
                desk.say(name, decline)
        desk.wait(0.5)


def test_the_end() -> None:
    desk = at_the_goal("a")
    decline_all(desk, "a")
    assert desk.state.phase.stored is Phase.ENDED
    effects = desk.do(ev.CheckpointWritten(0))
    assert not only(effects, ev.Finish)
    finish = one(desk.say("a", msg.Bye("the run has ended")), ev.Finish)
    assert finish.reason == "the run has ended, all learners have the final model"
    assert desk.syncer.next_deadline() is None


def test_the_end_waits_a_while_for_a_learner_that_was_cut_off() -> None:
    desk = at_the_goal("a", "b")
    decline_all(desk, "a", "b")
    desk.do(ev.PeerLost(b"b"))
    assert desk.state.phase.stored is Phase.ENDED
    desk.do(ev.CheckpointWritten(0))
    assert not only(desk.say("a", msg.Bye("")), ev.Finish)
    assert one(desk.say("y", hello("b")), msg.Welcome).phase is Phase.ENDED
    assert one(desk.say("y", msg.Bye("")), ev.Finish)


def test_stop_waits_for_the_checkpoint() -> None:
    desk = Desk().running("a")
    desk.contribute("a")
    merged(desk)
    effects = desk.do(ev.StopRequested("SIGTERM"))
    assert one(effects, msg.Bye).reason == "SIGTERM"
    assert only(effects, ev.WriteCheckpoint) and not only(effects, ev.Finish)
    assert one(desk.do(ev.CheckpointWritten(1)), ev.Finish).reason == "SIGTERM"


def test_stop_while_version_0_is_written() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    for fragment in (0, 1):
        desk.chunk("a", fragment, kind=msg.DataKind.FOUND, codec=STATE_CODEC)
    desk.do(ev.Founded((7, 8)))
    assert not only(desk.do(ev.StopRequested("SIGTERM")), ev.Finish)
    assert only(desk.do(ev.CheckpointWritten(0)), ev.Finish)


def test_stop_lets_a_merge_end_and_keeps_it() -> None:
    desk = Desk().running("a")
    desk.contribute("a")
    assert not only(desk.do(ev.StopRequested("SIGTERM")), ev.Finish)
    assert only(merged(desk), ev.WriteCheckpoint)
    assert only(desk.do(ev.CheckpointWritten(1)), ev.Finish)


def test_the_positions_that_a_learner_reports_give_the_downlink_credit() -> None:
    """Else nothing more leaves for it once the window is full."""
    desk = Desk().running("a")
    report = msg.Report(3, 300, 1.0, None, (77, 5), msg.TokenLedger(), 0.0)
    assert one(desk.say("a", report), ev.Acknowledge) == ev.Acknowledge("a", (77, 5))


def test_the_time_to_an_adoption_shortens_the_grace() -> None:
    """grace_fraction * (overlap - time to the quorum - time from a merge to its adoption): the time
    given to late learners must not come out of the time to be early."""

    def grace_s(adopted_after_s: float) -> float:
        desk = Desk(
            fragments__overlap_steps=8, merge__wait_fraction=0.0, merge__grace_fraction=1.0
        ).running("a", "b")
        for name in "ab":
            # The eleven seconds since it adopted the fragment.
            desk.contribute(name, desk.round.fragment, steps=11)
        desk.now += adopted_after_s
        merged(desk)
        for name in "ab":
            desk.say(name, msg.Adopted(0, 1))
        while not desk.state.open_rounds():
            for name in "ab":
                desk.say(name, msg.Alive(0), after_s=0.5)
        desk.contribute("a", desk.round.fragment, push_id=2)
        decided = desk.syncer.scheduler.decision(desk.round, desk.state.roster.ready(), desk.now)
        assert decided.until is not None and desk.round.quorum_at is not None
        return decided.until - desk.round.quorum_at

    assert grace_s(0.0) - grace_s(2.0) == 2.0


def test_credit_is_given_back_at_once_after_much() -> None:
    desk = Desk().running("a", "b")
    desk.wait(0.02)
    assert not only(desk.chunk("a", 0, position=1000), msg.Progress)
    progress = one(desk.chunk("a", 0, position=2 << 20), msg.Progress)
    assert progress.received[0] == 2 << 20


def test_credit_is_given_back_soon_however_little_came() -> None:
    desk = Desk().running("a", "b")
    assert not only(desk.chunk("a", 0, position=1000), msg.Progress)
    progress = one(desk.say("b", msg.Alive(0), after_s=0.1), msg.Progress)
    assert progress.received[0] == 1000
    assert not only(desk.say("b", msg.Alive(0), after_s=0.1), msg.Progress)


def missed_notes(beat_s: float) -> list[str]:
    """Notes about b, which answers none of five rounds."""
    desk = Desk().running("a", "b")
    notes: list[str] = []
    for push_id in range(1, 6):
        fragment = desk.round.fragment
        effects = desk.contribute("a", fragment, push_id, desk.steps("a", fragment))
        while not only(effects, ev.StartMerge):
            desk.say("a", msg.Alive(0))
            effects += desk.say("b", msg.Alive(0), after_s=beat_s)
        merged(desk, fragment)
        while not desk.state.open_rounds():
            desk.say("a", msg.Alive(0))
            desk.say("b", msg.Alive(0), after_s=beat_s)
        notes += [note.text for note in only(effects, ev.Note)]
    return [text for text in notes if "missed" in text]


def test_a_learner_that_missed_three_rounds_is_named_once() -> None:
    (note,) = missed_notes(0.5)
    assert note.startswith("b missed 3 rounds in 32 s: it did not answer in time; if its steps")


def test_a_learner_that_became_slower_is_waited_for_again() -> None:
    """As long as waiting is allowed at all: predictions count those that were missed, too."""
    desk = Desk().running("a", "b")
    merged_of_b = 0
    for push_id in range(1, 30):
        fragment, slow = desk.round.fragment, push_id > 8
        desk.contribute("a", fragment, push_id, desk.steps("a", fragment))
        for _ in range(8 if slow else 2):
            for name in "ab":
                desk.say(name, msg.Alive(0), after_s=0.25)
        if any(r.fragment == fragment and not r.merging for r in desk.state.rounds.values()):
            desk.contribute("b", fragment, push_id, desk.steps("b", fragment))
            merged_of_b += slow
        merged(desk, fragment)
        while not desk.state.open_rounds():
            for name in "ab":
                desk.say(name, msg.Alive(0), after_s=0.5)
    assert merged_of_b >= 12


def test_what_an_old_process_contributed_is_not_credited_to_the_new_one() -> None:
    """A publication names the addressee's own last merged push: a new process counts from 1 again,
    and would keep a residual that belongs to another push, or see its own taken for a late copy.
    """
    desk = Desk().running("a", "b")
    desk.contribute("a", push_id=3)
    desk.do(ev.PeerLost(b"a"))
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    merge = one(desk.contribute("b"), ev.StartMerge)
    assert merge.contributions[0].incarnation == incarnation_of("a")
    published = {publish.learner: publish.push_id for publish in only(merged(desk), ev.Publish)}
    assert published == {"a": 0, "b": 1}
    member = desk.state.roster.get("a")
    assert member is not None and member.participation.contributions == 0


def test_an_old_process_cannot_push_under_a_name_taken_over() -> None:
    desk = Desk().running("a", "b")
    desk.do(ev.PeerLost(b"a"))
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    desk.chunk("a", 0)
    assert not desk.round.incoming
