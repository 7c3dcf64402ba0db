"""Handshakes that fail: the line that is told, when it is told, and the broker's key tried next."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
import zmq

from narrows.proto.errors import BrokerUnreachable, ErrorCode, Refused
from narrows.proto.keys import Handshake, Handshakes, SiteKey, new_pair, outcome_of
from narrows.proto.keys.handshakes import BROKEN_S, MONITORED, SAY_S, SILENT_S, STALE_S

BROKER = "tcp://broker.example.org:7070"
DONE = (zmq.Event.HANDSHAKE_SUCCEEDED, 0)
REFUSED = (zmq.Event.HANDSHAKE_FAILED_AUTH, 400)
BROKEN = (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, 32)
MISMATCH = (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, 0x11000002)
STRANGE = (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, 0x10000001)
BEGUN = (zmq.Event.CONNECTED, 17)


def frame(event: tuple[int, int]) -> bytes:
    return struct.pack("=HI", *event)


def site_key(servers: int = 1) -> SiteKey:
    return SiteKey("site-a", new_pair(), BROKER, tuple(new_pair().public for _ in range(servers)))


def handshakes(key: SiteKey | None) -> Handshakes:
    watched = Handshakes(BROKER, key)
    watched.opened()
    return watched


def test_the_events_are_those_of_libzmq() -> None:
    events = zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH
    events |= zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    assert MONITORED == events
    told = {DONE: "admitted", REFUSED: "key refused", BROKEN: "broken off"}
    told |= {MISMATCH: "other mechanism", STRANGE: "not understood", BEGUN: "None"}
    assert {event: str(outcome_of(frame(event))) for event in told} == told


def test_a_refused_key_is_told_at_once_with_the_command_that_admits_it() -> None:
    key = site_key()
    watched = handshakes(key)
    assert watched.take(frame(REFUSED), 10.0) is Handshake.KEY_REFUSED
    error = watched.error(10.0)
    assert isinstance(error, Refused) and error.code is ErrorCode.KEY_REFUSED
    line = watched.line(10.0)
    assert BROKER in line and f"narrows keys allow site-a '{key.pair.public}'" in line
    assert key.pair.secret not in line


def test_the_same_line_comes_once_a_minute() -> None:
    watched = handshakes(site_key())
    said = 0
    for second in range(180):
        watched.take(frame(REFUSED), float(second))
        said += bool(watched.line(float(second)))
    assert said == 180 / SAY_S


def test_a_key_that_is_admitted_again_is_no_obstacle_and_a_later_refusal_is_told() -> None:
    watched = handshakes(site_key())
    watched.take(frame(REFUSED), 0.0)
    assert watched.line(0.0)
    watched.take(frame(DONE), 1.0)
    assert watched.error(1.0) is None and not watched.line(1.0)
    watched.take(frame(REFUSED), 2.0)
    assert watched.line(2.0)


def test_an_old_failure_says_nothing_of_the_broker_of_now() -> None:
    watched = handshakes(site_key())
    watched.take(frame(REFUSED), 0.0)
    assert watched.error(STALE_S) is not None
    assert watched.error(STALE_S + 1) is None


@pytest.mark.parametrize(
    ("has_key", "told"),
    [(True, "narrows broker --keys"), (False, "narrows keys accept INVITATION --to FILE")],
)
def test_where_one_side_has_no_keys_the_line_says_which(*, has_key: bool, told: str) -> None:
    watched = handshakes(site_key() if has_key else None)
    watched.take(frame(MISMATCH), 0.0)
    assert isinstance(watched.error(0.0), Refused) and told in watched.line(0.0)


def test_a_missing_key_stays_noticed_where_the_other_side_mostly_closes_first() -> None:
    watched = handshakes(None)
    watched.take(frame(MISMATCH), 0.0)
    watched.take(frame(BROKEN), BROKEN_S)
    assert "narrows keys accept" in str(watched.error(BROKEN_S))


def test_the_only_key_of_a_broker_is_tried_again_ever_more_slowly() -> None:
    watched = handshakes(site_key())
    watched.take(frame(BROKEN), 0.0)
    assert watched.reopen_at == math.inf
    pauses, now = list[float](), BROKEN_S
    for _ in range(8):
        watched.take(frame(BROKEN), now)
        pauses.append(watched.reopen_at - now)
        now = watched.reopen_at
        watched.opened()
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1] == pytest.approx(2.0)


def test_handshakes_that_are_broken_off_are_told_once_they_last() -> None:
    key = site_key()
    watched = handshakes(key)
    watched.take(frame(BROKEN), 0.0)
    watched.take(frame(BROKEN), BROKEN_S / 2)
    assert watched.error(BROKEN_S / 2) is None
    watched.take(frame(BROKEN), BROKEN_S)
    error = watched.error(BROKEN_S)
    assert isinstance(error, BrokerUnreachable)
    assert key.servers[0] in str(error) and "narrows keys trust" in str(error)


def test_a_handshake_without_an_answer_is_told() -> None:
    watched = handshakes(site_key())
    watched.take(frame(BEGUN), 0.0)
    assert watched.error(SILENT_S / 2) is None
    assert "does not answer the handshake" in str(watched.error(SILENT_S))
    watched.take(frame(DONE), SILENT_S)
    assert watched.error(2 * SILENT_S) is None


def test_the_keys_of_a_broker_are_tried_in_turn() -> None:
    key = site_key(servers=3)
    watched, tried, now = handshakes(key), list[str](), 0.0
    for _ in range(6):
        tried.append(watched.options["CURVE_SERVERKEY"].decode())
        watched.take(frame(BROKEN), now)
        assert now < watched.reopen_at <= now + 2.0
        now = watched.reopen_at
        watched.opened()
    assert tried == [*key.servers, *key.servers]


def test_the_key_of_a_broker_that_has_admitted_us_stays() -> None:
    key = site_key(servers=2)
    watched = handshakes(key)
    watched.take(frame(BROKEN), 0.0)
    second = watched.options
    watched.take(frame(DONE), 1.0)
    watched.take(frame(REFUSED), 2.0)
    assert watched.options == second and second["CURVE_SERVERKEY"].decode() == key.servers[1]


def test_a_key_file_that_has_changed_is_taken_over_once() -> None:
    key = site_key()
    watched = handshakes(key)
    fresh = dataclasses.replace(key, pair=new_pair())
    assert not watched.renew(key)
    assert watched.renew(fresh) and not watched.renew(fresh)
    assert watched.options["CURVE_PUBLICKEY"].decode() == fresh.pair.public


def test_without_a_key_there_are_no_options() -> None:
    assert handshakes(None).options == {}
