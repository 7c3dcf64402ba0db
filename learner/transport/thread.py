"""Runs the learner's background thread: sockets, session and data path behind one lock."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from narrows.learner.module import DeviceSnapshot
from narrows.learner.session import Identity, Session
from narrows.learner.session import events as ev
from narrows.learner.transport.connections import connections_of
from narrows.learner.transport.datapath import DataPath
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.sockets import LearnerSockets
from narrows.learner.transport.view import BackgroundView
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
from narrows.proto.layout import check_layout, split_layout
from narrows.proto.messages import ControlMessage, TokenLedger
from narrows.proto.terms import Ranges

_log = logging.getLogger("narrows.learner")

IDLE_S = 0.1
"""The thread looks for work at least so often."""

SNAPSHOT_S = 0.005
"""It looks so often while a snapshot is due. To be woken for it would cost the training thread
more: on a busy machine the thread that wakes another one loses its core to it."""

_AT_STEP = ev.BoundaryReached()
"""The boundary of an inner step, as opposed to one at which training waits."""


def _check_layout(identity: Identity) -> None:
    """Raises ConfigError for a layout that no broker takes."""
    try:
        check_layout(identity.layout)
        split_layout(identity.layout, identity.frozen_digest)
    except NarrowsError as error:
        raise ConfigError(
            f"this model cannot take part: {error.message}",
            expected=error.expected,
            got=error.got,
            remedy="stack tensors, shorten their names, or freeze what need not be trained",
        ) from error


class Background:
    """Owns the session. Other threads hand events in and read `view`; they touch nothing else.

    `changed` guards the session, the published copies and the replacing of `view`; it is notified
    when the session may have moved on.
    """

    def __init__(self, options: ClientOptions) -> None:
        identity = options.identity
        _check_layout(identity)
        self.session = Session(
            identity,
            # A generator of its own: the user's seed would make all learners say Hello at once.
            jitter=random.Random().random,
            contribute_after_steps=options.contribute_after_steps,
        )
        self.view = BackgroundView(self.session.view())
        self.wires = LearnerSockets(
            options.broker, options.name, identity.incarnation, options.key, options.key_file
        )
        self.data_path = DataPath(self.wires, options, post=self._post)
        self.changed = threading.Condition()
        #: Steps that the session has not counted yet: (tokens, loss, time in seconds).
        self._steps: deque[tuple[int, float | None, float]] = deque()
        self._actions: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="narrows-learner", daemon=True)

    def start(self) -> None:
        """Loads the kernels, then starts the thread: to load them later would hold training up."""
        if advice := uncached_advice():
            _log.warning("%s", advice)
        warm_up()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes everything. A second call does nothing."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            if self._thread.is_alive():
                self.wires.wake()
        if self._thread.is_alive():
            # Not under the lock, which the thread may need to end.
            self._thread.join()
        self.data_path.close()
        self.wires.close()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until the session may have moved on, at most `timeout_s`."""
        with self.changed:
            self.changed.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # A refusal says all where it is raised; a bug leaves its traceback here.
            if not isinstance(error, Refused):
                _log.exception("the exchange has failed")
            with self.changed:
                self.view = replace(self.view, error=error)
                self.changed.notify_all()

    def _loop(self) -> None:
        while not self._closed:
            self.wires.wait(min(self._idle_s(), self._until_pump_s()))
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
            # Without a session nobody has given us a share of the line.
            if self.view.session.online:
                self.data_path.pump(time.monotonic())
            self._look_at_connections()
        while self._actions:  # Among them the Bye.
            self._actions.popleft()()

    def _idle_s(self) -> float:
        """Seconds until the session wants to be woken; 0 if that is now."""
        view = self.view.session
        longest_s = SNAPSHOT_S if view.wants_boundary else IDLE_S
        if view.next_deadline is None:
            return longest_s
        return min(max(view.next_deadline - time.monotonic(), 0.0), longest_s)

    def _until_pump_s(self) -> float:
        """Seconds until something may leave, or is to be looked at; 0 if that is now."""
        now = time.monotonic()
        online = self.view.session.online
        deadline = self.data_path.sender.next_deadline(now) if online else None
        return IDLE_S if deadline is None else max(deadline - now, 0.0)

    def _look_at_connections(self) -> None:
        """Logs what the operator of the broker has to do, and shows a training thread that joins
        what gets through.

        The latter only until it has joined: later nobody asks.
        """
        now, handshakes = time.monotonic(), self.wires.handshakes
        if line := handshakes.line(now):
            _log.warning("%s", printable(line))
        if self.view.joined:
            return
        with self.changed:
            waits = bool(self.session.fragments.fetching())
            data = connections_of(self.wires, self.data_path, waits=waits)
            self.view = replace(self.view, data=data, obstacle=handshakes.error(now))
            if self.view.joined:
                self.changed.notify_all()

    def step(self, tokens: int, loss: float | None) -> tuple[list[ev.Copy], dict[int, F32]]:
        """For the training thread: counts an inner step; as `hand_over` if there is more to do.

        Most steps need no lock: the background counts them with its next event. To wait for a lock
        whose holder has lost its core would hold training up on a busy machine.
        """
        self._steps.append((tokens, loss, time.monotonic()))
        view = self.view
        if view.session.wants_boundary or view.error is not None:
            return self.hand_over(_AT_STEP)
        return [], {}

    def _handle(self, event: ev.Event) -> list[ev.Effect]:
        """Lets the session handle the steps so far, then `event`; renews the view.

        Call under the lock. Both threads come here, so that a boundary need not wait for the other
        one; the events are all that they hand to the session.
        """
        effects: list[ev.Effect] = []
        while self._steps:
            tokens, loss, at = self._steps.popleft()
            effects += self.session.handle(ev.StepTaken(tokens, loss, at_boundary=False), now=at)
        effects += self.session.handle(event, now=time.monotonic())
        errors = [effect.error for effect in effects if isinstance(effect, ev.Fail)]
        error = errors[0] if errors else self.view.error
        self.view = replace(self.view, session=self.session.view(), error=error)
        return effects

    def hand_over(self, event: ev.Event) -> tuple[list[ev.Copy], dict[int, F32]]:
        """For the training thread: handles its event and returns the effects that are its own,
        with the published copies as they are now; the others are performed in the background.

        Raises the error that ended the exchange: Refused, or that of a bug.
        """
        with self.changed:
            if self.view.error is not None:
                raise self.view.error
            effects = self._handle(event)
            published = dict(self.data_path.published)
        others = [e for e in effects if not isinstance(e, ev.Copy)]
        if others:
            self.later(lambda: self._perform(others), wake=event is not _AT_STEP)
        return [e for e in effects if isinstance(e, ev.Copy)], published

    def published(self) -> dict[int, F32]:
        """The published copy by fragment; the arrays never change."""
        with self.changed:
            return dict(self.data_path.published)

    def ledger(self) -> TokenLedger:
        """The tokens of this incarnation by their fate, over all fragments."""
        with self.changed:
            return self.session.fragments.ledger.total()

    def start_founding(self, fragment: Fragment, values: F32, ranges: Ranges) -> None:
        """For the training thread: version 0 is read; has it encoded and sent."""
        self.later(lambda: self.data_path.start_founding(fragment.index, values, ranges))

    def start_push(self, effect: ev.Snapshot, local: F32 | DeviceSnapshot, base: F32) -> None:
        """For the training thread: a snapshot is taken; has it encoded and sent."""

        def start() -> None:
            with self.changed:
                fragment = self.session.fragments.pushed(effect.push_id)
                push = fragment.push if fragment is not None else None
                # Its outcome may have come while it was copied; nobody would let go of it then.
                is_open = push is not None and push.is_open
            if is_open:
                self.data_path.start_push(effect, local, base)

        self.later(start, wake=False)

    def later(self, action: Callable[[], None], *, wake: bool = True) -> None:
        """Has the background thread run `action`; any thread may call it."""
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
        """For the background thread: handles an event and performs all its effects."""
        with self.changed:
            effects = self._handle(event)
            for effect in effects:
                if isinstance(effect, ev.Install):
                    # Under the lock: the next boundary may already be told to adopt it.
                    self.data_path.install(effect.fragment, effect.version)
            self.changed.notify_all()
        self._perform(effects)

    def receive_control(self, frame: bytes) -> None:
        """For the background thread: a control message came. Raises Refused for a broker that
        speaks another version of the protocol, if the learner has not joined yet."""
        self.data_path.sender.received(len(frame), time.monotonic())
        try:
            message = decode_control(frame)
        except RemoteProtocolError as error:
            _log.warning("a message of the broker was refused: %s", printable(str(error)))
            # A learner that trains waits for its own broker to come back to the address.
            if error.code is ErrorCode.PROTOCOL_VERSION and self.view.session.settings is None:
                raise Refused(
                    error.code,
                    error.message,
                    expected=error.expected,
                    got=error.got,
                    remedy=error.remedy,
                ) from error
            return
        self.handle(ev.Received(message))

    def _send_control(self, message: ControlMessage) -> None:
        frame = encode_control(message)
        if self.wires.send_control(frame):
            self.data_path.sender.charge(wire_bytes(len(frame)), time.monotonic())

    def _on_data(self, frames: list[bytes]) -> None:
        try:
            event = self.data_path.receive(frames)
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
                    self.data_path.sender.identify(run_id, epoch)
                case ev.Redial():
                    self.wires.redial()
                case ev.OpenStreams():
                    self.data_path.open_streams(effect)
                case ev.Apply():
                    self.data_path.apply(effect)
                case ev.Install():
                    pass  # `_handle` has done it, under the lock.
                case ev.Drop(handles):
                    self.data_path.drop(handles)
                case ev.Resend(push_id, ranges):
                    self.data_path.resend(push_id, ranges)
                case ev.SettlePush(push_id, merged):
                    self.data_path.settle(push_id, merged=merged)
                case ev.Acknowledge(positions):
                    self.data_path.sender.acknowledge(positions, time.monotonic())
                case ev.SetRate(bits_per_s):
                    self.data_path.sender.set_rate(bits_per_s, time.monotonic())
                case ev.Fail() | ev.Left():
                    pass  # The view shows it to the training thread.
                case ev.Adopt() | ev.Snapshot() | ev.SendFounding():
                    raise AssertionError("copies belong to the training thread")
