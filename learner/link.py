"""The background loop of one broker: a host and its sockets behind one lock.

The training thread (learner/exchange.py) and this one share the host. Each calls it under the lock
only. A boundary is the longest hold: it adopts every fragment that has a newer copy, and copies
every one that becomes a push. Sockets belong to this thread: what the training thread has to say
waits in a queue.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from narrows.learner import effects as do
from narrows.learner.host import LearnerHost
from narrows.learner.site import JoinTarget
from narrows.learner.sockets import Sockets
from narrows.proto.codec import F32
from narrows.proto.errors import ErrorCode, LocalProtocolError, NarrowsError, Refused, printable
from narrows.proto.events import EventFile, write_inputs
from narrows.proto.keys import check_trust, read_site_key, servers_of
from narrows.proto.messages import Header, Layout
from narrows.proto.ports import Done, Island
from narrows.proto.timing import REDIAL_S
from narrows.proto.workers import Workers

DUE_S: Final = 0.02
"""Data that may leave within this time is due."""
IDLE_S: Final = 0.25
"""Longest sleep of the background thread: some troubles are known by what does not come."""
BLOCKED_S: Final = 10.0
"""Data that is due and does not move for so long meets a closed port."""
DEAD_AGAIN_S: Final = 60.0
"""The trouble of dead sockets for data is told again after so long: each dialling meets it."""

_log = logging.getLogger("narrows.learner")

_open: Final[dict[tuple[int, str, str], Link]] = {}
"""By process, broker and name, the learners between `start` and `close`."""


class Link:
    """One incarnation of a learner at one broker, from `start` to `close`.

    Whoever calls `host` holds `lock`, which tells those that wait for it of each turn. The host
    calls the ports `control`, `data`, `run` and `spread`.
    """

    def __init__(
        self, target: JoinTarget, layout: Layout, island: Island, *, events: Path | None
    ) -> None:
        """`events` is a file that gets a JSON line per event."""
        self.target = target
        incarnation = f"{target.name}.{secrets.token_hex(4)}"
        self.host = LearnerHost(
            target.name, incarnation, layout, island, self, self, time.monotonic(),
            curve=target.key is not None,
        )  # fmt: skip
        self.host.saw = self._saw
        self.host.noted = self._noted
        self.lock = threading.Condition()
        self.sent = 0
        """Data messages, by all sockets so far."""
        self.received = 0
        self._thread = threading.Thread(target=self._run, name="narrows-learner", daemon=True)
        self._workers: Workers
        self._sockets: Sockets
        self._key = target.key
        self._dials = 0
        self._dialled_at = -math.inf
        self._told_at: dict[str, float] = {}
        """Trouble of sockets for data -> when it was told last."""
        self._place = os.getpid(), target.broker, target.name
        """A fork inherits the entries of `_open` and none of the threads: it is another process."""
        self._events_path = events
        self._events: EventFile | None = None
        self._said: deque[list[bytes]] = deque()
        self._error: BaseException | None = None
        """The end of the background thread."""
        self._is_open = False
        self._up = Stall(BLOCKED_S)
        self._down = Stall(BLOCKED_S)

    # Ports of the host.

    def control(self, peer: str, frames: list[bytes]) -> bool:
        """Queues a control message; the background thread sends it."""
        self._said.append(frames)
        if self._is_open and threading.current_thread() is not self._thread:
            self._workers.wake()
        return True

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        """Sends one data message, unless the socket has no room or another thread asks."""
        is_own = threading.current_thread() is self._thread
        if is_own and self._sockets.send(topic, header, payload):
            self.sent += 1
            return True
        return False

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Runs `work` on a worker."""
        self._workers.run(work, done)

    def spread(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Within a work: `call` of each item, by all workers that are idle."""
        return self._workers.spread(call, items)

    # The training thread.

    def start(self) -> None:
        """Dials, and goes on in the background. Raises LocalProtocolError MISUSE if another learner
        of this process has the name: the broker would take it for another process."""
        if _open.setdefault(self._place, self) is not self:
            raise LocalProtocolError(
                ErrorCode.MISUSE,
                f"a Learner of the name {self.target.name} is still open in this process",
                remedy="Leave its block, or call its close(), before another one joins.",
            )
        if self._events_path is not None:
            self._events = EventFile(self._events_path)
        self._workers = Workers(self.target.workers, "narrows-learner")
        self._dial()
        self._is_open = True
        self._thread.start()

    def close(self, linger_s: float) -> None:
        """Ends the background thread and its sockets: what they have sent has `linger_s` to leave.
        A second call is harmless."""
        if self._is_open:
            self._is_open = False
            self._workers.wake()
            self._thread.join()  # It sends what is queued, such as the Bye.
            self._sockets.close(linger_s)
            self._workers.close()
        if self._events is not None:
            self._events.close()
        if _open.get(self._place) is self:
            del _open[self._place]

    @property
    def error(self) -> BaseException | None:
        """The training thread must hear of this: the background thread has ended, or the broker
        does not want this learner."""
        session = self.host.session
        error = self._error or session.refused
        if error is None and isinstance(session.obstacle, Refused) and not session.joined:
            # A broker may still come, but one that does not admit our key does not change its mind.
            error = session.obstacle
        return error

    def raise_error(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise self.error

    def silent_ports(self) -> str:
        """Names the data port on which nothing moves, after a Welcome."""
        return self._sockets.silent()

    def write_inputs(self) -> None:
        """Writes the session's last inputs beside the events file, if there is one."""
        session = self.host.session
        folder = self._events_path.parent if self._events_path else None
        name = f"inputs-{session.incarnation.replace('/', '-')}.jsonl"
        write_inputs(session.recorder, folder, name)

    # The background thread.

    def _run(self) -> None:
        try:
            while self._is_open:
                self._turn()
            self._flush()
        except BaseException as error:
            _log.exception("the exchange has failed")
            self.write_inputs()
            self._error = error

    def _turn(self) -> None:
        host = self.host
        with self.lock:
            now = time.monotonic()
            wait_s = host.deadline(now) - now
        ready = self._sockets.poll(self._workers.wake_fd, max(0.0, min(wait_s, IDLE_S)))
        # Before the lock: a look at a port that says nothing takes a moment.
        is_new, obstacle = self._sockets.look(time.monotonic())
        with self.lock:
            now = time.monotonic()  # Within the lock: the session's time never goes back.
            if is_new:
                host.lost(now)  # Whoever answers now does not know this connection.
            if is_new or obstacle is not None:
                host.session.set_obstacle(obstacle)
            for frames in self._sockets.receive_control(ready):
                host.control(frames, now)
            self._sockets.follow(host.session)
            host.sender.ready = self._sockets.subscribed(ready)
            for frames in self._sockets.receive_data(ready):
                self.received += 1
                host.data(frames, now)
            self._workers.finish(now)
            host.turn(now)
            self._tell_blocked(now)
            self.lock.notify_all()
        self._flush()
        if now >= self._dialled_at + REDIAL_S and self._sockets.must_redial(now):
            self._redial(now)

    def _tell_blocked(self, now: float) -> None:
        """Names the direction in which data is due and none moves, once, and says when it does."""
        session = self.host.session
        sender = self.host.sender
        if session.blocked and not session.connected:
            return  # The session tells of that outage. After it, this one may go on.
        # What waits for its turn in the budget is not due.
        is_due = len(sender) > 0 and (not sender.ready or sender.deadline(now) < now + DUE_S)
        up = self._up.look(session.connected and is_due, self.sent, now)
        down = self._down.look(session.awaits_data, self.received, now)
        blocked = self._sockets.ports(up=up, down=down)
        if blocked and not session.blocked:
            self._noted(do.Note(
                "blocked", f"the broker is heard, but no data has moved for {BLOCKED_S:g} s on"
                f" {blocked}: open it in the firewall",
            ))  # fmt: skip
        elif session.blocked and not blocked:
            self._noted(do.Note("unblocked", f"data moves on {session.blocked}", warning=False))
        session.set_blocked(blocked)

    def _flush(self) -> None:
        while self._said:
            self._sockets.send_control(self._said.popleft())

    def _redial(self, now: float) -> None:
        """Makes all sockets anew: keys may have been admitted or changed."""
        for text in self._sockets.troubles(now):
            if now >= self._told_at.get(text, -math.inf) + DEAD_AGAIN_S:
                self._told_at[text] = now
                _log.warning("%s", printable(text))
        if self.target.key_file is not None:
            try:
                file = self.target.key_file
                self._key = check_trust(read_site_key(file), file)
            except NarrowsError as error:
                _log.warning("the key in use stays: %s", error)
        self._sockets.close(linger_s=0.0)
        self._dial()

    def _dial(self) -> None:
        # The keys of the broker that the site trusts take turns: one may be the next.
        servers = servers_of(self._key)
        server = servers[self._dials % len(servers)]
        self._dials += 1
        self._dialled_at = time.monotonic()
        self._sockets = Sockets(self.target, self.host.session.incarnation, self._key, server)

    # The log and the events file.

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
    """Tells when something is due and nothing moves for `limit_s`. It has no clock of its own."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = -math.inf
        self._moved = -1

    def look(self, is_due: bool, moved: int, now: float) -> bool:
        """Whether something was due for `limit_s` without a change of `moved`, a count."""
        if not is_due or moved != self._moved:
            self._since = now
            self._moved = moved
        return is_due and now >= self._since + self._limit_s
