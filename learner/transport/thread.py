"""The learner's background thread: sockets, session and data path behind one lock."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from narrows.learner.module import DeviceSnapshot
from narrows.learner.session import Identity, Session
from narrows.learner.session import events as ev
from narrows.learner.transport.datapath import DataPath
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto import messages as msg
from narrows.proto.codec import F32, uncached_advice, warm_up
from narrows.proto.errors import (
    ConfigError,
    ErrorCode,
    NarrowsError,
    Refused,
    RemoteProtocolError,
    printable,
)
from narrows.proto.flow import wire_bytes
from narrows.proto.fragments import Fragment
from narrows.proto.frames import decode_control, encode_control
from narrows.proto.layout import check_layout

_log = logging.getLogger("narrows.learner")


IDLE_S = 0.1
"""The thread looks around at least so often."""

SNAPSHOT_S = 0.005
"""While a snapshot is due it looks for it so often: to be woken for it would cost the training
thread more, because on a busy machine the one that wakes loses its core to the one woken."""


_AT_STEP = ev.BoundaryReached()
"""The boundary of an inner step, as opposed to one at which training waits."""


class ParameterHost(Protocol):
    """The model's parameters; called on the training thread."""

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """Copies the fragment's parameters into `out`, float32, shape (elements,)."""

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """Sets the fragment's parameters, cast to their dtype."""


def _check_hello(identity: Identity) -> None:
    """Raises ConfigError for a layout that no broker takes."""
    try:
        check_layout(identity.layout)
        encode_control(identity.hello("", (0, 0, 0), 0, 0))
    except NarrowsError as error:
        raise ConfigError(
            f"this model cannot take part: {error.message}",
            expected=error.expected,
            got=error.got,
            remedy="stack tensors, shorten their names, or freeze what need not be trained",
        ) from error


class Background:
    """Owns the session; `changed` guards it and is notified when it may have moved on."""

    def __init__(
        self,
        *,
        broker: str,
        name: str,
        layout: tuple[msg.LayoutEntry, ...],
        frozen_digest: int,
        host: ParameterHost,
        contribute_after_steps: int,
        events: Path | None,
    ) -> None:
        identity = Identity(
            name, secrets.token_hex(16), layout, frozen_digest, contribute_after_steps
        )
        _check_hello(identity)
        self.session = Session(identity, jitter=random.Random().random)
        self.wires = LearnerSockets(broker, identity.incarnation)
        self.exchange = DataPath(
            self.wires,
            name=name,
            incarnation=identity.incarnation,
            layout=layout,
            post=self._post,
            records=events,
        )
        self.changed = threading.Condition()
        #: What ended the exchange; raised in the training thread.
        self.error: Exception | None = None
        self._host = host
        #: Steps that the session has not counted yet: (tokens, loss, seconds when).
        self._steps: deque[tuple[int, float | None, float]] = deque()
        self._wants_boundary = True
        self._actions: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="narrows-learner", daemon=True)

    def start(self) -> None:
        """Loads the kernels first: later it would hold the interpreter up while training runs."""
        if advice := uncached_advice():
            _log.warning("%s", advice)
        warm_up()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes everything; a second time does nothing."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            if self._thread.is_alive():
                self.wires.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.exchange.close()
        self.wires.close()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until the session may have moved on, at most `timeout_s`."""
        with self.changed:
            self.changed.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            if not isinstance(error, Refused):
                _log.exception("the exchange has failed")
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _loop(self) -> None:
        while not self._closed:
            self.wires.wait(min(self._idle_s(), self._unsent_s()))
            while self._actions:
                self._actions.popleft()()
            if self.wires.has_connected():
                self.handle(ev.Connected())
            for frame in self.wires.receive_control():
                self.receive_control(frame)
            for frames in self.wires.receive_data():
                self._on_data(frames)
            if self._steps or self._idle_s() <= 0:
                self.handle(ev.DeadlineReached())
            if self.session.online:  # Else nobody has given us a share of the line.
                self.exchange.pump(time.monotonic())
        while self._actions:  # Among them the Bye.
            self._actions.popleft()()

    def _idle_s(self) -> float:
        """Seconds until the session wants to be woken; 0 if that is now."""
        deadline = self.session.next_deadline()
        longest_s = SNAPSHOT_S if self._wants_boundary else IDLE_S
        if deadline is None:
            return longest_s
        return min(max(deadline - time.monotonic(), 0.0), longest_s)

    def _unsent_s(self) -> float:
        """Seconds until something may leave, or is to be looked at; 0 if that is now."""
        now = time.monotonic()
        deadline = self.exchange.sender.next_deadline(now) if self.session.online else None
        return IDLE_S if deadline is None else deadline - now

    def step(self, tokens: int, loss: float | None) -> tuple[list[ev.Copy], dict[int, F32]]:
        """For the training thread: counts an inner step; as `hand_over` if there is more to do.

        Most steps need no lock: the background counts them with its next event. Waiting for a
        lock whose holder has lost its core is what would hold training up on a busy machine.
        """
        self._steps.append((tokens, loss, time.monotonic()))
        if self._wants_boundary or self.error is not None:
            return self.hand_over(_AT_STEP)
        return [], {}

    def _handle(self, event: ev.Event) -> list[ev.Effect]:
        """Lets the session handle the steps so far, then `event`. Call under the lock."""
        effects: list[ev.Effect] = []
        while self._steps:
            tokens, loss, at = self._steps.popleft()
            effects += self.session.handle(ev.StepTaken(tokens, loss, at_boundary=False), now=at)
        effects += self.session.handle(event, now=time.monotonic())
        self._wants_boundary = self.session.wants_boundary
        return effects

    def hand_over(self, event: ev.Event) -> tuple[list[ev.Copy], dict[int, F32]]:
        """For the training thread: handles its event and returns the effects that are its own,
        with the published copies as they are now; the others are performed in the background.

        Raises what made the exchange end: Refused, or the error of a bug.
        """
        with self.changed:
            if self.error is not None:
                raise self.error
            effects = self._handle(event)
            published = dict(self.exchange.published)
        others = [e for e in effects if not isinstance(e, ev.Copy)]
        if others:
            self.later(lambda: self._perform(others), wake=event is not _AT_STEP)
        return [e for e in effects if isinstance(e, ev.Copy)], published

    def start_push(self, effect: ev.Snapshot, local: F32 | DeviceSnapshot, base: F32) -> None:
        """For the training thread: a snapshot is taken; encode and send it."""

        def start() -> None:
            with self.changed:
                link = self.session.links.pushed(effect.push_id)
                # Its outcome may have come while it was copied; nobody would let go of it then.
                is_open = link is not None and link.push is not None and link.push.merged is None
            if is_open:
                self.exchange.start_push(effect, local, base)

        self.later(start, wake=False)

    def later(self, action: Callable[[], None], *, wake: bool = True) -> None:
        """Has `action` run on the background thread; may be called by any thread."""
        with self.changed:
            if not self._closed:
                self._actions.append(action)
                if wake:
                    self.wires.wake()

    def _post(self, work: Callable[[], ev.Event | None]) -> None:
        """Runs `work` on the background thread and handles the event that it returns."""

        def action() -> None:
            event = work()
            if event is not None:
                self.handle(event)

        self.later(action)

    def handle(self, event: ev.Event) -> None:
        with self.changed:
            effects = self._handle(event)
            for effect in effects:
                if isinstance(effect, ev.Install):
                    # Under the lock: the next boundary may already be told to adopt it.
                    self.exchange.install(effect.fragment, effect.version)
            self.changed.notify_all()
        self._perform(effects)

    def receive_control(self, frame: bytes) -> None:
        self.exchange.sender.received(len(frame), time.monotonic())
        try:
            message = decode_control(frame)
        except RemoteProtocolError as error:
            _log.warning("a message of the broker was refused: %s", printable(str(error)))
            if error.code is ErrorCode.PROTOCOL_VERSION and self.session.settings is None:
                raise Refused(
                    error.code,
                    error.message,
                    expected=error.expected,
                    got=error.got,
                    remedy=error.remedy,
                ) from error
            return
        self.handle(ev.Received(message))

    def _send_control(self, message: msg.ControlMessage) -> None:
        frame = encode_control(message)
        if self.wires.send_control(frame):
            self.exchange.sender.charge(wire_bytes(len(frame)), time.monotonic())

    def _on_data(self, frames: list[bytes]) -> None:
        try:
            event = self.exchange.receive(frames)
        except RemoteProtocolError as error:
            _log.warning("a data message of the broker was refused: %s", error)
            return
        self.handle(event)

    def _perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Send(message):
                    self._send_control(message)
                case ev.Note(level, text):
                    _log.log(getattr(logging, level.upper()), "%s", printable(text))
                case ev.Identify(run_id, epoch):
                    self.exchange.sender.identify(run_id, epoch)
                case ev.Redial():
                    self.wires.redial()
                case ev.OpenStreams():
                    self.exchange.open_streams(effect)
                case ev.Apply():
                    self.exchange.apply(effect)
                case ev.Install():
                    pass  # `_handle` has done it, under the lock.
                case ev.Drop(handles):
                    self.exchange.drop(handles)
                case ev.Resend(push_id, ranges):
                    self.exchange.resend(push_id, ranges)
                case ev.SettlePush(push_id, merged):
                    self.exchange.settle(push_id, merged=merged)
                case ev.Acknowledge(positions):
                    self.exchange.sender.acknowledge(positions, time.monotonic())
                case ev.SetRate(bits_per_s):
                    self.exchange.sender.set_rate(bits_per_s, time.monotonic())
                case ev.Fail(error):
                    self.error = error
                case ev.Left():
                    pass  # `finish` sees it in the session's connection.
                case ev.Adopt() | ev.Snapshot() | ev.SendFounding():
                    raise AssertionError("copies belong to the training thread")
