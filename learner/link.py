"""The learner's background thread: sockets and one host behind one lock.

The training thread and this one share the host. Each calls it under the lock only, and no call
takes longer than a pointer swap or the arithmetic of one adoption. Sockets belong to this thread:
what the training thread has to say waits in a queue.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import zmq

from narrows.learner import effects as do
from narrows.learner.host import LearnerHost
from narrows.learner.island import Island, warm_up
from narrows.learner.session import Session
from narrows.learner.site import JoinTarget
from narrows.proto.codec import F32, uncached_advice
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import BrokerUnreachable, NarrowsError, Refused, Unfinished, printable
from narrows.proto.events import EventFile
from narrows.proto.keys import SiteKey, read_site_key
from narrows.proto.messages import Header, Layout
from narrows.proto.ports import Done
from narrows.proto.sockets import Dial, Kind, needs_ipv6
from narrows.proto.timing import HEARD_S
from narrows.proto.wire import asked_topic, live_topic
from narrows.proto.workers import Workers

FRAMES_PER_TURN: Final = 16
"""Messages that are read from one socket before the training thread may have the lock."""
LOOK_S: Final = 0.02
"""A training thread that waits looks so often."""
IDLE_S: Final = 0.25
"""Longest sleep of the background thread: some troubles are known by what does not come."""
BLOCKED_S: Final = 10.0
"""Data that is due and does not move for so long meets a closed port."""
REDIAL_S: Final = 5.0
"""A socket that libzmq has given up makes all to be made anew, with the key file read again; so
often at most."""
DEAD_AGAIN_S: Final = 60.0
"""The trouble of dead sockets for data is told again after so long: each dialling meets it."""

Socket: TypeAlias = "zmq.Socket[bytes]"
_log = logging.getLogger("narrows.learner")


class Link:
    """One incarnation of a learner. The training thread calls `join`, `boundary`, `set_paused`,
    `finish` and `abort`. The host calls the ports `control`, `data` and `run`."""

    def __init__(
        self,
        target: JoinTarget,
        layout: Layout,
        island: Island,
        *,
        join_timeout_s: float,
        events: Path | None,
        adopting: Callable[[], None],
    ) -> None:
        """`adopting` is called before parameters move."""
        self._target, self._join_timeout_s = target, join_timeout_s
        self._key, self._dials = target.key, 0
        incarnation = f"{target.name}.{secrets.token_hex(4)}"
        self._host = LearnerHost(
            target.name, incarnation, layout, island, self, self, time.monotonic(),
            curve=target.key is not None,
        )  # fmt: skip
        self._host.adopting = lambda _: adopting()
        self._host.saw, self._host.noted = self._saw, self._noted
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="narrows-learner", daemon=True)
        self._workers: Workers
        self._sockets: _Sockets
        self._events_path = events
        self._events: EventFile | None = None
        self._said: deque[list[bytes]] = deque()
        self._error: BaseException | None = None
        """The end of the background thread."""
        self._is_closing = self._is_open = False
        self._dialled_at = -math.inf
        self._told_at: dict[str, float] = {}
        """Trouble of sockets for data -> when it was told last."""
        self._up, self._down = Stall(), Stall()

    # Ports of the host.

    def control(self, peer: str, frames: list[bytes]) -> bool:
        """Queues a control message; the background thread sends it."""
        self._said.append(frames)
        if self._is_open and threading.current_thread() is not self._thread:
            self._workers.wake()
        return True

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        """Sends one data message, unless the socket has no room or another thread asks."""
        if threading.current_thread() is not self._thread:
            return False
        return self._sockets.send(topic, header, payload)

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Runs `work` on the worker."""
        self._workers.run(work, done)

    # The training thread.

    @contextmanager
    def session(self) -> Generator[tuple[Session, float]]:
        """The session, for reading, and the time; nothing changes in the block."""
        with self._lock:
            yield self._host.session, time.monotonic()

    def join(self, ramp_steps: int) -> None:
        """Returns once every fragment is adopted. In a run under way the optimizer warms up for
        `ramp_steps`. Raises BrokerUnreachable, Refused."""
        _log.info("joining %s as %s", self._target.broker, self._target.name)
        if advice := uncached_advice():
            _log.warning("%s", advice)
        warm_up()
        self._events = None if self._events_path is None else EventFile(self._events_path)
        self._workers = Workers(1, "narrows-learner")
        self._dial()
        self._is_open = True
        self._thread.start()
        moved_at, moved, missing, tells_at = time.monotonic(), 0, (0, ""), math.inf
        with self._lock:
            session = self._host.session
            while not self._host.join(now := time.monotonic()):
                self._raise()
                if missing != (what := self._missing()):
                    # What hinders a connection is told once it is certain, the rest may pass.
                    missing, tells_at = what, now + (HEARD_S if session.obstacle is None else 0.0)
                if now >= tells_at:
                    _log.log(missing[0], "%s", printable(missing[1]))
                    tells_at = math.inf
                seeding = session.connected and not session.beat.heads
                # Who waits for version 0 of another learner does so as long as the broker answers.
                newest = self._sockets.sent + self._sockets.received
                if newest != moved or (seeding and not len(self._host.sender)):
                    moved_at, moved = now, newest
                if now > moved_at + self._join_timeout_s:
                    raise self._unreachable()
                self._lock.wait(LOOK_S)
            bases = [part.base for part in session.parts]
            _log.info("the model is here: versions %s", bases)
            session.ramp_steps = ramp_steps if max(bases) > 0 else 0

    def _missing(self) -> tuple[int, str]:
        """Level and line on what a learner that joins has not got yet."""
        broker, session = self._target.broker, self._host.session
        if not session.connected:
            # A warning: a program that has not set logging up shows it, too.
            what = session.obstacle or session.refusal or f"no answer from {broker} yet"
            return logging.WARNING, f"{what}; trying for {self._join_timeout_s:g} s"
        if session.beat.heads:
            return logging.INFO, "waits for the model, which is on its way"
        if len(self._host.sender) or None in self._host.seeds.values():
            return logging.INFO, "sends version 0, with which the run begins"
        return logging.WARNING, "the run has not begun: `narrows status` says what it waits for"

    def boundary(self, tokens: int, loss: float | None) -> None:
        """After an inner step; waits where the run's mode or a long outage asks for it. Raises
        Refused, and what ended the background thread."""
        with self._lock:
            self._raise()
            self._host.boundary(tokens, loss, time.monotonic())
            while self._host.session.must_wait(time.monotonic()):
                self._wait()

    def set_paused(self, reason: str | None) -> None:
        """No steps are made for a while; None: they are made again."""
        with self._lock:
            self._host.pause(reason, time.monotonic())

    def finish(self, timeout_s: float | None) -> None:
        """Leaves: with the final model if the run has ended. Raises Unfinished, Refused."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            session = self._host.session
            self._host.leave(time.monotonic())
            while not session.ended and time.monotonic() < until:
                self._wait()
        self.abort(linger_s=1.0)
        if session.heard_ending and not session.final:
            got = f"versions {[part.base for part in session.parts]}"
            raise Unfinished("the run has ended without this learner", got=got)

    def abort(self, linger_s: float = 0.1) -> None:
        """Leaves at once, whatever is on its way; what was sent has `linger_s` to leave. A second
        call is harmless."""
        with self._lock:
            self._host.session.abandon()
            self._host.turn(time.monotonic())
        if self._is_open and not self._is_closing:
            self._is_closing = True
            self._workers.wake()
            self._thread.join()  # It sends what is queued, such as the Bye.
            self._sockets.close(linger_s)
            self._workers.close()
        if self._events is not None:
            self._events.close()

    def stats(self) -> dict[str, Any]:
        """Counters of this incarnation; bytes are those on the line."""
        with self.session() as (session, _):
            sender = self._host.sender
            return {
                "incarnation": session.incarnation, "steps": session.steps,
                "logged_tokens": session.tokens, "merged_tokens": session.merged_tokens,
                "lost_tokens": session.lost_tokens,
                "versions": [part.base for part in session.parts],
                "up_bytes": sender.sent_bytes, "down_bytes": sender.received_bytes,
            }  # fmt: skip

    def _wait(self) -> None:
        """Lets the background thread go on, and adopts what has come."""
        self._lock.wait(LOOK_S)
        self._raise()
        self._host.join(time.monotonic())

    def _raise(self) -> None:
        session = self._host.session
        error = self._error or session.refused
        if error is None and not session.joined and isinstance(session.obstacle, Refused):
            # A broker may still come, but one that does not admit our key does not change its mind.
            error = session.obstacle
        if error is not None:
            raise error

    def _unreachable(self) -> NarrowsError:
        broker, session = self._target.broker, self._host.session
        if not session.connected:
            text = f"no broker answered at {broker} within {self._join_timeout_s:g} s"
            remedy = "is it running, and may this machine reach the port? `narrows status` asks"
            return session.obstacle or session.refusal or BrokerUnreachable(text, remedy=remedy)
        return BrokerUnreachable(
            f"the broker at {broker} answers, but no data moved for {self._join_timeout_s:g} s on"
            f" {session.blocked or self._sockets.blocked()}",
            remedy="data needs the two ports after control: open them in the firewall",
        )

    # The background thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._flush()
        except BaseException as error:
            _log.exception("the exchange has failed")
            self._error = error

    def _turn(self) -> None:
        with self._lock:
            wait_s = self._host.deadline(now := time.monotonic()) - now
        ready = self._sockets.poll(self._workers.wake_fd, max(0.0, min(wait_s, IDLE_S)))
        # Before the lock: a look at a port that says nothing takes a moment.
        is_new, error = self._sockets.look(time.monotonic())
        with self._lock:
            now = time.monotonic()  # Within the lock: the session's time never goes back.
            if is_new:
                self._host.lost(now)  # Whoever answers now does not know this connection.
            if is_new or error is not None:
                self._host.session.obstacle = error
            for frames in self._sockets.receive_control(ready):
                self._host.control(frames, now)
            self._sockets.follow(self._host.session)
            self._host.sender.ready = self._sockets.subscribed(ready)
            for frames in self._sockets.receive_data(ready):
                self._host.data(frames, now)
            self._workers.finish(now)
            self._host.turn(now)
            self._tell_blocked(now)
            self._lock.notify_all()
        self._flush()
        if now >= self._dialled_at + REDIAL_S and self._sockets.must_redial(now):
            self._redial(now)

    def _tell_blocked(self, now: float) -> None:
        """Names the direction in which data is due and none moves, once, and says when it does."""
        session, sender, sockets = self._host.session, self._host.sender, self._sockets
        if session.blocked and not session.connected:
            return  # The session tells of that outage. After it, this one may go on.
        # What waits for its turn in the budget is not due.
        is_due = len(sender) > 0 and (not sender.ready or sender.deadline(now) < now + LOOK_S)
        up = self._up.look(session.connected and is_due, sockets.sent, now)
        down = self._down.look(session.awaits_data, sockets.received, now)
        blocked = sockets.ports(up=up, down=down)
        if blocked and not session.blocked:
            self._noted(do.Note(
                "blocked", f"the broker is heard, but no data has moved for {BLOCKED_S:g} s on"
                f" {blocked}: open it in the firewall",
            ))  # fmt: skip
        elif session.blocked and not blocked:
            self._noted(do.Note("unblocked", f"data moves on {session.blocked}", warning=False))
        session.blocked = blocked

    def _flush(self) -> None:
        while self._said:
            self._sockets.send_control(self._said.popleft())

    def _redial(self, now: float) -> None:
        """Makes all sockets anew: keys may have been admitted or changed."""
        for text in self._sockets.troubles(now):
            if now >= self._told_at.get(text, -math.inf) + DEAD_AGAIN_S:
                self._told_at[text] = now
                _log.warning("%s", printable(text))
        if self._target.key_file is not None:
            try:
                self._key = read_site_key(self._target.key_file)
            except NarrowsError as error:
                _log.warning("the key in use stays: %s", error)
        sent, received = self._sockets.sent, self._sockets.received
        self._sockets.close(linger_s=0.0)
        self._dial()
        self._sockets.sent, self._sockets.received = sent, received

    def _dial(self) -> None:
        # The keys of the broker that the site trusts take turns: one may be the next.
        servers = self._key.servers if self._key else ()
        server = servers[self._dials % len(servers)] if servers else ""
        self._dials += 1
        self._dialled_at = time.monotonic()
        incarnation = self._host.session.incarnation
        self._sockets = _Sockets(self._target, incarnation, self._key, server)

    def _saw(self, header: Header, published: F32) -> None:
        digest = f"{header.result_digest:016x}"
        self._record("installed", fragment=header.fragment, version=header.version, digest=digest)

    def _noted(self, note: do.Note) -> None:
        level = logging.WARNING if note.warning else logging.INFO
        _log.log(level, "%s", printable(note.text))
        self._record(note.event, text=note.text)

    def _record(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write({"event": event, **fields})


class Stall:
    """Tells when something is due and nothing moves. It has no clock of its own."""

    def __init__(self) -> None:
        self._since, self._moved = -math.inf, -1

    def look(self, is_due: bool, moved: int, now: float) -> bool:
        """Whether something was due for BLOCKED_S without a change of `moved`, a count."""
        if not is_due or moved != self._moved:
            self._since, self._moved = now, moved
        return now >= self._since + BLOCKED_S


class _Sockets:
    """The sockets of one dialling: control at once, data after the first Welcome."""

    def __init__(
        self, target: JoinTarget, incarnation: str, key: SiteKey | None, server: str
    ) -> None:
        """It asks the resolver, which may take seconds."""
        self._address, self._relay = parse_address(target.broker), target.relay
        self._incarnation, self._key, self._server = incarnation, key, server
        self._context: zmq.Context[Socket] = zmq.Context()
        self._poller = zmq.Poller()
        self._uplinks: list[Dial] = []
        self._downlinks: list[Dial] = []
        self._heard: set[int] = set()
        """Uplink streams on which the broker has subscribed."""
        self._opened: tuple[int, int, int] | None = None
        self.sent = self.received = 0
        """Data messages."""
        self._unknown: NarrowsError | None = None
        """A host that does not resolve; until there is a connection."""
        self._ipv6: dict[str, bool] = {}
        for address in (self._address, self._relay or self._address):
            try:
                self._ipv6[address.host] = needs_ipv6(address)
            except BrokerUnreachable as error:
                self._ipv6[address.host], self._unknown = False, error
        self._control = self._dial(Kind.LEARNER_CONTROL, self._address, server)

    def follow(self, session: Session) -> None:
        """Opens the data sockets that the newest Welcome tells of; the same ones stay."""
        wanted = session.ports and (*session.ports, session.settings.streams)
        if not wanted or wanted == self._opened:
            return
        for each in self._data:
            self._poller.unregister(each.socket)
            self._poller.unregister(each.monitor)
            each.close()
        self._heard.clear()
        if session.obstacle is None:  # Else another dialling begins, with the ports of the last.
            _log.info("admitted to run %s", session.run_id)
        uplink, downlink, streams = self._opened = wanted
        nearer = self._relay or Address(self._address.host, downlink)
        # A relay proves with the site's own key that it is of the site.
        server = self._key.pair.public if self._relay and self._key else self._server
        self._downlinks = [
            self._dial(Kind.LEARNER_DOWNLINK, nearer, server) for _ in range(streams)
        ]
        for stream, each in enumerate(self._downlinks):
            each.socket.setsockopt(zmq.SUBSCRIBE, live_topic(stream).encode())
            each.socket.setsockopt(zmq.SUBSCRIBE, asked_topic(self._incarnation, stream).encode())
        farther = Address(self._address.host, uplink)
        self._uplinks = [
            self._dial(Kind.LEARNER_UPLINK, farther, self._server) for _ in range(streams)
        ]

    def look(self, now: float) -> tuple[bool, NarrowsError | None]:
        """Whether control has a connection, the first or another one, and what hinders it. It may
        take half a second while there is none."""
        for each in self._data:
            each.look(now)
        is_new = self._control.look(now)
        if is_new:
            self._unknown = None
        return is_new, self._unknown or self._control.error(now)

    def must_redial(self, now: float) -> bool:
        """Whether libzmq has given a socket up, or a host did not resolve."""
        dials = self._control, *self._data
        return self._unknown is not None or any(each.is_dead(now) for each in dials)

    def troubles(self, now: float) -> set[str]:
        """Why libzmq has given sockets for data up. Without control the session tells why."""
        dead = [each for each in self._data if each.is_dead(now)]
        return {str(each.error(now)) for each in dead} if self._control.connected else set()

    def subscribed(self, ready: set[Any]) -> bool:
        """Whether the broker listens on every stream; what is sent before is lost."""
        for stream, uplink in enumerate(self._uplinks):
            for (change,) in _receive(uplink.socket) if uplink.socket in ready else ():
                (self._heard.add if change[:1] == b"\x01" else self._heard.discard)(stream)
        return bool(self._uplinks) and len(self._heard) == len(self._uplinks)

    def blocked(self) -> str:
        """Names the data port on which nothing moves, after a Welcome."""
        is_heard = len(self._heard) == len(self._uplinks)
        return self.ports(up=not is_heard, down=is_heard)

    def ports(self, *, up: bool, down: bool) -> str:
        """The data ports of these directions, in words."""
        if self._opened is None:
            return "its data ports" if up or down else ""  # They are just being dialled anew.
        uplink, downlink, _ = self._opened
        relay = f"the relay at {self._relay} (is it running?)"
        nearer = relay if self._relay else f"the downlink port {downlink}"
        both = (f"the uplink port {uplink}", up), (nearer, down)
        return " and ".join(name for name, is_named in both if is_named)

    def poll(self, wake_fd: int, wait_s: float) -> set[Any]:
        """Waits until something comes, somebody wakes, or the time is over."""
        self._poller.register(wake_fd, zmq.POLLIN)
        # Rounded up: with a fraction of a millisecond left the loop would spin.
        return {source for source, _ in self._poller.poll(math.ceil(1000 * wait_s))}

    def receive_control(self, ready: set[Any]) -> list[list[bytes]]:
        """Control messages that have come."""
        return _receive(self._control.socket) if self._control.socket in ready else []

    def receive_data(self, ready: set[Any]) -> list[list[bytes]]:
        """Data messages that have come."""
        found = [
            frames
            for dial in self._downlinks
            if dial.socket in ready
            for frames in _receive(dial.socket)
        ]
        self.received += len(found)
        return found

    def send_control(self, frames: list[bytes]) -> None:
        """Drops the message without a connection: the session says Hello and tells all anew."""
        with suppress(zmq.Again):
            self._control.socket.send_multipart(frames, zmq.NOBLOCK)

    def send(self, topic: str, header: bytes, payload: bytes) -> bool:
        """False: no room. POLLOUT of an XPUB is always true, so it cannot be waited for."""
        stream = int(topic[-2:])
        if stream not in self._heard:
            return False
        parts = [topic.encode(), header, payload]
        try:
            self._uplinks[stream].socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.sent += 1
        return True

    def close(self, linger_s: float) -> None:
        """Closes everything; what was sent has `linger_s` to leave."""
        for each in (self._control, *self._data):
            each.close(linger_s)
        self._context.term()

    @property
    def _data(self) -> list[Dial]:
        return [*self._uplinks, *self._downlinks]

    def _dial(self, kind: Kind, address: Address, server: str) -> Dial:
        ipv6 = self._ipv6[address.host]
        made = Dial(self._context, kind, address, self._key, server, ipv6=ipv6)
        for source in (made.socket, made.monitor):
            self._poller.register(source, zmq.POLLIN)
        return made


def _receive(socket: Socket) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    while len(found) < FRAMES_PER_TURN:
        try:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return found
