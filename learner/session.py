"""The session: joins, answers rounds, adopts versions, survives outages, leaves in order. [pure]

The learner's state machine. Per fragment the work is done by `link`; this file holds what is one
per learner: the connection, the inner steps, the run's clock, the end. No tensors, sockets,
clocks, threads: events come in with `now`, effects go out in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from narrows.learner import events as ev
from narrows.learner.ledger import FragmentAccount, Ledger
from narrows.learner.link import Link
from narrows.proto import messages as msg
from narrows.proto.codecs import codec_names
from narrows.proto.errors import RETRYABLE, ErrorCode, Refused
from narrows.proto.fragments import build_table
from narrows.proto.limits import PROTOCOL
from narrows.proto.schedule import is_lockstep, snapshot_step
from narrows.proto.smoothing import Smoothed

HELLO_S = 0.25
HELLO_MAX_S = 5.0
"""A Hello is repeated after HELLO_S, then twice as late each time, for ever."""

QUIET_S = 4.0
"""Without a sign of the broker for so long the learner is offline and says Hello again."""

REPORT_S = 0.1
IDLE_REPORT_S = 1.0
"""A Report goes out per step but not more often than REPORT_S, and at least every IDLE_REPORT_S."""

FETCHES_MAX = 4
"""Fragments that a joiner fetches at the same time."""

EXTRAPOLATION_MAX_S = 60.0
"""The run's clock runs on by itself for at most so long after the last Beat."""


class Connection(StrEnum):
    """Where the session stands with the broker."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(frozen=True)
class Identity:
    """Who the learner is, fixed for the life of the process."""

    name: str
    incarnation: str
    layout: tuple[msg.LayoutEntry, ...]
    frozen_digest: int
    contribute_after_steps: int = 0
    """No contribution before so many own steps (the ramp of a newcomer)."""


class Session:
    """The state machine of one learner; lives as long as its process (one incarnation)."""

    def __init__(self, identity: Identity, *, jitter: Callable[[], float]) -> None:
        """`jitter` returns numbers in [0, 1) that spread retries."""
        self.identity = identity
        self.connection = Connection.JOINING
        self.run_id = ""
        self.epoch: msg.Epoch = (0, 0)
        self.settings: msg.RunSettings | None = None
        self.phase = msg.Phase.FOUNDING
        self.links: tuple[Link, ...] = ()
        self.ledger = Ledger(())
        self.steps = 0
        #: Steps that the run had made when this learner joined (lockstep modes).
        self.step_offset = 0
        self.contribute_after_steps = identity.contribute_after_steps
        self.leaving = False
        self.waits_for = "an answer from the broker"
        self._jitter = jitter
        self._paused = ""
        self._push_id = 0
        self._hello_at = 0.0
        self._hello_delay_s = HELLO_S
        self._heard_at: float | None = None
        self._reported_at = 0.0
        self._stepped_at: float | None = None
        self._step_s = Smoothed()
        self._loss: float | None = None
        self._received: list[int] = []
        self._anchor = (0, 0.0, 0.0)

    # The three methods of a state machine.

    def handle(self, event: ev.Event, *, now: float) -> list[ev.Effect]:
        """Takes one event in; returns what is to be done, in order."""
        if self.connection in (Connection.REFUSED, Connection.LEFT):
            return []
        effects: list[ev.Effect] = []
        match event:
            case ev.Received(message):
                effects = self._message(message, now)
            case ev.ChunkArrived(header, handle):
                effects = self._chunk(header, handle, now)
            case ev.Applied(fragment, version, digest):
                effects = self.links[fragment].applied(version, digest)
            case ev.ApplyFailed(fragment, version, digest):
                effects = self.links[fragment].apply_failed(version, digest)
            case ev.EncodeFailed(push_id, reason):
                effects = self._encode_failed(push_id, reason)
            case ev.StepTaken(tokens, loss):
                effects = self._step(tokens, loss, now)
            case ev.StepSkipped(tokens):
                self.ledger.skip(tokens)
            case ev.BoundaryReached():
                effects = self._boundary()
            case ev.Paused(reason):
                self._paused, self._stepped_at = reason, None
            case ev.Continued():
                self._paused = ""
                for link in self.links:
                    link.answered = (-1, -1) if link.push is None else link.answered
            case ev.LoopEnded():
                self.leaving = True
            case ev.DeadlineReached():
                pass
        return effects + self._advance(now)

    def next_deadline(self) -> float | None:
        """When `handle(DeadlineReached())` is due if nothing else happens."""
        if self.connection in (Connection.REFUSED, Connection.LEFT):
            return None
        if self.connection is Connection.JOINING:
            return self._hello_at
        times = [self._reported_at + IDLE_REPORT_S]
        times += [link.check_at for link in self._fetching()]
        if self._heard_at is not None:
            times.append(self._heard_at + QUIET_S)
        return min(times)

    def check(self) -> None:
        """Asserts every invariant; cheap enough to run after each event in tests."""
        self.ledger.total()
        for link in self.links:
            assert link.held <= max(link.known, link.held)
            if link.push is not None:
                assert link.push.announced.base_version == link.adopted
                assert link.push.announced.tokens <= link.account.tokens
            if link.adopted < 0:
                assert link.push is None

    # What the shell and the training loop ask.

    @property
    def ready(self) -> bool:
        """Every fragment has been adopted at least once."""
        return bool(self.links) and all(link.adopted >= 0 for link in self.links)

    @property
    def should_stop(self) -> bool:
        """The goal is reached: no further inner step counts."""
        return self.phase in (msg.Phase.ENDING, msg.Phase.ENDED)

    @property
    def online(self) -> bool:
        return self.connection is Connection.JOINED

    def must_wait(self, now: float) -> bool:
        """True while the training loop may not go on: lockstep modes, or offline for too long."""
        settings = self.settings
        if settings is None or self.should_stop or self.connection is Connection.REFUSED:
            return False
        if is_lockstep(settings):
            step = self.step_offset + self.steps - settings.overlap_steps
            due = [snapshot_step(settings, link.index, link.adopted) for link in self.links]
            return step >= min(due)
        offline_s = now - self._heard_at if self._heard_at is not None else 0.0
        return 0 < settings.max_offline_s < offline_s

    def run_tokens(self, now: float) -> float:
        """The run's clock, extrapolated from the last Beat; monotone but for broker restarts."""
        tokens, rate, at = self._anchor
        run_tokens = tokens + rate * min(max(now - at, 0.0), EXTRAPOLATION_MAX_S)
        goal = self.settings.goal_tokens if self.settings else 0
        return min(run_tokens, goal) if goal else run_tokens

    # Messages.

    def _message(self, message: msg.ControlMessage, now: float) -> list[ev.Effect]:
        if isinstance(message, msg.Welcome | msg.Beat) and message.epoch < self.epoch:
            return []  # A broker that was replaced.
        if not isinstance(message, msg.Refuse):
            self._heard_at = now
        match message:
            case msg.Welcome():
                return self._welcome(message, now)
            case msg.Refuse():
                return self._refused(message, now)
            case msg.Probe(nonce):
                return [ev.Send(msg.Alive(nonce))]
            case _ if not self.online:
                return []
            case msg.Beat():
                return self._beat(message, now)
            case msg.Missing():
                return self._missing(message)
            case msg.Bye(reason):
                self._rejoin(now)
                note = f"the broker said Bye ({reason}); training goes on, joining again"
                return [ev.Note("warning", note)]
            case _:
                return [ev.Note("warning", f"unexpected {type(message).__name__} from the broker")]

    def _welcome(self, welcome: msg.Welcome, now: float) -> list[ev.Effect]:
        first = self.settings is None
        if first:
            table = build_table(self.identity.layout, welcome.settings.fragment_count)
            self.links = tuple(Link(fragment, FragmentAccount()) for fragment in table)
            self.ledger = Ledger(tuple(link.account for link in self.links))
            self.step_offset = welcome.step
        elif self.settings and welcome.settings.fragment_count != self.settings.fragment_count:
            return self._fail(
                ErrorCode.LAYOUT_MISMATCH,
                "the broker was restarted with another fragment count",
                expected=str(self.settings.fragment_count),
                got=str(welcome.settings.fragment_count),
                remedy="start the learner again",
            )
        restarted = not first and welcome.epoch > self.epoch
        self.run_id, self.epoch, self.settings = welcome.run_id, welcome.epoch, welcome.settings
        self.connection, self._hello_delay_s = Connection.JOINED, HELLO_S
        self._received = [0] * welcome.settings.streams
        fragments = tuple(link.fragment for link in self.links)
        effects: list[ev.Effect] = [
            ev.Identify(self.run_id, self.epoch),
            ev.OpenStreams(welcome.settings, fragments, welcome.uplink_port, welcome.downlink_port),
        ]
        if not first:
            effects.append(ev.Note("info", f"back with the broker, epoch {welcome.epoch}"))
        for link, head in zip(self.links, welcome.fragments, strict=False):
            if restarted:
                effects += link.new_epoch(head)
            elif link.push is not None and link.push.merged is None:
                effects.append(ev.Send(link.push.announced))
            link.check_at = now
        if welcome.role is msg.Role.FOUND:
            effects += [ev.SendFounding(link.index) for link in self.links]
        self.waits_for = {
            msg.Role.FOUND: "the broker to take version 0",
            msg.Role.WAIT: "version 0 from another learner",
            msg.Role.ADOPT: "the fragments",
        }[welcome.role]
        versions = tuple(head.version for head in welcome.fragments)
        self._run_state(
            welcome.phase, versions, welcome.rounds, welcome.run_tokens, welcome.tokens_per_s, now
        )
        return effects

    def _beat(self, beat: msg.Beat, now: float) -> list[ev.Effect]:
        if beat.epoch != self.epoch:
            self._rejoin(now)
            return []
        self._run_state(
            beat.phase, beat.versions, beat.rounds, beat.run_tokens, beat.tokens_per_s, now
        )
        return [ev.Acknowledge(beat.received)]

    def _run_state(
        self,
        phase: msg.Phase,
        versions: tuple[int, ...],
        rounds: tuple[msg.OpenRound, ...],
        run_tokens: int,
        tokens_per_s: float,
        now: float,
    ) -> None:
        """What Welcome and Beat both tell."""
        self.phase = phase
        self._anchor = (run_tokens, tokens_per_s, now)
        open_rounds = {round_.fragment: round_ for round_ in rounds}
        for link, version in zip(self.links, versions, strict=False):
            if version > link.known:
                link.known = version
                if link.held >= 0:
                    link.check_at = now + link.delay_s
            link.round = open_rounds.get(link.index)

    def _refused(self, refuse: msg.Refuse, now: float) -> list[ev.Effect]:
        if refuse.push_id:
            for link in self.links:
                if link.push and link.push.announced.push_id == refuse.push_id:
                    text = f"push {refuse.push_id} of fragment {link.index} refused: {refuse.code}"
                    level = "info" if refuse.code in _LATE else "warning"
                    note = ev.Note(level, f"{text}: {refuse.message} {refuse.remedy}".rstrip())
                    return [*link.settle(merged=False, refused=True), note]
            return []
        if refuse.code in RETRYABLE:
            self._rejoin(now)
            return []
        return self._fail(
            ErrorCode(refuse.code) if refuse.code in set(ErrorCode) else ErrorCode.BAD_MESSAGE,
            refuse.message,
            expected=refuse.expected,
            got=refuse.got,
            remedy=refuse.remedy,
        )

    def _fail(
        self, code: ErrorCode, message: str, *, expected: str, got: str, remedy: str
    ) -> list[ev.Effect]:
        self.connection = Connection.REFUSED
        return [ev.Fail(Refused(code, message, expected=expected, got=got, remedy=remedy))]

    def _missing(self, missing: msg.Missing) -> list[ev.Effect]:
        if missing.kind is msg.DataKind.FOUND and missing.fragment < len(self.links):
            if self.links[missing.fragment].adopted < 0:
                return [ev.SendFounding(missing.fragment, missing.ranges)]
        for link in self.links:
            if link.push and link.push.announced.push_id == missing.push_id:
                return [ev.Resend(missing.push_id, missing.ranges)]
        return []

    def _chunk(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        known = (
            self.online
            and (header.run_id, header.epoch) == (self.run_id, self.epoch)
            and header.incarnation == self.identity.incarnation
            and header.kind in (msg.DataKind.PUBLICATION, msg.DataKind.STATE)
            and header.fragment < len(self.links)
        )
        if not known:
            return [ev.Drop((handle,))]
        self._heard_at = now
        if header.stream < len(self._received):
            self._received[header.stream] = header.position
        return self.links[header.fragment].take(header, handle)

    # The training loop.

    def _step(self, tokens: int, loss: float | None, now: float) -> list[ev.Effect]:
        self.steps += 1
        self._loss = loss
        if self._stepped_at is not None:
            self._step_s.add(now - self._stepped_at)
        self._stepped_at = now
        self.ledger.step(tokens)
        return self._boundary()

    def _boundary(self) -> list[ev.Effect]:
        """The parameters may be touched: adopt what is new, then answer the open rounds."""
        effects: list[ev.Effect] = []
        for link in self.links:
            if link.fresh:
                effects += link.adopt()
        last = self.leaving or self.should_stop
        if self.steps < self.contribute_after_steps or not self.online:
            return effects
        for link in self.links:
            if link.wants_snapshot(self.step_offset + self.steps, any_step=last):
                self._push_id += 1
                effects += link.snapshot(self._push_id)
        return effects

    def _encode_failed(self, push_id: int, reason: str) -> list[ev.Effect]:
        for link in self.links:
            if link.push and link.push.announced.push_id == push_id:
                link.answered = (-1, -1)
                note = ev.Note("error", f"fragment {link.index} is not sent: {reason}")
                return [note, *link.settle(merged=False), *link.decline(reason)]
        return []

    # What every event may have made possible.

    def _advance(self, now: float) -> list[ev.Effect]:
        if self.connection is Connection.JOINING:
            return [*self._leave_offline(), *self._hello(now)]
        if self.connection is not Connection.JOINED:
            return []
        if self._heard_at is not None and now - self._heard_at >= QUIET_S:
            self._rejoin(now)
            note = f"nothing heard from the broker for {QUIET_S:.0f} s; training goes on"
            return [ev.Note("warning", note), *self._hello(now)]
        effects: list[ev.Effect] = []
        for link in self._fetching():
            effects += link.ask(now, self._jitter())
        effects += self._declines()
        effects += self._report(now)
        effects += self._leave()
        return effects

    def _fetching(self) -> list[Link]:
        """Links that are behind; while joining only the first few, so that each gets done."""
        behind = [link for link in self.links if link.behind and link.applying is None]
        if any(link.held < 0 for link in behind):
            return [link for link in behind if link.held < 0][:FETCHES_MAX]
        return behind

    def _declines(self) -> list[ev.Effect]:
        reason = self._paused
        if self.steps < self.contribute_after_steps:
            reason = f"warming up, {self.steps} of {self.contribute_after_steps} steps"
        effects: list[ev.Effect] = []
        for link in self.links:
            stopped = (self.leaving or self.should_stop) and link.account.steps == 0
            if reason or (stopped and not link.fresh):
                effects += link.decline(reason or "no step since it adopted")
        return effects

    def _report(self, now: float) -> list[ev.Effect]:
        quiet_s = now - self._reported_at
        if quiet_s < REPORT_S or (self._stepped_at is None and quiet_s < IDLE_REPORT_S):
            return []
        if (self._stepped_at or 0.0) <= self._reported_at and quiet_s < IDLE_REPORT_S:
            return []
        self._reported_at = now
        report = msg.Report(
            step=self.steps,
            tokens=self.ledger.logged - self.ledger.skipped,
            step_s=self._step_s.mean,
            loss=self._loss,
            received=tuple(self._received),
            ledger=self.ledger.total(),
        )
        return [ev.Send(report)]

    def _hello(self, now: float) -> list[ev.Effect]:
        if now < self._hello_at:
            return []
        self._hello_at = now + self._hello_delay_s * (1 + self._jitter())
        self._hello_delay_s = min(self._hello_delay_s * 2, HELLO_MAX_S)
        hello = msg.Hello(
            protocol=PROTOCOL,
            name=self.identity.name,
            incarnation=self.identity.incarnation,
            run_id=self.run_id,
            epoch=self.epoch,
            layout=self.identity.layout,
            frozen_digest=self.identity.frozen_digest,
            codecs=codec_names(),
            step=self.steps,
            tokens=self.ledger.logged - self.ledger.skipped,
        )
        return [ev.Send(hello)]

    def _rejoin(self, now: float) -> None:
        """The session is gone; training goes on, and so do the Hellos."""
        if self.connection is Connection.JOINED:
            self.connection = Connection.JOINING
            self._hello_at, self._hello_delay_s = now, HELLO_S
            self.waits_for = "the broker to come back"

    # The end.

    def _leave(self) -> list[ev.Effect]:
        """Bye once nothing of ours is in flight and, at the end of the run, all is adopted."""
        if not self.leaving or self.phase is msg.Phase.ENDING:
            return []
        if any(link.behind or link.fresh or link.applying for link in self.links):
            return []
        open_push = any(link.push and link.push.merged is None for link in self.links)
        if open_push and self.phase is not msg.Phase.ENDED:
            return []
        self.connection = Connection.LEFT
        reason = "the run has ended" if self.phase is msg.Phase.ENDED else "the loop has ended"
        return [ev.Send(msg.Bye(reason)), ev.Left()]

    def _leave_offline(self) -> list[ev.Effect]:
        """Without a broker there is nobody to say Bye to, unless the final model is due."""
        if not self.leaving or self.should_stop:
            return []
        self.connection = Connection.LEFT
        return [ev.Left()]


_LATE = frozenset({ErrorCode.STALE_BASE, ErrorCode.NO_ROUND})
"""Refusals that only mean that the round was over sooner."""
