"""The advice in an error or a line of the log is right in the situation in which it is printed."""

from __future__ import annotations

import errno

import msgspec
import pytest
import zmq
from machines import SETTINGS, Desk, Seat, hello, one, only

from narrows.broker.cli.broker import join_address
from narrows.broker.process import sockets as wires
from narrows.broker.syncer import events as bev
from narrows.broker.syncer.bits import Need
from narrows.broker.syncer.run import RunState
from narrows.learner.session import events as lev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError


def test_a_codec_that_a_learner_lacks_is_not_advised() -> None:
    desk = Desk()
    codecs = ("raw32", "int8-zstd", "of-the-future")
    refuse = one(desk.say("a", hello("a", codecs=codecs)), msg.Refuse)
    assert refuse.code == ErrorCode.UNKNOWN_CODEC
    assert "raw32, int8-zstd" in refuse.remedy and "int4-zstd" not in refuse.remedy
    assert "same narrows version" in refuse.remedy


class Bound:
    """A socket whose address the system does not let us have."""

    def __init__(self, number: int) -> None:
        self.number = number

    def bind(self, _address: str) -> None:
        raise zmq.ZMQError(self.number)


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.EADDRINUSE, ErrorCode.PORT_IN_USE, "is a broker running already?"),
        (errno.EADDRNOTAVAIL, ErrorCode.CONFIG, "an address of this machine"),
        (errno.ENODEV, ErrorCode.CONFIG, "an address of this machine"),
        (errno.EACCES, ErrorCode.CONFIG, "a port from 1024 on"),
    ],
)
def test_a_port_that_cannot_be_had_names_its_own_remedy(
    number: int, code: ErrorCode, remedy: str
) -> None:
    with pytest.raises(NarrowsError) as caught:
        wires._bind(Bound(number), "h", 1, "control")  # type: ignore[arg-type]
    assert caught.value.code is code and remedy in caught.value.remedy
    assert ("stop the other process" in caught.value.remedy) == (number == errno.EADDRINUSE)


@pytest.mark.parametrize(
    ("listen", "shown"),
    [
        ("tcp://10.0.0.1:7070", "tcp://10.0.0.1:7070"),
        ("tcp://*:7070", "tcp://HOST:7070"),
        ("tcp://0.0.0.0:7070", "tcp://HOST:7070"),
        ("tcp://[::]:7070", "tcp://HOST:7070"),
    ],
)
def test_learners_are_not_told_to_dial_a_wildcard(listen: str, shown: str) -> None:
    assert join_address(listen) == shown


@pytest.mark.parametrize(
    ("codec", "advised", "not_advised"),
    [
        ("int4-zstd", ["codec.push_rho", 'codec.push = "auto"'], ["publish"]),
        ("raw32", ['codec.push = "auto"'], ["rho", "publish"]),
        ("auto", ["fragments.sync_period_steps"], ["rho", "codec."]),
    ],
)
def test_fewer_bits_are_advised_where_they_can_be_had(
    codec: str, advised: list[str], not_advised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(wan__up="100kbit/s", codec__push=codec).running("a")

    def step_s(_: RunState) -> float:
        return 1e-6  # As fast as the toy model is small.

    monkeypatch.setattr(RunState, "step_s", step_s)
    notes = [note.text for note in only(Need(desk.state).warn(), bev.Note)]
    assert len(notes) == 1 and notes[0].startswith("wan.up or wan.total_up is too little")
    assert all(text in notes[0] for text in advised)
    assert not any(text in notes[0] for text in not_advised)


@pytest.mark.parametrize("mode", [msg.Mode.DECOUPLED, msg.Mode.STREAMING])
def test_nobody_is_told_that_training_goes_on_where_it_waits(mode: msg.Mode) -> None:
    settings = msgspec.structs.replace(SETTINGS, mode=mode)
    seat = Seat(settings=settings).joined()
    notes = only(seat.wait(60.0), lev.Note)
    assert notes and "nothing heard from the broker" in notes[0].text
    assert not any("training goes on" in note.text for note in notes)
