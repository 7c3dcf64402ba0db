"""What learners may send: the credit that their positions give, and their rates. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from narrows.broker.config import BrokerConfig, settings
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.bits import Need
from narrows.broker.syncer.founding import Founding
from narrows.broker.syncer.members import Member
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
    """Tells learners how far and how fast they may go on."""

    state: RunState
    founding: Founding

    def __post_init__(self) -> None:
        self.need = Need(self.state)

    def arrived(self, header: msg.Header, now: float) -> list[ev.Effect]:
        """Data has come: its sender learns how much, the sooner the more it is."""
        member = self.state.roster.get(header.learner)
        if member is None or member.incarnation != header.incarnation or not member.connected:
            return []
        self.state.roster.heard(member, now)
        if member.acknowledge_at is None:
            member.acknowledge_at = now + ACKNOWLEDGE_S
        if sum(member.received) - member.acknowledged >= ACKNOWLEDGE_BYTES:
            soon = member.acknowledged_at + ACKNOWLEDGE_SOON_S
            member.acknowledge_at = min(member.acknowledge_at, max(now, soon))
        return [self._progress(member, now)] if now >= member.acknowledge_at else []

    def advance(self, now: float) -> list[ev.Effect]:
        """Positions that are due, and rates that have changed."""
        due = [
            member
            for member in self.state.roster.connected()
            if member.acknowledge_at is not None and now >= member.acknowledge_at
        ]
        return [self._progress(member, now) for member in due] + self._divide(now)

    def next_deadline(self) -> float | None:
        """When the next positions are due."""
        members = self.state.roster.connected()
        times = [m.acknowledge_at for m in members if m.acknowledge_at is not None]
        return min(times, default=None)

    def told(self, member: Member, now: float) -> None:
        """A Beat with the positions has gone out."""
        member.acknowledged, member.acknowledge_at = sum(member.received), None
        member.acknowledged_at = now

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
        config = replace(self.state.config, wan=replace(config.wan, streams=streams))
        told = settings(config)
        # The bits of codec auto follow at the next look: till then they are what they were.
        before = self.state.settings
        self.state.set_config(
            config,
            structs.replace(told, push_bits=before.push_bits, publish_bits=before.publish_bits),
        )
        self.founding.cut_finer()
        self.need.forget()
        text = ", ".join(
            f"{key} = {format_bits_per_s(rate) if rate else 'no limit'}"
            for key, rate in rates.items()
        )
        effects += [ev.Note("info", f"read again: {text}"), self._rates_changed()]
        return effects + self._divide(now)

    def adapt(self) -> list[ev.Effect]:
        """Under codec auto the bits follow the budget; where they cannot, the operator is told."""
        effects: list[ev.Effect] = []
        told = self.need.affordable()
        if told != self.state.settings:
            self.state.settings = told
            text = f"{told.push_bits:.2f} up, {told.publish_bits:.2f} down"
            effects = [ev.Note("info", f"bits per parameter: {text}"), self._rates_changed()]
        return effects + self.need.warn()

    def _rates_changed(self) -> ev.RatesChanged:
        return ev.RatesChanged(self.state.config.wan, self.state.settings)

    def _progress(self, member: Member, now: float) -> ev.Effect:
        assert member.peer is not None
        self.told(member, now)
        return ev.Send(member.peer, msg.Progress(tuple(member.received)))

    def _divide(self, now: float) -> list[ev.Effect]:
        members = self.state.roster.connected()
        changed = self.state.shares.divide(members, self._senders(), now)
        return [self._beat(member, now) for member in changed]

    def _beat(self, member: Member, now: float) -> ev.Effect:
        assert member.peer is not None
        self.told(member, now)
        return ev.Send(member.peer, self.state.beat(member, now))

    def _senders(self) -> set[str]:
        """Learners with something to send: an unfinished push, or version 0."""
        names = {
            name
            for round_ in self.state.rounds.values()
            for name, push in round_.incoming.items()
            if not push.complete
        }
        return names if self.state.heads else {self.founding.founder}
