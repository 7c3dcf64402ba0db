"""Many senders behind one line: a total rate, fragments before states, and fair turns. [pure]"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from narrows.proto.flow.budget import Budget
from narrows.proto.flow.lanes import Lane, StateDebt
from narrows.proto.flow.sender import Datagram, Sender


@dataclass
class _Turn:
    """The place of one sender among the others."""

    served_bytes: int = 0
    """On a scale that all senders share: the sender with the lowest is next."""
    is_active: bool = False
    """It had something that might leave when the hub looked last."""


class Hub:
    """Serves senders by the name of their learner; rates are in bit/s, 0: no limit.

    The budget of a learner, and the positions of its process, survive its sessions.
    """

    def __init__(self, *, total: float, each: float) -> None:
        self.total = Budget(total)
        self.senders: dict[str, Sender] = {}
        self._each_bits_per_s = each
        self._before: dict[str, Sender] = {}
        """The last sender to each learner, lost ones too."""
        self._turns: dict[str, _Turn] = {}
        self._served_bytes = 0
        """Place of the sender that was served last: a newcomer begins there."""
        self._debt = StateDebt()
        """One debt for all: a sender with a debt of its own would hold back its fragments while
        the others' states are served."""

    def add(self, sender: Sender) -> Sender | None:
        """A session begins; returns the last sender to the same learner."""
        before = self._before.get(sender.learner)
        sender.budget = before.budget if before else Budget(self._each_bits_per_s)
        if before is not None and before.incarnation == sender.incarnation:
            sender.start_at(before.positions)
        sender.share_debt(self._debt)
        self.senders[sender.learner] = self._before[sender.learner] = sender
        self._turns[sender.learner] = _Turn()
        return before

    def remove(self, learner: str) -> None:
        """A session is over; another one may follow."""
        sender = self.senders.pop(learner, None)
        if sender is not None:
            sender.discard(lambda parcel: True)
            del self._turns[learner]

    def erase(self, learner: str) -> Sender | None:
        """A learner is not expected back: what it was sent counts no more."""
        self.remove(learner)
        return self._before.pop(learner, None)

    def set_rates(self, *, total: float, each: float, now: float) -> None:
        """The rates of the line and of each learner from now on."""
        self.total.set_rate(total, now)
        self._each_bits_per_s = each
        for sender in self._before.values():
            sender.set_rate(each, now)

    def charge(self, learner: str, size_bytes: float, now: float) -> None:
        """Bytes to a learner that leave without waiting, such as control messages."""
        self.total.charge(size_bytes, now)
        if (sender := self.senders.get(learner)) is not None:
            sender.charge(size_bytes, now)

    def received(self, learner: str, size_bytes: int, now: float) -> None:
        """A message of a learner has come: TCP acknowledges it on the line that we send on."""
        self.total.receive(size_bytes, now)
        if (sender := self.senders.get(learner)) is not None:
            sender.received(size_bytes, now)

    def reconnect(self, learner: str, stream: int, now: float) -> None:
        """A stream of a learner has a new connection; see Sender.reconnect."""
        self.total.charge(self.senders[learner].reconnect(stream, now), now)

    def due(self, now: float, *, most: int) -> Iterator[tuple[str, Datagram]]:
        """At most `most` datagrams that may leave now, with the learner that each is for; each is
        charged when it is yielded."""
        for sender in self.senders.values():
            self.total.charge(sender.renew_stalled(now), now)
        waiting = self._waiting()
        for _ in range(most):
            if not (waiting and self.total.is_open(now)):
                break
            name = min(waiting, key=self._place)
            datagram = self._take(waiting[name], now)
            if datagram is None:
                del waiting[name]
            else:
                yield name, datagram
        self._rest()

    def opens_at(self, now: float) -> float | None:
        """When the rates let something go; None if nothing waits, or only for credit."""
        opens = [each.opens_at(now) for each in self.senders.values()]
        first = min((time for time in opens if time is not None), default=None)
        return None if first is None else max(first, self.total.opens_at(now))

    def next_deadline(self, now: float) -> float | None:
        """When `due` is to be called even if nothing else happens; None: never."""
        times = [self.opens_at(now), *(each.looks_at(now) for each in self.senders.values())]
        return min((time for time in times if time is not None), default=None)

    def _waiting(self) -> dict[str, Sender]:
        """Senders with something that might leave, by name. A sender that had nothing, or no
        credit, when the hub looked last does not get what it missed."""
        waiting: dict[str, Sender] = {}
        for name, sender in self.senders.items():
            turn = self._turns[name]
            if sender.is_waiting:
                waiting[name] = sender
            if not turn.is_active:
                turn.served_bytes = max(turn.served_bytes, self._served_bytes)
            turn.is_active = name in waiting
        if not any(sender.holds_states for sender in self.senders.values()):
            self._debt.forget()
        return waiting

    def _place(self, name: str) -> tuple[int, int]:
        """The lowest is next: states that are owed their turn, fragments, other states; among
        equals the one who has had least."""
        sender, served_bytes = self.senders[name], self._turns[name].served_bytes
        if sender.next_lane is Lane.FRAGMENT:
            return 1, served_bytes
        return 0 if self._debt.is_due(sender.next_bytes) else 2, served_bytes

    def _take(self, sender: Sender, now: float) -> Datagram | None:
        """None if this sender's rate or credit lets nothing go now."""
        if not sender.budget.is_open(now):
            return None
        turn = self._turns[sender.learner]
        datagram = sender.take(now)
        if datagram is None:
            turn.is_active = False
            return None
        size_bytes = datagram.wire_bytes
        self.total.send(size_bytes, now)
        self._served_bytes = turn.served_bytes
        turn.served_bytes += size_bytes
        return datagram

    def _rest(self) -> None:
        for sender in self.senders.values():
            sender.rest()
        if all(sender.next_lane is None for sender in self.senders.values()):
            self.total.pause()
