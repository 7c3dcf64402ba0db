"""Bytes over real sockets that are no messages: refused by name, and the broker serves on."""

from __future__ import annotations

import random
import socket

import pytest
import zmq
from peer import Frames, Peer, World, closes, packed, sealed
from running import HANG_S, wait_until

from narrows.proto import messages as msg
from narrows.proto.frames import downlink_topic, encode_control
from narrows.proto.limits import CONTROL_UP_BYTES_MAX, PAYLOAD_BYTES_MAX

ASK = encode_control(msg.AskStatus())

FRAMES: dict[str, tuple[Frames, str, str]] = {
    "garbage": ([random.Random(1).randbytes(1000)], "bad_frame", "b'NRW'"),
    "empty": ([b""], "bad_frame", "at least 12 bytes"),
    "envelope cut": ([ASK[:11]], "bad_frame", "at least 12 bytes"),
    "body cut": ([ASK[:-1]], "bad_checksum", ""),
    "one bit": ([ASK[:-1] + bytes([ASK[-1] ^ 1])], "bad_checksum", ""),
    "HTTP": ([b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n"], "bad_frame", "b'NRW'"),
    "delimiter": ([b"", ASK], "bad_frame", "1 frame"),
    "other protocol": ([sealed(ASK[12:], 2)], "protocol_version", "3"),
    "something after the body": ([sealed(ASK[12:] + b"\0")], "bad_message", ""),
    "no body": ([sealed(b"")], "bad_message", ""),
    "not a map": ([sealed(b"\x93\1\2\3")], "bad_message", ""),
    "no UTF-8": ([sealed(b"\x81\xa4type\xa2\xff\xfe")], "bad_message", ""),
    "deep": ([sealed(b"\x91" * 60_000)], "bad_message", ""),
    "array bomb": ([sealed(b"\xdd\xff\xff\xff\xff")], "bad_message", ""),
    "unknown type": ([packed(type="exec", command="true")], "bad_message", ""),
    "unknown field": ([packed(type="bye", reason="", more=1)], "bad_message", ""),
    "field missing": ([packed(type="bye")], "bad_message", ""),
    "negative": ([packed(type="alive", nonce=-1)], "bad_message", ""),
    "too big": ([packed(type="alive", nonce=1 << 63)], "bad_message", ""),
    "long text": ([packed(type="bye", reason="x" * 1025)], "bad_message", ""),
}


@pytest.mark.parametrize("case", FRAMES)
def test_a_control_frame_that_is_no_message_is_refused(mallory: Peer, case: str) -> None:
    frames, code, expected = FRAMES[case]
    mallory.control.send_multipart(frames)
    refuse = mallory.receive(msg.Refuse)
    assert refuse.code == code
    assert expected in refuse.expected
    assert refuse.message
    assert refuse.got


def test_another_protocol_is_told_what_to_install(mallory: Peer) -> None:
    mallory.control.send(sealed(b"\xc0", 77))
    refuse = mallory.receive(msg.Refuse)
    assert (refuse.expected, refuse.got) == ("3", "77")
    assert "install the same narrows version" in refuse.remedy


def test_an_oversized_control_frame_closes_its_connection(mallory: Peer) -> None:
    closes(mallory.control, [bytes(CONTROL_UP_BYTES_MAX + 1)])


def test_a_control_message_of_many_frames_closes_its_connection(
    world: World, mallory: Peer
) -> None:
    before = world.good.refusals("bad_frame")
    closes(mallory.control, [ASK] * 100)
    assert world.good.refusals("bad_frame") > before


def test_an_oversized_payload_closes_its_connection(member: Peer) -> None:
    closes(member.uplink, member.frames(bytes(PAYLOAD_BYTES_MAX + 1)))


@pytest.mark.parametrize("port", ["control", "uplink", "downlink"])
@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\nHost: broker\r\nUser-Agent: a scanner that knows no better\r\n\r\n" * 9,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48) + b"\x04\x19\x05READY",
        random.Random(2).randbytes(5000),
        b"",
    ],
    ids=["HTTP", "TLS", "half a handshake", "garbage", "nothing"],
)
def test_what_is_no_zeromq_at_all_does_no_harm(world: World, port: str, text: bytes) -> None:
    wires = world.service.wires
    control_port = int(wires.address.rsplit(":", 1)[1])
    number = {"control": control_port}.get(port) or getattr(wires, f"{port}_port")
    with socket.create_connection(("127.0.0.1", number), timeout=HANG_S) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass  # It hung up on us with bytes of ours unread.


def test_noise_on_the_downlink_silences_nobody(world: World, mallory: Peer) -> None:
    """A subscriber may send anything upstream; only subscriptions are listened to."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        noise = context.socket(zmq.XSUB)
        noise.connect(f"tcp://127.0.0.1:{world.service.wires.downlink_port}")
        topic = downlink_topic(world.good.name, world.good.incarnation, 0)
        for first in (b"", b"\5", b"\2", b"x"):
            noise.send(first + topic)
        before = world.good.refusals("bad_frame")
        noise.send(b"\1last")
        wait_until(lambda: world.good.refusals("bad_frame") > before, "the noise to arrive")
        assert b"last" not in world.service.wires.subscribed
    finally:
        context.destroy(linger=0)
