"""The broker names, once in a session, a learner whose data does not get through."""

from __future__ import annotations

from typing import Any

from machines import Desk, hello, only

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.messages import DataKind

UPLINK_PORT = 7071


def desk(**settings: Any) -> Desk:
    return Desk(uplink_port=UPLINK_PORT, **settings)


def warnings(effects: list[ev.Effect]) -> list[str]:
    texts = [note.text for note in only(effects, ev.Note) if note.level == "warning"]
    return [text for text in texts if "no data has come" in text]


def wait(desk: Desk, seconds: int, *names: str) -> list[str]:
    """Warnings of the broker while it hears these learners on the control port."""
    told: list[str] = []
    for _ in range(seconds):
        told += warnings(desk.wait(1.0))
        for name in names:
            told += warnings(desk.say(name, msg.Alive(0)))
    return told


def test_a_founder_whose_parameters_do_not_come_is_named_with_the_port() -> None:
    at = desk()
    at.say("a", hello("a"))
    assert wait(at, 19, "a") == []
    (told,) = wait(at, 100, "a")
    assert told.startswith("no data has come from a for 2") and "(uplink, port 7071)" in told


def test_a_message_has_the_time_that_it_takes_on_the_slowest_line() -> None:
    """A chunk of 262,144 elements as float32 is 84 s under way at 100 kbit/s."""
    layout = (msg.LayoutEntry("weight", (2**20,), "float32", "rda"),)
    at = desk(fragments__count=1)
    at.say("a", hello("a", layout=layout))
    assert wait(at, 80, "a") == []
    assert len(wait(at, 40, "a")) == 1


def test_a_founder_whose_parameters_come_is_not_named() -> None:
    at = desk()
    at.say("a", hello("a"))
    for offset in range(10):
        at.chunk("a", 0, kind=DataKind.FOUND, codec=STATE_CODEC, offset=offset, count=1)
        assert wait(at, 15, "a") == []


def test_who_announces_pushes_that_do_not_come_is_named_with_the_port() -> None:
    at = desk().running("a", "b")
    told: list[str] = []
    for _ in range(60):
        # The broker asks for what is missing, and each time it is announced again.
        told += warnings(at.push("a")) + wait(at, 1, "a", "b")
    (text,) = told
    assert "from a for 2" in text and "(uplink, port 7071)" in text


def test_who_announces_a_push_and_is_at_rest_is_not_named() -> None:
    at = desk().running("a", "b")
    told = warnings(at.push("a")) + wait(at, 60, "a", "b")
    told += warnings(at.push("a", push_id=2)) + wait(at, 60, "a", "b")
    assert told == []


def test_any_data_is_a_sign_of_the_uplink() -> None:
    at = desk().running("a", "b")
    told: list[str] = []
    for second in range(60):
        told += warnings(at.push("a")) + wait(at, 1, "a", "b")
        if second % 15 == 14:
            told += warnings(at.chunk("a", 0, offset=second, count=1))
    assert told == []


def test_a_session_on_another_connection_is_another_session() -> None:
    at = desk()
    at.say("a", hello("a"))
    assert len(wait(at, 100, "a")) == 1
    at.do(ev.Received(b"elsewhere", hello("a"), "tcp://elsewhere"))
    told: list[str] = []
    for _ in range(60):
        told += warnings(at.wait(1.0))
        at.do(ev.Received(b"elsewhere", msg.Alive(0)))
    assert len(told) == 1
