"""The session: joins, answers rounds, adopts versions, survives outages, leaves in order. [pure]

Events come in with `now`, effects go out in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from narrows.learner.session import events as ev
from narrows.learner.session.connection import (
    WAITS_FOR,
    Connection,
    Dialer,
    Identity,
    error_of,
)
from narrows.learner.session.fragments import Links
from narrows.learner.session.leaving import Leaving, is_ending
from narrows.learner.session.ledger import Ledger
from narrows.learner.session.reporting import Pace, RunTime
from narrows.proto import messages as msg
from narrows.proto.errors import OF_ONE_MESSAGE, RETRYABLE, Refused
from narrows.proto.fragments import build_table
from narrows.proto.schedule import is_lockstep, next_snapshot
from narrows.proto.timing import QUIET_S


class Session:
    """The state machine of one learner; lives as long as its process (one incarnation)."""

    def __init__(self, identity: Identity, *, jitter: Callable[[], float]) -> None:
        """`jitter` returns numbers in [0, 1) that spread retries."""
        self.identity = identity
        self.run_id = ""
        self.epoch: msg.Epoch = (0, 0, 0)
        self.settings: msg.RunSettings | None = None
        self.phase = msg.Phase.FOUNDING
        self.links = Links()
        self.contribute_after_steps = identity.contribute_after_steps
        self.farewell = Leaving()
        self.waits_for = "an answer from the broker"
        self._dialer = Dialer(jitter)
        self._pace = Pace()
        self._run_time = RunTime()
        self._jitter = jitter
        self._paused = ""

    # The three methods of a state machine.

    def handle(self, event: ev.Event, *, now: float) -> list[ev.Effect]:
        """Takes one event in; returns what is to be done, in order."""
        if self._dialer.closed:
            return [ev.Drop((event.handle,))] if isinstance(event, ev.ChunkDecoded) else []
        effects: list[ev.Effect] = []
        match event:
            case ev.Received(message):
                effects = self._message(message, now)
            case ev.ChunkDecoded(header, handle):
                effects = self._chunk(header, handle, now)
            case ev.Applied(fragment, version, digest):
                effects = self.links.applied(fragment, version, digest)
            case ev.ApplyFailed():
                effects = self.links.apply_failed(event)
            case ev.EncodeFailed(push_id, reason):
                effects = self.links.encode_failed(push_id, reason, now)
            case ev.CopyFailed(copy, reason):
                self.farewell.copying = False
                effects = self.links.copy_failed(copy, reason, now)
            case ev.StepTaken(tokens, loss, at_boundary):
                self._pace.step(loss, now)
                self.ledger.step(tokens)
                if self.steps == self.contribute_after_steps:
                    self.links.answer_again()
                effects = self._boundary() if at_boundary else []
            case ev.StepSkipped(tokens):
                self.ledger.skip(tokens)
            case ev.BoundaryReached():
                effects = self._boundary()
            case ev.Paused(reason):
                self._paused = reason
                self._pace.pause()
            case ev.Continued():
                self._paused = ""
                self.links.answer_again()
            case ev.LoopEnded(within_s):
                self.farewell.ask(within_s, now)
            case ev.Connected():
                self._dialer.connected(now)
            case ev.DeadlineReached():
                effects = self._look_for_broker(now)
        effects += self._advance(now)
        self.farewell.note(effects, now)
        return effects

    def next_deadline(self) -> float | None:
        """When `handle(DeadlineReached())` is due if nothing else happens."""
        deadline = self._dialer.next_deadline()
        if deadline is None or not self.online:
            return deadline
        checks = [link.check_at for link in self.links.fetching()]
        return min(deadline, self._pace.report_at(), self.links.retry_at, *checks)

    def check(self) -> None:
        """Asserts every invariant; cheap enough for every event of a test."""
        self.links.check()

    # What the shell and the training loop ask.

    @property
    def connection(self) -> Connection:
        return self._dialer.connection

    @property
    def not_admitted(self) -> Refused | None:
        """Why the broker does not admit this learner for now."""
        return self._dialer.not_admitted

    @property
    def online(self) -> bool:
        return self.connection is Connection.JOINED

    @property
    def ledger(self) -> Ledger:
        return self.links.ledger

    @property
    def steps(self) -> int:
        return self._pace.steps

    @property
    def tokens(self) -> int:
        """Tokens of the steps that happened."""
        return self.ledger.logged - self.ledger.skipped

    @property
    def ready(self) -> bool:
        """Every fragment has been adopted at least once."""
        return self.links.ready

    @property
    def should_stop(self) -> bool:
        """The goal is reached: no further inner step counts."""
        return is_ending(self.phase)

    @property
    def wants_boundary(self) -> bool:
        """There may be something to do at the next boundary; until then steps only count."""
        lockstep = self.settings is not None and is_lockstep(self.settings)
        return lockstep or self._dialer.closed or self.links.wants_boundary

    def must_wait(self, now: float) -> bool:
        """True while the training loop may not go on: lockstep modes, or offline for too long."""
        settings = self.settings
        if settings is None or self.should_stop or self._dialer.closed:
            return False
        if is_lockstep(settings):
            due = next_snapshot(settings, self.links.adopted)
            return self._pace.run_step >= due + settings.overlap_steps
        return 0 < settings.max_offline_s < self._dialer.silent_s(now)

    def run_tokens(self, now: float) -> float:
        """The run's clock, extrapolated; monotone but for broker restarts."""
        goal = self.settings.goal_tokens if self.settings else 0
        return min(self._run_time.tokens(now), goal or math.inf)

    # Messages.

    def _message(self, message: msg.ControlMessage, now: float) -> list[ev.Effect]:
        if isinstance(message, msg.Welcome | msg.Beat) and message.epoch != self.epoch:
            # Left over from before, or another life answers at the address: only the Welcome to a
            # new Hello says which. A lower term was replaced.
            if self.online or message.epoch[0] < self.epoch[0]:
                self._rejoin(now)
                return []
        self._dialer.heard(message, now)
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
                acknowledge = ev.Acknowledge(message.received)
                return [acknowledge, *self._run_state(message, message.versions, now)]
            case msg.Progress(received):
                return [ev.Acknowledge(received)]
            case msg.Missing():
                return self._missing(message)
            case msg.Bye(reason):
                self._rejoin(now)
                note = f"the broker said Bye ({reason}); joining again"
            case _:
                note = f"unexpected {type(message).__name__} from the broker"
        return [ev.Note("warning", note)]

    def _welcome(self, welcome: msg.Welcome, now: float) -> list[ev.Effect]:
        first = self.settings is None
        if first:
            self.links = Links(build_table(self.identity.layout, welcome.settings.fragment_count))
        elif self.settings and welcome.settings.fragment_count != self.settings.fragment_count:
            counts = welcome.settings.fragment_count, self.settings.fragment_count
            return self._fail(self._dialer.other_count(*counts))
        restarted = welcome.epoch != self.epoch
        effects: list[ev.Effect] = []
        if not self.online:
            self._pace.expect(welcome.settings.streams)
            if not first:
                epoch = "{}.{}".format(*welcome.epoch)
                effects.append(ev.Note("info", f"back with the broker, epoch {epoch}"))
        self.run_id, self.epoch, self.settings = welcome.run_id, welcome.epoch, welcome.settings
        self._dialer.joined(now)
        ports = (welcome.uplink_port, welcome.downlink_port)
        effects.append(ev.Identify(self.run_id, self.epoch))
        effects.append(ev.OpenStreams(welcome.settings, self.links.table, *ports))
        compare = restarted and not first
        effects += self.links.welcomed(welcome.fragments, restarted=compare, now=now)
        self.waits_for = WAITS_FOR[welcome.role]
        if welcome.role is msg.Role.FOUND:
            self.links.found_all(self.epoch)
        if restarted:
            self._run_time = RunTime()
        return effects + self._run_state(welcome, [h.version for h in welcome.fragments], now)

    def _run_state(
        self, told: msg.Welcome | msg.Beat, versions: Sequence[int], now: float
    ) -> list[ev.Effect]:
        self.phase = told.phase
        self._run_time.tell(told.run_tokens, told.tokens_per_s, now)
        self.links.tell(told.rounds, versions, now)
        changed = self._pace.keep_rate(told.up_bits_per_s)
        return [ev.SetRate(told.up_bits_per_s)] if changed else []

    def _refused(self, refuse: msg.Refuse, now: float) -> list[ev.Effect]:
        if refuse.push_id:
            return self.links.refused(refuse, now)
        if refuse.code in OF_ONE_MESSAGE and self.settings is not None:
            return [ev.Note("warning", f"a message of ours was refused: {refuse.message}")]
        if refuse.code in RETRYABLE:
            self._rejoin(now)
            news = self._dialer.not_yet(refuse)
            return [ev.Note("warning", news)] if news else []
        return self._fail(error_of(refuse))

    def _fail(self, error: Refused) -> list[ev.Effect]:
        self._dialer.connection = Connection.REFUSED
        return [*self.links.close(), ev.Fail(error)]

    def _missing(self, missing: msg.Missing) -> list[ev.Effect]:
        if missing.kind is msg.DataKind.FOUND and missing.fragment < len(self.links):
            self.links.to_found.setdefault(missing.fragment, missing.ranges)
            return []
        if (link := self.links.pushed(missing.push_id)) is None or link.push is None:
            return []
        # The announcement may be what is missing: with all chunks there, no range is.
        return [ev.Send(link.push.announced), ev.Resend(missing.push_id, missing.ranges)]

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
        self._dialer.heard_at = now
        if header.stream < len(self._pace.received):
            self._pace.received[header.stream] = header.position
        return self.links[header.fragment].take(header, handle)

    # The training loop.

    def _boundary(self) -> list[ev.Effect]:
        """The parameters may be touched: adopt what is new, then answer the open rounds."""
        rolled_back = any(link.fallen_back and link.fresh for link in self.links)
        was_ready = self.ready
        effects = self.links.adopt(final=self.farewell.asked and self.phase is msg.Phase.ENDED)
        self.farewell.copying = bool(effects)  # Who stands here again has made all copies.
        if self.ready and not was_ready and not any(self.links.adopted):
            self.contribute_after_steps = 0  # Everybody starts here: nobody warms up.
        if effects and self.ready and self.settings is not None:
            self._pace.realign(self.settings, self.links.adopted, rolled_back=rolled_back)
        effects += self.links.found()
        if self._warming or not self.online or self._paused:
            return effects
        last = self.farewell.asked or self.should_stop
        return effects + self.links.snapshot(self._pace.run_step, any_step=last)

    @property
    def _warming(self) -> str:
        """Why a newcomer does not contribute yet; in the lockstep modes everybody must."""
        lockstep = self.settings is not None and is_lockstep(self.settings)
        if lockstep or self.steps >= self.contribute_after_steps:
            return ""
        return f"warming up, {self.steps} of {self.contribute_after_steps} steps"

    def _look_for_broker(self, now: float) -> list[ev.Effect]:
        """Here only: before any other event the broker's messages may lie unread in a socket."""
        if not self._dialer.is_quiet(now):
            return []
        self._rejoin(now)
        quiet = f"nothing heard from the broker for {QUIET_S:.0f} s"
        return [ev.Note("warning", f"{quiet}; joining again")]

    # What every event may have made possible.

    def _advance(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        silent_s = None if self.online else self._dialer.silent_s(now)
        if self._dialer.closed or self.farewell.may_go(self.phase, self.links, silent_s, now):
            return effects + self._bye(now)
        if self._dialer.hello_due(now):
            effects += self._dialer.redial(self.identity, now)
            told = (self.run_id, self.epoch, self.steps, self.tokens, self.links.held)
            effects.append(ev.Send(self.identity.hello(*told)))
        if not self.online:
            return effects
        self.links.retry(now)
        effects += [e for link in self.links.fetching() for e in link.ask(now, self._jitter())]
        stopped = self.farewell.asked or self.should_stop
        effects += self.links.decline(self._warming or self._paused, stopped=stopped)
        if now >= self._pace.report_at():
            effects.append(self._report(now))
        return effects

    def _report(self, now: float) -> ev.Effect:
        return ev.Send(self._pace.report(self.tokens, self.ledger.total(), now))

    def _rejoin(self, now: float) -> None:
        """The session is gone; training goes on, and so do the Hellos."""
        if self.online:
            self._dialer.lose(now)
            self.waits_for = "the broker to come back"

    # The end.

    def _bye(self, now: float) -> list[ev.Effect]:
        if self._dialer.closed:
            return []
        effects = [*self.farewell.go(self.phase, self.links), *self.links.close()]
        if self.online:
            effects += [self._report(now), ev.Send(msg.Bye(self.farewell.reason(self.phase)))]
        self._dialer.connection = Connection.LEFT
        return [*effects, ev.Left()]
