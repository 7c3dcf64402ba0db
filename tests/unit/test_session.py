"""A learner's session: joining, silence, refusals, repair, epochs, reports, pushes, adoptions and
its end. The test plays its broker: there are no bytes, no parameters and no clock."""

import math
from typing import Any, TypeVar

import pytest
from msgspec.structs import astuple, replace

from narrows.learner.effects import Adopt, Assemble, Effect, Note, SendChunks, Snapshot
from narrows.learner.fragment import Pushed
from narrows.learner.session import Session
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.messages import Contributor, DataKind, Header, Mode, Phase, Role

PUBLICATION, STATE = DataKind.PUBLICATION, DataKind.STATE
NAME = "site-a"
INCARNATION = "site-a.0000000a"
EPOCH, EPOCH_2 = "1-0000000a", "2-0000000b"
LAYOUT = msg.Layout(0, tuple(msg.LayoutEntry(name, (4, 256), "float32", "rda") for name in "ab"))
SETTINGS = msg.RunSettings(
    fragments=2, sync_period_steps=4, chunk_elements=256, state_chunk_elements=256
)
DILOCO = replace(SETTINGS, mode=Mode.DILOCO, overlap_steps=0, keep=0.0)
CHUNKS = 4
"""Chunks of each of the two fragments."""
WHOLE = ((0, CHUNKS),)

E = TypeVar("E")


class Seat:
    """Feeds events, checks the session's invariants after each, and keeps its effects."""

    def __init__(self, settings: msg.RunSettings = SETTINGS, *, is_connected: bool = True) -> None:
        self.now = 100.0
        self.settings = settings
        self.epoch = EPOCH
        self.heads: tuple[int, ...] = (0, 0)
        self.session = Session(NAME, INCARNATION, LAYOUT, self.now)
        self.log: list[Effect] = []
        if is_connected:
            self.session.lost(self.now)
            self.done()

    # What the session has done.

    def take(self, kind: type[E] | tuple[type[E], ...]) -> list[E]:
        """The effects of a kind, or of several, since they were last taken."""
        taken: list[Any] = [each for each in self.log if isinstance(each, kind)]
        self.log = [each for each in self.log if not isinstance(each, kind)]
        return taken

    def noted(self) -> list[str]:
        """The events of the notes since they were last taken."""
        return [each.event for each in self.take(Note)]

    def done(self) -> None:
        """The host's part after an event."""
        self.session.tick(self.now)
        self.log += self.session.effects
        self.session.effects = []
        self.session.check()

    # The broker.

    def beat(self, **fields: Any) -> msg.Beat:
        """A Beat of the broker as it is now; `heads` stay as they were told last."""
        self.heads = fields.pop("heads", self.heads)
        whole: dict[str, Any] = {
            "epoch": self.epoch, "phase": Phase.RUNNING, "heads": self.heads, "collecting": (),
            "period_s": 0.0, "run_tokens": 0, "tokens_per_s": 0.0, "up_bits_per_s": 0.0,
        }  # fmt: skip
        return msg.Beat(**{**whole, **fields})

    def hear(self, message: msg.ControlMessage) -> None:
        self.session.control(message, self.now)
        self.done()

    def told(self, **fields: Any) -> None:
        """A Beat arrives."""
        self.hear(self.beat(**fields))

    def restart(self, **beat: Any) -> None:
        """The broker begins another life, and the learner hears of it and says Hello."""
        self.epoch, self.now = EPOCH_2, self.now + 1.0
        self.told(**beat)

    def welcome(self, role: Role = Role.ADOPT, go_back: tuple[int, ...] = (), **beat: Any) -> None:
        self.hear(msg.Welcome("run", role, self.settings, 7071, 7072, go_back, self.beat(**beat)))

    def refuse(self, code: str, fragment: int = 0, push_id: int = 0) -> None:
        self.hear(msg.Refuse(code, "no", "this", "that", "do so", fragment, push_id))

    # Data.

    def header(
        self, kind: DataKind, fragment: int, version: int, chunk: int = 0, push_id: int = 0,
        contributors: tuple[Contributor, ...] = (),
    ) -> Header:  # fmt: skip
        codec: msg.CodecName = "f32-blosc2" if kind is DataKind.STATE else "int4-zstd"
        return Header(
            self.epoch, kind, "", fragment, version, push_id, chunk, codec, 0, 1000 + version,
            contributors,
        )  # fmt: skip

    def chunk(self, kind: DataKind, fragment: int, version: int, chunk: int = 0) -> bool:
        wanted = self.session.chunk(self.header(kind, fragment, version, chunk), self.now)
        self.done()
        return wanted

    def chunks(self, kind: DataKind, fragment: int, version: int) -> None:
        """All chunks of a transfer arrive."""
        for chunk in range(CHUNKS):
            self.chunk(kind, fragment, version, chunk)

    def assemble(self, *, push_id: int = 0, merged: tuple[int, ...] = ()) -> None:
        """The host makes the copies that it was asked for. `merged`: ids of our pushes in it."""
        for kind, fragment, version in map(astuple, self.take(Assemble)):
            contributors = tuple(Contributor(INCARNATION, each) for each in merged)
            header = self.header(kind, fragment, version, 0, push_id, contributors)
            self.session.assembled(header, self.now, agrees=True)
            self.done()

    def publish(self, fragment: int, version: int, *merged: int) -> None:
        """A whole publication arrives, and its copy is made."""
        self.chunks(PUBLICATION, fragment, version)
        self.assemble(merged=merged)

    def state(self, fragment: int, version: int, push_id: int = 0) -> None:
        """A whole state arrives, and its copy is made."""
        self.chunks(STATE, fragment, version)
        self.assemble(push_id=push_id)

    def damage(self, fragment: int, version: int, wait_s: float = 1.0) -> None:
        """A publication arrives, and its copy has another digest; then this time is over."""
        self.chunks(PUBLICATION, fragment, version)
        assert self.made() == 1
        self.wait(wait_s)

    def made(self, failure: str = "") -> int:
        """The copies that the host was asked for are damaged, or cannot be made; their number."""
        asked = self.take(Assemble)
        for place in asked:
            self.session.assembled(
                self.header(*astuple(place)), self.now, agrees=False, failure=failure
            )
            self.done()
        return len(asked)

    # The learner.

    def step(self, tokens: int = 8, after_s: float = 0.1) -> None:
        """One inner step and its boundary, which does nothing that was not due before the step."""
        was_due = self.is_due()
        self.now += after_s
        self.session.boundary(tokens, 2.5, self.now)
        exchanged = any(isinstance(each, Adopt | Snapshot) for each in self.session.effects)
        assert was_due or not (exchanged or self.session.must_wait(self.now))
        self.done()

    def is_due(self) -> bool:
        """Whether the boundary after the coming step will exchange something, or wait."""
        return self.session.due(self.now)

    def rest(self) -> None:
        """The training thread looks for something to adopt without making a step."""
        self.session.exchange_without_step()
        self.done()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.done()

    def encode(self) -> list[SendChunks]:
        """The pool codes every snapshot that was taken."""
        for snapshot in self.take(Snapshot):
            self.session.encoded(snapshot.fragment, snapshot.push_id, self.now)
            self.done()
        return self.take(SendChunks)

    def leave(self) -> None:
        self.session.leave(self.now)
        self.done()


def waiting() -> Seat:
    """A learner on version 0 whose push 1, 8 tokens of fragment 0, is announced and sent."""
    seat = joined()
    seat.told(collecting=(0,))
    seat.step()
    seat.encode()
    return seat


def joined(settings: msg.RunSettings = SETTINGS, version: int = 0) -> Seat:
    """A learner that stands on `version` of both fragments and has made no step."""
    seat = Seat(settings)
    seat.welcome(heads=(version, version))
    for fragment in range(2):
        seat.state(fragment, version)
    seat.rest()
    assert seat.session.joined
    seat.log.clear()
    return seat


# Joining.


def test_a_learner_says_hello_once_it_is_connected_and_each_second_until_it_is_welcome() -> None:
    """A Hello that is said sooner waits in a queue, and is followed by another one."""
    seat = Seat(is_connected=False)
    seat.rest()
    seat.wait(5.0)
    assert not seat.take(msg.Hello) and seat.session.deadline(seat.now) == math.inf
    seat.session.lost(seat.now)
    seat.done()
    (hello,) = seat.take(msg.Hello)
    assert (hello.run_id, hello.epoch, hello.copies) == ("", "", ())
    seat.wait(0.5)
    assert not seat.take(msg.Hello) and seat.session.deadline(seat.now) == seat.now + 0.5
    seat.wait(0.5)
    assert len(seat.take(msg.Hello)) == 1
    seat.welcome(Role.WAIT, heads=())
    seat.wait(2.0)
    assert not seat.take(msg.Hello) and not seat.session.joined


def test_no_step_is_made_while_a_run_is_seeded_anew() -> None:
    """Fragments of version 0 are read one after the other: they would be some steps apart."""
    seat = joined()
    seat.restart(heads=())
    assert not seat.session.must_wait(seat.now), "it trains on while it is offline"
    seat.welcome(Role.SEED, heads=(), go_back=(0, 1))
    assert len(seat.take(SendChunks)) == 3, "the layout, and two fragments"
    seat.hear(msg.Fetch(DataKind.LAYOUT, 0, 0, 0, ((0, 1),)))
    assert seat.take(SendChunks) == [SendChunks(DataKind.LAYOUT, 0, 0, ((0, 1),))]
    seat.session.lost(seat.now)
    assert seat.session.must_wait(seat.now), "also while its connection is made anew"
    seat.welcome(heads=(0, 0))
    assert not seat.session.must_wait(seat.now)


def test_a_run_that_cannot_be_joined_is_refused_with_the_remedy() -> None:
    seat = Seat(replace(SETTINGS, fragments=100))
    seat.welcome()
    refused = seat.session.refused
    assert refused is not None and "100" in refused.got and "fragments.count" in refused.remedy
    assert not seat.session.parts and seat.session.deadline(seat.now) == math.inf


# Refusals.


def test_a_name_in_use_is_waited_out_for_ten_seconds_of_one_refusal() -> None:
    seat = Seat()
    seat.refuse("name_in_use")
    (note,) = [each.text for each in seat.log if isinstance(each, Note)]
    assert note == "name_in_use: no. do so; trying again"
    seat.wait(9.0)
    seat.welcome()  # It became free in time.
    seat.take(object)
    for _ in range(10):
        seat.refuse("name_in_use")
        assert seat.session.refused is None
        seat.wait(1.0)
    assert len(seat.take(msg.Hello)) >= 10
    seat.refuse("name_in_use")
    refused = seat.session.refused
    assert refused is not None and refused.code is ErrorCode.NAME_IN_USE
    assert refused.remedy == "do so" and seat.noted() == ["refused"]


@pytest.mark.parametrize("code", ["layout_differs", "key_name", "bad_chunk"])
def test_a_refusal_that_time_does_not_heal_is_raised_and_that_of_a_message_noted(code: str) -> None:
    seat = joined()
    seat.refuse(code)
    assert (seat.session.refused is None) is seat.session.connected is (code == "bad_chunk")
    assert seat.noted() == ["refused"] * (code == "bad_chunk")
    assert not seat.session.must_wait(seat.now)


def test_another_run_at_the_brokers_address_is_an_outage() -> None:
    """The state directory was lost, or is not mounted: nobody may throw the run away for that."""
    seat = joined()
    seat.restart()
    refuse = msg.Refuse("wrong_run", "another run", "run new", "run old", "was it lost?", 0, 0)
    for _ in range(int(SETTINGS.max_offline_s)):
        assert not seat.session.must_wait(seat.now) and seat.session.refused is None
        seat.hear(refuse)
        seat.wait(1.0)
    assert len(seat.take(msg.Hello)) >= SETTINGS.max_offline_s
    silent, other = [each.text for each in seat.take(Note)]
    assert "not heard" in silent and "run new, got run old" in other and "was it lost?" in other
    seat.wait(1.0)
    assert seat.session.must_wait(seat.now), "as after any outage"
    seat.welcome()
    assert seat.session.connected and not seat.session.must_wait(seat.now)


# Silence.


@pytest.mark.parametrize("sign", ["silence", "bye", "broken connection", "beat of another life"])
def test_a_sign_that_the_connection_is_gone_leads_to_hello_until_a_welcome(sign: str) -> None:
    seat = joined(version=4)
    seat.wait(2.9)
    assert not seat.take(msg.Hello)
    if sign == "silence":
        seat.wait(0.1)
    elif sign == "bye":
        seat.hear(msg.Bye("another life"))
    elif sign == "broken connection":
        seat.session.lost(seat.now)
        seat.done()
    else:
        seat.told(epoch=EPOCH_2)
    (hello,) = seat.take(msg.Hello)
    assert hello.epoch == EPOCH and hello.run_id == "run"
    assert hello.copies == (msg.CopyDigest(4, 1004), msg.CopyDigest(4, 1004))
    seat.told()  # A late Beat of the old connection is no Welcome.
    seat.wait(1.0)
    assert len(seat.take(msg.Hello)) == 1
    seat.take(msg.Report)
    seat.step()
    assert not seat.take(msg.Report)  # Nobody listens.
    seat.welcome()
    assert len(seat.take(msg.Report)) == 1


def test_an_outage_is_told_once_with_its_reason_and_a_long_one_pauses_training() -> None:
    seat = joined()
    for _ in range(5):
        seat.wait(3.0)
    assert seat.noted() == ["offline"]
    obstacle = LocalProtocolError(ErrorCode.KEY_REFUSED, "no key", remedy="ask for it")
    seat.session.set_obstacle(obstacle)
    for _ in range(5):
        seat.wait(3.0)
    (note,) = seat.take(Note)
    assert note.event == "offline" and "no key. ask for it" in note.text
    seat.wait(SETTINGS.max_offline_s - 30.0)
    assert not seat.session.must_wait(seat.now)
    for _ in range(2):
        seat.wait(1.0)
        assert seat.session.must_wait(seat.now)
    assert seat.noted() == ["paused"]
    seat.welcome()
    assert not seat.session.must_wait(seat.now) and seat.noted() == ["online"]


# Reports.


def test_reports_go_out_at_boundaries_each_second_and_at_once_after_a_welcome() -> None:
    seat = joined()
    seat.welcome()
    assert len(seat.take(msg.Report)) == 1
    for _ in range(25):
        seat.step(after_s=0.125)
        seat.wait(0.0)
        seat.told()
    assert [each.steps for each in seat.take(msg.Report)] == [8, 16, 24]


def test_a_learner_between_two_long_steps_reports_too() -> None:
    seat = joined()
    seat.step(after_s=5.0)
    seat.step(after_s=5.0)
    seat.welcome()
    seat.take(msg.Report)
    seat.wait(1.0)
    assert not seat.take(msg.Report)  # A boundary would be exact; it may come yet.
    seat.wait(1.0)
    assert [each.steps for each in seat.take(msg.Report)] == [2]


def test_a_wait_between_two_steps_is_no_step_time() -> None:
    seat = joined()
    seat.step()
    seat.now += 2.0
    seat.rest()
    seat.told(period_s=1.0)
    seat.step()
    assert seat.session.parts[0].push is None, "it is not slow"


def test_a_pause_is_told_at_once_and_is_no_step_time() -> None:
    seat = joined()
    seat.step()
    for reason in ("evaluating", None):
        seat.session.pause(reason)
        seat.done()
        assert seat.take(msg.Report)[-1].paused == reason
        seat.now += 2.0
    seat.told(period_s=1.0)
    seat.step()
    assert seat.session.parts[0].push is None  # Not slow.


# Publications, states, repair.


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": EPOCH_2}, {"incarnation": "site-b.0000000b"}, {"fragment": 2}, {"chunk": CHUNKS},
        {"version": 3}, {"version": 20}, {"kind": DataKind.PUSH},
    ],
    ids=str,
)  # fmt: skip
def test_a_chunk_that_cannot_be_used_is_not_wanted(wrong: dict[str, object]) -> None:
    seat = joined(version=3)
    header = seat.header(PUBLICATION, 0, 4)
    assert not seat.session.chunk(replace(header, **wrong), seat.now)
    assert seat.session.chunk(header, seat.now)


def test_what_comes_unasked_has_a_second_before_it_is_fetched() -> None:
    seat = joined()
    seat.chunk(PUBLICATION, 0, 1, 2)
    seat.told(heads=(1, 2))  # Of fragment 1 nothing but the Beat tells.
    seat.wait(0.9)
    assert not seat.take(msg.Fetch)
    seat.wait(0.1)
    assert seat.take(msg.Fetch) == [
        msg.Fetch(PUBLICATION, 0, 1, 0, ((0, 2), (3, 1))),
        msg.Fetch(PUBLICATION, 1, 1, 0, WHOLE), msg.Fetch(PUBLICATION, 1, 2, 0, WHOLE),
    ]  # fmt: skip


@pytest.mark.parametrize(("head", "kind"), [(1, PUBLICATION), (8, PUBLICATION), (9, STATE)])
def test_after_a_welcome_what_is_missing_is_fetched_at_once_beyond_eight_versions_the_state(
    head: int, kind: DataKind
) -> None:
    seat = joined()
    seat.welcome(heads=(head, 0))
    assert {each.kind for each in seat.take(msg.Fetch)} == {kind}


@pytest.mark.parametrize(("head", "answer"), [(1, 1), (20, 15), (20, 25)])
def test_the_broker_may_answer_with_another_state_or_one_instead_of_a_publication(
    head: int, answer: int
) -> None:
    seat = joined()
    seat.welcome(heads=(head, 0))
    assert [each.version for each in seat.take(msg.Fetch)] == [head]
    assert seat.chunk(STATE, 0, answer, 0)
    assert seat.take(msg.Fetch) == [msg.Fetch(STATE, 0, answer, 0, ((1, 3),))]
    assert not seat.chunk(PUBLICATION, 0, answer, 0)
    seat.state(0, answer)
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [answer]


def test_all_fragments_together_ask_for_one_window() -> None:
    seat = Seat(replace(SETTINGS, window_messages=4))
    seat.welcome(heads=(0, 0))
    assert [each.fragment for each in seat.take(msg.Fetch)] == [0]
    seat.wait(0.5)
    assert not seat.take(msg.Fetch)
    seat.chunks(STATE, 0, 0)
    assert sum(count for f in seat.take(msg.Fetch) for _, count in f.chunks) == CHUNKS


# Copies that cannot be made, or are not the broker's.


def test_a_copy_that_this_machine_cannot_make_is_tried_again_and_is_no_damage() -> None:
    seat = joined()
    seat.told(heads=(1, 0))
    seat.chunks(PUBLICATION, 0, 1)
    seat.chunk(PUBLICATION, 0, 2)
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert seat.made(failure=f"OutOfMemoryError: {pause_s} bytes are left") == 1
        for _ in range(pause_s):
            assert not seat.take(Assemble) and not seat.take(msg.Fetch)
            assert seat.now < seat.session.deadline(seat.now) <= seat.now + pause_s
            seat.welcome(heads=(20, 0))
            seat.wait(1.0)
        assert {each.kind for each in seat.take(msg.Fetch)} <= {PUBLICATION}, "it needs no state"
    (note,) = seat.take(Note)
    assert note.event == "assembly_failed" and "OutOfMemoryError: 1 bytes" in note.text
    seat.assemble()
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [1]
    assert {each.kind for each in seat.take(msg.Fetch)} == {STATE}, "19 versions are missing"
    seat.state(0, 20)
    seat.publish(0, 21)
    seat.chunks(PUBLICATION, 0, 22)
    assert seat.made(failure="OutOfMemoryError: again") == 1
    assert seat.noted() == ["assembly_failed"], "it had worked in between"


def test_damage_that_repeats_is_fetched_again_after_a_pause_that_doubles() -> None:
    """Whatever comes through a relay may be garbage, for ever, or every other time."""
    seat = joined()
    for version, pause_s in enumerate((1, 2, 4, 8, 16, 32, 60, 60, 1), 1):
        seat.wait(120.0 * (version == 9))  # After a long time without damage it is short again.
        seat.told(heads=(version, 0))
        seat.damage(0, version, pause_s - 0.5)
        seat.welcome()
        assert not seat.take(msg.Fetch) and seat.session.deadline(seat.now) <= seat.now + 0.5
        seat.wait(0.5)
        assert [each.kind for each in seat.take(msg.Fetch)] == [STATE]
        seat.state(0, version)
    assert seat.noted().count("digest_differs") == 9


@pytest.mark.parametrize("beat_first", [False, True])
def test_a_copy_that_a_relay_has_altered_is_noticed_and_its_difference_is_no_work(
    beat_first: bool,
) -> None:
    """All digests of the publication are right: only the Beat, which passes no relay, shows it."""
    seat = waiting()
    seat.told(heads=(0, 0), digests=(1000, 1000))
    if beat_first:
        seat.told(heads=(1, 0), digests=(7, 1000))
    seat.publish(0, 1, 1)
    seat.step()
    if not beat_first:
        assert len(seat.take(Adopt)) == 1, "nothing says yet that it is another"
        seat.told(heads=(1, 0), digests=(7, 1000), collecting=(0,))
    assert seat.noted() == ["altered"]
    assert [part.tip for part in seat.session.parts] == [-1, 0]
    seat.step()
    assert not seat.take((Snapshot, Adopt)), "it would push the difference"
    seat.told(heads=(2, 0))
    seat.wait(1.0)
    assert [(f.kind, f.version) for f in seat.take(msg.Fetch)] == [(STATE, 2)]
    seat.state(0, 2)
    seat.told(heads=(2, 0), digests=(1002, 1000))
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [2]
    assert not seat.noted()


@pytest.mark.parametrize("lags", [(3, 3), (3, 0), (9, 9)])
def test_a_relay_that_is_late_is_told_of_once(lags: tuple[int, int]) -> None:
    """One fragment is on its way, and a copy far behind is fetched: neither is late."""
    seat = joined(version=20)
    for time_s in range(40):
        if time_s == 15:
            seat.welcome()
        if time_s == 20:
            for version in (21, 22, 23):
                seat.publish(0, version)
        newer = 3 * (time_s > 20)
        seat.told(heads=(20 + newer + lags[0], 20 + lags[1]))
        assert seat.noted() == (["late"] if lags == (3, 3) and time_s in (10, 30) else [])
        seat.wait(1.0)
    seat.wait(15.0)
    seat.welcome(heads=(26, 21))
    assert "late" not in seat.noted(), "neither Beats nor copies came meanwhile"


def test_a_beat_of_another_version_or_life_says_nothing_about_a_copy() -> None:
    seat = joined()
    seat.publish(0, 1)
    seat.told(heads=(0, 0), digests=(1000, 1000))
    seat.told(heads=(2, 0), digests=(7, 1000))
    seat.restart(heads=(1, 0), digests=(7, 7))
    seat.welcome(heads=(1, 0))
    seat.publish(0, 2)
    assert [part.tip for part in seat.session.parts] == [2, 0]
    seat.told(heads=(2, 0), digests=(1002, 7))
    assert [part.tip for part in seat.session.parts] == [2, -1], "copies outlive a life"
    seat = joined(version=3)
    seat.restart(heads=(1, 3))
    seat.welcome(heads=(1, 3), go_back=(0,))
    seat.state(0, 1)
    seat.told(heads=(3, 3), digests=(7, 1003))
    assert [part.tip for part in seat.session.parts] == [1, 3], "it was of another history"


def test_a_copy_that_was_to_be_made_when_an_exception_came_is_made() -> None:
    """The effect was decided and had not reached the list of effects."""
    seat = joined()
    for chunk in range(CHUNKS):
        seat.session.chunk(seat.header(PUBLICATION, 0, 1, chunk), seat.now)
    assert seat.session.parts[0].next_assembly(seat.now)
    seat.session.broken_off("KeyboardInterrupt", decided=True)
    seat.done()
    assert seat.take(Assemble) == [Assemble(PUBLICATION, 0, 1)] and not seat.noted()


def test_parameters_that_stay_not_finite_are_told_with_the_remedy_and_no_flood() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    for _ in range(2):
        for _ in range(20):
            seat.step()
            seat.told(collecting=(0,))
            for each in seat.take(Snapshot):
                seat.session.encode_failed(0, each.push_id, reason="nan", finite=False)
        first, second, third = seat.take(Note)
        assert first == second and "optimizer's state is not finite" in third.text
        seat.step()
        assert seat.encode(), "now it is"
        seat.refuse("merge_failed", 0, seat.session.parts[0].push_id)
        seat.noted()


# Epochs.


def test_a_learner_of_another_history_goes_back_and_says_so() -> None:
    seat = joined(version=3)
    seat.told(collecting=(0,))
    seat.step(8)
    seat.encode()
    seat.restart(heads=(1, 3))
    seat.welcome(go_back=(0,))
    assert seat.session.parts[0].push is None
    assert seat.noted() == ["offline", "online", "went_back"]
    assert seat.take(msg.Report)[-1].bases == (-1, 3)
    seat.step(8)
    seat.state(0, 1)
    seat.step(8)
    assert seat.take(Adopt) == [Adopt(0, 1, 0, 0.0, merged=False)]
    assert seat.session.lost_tokens == (8 + 8 + 8) // 2


def test_a_learner_goes_back_if_its_copy_was_damaged_when_the_new_life_compared() -> None:
    """The broker could not tell whether the base is of its history."""
    seat = waiting()
    seat.session.assembled(seat.header(PUBLICATION, 0, 1), seat.now, agrees=False)
    assert seat.session.parts[0].tip == 0, "it was not asked for"
    seat.damage(0, 1)
    assert [(f.kind, f.version) for f in seat.take(msg.Fetch)] == [(STATE, 1)]
    assert seat.session.parts[0].base == 0 and seat.session.parts[0].push
    seat.restart(heads=(0, 0))
    assert seat.take(msg.Hello)[-1].copies == (msg.CopyDigest(-1, 0), msg.CopyDigest(0, 1000))
    seat.welcome(heads=(0, 0))
    assert seat.noted()[-1] == "went_back"
    assert seat.take(msg.Report)[-1].bases == (-1, 0)
    seat.state(0, 0)
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [0]


def test_a_damaged_copy_is_replaced_by_an_older_one_and_what_follows() -> None:
    """The parameters stay until a newer copy is here. An older one may lack the push."""
    seat = waiting()
    seat.publish(0, 1)
    seat.publish(0, 2, 1)
    seat.damage(0, 3)
    seat.state(0, 1)
    seat.step()
    assert [(each.version, each.merged) for each in seat.take(Adopt)] == [(1, False)]
    for version, *merged in ((2, 1), (3,), (4,)):
        seat.publish(0, version, *merged)
    seat.step()
    assert [(each.version, each.merged) for each in seat.take(Adopt)] == [(4, True)]
    seat.damage(0, 5, 2.0)
    seat.state(0, 2)
    for version in (3, 4):
        seat.publish(0, version)
        seat.step()
    assert seat.take(Adopt) == []
    seat.publish(0, 5)
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [5]


def test_within_one_life_a_publication_may_overtake_a_welcome() -> None:
    seat = joined()
    seat.publish(0, 1)
    seat.welcome(heads=(0, 0), go_back=(0,))
    seat.step()
    assert [each.version for each in seat.take(Adopt)] == [1]


def test_a_copy_of_the_old_life_is_not_taken_after_the_new_one_has_spoken() -> None:
    seat = joined()
    seat.chunks(PUBLICATION, 0, 1)
    header = seat.header(PUBLICATION, 0, 1)
    seat.restart()
    seat.welcome(heads=(1, 0))
    for chunk in range(CHUNKS):
        assert seat.chunk(PUBLICATION, 0, 1, chunk)  # The new life's, which is being made too.
    assert not seat.session.assembled(header, seat.now, agrees=True)
    assert seat.session.parts[0].tip == 0


def test_a_copy_that_was_completed_after_the_hello_is_compared_by_another_one() -> None:
    seat = joined()
    seat.chunks(PUBLICATION, 0, 1)
    seat.session.lost(seat.now)
    seat.done()
    seat.assemble()
    seat.take(msg.Hello)
    seat.epoch = EPOCH_2
    seat.welcome(heads=(0, 0))
    (hello,) = seat.take(msg.Hello)
    assert hello.copies[0].version == 1 and hello.epoch == EPOCH
    seat.welcome(heads=(0, 0), go_back=(0,))
    assert seat.session.epoch == EPOCH_2 and seat.session.parts[0].tip == -1


# Pushes and adoptions.


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
        Adopt(0, 1, 1, 0.5, merged=True, base=0),
        Adopt(1, 1, 2, 0.5, merged=False, base=0),
    ]
    assert [part.push_id for part in seat.session.parts] == [0, 2]
    assert (seat.session.merged_tokens, seat.session.lost_tokens) == (4, 0), "half of the model"
    seat.publish(1, 2, 2)
    seat.step()
    assert seat.take(Adopt) == [Adopt(1, 2, 2, 0.5, merged=True, base=1)]


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
    assert seat.take(Adopt) == [Adopt(0, 2, 1, 1.0, merged=True, base=0)]
    assert [each.base for each in seat.take(Snapshot) if each.fragment == 0] == [2]


@pytest.mark.parametrize(("period_s", "is_warned_of"), [(0.02, False), (2.0, True)])
def test_work_of_an_absence_is_given_up_but_its_waiting_push_is_not(
    period_s: float, is_warned_of: bool
) -> None:
    """Where a period is as short as a hiccup of the machine, a healthy run does not warn of it."""
    seat = waiting()
    seat.step(9, after_s=0.001)
    for absence in (1, 2):
        seat.told(heads=(2 * absence, 2 * absence), period_s=period_s)
        for fragment in range(2):
            for version in (2 * absence - 1, 2 * absence):
                seat.publish(fragment, version)
            seat.step(10, after_s=0.001)
        (note,) = seat.take(Note)  # Once for an absence, whatever the fragments.
        assert note.event == "given_up" and note.warning is is_warned_of
        assert ("raise fragments.sync_period_steps" in note.text) is not is_warned_of
    first = seat.take(Adopt)[0]
    assert first == Adopt(0, 2, 1, 0.0, merged=False, base=0)
    assert seat.session.parts[0].push_id == 1 and seat.session.parts[0].lost_tokens > 9 + 10


def test_nothing_is_kept_in_the_ramp_of_a_newcomer() -> None:
    seat = joined()
    seat.session.set_ramp(1)
    seat.publish(0, 1)
    seat.step()
    seat.publish(0, 2)
    seat.step()
    adopted = seat.take(Adopt)
    assert [each.keep for each in adopted] == [0.0, 0.5]
    # Over a rate that rises from 5% on, the published movement would be up to 20 times as long.
    assert [each.base for each in adopted] == [-1, 1]
    assert not seat.noted(), "it is meant so"


def test_late_tokens_of_a_step_that_was_given_up_are_lost_with_it() -> None:
    seat = joined()
    seat.step()
    seat.session.broken_off("KeyboardInterrupt", decided=False)
    seat.session.count(9)
    seat.done()
    assert seat.session.lost_tokens == seat.session.tokens == 17


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.ENDING])
def test_a_learner_that_leaves_with_foreign_weights_pushes_none_of_them(phase: Phase) -> None:
    """The push that is on its way was its own work, and its outcome is waited for."""
    seat = waiting()
    seat.step(9)
    seat.told(phase=phase)
    seat.session.disown()
    seat.leave()
    seat.rest()
    seat.publish(0, 1, 1)
    seat.rest()
    assert not seat.take((Snapshot, Adopt)) and seat.noted().count("swapped") == 1
    own, other = seat.session.parts
    assert own.pushed is Pushed.MERGED and own.push_id == 1, "but it is heard of"
    assert (own.lost_tokens, other.lost_tokens) == (9, 17)
    left = seat.session.ended
    assert left is (phase is Phase.RUNNING)
    seat.told(phase=Phase.ENDED)
    seat.rest()
    assert len(seat.take(Adopt)) == (0 if left else 2), "the final model is everybody's"


def test_foreign_weights_do_not_travel_in_the_place_of_a_push_that_is_refused() -> None:
    seat = waiting()
    seat.session.disown()
    seat.leave()
    seat.refuse("bad_payload", 0, 1)
    seat.rest()
    assert not seat.take(Snapshot) and seat.session.ended
    assert [part.lost_tokens for part in seat.session.parts] == [8, 8]


def test_due_is_true_one_step_ahead_of_a_push_and_of_an_adoption_and_false_between_them() -> None:
    seat = joined()
    seat.told(collecting=(0,))
    assert seat.is_due(), "the coming step is pushed"
    for _ in range(3):
        seat.told(period_s=3.0)
        assert seat.is_due(), "the coming step may be so long that this learner is slow"
        seat.step()
    assert not seat.is_due(), "no single step makes it slow, and no round is open"
    seat.told(collecting=(0,))
    seat.step()
    for _ in range(5):
        assert not seat.is_due(), "its push is on its way"
        seat.encode()
        seat.step()
    seat.publish(0, 1, 1)
    assert seat.is_due()
    seat.step()
    assert seat.take(Adopt) and not seat.is_due()
    seat.told(collecting=(1,))
    seat.session.lost(seat.now)
    assert not seat.is_due(), "a learner that is cut off answers no round"
    seat.now += SETTINGS.max_offline_s + 1.0
    assert seat.is_due(), "training pauses"
    seat.publish(1, 1)
    seat.session.abandon()
    assert not seat.is_due(), "a learner that has left adopts nothing"


def test_due_is_true_one_step_ahead_of_a_wait_in_lockstep() -> None:
    seat = joined(replace(DILOCO, overlap_steps=2))
    due: list[bool] = []
    for _ in range(6):
        due.append(seat.is_due())
        seat.step()
        seat.encode()
    assert seat.session.must_wait(seat.now)
    assert due == [False, False, False, True, False, True], "a push, then a wait two steps later"


def test_due_is_true_until_the_final_model_is_adopted_and_never_after_the_end() -> None:
    seat = joined()
    seat.step()
    seat.told(phase=Phase.ENDING)
    assert seat.is_due(), "what is left is pushed"
    seat.rest()
    seat.encode()
    assert not seat.is_due()
    seat.told(phase=Phase.ENDED)
    assert seat.is_due(), "the parameters become the version that they stand on"
    seat.rest()
    assert seat.session.final and seat.session.ended and not seat.is_due()


@pytest.mark.parametrize("how", ["refused", "not coded"])
def test_the_work_of_a_push_that_fails_counts_as_unpushed_again(how: str) -> None:
    seat = joined()
    seat.told(collecting=(0,))
    seat.step(8)
    if how == "refused":
        seat.encode()
        seat.refuse("bad_payload", 0, 1)
    else:
        assert seat.take(Snapshot) == [Snapshot(0, 1, 0)]
        seat.session.encode_failed(0, 1, reason="no")
    assert seat.session.parts[0].push is None
    seat.step(9)
    assert seat.take(Snapshot) == [Snapshot(0, 2, 0)]
    seat.session.encoded(0, 2, seat.now)
    seat.step()
    assert seat.take(msg.Push)[-1] == msg.Push(0, 2, 0, 17, 2, loss=2.5)


def test_a_push_tells_the_mean_of_the_losses_since_the_snapshot_before_it() -> None:
    seat = joined()

    def pushed(*losses: float | None) -> float | None:
        """The loss of the first fragment's push after steps with these losses."""
        for loss in losses:
            if loss is losses[-1]:
                seat.told(collecting=(0,))
            seat.session.boundary(8, loss, seat.now)
            seat.done()
        seat.encode()
        version = seat.heads[0] + 1
        seat.publish(0, version, seat.session.parts[0].push_id)
        seat.told(heads=(version, 0))
        seat.rest()
        return seat.take(msg.Push)[-1].loss

    assert pushed(4.0, None, 2.0) == 3.0, "a step that logged none does not count"
    assert pushed(math.nan, 1.5) == 1.5, "one number is no number, and hides no other"
    assert pushed(None) is None and seat.session.loss == 1.5
    assert seat.session.parts[1].losses_before.number == 0, "the other fragment has pushed none"


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
    assert [(each.keep, each.merged) for each in seat.take(Adopt)] == 2 * [(0.0, not passed_by)]
    if not passed_by:
        assert seat.session.must_wait(seat.now), "no Beat has said that the run goes on"
    seat.told(heads=(1, 1))
    for _ in range(4):
        assert not seat.session.must_wait(seat.now)
        seat.step()
    assert seat.session.must_wait(seat.now)


def test_waiting_pushes_are_announced_at_every_welcome_and_sent_again_to_a_new_life() -> None:
    seat = waiting()
    (push,) = seat.take(msg.Push)
    seat.welcome()
    assert seat.take(msg.Push) == [push] and not seat.take(SendChunks)
    seat.restart()
    seat.welcome()
    assert seat.take(msg.Push) == [push]
    assert seat.take(SendChunks) == [SendChunks(DataKind.PUSH, 0, 1)]
    seat.publish(0, 1, 1)
    seat.welcome(heads=(1, 0))
    assert not seat.take(msg.Push), "a version that is here holds it"


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


def test_a_state_tells_the_outcome_of_the_pushes_up_to_its_id() -> None:
    for push_id, merged in ((0, False), (1, True), (2, True)):
        seat = waiting()
        seat.welcome(heads=(9, 0))
        seat.state(0, 9, push_id)
        seat.step()
        assert [each.merged for each in seat.take(Adopt)] == [merged]


# The end.


def test_a_run_that_ends_hears_at_once_what_is_finished_and_bye_when_all_is_final() -> None:
    seat = joined()
    seat.step(8)
    seat.told(phase=Phase.ENDING)
    seat.rest()
    seat.encode()
    assert not seat.take(msg.Report)  # Nothing is finished, and nobody has said else.
    for fragment, finished in enumerate(((0,), (0, 1))):
        seat.publish(fragment, 1, fragment + 1)
        assert seat.take(msg.Report)[-1].finished == finished
    seat.rest()
    assert {each.keep for each in seat.take(Adopt)} == {1.0}, "no step of a run that ends is halved"
    seat.told(phase=Phase.ENDED, heads=(2, 1))
    for fragment, version in ((1, 1), (0, 2)):
        seat.rest()
        assert seat.take(Adopt) == [Adopt(fragment, version, 0, 0.0, merged=False)]
        seat.publish(0, 2)
    assert seat.session.final and seat.take(msg.Bye) == [msg.Bye("the run has ended")]


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
    assert seat.session.ended and seat.take(msg.Bye) == [msg.Bye("the loop has ended")]
    assert seat.session.merged_tokens == 8, "though it adopts no version any more"


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
    (bye,) = seat.take(msg.Bye)
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
    (offline, _) = seat.take(Note)
    assert offline.text.startswith("the broker is away: waits up to 30 s")
    assert seat.take(msg.Bye) == [msg.Bye("leaves without the run's final model")]


@pytest.mark.parametrize("ends", [False, True])
def test_who_has_heard_of_the_end_waits_for_it_through_a_new_life_that_has_not(ends: bool) -> None:
    """A broker that has started again tells RUNNING until it has looked at its clock."""
    seat = joined()
    seat.told(phase=Phase.ENDING)
    seat.leave()
    seat.restart(phase=Phase.RUNNING)
    seat.welcome(phase=Phase.RUNNING)
    assert not seat.session.ended
    if ends:
        seat.told(phase=Phase.ENDED)
        seat.rest()
        assert seat.session.final and seat.take(msg.Bye) == [msg.Bye("the run has ended")]
    else:
        for _ in range(599):
            assert not seat.session.ended
            seat.told()
            seat.wait(1.0)
        assert seat.take(msg.Bye) == [msg.Bye("leaves without the run's final model")]
    assert seat.session.heard_ending


def test_who_trains_on_after_an_end_with_a_larger_goal_leaves_like_anybody() -> None:
    seat = joined()
    seat.told(phase=Phase.ENDING)
    seat.restart(phase=Phase.RUNNING)
    seat.welcome(phase=Phase.RUNNING)
    seat.step()
    seat.leave()
    seat.told()
    seat.wait(40.0)
    assert seat.session.ended and not seat.session.heard_ending


def test_a_push_without_an_outcome_is_announced_again() -> None:
    """The broker drops what is above a quota, and would wait for the announcement for ever."""
    seat = waiting()
    (announced,) = seat.take(msg.Push)
    repeated: list[tuple[int, msg.Push]] = []
    for second in range(1, 25):
        seat.told(collecting=(0,))
        seat.wait(1.0)
        repeated += [(second, push) for push in seat.take(msg.Push)]
    assert repeated == [(10, announced), (20, announced)]


def test_the_run_clock_goes_on_between_beats_and_never_falls() -> None:
    seat = joined()
    seat.told(run_tokens=1000, tokens_per_s=10.0)
    assert seat.session.run_tokens(seat.now + 5.0) == 1050.0
    seat.told(run_tokens=1020, tokens_per_s=10.0)
    assert seat.session.run_tokens(seat.now) == 1050.0
    assert seat.session.run_tokens(seat.now + 1000.0) == 1120.0
