"""Passes messages of key holders within their quotas. No decisions about the run.

A message beyond a quota is dropped, most of them before they are decoded. The holder is refused
once per minute and kind, with the remedy, and the operator's log has a line. All is in order again
as soon as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from narrows.broker.syncer import Excess, Quotas, RunState, refusal
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow import chunks_max
from narrows.proto.key_holder import KeyHolder
from narrows.proto.quotas import RETURN_COST, Ask
from narrows.proto.units import counted

REMEDIES: Final[Mapping[Ask, str]] = {
    Ask.JOINS: "a process seems to be started again and again: look into its log",
    Ask.CONTROL: "only narrows itself should speak with this key: stop what else does",
    Ask.STATUS: "ask for the status less often",
    Ask.STATES: "the model was sent whole too often: stop what asks for it again and again",
    Ask.REFUSED: "look into the log for the reason of the refusals, and mend that first",
    Ask.CHUNKS: "only narrows itself should send data with this key: stop what else does",
    Ask.BYTES: "keep to the rate that the broker tells",
    Ask.ENROLMENTS: "a key is handed over once in weeks: stop what does it again and again",
}

assert REMEDIES.keys() == set(Ask), "each quota has a remedy"


class Turnstile:
    """Counts what the holders of keys ask for. Without keys everything passes."""

    def __init__(
        self,
        run: RunState,
        send: Callable[[bytes, msg.ControlMessage], None],
        note: Callable[[ev.Note], None],
    ) -> None:
        self.quotas = Quotas(run.settings.fragment_count)
        self._run, self._send, self._note = run, send, note
        self._cut: tuple[int, int] = (0, 0)

    # Before a message is decoded.

    def control(
        self, peer: bytes, holder: KeyHolder | None, frames: list[bytes], now: float
    ) -> bool:
        """A control message has come; False: drop it."""
        if holder is None:
            return True
        self._follow()
        excess = self.quotas.control(holder, sum(map(len, frames)), now)
        return self._passes(holder, excess, peer)

    def data(self, holder: KeyHolder | None, frames: list[bytes], now: float) -> bool:
        """A data message has come; False: drop it."""
        if holder is None:
            return True
        self._follow()
        size_bytes = sum(map(len, frames))
        excess = self.quotas.data(holder, size_bytes, self._bits_per_s(holder), now)
        return self._passes(holder, excess, self._peer(holder))

    # Once it is decoded.

    def message(
        self, peer: bytes, holder: KeyHolder | None, message: msg.ControlMessage, now: float
    ) -> bool:
        """The message is this one; False: drop it."""
        if holder is None:
            return True
        match message:
            case msg.Hello():
                excess = self._hello(peer, holder, message, now)
            case msg.AskStatus():
                excess = self.quotas.take(holder, Ask.STATUS, 1.0, now)
            case msg.Fetch(fragment=fragment) | msg.Missing(fragment=fragment):
                excess = self.quotas.look(holder, Ask.STATES, self._part(fragment), now)
            case msg.Enrol():
                excess = self.quotas.take(holder, Ask.ENROLMENTS, 1.0, now)
            case _:
                return True
        if excess is not None and excess.kind is not Ask.STATES:
            # Whoever goes on asking is paused at last. States are asked for by honest repair.
            self.quotas.charge(holder, Ask.REFUSED, 1.0, now)
        return self._passes(holder, excess, peer)

    def _hello(self, peer: bytes, holder: KeyHolder, hello: msg.Hello, now: float) -> Excess | None:
        member = self._run.roster.get(hello.name)
        returns = member is not None and member.incarnation == hello.incarnation
        if member is not None and returns and member.presence.peer == peer:
            return None  # It is repeated, not new.
        return self.quotas.look(holder, Ask.JOINS, RETURN_COST if returns else 1.0, now)

    # What it has come to.

    def performed(self, fate: ev.LogFate, now: float) -> None:
        """Charges a join: a contested name may be given to a newcomer long after its Hello."""
        if fate.what == "joined":
            amount = RETURN_COST if fate.reason == "is back" else 1.0
            self._charge(self._holder(fate.learner), Ask.JOINS, amount, now)

    def queued_state(self, learner: str, elements: int, now: float) -> None:
        """So many elements of states were queued for a learner."""
        total = sum(fragment.elements for fragment in self._run.table)
        self._charge(self._holder(learner), Ask.STATES, elements / total, now)

    def refused(self, holder: KeyHolder | None, count: int, now: float) -> None:
        """So many messages of a holder were refused."""
        self._charge(holder, Ask.REFUSED, float(count), now)

    def refused_by(self, event: ev.Event, count: int, now: float) -> None:
        """The syncer has refused what came with this event."""
        match event:
            case ev.Received(holder=holder):
                self.refused(holder, count, now)
            case ev.ChunkArrived(header=header) | ev.ChunkDamaged(header=header):
                self.refused(self._holder(header.learner), count, now)
            case _:
                pass

    # Parts.

    def _charge(self, holder: KeyHolder | None, kind: Ask, amount: float, now: float) -> None:
        if holder is not None:
            self.quotas.charge(holder, kind, amount, now)

    def _holder(self, learner: str) -> KeyHolder | None:
        member = self._run.roster.get(learner)
        return member.presence.holder if member is not None else None

    def _follow(self) -> None:
        """Lets the quotas follow the run: its versions, and the cut of its model."""
        run = self._run
        self.quotas.versions = max(self.quotas.versions, run.version_sum)
        cut = len(run.table), run.least_chunk_elements
        if cut != self._cut:
            self._cut = cut
            chunk = run.least_chunk_elements
            self.quotas.cut([chunks_max(each.elements, chunk) for each in run.table])

    def _part(self, fragment: int) -> float:
        """Part of the model that a fragment is."""
        table = self._run.table
        if fragment >= len(table):
            return 0.0
        return table[fragment].elements / sum(each.elements for each in table)

    def _bits_per_s(self, holder: KeyHolder) -> float:
        """Rate that a holder was told for all that it speaks for; 0: no limit."""
        names = holder.carries or (holder.name,)
        members = [member for name in names if (member := self._run.roster.get(name)) is not None]
        rates = [member.charged_bits_per_s for member in members]
        return sum(rates) if all(rates) else 0.0

    def _peer(self, holder: KeyHolder) -> bytes | None:
        """The control connection of the learner that a holder is."""
        member = self._run.roster.get(holder.name) if holder.speaks_for(holder.name) else None
        return member.presence.peer if member is not None else None

    def _passes(self, holder: KeyHolder, excess: Excess | None, peer: bytes | None) -> bool:
        if excess is None:
            return True
        if excess.dropped:
            what = f"the key {holder.account!r} has used up its quota of {excess.kind}"
            text = f"{what}; dropped so far for it: {counted(excess.dropped, 'message')}"
            self._note(ev.Note("warning", text, about=f"quota {excess.kind} {holder.account}"))
            self._run.tally.refuse(ErrorCode.QUOTA)
            if peer is not None:
                error = RemoteProtocolError(
                    ErrorCode.QUOTA,
                    what,
                    expected="fewer; the broker drops messages until there is room again",
                    remedy=REMEDIES[excess.kind],
                )
                self._send(peer, refusal(error))
        return False
