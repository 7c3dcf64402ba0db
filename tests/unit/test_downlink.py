"""The queue for each learner: bounded, and no copy is held longer than it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from machines import EPOCH, RUN, SECRET

from narrows.broker.config import load_config
from narrows.broker.merging.merge import MergeResult
from narrows.broker.merging.model import EncodedVersion, GlobalModel, encode_state, version_zero
from narrows.broker.merging.policy import policy_of
from narrows.broker.process.downlink import PARCELS_PER_PUMP, Downlink
from narrows.broker.process.subscriptions import Subscriptions
from narrows.broker.syncer.events import Publish
from narrows.broker.syncer.machine import Syncer
from narrows.broker.syncer.run import RunState
from narrows.proto.fragments import build_table
from narrows.proto.frames import decode_data, downlink_topic
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import DataKind, Header, LayoutEntry

LAYOUT = (LayoutEntry("weight", (40, 100), "float32", "rda"),)
ELEMENTS = 4000
INCARNATION = "0" * 32


@dataclass
class Sent:
    """In the place of the sockets: what left, by header."""

    subscribed: Subscriptions = field(default_factory=Subscriptions)
    headers: list[Header] = field(default_factory=list[Header])

    def __post_init__(self) -> None:
        self.subscribe(INCARNATION)

    def subscribe(self, incarnation: str, name: str = "a") -> None:
        self.subscribed.take(b"\1" + downlink_topic(name, incarnation, 0))

    def unsubscribe(self, incarnation: str) -> None:
        self.subscribed.take(b"\0" + downlink_topic("a", incarnation, 0))

    def send_data(self, topic: bytes, header: bytes, payload: bytes) -> None:
        self.headers.append(decode_data([topic, header, payload])[0])


class Line:
    """One learner's downlink from a model of one fragment in chunks of `chunk_elements`."""

    def __init__(self, chunk_elements: int, more: Mapping[str, object] | None = None) -> None:
        settings: dict[str, object] = {
            "wan.streams": 1,
            "codec.chunk_elements": chunk_elements,
            "fragments.count": 1,
        }
        settings |= more or {}
        config = load_config(None, settings)
        self.state: RunState = Syncer(config, run_id=RUN, epoch=EPOCH, secret=SECRET, now=0.0).state
        table = build_table(LAYOUT, 1)
        self.model = GlobalModel(config, table, [version_zero(np.ones(ELEMENTS, np.float32))])
        self.sent = Sent()
        self.encodings = 0
        self.warnings: list[str] = []
        self.downlink = Downlink(self.sent, self.state, {}, self.encode, self.warnings.append)
        self.downlink.admit("a", INCARNATION)

    def encode(self, fragment: int, done: Callable[[EncodedVersion, float], None]) -> None:
        self.encodings += 1
        part, chunk_elements = self.model.table[fragment], self.state.settings.chunk_elements
        done(encode_state(part, self.model.fragments[fragment], chunk_elements), 0.0)

    @property
    def states_held(self) -> int:
        """Copies of the fragment that are kept for transfers under way."""
        addressees = self.downlink._addressees
        return sum(len(addressee.states) for addressee in addressees.values())

    def publish(self, version: int, kind: DataKind = DataKind.PUBLICATION) -> None:
        self.publish_to("a", version, kind)

    def publish_to(self, name: str, version: int, kind: DataKind) -> None:
        self.downlink.publish(Publish(name, 0, version, 0, (), kind), self.model, 0.0)

    def make(self, version: int) -> None:
        """The next version, from a gradient of ones."""
        state = self.model.fragments[0]
        part, params = self.model.table[0], state.global_ - np.float32(1.0)
        merged = MergeResult(params, 0, np.zeros((0, 0)))
        policy = policy_of(self.model.config)
        outcome = self.model.published(
            part, version, params, state.momentum, merged, (1.0,), policy
        )
        self.model.install(outcome)


def test_a_learner_that_falls_behind_gets_the_newest_state_instead() -> None:
    line = Line(1000)
    for version in range(1, 60):
        line.make(version)
        line.publish(version)
    line.downlink.pump(0.0)
    assert len(line.sent.headers) <= 4 * (PUBLICATIONS_KEPT + 1)
    states = {h.version for h in line.sent.headers if h.kind is DataKind.STATE}
    after = [h.version for h in line.sent.headers if h.kind is DataKind.PUBLICATION]
    # From the state on, nothing is missing.
    assert len(states) == 1
    assert sorted(set(after)) == list(range(max(states) + 1, 60))


def test_who_was_cut_off_is_tried_as_soon_as_it_subscribes_again() -> None:
    line = Line(1000)
    line.publish(0, DataKind.STATE)
    times = [0.0, 6.0, 7.0]
    sent: list[int] = []
    for now in times:
        line.downlink.pump(now)
        sent.append(len(line.sent.headers))
    assert sent == [4, 5, 5], "one message tries a dead stream"
    line.downlink.reconnect(
        {downlink_topic("a", "1" * 32, 0), downlink_topic("a", INCARNATION, 1)}, 7.0
    )
    line.downlink.pump(7.0)
    assert len(line.sent.headers) == 5
    line.downlink.reconnect({downlink_topic("a", INCARNATION, 0)}, 7.0)
    line.downlink.pump(7.0)
    assert len(line.sent.headers) == 6
    line.downlink.acknowledge("a", (line.sent.headers[-1].position,), 7.1)
    line.downlink.pump(7.1)
    assert len(line.sent.headers) == 9
    line.downlink.reconnect({downlink_topic("a", INCARNATION, 0)}, 7.2)
    line.downlink.pump(7.2)
    assert len(line.sent.headers) == 9, "a stream that moves loses nothing"


def test_who_does_not_subscribe_is_named_once_with_the_port() -> None:
    line = Line(1000)
    line.state.downlink_port = 7072
    line.sent.subscribed = Subscriptions()
    line.downlink.admit("b", "1" * 32)
    line.downlink.pump(0.5)
    line.downlink.pump(10.0)
    line.sent.subscribe("1" * 32, "b")
    for now in (19.0, 21.0, 60.0, 90.0):
        line.downlink.pump(now)
    assert len(line.warnings) == 1
    assert line.warnings[0].startswith("a has not subscribed to the downlink (port 7072) for 20 s")
    line.downlink.admit("a", "2" * 32)  # Another process of this name: another session.
    for now in (100.0, 121.0, 150.0):
        line.downlink.pump(now)
    assert len(line.warnings) == 2


def test_a_state_is_held_until_all_of_it_has_arrived() -> None:
    line = Line(1000)
    line.publish(0, DataKind.STATE)
    line.downlink.pump(0.0)
    assert line.states_held == 1
    position = line.sent.headers[-1].position
    line.downlink.acknowledge("a", (position - 1,), 0.1)
    assert line.states_held == 1
    line.downlink.acknowledge("a", (position,), 0.1)
    assert line.states_held == 0


def test_a_state_is_encoded_once_for_all_who_wait_for_it() -> None:
    line = Line(1000)
    waiting: list[Callable[[EncodedVersion, float], None]] = []

    def encode_later(fragment: int, done: Callable[[EncodedVersion, float], None]) -> None:
        waiting.append(done)

    line.downlink._encode_state = encode_later
    line.downlink.admit("b", "1" * 32)
    for name in ("a", "b", "a"):
        line.publish_to(name, 0, DataKind.STATE)
    assert len(waiting) == 1
    line.downlink.forget("b")
    line.encode(0, waiting[0])
    line.downlink.pump(0.0)
    # The second request of the same learner replaces its first: four chunks, not eight.
    assert [(h.kind, h.offset) for h in line.sent.headers] == [
        (DataKind.STATE, offset) for offset in range(0, ELEMENTS, 1000)
    ]
    assert line.states_held == 1


def test_an_encoded_state_serves_others_while_it_is_on_its_way() -> None:
    line = Line(1000)
    line.publish(0, DataKind.STATE)
    line.publish(0, DataKind.STATE)
    assert line.encodings == 1
    line.make(1)
    line.publish(1, DataKind.STATE)
    assert line.encodings == 2


def test_who_still_waits_for_an_older_state_shares_the_new_one_too() -> None:
    """Each encoding of a state costs a copy of the fragment in memory, and a core."""
    line = Line(1000)
    line.publish(0, DataKind.STATE)
    line.make(1)
    line.downlink.admit("b", "1" * 32)
    line.publish_to("b", 1, DataKind.STATE)
    assert line.encodings == 2
    line.publish(1, DataKind.STATE)
    assert line.encodings == 2
    line.downlink.pump(0.0)
    assert {header.version for header in line.sent.headers} == {1}


def test_nothing_is_kept_for_a_learner_that_is_lost() -> None:
    """A lost learner's queue is as large as the model, and many learners may come and go."""
    line = Line(1000)
    line.publish(0, DataKind.STATE)
    before = line.downlink._addressees["a"]
    assert list(before.sender) and before.states
    line.downlink.forget("a")
    assert not list(before.sender) and not line.states_held
    line.downlink.forget("a")  # One that is not there is no matter.


def test_as_many_publications_may_wait_as_are_kept() -> None:
    """A learner that is only a little late gets steps: a state is ten times as large."""
    line = Line(1000)
    for version in range(1, PUBLICATIONS_KEPT + 1):
        line.make(version)
        line.publish(version)
    line.downlink.pump(0.0)
    assert {header.kind for header in line.sent.headers} == {DataKind.PUBLICATION}
    assert len(line.sent.headers) == 4 * PUBLICATIONS_KEPT


def test_what_is_on_its_way_is_not_sent_twice() -> None:
    line = Line(1000)
    line.make(1)
    for _ in range(3):
        line.publish(1)
    line.downlink.pump(0.0)
    assert [header.offset for header in line.sent.headers] == [0, 1000, 2000, 3000]


def test_a_pump_leaves_the_loop_its_turn() -> None:
    line = Line(256)
    for version in range(1, 8):
        line.make(version)
        for _ in range(PARCELS_PER_PUMP):
            line.publish(version)
            line.downlink.acknowledge("a", (1 << 40,), 0.0)
    line.downlink.pump(0.0)
    assert len(line.sent.headers) <= PARCELS_PER_PUMP


def test_the_topics_of_a_process_that_was_replaced_are_forgotten() -> None:
    line = Line(1000)
    line.sent.unsubscribe(INCARNATION)  # Not believed: anybody can send it.
    assert len(line.sent.subscribed) == 1
    line.downlink.forget("a")
    line.downlink.admit("a", INCARNATION)
    assert len(line.sent.subscribed) == 1
    line.downlink.admit("a", "2" * 32)
    assert len(line.sent.subscribed) == 0


def test_the_topics_of_a_learner_that_is_not_expected_back_are_forgotten() -> None:
    line = Line(1000)
    line.downlink.erase("a")
    line.sent.unsubscribe(INCARNATION)
    assert len(line.sent.subscribed) == 0
    # One that still listens is heard again: it will not subscribe a second time.
    line.sent.subscribe(INCARNATION)
    line.downlink.admit("a", INCARNATION)
    line.downlink.erase("a")
    assert len(line.sent.subscribed) == 1
    line.downlink.admit("a", INCARNATION)
    line.publish(0, DataKind.STATE)
    line.downlink.pump(0.0)
    assert line.sent.headers


def test_positions_go_on_for_a_process_that_rejoins_and_begin_anew_for_another_one() -> None:
    """A learner that was only cut off goes on telling positions from before: beside a count that
    began at 0 they would acknowledge what has not arrived, or never reach what has."""
    line = Line(1000)
    line.make(1)
    line.publish(1)
    line.downlink.pump(0.0)
    before = line.sent.headers[-1].position
    line.downlink.forget("a")
    line.downlink.admit("a", INCARNATION)
    line.publish(1)
    line.downlink.pump(0.1)
    again = [header.position for header in line.sent.headers[4:]]
    assert len(again) == 4 and again[-1] == 2 * before and min(again) > before
    line.sent.subscribe("1" * 32)
    line.downlink.admit("a", "1" * 32)
    line.publish(1)
    line.downlink.pump(0.2)
    assert line.sent.headers[-1].position == before
