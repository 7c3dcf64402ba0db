"""A simulated broker that counts what its learners ask for, as one with keys does."""

from __future__ import annotations

from dataclasses import replace

from narrows.bench.sim.broker import SimulatedBroker
from narrows.bench.sim.line import Frames
from narrows.broker.process.turnstile import Turnstile
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.frames import decode_data
from narrows.proto.key_holder import KeyHolder


class GatedBroker(SimulatedBroker):
    """A simulated broker whose learners have a key each. A quota that is met fails the test."""

    passed = 0
    """Messages that were counted, in all lives of the broker."""

    def arm(self) -> None:
        if not hasattr(self, "turnstile"):
            self.turnstile = Turnstile(self.syncer.state, self._refuse, self._complain)
            queued = self.turnstile.queued_state
            self.downlink._queued_state = queued
            self.holders: dict[bytes, KeyHolder] = {}
        super().arm()

    def _refuse(self, peer: bytes, message: msg.ControlMessage) -> None:
        raise AssertionError(f"{self.clock.now}: {peer!r} is told {message}")

    def _complain(self, note: ev.Note) -> None:
        raise AssertionError(f"{self.clock.now}: {note.text}")

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.Received):
            event = replace(event, holder=self.holders.get(event.peer))
        before = self.syncer.state.tally.faults
        super().handle(event)
        if faults := self.syncer.state.tally.faults - before:
            self.turnstile.refused_by(event, faults, self.clock.now)

    def receive(self, peer: bytes, message: msg.ControlMessage, address: str, size: int) -> None:
        if isinstance(message, msg.Hello):
            self.holders[peer] = KeyHolder(message.name)
        holder = self.holders.get(peer)
        assert self.turnstile.control(peer, holder, [bytes(size)], self.clock.now)
        assert self.turnstile.message(peer, holder, message, self.clock.now)
        GatedBroker.passed += holder is not None
        super().receive(peer, message, address, size)

    def receive_data(self, frames: Frames) -> None:
        holder = KeyHolder(decode_data(frames)[0].learner)
        assert self.turnstile.data(holder, list(frames), self.clock.now)
        GatedBroker.passed += 1
        super().receive_data(frames)

    def _ignore(self, fate: ev.LogFate) -> None:
        self.turnstile.performed(fate, self.clock.now)
