"""Permission to send: acknowledged uplink positions, and the learners' rates. [pure]

This module alone writes `Member.credit`; `rates` sets the rates that it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.shared_settings import settings
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.bits import Need
from narrows.broker.syncer.founding import Founding
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.run import RunState
from narrows.proto import messages as msg
from narrows.proto.config import flatten
from narrows.proto.flow import ACKNOWLEDGE_BYTES
from narrows.proto.timing import ACKNOWLEDGE_S, ACKNOWLEDGE_SOON_S
from narrows.proto.units import format_bits_per_s

RATES = ("wan.up", "wan.down", "wan.total_up", "wan.total_down")
"""Settings that may change while the broker runs."""

NOTHING_NEW = "read again: the rates are what they were (those given as flags win over the file)"


@dataclass
class Allowance:
    """Lets learners know how far and how fast they may go on."""

    state: RunState
    founding: Founding

    def __post_init__(self) -> None:
        self.need = Need(self.state)

    def arrived(self, header: msg.Header, size_bytes: int, now: float) -> list[ev.Effect]:
        """Data has come: acknowledges it at once or later, the sooner the more it is."""
        member = self.state.roster.get(header.learner)
        if member is None or member.incarnation != header.incarnation or not member.connected:
            return []
        self.state.shares.arrive(member.name, size_bytes, now)
        # Data is a sign of life: control messages may wait behind it on a narrow line.
        self.state.roster.heard(member, now)
        if member.credit.due_at is None:
            member.credit.due_at = now + ACKNOWLEDGE_S
        if sum(member.uplink.positions) - member.credit.acknowledged_bytes >= ACKNOWLEDGE_BYTES:
            # Much data comes fast: an early acknowledgement keeps the window open, but not one per
            # chunk, which would load the line back.
            soon = member.credit.acknowledged_at + ACKNOWLEDGE_SOON_S
            member.credit.due_at = min(member.credit.due_at, max(now, soon))
        return [self._progress(member, now)] if now >= member.credit.due_at else []

    def advance(self, now: float) -> list[ev.Effect]:
        """Sends the acknowledgements that are due, and the rates that have changed."""
        due = [
            member
            for member in self.state.roster.connected()
            if member.credit.due_at is not None and now >= member.credit.due_at
        ]
        return [self._progress(member, now) for member in due] + self._divide(now)

    def next_deadline(self) -> float | None:
        """Time at which the next acknowledgement is due."""
        members = self.state.roster.connected()
        times = [m.credit.due_at for m in members if m.credit.due_at is not None]
        return min(times, default=None)

    def acknowledged(self, member: Member, now: float) -> None:
        """Notes that a Beat or Progress with the positions has gone out."""
        member.credit.acknowledged_bytes, member.credit.due_at = sum(member.uplink.positions), None
        assert now >= member.credit.acknowledged_at
        member.credit.acknowledged_at = now

    def reload(self, config: BrokerConfig, now: float) -> list[ev.Effect]:
        """Takes the rates of a configuration that was read again; names what needs a restart."""
        present, after = flatten(self.state.config), flatten(config)
        changed = [key for key in after if after[key] != present.get(key)]
        rates = {key: float(str(after[key])) for key in changed if key in RATES}
        effects: list[ev.Effect] = []
        if others := [key for key in changed if key not in RATES]:
            names = ", ".join(others)
            text = f"read again; {names} stay as they are until the broker is started again"
            effects.append(ev.Note("warning", text))
        if not rates:
            return [*effects, ev.Note("info", NOTHING_NEW)]
        streams = self.state.config.wan.streams
        # The number of streams stays: learners have opened theirs.
        config = replace(self.state.config, wan=replace(config.wan, streams=streams))
        renewed = settings(config)
        # The bits of codec auto follow at the next look. Until then they stay.
        before = self.state.settings
        self.state.set_config(
            config,
            structs.replace(renewed, push_bits=before.push_bits, publish_bits=before.publish_bits),
        )
        # Slower lines get smaller messages, so transfers that have begun may be cut finer.
        self.founding.cut_finer()
        self.need.forget()
        text = ", ".join(
            f"{key} = {format_bits_per_s(rate) if rate else 'no limit'}"
            for key, rate in rates.items()
        )
        effects += [ev.Note("info", f"read again: {text}"), self._rates_changed()]
        return effects + self._divide(now)

    def adapt(self) -> list[ev.Effect]:
        """Lets the bits of codec auto follow the budget; warns where they cannot."""
        effects: list[ev.Effect] = []
        affordable = self.need.affordable()
        # A Welcome brings the new bits to the learners, RatesChanged to the publications.
        if affordable != self.state.settings:
            self.state.settings = affordable
            text = f"{affordable.push_bits:.2f} up, {affordable.publish_bits:.2f} down"
            effects = [ev.Note("info", f"bits per parameter: {text}"), self._rates_changed()]
        return effects + self.need.warn()

    def _rates_changed(self) -> ev.RatesChanged:
        return ev.RatesChanged(self.state.config.wan, self.state.settings)

    def _progress(self, member: Member, now: float) -> ev.Effect:
        # Progress is shorter than a Beat: it is sent many times a second while data comes.
        self.acknowledged(member, now)
        return ev.Send(member.peer, msg.Progress(tuple(member.uplink.positions)))

    def _divide(self, now: float) -> list[ev.Effect]:
        members = self.state.roster.connected()
        changed = self.state.shares.divide(members, self._senders(), now)
        return [self._beat(member, now) for member in changed]

    def _beat(self, member: Member, now: float) -> ev.Effect:
        self.acknowledged(member, now)
        return ev.Send(member.peer, self.state.beat(member, now))

    def _senders(self) -> set[str]:
        """Learners with something to send: an unfinished push, or version 0."""
        names = {
            name
            for round_ in self.state.rounds.values()
            for name, incoming in round_.incoming.items()
            if not incoming.complete
        }
        return names if self.state.heads else {self.state.founder}
