"""A broker with keys over real sockets: who may connect, and what each key may say."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq
from peer import Peer
from running import HANG_S, broker_config, live_broker, wait_until

from narrows.bench.attack.raw_curve import RawCurve
from narrows.bench.attack.target import AttackTarget
from narrows.broker.cli import asking
from narrows.broker.process.connections import UPLINK_HELD_MAX
from narrows.broker.process.gate import Gate
from narrows.broker.process.service import Service
from narrows.broker.process.sockets import BrokerSockets
from narrows.proto import messages as msg
from narrows.proto.errors import NarrowsError
from narrows.proto.frames import downlink_topic, encode_control
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import (
    Handshake,
    KeyPair,
    Keyring,
    SiteKey,
    edit_ring,
    new_broker_key,
    new_pair,
    read_ring,
    ring_path,
)
from narrows.proto.keys.ring import write_ring
from narrows.proto.limits import PROTOCOL
from narrows.proto.quotas import ENROLMENTS


class KeyedPeer(Peer):
    """A peer whose sockets prove a key; `server` None: they speak without keys."""

    def __init__(self, address: str, name: str, server: str | None, pair: KeyPair) -> None:
        self._server, self._pair = server, pair
        super().__init__(address, name)

    def make(self, kind: int) -> zmq.Socket[bytes]:
        socket = super().make(kind)
        if self._server is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        return socket


@dataclasses.dataclass
class Site:
    """A live broker with keys, and a pair for each name in its ring."""

    service: Service
    directory: Path
    server: str
    pairs: dict[str, KeyPair]

    @property
    def gate(self) -> Gate:
        assert self.service.wires.gate is not None
        return self.service.wires.gate

    def peer(self, key: str, name: str = "") -> KeyedPeer:
        """A peer with the key of `key` that calls itself `name`."""
        return KeyedPeer(self.service.wires.address, name or key, self.server, self.pairs[key])

    def stranger(self, server: str | None) -> KeyedPeer:
        return KeyedPeer(self.service.wires.address, "stranger", server, new_pair())

    def refusals(self, code: str) -> int:
        """Refusals so far. Read from the broker itself: questions have a quota."""
        return self.service.syncer.state.tally.refused.get(code, 0)

    def edit(self, change: Callable[[Keyring], Keyring]) -> None:
        with edit_ring(self.directory) as rings:
            rings[0] = change(rings[0])

    @property
    def members(self) -> list[str]:
        """Names of the connected members, as the broker's thread has them at this moment."""
        return [member.name for member in self.service.syncer.state.roster.connected()]


NAMES = {
    "a": KeyRole.LEARNER, "b": KeyRole.LEARNER, "c": KeyRole.LEARNER,
    "operator": KeyRole.OPERATOR, "monitor": KeyRole.MONITOR,
}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Generator[Site]:
    directory = tmp_path / "keys"
    server = new_broker_key(directory).current.public
    pairs = {name: new_pair() for name in NAMES}
    ring = Keyring()
    for name, role in NAMES.items():
        ring = ring.allow(KeyHolder(name, role), pairs[name].public, now=time.time())
    write_ring(directory, ring)
    config = broker_config(
        tmp_path, security__keys=str(directory), run__founder="a", wan__streams=1,
        liveness__late="5min", liveness__lost="10min",
    )  # fmt: skip
    with live_broker(config) as service:
        yield Site(service, directory, server, pairs)


# Outsiders.


def test_nobody_without_a_known_key_gets_a_message_through(site: Site) -> None:
    with (
        site.peer("a") as known,
        site.stranger(None) as null,
        site.stranger(new_pair().public) as lost,
        site.stranger(site.server) as unknown,
    ):
        known.status()
        before = len(site.service.wires.connections)
        for peer in (null, lost, unknown):
            with suppress(zmq.Again):  # A socket that was refused already takes no message.
                peer.control.send(encode_control(msg.AskStatus()), zmq.NOBLOCK)
        wait_until(lambda: site.gate.refused == 1, "the refusal of the unknown key")
        wait_until(lambda: len(site.service.wires.connections) <= before + 2, "its end")
        assert known.status().contributions_refused == {}
        for peer in (null, lost, unknown):
            assert not peer.control.poll(0)


def test_a_question_whose_key_is_refused_at_last_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = site.service.wires.address
    key = SiteKey("stranger", new_pair(), address, (site.server,))
    with asking._Question(address, key, HANG_S) as question:
        socket = question._socket
        assert question.shake_hands() is Handshake.KEY_REFUSED
        wait_until(lambda: not socket.poll(0, zmq.POLLOUT), "the end of the socket's pipe")
        # It was admitted, and refused when it dialled again.
        monkeypatch.setattr(question, "shake_hands", lambda: Handshake.ADMITTED)
        with pytest.raises(NarrowsError, match="stranger"):
            question.answer(encode_control(msg.AskStatus()))


def test_without_its_zap_server_the_broker_admits_nobody(site: Site, tmp_path: Path) -> None:
    wires = BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False,
        keys=str(site.directory),
    )  # fmt: skip
    try:
        assert wires.gate is not None
        wires.gate.close()
        with KeyedPeer(wires.address, "a", site.server, site.pairs["a"]) as peer:
            monitor = peer.control.get_monitor_socket(zmq.EVENT_ALL)
            peer.send(msg.AskStatus())
            failed = {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                      zmq.EVENT_DISCONNECTED}  # fmt: skip
            seen: set[int] = set()
            while not seen & failed:
                assert monitor.poll(int(HANG_S * 1000)), "no end of the handshake"
                seen.add(struct.unpack_from("=H", monitor.recv_multipart()[0])[0])
            assert wires.receive_control() is None
            peer.control.disable_monitor()
            monitor.close()
    finally:
        wires.close()


def test_beyond_loopback_the_broker_names_the_three_commands(tmp_path: Path) -> None:
    with pytest.raises(NarrowsError) as caught:
        Service(broker_config(tmp_path, broker__listen="tcp://0.0.0.0:7070"))
    for command in (
        "\n  narrows keys new\n",
        "\n  narrows keys invite NAME --address tcp://HOST:7070\n",
        "\n  narrows broker --listen tcp://0.0.0.0:7070 --keys keys --founder NAME\n",
    ):
        assert command in str(caught.value)


# What a key may say.


def test_a_key_speaks_for_no_other_name(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with site.peer("a") as a, site.peer("b") as b, caplog.at_level(logging.WARNING):
        a.join()
        a.found()
        b.join()
        before = a.heads()
        with site.peer("b", "a") as liar:
            for _ in range(3):
                liar.send(liar.hello())
                assert liar.receive(msg.Refuse).code == "key_name"
        for _ in range(3):
            b.send_data(b.frames(b"x", learner="a", incarnation=a.incarnation))
        assert a.welcome is not None
        listener = b.make(zmq.SUB)
        host = site.service.wires.address.rsplit(":", 1)[0]
        listener.connect(f"{host}:{a.welcome.downlink_port}")
        for topic in (downlink_topic("a", a.incarnation, 0), b"", b"a/"):
            listener.setsockopt(zmq.SUBSCRIBE, topic)
        wait_until(lambda: site.refusals("key_name") == 7, "each violation to count")
        # Subscriptions that are no topics.
        wait_until(lambda: site.refusals("bad_frame") == 2, "the subscriptions to count")
        with site.peer("operator") as operator:
            told = operator.status().contributions_refused
            assert (told["key_name"], told["bad_frame"]) == (7, 2)
        assert a.heads() == before
        assert not listener.poll(0)
        assert sorted(site.members) == ["a", "b"]
    named = [r.getMessage() for r in caplog.records if "key_name" in r.getMessage()]
    assert len(named) == 1 and named[0].startswith("b refused")


def test_a_claimed_routing_id_is_worth_nothing(site: Site) -> None:
    """ROUTER gives the id to the first; a second connection with it stays without effect."""
    with site.peer("a") as a:
        a.join()
        (member,) = site.service.syncer.state.roster.connected()
        pair, port = site.pairs["b"], int(site.service.wires.address.rpartition(":")[2])
        target = AttackTarget(
            site.service.wires.address, 0, 0, site.server, pair.public, pair.secret, "b", "a", 0
        )
        # Its handshake ends after the broker's socket has the claim.
        with closing(RawCurve(target, port, "DEALER", routing_id=member.peer)) as thief:
            thief.send(encode_control(msg.Bye("as somebody else")), more=False)
            with site.peer("operator") as operator:
                assert [each.name for each in operator.status().learners] == ["a"]
            assert a.status().phase is msg.Phase.FOUNDING, "the answer comes to a"
        assert site.members == ["a"]


def test_roles_bound_what_is_said_and_what_is_told(site: Site) -> None:
    with (
        site.peer("a") as a, site.peer("b") as b,
        site.peer("operator") as operator, site.peer("monitor") as monitor,
    ):  # fmt: skip
        a.join()
        b.join()
        assert [each.name for each in operator.status().learners] == ["a", "b"]
        assert [each.name for each in a.status().learners] == ["a"]
        assert monitor.status().learners == ()
        monitor.send(monitor.hello())
        assert monitor.receive(msg.Refuse).code == "key_role"


# The ring changes.


def test_a_revoked_key_is_cut_and_no_other(site: Site) -> None:
    with site.peer("a") as a, site.peer("b") as b:
        a.join()
        a.found()
        b.join()
        b.status()
        ends = b.control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        others = a.control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        site.edit(lambda ring: ring.revoke("b"))
        site.service.reload(site.service.syncer.state.config)
        assert ends.poll(int(HANG_S * 1000)), "the connection stays"
        wait_until(lambda: site.members == ["a"], "the member to be lost")
        wait_until(lambda: site.gate.refused > 0, "the new handshake to be refused")
        assert a.status().phase is msg.Phase.RUNNING
        assert not others.poll(0)
        for peer, monitor in ((a, others), (b, ends)):
            peer.control.disable_monitor()
            monitor.close()


def test_a_connection_that_never_sent_anything_is_cut_with_its_key(site: Site) -> None:
    with site.peer("b") as b:
        established = b.make(zmq.XPUB)
        port = site.service.wires.uplink_port
        established.connect(f"tcp://127.0.0.1:{port}")
        assert established.poll(int(HANG_S * 1000)), "no connection"
        ends = established.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        site.edit(lambda ring: ring.revoke("b"))
        assert ends.poll(int(HANG_S * 1000)), "the connection stays"
        established.disable_monitor()
        ends.close()


def test_a_key_that_expires_is_cut(site: Site) -> None:
    def expire(ring: Keyring) -> Keyring:
        soon = [
            dataclasses.replace(g, until=time.time() + 1) if g.holder.name == "b" else g
            for g in ring.grants
        ]
        return dataclasses.replace(ring, grants=tuple(soon))

    with site.peer("a") as a, site.peer("b") as b:
        a.join()
        b.join()
        site.edit(expire)
        wait_until(lambda: site.members == ["a"], "the member to be lost")


def test_a_ring_that_does_not_parse_keeps_the_old_one(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    path = ring_path(site.directory)
    good = path.read_text()
    with site.peer("a") as a, caplog.at_level(logging.ERROR):
        a.join()
        path.write_text(good + "[[key]\n")
        wait_until(lambda: "the old one stays" in caplog.text, "the error")
        assert a.status()
        with site.peer("b") as b:
            assert b.status()
        path.write_text(good.replace('name = "b"', 'name = "bee"'))
        wait_until(lambda: site.gate.holder(site.pairs["b"].public) == KeyHolder("bee"), "the edit")
        assert a.status()


def test_a_ring_that_cannot_be_read_for_a_while_is_read_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    path = ring_path(site.directory)
    with caplog.at_level(logging.ERROR):
        aside = path.rename(path.with_name("aside"))
        path.mkdir()
        wait_until(lambda: "the old one stays" in caplog.text, "the error")
        path.rmdir()
        aside.rename(path)
    site.edit(lambda ring: ring.revoke("b"))
    wait_until(lambda: site.gate.holder(site.pairs["b"].public) is None, "the edit")


# Invitations.


def test_an_invitation_becomes_a_key_once(site: Site) -> None:
    token, mine = new_pair(), new_pair()
    site.pairs |= {"token": token, "new": mine}
    invited = KeyHolder("new", organisation="x")
    site.edit(lambda ring: ring.invite(invited, token.public, until=time.time() + 600))
    wait_until(lambda: site.gate.holder(token.public), "the invitation")
    with site.peer("token", "new") as guest:
        guest.send(guest.hello())
        assert guest.receive(msg.Refuse).code == "key_role"
        ends = guest.control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        guest.send(msg.Enrol(PROTOCOL, mine.public))
        assert guest.receive(msg.Enrolled).name == "new"
        assert ends.poll(int(HANG_S * 1000)), "the connection stays"
        guest.control.disable_monitor()
        ends.close()
    assert read_ring(site.directory).of("new")[0].public == mine.public
    with site.peer("new") as new:
        new.join()
        (member,) = site.service.syncer.state.roster.connected()
        assert member.organisation == "x"


def test_an_expired_invitation_names_the_remedy(site: Site) -> None:
    site.pairs["token"] = token = new_pair()
    site.edit(lambda ring: ring.invite(KeyHolder("new"), token.public, until=time.time() - 1))
    wait_until(lambda: site.gate.holder(token.public), "the invitation")
    with site.peer("token", "new") as guest:
        guest.send(msg.Enrol(PROTOCOL, new_pair().public))
        refusal = guest.receive(msg.Refuse)
    assert refusal.code == "invitation" and "narrows keys invite NAME" in refusal.remedy


def test_keys_are_handed_over_a_few_times_a_day(site: Site) -> None:
    pairs = [site.pairs["b"], *(new_pair() for _ in range(6))]
    for number in range(6):
        site.pairs["newest"] = pairs[number]
        with site.peer("newest", "b") as b:
            b.send(msg.Enrol(PROTOCOL, pairs[number + 1].public))
            if number < ENROLMENTS.burst:
                assert b.receive(msg.Enrolled).name == "b"
                continue
            assert b.receive(msg.Refuse).code == "quota"
            break
    assert site.service.turnstile.quotas.dropped == 1
    assert len(read_ring(site.directory).of("b")) == 2


# Connections.


def test_a_message_that_never_ends_takes_bounded_memory(tmp_path: Path) -> None:
    # By hand: libzmq keeps the parts of a message until it is whole.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"XPUB"
    part = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
    with live_broker(broker_config(tmp_path)) as service:
        before, most, sent = _resident_bytes(), 0, 0
        port, connections = service.wires.uplink_port, service.wires.connections

        def wait_for_a_scan() -> None:
            seen = connections.scan_at
            wait_until(lambda: connections.scan_at != seen, "a scan")

        with socket.create_connection(("127.0.0.1", port)) as endless:
            endless.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            while True:
                try:
                    endless.sendall(part)
                except OSError:
                    break
                sent += len(part)
                most = max(most, _resident_bytes() - before)
                if sent % (8 * len(part)) == 0:
                    # A busy machine may keep the broker from scanning for as long as it likes, and
                    # this line is as fast as memory: so the sender waits for the scans.
                    wait_for_a_scan()
        assert sent > UPLINK_HELD_MAX
        assert most < 4 * UPLINK_HELD_MAX
        with Peer(service.wires.address, "a") as a:
            assert a.refusals("too_large") == 1


def test_a_holder_has_a_bounded_number_of_connections(site: Site) -> None:
    with site.peer("a") as a, site.peer("b") as b:
        a.join()
        extra = [b.make(zmq.DEALER) for _ in range(8)]
        monitors = [each.get_monitor_socket(zmq.EVENT_DISCONNECTED) for each in extra]
        for each in extra:
            each.connect(site.service.wires.address)
        for each in extra:
            each.send(b"not even a message")
        wait_until(lambda: site.service.wires.connections.cuts["quota"] >= 1, "the cut")
        assert any(monitor.poll(int(HANG_S * 1000)) for monitor in monitors)
        for each, monitor in zip(extra, monitors, strict=True):
            each.disable_monitor()
            monitor.close()
        assert site.members == ["a"]


@pytest.fixture
def room_for_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.broker.process.sockets.connections_max", lambda: 20)


@pytest.mark.usefixtures("room_for_twenty")
def test_silent_connections_push_out_nobody_elses(site: Site) -> None:
    connections, port = site.service.wires.connections, site.service.wires.uplink_port
    with site.peer("a") as a, site.peer("b") as b:
        a.join()  # Its uplink is silent, and the oldest.
        ends = a.uplink.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        flood = [b.make(zmq.XPUB) for _ in range(40)]
        for each in flood:
            each.connect(f"tcp://127.0.0.2:0;127.0.0.1:{port}")
        wait_until(lambda: connections.cuts["quota"] > 40, "the flood to be cut")
        assert len(connections) <= 20 and not ends.poll(0)
        for each in flood:
            each.close()
        a.found()
        a.uplink.disable_monitor()
        ends.close()


def test_half_open_handshakes_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.broker.process.connections.HALF_OPEN_MAX", 20)
    connections = site.service.wires.connections
    port = int(site.service.wires.address.rsplit(":", 1)[1])
    with site.peer("a") as a:
        a.join()
        flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        wait_until(lambda: connections.cuts["quota"] >= 40, "the oldest to be cut")
        wait_until(lambda: len(connections) <= 25, "their end")
        assert a.status()
        for each in flood:
            each.close()
        wait_until(lambda: len(connections) == 3, "the end of all")


def test_silent_connections_of_a_holder_are_bounded(site: Site) -> None:
    connections, port = site.service.wires.connections, site.service.wires.uplink_port
    with site.peer("a") as a, site.peer("b") as b:
        a.join()  # Its uplink is silent, and the oldest.
        ends = a.uplink.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        flood = [b.make(zmq.XPUB) for _ in range(8)]
        for each in flood:
            # A socket that is cut does not come back: else the flood would never end.
            each.setsockopt(zmq.RECONNECT_IVL, -1)
            each.connect(f"tcp://127.0.0.2:0;127.0.0.1:{port}")
        wait_until(lambda: connections.cuts["quota"] == 2, "those beyond six to be cut")
        # Three of a, one of b that is silent elsewhere, and the six.
        wait_until(lambda: len(connections) == 10, "their ends")
        assert not ends.poll(0)
        a.found()
        for each in flood:
            each.close()
        a.uplink.disable_monitor()
        ends.close()


def test_connections_of_an_old_invitation_are_not_those_of_the_learner(site: Site) -> None:
    site.pairs["token"] = token = new_pair()
    site.edit(lambda ring: ring.invite(KeyHolder("a"), token.public, until=time.time() + 600))
    wait_until(lambda: site.gate.holder(token.public), "the invitation")
    connections = site.service.wires.connections
    with site.peer("a") as a, site.peer("token") as guest:
        a.join()
        ends = a.control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        extra = [guest.make(zmq.DEALER) for _ in range(7)]
        for each in extra:
            each.connect(site.service.wires.address)
            each.send(b"not even a message")
        wait_until(lambda: connections.cuts["quota"] >= 1, "the cut")
        for each in extra:
            each.close()
        assert a.status() and not ends.poll(0)
        a.control.disable_monitor()
        ends.close()


def test_a_key_that_goes_cuts_no_silent_connection_from_elsewhere(site: Site) -> None:
    port = site.service.wires.uplink_port

    def silent(peer: Peer, source: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        made = peer.make(zmq.XPUB)
        made.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        assert made.poll(int(HANG_S * 1000)), "no connection"
        return made, made.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    with site.peer("a") as a, site.peer("b") as b:
        a.status()
        (mine, end), (other, other_end) = silent(b, "127.0.0.2"), silent(a, "127.0.0.3")
        site.edit(lambda ring: ring.revoke("b"))
        assert end.poll(int(HANG_S * 1000)), "the connection stays"
        assert a.status() and not other_end.poll(0)
        for each, monitor in ((mine, end), (other, other_end)):
            each.disable_monitor()
            monitor.close()


@dataclasses.dataclass
class Listening:
    """Sockets of a broker, and a subscriber that reads when it is told to."""

    wires: BrokerSockets
    subscriber: zmq.Socket[bytes]
    topic: bytes
    now: float

    def turn(self) -> None:
        """Does what the broker's loop does. Each turn scans: its clock runs ahead."""
        self.now += 10.0
        self.wires.attend(self.now)
        self.wires.read_subscriptions(lambda _origin, _topic: True)

    def send(self, payload: bytes) -> None:
        self.wires.send_data(self.topic, b"header", payload)

    def read(self) -> None:
        assert self.subscriber.poll(int(HANG_S * 1000)), "nothing came"
        self.subscriber.recv_multipart()

    @property
    def cuts(self) -> int:
        return self.wires.connections.cuts["quota"]


@pytest.fixture(params=["keys", "no keys"])
def listening(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[Listening, list[str]]]:
    told: list[str] = []
    directory, pair = tmp_path / "keys", new_pair()
    server = new_broker_key(directory).current.public
    write_ring(directory, Keyring().allow(KeyHolder("m"), pair.public, now=time.time()))
    with_keys = request.param == "keys"
    wires = BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False,
        keys=str(directory) if with_keys else "", told=lambda _code, text: told.append(text),
    )  # fmt: skip
    monkeypatch.setattr("narrows.broker.process.connections.QUEUED_MAX", WAITING_MAX)
    peer = KeyedPeer(wires.address, "m", server if with_keys else None, pair)
    with peer:
        subscriber = peer.make(zmq.SUB)
        # It takes nothing in that is not read: what waits, waits at the broker.
        subscriber.setsockopt(zmq.RCVHWM, 1)
        subscriber.setsockopt(zmq.RCVBUF, 4096)
        topic = downlink_topic("m", "ab" * 16, 0)
        subscriber.setsockopt(zmq.SUBSCRIBE, topic)
        subscriber.connect(f"tcp://127.0.0.1:{wires.downlink_port}")
        made = Listening(wires, subscriber, topic, time.monotonic())

        def subscribed() -> bool:
            made.turn()
            return wires.subscribed.has({topic})

        wait_until(subscribed, "the subscription")
        yield made, told
    wires.close()


WAITING_MAX = 1 << 20
"""Bytes that may wait for a connection in these tests."""


def test_what_waits_for_a_connection_that_reads_nothing_is_bounded(
    listening: tuple[Listening, list[str]],
) -> None:
    listener, told = listening
    for _ in range(15):
        listener.send(bytes(1 << 16))
        listener.turn()
    assert not listener.cuts, "it is within its credit"
    for _ in range(15):
        listener.read()
    sent = 0
    while not listener.cuts:
        assert sent < 16 * WAITING_MAX, "what waits has no bound"
        listener.send(bytes(1 << 16))
        listener.turn()
        sent += 1 << 16
    # The kernel acknowledges what waits in the subscriber's own buffers.
    assert sent >= WAITING_MAX
    assert told[0].startswith("connections of ") and "wait that it does not read" in told[0]


def test_who_reads_is_never_cut_however_small_the_messages(
    listening: tuple[Listening, list[str]],
) -> None:
    listener, _ = listening
    # Their frames are mostly what ZeroMQ and CURVE add: ten times what may wait, in all.
    for _ in range(60):
        for _ in range(1000):
            listener.send(b"x")
        for _ in range(1000):
            listener.read()
        listener.turn()
    assert not listener.cuts
    # Nothing was counted that a peer could live on: it is cut as if it were new.
    sent = 0
    while not listener.cuts:
        assert sent < 16 * WAITING_MAX, "what waits has no bound"
        listener.send(bytes(1 << 16))
        listener.turn()
        sent += 1 << 16


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
