"""The learner's shell: a background thread with the sockets, and the training thread's door.

The training thread only copies (snapshot, adopt) and hands over; encoding, decoding, sending and
waiting happen behind its back. One lock guards the session; nobody copies while holding it.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from narrows.learner import events as ev
from narrows.learner.exchange import Exchange
from narrows.learner.session import Connection, Identity, Session
from narrows.learner.wires import Wires
from narrows.proto import messages as msg
from narrows.proto.errors import BrokerUnreachable, NarrowsError, RemoteProtocolError
from narrows.proto.fragments import Fragment
from narrows.proto.frames import decode_control, encode_control

_log = logging.getLogger("narrows.learner")

F32: TypeAlias = NDArray[np.float32]

SAY_S = 5.0
"""While it waits, a learner says so often what it waits for."""

IDLE_S = 0.2
"""The background thread looks around at least so often."""


class ParameterHost(Protocol):
    """The model's parameters; called on the training thread, or while that thread waits."""

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """Copies the fragment's parameters into `out`, float32, shape (elements,)."""

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """Sets the fragment's parameters, cast to their dtype."""


@dataclass
class _Times:
    """Seconds of the training thread, and what it did with them."""

    adopt_s: float = 0.0
    snapshot_s: float = 0.0
    waited_s: float = 0.0
    versions_adopted: int = 0


class Client:
    """Connects one process to the broker. Make it, `start`, `boundary` per step, `finish`."""

    def __init__(
        self,
        *,
        broker: str,
        name: str,
        layout: tuple[msg.LayoutEntry, ...],
        frozen_digest: int,
        host: ParameterHost,
        join_timeout_s: float = 60.0,
        contribute_after_steps: int = 0,
        events: Path | None = None,
    ) -> None:
        self._broker, self._host = broker, host
        self._join_timeout_s = join_timeout_s
        identity = Identity(
            name, secrets.token_hex(16), layout, frozen_digest, contribute_after_steps
        )
        self._session = Session(identity, jitter=random.Random().random)
        self._wires = Wires(broker, identity.incarnation)
        self._exchange = Exchange(
            self._wires,
            name=name,
            incarnation=identity.incarnation,
            layout=layout,
            post=self._post,
            records=events,
        )
        self._changed = threading.Condition()
        self._actions: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._loop, name="narrows-learner", daemon=True)
        self._error: NarrowsError | None = None
        self._closed = False
        self._times = _Times()
        #: Sum of the versions adopted when the learner joined: 0 if the run began with it.
        self.joined_version_sum = 0

    # For the training thread.

    def start(self) -> None:
        """Blocks until every fragment is adopted, and says meanwhile what it waits for.

        Raises Refused if the broker refuses this learner, BrokerUnreachable after
        `join_timeout_s` without a sign of a broker.
        """
        self._thread.start()
        heard_at = said_at = time.monotonic()
        while not self._session.ready:
            self._at_boundary(ev.BoundaryReached())
            with self._changed:
                self._changed.wait(0.1)
            now = time.monotonic()
            heard_at = now if self._session.online else heard_at
            if now - heard_at > self._join_timeout_s:
                self.abort()
                raise BrokerUnreachable(
                    f"no broker answered at {self._broker} for {self._join_timeout_s:.0f} s",
                    remedy="is `narrows broker` running, is the address right, does a firewall "
                    "block the port? A longer join timeout waits longer",
                )
            if now - said_at >= SAY_S:
                said_at = now
                _log.info("waiting for %s", self._session.waits_for)
        self.joined_version_sum = sum(link.adopted for link in self._session.links)
        if self.joined_version_sum == 0:
            self._session.contribute_after_steps = 0  # Everybody starts here: no ramp.

    def boundary(self, tokens: int, loss: float | None) -> None:
        """Call after each inner step: adopts and snapshots what is due. Never waits for the
        network, except in the lockstep modes or after `max_offline`. Raises Refused."""
        self._at_boundary(ev.StepTaken(tokens, loss))
        if self._session.must_wait(time.monotonic()):
            self._wait()

    def skipped(self, tokens: int) -> None:
        """Tokens whose optimizer step never happened."""
        self._at_boundary(ev.StepSkipped(tokens))

    def pause(self, reason: str) -> None:
        """No boundary will come for a while (an evaluation): rounds are declined with `reason`."""
        self._at_boundary(ev.Paused(reason))

    def resume(self) -> None:
        self._at_boundary(ev.Continued())

    def finish(self, timeout_s: float | None = None) -> None:
        """Answers what is in flight, adopts the final versions at the end of a run, says Bye."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._at_boundary(ev.LoopEnded())
        while self._session.connection not in (Connection.LEFT, Connection.REFUSED):
            self._at_boundary(ev.BoundaryReached())
            with self._changed:
                self._changed.wait(0.05)
            if deadline is not None and time.monotonic() > deadline:
                _log.warning("left without Bye; was waiting for %s", self._session.waits_for)
                break
        self.abort()

    def abort(self) -> None:
        """Leaves at once; control messages that were sent already get the linger time."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._thread.is_alive():
                self._wires.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._exchange.close()
        self._wires.close()

    @property
    def should_stop(self) -> bool:
        return self._session.should_stop

    @property
    def settings(self) -> msg.RunSettings:
        assert self._session.settings is not None, "start() first"
        return self._session.settings

    @property
    def run_tokens(self) -> float:
        """The run's clock now."""
        return self._session.run_tokens(time.monotonic())

    @property
    def run_step(self) -> float:
        """The run's clock in steps; without a setting, in inner steps of this learner's size."""
        own = self._session.ledger.logged / max(1, self._session.steps)
        return self.run_tokens / (self.settings.tokens_per_run_step or own or 1)

    @property
    def progress(self) -> float:
        """Share of the goal, 0 to 1; 0 if the run has no goal."""
        goal = self.settings.goal_tokens
        return min(self.run_tokens / goal, 1.0) if goal else 0.0

    @property
    def health(self) -> str:
        return str(self._session.connection)

    def stats(self) -> dict[str, Any]:
        """Counters: bytes both ways, seconds of the training thread, the token ledger."""
        counters = self._exchange.counters
        with self._changed:
            ledger = self._session.ledger.total()
        return {
            **asdict(counters),
            **asdict(self._times),
            "up_bytes": counters.data_up_bytes + self._wires.control_up_bytes,
            "down_bytes": counters.data_down_bytes + self._wires.control_down_bytes,
            "ledger": structs.asdict(ledger),
        }

    def _at_boundary(self, event: ev.Event) -> None:
        """Hands an event of the training thread over and does its copies."""
        with self._changed:
            if self._error is not None:
                raise self._error
            effects = self._session.handle(event, now=time.monotonic())
            published = dict(self._exchange.published)
        others: list[ev.Effect] = []
        for effect in effects:
            match effect:
                case ev.Adopt(fragment, version):
                    self._adopt(fragment, version, published[fragment])
                case ev.Snapshot(fragment):
                    self._snapshot(effect, published[fragment])
                case _:
                    others.append(effect)
        if others:
            self._later(lambda: self._perform(others))

    def _adopt(self, fragment: int, version: int, values: F32) -> None:
        started = time.perf_counter()
        self._host.adopt(self._exchange.table[fragment], values)
        self._times.adopt_s += time.perf_counter() - started
        self._times.versions_adopted += version > 0

    def _snapshot(self, effect: ev.Snapshot, base: F32) -> None:
        started = time.perf_counter()
        part = self._exchange.table[effect.fragment]
        local = np.empty(part.elements, np.float32)
        self._host.snapshot(part, local)
        self._times.snapshot_s += time.perf_counter() - started
        self._later(lambda: self._exchange.start_push(effect, local, base))

    def _wait(self) -> None:
        """Blocks while the session says so, answering rounds and adopting meanwhile."""
        started = said_at = time.monotonic()
        while self._session.must_wait(time.monotonic()):
            with self._changed:
                self._changed.wait(0.05)
            self._at_boundary(ev.BoundaryReached())
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                _log.info("training waits for %s", self._session.waits_for)
        self._times.waited_s += time.monotonic() - started

    # The background thread.

    def _loop(self) -> None:
        while not self._closed:
            self._wires.wait(self._idle_s())
            while self._actions:
                self._actions.popleft()()
            for frame in self._wires.receive_control():
                self._on_control(frame)
            for frames in self._wires.receive_data():
                self._on_data(frames)
            if self._idle_s() <= 0:
                self._handle(ev.DeadlineReached())
            self._exchange.pump(time.monotonic())
        while self._actions:  # Among them the Bye.
            self._actions.popleft()()

    def _idle_s(self) -> float:
        """Seconds until the session wants to be woken; 0 if that is now."""
        deadline = self._session.next_deadline()
        if deadline is None:
            return IDLE_S
        return min(max(deadline - time.monotonic(), 0.0), IDLE_S)

    def _later(self, action: Callable[[], None]) -> None:
        """Has `action` run on the background thread; may be called by any thread."""
        with self._changed:
            if not self._closed:
                self._actions.append(action)
                self._wires.wake()

    def _post(self, work: Callable[[], ev.Event | None]) -> None:
        """Runs `work` on the background thread and handles the event that it returns."""

        def action() -> None:
            event = work()
            if event is not None:
                self._handle(event)

        self._later(action)

    def _handle(self, event: ev.Event) -> None:
        with self._changed:
            effects = self._session.handle(event, now=time.monotonic())
            for effect in effects:
                if isinstance(effect, ev.Install):
                    # Under the lock: the next boundary may already be told to adopt it.
                    self._exchange.install(effect.fragment, effect.version)
            self._changed.notify_all()
        self._perform(effects)

    def _on_control(self, frame: bytes) -> None:
        try:
            message = decode_control(frame)
        except RemoteProtocolError as error:
            _log.warning("a message of the broker was refused: %s", error)
            return
        self._handle(ev.Received(message))

    def _on_data(self, frames: list[bytes]) -> None:
        try:
            event = self._exchange.receive(frames)
        except RemoteProtocolError as error:
            _log.warning("a data message of the broker was refused: %s", error)
            return
        self._handle(event)

    def _perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Send(message):
                    self._wires.send_control(encode_control(message))
                case ev.Note(level, text):
                    _log.log(getattr(logging, level.upper()), "%s", text)
                case ev.Identify(run_id, epoch):
                    self._exchange.identify(run_id, epoch)
                case ev.OpenStreams():
                    self._exchange.open_streams(effect)
                case ev.SendFounding(fragment, ranges):
                    self._found(fragment, ranges)
                case ev.Apply():
                    self._exchange.apply(effect)
                case ev.Install():
                    pass  # `_handle` has done it, under the lock.
                case ev.Drop(handles):
                    self._exchange.drop(handles)
                case ev.Resend(push_id, ranges):
                    self._exchange.resend(push_id, ranges)
                case ev.SettlePush(push_id, merged):
                    self._exchange.settle(push_id, merged=merged)
                case ev.Acknowledge(positions):
                    self._exchange.acknowledge(positions, time.monotonic())
                case ev.Fail(error):
                    self._error = error
                case ev.Left():
                    pass  # `finish` sees it in the session's connection.
                case ev.Adopt() | ev.Snapshot():
                    raise AssertionError("copies belong to the training thread")

    def _found(self, fragment: int, ranges: tuple[tuple[int, int], ...]) -> None:
        """Reads the parameters here: the training thread waits in `start` meanwhile."""
        values = np.empty(self._exchange.table[fragment].elements, np.float32)
        self._host.snapshot(self._exchange.table[fragment], values)
        self._exchange.found(fragment, values, ranges)
