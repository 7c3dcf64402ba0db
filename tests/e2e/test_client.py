"""The learner's shell over real sockets: what its two threads and the broker do to one another."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from peer import Peer, sealed
from running import HANG_S, LAYOUT, ToyHost, broker_config, client, live_broker, vector, wait_until

from narrows.bench.kit.processes import free_ports
from narrows.broker.process.service import Service
from narrows.broker.syncer.roster import Roster
from narrows.learner.session import events as ev
from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.errors import BrokerUnreachable, ConfigError, ErrorCode, Refused
from narrows.proto.fragments import Fragment
from narrows.proto.frames import decode_control, encode_control


class WatchedHost(ToyHost):
    """Calls `copied` at the end of each snapshot."""

    copied: Callable[[], None] | None = None

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        super().snapshot(fragment, out)
        if self.copied is not None:
            self.copied()


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    config = broker_config(tmp_path, fragments__sync_period_steps=4, merge__quorum=1)
    with live_broker(config) as service:
        yield service


@contextmanager
def answering(frame: bytes) -> Generator[str]:
    """A socket that answers whatever comes with this frame; yields its address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if socket.poll(10):
                socket.send_multipart([socket.recv_multipart()[0], frame])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        over.set()
        thread.join()
        context.destroy(linger=0)


def lone(address: str, *, layout: tuple[msg.LayoutEntry, ...] = LAYOUT, wait_s: float) -> Client:
    return Client(
        ClientOptions(
            broker=address, name="a", layout=layout, frozen_digest=0, host=ToyHost(vector(1)),
            join_timeout_s=wait_s,
        )
    )  # fmt: skip


def tell(learner: Client, frame: bytes) -> None:
    """Has the background thread receive this control frame; returns when it has."""
    done = threading.Event()
    background = learner.background
    background.later(lambda: background.receive_control(frame))
    background.later(done.set)
    assert done.wait(HANG_S)


def ignored(*_: object) -> None:
    pass


def open_push(learner: Client) -> int:
    pushes = [each.push for each in learner.background.session.fragments]
    return next(p.announced.push_id for p in pushes if p is not None and p.merged is None)


def step_until(learner: Client, condition: Callable[[], object]) -> None:
    pace = threading.Event()
    for _ in range(int(HANG_S * 100)):
        if condition():
            return
        pace.wait(0.01)
        learner.boundary(1, 1.0)
    raise AssertionError("stepped in vain")


def test_every_new_connection_is_told_once() -> None:
    port = free_ports()
    wires = LearnerSockets(f"tcp://127.0.0.1:{port}", "a", "0" * 32)

    def connected() -> bool:
        wires.wait(0.05)
        return wires.has_connected()

    try:
        assert not connected()  # Nobody is there.
        for message in (b"first life", b"second life"):
            # A context of its own: its end waits until the port is free, a socket's does not.
            with zmq.Context() as life, life.socket(zmq.ROUTER) as router:
                router.linger = 0
                router.bind(f"tcp://127.0.0.1:{port}")
                wait_until(connected, "the connection")
                wires.send_control(message)
                assert router.poll(int(1000 * HANG_S))
                assert router.recv_multipart()[1:] == [message]
                assert not connected()
    finally:
        wires.close()


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_a_data_port_without_an_answer_ends_the_join(service: Service, direction: str) -> None:
    closed = free_ports()
    setattr(service.syncer.state, f"{direction}_port", closed)
    learner = lone(service.wires.address, wait_s=2.0)
    with pytest.raises(BrokerUnreachable, match=rf" {closed} \({direction}: no connection\)"):
        learner.start()


def test_who_waits_for_others_has_nothing_due(tmp_path: Path) -> None:
    config = broker_config(tmp_path, run__learners_at_start=2)
    with live_broker(config) as service:
        first = lone(service.wires.address, wait_s=HANG_S)
        started = threading.Thread(target=first.start)
        started.start()

        def is_at_rest() -> bool:
            data = first.background.view.data
            lines = (data.uplink, data.downlink) if data else ()
            return bool(lines) and all(line.is_open and not line.is_due for line in lines)

        wait_until(lambda: service.syncer.state.heads, "version 0")
        wait_until(is_at_rest, "the end of what is due")
        assert started.is_alive() and first.health == "joined"
        second = client(service, "b", ToyHost(vector(1)))
        second.start()
        started.join(HANG_S)
        assert not started.is_alive()
        for learner in (first, second):
            learner.abort()


def test_a_connection_that_swallows_everything_is_given_up() -> None:
    """As behind a proxy that acknowledges what it never delivers: the kernel sees no failure."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    learner = lone(f"tcp://127.0.0.1:{port}", wait_s=HANG_S)
    dialer = learner.background.session._dialer
    dialer._redial_s = 0.5
    peers: set[bytes] = set()
    try:
        learner.background.start()
        while len(peers) < 2:
            assert router.poll(int(1000 * HANG_S)), "no other connection"
            peer, frame = router.recv_multipart()
            assert isinstance(decode_control(frame), msg.Hello)
            peers.add(peer)
    finally:
        learner.abort()
        context.destroy(linger=0)


def test_a_broker_that_is_back_is_greeted_without_the_back_off() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = free_ports()
    learner = lone(f"tcp://127.0.0.1:{port}", wait_s=HANG_S)
    dialer = learner.background.session._dialer
    try:
        learner.background.start()
        wait_until(lambda: dialer.next_deadline(), "a Hello to nobody")
        with learner.background.changed:
            dialer._hello_at = math.inf
        router.bind(f"tcp://127.0.0.1:{port}")
        assert router.poll(int(1000 * HANG_S)), "no Hello"
        assert isinstance(decode_control(router.recv_multipart()[1]), msg.Hello)
    finally:
        learner.abort()
        context.destroy(linger=0)


def test_a_control_message_that_arrives_is_charged_for_its_acknowledgement() -> None:
    learner = lone(f"tcp://127.0.0.1:{free_ports()}", wait_s=HANG_S)
    sender = learner.background.data_path.sender
    try:
        sender.set_rate(1e6, time.monotonic())
        budget = sender.budget
        assert budget._window_bytes == 0
        learner.background.receive_control(encode_control(msg.Probe(1)))
        assert budget._window_bytes == 66
    finally:
        learner.abort()


def test_a_broker_that_returns_with_another_codec_is_answered_in_it(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "broker__listen": f"tcp://127.0.0.1:{free_ports()}",
        "fragments__sync_period_steps": 4,
        "merge__quorum": 1,
    }
    learner: Client | None = None
    try:
        for codec in ("int4-zstd", "int8-zstd", "auto"):
            with live_broker(broker_config(tmp_path, codec__push=codec, **flags)) as service:
                if learner is None:
                    learner = client(service, "a", ToyHost(vector(1)))
                    learner.start()
                roster = service.syncer.state.roster

                def has_contributed(roster: Roster = roster) -> bool:
                    member = roster.get("a")
                    return member is not None and member.participation.contributions > 1

                step_until(learner, has_contributed)
    finally:
        if learner is not None:
            learner.abort()


def test_a_push_settled_while_it_is_copied_is_neither_sent_nor_kept(service: Service) -> None:
    host = WatchedHost(vector(1))
    learner = client(service, "slow", host)
    learner.start()
    late: list[int] = []

    def round_is_over() -> None:
        late.append(open_push(learner))
        tell(learner, encode_control(msg.Refuse("no_round", "it is over", push_id=late[-1])))

    host.copied = round_is_over
    step_until(learner, lambda: len(late) == 2)
    host.copied = None
    learner.finish(HANG_S)
    assert not learner.background.data_path.pushes
    assert learner.stats()["pushes"] == 0


def test_a_refusal_while_leaving_is_raised(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = client(service, "a", ToyHost(vector(1)))
    learner.start()
    # Pushes are announced and never sent: leaving waits for their outcome.
    monkeypatch.setattr(learner.background.data_path, "start_push", ignored)
    step_until(learner, lambda: learner.background.session.fragments.pushing)
    superseded = encode_control(msg.Refuse("superseded", "a newer process has taken the name"))

    def superseded_while_waiting(_timeout_s: float) -> None:
        tell(learner, superseded)

    monkeypatch.setattr(learner.background, "wait", superseded_while_waiting)
    with pytest.raises(Refused) as caught:
        learner.finish(HANG_S)
    assert caught.value.code == ErrorCode.SUPERSEDED


def test_the_clock_in_steps_is_0_before_the_first_step_and_never_falls(service: Service) -> None:
    first, second = (client(service, name, ToyHost(vector(1))) for name in "ab")
    first.start()

    def counts() -> bool:
        first.boundary(1000, 1.0)
        return service.syncer.state.clock.run_tokens > 0

    wait_until(counts, "the clock to run: a push has to be merged")
    second.start()
    assert second.run_tokens > 0
    assert second.run_step == 0
    told = [0.0]
    for tokens in (10, 10, 10_000, 10_000):
        second.boundary(tokens, 1.0)
        second.background.handle(ev.DeadlineReached())
        told.append(second.run_step)
    assert told[1] > 0
    assert told == sorted(told)
    for learner in (first, second):
        learner.finish(HANG_S)


def test_another_version_is_final_for_who_joins(tmp_path: Path) -> None:
    with answering(sealed(b"", protocol=1)) as address, pytest.raises(Refused) as caught:
        lone(address, wait_s=HANG_S).start()
    assert caught.value.code == ErrorCode.PROTOCOL_VERSION
    assert (caught.value.expected, caught.value.got) == ("3", "1")


def test_another_version_is_passed_over_by_who_trains(service: Service) -> None:
    learner = client(service, "a", ToyHost(vector(1)))
    learner.start()
    service.stop("to be replaced")
    wait_until(lambda: not learner.background.view.session.online, "the learner to be offline")
    tell(learner, sealed(b"", protocol=1))
    learner.boundary(1, 1.0)
    learner.abort()


@pytest.mark.parametrize("code", ["over_capacity", "unknown_session"])
def test_what_a_broker_answers_is_raised_when_the_time_is_over(code: str) -> None:
    refuse = encode_control(msg.Refuse(code, "not yet", remedy="come later"))
    with answering(refuse) as address, pytest.raises(Refused) as caught:
        lone(address, wait_s=3.0).start()
    assert (str(caught.value.code), caught.value.remedy) == (code, "come later")


def test_nobody_there() -> None:
    with answering(b"") as address:
        pass  # Nobody listens on that port any more.
    with pytest.raises(BrokerUnreachable, match=f"no broker answered at {address}"):
        lone(address, wait_s=0.2).start()


def test_a_layout_that_no_broker_takes_is_refused_before_anything_is_sent() -> None:
    too_many = tuple(msg.LayoutEntry(f"t{i}", (1,), "float32", "mean") for i in range(30_001))
    too_long = tuple(msg.LayoutEntry(f"{i:0500}", (1,), "float32", "mean") for i in range(10_000))
    for layout, expected in (
        (too_many, "1 to 30000"),
        (too_long, "at most 96 parts of 49152 bytes"),
    ):
        with pytest.raises(ConfigError) as caught:
            lone("tcp://127.0.0.1:1", layout=layout, wait_s=1)
        assert caught.value.expected == expected


@pytest.mark.slow
def test_a_broker_that_stood_still_hears_everybody_before_it_judges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Else it would charge its own delay to all whose messages it has not read yet.
    config = broker_config(tmp_path, wan__streams=1, liveness__late="2s", liveness__lost="4s")
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        goes_on.wait(HANG_S)

    with (
        caplog.at_level(logging.INFO, logger="narrows.broker"),
        live_broker(config) as service,
        Peer(service.wires.address, "a") as a,
        Peer(service.wires.address, "b") as b,
    ):
        a.join()
        a.found()
        b.join()
        service._later(stand_still)
        assert stands.wait(HANG_S)
        until = time.monotonic() + 5.0
        for peer in (a, b):
            peer.send(msg.Alive(0))
        wait_until(lambda: time.monotonic() > until, "longer than a silent learner is kept")
        goes_on.set()
        names = [learner.name for learner in a.status().learners if learner.state != "lost"]
    assert names == ["a", "b"]
    assert "nothing heard" not in caplog.text
