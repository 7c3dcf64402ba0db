"""The syncer: leads each event to the module that decides it. Pure.

After each event it looks at everything that may have become due: who is a member, which rounds
begin, are merged and exist, and whether the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.records import Recovered
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import Ending
from narrows.broker.syncer.joining import Joining
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.rounds import Rounds
from narrows.broker.syncer.seeding import Seeding
from narrows.broker.syncer.state import State
from narrows.broker.syncer.status import status, warn_of_silence
from narrows.proto import messages as msg
from narrows.proto.errors import NarrowsError, RemoteProtocolError, fault, short
from narrows.proto.recorder import Recorder, recorded
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
        recovered: Recovered,
        now: float,
        *,
        published_digest: Callable[[int, int], int | None],
        newest_push: Callable[[str, int], int],
    ) -> None:
        """`published_digest` and `newest_push` ask the store, as their fields in `State` say."""
        # States are whole arrays, from which nothing is decided.
        facts = {
            name: fact for name, fact in vars(recovered).items() if name not in ("merged", "states")
        }
        merged = list(recovered.merged.items())  # JSON has no such keys.
        self.recorder = Recorder("syncer", config, epoch, facts, merged, now)
        told = self.recorder.told
        self.state = State(
            config, epoch, now, recovered,
            lambda fragment, version: told(published_digest(fragment, version)),
            lambda incarnation, fragment: told(newest_push(incarnation, fragment)),
        )  # fmt: skip
        self.effects = self.state.effects
        self._pushes = Pushes(self.state)
        self._seeding = Seeding(self.state)
        self._joining = Joining(self.state, self._pushes, self._seeding)
        self._ending = Ending(self.state, began_at=now)
        self._rounds = Rounds(self.state, self._pushes, self._ending, launched_at=now)
        self._advanced_at = now
        self.wake_at = now + BEAT_S
        """When `advance` is to be called if nothing happens before."""
        # A phase is not durable before the run has ended. Learners must hear of the end in their
        # first Welcome: one that is told `running` and has nothing left to push leaves for good.
        self._ending.reach_goal(now)

    @recorded
    def listens_on(self, uplink_port: int, downlink_port: int) -> None:
        """The ports for data are bound, and may be others than the settings say."""
        self.state.ports = (uplink_port, downlink_port)

    # What the host reads.

    def status(self, now: float) -> msg.Status:
        """The run as this machine knows it; the host adds the rest."""
        return status(self.state, self._seeding, self._rounds, self._ending, now)

    # Control messages.

    @recorded
    def control(self, peer: str, site: str | None, message: msg.ControlMessage, now: float) -> None:
        """A decoded control message of a connection. Its key may speak for `site`; None: the
        broker has no keys."""
        self._notice(now)
        try:
            match message:
                case msg.Hello():
                    self._joining.hello(peer, site, message, now)
                case msg.AskStatus():
                    self.effects.append(ev.AnswerStatus(peer))
                case _:
                    self._from_learner(peer, site, message, now)
        except RemoteProtocolError as error:
            name = message.name if isinstance(message, msg.Hello) else ""
            self.state.refuse(peer, error, name=name)
        self.advance(now)

    @recorded
    def refuse(self, peer: str, error: NarrowsError) -> None:
        """A control message of a connection cannot be decoded."""
        self.state.refuse(peer, error)

    def _from_learner(
        self, peer: str, site: str | None, message: msg.ControlMessage, now: float
    ) -> None:
        """A message that only a learner may send, after its Hello.

        Raises RemoteProtocolError for one that a learner may not send.
        """
        member = self.state.members.by_peer.get(peer)
        # A peer chooses the name of its connection, and may choose one that another had.
        is_thief = member is not None and site is not None and not speaks_for(site, member.name)
        if member is None or is_thief:
            if not isinstance(message, msg.Bye):
                self.effects.append(
                    ev.Send(peer, msg.Bye("this life of the broker has not met you: say Hello"))
                )
            return
        member.hears(now)
        match message:
            case msg.Report():
                self._take_report(member, message, now)
            case msg.Push():
                self._pushes.announced(member, message, now)
            case msg.Fetch():
                self._check_fetch(message)
                member.asks(message, now)
                self.effects.append(ev.Serve(member.incarnation, message))
            case msg.Bye():
                member.has_left = True
                self._pushes.disconnect(member)
                self.state.note(
                    "left", f"{member.name} leaves: {short(message.reason)}", learner=member.name
                )
            case _:
                raise fault(
                    "a message that only the broker sends",
                    expected="Hello, Report, Push, Fetch, AskStatus or Bye",
                    got=type(message).__name__,
                    remedy="connect learners to the broker, not brokers to each other",
                )

    def _take_report(self, member: Member, report: msg.Report, now: float) -> None:
        """Raises RemoteProtocolError for a Report of another number of fragments."""
        count = self.state.settings.fragments
        if len(report.bases) != count:
            raise fault(
                "Report.bases",
                expected=f"{count} fragments, as Welcome told",
                got=str(len(report.bases)),
                remedy="report -1 for a fragment without a version",
            )
        heads = self.state.heads if self.state.is_open else [-1] * count
        # A learner ahead of us has not read its Welcome yet: it is about to go back.
        member.report(report, tuple(map(min, report.bases, heads)), tuple(heads), now)
        if self.state.settings.mode is msg.Mode.DILOCO:
            member.stepped_at = now  # In lockstep it makes no steps while it waits for the others.

    def _check_fetch(self, fetch: msg.Fetch) -> None:
        """Raises RemoteProtocolError for chunks that this run has not. Where the host no longer
        keeps a publication, it answers with the state."""
        state = self.state
        if not state.is_open or fetch.fragment >= len(state.heads):
            raise fault(
                "Fetch",
                expected=f"a fragment below {len(state.heads)}" if state.is_open else "none yet",
                got=f"one of fragment {fetch.fragment}",
                remedy="wait for a Welcome with role adopt, and cut the model as it tells",
            )
        head = state.heads[fetch.fragment]
        window = state.settings.window_messages
        asked = sum(count for _, count in fetch.chunks)
        end = max(first + count for first, count in fetch.chunks)
        exists = False
        chunks = state.state_chunks[fetch.fragment]
        match fetch.kind:
            case msg.DataKind.STATE:
                exists = 0 <= fetch.version <= head
            case msg.DataKind.PUBLICATION:
                exists = 1 <= fetch.version <= head  # Version 0 is never published.
                chunks = state.push_chunks[fetch.fragment]
        if not exists or end > chunks or asked > window:
            raise fault(
                "Fetch",
                expected=f"a STATE of 0 to {head}, or a PUBLICATION of 1 to {head} if there is one;"
                f" chunks 0 to {chunks - 1}, {window} of them at a time",
                got=f"{fetch.kind.name} of version {fetch.version}, {asked} chunks up to {end - 1}",
                remedy="ask for what the last Beat names, in parts",
            )

    @recorded
    def revoked(self, sites: Collection[str], now: float) -> None:
        """Sites have no key any more. Their learners are cut off until they say Hello again."""
        for member in self.state.members.connected():
            if any(speaks_for(site, member.name) for site in sites):
                member.is_revoked = True
                self._pushes.disconnect(member)
                self.state.note(
                    "revoked",
                    f"the key of {member.name} was revoked: it is cut off until its site is "
                    "admitted again (narrows keys allow)",
                    warning=True,
                    learner=member.name,
                )
        self.advance(now)

    # Data, all of this life's epoch. Thousands of chunks come in a second, so a chunk alone decides
    # nothing else.

    @recorded
    def take_chunk(self, header: msg.Header, now: float) -> bool:
        """Counts a chunk as here if it is wanted. True: keep its payload, and have a push's
        checked."""
        if header.kind is msg.DataKind.PUSH:
            wanted = self._pushes.chunk(header, now)
            self.wake_at = min(self.wake_at, self._pushes.ask_at)  # Arrivals carry a repair on.
        else:
            wanted = self._seeding.chunk(header, now)
        if now >= self.wake_at:
            self.advance(now)
        return wanted

    @recorded
    def chunk_checked(self, header: msg.Header, now: float) -> None:
        """A wanted chunk decodes and is finite."""
        if self._pushes.checked(header) or now >= self.wake_at:
            self.advance(now)

    @recorded
    def push_failed(self, header: msg.Header, error: NarrowsError, now: float) -> None:
        """A chunk is damaged: its push is dropped and refused."""
        self._pushes.failed(header, error)
        self.advance(now)

    def wants_layout(self, incarnation: str) -> bool:
        """Asked before a layout is unpacked: it may be large."""
        return self._seeding.asked(incarnation) is not None

    @recorded
    def layout(self, incarnation: str, layout: msg.Layout, now: float) -> None:
        """The seeding learner's layout."""
        self._seeding.layout(incarnation, layout, now)
        self.advance(now)

    # Answers to the effects that take long.

    @recorded
    def done(self, effect: ev.Slow, now: float) -> None:
        """The host has performed an effect."""
        match effect:
            case ev.Seed():
                self._seeding.seeded()
            case ev.MergeRound(due):
                self._rounds.merged(due.fragment, now)
            case ev.Commit(fragment):
                self._rounds.durable(fragment, now)
            case ev.CommitEnd():
                self._ending.ended(now)
        self.advance(now)

    @recorded
    def failed(self, effect: ev.Slow, error: Exception, now: float) -> None:
        """The host could not perform an effect. A Commit it tries again; the others are over."""
        match effect:
            case ev.Seed():
                assert isinstance(error, NarrowsError)
                self._seeding.failed(error)
            case ev.MergeRound(due):
                self._rounds.merge_failed(due, error)
            case ev.Commit(fragment):
                self._rounds.disk_failed(fragment, error)
        self.advance(now)

    @recorded
    def stop(self, reason: str, now: float) -> None:
        """The operator ends the process. Rounds on their way may still become durable."""
        self.state.stopping = reason
        for member in self.state.members.connected():
            self.state.send(member, msg.Bye(reason))
        self.advance(now)

    # Time.

    @recorded
    def advance(self, now: float) -> None:
        """Decides everything that is due."""
        self._notice(now)
        state = self.state
        for member in state.members.connected():
            if now >= member.heard_at + LOST_S:
                self._pushes.disconnect(member)
                state.note(
                    "lost",
                    f"{member.name} was not heard for {LOST_S:.0f} s and is given up until it "
                    "says Hello again: see whether its process runs and its line carries",
                    warning=True,
                    learner=member.name,
                )
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
            told = state.members.connected()
            digests = state.head_digests()
            if not state.stopping:
                warn_of_silence(state, self._seeding, now)
        elif state.beat_wanted:
            told = state.members.told_at_once(sum(state.heads), state.period_s, now)
        state.beat_wanted = False
        if not state.stopping:
            for member in told:
                state.send(member, state.beat(member, now, digests))
        due_at = state.beat_at + BEAT_S
        if state.is_open:
            due_at = min(due_at, self._rounds.due_at, self._pushes.ask_at)
        self.wake_at = max(due_at, now + PAUSE_S_MIN)

    def _notice(self, now: float) -> None:
        """Notices that the broker itself has stood still: it judges nobody for that time."""
        delay_s = now - self._advanced_at
        self._advanced_at = now
        if delay_s <= BEAT_S + STOOD_STILL_S:
            return
        self.state.members.excuse(delay_s, now)
        # The messages that came meanwhile are still to be read: no window passes before that.
        for slot in self.state.rounds:
            slot.launched_at += delay_s
            if slot.quorum_at is not None:
                slot.quorum_at += delay_s
        self.state.note(
            "stood_still",
            f"the broker stood still for {delay_s:.1f} s: nobody is judged for it",
            warning=True,
            seconds=round(delay_s, 1),
        )

    def check(self) -> None:
        """Asserts every invariant; the simulator calls it after each event."""
        state = self.state
        state.members.check(float(state.config.wan.total_up))
        assert len(state.heads) in (0, state.settings.fragments)
        assert state.is_open <= bool(state.heads), state.phase
        merges = state.phase in (msg.Phase.RUNNING, msg.Phase.ENDING) and not state.closing
        assert merges or not state.in_flight(), f"a round in phase {state.phase.name}"
        self._rounds.check()
