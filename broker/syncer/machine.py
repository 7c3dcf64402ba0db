"""The syncer: leads each event to the module that decides it. Pure.

After each event it looks at everything that may have become due: who is a member, which rounds
begin, are merged and exist, and whether the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import Ending
from narrows.broker.syncer.joining import Joining
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.rounds import Rounds
from narrows.broker.syncer.state import State, fault
from narrows.broker.syncer.status import status, warn_of_silence
from narrows.proto import messages as msg
from narrows.proto.errors import NarrowsError, RemoteProtocolError, short
from narrows.proto.timing import BEAT_S
from narrows.proto.wire import speaks_for

LOST_S: Final = 30.0
"""A learner that was not heard for this long loses its connection and its share of the rates."""

STOOD_STILL_S: Final = 1.0
"""The broker itself has stood still (SIGSTOP, a sleeping machine) if it is called this much later
than the next Beat was due."""

PAUSE_S_MIN: Final = 1e-3
"""Least time to the next deadline, so that rounding never makes the host's loop spin."""


class Syncer:
    """One life of the broker, as decisions. Times are seconds of one monotonic clock.

    Every event but those of single chunks ends with `advance(now)`. Bad input from a peer raises
    nothing: it is refused with an effect.
    """

    def __init__(
        self,
        config: BrokerConfig,
        epoch: str,
        run_id: str,
        now: float,
        *,
        resumed: ev.Resumed | None,
        published_digest: Callable[[int, int], int | None],
        newest_push: Callable[[str, int], int],
    ) -> None:
        """`published_digest` and `newest_push` ask the store, as their fields in `State` say."""
        store = published_digest, newest_push
        self.state = state = State(config, epoch, run_id, now, resumed, *store)
        self.epoch, self.effects = epoch, state.effects
        self._pushes = Pushes(state)
        self._joining = Joining(state, self._pushes)
        self._ending = Ending(state, began_at=now)
        self._rounds = Rounds(state, self._pushes, self._ending, launched_at=now)
        self._advanced_at = now
        self._wake_at = now + BEAT_S
        # A phase is not durable before the run has ended. Learners must hear of the end in their
        # first Welcome: who is told `running` and has nothing left to push leaves for good.
        self._ending.reach_goal(now)

    # What the host reads.

    @property
    def run_tokens(self) -> int:
        return self.state.clock.run_tokens

    def live(self, now: float) -> list[str]:
        """Names of the learners that rounds wait for, for the events file."""
        return sorted(member.name for member in self.state.members.awaited(now))

    def status(self, now: float) -> dict[str, object]:
        """The map of a Status message; the host adds what its sockets know."""
        return status(self.state, self._joining, self._rounds, self._ending, now)

    # Control messages.

    def control(self, peer: str, site: str | None, message: msg.ControlMessage, now: float) -> None:
        """A decoded control message of a connection, whose key may speak for `site` (None: no
        keys)."""
        self._notice(now)
        member = self.state.members.by_peer.get(peer)
        if member is not None and site is not None and not speaks_for(site, member.name):
            # A peer chooses the name of its connection, and may choose one that another had.
            member = None
        try:
            if isinstance(message, msg.Hello):
                self._joining.hello(peer, site, message, now)
            elif isinstance(message, msg.AskStatus):
                self.effects.append(ev.Send(peer, msg.Status(self.status(now))))
            elif member is not None:
                member.heard_at = now
                self._of_member(member, message, now)
            elif not isinstance(message, msg.Bye):
                reason = "this life of the broker has not met you: say Hello"
                self.effects.append(ev.Send(peer, msg.Bye(reason)))
        except RemoteProtocolError as error:
            name = message.name if isinstance(message, msg.Hello) else ""
            self.state.refuse(peer, error, name=name)
        self.advance(now)

    def _of_member(self, member: Member, message: msg.ControlMessage, now: float) -> None:
        """Raises RemoteProtocolError for what a learner may not say."""
        state = self.state
        match message:
            case msg.Report():
                if len(message.bases) != (count := state.settings.fragments):
                    expected, got = f"{count} fragments, as Welcome told", str(len(message.bases))
                    remedy = "report -1 for a fragment without a version"
                    raise fault("Report.bases", expected, got, remedy)
                # A learner ahead of us has not read its Welcome yet: what it holds is going away.
                heads = state.heads if state.is_open else [-1] * count
                member.report(message, tuple(map(min, message.bases, heads)), tuple(heads), now)
            case msg.Push():
                self._pushes.announced(member, message, now)
            case msg.Fetch():
                self._check_fetch(message)
                member.asks(message, now)
                self.effects.append(ev.Serve(member.incarnation, message))
            case msg.Bye():
                member.has_left = True
                self._pushes.disconnect(member)
                text = f"{member.name} leaves: {short(message.reason)}"
                state.note("left", text, learner=member.name)
            case _:
                raise fault(
                    "a message that only the broker sends",
                    "Hello, Report, Push, Fetch, AskStatus or Bye", type(message).__name__,
                    "connect learners to the broker, not brokers to each other",
                )  # fmt: skip

    def _check_fetch(self, fetch: msg.Fetch) -> None:
        """Raises RemoteProtocolError for what cannot be answered. A publication that is no longer
        kept is the host's business: it answers with the state."""
        state, kind, fragment = self.state, fetch.kind, fetch.fragment
        if not state.is_open or fragment >= len(state.heads):
            expected = f"a fragment below {len(state.heads)}" if state.is_open else "none yet"
            remedy = "wait for a Welcome with role adopt, and cut the model as it tells"
            raise fault("Fetch", expected, f"one of fragment {fragment}", remedy)
        least = {msg.DataKind.STATE: 0, msg.DataKind.PUBLICATION: 1}.get(kind)
        chunks = state.push_chunks[fragment] if least else state.state_chunks[fragment]
        head, window = state.heads[fragment], state.settings.window_messages
        asked, end = sum(n for _, n in fetch.chunks), max(first + n for first, n in fetch.chunks)
        if least is None or not least <= fetch.version <= head or end > chunks or asked > window:
            expected = f"a STATE of 0 to {head}, or a PUBLICATION of 1 to {head} if there is one; "
            expected += f"chunks 0 to {chunks - 1}, {window} of them at a time"
            got = f"{kind.name} of version {fetch.version}, {asked} chunks up to {end - 1}"
            raise fault("Fetch", expected, got, "ask for what the last Beat names, in parts")

    def refused(self, peer: str, error: NarrowsError, now: float) -> None:
        """A control message that could not be decoded."""
        self.state.refuse(peer, error)
        self.advance(now)

    def revoked(self, sites: Collection[str], now: float) -> None:
        """Sites have no key any more. Their learners are cut off until they say Hello again."""
        for member in self.state.members.connected():
            if any(speaks_for(site, member.name) for site in sites):
                member.is_revoked = True
                self._pushes.disconnect(member)
                text = f"the key of {member.name} was revoked: it is cut off until its site is "
                text += "admitted again (narrows keys allow)"
                self.state.note("revoked", text, warning=True, learner=member.name)
        self.advance(now)

    # Data. Thousands of chunks come in a second, so a chunk alone decides nothing else.

    def push_chunk(self, header: msg.Header, now: float) -> bool:
        """True: the chunk is wanted; keep it and have it checked."""
        wanted = self._pushes.chunk(header, now)
        self._wake_at = min(self._wake_at, self._pushes.ask_at)  # Arrivals carry a repair on.
        self._advance_if_due(now)
        return wanted

    def chunk_checked(self, header: msg.Header, now: float) -> None:
        """A wanted chunk decodes and is finite."""
        if self._pushes.checked(header):
            self.advance(now)
        self._advance_if_due(now)

    def push_failed(self, header: msg.Header, error: NarrowsError, now: float) -> None:
        """A chunk is damaged: its push is dropped and refused."""
        self._pushes.failed(header, error)
        self.advance(now)

    def wants_layout(self, incarnation: str) -> bool:
        """Asked before a layout is unpacked: it may be large."""
        return self._joining.asked(incarnation) is not None

    def layout(self, incarnation: str, layout: msg.Layout, now: float) -> None:
        """The seeding learner's layout."""
        self._joining.layout(incarnation, layout, now)
        self.advance(now)

    def seed_chunk(self, header: msg.Header, now: float) -> bool:
        """True: the chunk is wanted; keep it."""
        wanted = self._joining.chunk(header, now)
        self._advance_if_due(now)
        return wanted

    # What the host has done. The methods that these lead to say what it means.

    def seeded(self, now: float) -> None:
        self._joining.seeded()
        self.advance(now)

    def seed_failed(self, error: NarrowsError, now: float) -> None:
        self._joining.failed(error)
        self.advance(now)

    def merged(self, fragment: int, now: float) -> None:
        self._rounds.merged(fragment)
        self.advance(now)

    def merge_failed(self, fragment: int, error: Exception, now: float) -> None:
        self._rounds.merge_failed(fragment, error)
        self.advance(now)

    def durable(self, fragment: int, now: float) -> None:
        self._rounds.durable(fragment, now)
        self.advance(now)

    def disk_failed(self, fragment: int, error: Exception, now: float) -> None:
        self._rounds.disk_failed(fragment, error)
        self.advance(now)

    def ended(self, now: float) -> None:
        self._ending.ended(now)
        self.advance(now)

    def stop(self, reason: str, now: float) -> None:
        """The operator ends the process. Rounds on their way may still become durable."""
        self.state.stopping = reason
        for member in self.state.members.connected():
            self.state.send(member, msg.Bye(reason))
        self.advance(now)

    # Time.

    def advance(self, now: float) -> None:
        """Decides everything that is due."""
        self._notice(now)
        state = self.state
        for member in state.members.connected():
            if now >= member.heard_at + LOST_S:
                self._pushes.disconnect(member)
                text = f"{member.name} was not heard for {LOST_S:.0f} s and is given up until it "
                text += "says Hello again: see whether its process runs and its line carries"
                state.note("lost", text, warning=True, learner=member.name)
        if not state.is_open and self._joining.advance(now):
            self._rounds.launched_at = now  # Nobody has trained yet: the first launch takes time.
        state.share_uplink(now)
        if state.is_open:
            self._ending.reach_goal(now)
            self._rounds.advance(now)
            self._ending.advance(now)
            self._pushes.ask(now)
        told: list[Member] = []
        digests: tuple[int, ...] = ()
        if now >= state.beat_at + BEAT_S:
            state.beat_at = now
            told, digests = state.members.connected(), state.head_digests()
            if not state.stopping:
                warn_of_silence(state, now)
        elif state.beat_wanted:
            told = state.members.told_at_once(sum(state.heads), state.period_s, now)
        state.beat_wanted = False
        if not state.stopping:
            for member in told:
                state.send(member, state.beat(member, now, digests))
        due_at = state.beat_at + BEAT_S
        if state.is_open:
            due_at = min(due_at, self._rounds.due_at, self._pushes.ask_at)
        self._wake_at = max(due_at, now + PAUSE_S_MIN)

    def deadline(self, now: float) -> float:
        """When `advance` is to be called if nothing happens before."""
        return self._wake_at

    def _advance_if_due(self, now: float) -> None:
        if now >= self._wake_at:
            self.advance(now)

    def _notice(self, now: float) -> None:
        """Notices that the broker itself has stood still: it judges nobody for that time."""
        delay_s = now - self._advanced_at
        if delay_s > BEAT_S + STOOD_STILL_S:
            self.state.members.excuse(delay_s, now)
            # What came meanwhile is still to be read: no window passes before that.
            for round_ in self.state.rounds:
                round_.launched_at += delay_s
                if round_.quorum_at is not None:
                    round_.quorum_at += delay_s
            text = f"the broker stood still for {delay_s:.1f} s: nobody is judged for it"
            self.state.note("stood_still", text, warning=True, seconds=round(delay_s, 1))
        self._advanced_at = now

    def check(self) -> None:
        """Asserts every invariant; the simulator calls it after each event."""
        state = self.state
        state.members.check(float(state.config.wan.total_up))
        assert len(state.heads) in (0, state.settings.fragments)
        assert state.is_open <= bool(state.heads), state.phase
        merges = state.phase in (msg.Phase.RUNNING, msg.Phase.ENDING) and not state.closing
        assert merges or not state.in_flight(), f"a round in phase {state.phase.name}"
        self._rounds.check()
