"""The broker's shell: one thread with a poll loop, a small pool for slow work, no decisions.

Sockets, clocks and threads live here; the syncer decides. Slow work (decode, merge, encode, disk)
runs on the pool and comes back as an event.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import zmq

from narrows.broker.config import BrokerConfig
from narrows.broker.process.crash_points import crash_points
from narrows.broker.process.downlink import Downlink
from narrows.broker.process.event_records import merge_record
from narrows.broker.process.notes import Notes
from narrows.broker.process.origin import MessageOrigin
from narrows.broker.process.reception import Reception
from narrows.broker.process.ring_keeper import RingKeeper, enrol
from narrows.broker.process.sockets import FRAMES_PER_TURN, BrokerSockets, Traffic
from narrows.broker.process.turnstile import Turnstile
from narrows.broker.process.workers import Jobs
from narrows.broker.storage import Commits, begin_epoch, check_initial, open_state_dir
from narrows.broker.syncer import events as ev
from narrows.broker.syncer import status_for, status_of
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.flow import wire_bytes
from narrows.proto.frames import encode_control
from narrows.proto.shell import EventFile, WakePipe

_log = logging.getLogger("narrows.broker")

TURNS_BEHIND_MAX = 16
"""Turns of the loop that deadlines wait while there is more to read: a peer may never stop
sending."""


class Service:
    """One broker process: sockets and state directory around one syncer."""

    def __init__(self, config: BrokerConfig, *, events: Path | None = None) -> None:
        """Binds, locks the state directory, loads the newest checkpoint, begins a durable epoch.

        Raises NarrowsError with the remedy if any of it cannot be done.
        """
        with ExitStack() as undo:
            if config.broker.init:
                check_initial(Path(config.broker.init))
            self.wires = BrokerSockets.bind(
                config.broker.listen,
                uplink_port=config.broker.uplink_port,
                downlink_port=config.broker.downlink_port,
                insecure=config.broker.insecure,
                keys=config.security.keys,
                streams=config.wan.streams,
                told=self._connection_cut,
            )
            undo.callback(self.wires.close)
            self.state_dir = open_state_dir(config)
            undo.callback(self.state_dir.close)
            begun = begin_epoch(
                config,
                self.state_dir,
                now=time.monotonic(),
                uplink_port=self.wires.uplink_port,
                downlink_port=self.wires.downlink_port,
            )
            self.syncer = begun.syncer
            undo.callback(begun.close)
            self.notes = Notes(EventFile(events, _log) if events else None)
            undo.pop_all()
        self.traffic: dict[str, Traffic] = {}
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = WakePipe()
        self._finished: str | None = None
        self._closed = False
        self._unjudged = False
        self._turns_behind = 0
        self._reach = crash_points(os.environ)
        run = self.syncer.state
        self.turnstile = Turnstile(run, self._send, self.notes.note)
        self.reception = Reception(run, self._send, self.turnstile, self.notes.note)
        self.keeper = None
        if self.wires.gate is not None:
            self.keeper = RingKeeper(
                Path(config.security.keys),
                self.wires.gate,
                self.wires.connections,
                self._later,
                self._drop_keyless,
            )
        self.commits = None
        if begun.journal is not None:
            serve_on = config.broker.journal_errors == "serve"
            self.commits = Commits(
                begun.journal, run, self._post, serve_on=serve_on, reach=self._reach
            )
            self.notes.journal = self.commits
        self.jobs = Jobs(
            config, run, self.state_dir, self._post, self.commits, begun, reach=self._reach
        )
        self.downlink = Downlink(
            self.wires,
            run,
            self.traffic,
            self.jobs.encode_state,
            self.notes.warn,
            self.turnstile.queued_state,
        )

    # The loop.

    def run(self) -> str:
        """Serves until the run has ended or `stop` was called; returns why."""
        poller, hub = zmq.Poller(), self.downlink.hub
        for source in self.wires.sources:
            poller.register(source, zmq.POLLIN)
        poller.register(self._wake.source, zmq.POLLIN)
        try:
            while self._finished is None:
                deadline = self.syncer.next_deadline()
                now = time.monotonic()
                scan_at = self.wires.connections.scan_at
                times = [t for t in (deadline, hub.next_deadline(now), scan_at) if t is not None]
                wait_s = max(0.0, min(times, default=now + 1.0) - now)
                poller.poll(min(math.ceil(wait_s * 1000), 1000))
                self._turn()
            return self._finished
        finally:
            self._close()

    @property
    def hangs(self) -> bool:
        """True if a disk that does not answer keeps a thread busy: only `os._exit` helps then."""
        return self.commits is not None and self.commits.hangs

    def stop(self, reason: str) -> None:
        """Asks the loop to end in order; safe from signal handlers and other threads."""
        self._later(lambda: self._handle_event(ev.StopRequested(reason)))

    def reload(self, config: BrokerConfig) -> None:
        """Takes the rates of a configuration that was read again, and reads the key ring again;
        safe from signal handlers."""
        if self.keeper is not None:
            self.keeper.reread()
        self._later(lambda: self._handle_event(ev.ConfigRead(config)))

    def _turn(self) -> None:
        self._wake.drain()
        while not self._results.empty():
            self._results.get()()
        self.wires.attend(time.monotonic())
        if self.keeper is not None:
            self.keeper.look(time.monotonic())
        self._turns_behind = 0 if self._read() else self._turns_behind + 1
        if topics := self.wires.read_subscriptions(self.reception.subscription):
            self.downlink.reconnect(topics, time.monotonic())
        if self._turns_behind in (0, TURNS_BEHIND_MAX):
            self._turns_behind = 0
            self._judge()
        self.downlink.pump(time.monotonic())

    def _read(self) -> bool:
        """Reads what has arrived, a bounded number of messages; True if that was all."""
        drained = 0
        for _ in range(FRAMES_PER_TURN):
            received = self.wires.receive_control()
            if received is None:
                drained += 1
                break
            self._on_control(*received)
        for _ in range(FRAMES_PER_TURN):
            data = self.wires.receive_data()
            if data is None:
                drained += 1
                break
            self._on_data(*data)
        return drained == 2 and not self.wires.is_behind

    def _judge(self) -> None:
        """Lets the syncer see the time, now that it knows what has arrived."""
        deadline, now = self.syncer.next_deadline(), time.monotonic()
        if self._unjudged or (deadline is not None and now >= deadline):
            self._unjudged = False
            for effect in self.syncer.handle(ev.DeadlineReached(), now=now):
                self._perform(effect)

    def _later(self, action: Callable[[], None]) -> None:
        """Has `action` run on the loop's thread."""
        self._results.put(action)
        if not self._closed:
            self._wake.wake()

    def _post(self, work: Callable[[], ev.Event | None]) -> None:
        """Runs `work` on the loop's thread and handles the event that it returns."""

        def action() -> None:
            event = work()
            if event is not None:
                self._handle_event(event)

        self._later(action)

    def _on_control(self, peer: bytes, origin: MessageOrigin, frames: list[bytes]) -> None:
        message = self.reception.control(peer, origin, frames)
        if message is None:
            return
        if isinstance(message, msg.AskStatus):
            status = status_of(self.syncer, self.traffic, time.monotonic())
            self._send(peer, status_for(origin.holder, status))
            return
        if isinstance(message, msg.Enrol):
            enrol(self.keeper, origin, message, partial(self._send, peer), self.reception.refuse)
            return
        member = self.syncer.state.roster.by_peer(peer)
        sent = self.downlink.sent(member.name) if member is not None else ()
        self._handle_event(ev.Received(peer, message, origin.address, origin.holder, sent))
        member = self.syncer.state.roster.by_peer(peer)
        if member is not None:
            self._received_from(member.name, sum(map(len, frames)))

    def _drop_keyless(self) -> None:
        """Ends the sessions of members whose key is gone, so that nobody waits for them."""
        gate = self.wires.gate
        for member in self.syncer.state.roster.connected():
            holder = member.presence.holder
            if gate is not None and holder is not None and not gate.has(holder):
                self._handle_event(ev.PeerLost(member.peer))

    def _on_data(self, origin: MessageOrigin, frames: list[bytes]) -> None:
        header = self.reception.data(origin, frames)
        if header is None:
            return
        size_bytes = sum(map(len, frames))
        if self.syncer.state.roster.get(header.learner) is not None:
            self._received_from(header.learner, size_bytes)
        self._reach("received")
        self._handle_event(ev.ChunkArrived(header, self.jobs.keep(frames[2]), size_bytes))

    def _received_from(self, learner: str, size_bytes: int) -> None:
        self.traffic.setdefault(learner, Traffic()).up_bytes += size_bytes
        self.downlink.hub.received(learner, size_bytes, time.monotonic())

    def _handle_event(self, event: ev.Event) -> None:
        """Lets the syncer decide; what it refuses is charged to the sender."""
        tally = self.syncer.state.tally
        self._unjudged, faults = True, tally.faults
        for effect in self.syncer.handle(event, now=time.monotonic(), more=True):
            self._perform(effect)
        if tally.faults > faults:
            self.turnstile.refused_by(event, tally.faults - faults, time.monotonic())

    # Effects.

    def _perform(self, effect: ev.Effect) -> None:
        run = self.syncer.state
        match effect:
            case ev.Send(peer, message):
                self._send(peer, message)
            case ev.Note():
                self.notes.note(effect)
            case ev.Unpack(header, handle):
                self.jobs.unpack(header, handle)
            case ev.Drop(handles):
                self.jobs.drop(handles)
            case ev.Found():
                self.jobs.found(effect)
            case ev.StartMerge():
                self.jobs.merge(
                    effect, lambda outcome: self.notes.record(merge_record(run, effect, outcome))
                )
            case ev.Publish():
                assert self.jobs.model is not None
                self.downlink.publish(effect, self.jobs.model, time.monotonic())
                self._reach("published")
            case ev.Admit(learner, incarnation):
                self.downlink.admit(learner, incarnation)
            case ev.Acknowledge(learner, positions):
                self.downlink.acknowledge(learner, positions, time.monotonic())
            case ev.RatesChanged(wan, settings):
                if self.jobs.model is not None:
                    self.jobs.model.follow(settings)
                self.downlink.set_rates(wan, time.monotonic())
            case ev.Forget(learner):
                self.downlink.forget(learner)
            case ev.Erase(learner):
                self._erase(learner)
            case ev.LogFate():
                self.notes.fate(effect)
                self.turnstile.performed(effect, time.monotonic())
            case ev.WriteCheckpoint():
                self.jobs.save()
            case ev.Finish(reason):
                self._finished = reason

    def _erase(self, learner: str) -> None:
        self.downlink.erase(learner)
        if (entry := self.traffic.pop(learner, None)) is not None:
            total = self.traffic.setdefault("", Traffic())  # No learner has this name.
            total.up_bytes += entry.up_bytes
            total.down_bytes += entry.down_bytes

    def _send(self, peer: bytes, message: msg.ControlMessage) -> None:
        frame = encode_control(message)
        member = self.syncer.state.roster.by_peer(peer)
        if member is not None:
            self.traffic.setdefault(member.name, Traffic()).down_bytes += len(frame)
            self.downlink.hub.charge(member.name, wire_bytes(len(frame)), time.monotonic())
        if not self.wires.send_control(peer, frame) and member is not None:
            # Not from inside the effects of another event: the syncer must finish that one.
            self._later(lambda: self._handle_event(ev.PeerLost(peer)))

    def _connection_cut(self, code: ErrorCode, text: str) -> None:
        """Counts a connection that was cut; `text` is empty if its cause was named before."""
        self.syncer.state.tally.refuse(code)
        if text:
            self.notes.warn(text)

    def _close(self) -> None:
        self.jobs.close()
        if self.keeper is not None:
            self.keeper.close()
        final = status_of(self.syncer, self.traffic, time.monotonic())
        self.notes.record({"event": "final", "status": json.loads(msgspec.json.encode(final))})
        self.wires.close()
        self.state_dir.close()
        self._closed = True  # A signal may still come.
        self._wake.close()
        self.notes.close()
