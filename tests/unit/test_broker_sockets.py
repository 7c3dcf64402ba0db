"""The broker's real sockets on loopback, with CURVE and without, and its door."""

import errno
import socket as tcp
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import zmq
from acceptance.peer import handshake

from narrows.broker.config import load_broker
from narrows.broker.process.connections import _Known
from narrows.broker.process.door import TOLD_MAX, Door
from narrows.broker.process.downlink import Connection
from narrows.broker.process.sockets import SURPLUS_PER_TURN, BrokerSockets
from narrows.broker.syncer.status import REFUSED_S
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError
from narrows.proto.keys import (
    AllowList,
    KeyPair,
    SiteKey,
    create_broker_key,
    new_pair,
    read_broker_key,
)
from narrows.proto.messages import LEARNERS_MAX, PAYLOAD_BYTES_MAX
from narrows.proto.sockets import SURE_S, Dial, Kind, make_socket, needs_ipv6, send_buffer_bytes
from narrows.proto.timing import CONTROLS_AT_ONCE, CONTROLS_PER_S, REFUSALS_MAX, REFUSALS_S

pytestmark = pytest.mark.real

ALL_KINDS = Kind.LEARNER_CONTROL, Kind.LEARNER_UPLINK, Kind.LEARNER_DOWNLINK


class Heard:
    """A host that takes everything down; it is its own downlink."""

    def __init__(self) -> None:
        self.controls: list[tuple[str, str | None, list[bytes]]] = []
        self.datas: list[tuple[str | None, list[bytes]]] = []
        self.downlink = self
        self.names: list[str] = []
        self.heard: dict[Connection, list[str]] = {}
        """Topics by connection."""
        self.cut_off: list[str] = []

    def revoked(self, sites: list[str], now: float) -> None:
        self.cut_off += sites

    @property
    def fan_out(self) -> int:
        return sum("p/00" in topics for topics in self.heard.values())

    def listens(self, connection: Connection, topic: str, is_on: bool, now: float) -> bool:
        topics = self.heard.setdefault(connection, [])
        (topics.append if is_on else topics.remove)(topic)
        return len(topics) <= 3

    def keep_listeners(self, is_open: Callable[[Connection], bool]) -> None:
        self.heard = {each: topics for each, topics in self.heard.items() if is_open(each)}

    def learners(self) -> list[str]:
        return self.names

    def is_learner(self, peer: str) -> bool:
        return True

    def control(self, peer: str, site: str | None, frames: list[bytes], now: float) -> None:
        self.controls.append((peer, site, frames))

    def data(self, site: str | None, frames: list[bytes], now: float) -> None:
        self.datas.append((site, frames))


class Wire:
    """The sockets, the host behind it, and clients that dial it."""

    def __init__(self, keys: Path | None = None) -> None:
        flags = {"broker.listen": "tcp://127.0.0.1:0", "broker.keys": str(keys or "")}
        self.host = Heard()
        self.sockets = BrokerSockets(load_broker(None, flags))
        self.server = read_broker_key(keys).public if keys else ""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients: list[zmq.Socket[bytes]] = []
        self.skip_s = 0.0

    def dial(self, kind: Kind, pair: KeyPair | None = None) -> zmq.Socket[bytes]:
        socket = make_socket(self.context, kind, pair=pair, server=self.server)
        socket.connect(f"tcp://127.0.0.1:{self.sockets.ports[ALL_KINDS.index(kind)]}")
        self.clients.append(socket)
        return socket

    def listen(self, topic: bytes, pair: KeyPair | None = None) -> zmq.Socket[bytes]:
        socket = self.dial(Kind.LEARNER_DOWNLINK, pair)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

    def turn(self) -> None:
        """A turn of the broker's loop, once a socket of anybody has something."""
        poller = zmq.Poller()
        for socket in (*self.sockets.pollable, *self.clients):
            poller.register(socket, zmq.POLLIN)
        poller.poll(5)
        self.sockets.receive(self.host, time.monotonic() + self.skip_s)  # type: ignore[arg-type]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {what}"
            self.turn()

    def receive(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        self.until(lambda: socket.poll(0), "a message")
        return socket.recv_multipart()

    def close(self) -> None:
        for each in self.clients:
            each.close(linger=0)
        self.context.term()
        self.sockets.close(linger_s=0.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_broker_key(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def open_wire() -> Iterator[Wire]:
    with closing(Wire()) as wire:
        yield wire


@pytest.fixture
def keyed(keys: Path) -> Iterator[Wire]:
    with closing(Wire(keys)) as wire:
        yield wire


def admitted(wire: Wire, keys: Path, name: str) -> KeyPair:
    pair = new_pair()
    AllowList.allow(keys, name, pair.public)
    look(wire)
    return pair


def look(wire: Wire) -> None:
    """Has the door look at the allow list, as it does each second."""
    wire.skip_s += 2.0
    wire.turn()


@pytest.mark.parametrize("fixture", ["keyed", "open_wire"])
def test_messages_go_both_ways_and_carry_the_site_of_their_key(
    fixture: str, keys: Path, request: pytest.FixtureRequest
) -> None:
    wire: Wire = request.getfixturevalue(fixture)
    pair = admitted(wire, keys, "site-a") if wire.server else None
    control = wire.dial(Kind.LEARNER_CONTROL, pair)
    uplink = wire.dial(Kind.LEARNER_UPLINK, pair)
    downlink = wire.listen(b"p/00", pair)
    control.send_multipart([b"a", b"b"])
    wire.receive(uplink)  # The broker's subscription; what is sent before it is lost.
    uplink.send_multipart([b"u/00", b"header", b"payload"])
    host = wire.host
    site = "site-a" if pair else None
    wire.until(lambda: host.controls and host.datas and host.fan_out == 1, "all three")
    peer, *rest = host.controls[0]
    assert rest == [site, [b"a", b"b"]]
    assert host.datas == [(site, [b"u/00", b"header", b"payload"])]
    assert wire.sockets.control(peer, [b"c", b"d"]) and not wire.sockets.control("00", [b"c"])
    assert wire.receive(control) == [b"c", b"d"]
    assert wire.sockets.data("p/00", b"header", b"payload" * 20_000)
    assert wire.receive(downlink) == [b"p/00", b"header", b"payload" * 20_000]
    other = wire.listen(b"p/00", pair)
    wire.until(lambda: host.fan_out == 2, "two connections")
    other.setsockopt(zmq.SUBSCRIBE, b"p/01")
    other.setsockopt(zmq.UNSUBSCRIBE, b"p/00")
    wire.until(lambda: sorted(host.heard.values()) == [["p/00"], ["p/01"]], "an unsubscription")
    downlink.close(linger=0)
    wire.clients.remove(downlink)
    wire.until(lambda: list(host.heard.values()) == [["p/01"]], "the end of a connection")


def test_the_largest_payload_passes_and_a_full_pipe_answers(keyed: Wire, keys: Path) -> None:
    """MAXMSGSIZE counts what CURVE adds. With NODROP a pipe without room loses nothing."""
    uplink = keyed.dial(Kind.LEARNER_UPLINK, admitted(keyed, keys, "site-a"))
    keyed.receive(uplink)  # The broker's subscription.
    payload = bytes(PAYLOAD_BYTES_MAX)
    sent = 0
    with pytest.raises(zmq.Again):
        while sent < 1000:
            uplink.send_multipart([b"u/00", b"%d" % sent, payload], zmq.NOBLOCK, copy=False)
            sent += 1
    datas = keyed.host.datas
    keyed.until(lambda: len(datas) == sent, "all that was sent")
    assert [int(header) for _, (_, header, _) in datas] == [*range(sent)]
    assert {len(got) for _, (_, _, got) in datas} == {PAYLOAD_BYTES_MAX}


def test_without_an_authenticator_a_socket_admits_nobody(keyed: Wire, keys: Path) -> None:
    """Holds `make_socket`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = make_socket(context, Kind.BROKER_CONTROL, pair=read_broker_key(keys))
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
    key = SiteKey("site-a", admitted(keyed, keys, "site-a"), (keyed.server,))
    dial = Dial(context, Kind.LEARNER_CONTROL, parse_address(address), key, keyed.server)
    while not dial.is_dead(time.monotonic()):
        assert dial.monitor.poll(30_000), "no outcome"
        assert not dial.look(time.monotonic())
    dial.close()
    context.destroy(linger=0)


def test_the_send_buffer_is_a_tenth_of_a_second_of_a_learners_share() -> None:
    assert send_buffer_bytes(0.0, 4) == 0
    assert send_buffer_bytes(1e6, 1) == 32 << 10
    assert send_buffer_bytes(100e6, 4) == 312_500
    assert send_buffer_bytes(5e9, 4) == 0


def takes(wire: Wire, payload: bytes) -> bool:
    """Whether all pipes take a message within a second: on a busy machine a living reader's pipe is
    full for a moment, too."""
    for _ in range(500):
        if wire.sockets.data("p/00", b"", payload):
            return True
        threading.Event().wait(0.002)
    return False


def test_a_reader_that_has_stopped_holds_the_others_up_only_until_a_message_is_lossy(
    open_wire: Wire,
) -> None:
    """Holds `BrokerSockets.data`."""
    wire = open_wire
    fast, stopped = wire.listen(b"p/00"), wire.listen(b"p/00")
    wire.clients.remove(stopped)  # Nobody looks at it.
    wire.until(lambda: wire.host.fan_out == 2, "two listeners")
    payload = b"x" * 100_000
    blocked = 0
    after = 0
    for _ in range(2000):
        if not takes(wire, payload):
            blocked += 1
            assert wire.sockets.data("p/00", b"", payload, lossy=True)
        wire.receive(fast)
        after += blocked > 0
        if after == 20:
            break
    stopped.close(linger=0)
    # libzmq skips the full pipe from then on, and the fast one gets all.
    assert blocked == 1 and after == 20


def test_the_door_keeps_a_key_out_after_too_many_refusals_for_a_minute(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds `Door.strike`."""
    pair = new_pair()
    now = 50.0
    AllowList.allow(keys, "site-a", pair.public)
    door = Door(keys, now)
    for _ in range(REFUSALS_MAX - 1):
        door.strike(pair.public, now)
    assert door.site(pair.public) == "site-a"
    door.strike(pair.public, now)
    assert door.site(pair.public) is None and not door.admits(pair.public)
    assert caplog.text.count("site-a") == 2 and len(caplog.records) == 1
    door.look(now + REFUSALS_S + 1.0)
    assert door.admits(pair.public)
    AllowList.path(keys).write_text("no list")
    door.look(now + 2 * REFUSALS_S)
    assert door.admits(pair.public), "the old list stands"


def test_the_door_hears_1024_learners_and_no_flood(keys: Path) -> None:
    """Holds `Door.hears`."""
    pair = new_pair()
    now = 50.0
    AllowList.allow(keys, "site-a", pair.public)
    door = Door(keys, now)
    here = list[str]()
    for _ in range(LEARNERS_MAX):  # After a start of the broker all say Hello and Report.
        for is_learner in (False, True):
            assert door.hears(pair.public, lambda: here, now, is_learner=is_learner)
            door.answered(pair.public, 2000, is_learner=is_learner)
        here.append(f"site-a/{len(here)}")
    # It stands still, and 64 messages of each wait in its queues.
    now += 1.0
    hears = partial(door.hears, pair.public, lambda: here, now, is_learner=True)
    assert sum(hears() for _ in range(64 * LEARNERS_MAX)) == 64 * LEARNERS_MAX
    other = new_pair()
    AllowList.allow(keys, "site-b", other.public)
    door.look(now)
    asks = partial(door.hears, other.public, lambda: here, is_learner=False)
    assert sum(asks(now) for _ in range(10_000)) == CONTROLS_AT_ONCE + CONTROLS_PER_S
    assert asks(now + 1.0)
    door.answered(other.public, CONTROLS_PER_S << 10, is_learner=False)
    assert not asks(now + 1.0), "answers count, too"
    assert door.hears(other.public, lambda: here, now, is_learner=True), "its learners are heard"


def test_a_connection_that_listens_to_too_many_topics_is_kept_out(keyed: Wire, keys: Path) -> None:
    door = keyed.sockets.door
    assert door is not None
    pair = admitted(keyed, keys, "site-a")
    socket = keyed.listen(b"p/00", pair)
    for life in range(3):
        socket.setsockopt(zmq.SUBSCRIBE, b"r/site-a.%08x/00" % life)
    keyed.until(lambda: door.site(pair.public) is None, "the key to be kept out")


@pytest.mark.parametrize("kind", [Kind.LEARNER_CONTROL, Kind.LEARNER_UPLINK])
def test_a_message_of_very_many_frames_costs_its_key_the_minute_and_nobody_else(
    keyed: Wire, keys: Path, kind: Kind
) -> None:
    door = keyed.sockets.door
    assert door is not None
    flooder = admitted(keyed, keys, "site-a")
    other = admitted(keyed, keys, "site-b")
    socket = keyed.dial(kind, flooder)
    if kind is Kind.LEARNER_UPLINK:
        keyed.until(lambda: socket.poll(0), "the subscription")
    socket.send_multipart([b""] * (3 * SURPLUS_PER_TURN))
    keyed.until(lambda: door.site(flooder.public) is None, "the flooder to be kept out")
    keyed.dial(Kind.LEARNER_CONTROL, other).send_multipart([b"a", b"b"])
    keyed.until(lambda: len(keyed.host.controls) + len(keyed.host.datas) == 2, "another's message")
    assert keyed.host.controls[-1][1:] == ("site-b", [b"a", b"b"])


def test_who_floods_or_sends_what_workers_refuse_is_kept_out(
    keyed: Wire, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `BrokerSockets.fault`."""
    monkeypatch.setattr("narrows.broker.process.door.CONTROLS_AT_ONCE", 5)
    monkeypatch.setattr("narrows.broker.process.door.CONTROLS_PER_S", 0)
    door = keyed.sockets.door
    assert door is not None
    flooder, bad = admitted(keyed, keys, "site-a"), admitted(keyed, keys, "site-b")
    control = keyed.dial(Kind.LEARNER_CONTROL, flooder)
    for _ in range(5 + REFUSALS_MAX):
        control.send_multipart([b"a", b"b"])
    keyed.until(lambda: door.site(flooder.public) is None, "the flooder to be kept out")
    assert len(keyed.host.controls) == 5, "what is over the quota is not handled"
    keyed.dial(Kind.LEARNER_CONTROL, bad).send_multipart([b"a", b"b"])
    keyed.until(lambda: len(keyed.host.controls) == 6, "a message")
    for _ in range(REFUSALS_MAX):
        assert door.site(bad.public) == "site-b"
        keyed.sockets.fault(keyed.host.controls[-1][0], time.monotonic())
    assert door.site(bad.public) is None


def test_too_many_handshakes_of_a_key_are_refused(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Door.admits`."""
    monkeypatch.setattr("narrows.broker.process.door.HANDSHAKES_AT_ONCE", 3)
    monkeypatch.setattr("narrows.broker.process.door.HANDSHAKES_PER_S", 0)
    pair = new_pair()
    AllowList.allow(keys, "site-a", pair.public)
    door = Door(keys, 0.0)
    assert [door.admits(pair.public) for _ in range(5)] == [True] * 3 + [False] * 2


def test_a_list_that_could_not_be_read_is_read_again_if_need_be_without_connections(
    keyed: Wire, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds `Door.look`."""
    admitted(keyed, keys, "site-a")
    read = AllowList.read
    code = errno.EIO

    def fails(folder: Path) -> AllowList:
        if keyed.sockets.pollable:
            raise ConfigError("no list") from OSError(code, "no list")
        return read(folder)

    monkeypatch.setattr(AllowList, "read", fails)
    AllowList.path(keys).write_text("# nobody")
    for _ in range(3):
        look(keyed)
    assert not keyed.host.cut_off and caplog.text.count("no list") == 1
    code = errno.EMFILE
    look(keyed)
    assert keyed.host.cut_off == ["site-a"] and keyed.sockets.pollable, "it was read in between"
    monkeypatch.undo()
    keyed.host.cut_off.clear()
    look(keyed)
    assert not keyed.host.cut_off


def test_the_log_names_each_key_that_is_not_admitted_once_a_minute(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds `Door.admits`."""
    door = Door(keys, 0.0)
    strangers = [new_pair().public for _ in range(2)]
    for now in (0.0, 30.0, 31.0 + REFUSALS_S):
        door.look(now)
        assert not any(door.admits(key) for key in strangers * 3)
    told = [record.getMessage() for record in caplog.records]
    assert [key in text for text, key in zip(told, strangers * 2, strict=True)] == [True] * 4
    assert all("narrows keys allow" in text and str(keys) in text for text in told)
    for _ in range(3 * TOLD_MAX):
        door.admits(new_pair().public)
    assert len(caplog.records) == 2 + TOLD_MAX, "who makes keys cannot fill the log"


def test_keys_that_were_refused_are_told_until_they_are_admitted(keys: Path) -> None:
    """Holds `Door.unknown`."""
    door = Door(keys, 0.0)
    stranger = new_pair().public
    assert not door.admits(stranger)
    now = time.monotonic()
    assert list(door.unknown(now)) == [stranger] and not door.unknown(now + REFUSED_S + 1.0)
    AllowList.allow(keys, "site-b", stranger)
    door.look(now)
    assert not door.unknown(now)


def test_a_key_that_was_admitted_just_now_is_let_in_once_the_loop_has_looked(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Door.look`."""
    door = Door(keys, 0.0)
    pair = new_pair()
    asks = threading.Event()
    stat = door._stat
    said = list[bool]()

    def asked() -> tuple[int, int, int]:
        asks.set()
        return stat()

    AllowList.allow(keys, "site-a", pair.public)
    monkeypatch.setattr("narrows.broker.process.door.ADMITTED_S", 0.0)
    assert not door.admits(pair.public), "the wait has an end"
    monkeypatch.setattr("narrows.broker.process.door.ADMITTED_S", 60.0)
    monkeypatch.setattr(door, "_stat", asked)
    thread = threading.Thread(target=lambda: said.append(door.admits(pair.public)), daemon=True)
    thread.start()
    assert asks.wait(20)
    assert door.look(1.0) == (set(), []), "it gets the lock once the handshake waits"
    thread.join(20)
    assert said == [True], "the look did not wake the handshake"
    assert not door.admits(new_pair().public)


def test_a_key_may_hear_publications_and_its_own_answers(keys: Path) -> None:
    """Holds `Door.may_hear`."""
    pair = new_pair()
    AllowList.allow(keys, "site-a", pair.public)
    door = Door(keys, 0.0)
    own = (b"p/00", b"r/site-a.00000001/01", b"r/site-a/0.00000001/01")
    others = b"r/site-b.00000001/01", b"r/site-ab.00000001/01", b"", b"p", b"r/", b"\xff"
    assert [each for each in (*own, *others) if door.may_hear(pair.public, each)] == [*own]


def test_the_host_hears_of_a_site_that_has_no_key_left(keyed: Wire, keys: Path) -> None:
    """Holds `Door.look`."""
    for name in ("site-a", "site-b"):
        admitted(keyed, keys, name)
    second = admitted(keyed, keys, "site-b")
    AllowList.revoke(keys, "site-b", second.public)
    look(keyed)
    assert not keyed.host.cut_off, "it has another one"
    AllowList.revoke(keys, "site-b")
    look(keyed)
    assert keyed.host.cut_off == ["site-b"]


def test_a_revocation_ends_the_connections_of_the_key_and_those_that_said_nothing(
    keyed: Wire, keys: Path
) -> None:
    """Holds `Connections.end`."""
    pairs = {name: admitted(keyed, keys, name) for name in ("site-a", "site-b")}
    ends: dict[str, list[zmq.Socket[bytes]]] = {}

    def dial(name: str, kind: Kind) -> zmq.Socket[bytes]:
        """A socket whose connection is up, with one that says when it ends."""
        socket = keyed.dial(kind, pairs[name.removeprefix("silent ")])
        end = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        keyed.until(lambda: end.poll(0), "a handshake")
        end.recv_multipart()
        keyed.clients.append(end)
        ends.setdefault(name, []).append(end)
        return socket

    listeners: list[zmq.Socket[bytes]] = []
    for name in pairs:
        control, uplink, downlink = (dial(name, kind) for kind in ALL_KINDS)
        control.send_multipart([b"a", b"b"])
        keyed.receive(uplink)  # The broker's subscription.
        uplink.send_multipart([b"u/00", b"header", b"payload"])
        downlink.setsockopt(zmq.SUBSCRIBE, b"p/00")
        listeners.append(downlink)
    host = keyed.host
    keyed.until(
        lambda: len(host.controls) == len(host.datas) == host.fan_out == 2, "what they have said"
    )
    dial("silent site-b", Kind.LEARNER_UPLINK)
    dial("silent site-b", Kind.LEARNER_DOWNLINK)
    AllowList.revoke(keys, "site-b")
    look(keyed)
    keyed.until(
        lambda: all(end.poll(0) for end in ends["site-b"] + ends["silent site-b"]),
        "the ends of its connections",
    )
    assert keyed.sockets.data("p/00", b"header", b"payload")
    assert keyed.receive(listeners[0])[0] == b"p/00"
    assert not any(end.poll(0) for end in ends["site-a"]), "nobody else is cut"
    assert not listeners[1].poll(0)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_connection_whose_message_never_ends_is_closed(
    open_wire: Wire, kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds `BrokerSockets.receive`."""
    monkeypatch.setattr("narrows.broker.process.connections.UNFINISHED_BYTES_MAX", 1 << 20)
    wire = open_wire
    part = b"\x01\xff" + bytes(255)  # Another frame follows.
    type_ = {Kind.LEARNER_CONTROL: b"DEALER", Kind.LEARNER_UPLINK: b"XPUB"}.get(kind, b"XSUB")
    port = wire.sockets.ports[ALL_KINDS.index(kind)]
    fine = wire.listen(b"p/00")
    with tcp.create_connection(("127.0.0.1", port)) as hostile:
        hostile.setblocking(False)
        hostile.send(handshake(type_))
        said = bytearray()

        def is_ready() -> bool:
            with suppress(BlockingIOError):
                said.extend(hostile.recv(4096))
            return b"READY" in said

        # libzmq closes a connection on which a message comes before it has said READY itself.
        wire.until(is_ready, "the broker's half of the handshake")
        rest = b""

        def sends() -> bool:
            nonlocal rest
            with suppress(OSError):  # Its buffer is full, or a turn has ended it.
                rest = rest[hostile.send(rest) :] or part * 1000
            look(wire)
            return "no message" in caplog.text

        wire.until(sends, "a look at it")
        with suppress(BlockingIOError), pytest.raises(OSError):
            while True:
                hostile.send(part * 1000)
    assert "127.0.0.1" in caplog.text
    wire.until(lambda: wire.host.fan_out == 1, "the listener")
    assert wire.sockets.data("p/00", b"header", b"payload") and wire.receive(fine)


def test_who_expects_another_brokers_key_is_named_in_the_log(
    keyed: Wire, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = admitted(keyed, keys, "site-a")
    keyed.server = new_pair().public
    keyed.dial(Kind.LEARNER_CONTROL, pair)
    keyed.until(lambda: "another broker's key" in caplog.text, "the line")


def test_who_goes_before_its_message_is_read_is_not_taken_for_silent(
    keyed: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """As `narrows status` does while the broker stands still."""
    connections = keyed.sockets._connections[keyed.sockets._control]
    connections._silent[9999] = _Known("192.0.2.1")
    connections.look()
    connections.heard(9999, "its key")
    connections.look()
    assert not caplog.records


def watched(dial: Dial, until: Callable[[], bool]) -> None:
    """Looks at what the monitor tells."""
    while not until():
        assert dial.monitor.poll(20_000), "the monitor tells of nothing"
        dial.look(0.0)


def test_an_end_after_which_libzmq_does_not_dial_again_is_noticed() -> None:
    """As after a byte that makes a frame too long: the monitor tells of no failure."""
    with tcp.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        address = Address("127.0.0.1", server.getsockname()[1])
        with closing(Dial(context, Kind.LEARNER_CONTROL, address)) as dial:
            line, _ = server.accept()
            with line:
                line.sendall(handshake(b"ROUTER"))
                watched(dial, lambda: dial.connected)
                line.sendall(b"\2" + (1 << 40).to_bytes(8, "big"))
                watched(dial, lambda: dial.is_dead(SURE_S))
                assert not dial.is_dead(0.0) and not dial.error(0.0), "it may dial again still"
                assert "were altered on their way" in str(dial.error(SURE_S))


def test_what_a_look_has_shown_is_over_once_nobody_listens() -> None:
    """Holds `Dial.error`."""
    with tcp.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        with closing(Dial(context, Kind.LEARNER_CONTROL, Address(*server.getsockname()))) as dial:
            watched(dial, lambda: "says nothing" in str(dial.error(SURE_S)))
            server.close()
            watched(dial, lambda: dial.error(0.0) is None)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_star_listens_on_both_kinds_of_addresses(host: str) -> None:
    """Holds `needs_ipv6`."""
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    sockets = BrokerSockets(
        load_broker(None, {"broker.listen": "tcp://*:0", "broker.insecure": True})
    )
    with closing(sockets), zmq.Context() as context:
        for kind, port in zip(ALL_KINDS, sockets.ports, strict=True):
            address = Address(host, port)
            with closing(Dial(context, kind, address, ipv6=needs_ipv6(address))) as dial:
                watched(dial, lambda: dial.connected)


def test_a_host_with_both_kinds_of_addresses_is_dialled_by_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holds `needs_ipv6`."""
    four, six = [(kind, None, None, "", None) for kind in (tcp.AF_INET, tcp.AF_INET6)]
    for found, expected in ([four], False), ([six], True), ([six, four, six], False):
        monkeypatch.setattr(tcp, "getaddrinfo", lambda *_, **__: found)  # noqa: B023
        assert needs_ipv6(Address("six", 7070)) is expected


def test_addresses_that_cannot_be_listened_on_say_what_to_do(open_wire: Wire) -> None:
    """Holds `listening_address`."""
    for listen, code in [
        (open_wire.sockets.listens_on, ErrorCode.ADDRESS_IN_USE),
        ("tcp://0.0.0.0:0", ErrorCode.INSECURE),
        ("tcp://203.0.113.7:0", ErrorCode.INSECURE),
    ]:
        with pytest.raises(NarrowsError) as caught:
            BrokerSockets(load_broker(None, {"broker.listen": listen}))
        assert caught.value.code is code and "--" in str(caught.value)
